"""Fresh processes: samples together, and how far apart two runs of the same code may lie."""

from __future__ import annotations

import copy

import pytest

from compare import repeats
from compare.cli import main
from compare.results import measured
from compare.run import Plan, compare
from compare.table import print_table
from compare.workload import Variant, Workload
from tests.results import entry, run


def two_runs(eager_ms=(3.0, 3.0), graph_ms=(1.0, 1.0), **changes) -> dict:
    runs = []
    for eager, graph in zip(eager_ms, graph_ms):
        one, other = entry("torch eager plain", eager), entry("torch cuda_graph plain", graph)
        one["host_dispatch_us"], other["host_dispatch_us"] = eager * 990, 15.0
        runs.append([one, {**other, **changes}])
    return run(*repeats.merged(runs))


def test_samples_of_all_runs_are_one_and_medians_stay_apart():
    eager, graph = measured(two_runs((3.0, 3.3)))
    assert len(eager["step_ms"]["samples"]) == 80 and 3.0 < eager["step_ms"]["p50"] < 3.3
    assert eager["step_ms"]["p50_interval"][0] <= eager["step_ms"]["runs_ms"][0] and eager["step_ms"]["p50_interval"][1] >= eager["step_ms"]["runs_ms"][1]
    assert eager["step_ms"]["runs_ms"] == pytest.approx([3.0, 3.3], rel=0.01) and len(graph["step_ms"]["runs_ms"]) == 2


def test_one_run_is_what_it_was():
    entries = [entry("torch eager plain", 3.0)]
    assert repeats.merged([entries]) == entries and repeats.agreement(run(*entries)) == [] == repeats.lines(run(*entries))


@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_in_any_run_is_the_runs_word(which):
    good, bad = [entry("torch eager plain", 3.0)], [entry("torch eager plain", 3.0, "fail")]
    assert repeats.merged([bad, good] if which == 0 else [good, bad])[0]["parity"]["verdict"] == "fail"
    absent = [{**{k: v for k, v in good[0].items() if k not in ("step_ms", "parity")}, "not_measured": "out of memory"}]
    assert repeats.merged([good, absent])[0]["not_measured"] == "out of memory"


def test_what_the_device_limits_has_the_narrower_bar():
    found = {name: (apart, bar) for name, apart, bar in repeats.agreement(two_runs((3.0, 3.24), (1.0, 1.05)))}
    assert found["torch eager, step"] == (pytest.approx(0.08, abs=0.01), repeats.HOST_BOUND)
    assert found["torch cuda_graph, step"] == (pytest.approx(0.05, abs=0.01), repeats.DEVICE_BOUND)
    assert found["torch eager plain over torch cuda_graph plain"][1] == repeats.RATIO_BARS["host"]


def test_disagreement_is_said(capsys):
    result = two_runs((3.0, 3.0), (1.0, 1.2))
    result["environment"]["versions"] = {"torch": "1", "jax": "1"}
    print_table(result)
    shown = capsys.readouterr().out
    assert "2 runs in fresh processes: 1 of 3 medians and ratios agree" in shown and "torch cuda_graph, step: 2" in shown


def test_busy_time_of_a_trace_decides_what_limits_a_step():
    v = measured(two_runs())[0]
    assert not repeats.device_bound(v) and repeats.device_bound({**v, "device_busy_us": 2900.0})
    assert not repeats.device_bound({**v, "device_busy_us": 900.0, "host_dispatch_us": 10.0})


def test_disturbances_of_every_run_are_kept():
    runs = [[{**entry("torch eager plain", 3.0), "conditions": {"disturbed": list(seen)}}] for seen in ((), ("throttled: power cap",))]
    assert repeats.merged(runs)[0]["conditions"]["disturbed"] == ["throttled: power cap"]


def test_fresh_processes_measure_again(strong):
    workload = Workload(str(strong("qwen2")), batch=2, new_tokens=8, max_seq_len=32)
    result = compare(workload, [Variant("torch", "eager")], Plan(rounds=2, repeats=1, processes=2))
    for v in result["variants"]:
        assert len(v["step_ms"]["runs_ms"]) == 2 and len(v["step_ms"]["samples"]) == 4 and v["parity"]["verdict"] == "pass"


@pytest.mark.parametrize("words", [["--processes", "0"], ["--at-once", "0"], ["--rounds", "0"], ["--processes", "2", "--at-once", "2"]])
def test_numbers_that_mean_nothing_are_named(words, strong, capsys):
    assert main(["run", "--model", str(strong("qwen2")), *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_merging_changes_no_entry():
    entries = [[entry("torch eager plain", ms)] for ms in (3.0, 3.1)]
    kept = copy.deepcopy(entries)
    repeats.merged(entries)
    assert entries == kept
