"""Two runs of one workload on one machine: which variants became slower beyond the noise?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .results import ResultError, measured, variant_of
from .statistics import Interval, ratio_interval
from .workload import Variant

TOLERANCE = 0.02  # a change of the median that two runs of the same code may show


@dataclass(frozen=True)
class Change:
    """A variant in both runs: ``ratio`` is the new step time over the old one."""

    variant: Variant
    before_ms: float
    after_ms: float
    ratio: Interval
    verdict: str  # slower, faster, same, or broken: parity passed before and does not now

    def line(self) -> str:
        return f"{self.verdict:7s} {self.variant.label()}: {self.before_ms:.3f} -> {self.after_ms:.3f} ms, {self.ratio.value:.3f}x ({self.ratio.low:.3f} to {self.ratio.high:.3f})"


def changes(before: dict[str, Any], after: dict[str, Any], tolerance: float = TOLERANCE) -> tuple[list[Change], list[str]]:
    """Changes of the variants that both runs measured, and what only one of them has.

    Slower or faster is what lies beyond 1 +- ``tolerance`` with the whole 95 % interval. Raises
    ResultError for runs of different workloads or machines.
    """
    _check_same(before, after)
    old, new = ({variant_of(v): v for v in measured(run)} for run in (before, after))
    if not set(old) & set(new):
        raise ResultError("no variant was measured in both runs, so nothing can be compared")
    alone = [f"{variant.label()}: measured in the {name} run alone" for name, one, other in (("first", old, new), ("second", new, old)) for variant in one if variant not in other]
    return [_change(variant, old[variant], new[variant], tolerance) for variant in old if variant in new], alone


def stopped(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Variants that the first run measured and the second one tried in vain, with its reason."""
    old = {variant_of(v) for v in measured(before)}
    return [f"broken  {variant_of(v).label()}: {v['not_measured']}" for v in after["variants"] if "not_measured" in v and variant_of(v) in old]


def worse(found: Sequence[Change]) -> list[Change]:
    return [change for change in found if change.verdict in ("slower", "broken")]


def _check_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    first, second = before["workload"], after["workload"]
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            raise ResultError(f"the runs differ in {name}: {first.get(name)} and {second.get(name)}; compare runs of one workload")
    first, second = (_machine(run) for run in (before, after))
    if first != second:
        raise ResultError(f"the runs are of different machines: {first} and {second}; a ratio of their times says nothing about the code")


def _machine(run: dict[str, Any]) -> str:
    environment = run["environment"]
    return environment["gpu"]["name"] if environment["gpu"] else f"{environment['cpu']}, {environment['cores']} cores"


def _change(variant: Variant, old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Change:
    ratio = ratio_interval(new["step_ms"]["samples"], old["step_ms"]["samples"], interleaved=False)
    verdict = "slower" if ratio.low > 1 + tolerance else "faster" if ratio.high < 1 - tolerance else "same"
    if old["parity"]["verdict"] == "pass" != new["parity"]["verdict"]:
        verdict = "broken"
    return Change(variant, old["step_ms"]["p50"], new["step_ms"]["p50"], ratio, verdict)
