"""Step traces: what is kept of CUPTI's records, idle time, and the way to a file and back."""

from __future__ import annotations

import enum
import json
from types import SimpleNamespace

import pytest

from compare.ledger import LedgerError
from compare.trace import Span, StepTrace, Tracer, trace_arm


class Kind(enum.IntEnum):
    DRIVER, CONCURRENT_KERNEL, MEMCPY, MEMSET = range(1, 5)


class FakeCupti:
    """Hands out the records of a step when flushed; its clock moves with each question."""

    ActivityKind, CallbackDomain = Kind, SimpleNamespace(DRIVER_API=1)

    def __init__(self):
        self.enabled, self.now, self.pending = set(), 0, []

    def activity_register_callbacks(self, requested, completed):
        self.completed = completed
        assert requested()[0] > 0

    def activity_enable(self, kind):
        self.enabled.add(kind)

    def activity_disable(self, kind):
        self.enabled.remove(kind)

    def get_timestamp(self):
        self.now += 10
        return self.now

    def activity_flush_all(self, flag):
        records, self.pending = self.pending, []
        self.completed(records)

    def get_callback_name(self, domain, cbid):
        return {1: "cuLaunchKernel", 2: "cuStreamSynchronize", 3: "cuCtxGetCurrent"}[cbid]

    def call(self, cbid, start, length=5):
        self.pending.append(SimpleNamespace(kind=Kind.DRIVER, cbid=cbid, start=start, end=start + length))

    def kernel(self, name, start, length):
        self.pending.append(SimpleNamespace(kind=Kind.CONCURRENT_KERNEL, name=name, start=start, end=start + length))


class FakeArm:
    """Two launches a step; the wait calls the driver as well."""

    def __init__(self, cupti, records=True):
        self.cupti, self.records = cupti, records

    def restart(self):
        pass

    def steps(self, count):
        if self.cupti.enabled and self.records:
            now = self.cupti.now
            self.cupti.call(1, now + 1)
            self.cupti.call(3, now + 6)
            self.cupti.kernel("gemv", now + 20, 100)
            self.cupti.call(1, now + 8)
            self.cupti.kernel("norm", now + 130, 10)
            self.cupti.pending.append(SimpleNamespace(kind=Kind.MEMCPY, start=now + 135, end=now + 150))

    def wait(self):
        if self.cupti.enabled:
            self.cupti.call(2, self.cupti.now + 100, 50)
        self.cupti.now += 1000


@pytest.fixture
def cupti(monkeypatch):
    fake = FakeCupti()
    monkeypatch.setitem(__import__("sys").modules, "cupti", SimpleNamespace(cupti=fake))
    return fake


def test_a_step_holds_its_calls_and_kernels_and_nothing_of_the_wait(cupti):
    found = trace_arm(Tracer(), FakeArm(cupti))
    trace = StepTrace.from_dict(found)
    assert [span.name for span in trace.lane("host")] == ["cuLaunchKernel", "cuLaunchKernel"]
    assert [span.name for span in trace.lane("device")] == ["gemv", "norm", "memcpy"]
    assert cupti.enabled == set()
    # From the first call at 1 to the end of the copy at 150; busy from 20 to 120 and 130 to 150.
    assert (found["span_us"], found["busy_us"], found["kernels"]) == (0.149, 0.12, 3)
    assert found["idle_share"] == pytest.approx(1 - 120 / 149)


def test_a_trace_survives_the_file(cupti):
    found = trace_arm(Tracer(), FakeArm(cupti))
    assert StepTrace.from_dict(json.loads(json.dumps(found))).as_dict() == {k: v for k, v in found.items() if k not in ("untraced_us", "stretch")}


def test_kernels_side_by_side_count_once():
    trace = StepTrace((Span("device", "a", 0, 100), Span("device", "b", 50, 120), Span("device", "c", 200, 300)))
    assert (trace.busy_us, trace.span_us) == (0.22, 0.3)


def test_a_step_of_which_nothing_was_recorded_is_an_error(cupti):
    with pytest.raises(LedgerError, match="no device activity"):
        trace_arm(Tracer(), FakeArm(cupti, records=False))


def test_recording_ends_when_the_step_fails(cupti):
    arm, tracer = FakeArm(cupti), Tracer()
    with pytest.raises(ZeroDivisionError):
        tracer.record(lambda: 1 / 0, arm.wait)
    assert cupti.enabled == set()


def test_without_cupti_python_the_reason_is_given(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupti", None)
    with pytest.raises(LedgerError, match="pip install cupti-python"):
        Tracer()
