"""Every claim gets a verdict from figures, and none without them."""

from __future__ import annotations

import pytest

from compare.claims import CLAIMS, lane_outcomes, lines, table
from compare.cli import main
from compare.evidence import FAILS, HOLDS, UNKNOWN
from compare.report import render
from compare.results import ResultError, save
from tests.results import entry, run

TESTS = {f"tests/test_gpu.py::{name}": "passed" for name in ("test_without_its_guard", "test_each_part_of_the_key[torch]", "test_a_hundred_decoders_leave_no_memory[jax]")}


def measured(model: str = "shape:qwen3-0.6b", graph: str = "pass", **changes) -> dict:
    """A run in which the article is right, but for what ``changes`` says of the graph's entry."""
    eager, captured = entry("torch eager plain", 3.0), entry("torch cuda_graph plain", 1.0, graph)
    eager |= {"other_launches_per_step": 280.0, "graph_launches_per_step": 0.0, "host_dispatch_us": 2800.0, "num_layers": 28}
    eager |= {"idle_share": 0.65, "cpu_use": {"dozing_ms": 3.0}, "timeline": {"kernels": 280, "busy_us": 900.0, "spans": []}}
    captured |= {"other_launches_per_step": 0.0, "graph_launches_per_step": 1.0, "graph_updates_per_step": 0.0, "capture_s": 0.1}
    captured |= {"idle_share": 0.02, "cpu_use": {"dozing_ms": 1.0}, "timeline": {"kernels": 280, "busy_us": 900.0, "spans": []}}
    captured |= {"captures": 1, "prompts_served": 30, "kernels_per_step": 280, "memory_map": {"KV of all layers": [0, 1000], "logits": [1024, 600]}}
    loop = entry("torch device_loop plain", 1.0)
    loop |= {"graph_launches_per_step": 0.05, "other_launches_per_step": 0.0, "ledger": {"steps": 20}}
    result = run(eager, {**captured, **changes}, loop, model=model)
    result["ceilings"] |= {"empty_step_us": 6.0, "null_kernel": {"host_us": 6.0}, "graph_launch": {"100": {"host_us": 3.3, "device_us": 70.0}}}
    return result


def capture_costs(cold=(0.05, 0.5, 2.0), recapture=(30.0, 1.1), calls=None, tokens_equal=False) -> dict:
    """The sweep of that name, in which short generations, frequent recordings and prefill do not pay."""
    result = measured()
    eager, captured, _ = result["variants"]
    eager["cold_generation_s"] = {"16": 0.04, "256": 0.45, "1024": 3.0}
    captured["cold_generation_s"] = dict(zip(("16", "256", "1024"), cold))
    captured["recapture_ms"] = {"1": recapture[0], "1024": recapture[1]}
    captured["prefill"] = {"64": {"eager_ms": 5.0, "graph_ms": 4.0, "capture_s": 0.1, "calls_to_pay_back": calls, "differing_bits": 0}}
    captured["recovery"] = {"seconds": 0.2, "without_s": 0.1, "tokens_equal": tokens_equal}
    return {**result, "sweep": {"name": "capture-costs", "value": "all"}}


def lengths(padded=2.0, longest=1.0, maximum=3.0) -> list[dict]:
    points = []
    for value, ms, slots in (("padded", padded, 1056), ("longest row", longest, 1056), ("maximum", maximum, 4096)):
        graph = {**entry("torch cuda_graph plain", ms), "kernels_per_step": 280 if slots < 4096 else 300}
        points.append({**run(graph, model="shape:qwen3-0.6b", batch=8, max_seq_len=slots), "sweep": {"name": "lengths", "value": value}})
    return points


def larger(ratio: float) -> dict:
    """A model of ten times the bytes, whose graph gains ``ratio``."""
    eager, captured = entry("torch eager plain", ratio * 10), entry("torch cuda_graph plain", 10.0)
    return {**run(eager, captured, model="shape:llama-3.1-70b"), "sweep": {"name": "models", "value": "llama-3.1-70b"}}


RIGHT = [measured(), capture_costs(), *lengths(longest=2.0), larger(4.0)]
WRONG = [measured(), capture_costs((0.03, 0.3, 1.0), (1.5, 1.1), 3.0, True), *lengths(maximum=1.0), larger(1.5)]
NEVER = [capture_costs((0.05, 0.5, 4.0))]  # does not pay at all


def verdicts(*results, tests=None) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in table(results, tests)}


def test_figures_that_agree_hold_and_others_do_not():
    found = verdicts(*RIGHT, tests=TESTS)
    assert {claim for claim, verdict in found.items() if verdict == FAILS} == {"a graph launch costs nanoseconds"}
    assert {claim for claim, verdict in found.items() if verdict == UNKNOWN} == {"a step takes launches + compute + synchronisation, one after the other"}
    assert sum(verdict == HOLDS for verdict in found.values()) == len(CLAIMS) - 2


@pytest.mark.parametrize(
    "claim",
    [
        "rows of different lengths in one graph may as well be padded to one",
        "preallocating the maximum and masking costs time at every step",
        "a graph of a prefill does not pay below 512 tokens",
        "rolling back is hard when a graph fails",
        "it does not pay for generations below 256 tokens",
        "it pays for more than 1,024 new tokens",
        "it does not pay if the graph is recorded anew at every step",
        "the largest models gain most",
    ],
)
def test_figures_to_the_contrary_turn_the_verdict(claim):
    wrong = NEVER if "1,024" in claim else WRONG
    assert verdicts(*RIGHT, tests=TESTS)[claim] == HOLDS and verdicts(*wrong, tests=TESTS)[claim] == FAILS


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        ("hundreds of kernel launches a step become one", {"other_launches_per_step": 3.0}),
        ("in a graph it works without gaps", {"idle_share": 0.5}),
        ("new prompts, lengths and settings need no new capture", {"captures": 2}),
        ("new prompts, lengths and settings need no new capture", {"graph_updates_per_step": 0.5}),
        ("one preallocated pool holds cache, logits and state", {"memory_map": {"KV of all layers": [0, 1000], "logits": [99999, 600]}}),
        ("throughput grows by 2.3 to 4.1 times", {"tokens_per_s": 340.0}),
        ("the CPU has 60 to 80 % less to do", {"cpu_use": {"dozing_ms": 2.9}}),
        ("the latency of a generation falls by 55 to 75 %", {"tokens_per_s": 340.0}),
        ("capturing takes 50 to 200 ms", {"capture_s": 0.01}),
    ],
)
def test_a_graph_that_shows_something_else_turns_the_verdict(claim, changes):
    assert verdicts(measured())[claim] == HOLDS and verdicts(measured(**changes))[claim] == FAILS


def test_the_number_of_kernels_at_several_lengths():
    claim = "the number of layers or kernels differs by sequence"
    assert verdicts(*lengths())[claim] == HOLDS
    same = lengths()
    same[2]["variants"][0]["kernels_per_step"] = 280
    assert verdicts(*same)[claim] == FAILS and verdicts(*same[:2])[claim] == UNKNOWN


def test_tests_speak_only_if_all_passed():
    claim = "graphs leak memory unless they are released"
    assert verdicts(measured(), tests=TESTS)[claim] == HOLDS and verdicts(measured())[claim] == UNKNOWN
    assert verdicts(measured(), tests={**TESTS, "tests/test_gpu.py::leave_no_memory[torch]": "failed"})[claim] == FAILS


def test_outcomes_are_read_from_the_lanes_file(tmp_path, capsys):
    assert lane_outcomes(tmp_path) == {}
    (tmp_path / "tests.txt").write_text(
        "".join(f"{outcome} tests/test_gpu.py::test_a_hundred_decoders_leave_no_memory_behind[{w}]\n" for w, outcome in (("torch", "PASSED"), ("jax", "FAILED")))
    )
    assert sorted(lane_outcomes(tmp_path).values()) == ["failed", "passed"]
    save(measured(), tmp_path / "one.json")
    assert main(["claims", str(tmp_path)]) == 0
    assert "graphs leak memory unless they are released: does not hold\n    measured: leave_no_memory: 1 of 2 tests passed" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "leave_no_memory: 1 of 2 tests passed" in (tmp_path / "page.html").read_text()


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
    assert all(row["command"].startswith(("python -m compare ", "python -m pytest ")) for row in rows) and len(lines(rows)) == 3 * len(rows)
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
