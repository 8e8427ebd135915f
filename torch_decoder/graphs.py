"""Recording a step as a CUDA graph: the recipe, and what it needs of the device.

The recipe takes the device as an argument. ``CudaBackend`` is the real one; tests pass one that
traces a step's operations and replays those, so everything around a capture is tested on a CPU.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from .driver import count_nodes
from .errors import CaptureError

WARM_UP_STEPS = 3


def recoverable() -> tuple[type[BaseException], ...]:
    """What a capture or a replay may raise and a decoder survives.

    Refused operations, capture errors and lack of memory are RuntimeErrors in PyTorch; Triton's (a
    kernel that does not compile or fit) have a class of their own, once Triton is imported.
    """
    triton = sys.modules.get("triton.errors")
    return (RuntimeError, MemoryError, CaptureError, *((triton.TritonError,) if triton else ()))


class Graph(Protocol):
    """A recorded step."""

    nodes: int | None

    def replay(self) -> None:
        """Enqueue the whole step with one launch."""

    def close(self) -> None:
        """Release the graph; it cannot be replayed afterwards."""


class Backend(Protocol):
    """What recording needs of a device."""

    def warm_up(self, step: Callable[[], None], times: int) -> None:
        """Run the step for real, on a stream that nothing else uses."""

    def capture(self, step: Callable[[], None]) -> Any:
        """Record the step without running it."""

    def instantiate(self, captured: Any) -> Graph:
        """Make what was captured launchable."""

    def instantiate_loop(self, captured: Any, flag: Tensor) -> Graph:
        """Make it launchable as the body of a loop on the device that ends when ``flag`` is 0."""

    def free_bytes(self) -> int | None:
        """Free memory of the device as the driver sees it; None where that means nothing."""

    def return_memory(self) -> None:
        """Give memory of failed or closed graphs back to the device."""

    def alive(self) -> bool:
        """False after an error that the CUDA context does not survive."""


@dataclass
class Recorded:
    """A graph, what it cost, and the addresses that it holds."""

    graph: Graph
    addresses: tuple[int, ...]
    warm_up_s: float
    capture_s: float
    instantiate_s: float
    warm_up_bytes: int | None  # libraries' workspaces and loaded kernels; they serve later graphs, too
    graph_bytes: int | None
    checked: bool = False  # the addresses, since someone last had a chance to move something


def record(
    step: Callable[[], None],
    backend: Backend,
    addresses: Callable[[], tuple[int, ...]],
    keeping: Callable[[], AbstractContextManager[None]],
    loop_flag: Tensor | None = None,
) -> Recorded:
    """Record ``step``, which reads and writes fixed buffers only.

    ``addresses`` lists where the buffers lie; ``keeping`` makes a context that puts the state
    back, because warm-up moves it. With ``loop_flag`` the graph loops on the device. Raises what
    the backend raises (see ``recoverable``), with the state as it was.
    """
    with _no_collection(), keeping():
        free = [backend.free_bytes()]
        clock = _Stopwatch()
        backend.warm_up(step, WARM_UP_STEPS)  # lazy library set-up must not be recorded
        warm_up_s = clock.lap()
        free.append(backend.free_bytes())
        clock.lap()
        captured = backend.capture(step)
        capture_s = clock.lap()
        graph = backend.instantiate(captured) if loop_flag is None else backend.instantiate_loop(captured, loop_flag)
        instantiate_s = clock.lap()
    free.append(backend.free_bytes())
    warm_up_bytes, graph_bytes = (None if a is None or b is None else a - b for a, b in pairwise(free))
    return Recorded(graph, addresses(), warm_up_s, capture_s, instantiate_s, warm_up_bytes, graph_bytes)


class _Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: one that frees a CUDA tensor during capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraph:
    """A captured step behind torch.cuda.CUDAGraph."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self._graph = graph
        self.nodes = count_nodes(graph.raw_cuda_graph())
        self.replay = graph.replay  # no wrapper: this call is all that the host does for a step

    def close(self) -> None:
        self._graph.reset()
        self.replay = _closed


def _closed() -> None:
    raise CaptureError("this graph was released: the decoder that recorded it is closed")


class CudaBackend:
    """Captures with torch.cuda.CUDAGraph: one stream and one memory pool for all graphs.

    Graphs of one pool share memory for what is temporary in a step, so no two may run at once:
    the runner replays them on one stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None], times: int) -> None:
        # Both waits matter: a buffer written on the current stream may not be there yet, and what
        # the warm-up wrote must be there before anyone reads it.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):  # makes its device the current one, too
            for _ in range(times):
                step()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._stream):
            # thread_local: a data loader or monitor in another thread may use the GPU meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                _end_failed_capture(graph)
                raise
            graph.capture_end()
        return graph

    def instantiate(self, captured: torch.cuda.CUDAGraph) -> CudaGraph:
        captured.instantiate()
        return CudaGraph(captured)

    def instantiate_loop(self, captured: torch.cuda.CUDAGraph, flag: Tensor) -> Graph:
        from .device_loop import DeviceLoop  # needs cuda.bindings, which only this launch mode needs

        return DeviceLoop(captured, flag, self.device)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def return_memory(self) -> None:
        # A failed capture leaves its pool in use; graphs recorded from now on get another one.
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def alive(self) -> bool:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True


def _end_failed_capture(graph: torch.cuda.CUDAGraph) -> None:
    """Leave capture mode; the stream stays unusable otherwise."""
    with suppress(RuntimeError):  # says only that the capture failed, which is known
        graph.capture_end()
