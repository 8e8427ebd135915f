"""The static memory map: every byte that a decode step reads or writes besides the weights.

``[KV][logits][status][ring][tokens][positions]...``: the same map as the PyTorch decoder's, in few
arrays that are donated one by one, so that XLA writes each where it lies. Few, because each costs
the host time at every step: all that belongs to the rows is one array of words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .config import ModelConfig

MAX_STOP_IDS = 16
FLOAT32, INT32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)


class KVCache(NamedTuple):
    """Keys and values of every layer; slot p of a row belongs to the token at position p.

    One array [B, K, S, H] a layer, or a single one [L, B, K, S, H]: by ``model.packing``.
    """

    k: tuple[Float[Array, "..."], ...]
    v: tuple[Float[Array, "..."], ...]

    @property
    def stacked(self) -> bool:
        return self.k[0].ndim == 5

    @property
    def length(self) -> int:
        return self.k[0].shape[-2]

    def read(self, layer: int) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        return (self.k[0][layer], self.v[0][layer]) if self.stacked else (self.k[layer], self.v[layer])

    def write(self, layer: int, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], slots: Int[Array, "B T"]) -> KVCache:
        """Store new keys and values at ``slots``; a slot that does not exist is skipped."""

        def put(arrays: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
            if self.stacked:
                return (_store(arrays[0], (layer,), new, slots),)
            return (*arrays[:layer], _store(arrays[layer], (), new, slots), *arrays[layer + 1 :])

        return KVCache(put(self.k, k), put(self.v, v))

    def row(self, row: Int[Array, ""]) -> KVCache:
        """One row as a cache of batch 1."""
        axis = self.k[0].ndim - 4
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis), self)

    def with_row(self, row: Int[Array, ""], other: KVCache) -> KVCache:
        """This cache with one row replaced by a cache of batch 1."""
        axis = self.k[0].ndim - 4
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, axis), self, other)


def _store(array: Array, lead: tuple[int, ...], new: Float[Array, "B T K H"], slots: Int[Array, "B T"]) -> Array:
    """Write into [B, K, S, H] behind the indices ``lead``; what lies past S is left out.

    A scatter that drops, as ``dynamic_update_slice`` would clamp and overwrite the last slot. For a
    single token XLA makes four kernels of that scatter, and one of a slice that keeps what is there.
    """
    if new.shape[:2] != (1, 1):
        rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
        return array.at[(*lead, rows, slice(None), slots)].set(new, mode="drop")
    slot = slots[0, 0]
    start = (*lead, 0, 0, slot, 0)
    piece = new.reshape((1,) * (len(lead) + 1) + (new.shape[2], 1, new.shape[3]))
    kept = jax.lax.dynamic_slice(array, start, piece.shape)
    return jax.lax.dynamic_update_slice(array, jnp.where(slot < array.shape[-2], piece, kept), start)


@dataclass(frozen=True)
class Region:
    """One named piece of the map: offset and nbytes in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "offset": self.offset, "bytes": self.nbytes, "shape": list(self.shape)}


def cache_shapes(config: ModelConfig, batch: int, max_seq_len: int, packing: str) -> list[tuple[int, ...]]:
    """Shapes of the key arrays (and of the value arrays)."""
    one = (batch, config.num_kv_heads, max_seq_len, config.head_dim)
    return [(config.num_layers, *one)] if packing == "stacked" else [one] * config.num_layers


def memory_map(config: ModelConfig, batch: int, max_seq_len: int, dtype: jnp.dtype, packing: str) -> list[Region]:
    """All regions of a state with offsets as if its arrays lay end to end; allocates nothing."""
    wanted = []
    for index, shape in enumerate(cache_shapes(config, batch, max_seq_len, packing)):
        name = "KV" if packing == "stacked" else f"KV_{index}"
        wanted.append((name, (2, *shape), dtype))
    wanted.append(("logits", (batch, config.vocab_size), FLOAT32))
    wanted += row_fields(batch, max_seq_len)
    return _end_to_end(wanted)


@lru_cache
def row_regions(batch: int, max_seq_len: int) -> dict[str, Region]:
    """Where each field of the rows lies within ``DecodeState.words``, by name."""
    return {region.name: region for region in _end_to_end(row_fields(batch, max_seq_len))}


def row_fields(batch: int, max_seq_len: int) -> list[tuple[str, tuple[int, ...], jnp.dtype]]:
    """Name, shape and dtype of every field in ``DecodeState.words``, in order; all are 4 bytes wide."""
    # The newest token of a full cache has a position but needs no slot: hence the one more.
    history = (batch, max_seq_len + 1)
    return [
        ("status", (batch,), INT32),
        ("ring", history, INT32),
        ("logprobs", history, FLOAT32),
        ("forced", history, INT32),
        ("tokens", (batch,), INT32),
        ("positions", (batch,), INT32),
        ("limits", (batch,), INT32),
        ("stop_ids", (batch, MAX_STOP_IDS), INT32),
        ("filters", (batch, 3), FLOAT32),
        ("draws", (batch, 3), INT32),
    ]


def _end_to_end(wanted: list[tuple[str, tuple[int, ...], jnp.dtype]]) -> list[Region]:
    regions: list[Region] = []
    for name, shape, kind in wanted:
        offset = regions[-1].offset + regions[-1].nbytes if regions else 0
        regions.append(Region(name, tuple(shape), jnp.dtype(kind), offset))
    return regions
