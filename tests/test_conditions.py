"""What disturbs a measurement is seen and said."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from compare.conditions import Conditions
from compare.environment import first_visible, gpu
from compare.report import headline
from compare.table import disturbances
from compare.timing import time_steps
from tests.results import entry, run
from tests.test_compare import FakeArm


class FakeNvml:
    """A GPU whose clock, reasons and processes change from look to look."""

    NVMLError, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = RuntimeError, 1, 0

    def __init__(self, clocks=(1980, 1980), reasons=0, pids=()):
        self.clocks, self.reasons, self.pids = list(clocks), reasons, pids

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return self.clocks.pop(0)

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 60

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids]


def seen(monkeypatch, gpu: FakeNvml) -> dict:
    monkeypatch.setattr("compare.conditions._device", lambda: (gpu, 0))
    monkeypatch.setattr("compare.conditions._busy_seconds", lambda: 0.0)
    conditions = Conditions(cuda=True)
    conditions.look()
    conditions.look()
    return conditions.summary()


def test_a_quiet_gpu_is_not_marked(monkeypatch):
    """Its own process and reasons that do no harm (idle, application clocks) are no disturbance."""
    found = seen(monkeypatch, FakeNvml((1980, 1965), reasons=0x03, pids=(os.getpid(),)))
    assert found == {"sm_clock_mhz": [1965, 1980], "temperature_c": [60, 60], "other_cpu": 0.0, "disturbed": []}


@pytest.mark.parametrize(
    ("gpu", "word"),
    [(FakeNvml(reasons=0x20), "software thermal limit"), (FakeNvml((1980, 1200)), "1980 to 1200 MHz"), (FakeNvml(pids=(999_999_999,)), "1 other processes used the GPU")],
)
def test_throttling_and_other_users_are_named(gpu, word, monkeypatch):
    (reason,) = seen(monkeypatch, gpu)["disturbed"]
    assert word in reason


def test_a_figure_that_the_gpu_does_not_give_is_left_out(monkeypatch):
    gpu = FakeNvml(reasons=0x40)
    gpu.nvmlDeviceGetTemperature = lambda *_: (_ for _ in ()).throw(RuntimeError("not supported"))
    found = seen(monkeypatch, gpu)
    assert found["temperature_c"] is None and found["disturbed"] == ["throttled: hardware thermal limit"]


def test_a_busy_neighbour_is_noticed():
    conditions = Conditions(cuda=False)
    neighbour = "import time\nend = time.time() + 1.5\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", neighbour], check=True)
    found = conditions.summary()
    assert found["other_cpu"] > 0.5 and "cores busy" in found["disturbed"][-1] and found["sm_clock_mhz"] is None


def test_conditions_are_looked_at_in_every_round():
    looks = []
    time_steps([FakeArm(0.0)], rounds=5, steps_available=64, between=lambda: looks.append(1))
    assert len(looks) == 5


def test_a_disturbed_run_says_so_in_its_first_sentences():
    result = copy.deepcopy(run(entry("torch eager plain", 2.0), entry("jax jit plain", 1.0)))
    result["variants"][0]["conditions"] = {"disturbed": ["throttled: power cap"]}
    result["variants"][1]["conditions"] = {"disturbed": []}
    assert disturbances(result) == {"torch": ["throttled: power cap"]}
    assert any("torch with care: throttled: power cap" in sentence for sentence in headline(result))


@pytest.mark.parametrize(("visible", "expected"), [(None, "0"), ("2,3", "2"), ("GPU-8f3a", "GPU-8f3a"), ("", None), ("-1", None)])
def test_the_first_visible_gpu_is_watched(visible, expected, monkeypatch, tmp_path):
    """Not the machine's first, which may be somebody else's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_visible() == expected
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$1, 580, 1, 1, 1, 1, 1, 1"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu() is None if expected is None else gpu()["name"] == f"--id={expected}"
