"""A device for the PyTorch runner's recipe that needs no GPU: it records a step's operations.

Like a CUDA graph, a recording holds the tensors and the Python values that the step used while it
was recorded, and replays the operations on them whatever has become of the names.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_decoder import Decoder
from torch_decoder.buckets import check_buckets
from torch_decoder.checkpoint import DTYPES, build_model, read_tensors
from torch_decoder.config import ModelConfig
from torch_decoder.graphs import CaptureError
from torch_decoder.options import resolve_device
from torch_decoder.runner import StepRunner
from torch_decoder.text import Tokenizer

POINTS = ("warm_up", "capture", "instantiate", "replay")


class Traced:
    """A recorded step; with ``flag`` it runs until that is 0."""

    def __init__(self, backend: TracingBackend, module: Callable[[], None], nodes: int, flag: Tensor | None = None):
        self._backend, self._module, self._flag, self.nodes = backend, module, flag, nodes
        self.closed = False

    def replay(self) -> None:
        if self.closed:
            raise CaptureError("replayed after it was released")
        self._backend.reach("replay")
        self._module()
        while self._flag is not None and int(self._flag):
            self._module()

    def close(self) -> None:
        self.closed = True
        self._backend.open_graphs -= 1


class TracingBackend:
    """Records with make_fx. ``fail`` names points at which it raises, with the error to raise."""

    def __init__(self) -> None:
        self.fail: dict[str, BaseException] = {}
        self.reached: list[str] = []
        self.open_graphs = self.memory_returned = 0
        self.is_alive = True

    def reach(self, point: str) -> None:
        self.reached.append(point)
        if point in self.fail:
            raise self.fail[point]

    def warm_up(self, step: Callable[[], None], times: int) -> None:
        for _ in range(times):
            step()
        self.reach("warm_up")  # at the end: the state has moved by then

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        module = make_fx(lambda: (step(), None)[1])()
        self.reach("capture")
        return module

    def instantiate(self, captured: Callable[[], None]) -> Traced:
        return self._instantiate(captured, None)

    def instantiate_loop(self, captured: Callable[[], None], flag: Tensor) -> Traced:
        return self._instantiate(captured, flag)

    def _instantiate(self, captured: Callable[[], None], flag: Tensor | None) -> Traced:
        self.reach("instantiate")
        self.open_graphs += 1
        return Traced(self, captured, sum(node.op == "call_function" for node in captured.graph.nodes), flag)

    def free_bytes(self) -> None:
        return None

    def return_memory(self) -> None:
        self.memory_returned += 1

    def alive(self) -> bool:
        return self.is_alive


def graph_decoder(path, *, launch: str = "cuda_graph", max_batch: int = 4, buckets=None, max_seq_len: int = 64, strict: bool = False, dtype: str = "float32") -> Decoder:
    """A CPU decoder whose graphs are recordings; ``decoder.backend`` is what records them."""
    config, device = ModelConfig.from_directory(path), resolve_device("cpu")
    model = build_model(config, read_tensors(path, config), DTYPES[dtype], device, max_seq_len, "plain")
    backend = TracingBackend()
    decoder = Decoder(model, StepRunner(model, launch, check_buckets(buckets, max_batch), DTYPES[dtype], device, backend, strict), Tokenizer(path))
    decoder.backend = backend
    return decoder
