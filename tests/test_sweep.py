"""Sweeps: which points there are, going on where a killed one stopped, and what is read from them."""

from __future__ import annotations

import json
import threading

import pytest

from compare import results, series, sweep
from compare.arguments import SWEEPS
from compare.cli import main
from compare.evidence import FAILS, HOLDS, short_generations
from compare.models import encode_prompts
from compare.results import ResultError
from compare.run import Plan
from compare.workload import Variant, Workload
from jax_decoder import ConfigError
from tests.results import entry, run

EAGER, JIT = Variant("torch", "eager"), Variant("jax", "jit")
SHAPE = Workload("shape:qwen3-0.6b", "bfloat16", 1, 32, 64)


@pytest.fixture
def asked(monkeypatch):
    """Stands in for the comparison: notes what it was asked."""
    calls = []

    def fake(workload, variants, plan, turns=None):
        calls.append(workload)
        made = run(entry("torch eager plain", float(workload.batch)), entry("jax jit plain", 1.0))
        return {**made, "workload": json.loads(json.dumps(workload.__dict__))}

    monkeypatch.setattr(sweep, "compare", fake)
    return calls


def test_the_command_line_names_every_sweep():
    assert set(SWEEPS) == set(sweep.SWEEPS)


def test_a_killed_sweep_goes_on_where_it_stopped(asked, tmp_path, monkeypatch):
    complete = sweep.compare

    def killed(workload, variants, plan, turns=None):
        if workload.batch == 8:
            raise KeyboardInterrupt
        return complete(workload, variants, plan)

    monkeypatch.setattr(sweep, "compare", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path)
    assert [w.batch for w in asked] == [1, 2, 4]
    monkeypatch.setattr(sweep, "compare", complete)
    found = sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path)
    assert [w.batch for w in asked] == [1, 2, 4, 8, 16, 32, 64] == [r["workload"]["batch"] for r in found]


def test_points_prepared_side_by_side_are_the_same_points(asked, tmp_path):
    found = sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path, at_once=3)
    assert [r["workload"]["batch"] for r in found] == [1, 2, 4, 8, 16, 32, 64]
    assert sorted(w.batch for w in asked) == [1, 2, 4, 8, 16, 32, 64] and len(list(tmp_path.iterdir())) == 7
    asked.clear()
    (tmp_path / "batch-8.json").unlink()
    sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path, at_once=3)
    assert [w.batch for w in asked] == [8]


def test_a_damaged_point_and_one_of_another_question_are_measured_again(asked, tmp_path, caplog):
    sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path)
    (tmp_path / "batch-4.json").write_text((tmp_path / "batch-4.json").read_text()[:100])
    asked.clear()
    sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path)
    assert [w.batch for w in asked] == [4] and "measuring it again" in caplog.text
    asked.clear()
    sweep.run_sweep("batch", SHAPE, [EAGER], Plan(), tmp_path)
    assert len(asked) == 7


def test_points_ask_for_prompts_that_fill_the_cache():
    points = sweep.SWEEPS["context"].points(SHAPE, Plan())
    assert [w.max_seq_len for _, w, _ in points] == list(sweep.CONTEXTS)
    assert all(w.prompt_tokens + w.new_tokens == w.max_seq_len for _, w, _ in points)
    assert len(encode_prompts(points[1][1])[0]) == 480


def test_uneven_rows_three_ways():
    points = {value: w for value, w, _ in sweep.SWEEPS["lengths"].points(SHAPE, Plan())}
    assert {value: len(set(map(len, encode_prompts(w)))) for value, w in points.items()} == {"padded": 1, "longest row": 8, "maximum": 8}
    assert all(max(map(len, encode_prompts(w))) == 1024 for w in points.values())
    assert points["maximum"].max_seq_len == 4096 and points["padded"].max_seq_len == points["longest row"].max_seq_len == 1024 + SHAPE.new_tokens


@pytest.mark.parametrize(("batch", "longest", "expected"), [(1, 64, [64]), (2, 64, [8, 64]), (4, 5, [1, 3, 4, 5]), (3, 1, [1, 1, 1])])
def test_uneven_lengths_end_with_the_longest(batch, longest, expected):
    assert Workload("m", batch=batch, new_tokens=32, max_seq_len=128, prompt_tokens=longest, uneven=True).prompt_lengths() == expected


def test_uneven_prompts_need_a_length():
    with pytest.raises(ConfigError, match="prompt_tokens"):
        Workload("m", uneven=True)


def test_layers_need_a_shape_to_change(strong):
    with pytest.raises(ResultError, match="shape:NAME"):
        sweep.SWEEPS["layers"].points(Workload(str(strong("llama"))), Plan())
    assert sweep.SWEEPS["layers"].points(SHAPE, Plan())[0][1].model == "shape:qwen3-0.6b,num_hidden_layers=2"


@pytest.mark.parametrize("tokens", [0, 34])
def test_a_prompt_that_leaves_no_room_is_an_error(tokens):
    with pytest.raises(ConfigError, match="prompt_tokens"):
        Workload("m", new_tokens=32, max_seq_len=64, prompt_tokens=tokens)


def test_series_keep_verdicts_and_name_where_a_graph_begins_to_pay():
    eager, graph, loop = entry("torch eager plain", 2.0), entry("torch cuda_graph plain", 1.0), entry("torch device_loop plain", 1.0, "fail")
    eager["cold_generation_s"], graph["cold_generation_s"] = {"16": 0.1, "64": 0.4, "256": 1.6}, {"16": 0.05, "64": 0.45, "256": 0.9}
    loop["cold_generation_s"] = {"16": 0.01, "64": 0.02, "256": 0.03}
    found = [{**run(eager, graph, loop), "sweep": {"name": "new-tokens", "value": "all"}}]
    curves = series.series_of("new-tokens", found)[0].curves
    assert curves[0].variant == EAGER and curves[0].points == (("16", 0.1, "pass"), ("64", 0.4, "pass"), ("256", 1.6, "pass"))
    shown = "\n".join(series.lines("new-tokens", found))
    # Quicker at 16 by chance and slower at 64: it stays quicker from 256 on. What fails its parity check counts for nothing.
    assert "m, torch cuda_graph plain, capture included: quicker from 256 new tokens on than torch eager plain" in shown
    assert shown.count("parity fails") == 3 and shown.count("capture included") == 1
    assert short_generations(found, {})[1] == HOLDS
    graph["cold_generation_s"] = {"16": 0.05, "64": 0.2, "256": 0.9}
    assert short_generations([{**run(eager, graph), "sweep": {"name": "new-tokens", "value": "all"}}], {})[1] == FAILS


def test_a_point_that_cannot_be_measured_does_not_end_the_sweep(asked, tmp_path, monkeypatch):
    measure = sweep.compare

    def too_large(workload, variants, plan, turns=None):
        if workload.batch == 8:
            raise ResultError("no parity verdict can be given without a reference: out of memory")
        return measure(workload, variants, plan)

    monkeypatch.setattr(sweep, "compare", too_large)
    found = sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path)
    assert [w.batch for w in asked] == [1, 2, 4, 16, 32, 64] and len(found) == 7
    assert all("out of memory" in v["not_measured"] for v in json.loads((tmp_path / "batch-8.json").read_text())["variants"])


def test_a_point_measured_another_way_is_measured_again(asked, tmp_path):
    sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(), tmp_path)
    asked.clear()
    sweep.run_sweep("batch", SHAPE, [EAGER, JIT], Plan(rounds=3), tmp_path)
    assert len(asked) == 7


def test_cold_generations_are_measured_and_printed(strong, tmp_path, monkeypatch, capsys):
    """A real run of two lengths."""
    monkeypatch.setattr(sweep, "NEW_TOKENS", (2, 12))
    words = ["run", "--model", str(strong("qwen2")), "--sweep", "new-tokens", "--new-tokens", "8", "--max-seq-len", "24", "--rounds", "1", "--repeats", "1"]
    assert main([*words, "--only", "eager", "jit", "--without", "compiled", "fused", "--out", str(tmp_path / "cold")]) == 0
    (result,) = [json.loads(file.read_text()) for file in (tmp_path / "cold").iterdir()]
    by_label = {f"{v['framework']} {v['launch']}": v for v in result["variants"] if "cold_generation_s" in v}
    assert set(by_label) == {"torch eager", "jax jit"}
    for v in by_label.values():
        assert list(v["cold_generation_s"]) == ["2", "12"] and all(0 < s < 120 for s in v["cold_generation_s"].values())
    assert "s a cold generation" in capsys.readouterr().out


def test_series_of_recaptures_and_prefill_say_what_pays():
    eager, graph = entry("torch eager plain", 2.0), entry("torch cuda_graph plain", 1.0)
    graph["recapture_ms"] = {"1": 30.0, "16": 2.5, "64": 1.4}
    figures = {"capture_s": 0.05, "differing_bits": 0}
    graph["prefill"] = {
        "16": {"eager_ms": 10.0, "graph_ms": 5.0, "calls_to_pay_back": 10.0, **figures},
        "512": {"eager_ms": 10.0, "graph_ms": 10.0, "calls_to_pay_back": None, **figures},
    }
    found = [{**run(eager, graph), "sweep": {"name": "capture-costs", "value": "all"}}]
    assert [s.unit for s in series.series_of("capture-costs", found)] == ["ms a step", "ms a prefill"]
    assert [c.name for c in series.series_of("capture-costs", found)[1].curves] == ["torch cuda_graph plain (no graph)", "torch cuda_graph plain (in a graph)"]
    assert series.recaptures(found) == [("m, torch cuda_graph plain: recording anew pays if a graph serves 64 steps", 64)]
    assert [(length, calls) for _, length, calls in series.prefill_pay_back(found)] == [(16, 10.0), (512, None)]
    shown = "\n".join(series.lines("capture-costs", found))
    assert "prompt of 512 tokens: 10.00 ms become 10.00, which never pays its capture" in shown and "1: 30.000  16: 2.500  64: 1.400" in shown


def test_a_sweep_writes_into_a_folder(strong, tmp_path, capsys):
    assert main(["run", "--model", str(strong("qwen2")), "--sweep", "batch", "--out", str(tmp_path / "x.json")]) == 2
    assert "expected a folder" in capsys.readouterr().err


def test_several_models_write_a_file_each(strong, tmp_path, asked, capsys):
    """Prepared side by side, timed one after the other; one --out for all of them, so it is a folder."""
    models = [str(strong("llama")), str(strong("qwen3"))]
    words = ["run", "--model", *models, "--only", "eager", "jit", "--without", "compiled", "fused", "transformers"]
    assert main([*words, "--json", "--out", str(tmp_path)]) == 0
    found = [results.load(file) for file in sorted(tmp_path.glob("*.json"))]
    assert sorted(r["workload"]["model"] for r in found) == sorted(models)
    assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(r)) for r in sorted(found, key=lambda r: models.index(r["workload"]["model"]))]
    for wrong, message in ((["--sweep", "batch"], "leave out --sweep"), (["--processes", "2"], "leave out"), (["--out", "one.json"], "expected a folder")):
        assert main([*words, *wrong]) == 2 and message in capsys.readouterr().err
    assert main(["run", "--model", models[0], models[0], "--out", str(tmp_path)]) == 2 and "two are alike" in capsys.readouterr().err


def test_an_interruption_keeps_what_was_measured_of_several_models(tmp_path, monkeypatch):
    """One is done when Ctrl-C comes, the other's workers are ended."""
    done = threading.Event()

    def fake(workload, variants, plan, turns):
        if workload.model == "one":
            return {**run(entry("torch eager plain", 1.0)), "workload": workload.__dict__}
        while not turns.stopped:
            done.wait(0.01)
        return {**run(), "workload": workload.__dict__, "variants": [EAGER.absent(1, "the torch worker ended with code -9")]}

    def interrupted(thread, timeout=None):
        if timeout is None and not done.is_set():
            done.set()
            raise KeyboardInterrupt
        return join(thread, timeout)

    join = threading.Thread.join
    monkeypatch.setattr(sweep, "compare", fake)
    monkeypatch.setattr(sweep, "bytes_needed", lambda workload: 0)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_models(["one", "other"], SHAPE, [EAGER], Plan(), tmp_path)
    assert [file.name for file in tmp_path.glob("*.json")] == ["one.json"]
