"""Every claim gets a verdict from figures, and none without them."""

from __future__ import annotations

import pytest

from compare.claims import CLAIMS, FAILS, HOLDS, UNKNOWN, lines, table
from compare.cli import main
from compare.report import render
from compare.results import ResultError, save
from tests.results import entry, run


def measured(model: str = "shape:qwen3-0.6b", graph: str = "pass", **changes) -> dict:
    """A run in which the article is right, but for what ``changes`` says of the graph's entry."""
    eager, captured = entry("torch eager plain", 3.0), entry("torch cuda_graph plain", 1.0, graph)
    eager |= {"other_launches_per_step": 280.0, "graph_launches_per_step": 0.0, "host_dispatch_us": 2800.0, "cpu_ms_per_step": 3.0, "num_layers": 28}
    eager |= {"idle_share": 0.65}
    eager["timeline"] = {"kernels": 280, "busy_us": 900.0, "spans": []}
    captured |= {"other_launches_per_step": 0.0, "graph_launches_per_step": 1.0, "cpu_ms_per_step": 1.0, "capture_s": 0.1}
    captured |= {"idle_share": 0.02}
    captured["timeline"] = {"kernels": 280, "busy_us": 900.0, "spans": []}
    result = run(eager, {**captured, **changes}, model=model)
    result["ceilings"] |= {"empty_step_us": 6.0, "graph_launch": {"100": {"host_us": 3.3, "device_us": 70.0}}}
    return result


def verdicts(*results) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in table(results)}


def test_figures_that_agree_hold_and_others_do_not():
    found = verdicts(measured())
    assert {claim for claim, verdict in found.items() if verdict == FAILS} == {"a graph launch costs nanoseconds"}
    assert {claim for claim, verdict in found.items() if verdict == UNKNOWN} == {
        "a step takes launches + compute + synchronisation, one after the other",
        "it does not pay for generations below 256 tokens",
    }
    assert sum(verdict == HOLDS for verdict in found.values()) == len(CLAIMS) - 3


def test_a_claim_that_holds_for_some_says_for_which():
    found = verdicts(measured(), measured("shape:llama-3.2-1b", capture_s=0.01))
    assert found["capturing takes 50 to 200 ms"] == "holds when: torch, qwen3-0.6b: 100 ms"


def test_what_failed_its_parity_check_proves_nothing():
    assert verdicts(measured(graph="fail"))["hundreds of kernel launches a step become one"] == UNKNOWN


def test_results_without_counts_and_traces_leave_claims_open():
    bare = run(entry("torch eager plain", 3.0), entry("torch cuda_graph plain", 1.0), model="shape:qwen3-0.6b")
    found = verdicts(bare)
    assert found["hundreds of kernel launches a step become one"] == found["about 10 kernels a layer"] == UNKNOWN
    assert found["throughput grows by 2.3 to 4.1 times"] == HOLDS


def test_a_graph_that_was_not_counted_is_passed_over():
    result = measured()
    for name in ("other_launches_per_step", "graph_launches_per_step"):
        del result["variants"][1][name]
    assert verdicts(result)["hundreds of kernel launches a step become one"] == UNKNOWN


def test_every_claim_says_how_to_reproduce_it():
    rows = table([measured()])
    assert all(row["command"].startswith("python -m compare ") for row in rows) and len(lines(rows)) == 3 * len(rows)
    with pytest.raises(ResultError, match="no result files"):
        table([])


def test_the_command_reads_files_and_folders(tmp_path, capsys):
    save(measured(), tmp_path / "one.json")
    for argument in (tmp_path / "one.json", tmp_path):
        assert main(["claims", str(argument)]) == 0
        assert "a graph launch costs nanoseconds: does not hold\n    measured: 3.3 µs" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["claims", str(tmp_path / "empty")]) == 2


def test_runs_stand_side_by_side_and_sweeps_are_drawn(tmp_path):
    """A run at length, a second one beside it, and the points of a sweep from a folder."""
    save(measured(), tmp_path / "a.json")
    save(measured("shape:llama-3.2-1b", graph="fail"), tmp_path / "b.json")
    for batch in (1, 2):
        save({**measured(), "sweep": {"name": "batch", "value": str(batch)}}, tmp_path / "sweep" / f"batch-{batch}.json")
    assert main(["report", *(str(tmp_path / name) for name in ("a.json", "b.json", "sweep")), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "llama-3.2-1b, A, 20" in page and '<td class="fail">parity fails</td>' in page
    assert "ms a step (p50) by rows: torch eager plain 1 3, 2 3; torch cuda_graph plain" in page


def test_one_run_alone_has_nothing_beside_it():
    assert "side by side" not in render([measured()])


def test_beside_a_run_without_a_gpu_stand_the_committed_ones(tmp_path):
    """They say which machine they are of, and the claims have something to go by."""
    here = run(entry("torch eager plain", 3.0))
    here["environment"]["gpu"] = None
    save(here, tmp_path / "here.json")
    save(measured(), tmp_path / "there.json")
    pages = {}
    for name in ("here", "there"):
        assert main(["report", str(tmp_path / f"{name}.json"), "--out", str(tmp_path / "page.html")]) == 0
        pages[name] = (tmp_path / "page.html").read_text()
    assert "m, C, 20" in pages["here"] and "llama-3.1-8b, NVIDIA H200, 20" in pages["here"]
    assert "NVIDIA H200" not in pages["there"]
