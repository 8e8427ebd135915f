"""Launch modes: how a step reaches the device, in which bucket, and an account of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from .cache import MemoryMap
from .decode import DecodeState, admit, decode_step, make_state, prefill_chunk, release
from .errors import ConfigError, DeviceError
from .model import Model

LAUNCHES = ("auto", "eager")
PREFILL_CHUNK = 512  # tokens a forward pass; bounds the memory of scores and activations


@dataclass
class StepAccount:
    """What one executable (bucket and sampling kind) did so far."""

    launch: str
    bucket: int
    kind: str
    steps: int = 0
    padded_rows: int = 0  # idle or finished rows that steps computed all the same, summed


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch``, then ``max_batch`` itself."""
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return (*powers, max_batch)


def check_buckets(buckets: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """Buckets in ascending order up to exactly max_batch; ConfigError else."""
    if buckets is None:
        return default_buckets(max_batch)
    whole = all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in buckets)
    if not buckets or not whole or list(buckets) != sorted(set(buckets)) or buckets[-1] > max_batch:
        raise ConfigError(f"buckets is {list(buckets)!r}, expected ascending batch sizes from 1 to max_batch {max_batch}")
    return tuple(buckets)


def check_launch(launch: str, device: torch.device) -> str:
    """Resolve "auto"; ConfigError for a name that does not exist, DeviceError for a missing GPU."""
    if launch == "cuda_graph" and device.type != "cuda":
        raise DeviceError(f"launch is 'cuda_graph', but the device is {device.type}: graphs need a CUDA device, use launch='eager'")
    if launch not in LAUNCHES:
        raise ConfigError(f"launch is {launch!r}, expected one of {', '.join(LAUNCHES)}")
    return "eager" if launch == "auto" else launch


class StepRunner:
    """Owns the states, one a bucket, and runs steps on them.

    States live as long as the runner: their addresses are what a graph will hold.
    """

    def __init__(self, model: Model, launch: str, buckets: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.model, self.launch, self.buckets = model, launch, buckets
        self.dtype, self.device = dtype, device
        self._states: dict[int, DecodeState] = {}
        self._accounts: dict[tuple[int, str], StepAccount] = {}

    def bucket_for(self, rows: int) -> int:
        """The smallest bucket that holds ``rows``, or the largest there is."""
        return next((b for b in self.buckets if b >= rows), self.buckets[-1])

    def plan(self, bucket: int) -> MemoryMap:
        return MemoryMap.plan(self.model.config, bucket, self.model.max_seq_len, self.dtype)

    def state(self, bucket: int) -> DecodeState:
        """The bucket's own state with every row idle."""
        if bucket not in self._states:
            self._states[bucket] = self.new_state(bucket)
        for row in range(bucket):
            release(self._states[bucket], row)
        return self._states[bucket]

    def new_state(self, bucket: int) -> DecodeState:
        """A state outside the runner's own, for callers who keep it."""
        return make_state(self.plan(bucket), self.device)

    def admit(self, state: DecodeState, row: int, prompt: list[int], settings: dict[str, Any]) -> DecodeState:
        """Clear a row, prefill all of the prompt but its last token, and let the row run.

        The last token is the next step's input, so the first new token comes from the same
        step as all others.
        """
        admit(state, row, settings)
        cache = state.cache.row(row)
        for start in range(0, len(prompt) - 1, PREFILL_CHUNK):
            chunk = prompt[start : min(start + PREFILL_CHUNK, len(prompt) - 1)]
            prefill_chunk(self.model, cache, torch.tensor([chunk], dtype=torch.int32, device=self.device), start)
        return state

    def force(self, state: DecodeState, row: int, first: int, tokens: Sequence[int]) -> DecodeState:
        """Have the row take ``tokens`` at positions from ``first`` on instead of its own choice."""
        values = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        state.forced[row, first : first + len(tokens)].copy_(values)
        return state

    def release(self, state: DecodeState, row: int) -> DecodeState:
        release(state, row)
        return state

    def step(self, state: DecodeState, kind: str, live_rows: int) -> DecodeState:
        """One decode step; ``live_rows`` is only counted."""
        bucket = state.tokens.shape[0]
        key = (bucket, kind)
        account = self._accounts.setdefault(key, StepAccount(self.launch, bucket, kind))
        account.steps += 1
        account.padded_rows += bucket - live_rows
        return decode_step(self.model, state, kind)

    def read(self, state: DecodeState) -> dict[str, np.ndarray]:
        """Host copies of what decides how rows go on: waits for the device."""
        return {name: getattr(state, name).cpu().numpy() for name in ("status", "positions", "ring", "logprobs")}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def accounts(self) -> list[dict[str, Any]]:
        return [asdict(account) for account in self._accounts.values()]

    def close(self) -> None:
        self._states.clear()
