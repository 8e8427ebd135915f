"""What the machine can do at most: bandwidths, and what a launch costs. On a GPU measured by PyTorch, in a process of its own.

``python -m compare.ceilings`` prints what it finds as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from .timing import STEPS_A_BLOCK, harness_us

NODES = (1, 10, 100, 1000)  # of the graphs whose launch is timed
_REPEATS, _LIMIT_S = 10, 120


@lru_cache
def ceilings(cuda: bool) -> dict[str, Any]:
    """Measured once a process: ``copy_gb_per_s`` of the host's memory, ``harness_us`` a step that measuring adds, and, with a GPU, what ``device_ceilings`` gives; an ``error`` in its place if that failed."""
    found: dict[str, Any] = {"copy_gb_per_s": host_copy_bandwidth(), "harness_us": harness_us(STEPS_A_BLOCK["cuda" if cuda else "cpu"])}
    if not cuda:
        return found
    try:
        done = subprocess.run([sys.executable, "-m", "compare.ceilings"], capture_output=True, text=True, timeout=_LIMIT_S)
        lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
        return found | (json.loads(lines[-1]) if done.returncode == 0 else {"error": lines[-1] if lines else f"ended with code {done.returncode}"})
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:  # what else was measured must not be lost with these
        return found | {"error": f"{type(error).__name__}: {error}"}


def host_copy_bandwidth(megabytes: int = 256) -> float:
    """GB/s of a host copy, bytes read and written counted: the ceiling of a CPU step."""
    source = np.ones(megabytes * 125_000)  # float64
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best / 1e9


def device_ceilings(megabytes: int = 1024) -> dict[str, Any]:
    """What a step on the first GPU cannot exceed.

    ``device_copy_gb_per_s`` (bytes read and written) and ``gemv_gb_per_s`` (bytes of a bfloat16
    matrix, read once by PyTorch's matrix-vector product); ``empty_step_us``, what the step's clock
    reads when nothing runs; ``null_kernel``, host and device µs of a kernel that does nothing,
    launched one by one; ``graph_launch``, for each number of such kernels in one graph the host's
    µs to launch it and the device's to run it; ``switch_node``, what ``switch_node`` gives.
    """
    import torch

    size = megabytes * 2**20
    source = torch.zeros(size, dtype=torch.int8, device="cuda")
    target, vector = torch.empty_like(source), torch.zeros(8192, dtype=torch.bfloat16, device="cuda")
    copy_s = _device_seconds(lambda: target.copy_(source))
    matrix = source.view(torch.bfloat16).view(-1, 8192)
    product_s = _device_seconds(lambda: torch.mv(matrix, vector))
    graphs = {count: _null_graph(count) for count in NODES}
    return {
        "device_copy_gb_per_s": 2 * size / copy_s / 1e9,
        "gemv_gb_per_s": size / product_s / 1e9,
        "empty_step_us": _empty_step_us(),
        "null_kernel": _launch_us(lambda: torch.cuda._sleep(0), 200),
        "graph_launch": {str(count): _launch_us(graph.replay, 20) for count, graph in graphs.items()},
        "switch_node": switch_node(),
    }


def switch_node(count: int = 50, choices: int = 4) -> dict[str, Any]:
    """``device_us`` that a choice on the device adds: ``count`` kernels, each one of ``choices`` behind a SWITCH node and the
    kernel that sets it, against twice as many kernels in a row; ``not_measured`` with the reason where that fails."""
    import torch

    from torch_decoder import CaptureError
    from torch_decoder.device_loop import ConditionalGraph

    device, captured = torch.device("cuda"), _null_graph(1, keep_graph=True)
    choice = torch.ones(1, dtype=torch.int32, device=device)
    try:
        graph, last = ConditionalGraph(device), []
        for _ in range(count):
            handle = graph.condition(default=0)
            bodies, node = graph.add_conditional(handle, "SWITCH", choices, [graph.add_setter(graph.root, handle, choice, last)])
            for body in bodies:
                graph.add_child(body, captured)
            last = [node]
        graph.instantiate()
        switched = _launch_us(graph.replay, 5)["device_us"]
        graph.close()
    except CaptureError as error:
        return {"not_measured": str(error)}
    plain = _launch_us(_null_graph(2 * count).replay, 5)["device_us"]
    return {"choices": choices, "device_us": (switched - plain) / count}


def _device_seconds(work: Callable[[], Any]) -> float:
    """The quickest of a few runs, by CUDA events."""
    import torch

    best = float("inf")
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def _null_graph(count: int, **options: bool) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph(**options)
    with torch.cuda.graph(graph):
        for _ in range(count):
            torch.cuda._sleep(0)
    return graph


def _launch_us(launch: Callable[[], Any], count: int) -> dict[str, float]:
    """Medians of the host's time a launch, and of the device's from one to the next while the queue is full."""
    import torch

    host, device = [], []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        started = time.perf_counter()
        for _ in range(count):
            launch()
        host.append((time.perf_counter() - started) / count)
        end.record()
        end.synchronize()
        device.append(start.elapsed_time(end) / 1e3 / count)
    return {"host_us": float(np.median(host)) * 1e6, "device_us": float(np.median(device)) * 1e6}


def _empty_step_us() -> float:
    import torch

    seconds = []
    for _ in range(100):
        started = time.perf_counter()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)) * 1e6


if __name__ == "__main__":
    print(json.dumps(device_ceilings()))
