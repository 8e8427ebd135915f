"""Fused products for few rows: norm, product, bias, activation and residual in one kernel (Triton).

A decode step of few rows is bound by reading its weights once. Each program reads some rows of a
weight and multiplies them with all rows of the input, so whatever surrounds the product costs a few
registers and no kernel. One row is multiplied and summed, several go through the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tiles import MIN_DOT, Tile, launch_options, tile_for

# Products of normalised rows are scaled when they are finished, so that rows are read once; until
# then float16 needs room above the largest activation. A power of two costs no bits.
_HEADROOM = 2.0**-6


@triton.jit
def _tile(weight, rows, columns, in_rows, K: tl.constexpr, BK: tl.constexpr):
    """A [BN, BK] piece of a [N, K] weight; zero outside."""
    mask = in_rows[:, None]
    if K % BK != 0:
        mask = mask & (columns < K)[None, :]
    return tl.load(weight + rows[:, None].to(tl.int64) * K + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _numbers(x, columns, K: tl.constexpr, BK: tl.constexpr):
    """A [BK] piece of a row of K numbers, in float32; zero outside."""
    if K % BK != 0:
        return tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)
    else:
        return tl.load(x + columns).to(tl.float32)


@triton.jit
def _prefetch(weight, first_row, rows, FIRST: tl.constexpr, K: tl.constexpr):
    """Bring columns from ``FIRST`` on of some rows into the GPU's cache, so that they are under way before they are needed.

    One request a row, of a thread each: more would be the same lines again.
    """
    asm: tl.constexpr = """{
        .reg .pred inside; .reg .u32 thread; .reg .u64 place;
        mov.u32 thread, %tid.x;
        setp.lt.s32 inside, thread, $2;
        mad.wide.u32 place, thread, $3, $1;
        @inside cp.async.bulk.prefetch.L2.global [place], $4;
        mov.b32 $0, 0;
    }"""
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    start = (weight + first_row.to(tl.int64) * K + FIRST).to(tl.int64)
    tl.inline_asm_elementwise(asm, "=r,l,r,r,r", [start, rows, K * SIZE, (K - FIRST) * SIZE], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _product_of_one(x, norm, weight, rows, in_rows, other, piece, piece_other, eps, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr):
    """float32 [BN] (and, if GATED, of the rows ``other``) of one normalised row with a weight, whose first columns are ``piece``."""
    columns = tl.arange(0, BK)
    total = tl.zeros([BN, BK], tl.float32)
    total_other = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for k in range(0, K, BK):
        value = _numbers(x, columns, K, BK)
        if NORM:
            squares += value * value
            value = value * _numbers(norm, columns, K, BK)
        total += piece.to(tl.float32) * value[None, :]
        if GATED:
            total_other += piece_other.to(tl.float32) * value[None, :]
        if k + BK < K:
            columns += BK
            piece = _tile(weight, rows, columns, in_rows, K, BK)
            if GATED:
                piece_other = _tile(weight, other, columns, in_rows, K, BK)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    return tl.sum(total, 1) * scale, tl.sum(total_other, 1) * scale


@triton.jit
def _product_of_many(
    x,
    norm,
    weight,
    rows,
    in_rows,
    other,
    eps,
    count,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BB: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    HEADROOM: tl.constexpr,
):
    """float32 [BN, BB]: as ``_product_of_one`` for ``count`` <= BB rows."""
    batch = tl.arange(0, BB)
    total = tl.zeros([BN, BB], tl.float32)
    total_other = tl.zeros([BN, BB], tl.float32)
    squares = tl.zeros([BB], tl.float32)
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        piece = _tile(weight, rows, columns, in_rows, K, BK)
        mask = (columns < K)[:, None] & (batch < count)[None, :]
        value = tl.load(x + batch[None, :] * K + columns[:, None], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(value * value, 0)
            value = value * (_numbers(norm, columns, K, BK) * HEADROOM)[:, None]
        value = value.to(piece.dtype)
        total = tl.dot(piece, value, total, input_precision="ieee")
        if GATED:
            total_other = tl.dot(_tile(weight, other, columns, in_rows, K, BK), value, total_other, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / K + eps) / HEADROOM
        total, total_other = total * scale[None, :], total_other * scale[None, :]
    return total, total_other


@triton.jit
def _product(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    count,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BB: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    HEADROOM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[b, n] = (norm(x[b]) . weight[n] + bias[n]), gated by row n + N of the weight, plus residual[b, n]."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    in_rows = rows < N
    other = rows + N
    if BB == 1:
        piece = _tile(weight, rows, tl.arange(0, BK), in_rows, K, BK)
        piece_other = piece
        if GATED:
            piece_other = _tile(weight, other, tl.arange(0, BK), in_rows, K, BK)
    if OVERLAP:  # weights do not depend on the kernel before this one: they are under way while it ends
        LOADED: tl.constexpr = BK if BB == 1 else 0
        if OVERLAP == 2 and LOADED < K and K % 16 == 0:
            first_row = tl.program_id(0) * BN
            _prefetch(weight, first_row, tl.minimum(N - first_row, BN), LOADED, K)
            if GATED:
                _prefetch(weight, first_row + N, tl.minimum(N - first_row, BN), LOADED, K)
        gdc_launch_dependents()
        gdc_wait()
    if BB == 1:
        place, mask = rows, in_rows
    else:
        batch = tl.arange(0, BB)
        place, mask = batch[None, :] * N + rows[:, None], in_rows[:, None] & (batch < count)[None, :]
    if ADD:
        added = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if BB == 1:
        y, z = _product_of_one(x, norm, weight, rows, in_rows, other, piece, piece_other, eps, K, BN, BK, NORM, GATED)
    else:
        y, z = _product_of_many(x, norm, weight, rows, in_rows, other, eps, count, K, BN, BK, BB, NORM, GATED, HEADROOM)
    if BIAS:
        first = tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)
        y += first if BB == 1 else first[:, None]
    if GATED:
        if BIAS:
            second = tl.load(bias + other, mask=in_rows, other=0.0).to(tl.float32)
            z += second if BB == 1 else second[:, None]
        y = y * tl.sigmoid(y) * z
    if ADD:
        # Rounded before the sum, as the plain kernels do.
        y = y.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def _launch(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, gated: bool, early: int) -> Tensor:
    count, inner = x.shape
    rows = out.shape[1]
    tile: Tile = tile_for(rows, inner, count, gated, weight.element_size())
    padded = 1 if count == 1 else max(MIN_DOT, triton.next_power_of_2(count))
    _product[(triton.cdiv(rows, tile.rows),)](
        x,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        count,
        rows,
        K=inner,
        BN=tile.rows,
        BK=tile.inner,
        BB=padded,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        HEADROOM=_HEADROOM,
        num_warps=tile.warps,
        **launch_options(early),
    )
    return out


def norm_linear(
    x: Float[Tensor, "B K"], norm: Float[Tensor, " K"], eps: float, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None, out_dtype: torch.dtype, early: int = 0
) -> Float[Tensor, "B N"]:
    """``linear(rms_norm(x, norm, eps), weight, bias)``, sums in float32. ``early`` as in ``launch_options``."""
    return _launch(x, norm, eps, weight, bias, None, x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype), False, early)


def norm_gated_silu(
    x: Float[Tensor, "B K"], norm: Float[Tensor, " K"], eps: float, weight: Float[Tensor, "N2 K"], bias: Float[Tensor, " N2"] | None, early: int = 0
) -> Float[Tensor, "B N"]:
    """``gated_silu(linear(rms_norm(x, norm, eps), weight, bias))``; N2 = 2 N, gate rows first."""
    return _launch(x, norm, eps, weight, bias, None, x.new_empty(x.shape[0], weight.shape[0] // 2), True, early)


def linear_add(x: Float[Tensor, "B K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None, residual: Float[Tensor, "B N"], early: int = 0) -> Float[Tensor, "B N"]:
    """``residual + linear(x, weight, bias)``."""
    return _launch(x, None, 0.0, weight, bias, residual, torch.empty_like(residual), False, early)


def norm_logits(x: Float[Tensor, "B K"], norm: Float[Tensor, " K"], eps: float, weight: Float[Tensor, "V K"], out: Float[Tensor, "B V"], early: int = 0) -> Float[Tensor, "B V"]:
    """Final norm and output head, written to ``out`` (float32)."""
    return _launch(x, norm, eps, weight, None, None, out, False, early)
