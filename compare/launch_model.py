"""How long a step should take, from how many launches it makes and how long its kernels run.

Two formulas for a step without a graph: the article's sum, ``launches * launch_us + compute_us +
sync_us``, and the overlapped form, ``max(launches * launch_us, compute_us + kernels * gap_us) +
sync_us``, as the host runs ahead of the device. In a graph the host makes one launch, so the device's
path is all: ``compute_us + kernels * gap_us + sync_us``, predicted from the run without a graph alone.
Constants are fitted on one model, each for its formula, and predict the others. ``compute_us`` is the
time of the kernels in a trace of the run without a graph: an input, like the counts, and no step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .results import ResultError, measured, name_of, variant_of
from .timing import STEPS_A_BLOCK
from .workload import NEEDS_CUDA, WITHOUT_GRAPH, Variant

HOST_BOUND = 1.1  # a step this much longer than the device's path was limited by the host


@dataclass(frozen=True)
class Terms:
    """What one variant of one run showed: counts a step, µs of kernels by trace, and the measured step in µs."""

    launches: float
    kernels: int
    compute_us: float
    step_us: float


@dataclass(frozen=True)
class Constants:
    """Fitted on one run: µs of host time a launch by variant, µs of device time between kernels in a graph by framework, µs of a wait shared by a block.

    ``launch_us`` is of the overlapped form, for variants that the host limited there; ``added_us`` of the sum.
    """

    launch_us: dict[Variant, float]
    added_us: dict[Variant, float]
    gap_us: dict[str, float]
    sync_us: float
    fitted_on: str


@dataclass(frozen=True)
class Prediction:
    """``formula`` is sum, overlap or graph; ``error`` is predicted over measured, less 1."""

    model: str
    variant: Variant
    formula: str
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1

    def line(self) -> str:
        return f"{self.model} {self.variant.label()}, {self.formula}: predicted {self.predicted_us:.0f} µs, measured {self.measured_us:.0f} µs ({self.error:+.1%})"


def terms(result: dict[str, Any]) -> dict[Variant, Terms]:
    """Terms of the variants of a run that were timed, counted and traced."""
    found = {}
    for v in measured(result):
        if "other_launches_per_step" in v and "spans" in v.get("timeline", {}):
            launches = v["other_launches_per_step"] + v["graph_launches_per_step"]
            found[variant_of(v)] = Terms(launches, v["timeline"]["kernels"], v["timeline"]["busy_us"], v["step_ms"]["p50"] * 1e3)
    return found


def fit(result: dict[str, Any]) -> Constants:
    """Constants from one run. ResultError if it holds no counted and traced variant, or no ceilings of a GPU."""
    found = terms(result)
    if not found or "empty_step_us" not in result["ceilings"]:
        raise ResultError(f"the run of {name_of(result)} cannot be fitted: it needs counts, traces and ceilings, so a GPU with cupti-python")
    sync_us = result["ceilings"]["empty_step_us"] / STEPS_A_BLOCK["cuda"]
    single = {variant: t for variant, t in found.items() if variant.launch not in NEEDS_CUDA}
    added_us = {variant: max(0.0, t.step_us - sync_us - t.compute_us) / t.launches for variant, t in single.items()}
    gaps: dict[str, list[float]] = {}
    for variant, t in found.items():
        if variant.launch in NEEDS_CUDA:
            gaps.setdefault(variant.framework, []).append((t.step_us - sync_us - t.compute_us) / t.kernels)
    gap_us = {framework: float(np.median(gap)) for framework, gap in gaps.items()}
    limited = {v: t for v, t in single.items() if t.step_us - sync_us > HOST_BOUND * (t.compute_us + t.kernels * gap_us.get(v.framework, 0.0))}
    launch_us = {variant: (t.step_us - sync_us) / t.launches for variant, t in limited.items()}
    return Constants(launch_us, added_us, gap_us, sync_us, name_of(result))


def predict(result: dict[str, Any], constants: Constants) -> list[Prediction]:
    """Each counted and traced variant of another run, by every formula that its constants allow."""
    found, model, made = terms(result), name_of(result), []
    for variant, t in found.items():
        gap = constants.gap_us.get(variant.framework)
        if variant.launch in NEEDS_CUDA:
            source = found.get(Variant(variant.framework, WITHOUT_GRAPH[variant.framework], variant.kernels))
            if source is not None and gap is not None:
                made.append(Prediction(model, variant, "graph", source.compute_us + source.kernels * gap + constants.sync_us, t.step_us))
        else:
            if variant in constants.added_us:
                made.append(Prediction(model, variant, "sum", t.launches * constants.added_us[variant] + t.compute_us + constants.sync_us, t.step_us))
            if variant in constants.launch_us and gap is not None:
                host = t.launches * constants.launch_us[variant]
                made.append(Prediction(model, variant, "overlap", max(host, t.compute_us + t.kernels * gap) + constants.sync_us, t.step_us))
    return made


def quickest(results: Sequence[dict[str, Any]]) -> int:
    """The run whose kernels take the least time: there the host limits, and its constants show."""
    return min(range(len(results)), key=lambda i: min((t.compute_us for t in terms(results[i]).values()), default=float("inf")))


def evaluate(results: Sequence[dict[str, Any]], fit_on: int = 0) -> tuple[Constants, list[Prediction]]:
    """Fit on one of several runs and predict those of other models. ResultError for runs of different GPUs."""
    if len(gpus := {(result["environment"]["gpu"] or {}).get("name") for result in results}) > 1:
        raise ResultError(f"the runs are of different GPUs ({', '.join(map(str, gpus))}): constants of one say nothing of another")
    constants = fit(results[fit_on])
    return constants, [p for result in results if name_of(result) != constants.fitted_on for p in predict(result, constants)]


def median_errors(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Median of the absolute errors of each formula."""
    return {formula: float(np.median([abs(p.error) for p in predictions if p.formula == formula])) for formula in dict.fromkeys(p.formula for p in predictions)}


def lines(constants: Constants, predictions: Sequence[Prediction]) -> list[str]:
    """Constants, every prediction, and the median error of each formula."""
    fitted = [f"fitted on {constants.fitted_on}: wait {constants.sync_us:.2f} µs a step"]
    fitted += [f"  {variant.label()}: {us:.2f} µs of host time a launch" for variant, us in constants.launch_us.items()]
    fitted += [f"  {framework}: {us:.2f} µs between kernels in a graph" for framework, us in constants.gap_us.items()]
    return [*fitted, *(p.line() for p in predictions), *(f"median error, {formula}: {error:.1%}" for formula, error in median_errors(predictions).items())]
