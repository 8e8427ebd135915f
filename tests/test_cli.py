"""The command lines of both decoders: exit codes, one line on stderr, and the fields of --json."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from tests.helpers import DECODERS, DEMO, ROOT, copy_of
from tests.test_text import TEXT, make_parrot, save_byte_tokenizer

FIELDS = {"prompt_token_ids", "token_ids", "text", "finish_reason", "error", "launch", "timings"}
SMALL = ["--dtype", "float32", "--device", "cpu", "--max-seq-len", "64"]


@pytest.fixture(scope="module")
def parrot(strong, tmp_path_factory):
    """A model that answers ">" with TEXT followed by "|"."""
    path = save_byte_tokenizer(copy_of(strong("llama"), tmp_path_factory.mktemp("command-line") / "model"))
    make_parrot(path, f">{TEXT}|")
    return path


def process(which: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"{which}_decoder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, encoding="utf-8")


def call(which: str, capsys, *arguments: str) -> tuple[int, str, str]:
    """The same in this process: exit code, stdout, stderr."""
    code = importlib.import_module(f"{which}_decoder.__main__").main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("which", DECODERS)
def test_the_text_is_streamed_to_stdout(which, parrot):
    done = process(which, ">", "--model", str(parrot), *SMALL, "--max-new-tokens", "20", "--stop", "|")
    assert (done.returncode, done.stdout) == (0, TEXT + "\n"), done.stderr


@pytest.mark.parametrize("which", DECODERS)
def test_a_missing_model_is_one_line_and_exit_code_2(which, tmp_path):
    done = process(which, "hi", "--model", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{which}_decoder: ") and str(tmp_path / "none") in line


@pytest.mark.parametrize("which", DECODERS)
def test_json_holds_every_field(which, parrot, capsys):
    code, out, _ = call(which, capsys, ">", "--model", str(parrot), *SMALL, "--max-new-tokens", "10", "--json")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert code == 0 and set(found) == FIELDS
    assert found["prompt_token_ids"] == [ord(">")] and found["token_ids"] == list(TEXT.encode())
    assert (found["text"], found["finish_reason"], found["error"]) == (TEXT, "length", None)
    assert set(found["timings"]) == {"load_s", "generate_s", "tokens_per_s"} and all(x > 0 for x in found["timings"].values())


@pytest.mark.parametrize("which", DECODERS)
def test_chat_sends_the_prompt_through_the_template(which, parrot, capsys):
    code, out, _ = call(which, capsys, "hi", "--chat", "--model", str(parrot), *SMALL, "--max-new-tokens", "1", "--json")
    assert code == 0 and json.loads(out)["prompt_token_ids"] == list(b"user:hi;a:")


@pytest.mark.parametrize("which", DECODERS)
def test_a_seed_fixes_what_is_sampled(which, parrot, capsys):
    settings = (">", "--model", str(parrot), *SMALL, "--max-new-tokens", "8", "--temperature", "50", "--json")
    tokens = [json.loads(call(which, capsys, *settings, "--seed", seed)[1])["token_ids"] for seed in ("1", "2", "1")]
    assert tokens[0] == tokens[2] != tokens[1]


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--seed", "-1"], "seed"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--max-new-tokens", "100"], "64"),
        (["--dtype", "int4"], "dtype"),
        (["--device", "nowhere"], "device"),
        (["--launch", "none"], "launch"),
        (["--kernels", "none"], "kernels"),
        (["--stop", ""], "stop"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(which, arguments, named, parrot, capsys):
    code, out, err = call(which, capsys, ">", "--model", str(parrot), *SMALL, *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"{which}_decoder: ") and named in line


@pytest.mark.parametrize("which", DECODERS)
def test_many_problems_are_still_one_line(which, parrot, tmp_path, capsys):
    """A message of the library may have a line for each tensor; a log keeps one line together."""
    path = copy_of(parrot, tmp_path / "model")
    (path / "model.safetensors").write_bytes(b"")
    code, _, err = call(which, capsys, ">", "--model", str(path), *SMALL)
    assert code == 2 and len(err.splitlines()) == 1 and "model.safetensors" in err


@pytest.mark.parametrize("which", DECODERS)
def test_an_unknown_option_is_exit_code_2(which, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(which, capsys, "hi", "--no-such-option")
    assert stopped.value.code == 2


@pytest.mark.demo
@pytest.mark.parametrize("which", DECODERS)
def test_the_demo_model_answers(which):
    arguments = ("What is the capital of France?", "--chat", "--model", str(DEMO), *SMALL, "--max-new-tokens", "12", "--json")
    done = process(which, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout.splitlines()[-1])["text"]
