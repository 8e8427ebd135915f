"""One comparison from several fresh processes: samples together, and how far the runs agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .gains import gains
from .results import label, measured, variant_of
from .timing import quantiles
from .workload import Variant

# How far medians of runs of the same code may lie apart: of steps that the device limits, and of
# those that the host does, whose speed hangs on the processor's mood.
DEVICE_BOUND, HOST_BOUND = 0.03, 0.10
RATIO_BARS = {"device": 0.02, "host": 0.05}
BUSY = 0.8  # of a step from which the device limits it


def merged(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Entries of the first run with the step samples of all; ``runs_ms`` are the medians one by one.

    A variant that failed its parity check, or could not be measured, in any run has that run's word.
    """
    later = [{variant_of(v): v for v in run} for run in runs[1:]]
    return [_merged([first, *(run[variant_of(first)] for run in later)]) for first in runs[0]]


def _merged(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bad = next((v for v in entries if "step_ms" not in v or v["parity"]["verdict"] != "pass"), None)
    if bad is not None or len(entries) == 1:
        return bad or entries[0]
    samples = [v["step_ms"]["samples"] for v in entries]
    step_ms, runs_ms = quantiles([sample for run in samples for sample in run]), [v["step_ms"]["p50"] for v in entries]
    if step_ms["p50_interval"] is not None:  # samples of one process know nothing of another's
        low, high = step_ms["p50_interval"]
        step_ms["p50_interval"] = [min(low, *runs_ms), max(high, *runs_ms)]
    disturbed = [reason for v in entries for reason in v.get("conditions", {}).get("disturbed", [])]
    conditions = {"conditions": {**entries[0]["conditions"], "disturbed": list(dict.fromkeys(disturbed))}} if "conditions" in entries[0] else {}
    return {**entries[0], "step_ms": {**step_ms, "runs_ms": runs_ms}, **conditions}


def spread(values: Sequence[float]) -> float:
    """How far apart the values lie: the largest over the smallest, less 1."""
    return max(values) / min(values) - 1


def device_bound(v: dict[str, Any]) -> bool:
    """Does the device limit the step? By its busy time where it was traced, else by the host's time to enqueue."""
    step_us = v["step_ms"]["p50"] * 1e3
    return v["device_busy_us"] > BUSY * step_us if "device_busy_us" in v else v.get("host_dispatch_us", step_us) < (1 - BUSY) * step_us


def agreement(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What was measured in several processes, how far apart the runs lie, and how far they may: steps, then ratios of gains."""
    timed = {variant_of(v): v for v in measured(result) if len(v["step_ms"].get("runs_ms", [])) > 1}
    steps = [(f"{label(v)}, step", spread(v["step_ms"]["runs_ms"]), DEVICE_BOUND if device_bound(v) else HOST_BOUND) for v in timed.values()]
    ratios = [_ratio(gain.before, gain.after, timed) for gain in gains(result) if gain.before in timed and gain.after in timed]
    return steps + ratios


def _ratio(before: Variant, after: Variant, timed: dict[Variant, dict[str, Any]]) -> tuple[str, float, float]:
    old, new = timed[before], timed[after]
    ratios = [a / b for a, b in zip(old["step_ms"]["runs_ms"], new["step_ms"]["runs_ms"])]
    bar = RATIO_BARS["device" if device_bound(old) and device_bound(new) else "host"]
    return f"{before.label()} over {after.label()}", spread(ratios), bar


def lines(result: dict[str, Any]) -> list[str]:
    """The worst of the steps and of the ratios, and everything beyond its bar."""
    found = agreement(result)
    if not found:
        return []
    runs = max(len(v["step_ms"].get("runs_ms", [])) for v in measured(result))
    beyond = [f"  {name}: {apart:.1%} apart, {bar:.0%} allowed" for name, apart, bar in found if apart > bar]
    return [f"{runs} runs in fresh processes: {len(found) - len(beyond)} of {len(found)} medians and ratios agree within their bars", *beyond]
