"""The parts of a decoder layer as nnx modules, with the names that Hugging Face gives them.

Query, key and value projections are one matrix, gate and up another. A module is one layer's
(``stack`` None), or holds the arrays of all layers with a leading axis and is called with the
index of the layer that is meant.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .cache import KVCache
from .config import ModelConfig
from .kernels import attention, plain, products
from .kernels.plain import Weight

# Called with the name and value of a stage's input or output; returns the value to go on with.
Tap = Callable[[str, Array], Array]


def parameter(stack: int | None, dtype: jnp.dtype, *shape: int) -> nnx.Param:
    """A parameter without values: build modules under ``nnx.eval_shape`` and fill them."""
    return nnx.Param(jnp.zeros(shape if stack is None else (stack, *shape), dtype))


class Linear(nnx.Module):
    """``x @ weight.T + bias``; weight [out, in]."""

    def __init__(self, in_features: int, out_features: int, bias: bool, stack: int | None, dtype: jnp.dtype):
        self.weight = parameter(stack, dtype, out_features, in_features)
        self.bias = parameter(stack, dtype, out_features) if bias else None

    def __call__(self, x: Float[Array, "*B I"], layer: int | None, out_dtype: DTypeLike | None = None) -> Float[Array, "*B O"]:
        bias = None if self.bias is None else Weight(self.bias[...], layer)
        return plain.linear(x, Weight(self.weight[...], layer), bias, out_dtype)


class RMSNorm(nnx.Module):
    """Source: transformers' LlamaRMSNorm."""

    def __init__(self, width: int, eps: float, stack: int | None, dtype: jnp.dtype):
        self.weight, self.eps = parameter(stack, dtype, width), eps

    def __call__(self, x: Float[Array, "*B D"], layer: int | None) -> Float[Array, "*B D"]:
        return plain.rms_norm(x, Weight(self.weight[...], layer), self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over a static cache (transformers' Qwen3Attention and kin)."""

    def __init__(self, config: ModelConfig, stack: int | None, dtype: jnp.dtype):
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, query_width + 2 * kv_width, config.qkv_bias, stack, dtype)
        self.o_proj = Linear(query_width, config.hidden_size, config.o_bias, stack, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, stack, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, stack, dtype) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        index: int,
        layer: int | None,
        rope: Float[Array, "B T 2 R"],
        cache: KVCache,
        slots: Int[Array, "B T"],
        mask: Bool[Array, "B T S"],
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        batch, length, _ = x.shape
        heads = self.qkv_proj(x, layer, jnp.float32).reshape(batch, length, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        norms = None if self.q_norm is None else (Weight(self.q_norm.weight[...], layer), Weight(self.k_norm.weight[...], layer), self.q_norm.eps)
        heads = plain.norm_and_rotate(heads, self.num_heads, self.num_kv_heads, norms, rope).astype(x.dtype)
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=2)
        cache = cache.write(index, k, v, slots)
        out = plain.attend(q, *cache.read(index), mask)
        return self.o_proj(out, layer), cache


class MLP(nnx.Module):
    """Gated SiLU feed-forward (transformers' LlamaMLP)."""

    def __init__(self, config: ModelConfig, stack: int | None, dtype: jnp.dtype):
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, stack, dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, stack, dtype)

    def __call__(self, x: Float[Array, "B T D"], layer: int | None) -> Float[Array, "B T D"]:
        return self.down_proj(plain.gated_silu(self.gate_up_proj(x, layer)), layer)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals (transformers' LlamaDecoderLayer)."""

    def __init__(self, config: ModelConfig, stack: int | None, dtype: jnp.dtype):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, stack, dtype)
        self.self_attn = Attention(config, stack, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, stack, dtype)
        self.mlp = MLP(config, stack, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        index: int,
        layer: int | None,
        rope: Float[Array, "B T 2 R"],
        cache: KVCache,
        slots: Int[Array, "B T"],
        mask: Bool[Array, "B T S"],
        tap: Tap,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        name = f"layers.{index}"
        x = tap(f"{name}.input", x)
        attention_in = tap(f"{name}.self_attn.input", self.input_layernorm(x, layer))
        attention, cache = self.self_attn(attention_in, index, layer, rope, cache, slots, mask)
        x = x + tap(f"{name}.self_attn", attention)
        mlp_in = tap(f"{name}.mlp.input", self.post_attention_layernorm(x, layer))
        x = x + tap(f"{name}.mlp", self.mlp(mlp_in, layer))
        return tap(name, x), cache

    def fused_step(
        self,
        x: Float[Array, "P D"],
        layer: int,
        rope: Float[Array, "S 2 R"],
        k_cache: Float[Array, "L B K S H"],
        v_cache: Float[Array, "L B K S H"],
        positions: Int[Array, " B"],
        window: int | None,
        finished: Int[Array, " C"],
        early: bool,
    ) -> tuple[Float[Array, "P D"], Float[Array, "L B K S H"], Float[Array, "L B K S H"], Int[Array, " C"]]:
        """One layer of stacked arrays for one token a row, in five kernels of this project; ``early`` as in ``kernels.tiles``."""

        def at(variable: nnx.Variable | None) -> Weight | None:
            return None if variable is None else Weight(variable[...], layer)

        ours, mlp, norm, next_norm = self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
        norms = None if ours.q_norm is None else (at(ours.q_norm.weight), at(ours.k_norm.weight), ours.q_norm.eps)
        heads = products.norm_linear(x, at(norm.weight), norm.eps, at(ours.qkv_proj.weight), at(ours.qkv_proj.bias), jnp.float32, early)
        attended, k_cache, v_cache, finished = attention.attend(heads, norms, rope, positions, k_cache, v_cache, layer, window, finished, early)
        x = products.linear_add(attended, at(ours.o_proj.weight), at(ours.o_proj.bias), x, early)
        inner = products.norm_gated_silu(x, at(next_norm.weight), next_norm.eps, at(mlp.gate_up_proj.weight), at(mlp.gate_up_proj.bias), early)
        return products.linear_add(inner, at(mlp.down_proj.weight), at(mlp.down_proj.bias), x, early), k_cache, v_cache, finished
