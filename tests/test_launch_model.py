"""The launch model against runs made from its own formulas, and what it must not be fed."""

from __future__ import annotations

import pytest

from compare.cli import main
from compare.launch_model import evaluate, fit, median_errors, predict, quickest
from compare.results import ResultError, save
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
