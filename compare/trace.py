"""What host and device did during one decode step: driver calls and kernels with their times, from CUPTI's activity records.

A step that is traced is slower than one that is not: traces say where time goes, never how much a
step takes. The trace's own clock over the untraced one is kept beside it (``stretch``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ledger import LedgerError, kind_of, load_cupti

WARM_UP_STEPS, RECORDED_STEPS = 3, 5
_BUFFER_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Span:
    """One driver call (lane host) or one piece of work (lane device); times in ns of CUPTI's clock."""

    lane: str
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class StepTrace:
    """Spans of one step from the first call to the last kernel, in order of their starts."""

    spans: tuple[Span, ...]

    def lane(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.lane == name]

    @property
    def busy_us(self) -> float:
        """µs in which the device had something to do: the union of its spans."""
        return sum(end - start for start, end in _union(self.lane("device"))) / 1e3

    @property
    def span_us(self) -> float:
        """µs from the first span's start to the last one's end."""
        return (max(s.end for s in self.spans) - min(s.start for s in self.spans)) / 1e3

    @property
    def idle_share(self) -> float:
        """Part of the step in which the device did nothing, 0 to 1."""
        return 1 - self.busy_us / self.span_us

    def as_dict(self) -> dict[str, Any]:
        """Names once, then [lane, name's number, start, duration] in ns from the first span on."""
        names = sorted({span.name for span in self.spans})
        number = {name: i for i, name in enumerate(names)}
        zero = min(span.start for span in self.spans)
        rows = [[int(span.lane == "device"), number[span.name], span.start - zero, span.end - span.start] for span in self.spans]
        return {"busy_us": self.busy_us, "span_us": self.span_us, "idle_share": self.idle_share, "kernels": len(self.lane("device")), "names": names, "spans": rows}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> StepTrace:
        lanes = ("host", "device")
        return cls(tuple(Span(lanes[lane], stored["names"][name], start, start + duration) for lane, name, start, duration in stored["spans"]))


def _union(spans: Sequence[Span]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged


class Tracer:
    """CUPTI's activity records of the whole process while ``recording``. One at a time, and no other profiler beside it."""

    def __init__(self) -> None:
        """Raises LedgerError without cupti-python."""
        cupti = load_cupti()
        self._cupti, self._records = cupti, []
        self._kinds = [cupti.ActivityKind[name] for name in ("DRIVER", "RUNTIME", "CONCURRENT_KERNEL", "MEMCPY", "MEMSET")]
        # Kept by name: CUPTI holds no reference to them.
        self._requested, self._completed = lambda: (_BUFFER_BYTES, 0), self._records.extend

    def record(self, work: Callable[[], Any], wait: Callable[[], Any], times: int) -> list[StepTrace]:
        """A trace of each ``work`` and of what it set off; ``wait`` returns when the device has done all of it.

        The first ones are slow: CUPTI instruments what it meets for the first time.
        """
        cupti, marks = self._cupti, []
        wait()
        self._records.clear()
        cupti.activity_register_callbacks(self._requested, self._completed)
        for kind in self._kinds:
            cupti.activity_enable(kind)
        try:
            for _ in range(times):
                begun = cupti.get_timestamp()
                work()
                marks.append((begun, cupti.get_timestamp()))
                wait()
            cupti.activity_flush_all(1)
        finally:
            for kind in self._kinds:
                cupti.activity_disable(kind)
        return [self._trace(begun, called) for begun, called in marks]

    def _trace(self, begun: int, called: int) -> StepTrace:
        """The driver calls between two times, and the device's work that they asked for: none of the wait's.

        Work goes by the number of the outermost call: PyTorch's own kernels and graphs are launched through the
        runtime, which calls the driver under a number of its own.
        """
        kinds = self._cupti.ActivityKind
        calls = [r for r in self._records if r.kind in (kinds.DRIVER, kinds.RUNTIME) and begun <= r.start <= called]
        numbers = {r.correlation_id for r in calls}
        asked = [r for r in self._records if r.kind not in (kinds.DRIVER, kinds.RUNTIME) and r.correlation_id in numbers]
        spans = [self._span(r) for r in (*(call for call in calls if call.kind == kinds.DRIVER), *asked)]
        return StepTrace(tuple(sorted((s for s in spans if s.lane == "device" or kind_of(s.name)), key=lambda s: s.start)))

    def _span(self, record: Any) -> Span:
        kinds, domain = self._cupti.ActivityKind, self._cupti.CallbackDomain.DRIVER_API
        if record.kind == kinds.DRIVER:
            return Span("host", self._cupti.get_callback_name(domain, record.cbid), record.start, record.end)
        name = record.name if record.kind == kinds.CONCURRENT_KERNEL else kinds(record.kind).name.lower()
        return Span("device", name, record.start, record.end)


def trace_arms(arms: Sequence[Any]) -> list[dict[str, Any]]:
    """``trace_arm`` of each arm, or ``not_measured`` with the reason. Time nothing in this process afterwards."""
    try:
        tracer = Tracer()
    except LedgerError as error:
        return [{"not_measured": str(error)} for _ in arms]
    return [_traced(tracer, arm) for arm in arms]


def _traced(tracer: Tracer, arm: Any) -> dict[str, Any]:
    if arm.variant.launch == "device_loop":
        return {"not_measured": "CUPTI does not see the steps of a loop on the device"}
    try:
        return trace_arm(tracer, arm)
    except Exception as error:  # the times that were measured before must not be lost with the trace
        return {"not_measured": f"{type(error).__name__}: {error}"}


def trace_arm(tracer: Tracer, arm: Any) -> dict[str, Any]:
    """The middle one of a few traced steps of a warm arm, and how much tracing stretched it.

    ``stretch`` is a traced step from its first call to its last kernel, over the wall time of the
    same step untraced and waited for. Work that a loop on the device launches by itself is not seen
    by CUPTI. Raises LedgerError if nothing was recorded.
    """
    arm.restart()
    arm.steps(1)
    untraced_us = float(np.median([_seconds(arm) for _ in range(RECORDED_STEPS)])) * 1e6
    traces = tracer.record(lambda: arm.steps(1), arm.wait, WARM_UP_STEPS + RECORDED_STEPS)[WARM_UP_STEPS:]
    traces = sorted((trace for trace in traces if trace.lane("device")), key=lambda trace: trace.span_us)
    if not traces:
        raise LedgerError("no device activity was recorded: another profiler may hold CUPTI")
    middle = traces[len(traces) // 2]
    return {**middle.as_dict(), "untraced_us": untraced_us, "stretch": middle.span_us / untraced_us}


def _seconds(arm: Any) -> float:
    arm.wait()
    started = time.perf_counter()
    arm.steps(1)
    arm.wait()
    return time.perf_counter() - started
