"""Device memory, planned before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .cache import memory_map
from .config import ModelConfig
from .errors import ConfigError
from .runner import PREFILL_CHUNK

GIB = 2**30
# What a context, library handles and their workspaces take besides what is planned.
OVERHEAD = 512 * 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the weights, and for each bucket of the states up to it and of work space.

    Every bucket has a state of its own. ``budget`` is what may be used, None without a limit;
    ``fits`` the buckets that it holds.
    """

    weights: int
    state: dict[int, int]
    work: dict[int, int]
    budget: int | None
    fits: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "state": self.state, "work": self.work, "budget": self.budget, "fits": list(self.fits)}


def plan_memory(config: ModelConfig, buckets: Sequence[int], max_seq_len: int, dtype: jnp.dtype, packing: str, budget: int | None) -> MemoryPlan:
    """Plan without allocating. Raises ConfigError, with the numbers, if the largest bucket does not fit."""
    weights = weight_count(config) * dtype.itemsize
    single = [sum(r.nbytes for r in memory_map(config, b, max_seq_len, dtype, packing)) for b in buckets]
    state = {b: sum(single[: i + 1]) for i, b in enumerate(buckets)}
    work = {b: work_bytes(config, b, max_seq_len, dtype) for b in buckets}
    fits = tuple(b for b in buckets if budget is None or weights + state[b] + work[b] <= budget)
    plan = MemoryPlan(weights, state, work, budget, fits)
    if (largest := buckets[-1]) not in fits:
        needed = [f"{n} {size / GIB:.2f}" for n, size in (("weights", weights), ("cache and state", state[largest]), ("work space", work[largest]))]
        raise ConfigError(
            f"max_batch {largest} with max_seq_len {max_seq_len} needs {(weights + state[largest] + work[largest]) / GIB:.2f} GiB ({', '.join(needed)}), "
            f"but {budget / GIB:.2f} GiB may be used: buckets that fit are {list(fits) or 'none'}; lower max_batch or max_seq_len, or raise memory_budget"
        )
    return plan


def weight_count(config: ModelConfig) -> int:
    """Numbers in all parameters."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    layer = width * heads + config.num_heads * config.head_dim * width + 3 * width * inner + 2 * width
    layer += config.qkv_bias * heads + config.o_bias * width + config.mlp_bias * (2 * inner + width) + config.qk_norm * 2 * config.head_dim
    heads_of_vocabulary = 1 if config.tie_word_embeddings else 2
    return config.num_layers * layer + heads_of_vocabulary * config.vocab_size * width + width


def work_bytes(config: ModelConfig, bucket: int, max_seq_len: int, dtype: jnp.dtype) -> int:
    """An upper bound of what a step or a prefill chunk allocates besides, and of library workspaces."""
    tokens = min(PREFILL_CHUNK["gpu"], max_seq_len)
    # A chunk: projections of one layer twice over, and scores with their softmax if attention is not fused.
    activations = tokens * (4 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize
    scores = 2 * config.num_heads * tokens * max_seq_len * 4
    # A sampled step holds several float32 copies of its logits.
    selection = 12 * bucket * config.vocab_size * 4
    return max(activations + scores, selection) + OVERHEAD


def available_bytes(device: jax.Device) -> int | None:
    """What JAX may still take of a GPU's memory; None on other devices."""
    statistics = device.memory_stats() if device.platform == "gpu" else None
    return statistics["bytes_limit"] - statistics["bytes_in_use"] if statistics else None
