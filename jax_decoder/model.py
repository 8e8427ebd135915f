"""The model: embedding, layers, final norm and output head. It is the only forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .cache import KVCache
from .config import ModelConfig
from .errors import ConfigError
from .kernels import plain, products, summary, tiles
from .kernels.plain import Weight
from .layers import DecoderLayer, RMSNorm, Tap, parameter
from .sampling import select_greedy

PACKINGS = ("separate", "stacked")
KERNELS = ("plain", "fused")


def check_fused(config: ModelConfig) -> None:
    """Raise ConfigError naming what fused kernels cannot be compiled for; the interpreter takes all."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    sizes = {"head_dim": config.head_dim, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size, "q, k and v": heads}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % tiles.MIN_DOT]
    if config.head_dim & (config.head_dim - 1) or config.head_dim < 2 * tiles.MIN_DOT:
        odd.append(f"head_dim {config.head_dim}, which must be a power of two and at least {2 * tiles.MIN_DOT}")
    if odd and not tiles.interpreted():
        raise ConfigError(f"fused kernels take multiples of {tiles.MIN_DOT}, found {'; '.join(odd)}: use kernels='plain'")


class Buffer(nnx.Variable):
    """An array that no checkpoint holds."""


class Embedding(nnx.Module):
    """Token embedding or output head, weight [V, D]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.weight = parameter(None, dtype, config.vocab_size, config.hidden_size)


class Model(nnx.Module):
    """A dense decoder-only language model (transformers' LlamaForCausalLM and kin).

    ``packing`` says how the layers' weights lie: "separate" arrays for each layer, best on a CPU,
    where every slice of a stacked array would be copied; or "stacked" with a leading layer axis,
    best on a GPU, where each array argument costs the host 1.5 µs a step. ``kernels`` is "plain" or
    "fused" (this project's Pallas kernels for steps of few rows; plain ones for everything else).
    Build it under ``nnx.eval_shape``; checkpoint.py fills it.
    """

    def __init__(self, config: ModelConfig, max_seq_len: int, packing: str, dtype: jnp.dtype, kernels: str = "plain"):
        self.config, self.max_seq_len, self.packing, self.kernels = config, max_seq_len, packing, kernels
        self.embed_tokens = Embedding(config, dtype)
        if packing == "stacked":
            self.layers = DecoderLayer(config, config.num_layers, dtype)
        else:
            self.layers = nnx.List([DecoderLayer(config, None, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, None, dtype)
        # A tied head reads the embedding's own array: there is no second copy to go stale.
        self.lm_head = None if config.tie_word_embeddings else Embedding(config, dtype)
        self.rope = Buffer(jnp.zeros((max_seq_len, 2, config.head_dim // 2), jnp.float32))

    def layer(self, index: int) -> tuple[DecoderLayer, int | None]:
        """The one way to a layer's weights: its module, and its index there if they are stacked."""
        return (self.layers, index) if self.packing == "stacked" else (self.layers[index], None)

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache, tap: Tap = lambda name, value: value) -> tuple[Float[Array, "B T D"], KVCache]:
        """Hidden states before the final norm, and the cache with keys and values at ``positions``.

        Positions past the last slot are not written. ``tap`` sees (and may replace) every stage.
        """
        if self.fused(*tokens.shape):
            return self._fused_layers(tokens[:, 0], positions[:, 0], cache)
        x = tap("embed_tokens", self.embed_tokens.weight[...][tokens])
        rope = self.rope[...].at[positions].get(mode="clip")
        masks = self._masks(positions, cache.length)
        for index in range(self.config.num_layers):
            module, layer = self.layer(index)
            x, cache = module(x, index, layer, rope, cache, positions, masks[self.config.sliding_windows[index]], tap)
        return x, cache

    def fused(self, rows: int, length: int) -> bool:
        """Do fused kernels take that many rows of that many tokens?"""
        return self.kernels == "fused" and length == 1 and rows <= tiles.FUSED_ROWS

    def _fused_layers(self, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: KVCache) -> tuple[Float[Array, "B 1 D"], KVCache]:
        batch = tokens.shape[0]
        padding = (0, tiles.padded_rows(batch) - batch)
        x = self.embed_tokens.weight[...][jnp.pad(tokens, padding)]
        k, v, rope = *(side[0] for side in cache), self.rope[...]
        finished = jnp.zeros((batch * self.config.num_kv_heads,), jnp.int32)
        early = tiles.starts_early(self.config.hidden_size)
        for index in range(self.config.num_layers):
            x, k, v, finished = self.layers.fused_step(x, index, rope, k, v, positions, self.config.sliding_windows[index], finished, early)
        return x[:batch, None], KVCache((k,), (v,))

    def logits(self, hidden: Float[Array, "B T D"], tap: Tap = lambda name, value: value) -> Float[Array, "B T V"]:
        """Final norm and output head: float32 logits."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if self.fused(*hidden.shape[:2]):
            batch = hidden.shape[0]
            x = jnp.pad(hidden[:, 0], ((0, tiles.padded_rows(batch) - batch), (0, 0)))
            early = tiles.starts_early(self.config.hidden_size)
            return products.norm_linear(x, Weight(self.norm.weight[...]), self.norm.eps, Weight(head.weight[...]), None, jnp.float32, early)[:batch, None]
        x = tap("norm", self.norm(tap("norm.input", hidden), None))
        return tap("lm_head", plain.linear(tap("lm_head.input", x), Weight(head.weight[...]), out_dtype=jnp.float32))

    def greedy_and_normaliser(self, logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Of the logits of a step: the id of each row's largest, and the logarithm of the sum of their exponentials."""
        if self.fused(logits.shape[0], 1):
            return summary.summarise(logits, tiles.starts_early(self.config.hidden_size))
        return select_greedy(logits), jax.nn.logsumexp(logits, axis=1)

    def _masks(self, positions: Int[Array, "B T"], slots: int) -> dict[int | None, Bool[Array, "B T S"]]:
        """One mask for each different window: true where a query may look."""
        distance = positions[..., None] - jnp.arange(slots, dtype=jnp.int32)
        return {w: (distance >= 0) if w is None else (distance >= 0) & (distance < w) for w in set(self.config.sliding_windows)}
