"""The launch model against runs made from its own formulas, and what it must not be fed."""

from __future__ import annotations

import pytest

from compare.cli import main
from compare.launch_model import evaluate, fit, median_errors, predict, quickest, speed_ups
from compare.results import ResultError, load, save
from tests.results import entry, run

LAUNCH_US, GAP_US, WAIT_US = 5.0, 0.8, 6.4


def counted(label: str, launches: int, kernels: int, compute_us: float, step_us: float) -> dict:
    graph = "graph" in label or "buffer" in label
    counts = {"graph_launches_per_step": launches if graph else 0, "other_launches_per_step": 0 if graph else launches}
    return {**entry(label, step_us / 1e3, seed=1), **counts, "timeline": {"kernels": kernels, "busy_us": compute_us, "spans": []}}


def made(model: str, kernels: int, compute_us: float) -> dict:
    """A run that obeys the overlapped form, with a graph beside it."""
    device = compute_us + kernels * GAP_US
    wait = WAIT_US / 32
    eager = counted("torch eager plain", kernels, kernels, compute_us, max(kernels * LAUNCH_US, device) + wait)
    result = run(eager, counted("torch cuda_graph plain", 1, kernels, compute_us, device + wait), model=model)
    result["ceilings"]["empty_step_us"] = WAIT_US
    return result


def test_runs_that_obey_the_formulas_are_predicted():
    constants, predictions = evaluate([made("small", 300, 600.0), made("large", 500, 4000.0), made("deep", 900, 900.0)])
    assert constants.launch_us[predictions[0].variant] == pytest.approx(LAUNCH_US, rel=0.02)
    assert constants.gap_us["torch"] == pytest.approx(GAP_US, rel=0.05)
    errors = median_errors(predictions)
    assert errors["overlap"] < 0.02 and errors["graph"] < 0.02 < 0.15 < errors["sum"]
    assert {p.model for p in predictions} == {"large", "deep"}


def test_steps_that_are_sums_are_predicted_by_the_sum():
    """Its own constant: one fitted to the whole step would count the kernels twice."""
    runs = []
    for model, kernels, compute in (("small", 300, 600.0), ("large", 500, 4000.0)):
        runs.append(made(model, kernels, compute))
        runs[-1]["variants"][0] = counted("torch eager plain", kernels, kernels, compute, kernels * LAUNCH_US + compute + WAIT_US / 32)
    assert median_errors(evaluate(runs)[1])["sum"] < 0.02


def test_a_step_that_the_device_limits_gives_no_launch_constant():
    constants = fit(made("large", 500, 40000.0))
    assert constants.launch_us == {} and constants.gap_us["torch"] == pytest.approx(GAP_US, rel=0.5)


def test_the_fitted_model_is_not_predicted_and_gpus_are_not_mixed():
    one = made("small", 300, 600.0)
    assert evaluate([one, one])[1] == []
    other = made("large", 500, 4000.0)
    other["environment"]["gpu"] = {"name": "B"}
    with pytest.raises(ResultError, match="different GPUs"):
        evaluate([one, other])


def test_the_run_with_the_quickest_kernels_is_fitted():
    assert quickest([made("large", 500, 4000.0), made("small", 300, 600.0)]) == 1


def test_a_graph_is_predicted_from_the_run_without_one_alone():
    constants, other = fit(made("small", 300, 600.0)), made("large", 500, 4000.0)
    before = {p.variant: p.predicted_us for p in predict(other, constants) if p.formula == "graph"}
    graph = other["variants"][1]
    graph["step_ms"]["p50"] *= 7
    graph["timeline"] = {**graph["timeline"], "busy_us": 1.0, "kernels": 1}
    assert {p.variant: p.predicted_us for p in predict(other, constants) if p.formula == "graph"} == before and before


def test_a_run_without_counts_cannot_be_fitted(tmp_path, capsys):
    bare = run(entry("torch eager plain", 1.0))
    with pytest.raises(ResultError, match="cannot be fitted"):
        fit(bare)
    for name in "ab":
        save(bare, tmp_path / f"{name}.json")
    assert main(["model", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "cupti-python" in capsys.readouterr().err


def test_the_command_prints_constants_predictions_and_errors(tmp_path, capsys):
    files = []
    for model, kernels, compute in (("small", 300, 600.0), ("large", 500, 4000.0)):
        files.append(str(tmp_path / f"{model}.json"))
        save(made(model, kernels, compute), tmp_path / f"{model}.json")
    assert main(["model", *files]) == 0
    printed = capsys.readouterr().out
    assert "fitted on small" in printed and "large torch cuda_graph plain, graph: predicted 44" in printed and "median error, graph: 0." in printed


def test_speed_ups_are_predicted_from_both_steps():
    _, predictions = evaluate([made("small", 300, 600.0), made("large", 500, 4000.0), made("deep", 900, 900.0)])
    found = {s.model: s for s in speed_ups(predictions)}
    assert set(found) == {"large", "deep"} and all(abs(s.error) < 0.03 for s in found.values())
    assert found["deep"].predicted == pytest.approx(900 * LAUNCH_US / (900 + 900 * GAP_US), rel=0.03)


def test_a_wrong_prediction_names_its_term():
    """Kernels that take twice as long in the graph as without: not the gaps' fault."""
    slow = made("large", 500, 4000.0)
    slow["variants"][1] = counted("torch cuda_graph plain", 1, 500, 8000.0, 8000.0 + 500 * GAP_US)
    gaps = made("deep", 900, 900.0)
    gaps["variants"][1] = counted("torch cuda_graph plain", 1, 900, 900.0, 900.0 + 900 * 3 * GAP_US)
    _, predictions = evaluate([made("small", 300, 600.0), slow, gaps])
    said = {p.model: p.line() for p in predictions if p.formula == "graph"}
    assert "µs of kernels were taken from the run without a graph, 4000, and are 8000 in it" in said["large"]
    assert "the gaps between kernels were to be 7" in said["deep"]


def test_predictions_are_written_where_no_timing_went_in(tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("small", "deep")]
    for file, run_of in zip(files, (made("small", 300, 600.0), made("deep", 900, 900.0))):
        save(run_of, file)
    for _ in range(2):  # written again, they stay the same
        assert main(["model", *map(str, files), "--write"]) == 0
    assert all("predicted" not in v for v in load(files[0])["variants"]), "the run that was fitted"
    eager, graph = load(files[1])["variants"]
    assert abs(graph["predicted"]["error"]) < 0.05 and graph["predicted"]["formula"] == "graph" and eager["predicted"]["formula"] == "overlap"
    assert graph["predicted"]["step_ms"] == pytest.approx(graph["step_ms"]["p50"], rel=0.05)


def test_what_cannot_be_trusted_or_has_no_twin_takes_no_part():
    one, other = made("small", 300, 600.0), made("deep", 900, 900.0)
    other["variants"][0]["parity"]["verdict"] = "fail"
    for run_of in (one, other):
        run_of["variants"].append(counted("transformers cuda_graph plain", 1, 900, 2000.0, 3000.0))
    assert evaluate([one, other])[1] == [], "neither the graph, whose twin failed, nor transformers', which has none"
