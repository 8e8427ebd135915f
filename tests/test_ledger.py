"""Driver calls, sorted into kinds; the counting itself needs a GPU."""

from __future__ import annotations

import sys
import types
from collections import Counter

import pytest

from compare.ledger import Ledger, LedgerError, count_arms, count_steps, tally, with_counts


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cuLaunchKernel", "other_launches"),
        ("cuLaunchKernelEx", "other_launches"),
        ("cuLaunchKernelEx_ptsz", "other_launches"),
        ("cuLaunchCooperativeKernel", "other_launches"),
        ("cuLaunchHostFunc", "host_functions"),
        ("cuGraphLaunch", "graph_launches"),
        ("cuGraphLaunch_ptsz", "graph_launches"),
        ("cuGraphExecKernelNodeSetParams_v2", "graph_updates"),
        ("cuGraphExecChildGraphNodeSetParams", "graph_updates"),
        ("cuGraphExecUpdate_v2", "graph_updates"),
        ("cuMemcpyHtoDAsync_v2", "memory_operations"),
        ("cuMemsetD8Async", "memory_operations"),
        ("cuStreamSynchronize", "synchronisations"),
        ("cuEventRecord", None),
        ("cuGraphExecDestroy", None),
    ],
)
def test_each_call_is_of_one_kind(name, kind):
    assert {k: n for k, n in tally(Counter({name: 3})).items() if n} == ({kind: 3} if kind else {})


class FakeCupti:
    """Calls back for what the fake driver below is asked, while the domain is enabled."""

    ApiCallbackSite = types.SimpleNamespace(API_ENTER=0, API_EXIT=1)
    CallbackDomain = types.SimpleNamespace(DRIVER_API=1)

    def __init__(self):
        self.on = 0

    def subscribe(self, callback, user):
        self.callback = callback
        return 7

    def unsubscribe(self, subscriber):
        assert subscriber == 7

    def enable_domain(self, on, subscriber, domain):
        self.on = on

    def drive(self, name):
        for site in (0, 1):
            if self.on:
                self.callback(None, 1, 0, types.SimpleNamespace(callback_site=site, function_name=name))


@pytest.fixture
def cupti(monkeypatch):
    fake = FakeCupti()
    monkeypatch.setitem(sys.modules, "cupti", types.SimpleNamespace(cupti=fake))
    return fake


class Arm:
    """Records at its first step, launches a graph at each, patches every fifth."""

    def __init__(self, cupti):
        self.cupti, self.done = cupti, 0

    def restart(self):
        self.cupti.drive("cuLaunchKernel")

    def steps(self, count):
        for _ in range(count):
            if self.done == 0:
                self.cupti.drive("cuLaunchKernel")
            self.done += 1
            if self.done % 5 == 0:
                self.cupti.drive("cuGraphExecKernelNodeSetParams")
            self.cupti.drive("cuGraphLaunch")

    def wait(self):
        self.cupti.drive("cuStreamSynchronize")


def test_only_the_steps_are_counted_once_each(cupti):
    found = count_steps(Ledger(), Arm(cupti), 20)
    assert found["calls"] == {"cuGraphExecKernelNodeSetParams": 4, "cuGraphLaunch": 20}
    assert (found["steps"], found["graph_launches"], found["other_launches"], found["graph_updates"], found["synchronisations"]) == (20, 20, 0, 4, 0)


def test_counts_a_step_stand_in_the_result():
    counts = {"steps": 20, "graph_launches": 20, "other_launches": 0, "graph_updates": 1}
    result = with_counts({"step_ms": {}}, counts)
    assert (result["graph_launches_per_step"], result["other_launches_per_step"], result["graph_updates_per_step"]) == (1.0, 0.0, 0.05)
    assert with_counts({"step_ms": {}}, {"not_measured": "why"}) == {"step_ms": {}, "ledger": {"not_measured": "why"}}


def test_arms_are_counted_each_by_itself(cupti):
    arms = [Arm(cupti), Arm(cupti)]
    for arm in arms:
        arm.forced = [[0] * 11]
    assert [(c["steps"], c["graph_launches"]) for c in count_arms(arms)] == [(10, 10), (10, 10)]


def test_an_arm_that_cannot_be_counted_leaves_the_others_theirs(cupti):
    broken, good = Arm(cupti), Arm(cupti)
    broken.forced = good.forced = [[0] * 11]
    broken.restart = lambda: 1 / 0
    first, second = count_arms([broken, good])
    assert first == {"not_measured": "ZeroDivisionError: division by zero"} and second["graph_launches"] == 10


def test_without_cupti_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(LedgerError, match="pip install cupti-python"):
        Ledger()
    assert "pip install" in count_arms([None])[0]["not_measured"]
