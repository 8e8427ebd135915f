"""The machine and software that numbers come from."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata, util
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "jax", "jaxlib", "flax", "transformers", "numpy", "triton", "cupti-python")


def environment() -> dict[str, Any]:
    """Processor, GPU, driver, versions, XLA flags and commit; None where there is none."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "gpu": gpu(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _commit(),
    }


def first_visible() -> str | None:
    """The GPU that frameworks call the first: a number or UUID of CUDA_VISIBLE_DEVICES, "0" without it; None if it hides all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "0"
    first = visible.split(",")[0].strip()
    return first if first and first != "-1" else None


def gpu() -> dict[str, Any] | None:
    """Name, driver, clocks and memory of the first visible NVIDIA GPU, by nvidia-smi."""
    if (device := first_visible()) is None:
        return None
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "memory.total", "memory.free")
    try:
        done = subprocess.run(["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode or not done.stdout.strip():
        return None
    return dict(zip(fields, (value.strip() for value in done.stdout.splitlines()[0].split(","))))


def cuda_visible() -> dict[str, bool]:
    """For each framework whether it sees a CUDA device; asked without importing either here."""
    if gpu() is None:
        return {"torch": False, "jax": False, "transformers": False}
    torch = _prints_true("import torch; print(torch.cuda.is_available())")
    return {"torch": torch, "transformers": torch, "jax": _prints_true("import jax; print(jax.default_backend() == 'gpu')")}


def installed(name: str) -> bool:
    return util.find_spec(name) is not None


def _prints_true(code: str) -> bool:
    import sys

    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip().endswith("True")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
