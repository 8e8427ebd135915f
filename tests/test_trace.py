"""Step traces: what is kept of CUPTI's records, idle time, and the way to a file and back."""

from __future__ import annotations

import enum
import json
from types import SimpleNamespace

import pytest

from compare.cli import main
from compare.ledger import LedgerError
from compare.report import render
from compare.results import load, save
from compare.trace import Span, StepTrace, Tracer, trace_arm, trace_arms
from compare.workload import Variant
from tests.results import entry, run


class Kind(enum.IntEnum):
    DRIVER, CONCURRENT_KERNEL, MEMCPY, MEMSET, RUNTIME = range(1, 6)


class FakeCupti:
    """Hands out the records of a step when flushed; its clock moves with each question."""

    ActivityKind, CallbackDomain = Kind, SimpleNamespace(DRIVER_API=1)

    def __init__(self):
        self.enabled, self.now, self.pending, self.correlation = set(), 0, [], 0

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

    def call(self, cbid, start, length=5, kind=Kind.DRIVER):
        self.correlation += 1
        self._add(kind=kind, cbid=cbid, start=start, end=start + length)

    def work(self, kind, start, length, name=None):
        """What the newest call asked the device for."""
        self._add(kind=kind, name=name, start=start, end=start + length)

    def _add(self, **fields):
        self.pending.append(SimpleNamespace(correlation_id=self.correlation, **fields))


class FakeArm:
    """Two launches a step; the wait calls the driver as well."""

    def __init__(self, cupti, records=True):
        self.cupti, self.records = cupti, records

    def restart(self):
        pass

    def steps(self, count):
        if self.cupti.enabled and self.records:
            now = self.cupti.now
            self.cupti.call(3, now + 0)
            self.cupti.call(1, now + 1)
            self.cupti.work(Kind.CONCURRENT_KERNEL, now + 20, 100, "gemv")
            self.cupti.call(1, now + 8)
            self.cupti.work(Kind.CONCURRENT_KERNEL, now + 130, 10, "norm")
            self.cupti.work(Kind.MEMCPY, now + 135, 15)

    def wait(self):
        if self.cupti.enabled:
            self.cupti.call(2, self.cupti.now + 100, 50)
            self.cupti.work(Kind.MEMCPY, self.cupti.now + 200, 9)  # as the copy of a token to the host does
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


def test_work_belongs_to_the_runtimes_call_where_there_is_one(cupti):
    """PyTorch's own kernels and graphs: the driver's call inside has another number."""

    class Outer(FakeArm):
        def steps(self, count):
            if cupti.enabled:
                cupti.call(1, cupti.now + 1, 2)  # the driver's, inside of the one that follows
                cupti.call(9, cupti.now, 5, Kind.RUNTIME)
                cupti.work(Kind.CONCURRENT_KERNEL, cupti.now + 20, 100, "gemv")

    trace = StepTrace.from_dict(trace_arm(Tracer(), Outer(cupti)))
    assert [(span.lane, span.name) for span in trace.spans] == [("host", "cuLaunchKernel"), ("device", "gemv")]


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
        tracer.record(lambda: 1 / 0, arm.wait, 1)
    assert cupti.enabled == set()


def test_without_cupti_python_the_reason_is_given(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupti", None)
    with pytest.raises(LedgerError, match="pip install cupti-python"):
        Tracer()


# ---- what is made of traces --------------------------------------------------------------------


def traced_run() -> dict:
    """A step of 3 launches far apart, and the same work behind one graph launch."""
    eager = [Span("host", "cuLaunchKernel", 1000 * i, 1000 * i + 300) for i in range(3)] + [Span("device", f"k{i}", 1000 * i + 400, 1000 * i + 600) for i in range(3)]
    graph = [Span("host", "cuGraphLaunch", 0, 300)] + [Span("device", f"k{i}", 400 + 200 * i, 600 + 200 * i) for i in range(3)]
    entries = [entry("torch eager plain", 2.0), entry("torch cuda_graph plain", 1.0), entry("torch device_loop plain", 0.9)]
    for made, spans in zip(entries, (eager, graph)):
        made["timeline"] = StepTrace(tuple(spans)).as_dict()
    entries[2]["timeline"] = {"not_measured": "a loop"}
    return run(*entries)


def test_the_page_draws_the_step_without_and_in_a_graph():
    page = render([traced_run()])
    assert "Timeline of one torch step: eager 77% idle over 3 µs, cuda_graph 40% idle over 1 µs" in page
    assert "One step of jax" not in page


def test_a_page_without_traces_draws_none():
    assert "Timeline" not in render([run(entry("torch eager plain", 2.0))])


def test_a_timeline_opens_in_perfetto(tmp_path, capsys):
    """Trace Event Format: complete events with µs, names for processes and threads."""
    source, target = tmp_path / "run.json", tmp_path / "timeline.json"
    save(traced_run(), source)
    assert main(["timeline", str(source), "--out", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "torch eager: 3 driver calls, 3 pieces of work; device busy 1 of 3 µs, 77% idle" in printed
    events = json.loads(target.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["torch eager", "torch cuda_graph"]
    (launch,) = [e for e in events if e["name"] == "cuGraphLaunch"]
    assert (launch["ph"], launch["pid"], launch["tid"], launch["ts"], launch["dur"]) == ("X", 2, 1, 0.0, 0.3)


def test_a_timeline_of_a_result_without_traces_is_refused(tmp_path, capsys):
    save(run(entry("jax jit plain", 1.0)), tmp_path / "run.json")
    assert main(["timeline", str(tmp_path / "run.json"), "--out", str(tmp_path / "t.json")]) == 2
    assert "holds no traced step" in capsys.readouterr().err and not (tmp_path / "t.json").exists()


def test_a_file_holds_lists_of_numbers_on_one_line_and_loads_as_it_was(tmp_path):
    result = traced_run()
    save(result, tmp_path / "run.json")
    assert load(tmp_path / "run.json") == json.loads(json.dumps(result))
    assert "\n    [" not in (tmp_path / "run.json").read_text().replace("\n    [ ", "") and len((tmp_path / "run.json").read_text().splitlines()) < 250


def test_one_arm_that_cannot_be_traced_leaves_the_others_theirs(cupti):
    arms = [FakeArm(cupti, records=False), FakeArm(cupti), FakeArm(cupti)]
    for arm, launch in zip(arms, ("eager", "cuda_graph", "device_loop")):
        arm.variant = Variant("torch", launch)
    found = trace_arms(arms)
    assert "no device activity" in found[0]["not_measured"] and found[1]["kernels"] == 3 and "loop" in found[2]["not_measured"]
