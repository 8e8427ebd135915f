"""The harness: each verdict belongs to the variant that was timed, clocks are honest, files are whole."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from compare import results, timing
from compare.arms import DecoderArm, open_arms
from compare.bench import idle, judge_all
from compare.claims import CLAIMS
from compare.cli import main, xla_settings
from compare.environment import cuda_visible
from compare.gains import gains
from compare.line import Line
from compare.models import encode_prompts
from compare.parity import Reference, differing_bits
from compare.peer import measure_transformers
from compare.report import headline, render
from compare.run import Plan, compare, measure
from compare.timing import MeasurementError, cpu_use, harness_us, time_steps
from compare.workload import VARIANTS, Variant, Workload, why_not
from jax_decoder import xla_flags
from tests.helpers import copy_of, edit_config, edit_tensors, numpy
from tests.recorders import graph_decoder

NO_GPU = {"torch": False, "jax": False, "transformers": False}
ARMS = (Variant("torch", "eager"), Variant("jax", "jit"), Variant("jax", "op_by_op"))


@pytest.fixture(scope="module")
def workload(strong):
    return Workload(str(strong("qwen2")), batch=3, new_tokens=8, max_seq_len=32)


@pytest.fixture(scope="module")
def reference(workload, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "reference.npz"
    job = {"reference": str(path), "prompts": encode_prompts(workload), "variants": [Variant("transformers", "eager").as_dict()], "rounds": 1, "repeats": 1}
    peer = measure_transformers(workload, job, Line(io.StringIO(), io.StringIO("go\n")))
    return {"peer": peer, "prompts": job["prompts"], **{k: v for k, v in np.load(path).items()}}


def make_arms(workload, reference, variants=ARMS):
    return [DecoderArm(v, workload, reference["prompts"], reference["tokens"].tolist()) for v in variants]


@pytest.fixture(scope="module")
def result(workload):
    return compare(workload, [v for v in VARIANTS if v.kernels == "plain"], Plan(rounds=2, repeats=1))


# ---- verdicts ----------------------------------------------------------------------------------


def test_the_peer_is_judged_on_its_own_steps(reference):
    assert reference["peer"][0]["parity"]["verdict"] == "pass"
    assert reference["logits"].shape == (8, 3, 256)


@pytest.mark.parametrize("broken", range(len(ARMS)))
def test_a_broken_step_fails_its_own_variant_alone(broken, workload, reference):
    """The fault sits in what is timed, so a verdict from any other run of the model would miss it."""
    arms = make_arms(workload, reference)
    runner = arms[broken].decoder._runner
    step = runner.step

    def one_logit_off(state, *arguments):
        state = step(state, *arguments)
        if arms[broken].variant.framework == "jax":
            return state._replace(logits=state.logits.at[1, 7].add(0.01))
        state.logits[1, 7] += 0.01
        return state

    runner.step = one_logit_off
    verdicts = [v.verdict for v in judge_all(arms, workload, Reference(reference["logits"]))]
    assert verdicts == ["fail" if i == broken else "pass" for i in range(len(ARMS))]


def test_a_loop_is_judged_by_what_it_leaves(strong, monkeypatch):
    """Single steps of a device_loop decoder run another graph than the one that is timed."""
    workload = Workload(str(strong("qwen2")), batch=1, new_tokens=20, max_seq_len=32)
    forced = [[(7 * i) % 256 for i in range(20)]]
    opened = graph_decoder(strong("qwen2"), launch="device_loop", max_batch=1, max_seq_len=32)
    monkeypatch.setattr("compare.arms.open_decoder", lambda *arguments, **options: opened)
    arm = DecoderArm(Variant("torch", "device_loop"), workload, [[1, 2, 3]], forced)
    good = arm.logits()
    assert good.shape == (20, 1, 256) and opened.launch_report()["fallbacks"] == []
    advance = opened._runner.advance

    def one_logit_off(state, kind, live_rows, steps, **rest):
        state = advance(state, kind, live_rows, steps, **rest)
        if steps > 1:
            state.logits[0, 7] += 0.01
        return state

    opened._runner.advance = one_logit_off
    changed = np.argwhere(arm.logits() != good)
    assert changed.tolist() == [[8, 0, 7], [16, 0, 7]]
    opened.close()


def test_forced_tokens_are_what_the_steps_follow(workload, reference):
    """Rows of different lengths take the reference's tokens, not their own, from the first step on."""
    (arm,) = make_arms(workload, reference, ARMS[:1])
    forced = (reference["tokens"] + 1) % 256
    arm.forced = forced.tolist()
    assert not np.allclose(arm.logits()[1:], reference["logits"][1:])
    assert [row[row >= 0].tolist() for row in numpy(arm.handle.ring)] == forced.tolist()


# ---- clocks ------------------------------------------------------------------------------------


class FakeArm:
    """Steps that take effect when they are waited for, as on a device."""

    def __init__(self, step_s: float, compiles_at: int | None = None):
        self.step_s, self.compiles_at, self.done, self.queued, self.restarts = step_s, compiles_at, 0, 0, 0

    def restart(self) -> None:
        self.restarts += 1

    def steps(self, count: int) -> None:
        self.done += count
        self.queued += count

    def wait(self) -> None:
        time.sleep(self.step_s * self.queued)
        self.queued = 0

    def doze(self) -> None:
        self.wait()

    def mark(self) -> None:
        return None

    def compilations(self) -> int:
        return int(self.compiles_at is not None and self.done >= self.compiles_at)


def test_the_clock_waits_for_the_device():
    """A clock that stopped when the calls return would read microseconds for both."""
    short, long = time_steps([FakeArm(0.002), FakeArm(0.02)], rounds=4, steps_available=64)
    assert 2 <= short["step_ms"]["p50"] < 10 and 20 <= long["step_ms"]["p50"] < 40
    assert short["host_dispatch_us"] < 500


class Event:
    """A CUDA event of a device whose clock says ``ms`` between any two."""

    def __init__(self, ms: float):
        self.ms = ms

    def elapsed_time(self, end: Event) -> float:
        return self.ms


def test_a_device_clock_that_contradicts_the_hosts_is_an_error():
    arm = FakeArm(0.005)
    arm.mark = lambda: Event(4 * 5.0)
    (found,) = time_steps([arm], rounds=3, steps_available=64)
    assert found["event_ms"] == pytest.approx(5.0) and found["step_ms"]["p50"] >= 5.0
    arm.mark = lambda: Event(4 * 50.0)
    with pytest.raises(MeasurementError, match="one of them is wrong"):
        time_steps([arm], rounds=3, steps_available=64)


def test_idle_time_is_what_the_untraced_step_leaves():
    step = {"step_ms": {"p50": 2.0}}
    assert idle(step, {"busy_us": 500.0}) == {"device_busy_us": 500.0, "launch_gap_us": 1500.0, "idle_share": 0.75}
    assert idle(step, {"busy_us": 2050.0})["idle_share"] == 0.0, "within what tracing may stretch"
    assert "idle_share" not in idle(step, {"busy_us": 2500.0}) and "stretched" in idle(step, {"busy_us": 2500.0})["idle_not_measured"]
    assert idle(step, {"not_measured": "no CUPTI"}) == {}


def test_the_harness_adds_little():
    assert 0 < harness_us(32) < 2, "µs a step"


def test_a_wait_that_spins_is_told_from_one_that_dozes():
    class Spinning(FakeArm):
        def wait(self) -> None:
            until = time.process_time() + self.step_s * self.queued
            while time.process_time() < until:
                pass
            self.queued = 0

        def doze(self) -> None:
            FakeArm.wait(self)

    (use,) = cpu_use([Spinning(0.02)], 8)
    assert use["spinning_ms"] >= 20 and use["dozing_ms"] < 10
    assert use["spinning_share"] > use["dozing_share"] and use["dozing_share"] < 0.5


def test_more_repetitions_do_not_change_the_median():
    medians = [time_steps([FakeArm(0.02)], rounds, 64)[0]["step_ms"]["p50"] for rounds in (1, 2, 25)]
    assert max(medians) < 1.3 * min(medians)


def test_a_compilation_inside_the_measurement_is_an_error():
    with pytest.raises(MeasurementError, match="compilations inside"):
        time_steps([FakeArm(0.0, compiles_at=9)], rounds=4, steps_available=64)


def test_a_compilation_during_warm_up_is_none():
    assert time_steps([FakeArm(0.0, compiles_at=2)], rounds=4, steps_available=64)


def test_arms_are_interleaved_and_turned_around(monkeypatch):
    order = []
    arms = [FakeArm(0.0), FakeArm(0.0)]
    original = timing._block
    monkeypatch.setattr(timing, "_block", lambda arm, block: order.append(arms.index(arm)) or original(arm, block))
    time_steps(arms, rounds=4, steps_available=64)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0]


def test_rows_never_run_past_their_forced_tokens():
    arm = FakeArm(0.0)
    time_steps([arm], rounds=10, steps_available=16)
    assert arm.restarts == 4  # one warm-up, then 10 blocks, 4 at a time


def test_time_grows_with_the_layers(strong):
    """Twelve times the layers take several times as long, whatever the fixed cost of a step is."""
    quickest = []  # of steps and of generations: a busy machine makes single ones several times longer
    for layers in (2, 24):
        workload = Workload(str(strong("llama", num_hidden_layers=layers, hidden_size=128, intermediate_size=512)), new_tokens=16, max_seq_len=32)
        arm = DecoderArm(Variant("torch", "eager"), workload, [[1, 2, 3]], [[7] * 16])
        quickest.append(min(time_steps([arm], rounds=6, steps_available=15)[0]["step_ms"]["samples"]))
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            arm.generate()
            seconds.append(time.perf_counter() - started)
        assert quickest[-1] / 3 < min(seconds) / 16 * 1e3 < quickest[-1] * 3
    assert quickest[1] > 3 * quickest[0]


# ---- result files ------------------------------------------------------------------------------


def test_a_run_measures_what_is_here_and_says_why_not_elsewhere(result, workload):
    by_label = {Variant(v["framework"], v["launch"], v["kernels"]).label(): v for v in result["variants"]}
    for label in ("transformers eager plain", "torch eager plain", "jax op_by_op plain", "jax jit plain"):
        v = by_label[label]
        assert v["parity"]["verdict"] == "pass", v
        assert v["step_ms"]["p10"] <= v["step_ms"]["p50"] <= v["step_ms"]["p90"]
        assert v["tokens_per_s"] > 0 and v["matmul_precision"] == "ieee float32"
    assert by_label["jax jit plain"]["compile_s"] > 0 and by_label["jax jit plain"]["compilations_while_timed"] == 0
    for label in ("torch cuda_graph plain", "jax command_buffer plain"):
        variant = next(v for v in VARIANTS if v.label() == label)
        assert why_not(variant, NO_GPU) == "no CUDA device"
        if cuda_visible()[variant.framework]:
            assert by_label[label]["parity"]["verdict"] == "pass" and "step_ms" in by_label[label]
        else:
            assert by_label[label]["not_measured"] == "no CUDA device"
    assert result["workload"] == asdict(workload)
    assert {"cpu", "gpu", "versions", "xla_flags", "commit"} <= set(result["environment"])


class FakeWorker:
    """Writes down what is asked of it; the reference's worker makes its file."""

    said: ClassVar[list[str]] = []

    def __init__(self, job, folder, environ):
        self.job, self.name, self.is_ready = job, job["framework"], False
        self.said.append(f"{self.name} starts")

    def hear(self, event):
        Path(self.job["reference"]).touch()

    def ready(self):
        if not self.is_ready:
            self.said.append(f"{self.name} ready")
        self.is_ready = True

    def tell(self, word):
        self.said.append(f"{word} to {self.name}")

    def result(self):
        self.said.append(f"{self.name} ends")
        return [self.name]

    def close(self):
        pass


@pytest.mark.parametrize("together", [True, False])
def test_nothing_prepares_while_a_worker_is_timed(together, tmp_path, monkeypatch):
    monkeypatch.setattr("compare.run.Worker", FakeWorker)
    FakeWorker.said.clear()
    names = ("transformers", "torch", "jax")
    jobs = [{"framework": name, "reference": str(tmp_path / "reference.npz"), "xla_flags": "", "variants": []} for name in names]
    assert measure(jobs, tmp_path, together) == list(names)
    said = FakeWorker.said
    for i, name in enumerate(names):
        go, end = said.index(f"go to {name}"), said.index(f"{name} ends")
        assert end == go + 1 and said.index(f"{name} ready") < go
        for other in names[i + 1 :]:
            assert (said.index(f"{other} ready") < go) if together else (said.index(f"{other} starts") > end)
            assert said.index(f"reference to {other}") < said.index(f"{other} ready")


@pytest.mark.parametrize("together", [True, False])
def test_an_interruption_keeps_what_was_measured(together, tmp_path, monkeypatch, strong, capsys):
    """Ctrl-C while torch is timed: the file has transformers' figures, and says why the others have none."""

    class Stopped(FakeWorker):
        def result(self):
            if self.name == "torch":
                raise KeyboardInterrupt
            return [{**v, "batch": 1, "bucket": 1, **clocks} for v in self.job["variants"]]

    clocks = {"step_ms": {"p10": 1, "p50": 1, "p90": 1, "samples": [1]}, "tokens_per_s": 1, "parity": {"verdict": "pass", "max_abs": 0, "reason": ""}}
    monkeypatch.setattr("compare.run.Worker", Stopped)
    monkeypatch.setattr("compare.run.ROOM", float("inf") if together else -1)
    words = ["run", "--model", str(strong("llama")), "--only", "eager", "jit", "--without", "compiled", "fused", "--out", str(tmp_path / "run.json")]
    assert main(words) == 2
    assert "interrupted" in capsys.readouterr().err
    found = {v["framework"]: v for v in results.load(tmp_path / "run.json")["variants"]}
    assert "step_ms" in found["transformers"] and found["torch"]["not_measured"] == found["jax"]["not_measured"] == "interrupted before it was timed"


def test_an_interruption_before_anything_was_measured_writes_nothing(tmp_path, monkeypatch, strong):
    class Stopped(FakeWorker):
        def result(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("compare.run.Worker", Stopped)
    assert main(["run", "--model", str(strong("llama")), "--only", "transformers", "--out", str(tmp_path / "run.json")]) == 2
    assert not (tmp_path / "run.json").exists()


def test_no_variant_is_begun_after_the_limit(workload, reference):
    arms, failures = open_arms(workload, ARMS, reference["prompts"], reference["tokens"].tolist(), limit_s=0.0)
    assert arms == [] and [f["launch"] for f in failures] == [v.launch for v in ARMS]
    assert all("--prepare-limit" in f["not_measured"] for f in failures)


def test_workers_one_by_one_measure_the_same(workload, monkeypatch):
    monkeypatch.setattr("compare.run.ROOM", -1)
    result = compare(workload, ARMS[:2], Plan(rounds=1, repeats=1))
    assert [v["parity"]["verdict"] for v in result["variants"]] == ["pass", "pass"]


def test_a_result_survives_the_file(result, tmp_path):
    results.save(result, tmp_path / "deep" / "run.json")
    assert results.load(tmp_path / "deep" / "run.json") == json.loads(json.dumps(result))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["run.json"]


def test_a_latency_without_a_verdict_is_refused(result):
    edited = copy.deepcopy(result)
    del edited["variants"][0]["parity"]
    with pytest.raises(results.ResultError, match="no parity verdict"):
        results.check(edited, "edited")


@pytest.mark.parametrize("damage", ["cut", "schema", "missing", "empty variant", "absent"])
def test_damaged_files_are_named(damage, result, tmp_path, capsys):
    path, broken = tmp_path / "run.json", copy.deepcopy(result)
    if damage == "schema":
        broken["schema_version"] = 99
    if damage == "missing":
        del broken["environment"]
    if damage == "empty variant":
        broken["variants"].append({k: broken["variants"][0][k] for k in ("framework", "launch", "kernels", "sampling", "batch", "bucket")})
    text = json.dumps(broken)
    if damage != "absent":
        path.write_text(text[: len(text) // 2] if damage == "cut" else text)
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compare: ") and error.count("\n") == 1 and str(path) in error
    assert not (tmp_path / "page.html").exists()


# ---- report ------------------------------------------------------------------------------------


def test_the_page_stands_alone_and_shows_every_variant(result):
    page = render([result])
    assert not re.search(r'(?:src|href)="(?!data:|#)', page) and "@import" not in page
    assert page.count('<svg role="img" aria-label="') == 2
    regions = next(v["memory_map"] for v in result["variants"] if "memory_map" in v)
    assert page.count("<tr><td>") == len(result["variants"]) + len(gains(result)) + len(regions) and page.count('<tr><td class="long">') == len(CLAIMS)


def test_text_from_files_is_escaped(result):
    hostile = copy.deepcopy(result)
    hostile["workload"]["model"] = "<script>alert(1)</script>"
    hostile["variants"][0]["parity"]["reason"] = '"><img src=x onerror=alert(2)>'
    page = render([hostile])
    assert "<script>alert(1)" not in page and "<img" not in page


def test_the_headline_names_a_failed_variant(result):
    broken = copy.deepcopy(result)
    arm = next(v for v in broken["variants"] if v["framework"] == "jax" and "parity" in v)
    arm["parity"]["verdict"] = "fail"
    arm["tokens_per_s"] = 1e9
    first, second = headline(broken)[:2]
    assert "jax" in first and "do not" in first
    assert "1000000000" not in second, "a fast wrong answer is no record"


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_page_opens_in_a_browser_without_a_complaint(result, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(render([result]))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr and done.stdout.count("<svg") == 2


# ---- command line ------------------------------------------------------------------------------


def test_run_exits_1_when_a_variant_fails(strong, tmp_path, monkeypatch, capsys):
    """A verdict of fail must reach the shell: here the bar is made impossible to meet."""
    monkeypatch.setattr("compare.run.measure", _failing)
    arguments = ["run", "--model", str(strong("llama")), "--only", "transformers", "--out", str(tmp_path / "run.json"), "--json"]
    assert main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["variants"][0]["parity"]["verdict"] == "fail"


def _failing(jobs, folder, together, turns):
    clocks = {"step_ms": {"p10": 1, "p50": 1, "p90": 1, "samples": [1]}, "tokens_per_s": 1, "parity": {"verdict": "fail", "max_abs": 1, "reason": ""}}
    return [{**v, "batch": 1, "bucket": 1, **clocks} for job in jobs for v in job["variants"]]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run", "--model", "/no/such/model"], "/no/such/model"),
        (["run", "--dtype", "int8"], "int8"),
        (["run", "--batch", "0"], "batch"),
        (["run", "--new-tokens", "4"], "new_tokens"),
        (["run", "--prompt-tokens", "500"], "prompt_tokens"),
        (["parity", "--model", "/no/such/model"], "/no/such/model"),
        (["run", "--only", "nothing"], "nothing: no variant's label holds that"),
        (["run", "--only", "torch", "--without", "torch"], "--without torch leaves no variant"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, word, capsys, strong):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", str(strong("llama"))]
        capsys.readouterr()  # making the checkpoint may have shown its progress
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


def test_parity_on_the_command_line_names_the_stage(strong, tmp_path, capsys):
    damaged = copy_of(strong("qwen3"), tmp_path / "damaged")
    edit_tensors(damaged, lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].mul_(1.01))
    assert main(["parity", "--model", str(strong("qwen3")), "--framework", "torch"]) == 0
    assert main(["parity", "--model", str(damaged), "--reference", str(strong("qwen3")), "--framework", "jax"]) == 1
    assert "FAIL at layers.2.mlp, index [" in (out := capsys.readouterr().out) and "up_proj" in out


def test_doctor_says_why_a_variant_cannot_run(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["variants"]) == {v.label() for v in VARIANTS}
    assert found["cuda"]["torch"] or found["variants"]["torch cuda_graph plain"] == "no CUDA device"
    assert {name for name, known in found["xla_flags"].items() if not known} <= {xla_flags.EARLY[1]}


def test_the_stop_ids_of_a_checkpoint_do_not_shorten_a_measurement(strong, tmp_path):
    """A row that met its stop id would stand still and be timed all the same."""
    path = copy_of(strong("qwen2"), tmp_path / "stops")
    edit_config(path, eos_token_id=list(range(0, 256, 17)))
    result = compare(Workload(str(path), batch=2, new_tokens=12, max_seq_len=32), [Variant("transformers", "eager"), Variant("torch", "eager")], Plan(rounds=1, repeats=1))
    assert [v["parity"]["verdict"] for v in result["variants"]] == ["pass", "pass"]
    assert result["variants"][1]["parity"]["positions"] == 24


# ---- flags and tables --------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["xla_gpu_no_such_flag=1", "=3", "xla_gpu_autotune_level"])
def test_an_xla_flag_that_is_unknown_or_no_pair_is_an_error(word, capsys):
    """Found before a worker starts: XLA would end that process without an exception."""
    assert main(["run", "--model", "shape:qwen3-0.6b", "--xla-flag", word]) == 2
    error = capsys.readouterr().err
    assert (word.partition("=")[0] or "NAME=VALUE") in error and error.count("\n") == 1


def test_xla_flags_come_as_options_or_as_the_environment():
    assert xla_settings(["xla_gpu_autotune_level=0"], False) == ("", {"xla_gpu_autotune_level": "0"})
    flags, options = xla_settings(["--xla_gpu_graph_min_graph_size=9"], True)
    assert options == {} and "--xla_gpu_graph_min_graph_size=9" in flags and "=+WHILE " in flags and flags.endswith("separate_color=true")


def test_flags_reach_the_worker_and_the_result(workload):
    """A worker that did not get them would succeed here."""
    result = compare(workload, [Variant("jax", "jit")], Plan(1, 1, xla_flags="--xla_no_such_flag=1"))
    assert "no_such_flag" in result["variants"][0]["not_measured"] and "no_such_flag" in result["environment"]["xla_flags"]


def test_bits_that_differ_are_counted():
    one = np.float32([1.0, -0.0, 3.0])
    other = one.copy()
    other.view(np.uint32)[2] ^= 5
    assert differing_bits(one, one) == 0 and differing_bits(one, other) == 2 and differing_bits(one, np.abs(one)) == 1
