"""transformers as its users speed it up: a static cache, and the step in a CUDA graph, made by hand or by torch.compile.

An arm like this project's own: the same forced tokens, the same clock. Selection and feedback
are in the graph made by hand; torch.compile's holds the model alone, as ``generate`` has it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import StaticCache

from torch_decoder.graphs import Backend, CudaBackend, Recorded, record

from .arms import ForcedArm
from .models import model_config
from .timing import MeasurementError
from .workload import Variant, Workload


class StaticPeer(ForcedArm):
    """A variant of transformers with a static cache: launch cuda_graph, kernels plain or compiled (mode reduce-overhead).

    Prompts are padded on the left, [B, W]; a padded query sees itself, so that no row of scores is
    empty. ``backend`` records the graph; without one it is the CUDA device's.
    """

    load_s = None  # the weights are there already

    def __init__(self, variant: Variant, model: torch.nn.Module, workload: Workload, prompts: Sequence[Sequence[int]], forced: np.ndarray, backend: Backend | None = None):
        self.variant, self.prompts, self.forced, self.config = variant, prompts, forced.tolist(), model_config(workload.model)
        self._refuse_windows(workload)
        self._model, self._backend, self._recorded = model, backend, None
        self._parameter = "cache" if "cache" in inspect.signature(type(model.model).forward).parameters else "past_key_values"
        device, rows = model.device, len(prompts)
        self._cache = StaticCache(config=model.config, max_cache_len=workload.max_seq_len)
        self._slots = torch.arange(workload.max_seq_len, device=device)
        self._forced = torch.from_numpy(forced).to(device)
        self._pads = torch.tensor([max(map(len, prompts)) - len(p) for p in prompts], device=device)[:, None, None, None]
        self._tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._slot, self._column = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self._logits = torch.zeros(rows, model.config.vocab_size, dtype=torch.float32, device=device)
        self._forward = torch.compile(model, mode="reduce-overhead") if variant.kernels == "compiled" else model
        self._launch = self._step
        started = time.perf_counter()
        self._start()
        self.wait()
        self.start_s = time.perf_counter() - started

    def __str__(self) -> str:
        return self.variant.label()

    def _refuse_windows(self, workload: Workload) -> None:
        if any(window is not None and window < workload.max_seq_len for window in self.config.sliding_windows):
            raise MeasurementError("a sliding window shorter than the cache: transformers keeps such layers in another static cache, which this arm does not drive")

    def _start(self) -> None:
        self.restart()
        if self.variant.kernels == "plain":
            backend = self._backend or CudaBackend(self._model.device)
            self._recorded: Recorded | None = record(self._step, backend, tuple, nullcontext)
            self._launch = self._recorded.graph.replay
        else:
            for _ in range(3):  # compiled at the first, recorded at the second, replayed at the third
                self._step()
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Prefill the prompts, take the first forced token."""
        self._cache.reset()
        width = max(map(len, self.prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in self.prompts], device=self._model.device)
        columns = torch.arange(width, device=ids.device)
        self._slot.fill_(width)
        self._column.zero_()
        out = self._model(input_ids=ids, position_ids=(columns - self._pads[:, 0, 0]).clamp(min=0), **self._seen(columns))
        self._advance(out.logits[:, -1])

    def _seen(self, queries: torch.Tensor) -> dict[str, Any]:
        """Arguments of the model: the cache, and what queries in these slots may look at, [B, 1, T, S]."""
        own = self._slots == queries[:, None]
        mask = (self._slots <= queries[:, None]) & (self._slots >= self._pads) | own
        return {"attention_mask": mask, self._parameter: self._cache, "use_cache": True}

    @torch.no_grad()
    def _step(self) -> None:
        if self.variant.kernels == "compiled":
            torch.compiler.cudagraph_mark_step_begin()
        out = self._forward(input_ids=self._tokens, position_ids=self._slot - self._pads[:, 0, 0], **self._seen(self._slot))
        self._slot.add_(1)
        self._advance(out.logits[:, -1])

    def _advance(self, logits: torch.Tensor) -> None:
        """Select, force and feed the token, all on the device."""
        self._logits.copy_(logits)
        chosen = self._logits.argmax(-1, keepdim=True)
        forced = self._forced.gather(1, self._column.expand(len(chosen), 1))
        self._tokens.copy_(torch.where(forced >= 0, forced, chosen))
        self._column.add_(1)

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._launch()

    def newest(self, name: str) -> torch.Tensor:
        return self._tokens if name == "tokens" else self._logits

    def compilations(self) -> int:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def compile_s(self) -> float | None:
        return self.start_s if self.variant.kernels == "compiled" else None

    def graph_account(self) -> dict[str, Any]:
        """Cost of the graph made by hand; torch.compile tells nothing of its own."""
        if self._recorded is None:
            return {}
        nodes = {} if self._recorded.graph.nodes is None else {"kernels_per_step": self._recorded.graph.nodes}
        return {**nodes, **{name: getattr(self._recorded, name) for name in ("capture_s", "instantiate_s", "warm_up_bytes", "graph_bytes")}}

    def memory_map(self) -> dict[str, list[int]]:
        """None: transformers' cache is two tensors a layer."""
        return {}

    def check_launch(self) -> None:
        """Nothing falls back here: what cannot be recorded raises."""

    def close(self) -> None:
        if self._recorded is not None:
            self._recorded.graph.close()
