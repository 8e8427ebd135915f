"""The static memory map: every byte that a decode step reads or writes besides the weights.

``[KV_0][KV_1]...[logits][status][ring][tokens][positions]...`` lie in one tensor at fixed
offsets, so that a captured graph may hold their addresses for as long as it lives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .config import ModelConfig

ALIGNMENT = 256  # bytes; what cudaMalloc gives, and enough for the widest loads
MAX_STOP_IDS = 16


class KVCache(NamedTuple):
    """Keys and values of every layer; slot p of a row belongs to the token at position p."""

    layers: tuple[Float[Tensor, "2 B K S H"], ...]  # keys, then values, so that one kernel writes both

    @property
    def k(self) -> tuple[Float[Tensor, "B K S H"], ...]:
        return tuple(layer[0] for layer in self.layers)

    @property
    def v(self) -> tuple[Float[Tensor, "B K S H"], ...]:
        return tuple(layer[1] for layer in self.layers)

    def rows(self, first: int, count: int) -> KVCache:
        """Some rows as a cache of their own that shares this memory."""
        return KVCache(tuple(layer[:, first : first + count] for layer in self.layers))


@dataclass(frozen=True)
class Region:
    """One named piece of the map: offset and nbytes in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "offset": self.offset, "bytes": self.nbytes, "shape": list(self.shape)}


@dataclass(frozen=True)
class MemoryMap:
    """Regions in order, and the bytes of the whole."""

    regions: tuple[Region, ...]
    nbytes: int

    @classmethod
    def plan(cls, config: ModelConfig, batch: int, max_seq_len: int, dtype: torch.dtype) -> MemoryMap:
        """Lay out the state of ``batch`` rows of ``max_seq_len`` slots; allocates nothing."""
        kv = (2, batch, config.num_kv_heads, max_seq_len, config.head_dim)
        wanted = [(f"KV_{i}", kv, dtype) for i in range(config.num_layers)]
        wanted += state_leaves(batch, max_seq_len, config.vocab_size)
        regions, offset = [], 0
        for name, shape, kind in wanted:
            region = Region(name, tuple(shape), kind, offset)
            regions.append(region)
            offset += -(-region.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(regions), offset)

    def allocate(self, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """The one tensor, zeroed, and its views by name."""
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        views = {r.name: buffer[r.offset : r.offset + r.nbytes].view(r.dtype).view(r.shape) for r in self.regions}
        return buffer, views


def state_leaves(batch: int, max_seq_len: int, vocab_size: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of every leaf of the state but the cache; see decode.DecodeState."""
    # The newest token of a full cache has a position but needs no slot: hence the one more.
    history = (batch, max_seq_len + 1)
    return [
        ("logits", (batch, vocab_size), torch.float32),
        ("status", (batch,), torch.int32),
        ("ring", history, torch.int32),
        ("logprobs", history, torch.float32),
        ("forced", history, torch.int32),
        ("tokens", (batch,), torch.int32),
        ("positions", (batch,), torch.int32),
        ("limits", (batch,), torch.int32),
        ("stop_ids", (batch, MAX_STOP_IDS), torch.int32),
        ("filters", (batch, 3), torch.float32),
        ("draws", (batch, 3), torch.int32),
    ]
