"""What a sweep found, as lines over its axis and as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .results import Results, measured, name_of, variant_of
from .sweep import SWEEPS
from .workload import NEEDS_CUDA, WITHOUT_GRAPH, Variant


@dataclass(frozen=True)
class Curve:
    """One variant's figures: (value on the axis, figure, verdict)."""

    name: str
    variant: Variant
    points: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True)
class Series:
    """Curves over one axis; both with their units."""

    axis: str
    unit: str
    curves: tuple[Curve, ...]

    def lines(self) -> list[str]:
        """A table in text: a line a curve, a column a point; what failed its parity check is marked."""
        shown = [f"{self.axis}: {self.unit}"]
        for curve in self.curves:
            shown.append(f"{curve.name}: " + "  ".join(f"{x}: {y:.3f}{'' if verdict == 'pass' else ' (parity fails)'}" for x, y, verdict in curve.points))
        return shown


def _prefill(way: str) -> Callable[[dict[str, Any]], dict[str, float]]:
    return lambda v: {length: figures[way] for length, figures in v.get("prefill", {}).items()}


# Of sweeps that are one point: axis, unit, and for each kind of curve (what it is called, its figures by value).
_COSTS = (
    ("new tokens", "s a cold generation", {"": lambda v: v.get("cold_generation_s", {})}),
    ("steps between two recordings of the graph", "ms a step", {"": lambda v: v.get("recapture_ms", {})}),
    ("prompt tokens", "ms a prefill", {" (no graph)": _prefill("eager_ms"), " (in a graph)": _prefill("graph_ms")}),
)


def series_of(name: str, found: Results) -> list[Series]:
    """Every series that the results of a sweep hold: step times over its axis, or the costs that it asked for."""
    costs = [Series(axis, unit, tuple(_cost_curves(kinds, found))) for axis, unit, kinds in _COSTS]
    costs = [series for series in costs if series.curves]
    return costs or [Series(SWEEPS[name].axis, "ms a step (p50)", tuple(_step_curves(found)))]


def _step_curves(found: Results) -> Iterator[Curve]:
    points: dict[Variant, list[tuple[str, float, str]]] = {}
    for result in found:
        for v in measured(result):
            points.setdefault(variant_of(v), []).append((result["sweep"]["value"], v["step_ms"]["p50"], v["parity"]["verdict"]))
    for variant, of_variant in points.items():
        yield Curve(variant.label(), variant, tuple(of_variant))


def _cost_curves(kinds: dict[str, Callable[[dict[str, Any]], dict[str, float]]], found: Results) -> Iterator[Curve]:
    for result in found:
        for v in measured(result):
            for suffix, figures in kinds.items():
                if of_variant := figures(v):
                    variant = variant_of(v)
                    yield Curve(variant.label() + suffix, variant, tuple((x, y, v["parity"]["verdict"]) for x, y in of_variant.items()))


def _stays_quicker(ours: dict[str, float], theirs: dict[str, float]) -> int | None:
    """The first number from which on ours are below theirs, to the last; None if the last one is not."""
    slower = [int(n) for n in ours if ours[n] >= theirs[n]]
    return next((int(n) for n in ours if not slower or int(n) > max(slower)), None)


def break_even(found: Results) -> list[tuple[str, int | None]]:
    """From how many new tokens on a cold graph stays quicker than a cold run without one, among measured lengths: a sentence, and the length or None."""
    said = []
    for result in found:
        cold = {variant_of(v): v["cold_generation_s"] for v in result["variants"] if "cold_generation_s" in v and v["parity"]["verdict"] == "pass"}
        for variant, seconds in cold.items():
            base_variant = replace(variant, launch=WITHOUT_GRAPH[variant.framework])
            if variant.launch not in NEEDS_CUDA or base_variant not in cold:
                continue
            start = _stays_quicker(seconds, cold[base_variant])
            says = f"quicker from {start} new tokens on" if start else f"not quicker up to {max(map(int, seconds))} new tokens"
            said.append((f"{name_of(result)}, {variant.label()}, capture included: {says} than {base_variant.label()}", start))
    return said


def recaptures(found: Results) -> list[tuple[str, int | None]]:
    """From how many steps between two recordings on a graph stays quicker than no graph at all: a sentence, and the number or None."""
    said = []
    for result in found:
        timed = {variant_of(v): v for v in measured(result) if v["parity"]["verdict"] == "pass"}
        for variant, v in timed.items():
            base = timed.get(replace(variant, launch=WITHOUT_GRAPH.get(variant.framework, "")))
            if variant.launch not in NEEDS_CUDA or base is None or not v.get("recapture_ms"):
                continue
            start = _stays_quicker(v["recapture_ms"], dict.fromkeys(v["recapture_ms"], base["step_ms"]["p50"]))
            says = f"pays if a graph serves {start} steps" if start else f"does not pay within {max(map(int, v['recapture_ms']))} steps"
            said.append((f"{name_of(result)}, {variant.label()}: recording anew {says}", start))
    return said


def prefill_pay_back(found: Results) -> list[tuple[str, int, float | None]]:
    """What a graph of a prefill brings: a sentence, the prompt's length, and the calls that pay its capture back (None: never)."""
    said = []
    for result in found:
        for v in measured(result):
            for length, figures in v.get("prefill", {}).items():
                calls = figures["calls_to_pay_back"]
                saves = f"{figures['eager_ms']:.2f} ms become {figures['graph_ms']:.2f}"
                pays = "which never pays its capture" if calls is None else f"which pays {figures['capture_s'] * 1e3:.0f} ms of capture after {calls:.0f} calls"
                said.append((f"{name_of(result)}, {v['framework']}, prompt of {length} tokens: {saves}, {pays}", int(length), calls))
    return said


def lines(name: str, found: Results) -> list[str]:
    """All series in text, and what they say."""
    shown = [line for series in series_of(name, found) for line in series.lines()]
    return [*shown, *(said[0] for said in (*break_even(found), *recaptures(found), *prefill_pay_back(found)))]
