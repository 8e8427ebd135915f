"""Plain kernels: jax.numpy and lax alone, and the form that fused kernels must equal."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float


class Weight(NamedTuple):
    """A layer's weight where it lies: an array of its own, or one index of a stacked array.

    Kernels that can read a stacked array in place take the pair; the others ``read`` it.
    """

    array: Array
    layer: int | None = None

    def read(self) -> Array:
        return self.array if self.layer is None else self.array[self.layer]

    def stacked(self) -> tuple[Array, int]:
        """The array with a leading layer axis, and the layer."""
        return (self.array[None], 0) if self.layer is None else (self.array, self.layer)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    # float32 on a GPU would otherwise be multiplied as TF32, with 10 bits of mantissa.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(x: Float[Array, "*B K"], weight: Weight, bias: Weight | None = None, out_dtype: DTypeLike | None = None) -> Float[Array, "*B M"]:
    """``x @ weight.T + bias``; weights [M, K] as Hugging Face stores them, sums in float32."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, weight.read(), dims, precision=_precision(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias.read().astype(jnp.float32)
    return out.astype(x.dtype if out_dtype is None else out_dtype)


def rms_norm(x: Float[Array, "*B D"], weight: Weight, eps: float) -> Float[Array, "*B D"]:
    """Root mean square normalisation, statistics in float32 (arXiv 1910.07467; LlamaRMSNorm)."""
    wide = x.astype(jnp.float32)
    if x.size == x.shape[-1]:
        # XLA makes one GPU kernel of a norm of several rows, and two of a single row's. So the row
        # has company, which differs from it, or XLA would see through this.
        wide = wide.reshape(1, -1) * jnp.arange(1, 3, dtype=jnp.float32)[:, None]
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = (wide * scale * weight.read().astype(jnp.float32)).astype(x.dtype)
    return normed[:1].reshape(x.shape) if x.size == x.shape[-1] else normed


def apply_rope(x: Float[Array, "B T M H"], rope: Float[Array, "B T 2 R"]) -> Float[Array, "B T M H"]:
    """Rotate halves: R is H/2 and ``rope`` holds cosines and sines (transformers' rotate_half)."""
    cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]
    # float32 on purpose: the table is float32 and rounding the products to bfloat16 would cost
    # twice the error of rounding the result.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def norm_and_rotate(
    heads: Float[Array, "B T M H"], num_heads: int, num_kv_heads: int, norms: tuple[Weight, Weight, float] | None, rope: Float[Array, "B T 2 R"]
) -> Float[Array, "B T M H"]:
    """Query and key heads normalised (``norms``: their weights and epsilon) and rotated; value heads as they are.

    M is query, key and value heads, in this order. All in one pass: on a GPU every slice of heads
    that is taken first is one more kernel, in every layer.
    """
    number = jnp.arange(heads.shape[2], dtype=jnp.int32)[:, None]
    done = heads
    if norms is not None:
        q_weight, k_weight, eps = norms
        done = rms_norm(done, Weight(jnp.where(number < num_heads, q_weight.read(), k_weight.read())), eps)
    return jnp.where(number < num_heads + num_kv_heads, apply_rope(done, rope), heads)


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T M"]:
    """Softmax attention over the whole cache; ``mask`` is true where a query may look.

    Scores and softmax in float32. M is N * H. Slots past the row's end must hold finite values.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = _dot(grouped, k, "btkgh,bksh->bkgts")
    scores = jnp.where(mask[:, None, None], scores * width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = _dot(weights, v, "bkgts,bksh->btkgh")
    return out.reshape(batch, length, heads * width).astype(q.dtype)


def _dot(left: Array, right: Array, equation: str) -> Array:
    """One of the two products of ``attend``, summed in float32.

    A single query is multiplied and summed: XLA's CPU code for such thin batched products is
    three times slower, and on a GPU it fuses either way.
    """
    if (left.shape[1] if equation.startswith("btkgh") else left.shape[3]) > 1:
        return jnp.einsum(equation, left, right, precision=_precision(left.dtype), preferred_element_type=jnp.float32)
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)[:, :, None]
    if equation.startswith("btkgh"):
        return (left[:, 0, :, :, None] * right).sum(-1)[:, :, :, None]
    return (left[:, :, :, 0, :, None] * right).sum(-2)[:, None]


def gated_silu(gate_up: Float[Array, "*B F2"]) -> Float[Array, "*B F"]:
    """``silu(gate) * up`` of the fused projection, F2 = 2 F (arXiv 2002.05202; LlamaMLP)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
