"""Was the machine quiet while it was timed? Clocks, throttling and other users, looked at between timed blocks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .environment import first_visible

# Reasons for lower clocks that spoil a measurement (nvml.h, nvmlClocksEventReasons).
THROTTLING = {0x04: "power cap", 0x08: "hardware slowdown", 0x20: "software thermal limit", 0x40: "hardware thermal limit", 0x80: "power brake"}
OTHER_CPU = 0.25  # of one core, used by other processes on average
CLOCK_SPREAD = 0.05  # between the lowest and the highest clock seen


class Conditions:
    """Call ``look`` between timed blocks; ``summary`` says what was seen, and which of it disturbs."""

    def __init__(self, cuda: bool):
        self._device = _device() if cuda else None
        self._clocks: list[int] = []
        self._temperatures: list[int] = []
        self._reasons: set[str] = set()
        self._strangers: set[int] = set()
        self._started = (time.perf_counter(), _busy_seconds(), time.process_time())

    def look(self) -> None:
        """Note the GPU's clock, temperature, reasons for lower clocks, and processes that are not this comparison's."""
        if self._device is None:
            return
        nvml, handle = self._device
        # Each apart: a GPU that does not give one figure may give the others.
        with suppress(nvml.NVMLError):
            self._clocks.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        with suppress(nvml.NVMLError):
            self._temperatures.append(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        with suppress(nvml.NVMLError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            self._reasons |= {reason for bit, reason in THROTTLING.items() if bits & bit}
        with suppress(nvml.NVMLError):
            self._strangers |= {p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)} - _relatives()

    def summary(self) -> dict[str, Any]:
        """``sm_clock_mhz`` and ``temperature_c`` [lowest, highest] or None, ``other_cpu`` (cores busy with other processes), ``disturbed`` (reasons, none in a quiet run)."""
        wall, busy, own = (now - then for now, then in zip((time.perf_counter(), _busy_seconds(), time.process_time()), self._started))
        other = max(0.0, busy - own) / wall if wall else 0.0
        clocks, temperatures = ([min(x), max(x)] if x else None for x in (self._clocks, self._temperatures))
        disturbed = [f"throttled: {reason}" for reason in sorted(self._reasons)]
        if clocks and clocks[0] < clocks[1] * (1 - CLOCK_SPREAD):
            disturbed.append(f"the clock went from {clocks[1]} to {clocks[0]} MHz or back")
        if self._strangers:
            disturbed.append(f"{len(self._strangers)} other processes used the GPU")
        if other > OTHER_CPU:
            disturbed.append(f"other processes kept {other:.1f} cores busy")
        return {"sm_clock_mhz": clocks, "temperature_c": temperatures, "other_cpu": round(other, 3), "disturbed": disturbed}


def _device() -> tuple[Any, Any] | None:
    """nvidia-ml-py and its handle of the first visible GPU, if both are there."""
    try:
        import pynvml

        pynvml.nvmlInit()
        device = first_visible()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(device)
    except Exception:  # not installed, or no driver: then nothing is known of the GPU
        return None


def _busy_seconds() -> float:
    """Seconds that all cores together were busy since the machine started; 0 where the system does not tell."""
    try:
        user, nice, system, _idle, _wait, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _relatives() -> set[int]:
    """This process, the comparison that started it, and its other workers."""
    import psutil

    try:
        parent = psutil.Process().parent()
        return {os.getpid(), parent.pid, *(child.pid for child in parent.children(recursive=True))}
    except (psutil.Error, AttributeError):
        return {os.getpid()}
