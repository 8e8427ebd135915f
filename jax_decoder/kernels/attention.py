"""Fused decode attention (Pallas): head norms, rotary embedding, cache write and attention in one kernel.

A row's cache is cut into splits of fixed length, one program each, so one graph serves every
length: programs whose split holds nothing yet do nothing, and the last one of a row and key head
to finish puts the others' results together (Flash-Decoding, arXiv 2311.01282).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from .plain import Weight
from .tiles import MIN_DOT, Span, interpreted, let_next_start, span_for

Sums = tuple[Array, Array, Array, Array]  # highest score, total of the weights, and both halves of their sum


def _rotated(first: Array, second: Array, norm: tuple[Array, Array] | None, eps: float, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Both halves of heads, normalised and rotated, in float32."""
    if norm is not None:
        width = 2 * first.shape[-1]
        squares = (first * first).sum(-1, keepdims=True) + (second * second).sum(-1, keepdims=True)
        scale = jax.lax.rsqrt(squares / width + eps)
        first, second = first * scale * norm[0], second * scale * norm[1]
    return first * cos - second * sin, second * cos + first * sin


def _merged(ours: Sums, theirs: Sums) -> Sums:
    """Two partial softmaxes as one."""
    highest = jnp.maximum(ours[0], theirs[0])
    kept, taken = jnp.exp(ours[0] - highest), jnp.exp(theirs[0] - highest)
    return (highest, ours[1] * kept + theirs[1] * taken, *(a * kept[:, None] + b * taken[:, None] for a, b in zip(ours[2:], theirs[2:])))


def _kernel(*refs, layer: int, num_heads: int, kv_heads: int, norm_layer: int | None, eps: float, window: int, split_length: int, block: int, early: bool) -> None:
    """One split of one row and key head; ``refs`` as ``attend`` passes them."""
    zero = let_next_start(early)
    norm_refs, refs = (refs[:2], refs[2:]) if norm_layer is not None else (None, refs)
    heads_ref, rope_ref, positions_ref, _, _, _, k_ref, v_ref, finished_ref, out_ref, partial_ref = refs
    row, kv, split = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads, pl.program_id(1)
    slots, half = k_ref.shape[-2], k_ref.shape[-1] // 2
    group, kind = num_heads // kv_heads, k_ref.dtype
    padded = max(MIN_DOT, 1 << (group - 1).bit_length())
    first_half, second_half = pl.ds(0, half), pl.ds(half, half)
    layer = jnp.int32(layer)  # an index must be an array
    parts = (jnp.int32(2 * half), jnp.int32(2 * half + 1), first_half, second_half)  # of a partial result
    position = positions_ref[row]
    start = jnp.maximum(position + 1 - window, 0)
    first_split, last_split = start // split_length, position // split_length
    queries = jnp.arange(padded)
    in_group = (queries < group)[:, None] & (jnp.arange(half) >= 0)[None]

    @pl.when((split >= first_split) & (split <= last_split))
    def _() -> None:
        cos, sin = rope_ref[position, 0, :], rope_ref[position, 1, :]
        q_norm, k_norm = ((tuple(ref[norm_layer, part].astype(jnp.float32) for part in (first_half, second_half))) for ref in norm_refs) if norm_refs else (None, None)
        q = [triton.load(heads_ref.at[row, pl.ds(kv * group, padded), part], mask=in_group, other=0.0).astype(jnp.float32) for part in (first_half, second_half)]
        q1, q2 = (x.astype(kind) for x in _rotated(*q, q_norm, eps, cos[None], sin[None]))
        nothing = (jnp.full((padded,), -jnp.inf), jnp.broadcast_to(zero, (padded,)), jnp.zeros((padded, half)), jnp.zeros((padded, half)))

        def newest(_: Sums) -> Sums:
            """From registers: what was just written need not be read again."""
            k = [heads_ref[row, num_heads + kv, part].astype(jnp.float32) for part in (first_half, second_half)]
            k1, k2 = (x.astype(kind) for x in _rotated(*k, k_norm, eps, cos, sin))
            v1, v2 = (heads_ref[row, num_heads + kv_heads + kv, part].astype(kind) for part in (first_half, second_half))
            written = jnp.broadcast_to(position < slots, (half,))
            slot = jnp.minimum(position, slots - 1)
            for ref, part, value in ((k_ref, first_half, k1), (k_ref, second_half, k2), (v_ref, first_half, v1), (v_ref, second_half, v2)):
                triton.store(ref.at[layer, row, kv, slot, part], value, mask=written)
            wide = [x.astype(jnp.float32) for x in (q1, q2, k1, k2, v1, v2)]
            score = ((wide[0] * wide[2][None]).sum(1) + (wide[1] * wide[3][None]).sum(1)) * (2 * half) ** -0.5
            return score, jnp.ones((padded,)), *(jnp.broadcast_to(x[None], (padded, half)) for x in wide[4:])

        def look(i: Array, sums: Sums) -> Sums:
            base = i * block
            places = base + jnp.arange(block)
            seen = (places >= start) & (places < position)
            # Selected away when loaded: a score of minus infinity would still multiply a NaN that lies there.
            valid = seen[:, None] & (jnp.arange(half) >= 0)[None]

            def load(ref: Array, part: pl.Slice) -> Array:
                return triton.load(ref.at[layer, row, kv, pl.ds(base, block), part], mask=valid, other=0.0)

            scores = triton.dot(q1, load(k_ref, first_half), trans_b=True, allow_tf32=False) + triton.dot(q2, load(k_ref, second_half), trans_b=True, allow_tf32=False)
            scores = jnp.where(seen[None], scores * (2 * half) ** -0.5, -jnp.inf)
            highest = jnp.maximum(sums[0], scores.max(1))
            kept, weights = jnp.exp(sums[0] - highest), jnp.exp(scores - highest[:, None])
            narrow = weights.astype(kind)
            added = [triton.dot(narrow, load(v_ref, part), allow_tf32=False) for part in (first_half, second_half)]
            return highest, sums[1] * kept + weights.sum(1), *(s * kept[:, None] + a for s, a in zip(sums[2:], added))

        sums = jax.lax.cond(split == last_split, newest, lambda given: given, nothing)
        begin = jnp.maximum(split * split_length, start // block * block) // block
        end = (jnp.minimum((split + 1) * split_length, position) + block - 1) // block
        sums = jax.lax.fori_loop(begin, end, look, sums)

        def finish(sums: Sums) -> None:
            for part, value in ((first_half, sums[2]), (second_half, sums[3])):
                triton.store(out_ref.at[row, pl.ds(kv * group, padded), part], (value / sums[1][:, None]).astype(kind), mask=in_group)

        @pl.when(first_split == last_split)
        def _() -> None:
            finish(sums)

        @pl.when(first_split != last_split)
        def _() -> None:
            for part, value in zip(parts, sums):
                partial_ref[row, kv, split, :, part] = value
            if not interpreted():
                triton.debug_barrier()  # every thread's part is written before one thread says so
            before = triton.atomic_add(finished_ref, (row * kv_heads + kv,), jnp.int32(1))

            @pl.when(before == last_split - first_split)
            def _() -> None:
                finished_ref[row * kv_heads + kv] = 0

                def take(i: Array, sums: Sums) -> Sums:
                    return _merged(sums, tuple(partial_ref[row, kv, i, :, part] for part in parts))

                finish(jax.lax.fori_loop(first_split, last_split + 1, take, nothing))


def attend(
    heads: Float[Array, "P M"],
    norms: tuple[Weight, Weight, float] | None,
    rope: Float[Array, "S 2 R"],
    positions: Int[Array, " B"],
    k_cache: Float[Array, "L B K S H"],
    v_cache: Float[Array, "L B K S H"],
    layer: int,
    window: int | None,
    finished: Int[Array, " C"],
    early: bool = False,
) -> tuple[Float[Array, "P N"], Float[Array, "L B K S H"], Float[Array, "L B K S H"], Int[Array, " C"]]:
    """Attention of one new token a row, and the caches with its key and value at ``positions``, in place.

    ``heads`` are projected query, key and value heads before their norms (weights of queries and
    keys, epsilon) and rotation; the first B of their P rows are real. ``rope`` is the whole table.
    ``finished`` holds a zero for each row and key head, and zeros again afterwards. ``early`` as
    in ``tiles.let_next_start``.
    """
    _, batch, kv_heads, slots, width = k_cache.shape
    num_heads = heads.shape[1] // width - 2 * kv_heads
    padded = max(MIN_DOT, 1 << (num_heads // kv_heads - 1).bit_length())
    span: Span = span_for(width, k_cache.dtype.itemsize)
    splits = pl.cdiv(slots, span.split)
    arguments = [heads.reshape(heads.shape[0], -1, width), rope, positions, k_cache, v_cache, finished]
    norm_layer, eps = None, 0.0
    if norms is not None:
        (q_norm, norm_layer), (k_norm, _), eps = norms[0].stacked(), norms[1].stacked(), norms[2]
        arguments = [q_norm, k_norm, *arguments]
    first = len(arguments) - 3
    kernel = partial(
        _kernel,
        layer=layer,
        num_heads=num_heads,
        kv_heads=kv_heads,
        norm_layer=norm_layer,
        eps=eps,
        window=slots + 1 if window is None else window,
        split_length=span.split,
        block=span.block,
        early=early,
    )
    k_cache, v_cache, finished, out, _ = pl.pallas_call(
        kernel,
        out_shape=(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_cache, v_cache, finished)),
            jax.ShapeDtypeStruct((heads.shape[0], num_heads, width), k_cache.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, splits, padded, width + 2), jnp.float32),
        ),
        grid=(batch * kv_heads, splits),
        input_output_aliases={first: 0, first + 1: 1, first + 2: 2},
        compiler_params=triton.CompilerParams(num_warps=span.warps, num_stages=2),
        interpret=interpreted(),
        name="attend",
    )(*arguments)
    return out.reshape(heads.shape[0], -1), k_cache, v_cache, finished
