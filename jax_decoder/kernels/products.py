"""Fused products for few rows: norm, product, bias, activation and residual in one kernel (Pallas).

A decode step of few rows is bound by reading its weights once. Each program reads some rows of a
weight where it lies in the stacked array and multiplies them with all rows of the input, so
whatever surrounds the product costs a few registers and no kernel. One row is multiplied and
summed; several are padded to ``MIN_DOT`` by the caller and go through the tensor cores.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .plain import Weight
from .tiles import Tile, interpreted, let_next_start, tile_for

# Products of normalised rows are scaled when they are finished, so that rows are read once; until
# then float16 needs room above the largest activation. A power of two costs no bits.
_HEADROOM = 2.0**-6


def _kernel(*refs, inner: int, step: int, eps: float, norm: bool, bias: bool, gated: bool, add: bool, early: bool) -> None:
    """One tile of rows of the weight with all rows of the input; ``refs`` as ``_launch`` passes them."""
    zero = let_next_start(early)
    left = list(refs)
    x_ref = left.pop(0)
    norm_ref = left.pop(0) if norm else None
    weight_refs = [left.pop(0) for _ in range(1 + gated)]
    bias_refs = [left.pop(0) for _ in range((1 + gated) * bias)]
    residual_ref = left.pop(0) if add else None
    (out_ref,) = left
    rows, single = out_ref.shape[1], x_ref.shape[0] == 1

    def body(i: Array, carry: tuple) -> tuple:
        totals, squares = carry
        columns = pl.ds(i * step, step)
        value = x_ref[0, columns] if single else x_ref[:, columns]
        value = value.astype(jnp.float32)
        if norm:
            squares = squares + (value * value if single else (value * value).sum(1))
            value = value * (norm_ref[0, columns].astype(jnp.float32) * (1.0 if single else _HEADROOM))
        pieces = [ref[0, :, columns] for ref in weight_refs]
        if single:
            return tuple(t + p.astype(jnp.float32) * value[None] for t, p in zip(totals, pieces)), squares
        value = value.astype(pieces[0].dtype)
        return tuple(t + triton.dot(p, value, trans_b=True, allow_tf32=False) for t, p in zip(totals, pieces)), squares

    shape = (rows, step) if single else (rows, x_ref.shape[0])
    start = tuple(jnp.broadcast_to(zero[:, None], shape) for _ in weight_refs), jnp.zeros((step if single else x_ref.shape[0],), jnp.float32)
    totals, squares = jax.lax.fori_loop(0, inner // step, body, start)
    if single:
        totals, squares = tuple(t.sum(1) for t in totals), squares.sum()
    if norm:
        scale = jax.lax.rsqrt(squares / inner + eps)
        totals = tuple(t * scale if single else t * (scale / _HEADROOM)[None] for t in totals)
    if bias:
        values = [ref[0, :].astype(jnp.float32) for ref in bias_refs]
        totals = tuple(t + (b if single else b[:, None]) for t, b in zip(totals, values))
    y = jax.nn.silu(totals[0]) * totals[1] if gated else totals[0]
    y = y if single else y.T
    if add:
        # Rounded before the sum, as the plain kernels do.
        residual = residual_ref[0, :] if single else residual_ref[...]
        y = y.astype(residual.dtype).astype(jnp.float32) + residual.astype(jnp.float32)
    if single:
        out_ref[0, :] = y.astype(out_ref.dtype)
    else:
        out_ref[...] = y.astype(out_ref.dtype)


def _launch(
    x: Float[Array, "B K"],
    norm: Weight | None,
    eps: float,
    weight: Weight,
    bias: Weight | None,
    residual: Float[Array, "B N"] | None,
    out_dtype: DTypeLike,
    gated: bool,
    early: bool,
) -> Float[Array, "B N"]:
    batch, inner = x.shape
    array, layer = weight.stacked()
    rows = array.shape[1] // (1 + gated)
    tile: Tile = tile_for(rows, inner, batch, gated, array.dtype.itemsize)
    blocks = rows // tile.rows
    arguments, specs = [x], [pl.BlockSpec((batch, inner), lambda i: (0, 0))]

    def add(array: Array, shape: tuple[int, ...], index) -> None:
        arguments.append(array)
        specs.append(pl.BlockSpec(shape, index))

    if norm is not None:
        norms, norm_layer = norm.stacked()
        add(norms, (1, inner), lambda i: (norm_layer, 0))
    for part in range(1 + gated):
        add(array, (1, tile.rows, inner), lambda i, part=part: (layer, i + part * blocks, 0))
    if bias is not None:
        biases, bias_layer = bias.stacked()
        for part in range(1 + gated):
            add(biases, (1, tile.rows), lambda i, part=part: (bias_layer, i + part * blocks))
    if residual is not None:
        add(residual, (batch, tile.rows), lambda i: (0, i))
    kernel = partial(_kernel, inner=inner, step=tile.inner, eps=eps, norm=norm is not None, bias=bias is not None, gated=gated, add=residual is not None, early=early)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, rows), out_dtype),
        grid=(blocks,),
        in_specs=specs,
        out_specs=pl.BlockSpec((batch, tile.rows), lambda i: (0, i)),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=3),
        interpret=interpreted(),
        name="product",
    )(*arguments)


def norm_linear(x: Float[Array, "B K"], norm: Weight, eps: float, weight: Weight, bias: Weight | None, out_dtype: DTypeLike, early: bool = False) -> Float[Array, "B N"]:
    """``linear(rms_norm(x, norm, eps), weight, bias)``, sums in float32; ``B`` is 1 or ``MIN_DOT``. ``early`` as in ``tiles.let_next_start``."""
    return _launch(x, norm, eps, weight, bias, None, out_dtype, False, early)


def norm_gated_silu(x: Float[Array, "B K"], norm: Weight, eps: float, weight: Weight, bias: Weight | None, early: bool = False) -> Float[Array, "B N"]:
    """``gated_silu(linear(rms_norm(x, norm, eps), weight, bias))``; gate rows of the weight come first."""
    return _launch(x, norm, eps, weight, bias, None, x.dtype, True, early)


def linear_add(x: Float[Array, "B K"], weight: Weight, bias: Weight | None, residual: Float[Array, "B N"], early: bool = False) -> Float[Array, "B N"]:
    """``residual + linear(x, weight, bias)``."""
    return _launch(x, None, 0.0, weight, bias, residual, residual.dtype, False, early)
