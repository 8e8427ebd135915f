"""Weight files that are absent, damaged or foreign are found before a tensor is read, and named."""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers import DECODERS, P24, TOLERANCE, copy_of, decoder, numpy, reference_logits

both = pytest.mark.parametrize("which", DECODERS)
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00005.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 269060552\n"


@pytest.fixture(scope="module")
def whole(strong, tmp_path_factory) -> Path:
    """A qwen3 checkpoint in five shards; tests damage copies of it."""
    path = copy_of(strong("qwen3"), tmp_path_factory.mktemp("shards") / "m")
    (path / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(strong("qwen3"), dtype=torch.float32).save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) == 5
    return path


@pytest.fixture
def shards(whole, tmp_path) -> Path:
    return copy_of(whole, tmp_path / "m")


@pytest.fixture
def single(strong, tmp_path) -> Path:
    return copy_of(strong("llama"), tmp_path / "m")


def refusal(which: str, path, error: str = "CheckpointError") -> str:
    """The message with which loading is refused; no tensor may have been read by then."""
    module = importlib.import_module(f"{DECODERS[which].__name__}.checkpoint")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(getattr(DECODERS[which], error)) as caught:
        patch.setattr(module, "safe_open", lambda *_, **__: pytest.fail("a weight file was opened before all of them were checked"))
        decoder(which, path)
    return str(caught.value)


def edit_index(path: Path, change) -> None:
    file = path / INDEX
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


@both
def test_shards_load_like_one_file(which, whole):
    with decoder(which, whole) as d:
        assert np.abs(numpy(d.score([P24]))[0] - reference_logits(whole, P24)).max() < TOLERANCE


@both
def test_a_shard_that_the_index_names_is_absent(which, shards):
    """Going on with the files that exist would leave memory unfilled."""
    (shards / SECOND).unlink()
    message = refusal(which, shards)
    assert SECOND in message and INDEX in message


@both
def test_all_absent_shards_are_named_at_once(which, shards):
    (shards / SECOND).unlink()
    (shards / SECOND.replace("00002", "00004")).unlink()
    message = refusal(which, shards)
    assert SECOND in message and "model-00004-of-00005" in message


@both
def test_a_shard_is_absent_and_so_is_the_index(which, shards):
    (shards / SECOND).unlink()
    (shards / INDEX).unlink()
    message = refusal(which, shards)
    assert str(shards) in message and "4 shards" in message and "5" in message


@both
def test_empty_directory(which, tmp_path):
    message = refusal(which, tmp_path)
    assert str(tmp_path) in message and "config.json" in message


@both
def test_directory_with_only_a_config(which, single):
    (single / "model.safetensors").unlink()
    message = refusal(which, single)
    assert str(single) in message
    assert "model.safetensors" in message and INDEX in message and "*.safetensors" in message


@both
@pytest.mark.parametrize("kind", ["absent", "file"])
def test_no_directory(which, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        Path("model").write_text("x")
    message = refusal(which, "model")
    assert str(tmp_path / "model") in message, "a relative name does not tell where the program looked"


@both
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickle_files_are_refused(which, name, single):
    """A pickle file can run code when it is opened."""
    torch.save(load_file(single / "model.safetensors"), single / name)
    (single / "model.safetensors").unlink()
    message = refusal(which, single)
    assert name in message and "pickle" in message


@both
def test_index_that_names_a_pickle_file_is_refused(which, shards):
    edit_index(shards, lambda index: index["weight_map"].update({"model.norm.weight": "pytorch_model.bin"}))
    message = refusal(which, shards)
    assert "pytorch_model.bin" in message and "pickle" in message and INDEX in message


@both
@pytest.mark.parametrize("target", ["../outside.safetensors", "/etc/outside.safetensors", "sub/outside.safetensors", "..", "", 3, None])
def test_index_may_not_leave_the_directory(which, target, shards):
    (shards.parent / "outside.safetensors").write_bytes((shards / SECOND).read_bytes())
    edit_index(shards, lambda index: index["weight_map"].update({"model.norm.weight": target}))
    message = refusal(which, shards)
    assert INDEX in message and "model.norm.weight" in message and repr(target) in message


@both
@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_index_without_a_map(which, content, shards):
    (shards / INDEX).write_text(json.dumps(content))
    message = refusal(which, shards)
    assert INDEX in message and "weight_map" in message


@both
def test_index_that_puts_a_tensor_into_the_wrong_file(which, shards):
    edit_index(shards, lambda index: index["weight_map"].update({"model.norm.weight": "model-00001-of-00005.safetensors"}))
    message = refusal(which, shards)
    assert "model.norm.weight" in message and "model-00001-of-00005.safetensors" in message


@both
def test_a_tensor_in_two_shards_is_named(which, shards):
    """Whichever came last would win in silence."""
    file = shards / "model-00001-of-00005.safetensors"
    extra = {"model.norm.weight": torch.zeros(64)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    message = refusal(which, shards)
    assert "model.norm.weight" in message and file.name in message


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGE = {
    "cut in half": (cut, "cut off"),
    "one byte short": (lambda b: b[:-1], "cut off"),
    "one byte long": (lambda b: b + b"\0", "expected"),
    "cut in the header": (lambda b: b[:100], "cut off"),
    "five bytes": (lambda b: b[:5], "cut off"),
    "empty": (lambda b: b"", "empty"),
    "pointer": (lambda b: POINTER, "LFS pointer"),
    "web page": (lambda b: b"<!DOCTYPE html><html>not found</html>", "not a"),
    "header of noise": (lambda b: b[:8] + b"\xff" * (len(b) - 8), "header"),
    "header is a list": (lambda b: struct.pack("<Q", 2) + b"[]", "header"),
}


@both
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_with_its_size_and_the_cause(which, damage, single):
    """The library's own 'header too large' names no file."""
    change, cause = DAMAGE[damage]
    file = single / "model.safetensors"
    content = change(file.read_bytes())
    file.write_bytes(content)
    message = refusal(which, single)
    assert str(file) in message and f"{len(content)} bytes" in message and cause in message


@both
@pytest.mark.parametrize("damage", ["cut in half", "empty", "pointer"])
def test_a_damaged_shard_is_named(which, damage, shards):
    """Without the name the user must fetch every shard again."""
    change, cause = DAMAGE[damage]
    content = change((shards / SECOND).read_bytes())
    (shards / SECOND).write_bytes(content)
    message = refusal(which, shards)
    assert SECOND in message and f"{len(content)} bytes" in message and cause in message
    assert "model-00001" not in message, "the other shards are whole"


@both
def test_two_damaged_shards_are_reported_together(which, shards):
    (shards / SECOND).write_bytes(b"")
    (shards / SECOND.replace("00002", "00003")).write_bytes(POINTER)
    message = refusal(which, shards)
    assert SECOND in message and "model-00003-of-00005" in message


def rewrite_header(file: Path, change) -> None:
    """Change the header and keep the data; the file's length stays consistent."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def short_norm(header: dict) -> None:
    start, _ = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [start, start + 128]


LIES = {
    "fewer bytes than the shape needs": short_norm,
    "an element type of another size": lambda h: h["model.norm.weight"].update(dtype="F16"),
    "offsets that run backwards": lambda h: h["model.norm.weight"].update(data_offsets=h["model.norm.weight"]["data_offsets"][::-1]),
    "no offsets": lambda h: h["model.norm.weight"].pop("data_offsets"),
    "a shape that is a word": lambda h: h["model.norm.weight"].update(shape="wide"),
}


@both
@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_contradicts_itself(which, lie, single):
    """The right total length does not make the file whole; the library's error names no file."""
    file = single / "model.safetensors"
    rewrite_header(file, LIES[lie])
    with pytest.raises(DECODERS[which].CheckpointError) as caught:
        decoder(which, single)
    assert "model.safetensors" in str(caught.value) or "model.norm.weight" in str(caught.value)


@both
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("damage", ["cut in half", "empty", "pointer", "binary", "list"])
def test_a_damaged_json_file_is_named(which, name, damage, shards):
    file = shards / name
    content = {"cut in half": cut(file.read_bytes()), "empty": b"", "pointer": POINTER, "binary": b"\xff\xfe\x00", "list": b"[]"}[damage]
    file.write_bytes(content)
    message = refusal(which, shards)
    assert str(file) in message and "fetch it again" in message
    if damage != "list":
        assert f"{len(content)} bytes" in message


@both
def test_a_stray_file_beside_a_single_one_is_not_read(which, single):
    """Some publishers put a second copy of the weights under another name beside the first."""
    (single / "consolidated.safetensors").write_bytes(b"")
    with decoder(which, single) as d:
        assert d.config.family == "llama"


@both
@pytest.mark.parametrize("form", ["m", "./m", "../{parent}/m", "~/m", "m/", "Path"])
def test_a_path_means_what_it_means_in_the_shell(which, form, strong, tmp_path, monkeypatch):
    path = copy_of(strong("llama"), tmp_path / "with a space" / "m")
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("HOME", str(path.parent))
    given = Path("m") if form == "Path" else form.format(parent=path.parent.name)
    with decoder(which, given) as d:
        assert d.config.hidden_size == 64
    assert [p.name for p in path.parent.iterdir()] == ["m"]
