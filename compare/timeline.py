"""The traced steps of a result as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .results import ResultError, label, measured
from .trace import StepTrace

LANES = {"host": 1, "device": 2}


def traces(result: dict[str, Any]) -> dict[str, StepTrace]:
    """Each variant's traced step by label. ResultError if there is none."""
    found = {label(v): StepTrace.from_dict(v["timeline"]) for v in measured(result) if v.get("timeline", {}).get("spans")}
    if not found:
        reasons = sorted({v["timeline"]["not_measured"] for v in measured(result) if "not_measured" in v.get("timeline", {})})
        raise ResultError(
            f"the result holds no traced step ({'; '.join(reasons) or 'it was made without a ledger or without a GPU'}): run `compare run` on a GPU with cupti-python"
        )
    return found


def chrome_trace(result: dict[str, Any]) -> dict[str, Any]:
    """Trace Event Format: a process a variant, a thread a lane; times in µs from the step's first call."""
    return {"displayTimeUnit": "ns", "traceEvents": [event for pid, item in enumerate(traces(result).items(), 1) for event in _events(pid, *item)]}


def _events(pid: int, name: str, trace: StepTrace) -> Iterator[dict[str, Any]]:
    zero = min(span.start for span in trace.spans)
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for lane, tid in LANES.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
    for span in trace.spans:
        yield {"ph": "X", "pid": pid, "tid": LANES[span.lane], "name": span.name, "ts": (span.start - zero) / 1e3, "dur": (span.end - span.start) / 1e3}


def lines(result: dict[str, Any]) -> list[str]:
    """A line a variant: launches, kernels, how long the device was busy, and its idle share."""
    return [
        f"{name}: {len(trace.lane('host'))} driver calls, {len(trace.lane('device'))} pieces of work; device busy {trace.busy_us:.0f} of {trace.span_us:.0f} µs, {trace.idle_share:.0%} idle"
        for name, trace in traces(result).items()
    ]
