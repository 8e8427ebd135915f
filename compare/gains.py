"""Where a speed-up comes from: fewer launches (graphs), apart from fewer kernels (fusion)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .results import measured, variant_of
from .statistics import Interval, ratio_interval
from .workload import NEEDS_CUDA, WITHOUT_GRAPH, Variant

# Launch modes and kernels from the slowest to the quickest way; neighbours that were measured are compared.
LAUNCHES = {"torch": ("eager", "cuda_graph", "device_loop"), "jax": ("jit", "command_buffer", "device_loop")}
KERNELS = ("plain", "compiled", "fused")


@dataclass(frozen=True)
class Gain:
    """What one change alone brings: ``cause`` is launch or fusion, ``ratio`` the old step time over the new."""

    cause: str
    before: Variant
    after: Variant
    ratio: Interval
    passed: bool  # parity of both

    def line(self) -> str:
        verdict = "" if self.passed else "; PARITY FAILS, so the ratio means nothing"
        return f"{self.before.label()} -> {self.after.label()}: {self.ratio.value:.2f}x ({self.ratio.low:.2f} to {self.ratio.high:.2f}){verdict}"


def gains(result: dict[str, Any]) -> list[Gain]:
    """Every pair of measured variants that differ in launch alone or in kernels alone, neighbours only.

    Kernels are compared inside of graphs: without one, fewer kernels are fewer launches as well.
    """
    timed = {variant_of(v): v for v in measured(result) if v["framework"] in WITHOUT_GRAPH}
    pairs = [("launch", pair) for pair in _pairs(timed, "launch")] + [("fusion", pair) for pair in _pairs(timed, "kernels")]
    return [_gain(cause, *pair, timed) for cause, pair in pairs]


def _pairs(timed: dict[Variant, Any], field: str) -> Iterator[tuple[Variant, Variant]]:
    for variant in timed:
        if variant.launch not in (LAUNCHES[variant.framework] if field == "launch" else NEEDS_CUDA):
            continue
        order = LAUNCHES[variant.framework] if field == "launch" else KERNELS
        later = (replace(variant, **{field: value}) for value in order[order.index(getattr(variant, field)) + 1 :])
        following = next((other for other in later if other in timed), None)
        if following is not None:
            yield variant, following


def _gain(cause: str, before: Variant, after: Variant, timed: dict[Variant, Any]) -> Gain:
    old, new = timed[before], timed[after]
    passed = all(v["parity"]["verdict"] == "pass" for v in (old, new))
    return Gain(cause, before, after, ratio_interval(old["step_ms"]["samples"], new["step_ms"]["samples"], interleaved=True), passed)
