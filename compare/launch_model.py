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

GOOD = 0.1  # error of a prediction that needs no explanation
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
    """``formula`` is sum, overlap or graph; ``error`` is predicted over measured, less 1. ``wrong`` names the term that is furthest off."""

    model: str
    variant: Variant
    formula: str
    predicted_us: float
    measured_us: float
    wrong: str = ""

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1

    def line(self) -> str:
        said = f"{self.model} {self.variant.label()}, {self.formula}: predicted {self.predicted_us:.0f} µs, measured {self.measured_us:.0f} µs ({self.error:+.1%})"
        return said + (f"; {self.wrong}" if self.wrong and abs(self.error) > GOOD else "")

    def as_dict(self, fitted_on: str) -> dict[str, Any]:
        """As ``predicted`` of a result file has it."""
        return {"step_ms": self.predicted_us / 1e3, "error": self.error, "formula": self.formula, "fitted_on": fitted_on, "wrong": self.wrong}


def terms(result: dict[str, Any]) -> dict[Variant, Terms]:
    """Terms of the variants of a run that pass, and were timed, counted and traced."""
    found = {}
    for v in measured(result):
        if v["parity"]["verdict"] == "pass" and "other_launches_per_step" in v and "spans" in v.get("timeline", {}):
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
            without = WITHOUT_GRAPH.get(variant.framework)  # transformers' own step is not traced
            source = None if without is None else found.get(Variant(variant.framework, without, variant.kernels))
            if source is not None and gap is not None:
                made.append(_in_graph(model, variant, t, source, gap, constants.sync_us))
        else:
            if variant in constants.added_us:
                made.append(Prediction(model, variant, "sum", t.launches * constants.added_us[variant] + t.compute_us + constants.sync_us, t.step_us))
            if variant in constants.launch_us and gap is not None:
                made.append(_overlapped(model, variant, t, gap, constants))
    return made


def _in_graph(model: str, variant: Variant, t: Terms, source: Terms, gap: float, sync_us: float) -> Prediction:
    off = {
        "kernels": (source.compute_us, t.compute_us, "µs of kernels were taken from the run without a graph, {:.0f}, and are {:.0f} in it"),
        "number": (source.kernels * gap, t.kernels * gap, "gaps of as many kernels as without a graph, {:.0f} µs, and of those in it, {:.0f} µs"),
        "gaps": (t.kernels * gap, t.step_us - sync_us - t.compute_us, "the gaps between kernels were to be {:.0f} µs and are {:.0f}"),
    }
    return Prediction(model, variant, "graph", source.compute_us + source.kernels * gap + sync_us, t.step_us, _furthest(off))


def _overlapped(model: str, variant: Variant, t: Terms, gap: float, constants: Constants) -> Prediction:
    host, device = t.launches * constants.launch_us[variant], t.compute_us + t.kernels * gap
    path = ("the host's path", host) if host >= device else ("the device's path", device)
    wrong = f"{path[0]} was to take {path[1]:.0f} µs and takes {t.step_us - constants.sync_us:.0f}"
    return Prediction(model, variant, "overlap", max(host, device) + constants.sync_us, t.step_us, wrong)


def _furthest(terms: dict[str, tuple[float, float, str]]) -> str:
    """The sentence of the term whose assumed and true values lie furthest apart."""
    assumed, true, sentence = max(terms.values(), key=lambda term: abs(term[0] - term[1]))
    return sentence.format(assumed, true)


@dataclass(frozen=True)
class SpeedUp:
    """A graph's speed-up over the same step without one, both predicted."""

    model: str
    variant: Variant
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def line(self) -> str:
        return f"{self.model} {self.variant.label()}: speed-up predicted {self.predicted:.2f}, measured {self.measured:.2f} ({self.error:+.1%})"


def speed_ups(predictions: Sequence[Prediction]) -> list[SpeedUp]:
    """Of every graph variant whose step without a graph was predicted too, by the overlapped form where there is one."""
    by_name = {(p.model, p.variant, p.formula): p for p in predictions}
    found = []
    for p in predictions:
        if p.formula == "graph":
            without = Variant(p.variant.framework, WITHOUT_GRAPH[p.variant.framework], p.variant.kernels)
            base = by_name.get((p.model, without, "overlap")) or by_name.get((p.model, without, "sum"))
            if base is not None:
                found.append(SpeedUp(p.model, p.variant, base.predicted_us / p.predicted_us, base.measured_us / p.measured_us))
    return found


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


def with_predictions(result: dict[str, Any], constants: Constants, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The result with ``predicted`` in each variant: by the graph's or the overlapped form, else by the sum."""
    order = ("sum", "overlap", "graph")  # a later one replaces an earlier one
    of_run = sorted((p for p in predictions if p.model == name_of(result)), key=lambda p: order.index(p.formula))
    by_variant = {p.variant: p.as_dict(constants.fitted_on) for p in of_run}
    entries = [{k: v for k, v in entry.items() if k != "predicted"} for entry in result["variants"]]
    return {**result, "variants": [entry | ({"predicted": by_variant[variant_of(entry)]} if variant_of(entry) in by_variant else {}) for entry in entries]}


def lines(constants: Constants, predictions: Sequence[Prediction]) -> list[str]:
    """Constants, every prediction, the median error of each formula, and the speed-ups."""
    fitted = [f"fitted on {constants.fitted_on}: wait {constants.sync_us:.2f} µs a step"]
    fitted += [f"  {variant.label()}: {us:.2f} µs of host time a launch" for variant, us in constants.launch_us.items()]
    fitted += [f"  {framework}: {us:.2f} µs between kernels in a graph" for framework, us in constants.gap_us.items()]
    errors = [f"median error, {formula}: {error:.1%}" for formula, error in median_errors(predictions).items()]
    return [*fitted, *(p.line() for p in predictions), *errors, *(s.line() for s in speed_ups(predictions))]
