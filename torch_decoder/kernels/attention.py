"""Fused decode attention (Triton): head norms, rotary embedding, cache write and attention in one kernel.

A row's cache is cut into splits of fixed length, one program each, so one graph serves every
length: programs whose split holds nothing yet return at once, and the last one of a row and key
head to finish puts the others' results together (Flash-Decoding, arXiv 2311.01282).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tiles import MIN_DOT, Span, launch_options, span_for


@triton.jit
def _turned(first, second, norm, cos, sin, eps, kind: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr):
    """Both halves of heads, normalised (``norm``: both halves of the weight) and rotated in float32, as ``kind``."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        axis: tl.constexpr = len(first.shape) - 1
        scale = tl.rsqrt((tl.sum(first * first, axis) + tl.sum(second * second, axis)) / H + eps)
        scale = tl.expand_dims(scale, axis) if axis == 1 else scale
        first, second = first * scale * norm[0].to(tl.float32), second * scale * norm[1].to(tl.float32)
    return (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)


@triton.jit
def _halves(x, half, mask, H: tl.constexpr):
    """Both halves of vectors of H numbers at ``x``; zero where ``mask`` is not set."""
    return tl.load(x + half, mask=mask, other=0.0), tl.load(x + H // 2 + half, mask=mask, other=0.0)


@triton.jit
def _block(k_cache, v_cache, slots, seen, half, in_half, H: tl.constexpr):
    """Keys and values of some slots, in halves."""
    # Selected away when loaded: a score of minus infinity would still multiply a NaN that lies there.
    place, valid = slots[:, None] * H + half[None, :], seen[:, None] & in_half[None, :]
    k1, k2 = _halves(k_cache, place, valid, H)
    v1, v2 = _halves(v_cache, place, valid, H)
    return k1, k2, v1, v2


@triton.jit
def _attend(
    heads,
    q_norm,
    k_norm,
    rope,
    positions,
    k_cache,
    v_cache,
    partial,
    finished,
    out,
    eps,
    scale,
    S,
    window,
    N: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    GP: tl.constexpr,
    HP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, kv, split = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    G: tl.constexpr = N // KV
    # What lies here before the wait was written by earlier steps: only ``heads`` comes from the kernel before this one.
    position = tl.load(positions + row)
    start = tl.maximum(position + 1 - window, 0)
    first_split = start // SPLIT
    last_split = position // SPLIT
    if split < first_split or split > last_split:
        return
    half, group = tl.arange(0, HP), tl.arange(0, GP)
    in_half, in_group = half < H // 2, group < G
    mask = in_group[:, None] & in_half[None, :]
    kind = k_cache.dtype.element_ty
    cache = (row * KV + kv).to(tl.int64) * S * H
    k_cache, v_cache = k_cache + cache, v_cache + cache
    begin = tl.maximum(split * SPLIT, start // BLOCK * BLOCK)
    end = tl.minimum((split + 1) * SPLIT, position)  # slots before the newest token's
    slots = begin + tl.arange(0, BLOCK)
    k1, k2, v1, v2 = _block(k_cache, v_cache, slots, (slots >= start) & (slots < end), half, in_half, H)
    rope += position.to(tl.int64) * 2 * H
    cos = tl.load(rope + half, mask=in_half, other=0.0)
    sin = tl.load(rope + H + H // 2 + half, mask=in_half, other=0.0)
    if NORM:
        q_weight, k_weight = _halves(q_norm, half, in_half, H), _halves(k_norm, half, in_half, H)
    else:
        q_weight, k_weight = (cos, cos), (cos, cos)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    heads += row * (N + 2 * KV) * H
    q1, q2 = _halves(heads, (kv * G + group)[:, None] * H + half[None, :], mask, H)
    q1, q2 = _turned(q1, q2, q_weight, cos, sin, eps, kind, H, NORM)
    highest = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    sum1, sum2 = tl.zeros([GP, HP], tl.float32), tl.zeros([GP, HP], tl.float32)
    if split == last_split:
        # The newest token comes from registers: what was just written need not be read again.
        new1, new2 = _halves(heads + (N + kv) * H, half, in_half, H)
        new1, new2 = _turned(new1, new2, k_weight, cos, sin, eps, kind, H, NORM)
        value1, value2 = _halves(heads + (N + KV + kv) * H, half, in_half, H)
        value1, value2 = value1.to(kind), value2.to(kind)
        slot = position.to(tl.int64) * H + half
        in_cache = in_half & (position < S)
        tl.store(k_cache + slot, new1, mask=in_cache)
        tl.store(k_cache + slot + H // 2, new2, mask=in_cache)
        tl.store(v_cache + slot, value1, mask=in_cache)
        tl.store(v_cache + slot + H // 2, value2, mask=in_cache)
        highest = (tl.sum(q1.to(tl.float32) * new1.to(tl.float32)[None, :], 1) + tl.sum(q2.to(tl.float32) * new2.to(tl.float32)[None, :], 1)) * scale
        total += 1.0
        sum1 += value1.to(tl.float32)[None, :]
        sum2 += value2.to(tl.float32)[None, :]
    for _ in range(begin, end, BLOCK):
        seen = (slots >= start) & (slots < end)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee") + tl.dot(q2, tl.trans(k2), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        kept = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(kind)
        sum1 = tl.dot(weights, v1, sum1 * kept[:, None], input_precision="ieee")
        sum2 = tl.dot(weights, v2, sum2 * kept[:, None], input_precision="ieee")
        highest = higher
        slots += BLOCK
        if SPLIT > BLOCK:
            k1, k2, v1, v2 = _block(k_cache, v_cache, slots, slots < end, half, in_half, H)
    head = kv * G + group
    target = out + row * N * H + head[:, None] * H + half[None, :]
    if first_split == last_split:
        tl.store(target, (sum1 / total[:, None]).to(kind), mask=mask)
        tl.store(target + H // 2, (sum2 / total[:, None]).to(kind), mask=mask)
    else:
        # [row, split, head]: highest, total, then the sums.
        WIDTH: tl.constexpr = H + 2
        base = partial + row * SPLITS * N * WIDTH + head * WIDTH
        mine = base + split * N * WIDTH
        tl.store(mine, highest, mask=in_group)
        tl.store(mine + 1, total, mask=in_group)
        tl.store(mine[:, None] + 2 + half[None, :], sum1, mask=mask)
        tl.store(mine[:, None] + 2 + H // 2 + half[None, :], sum2, mask=mask)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        counter = finished + row * KV + kv
        if tl.atomic_add(counter, 1, sem="acq_rel") == last_split - first_split:
            tl.store(counter, 0)
            highest = tl.full([GP], float("-inf"), tl.float32)
            total = tl.zeros([GP], tl.float32)
            sum1, sum2 = tl.zeros([GP, HP], tl.float32), tl.zeros([GP, HP], tl.float32)
            for part in range(first_split, last_split + 1):
                theirs = base + part * N * WIDTH
                high = tl.load(theirs, mask=in_group, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(highest, high)
                kept, taken = tl.exp(highest - higher), tl.exp(high - higher)
                total = total * kept + tl.load(theirs + 1, mask=in_group, other=1.0, cache_modifier=".cg") * taken
                sum1 = sum1 * kept[:, None] + tl.load(theirs[:, None] + 2 + half[None, :], mask=mask, other=0.0, cache_modifier=".cg") * taken[:, None]
                sum2 = sum2 * kept[:, None] + tl.load(theirs[:, None] + 2 + H // 2 + half[None, :], mask=mask, other=0.0, cache_modifier=".cg") * taken[:, None]
                highest = higher
            tl.store(target, (sum1 / total[:, None]).to(kind), mask=mask)
            tl.store(target + H // 2, (sum2 / total[:, None]).to(kind), mask=mask)


def attend(
    heads: Float[Tensor, "B M"],
    norms: tuple[Float[Tensor, " H"], Float[Tensor, " H"], float] | None,
    rope: Float[Tensor, "S 2 H"],
    positions: Int[Tensor, " B"],
    k_cache: Float[Tensor, "B K S H"],
    v_cache: Float[Tensor, "B K S H"],
    window: int | None,
    finished: Int[Tensor, " C"],
    early: int = 0,
) -> Float[Tensor, "B N"]:
    """Attention of one new token a row; its key and value go into the cache at ``positions``.

    ``heads`` are projected query, key and value heads, M = (N heads + 2 K) * H, before their norms
    (``norms``: weights of queries and keys, epsilon) and rotation; ``rope`` is the whole table.
    ``finished`` holds a zero for each row and key head, and zeros again afterwards. ``early`` as in
    ``launch_options``.
    """
    batch, kv_heads, slots, width = k_cache.shape
    num_heads = heads.shape[1] // width - 2 * kv_heads
    span: Span = span_for(width, k_cache.element_size())
    splits = triton.cdiv(slots, span.split)
    out = heads.new_empty(batch, num_heads * width, dtype=k_cache.dtype)
    partial = heads.new_empty(batch * splits * num_heads * (width + 2), dtype=torch.float32) if splits > 1 else finished
    q_norm, k_norm, eps = norms if norms is not None else (heads, heads, 0.0)
    _attend[(batch * kv_heads, splits)](
        heads,
        q_norm,
        k_norm,
        rope,
        positions,
        k_cache,
        v_cache,
        partial,
        finished,
        out,
        eps,
        width**-0.5,
        slots,
        slots if window is None else window,
        N=num_heads,
        KV=kv_heads,
        H=width,
        NORM=norms is not None,
        SPLITS=splits,
        SPLIT=span.split,
        BLOCK=span.block,
        GP=max(MIN_DOT, triton.next_power_of_2(num_heads // kv_heads)),
        HP=max(MIN_DOT, triton.next_power_of_2(width // 2)),
        num_warps=span.warps,
        **launch_options(early),
    )
    return out
