"""Plain kernels: the framework's own operations, and the form that fused kernels must equal."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Attention of the library that gives the same bits every time.
REPEATABLE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_FLASH = torch.ops.aten._flash_attention_forward
# Putting parts of a short cache together costs more than reading it in one go (5 µs a layer on an H200).
_UNSPLIT = {"num_splits": 1} if any(argument.name == "num_splits" for argument in _FLASH.default._schema.arguments) else {}
UNSPLIT_SLOTS = 2048
# PyTorch sends float32 products on a CPU to MKL; oneDNN is 1.5 to 2.5 times faster for the few
# rows of a decode step on the CPUs that we measured.
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Float[Tensor, "*B K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, " M"] | None = None) -> Float[Tensor, "*B M"]:
    """``x @ weight.T + bias``, weights as Hugging Face stores them (torch.nn.Linear)."""
    if _ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        # Inductor knows this operator for constant weights only; behind a name of our own it stays as it is.
        product = _opaque_onednn_linear if torch.compiler.is_compiling() else _onednn_linear
        return product(x, weight, bias)
    return F.linear(x, weight, bias)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_opaque_onednn_linear = torch.library.custom_op("decode_graphs::onednn_linear", _onednn_linear, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_opaque_onednn_linear.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*B D"]:
    """Root mean square normalisation, statistics in float32 (arXiv 1910.07467; LlamaRMSNorm)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def linear_add(x: Float[Tensor, "*B K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, " M"] | None, residual: Float[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """``residual + linear(x)``; where the library adds up in place, ``residual`` is given up: go on with the result."""
    ours = torch.compiler.is_compiling() or bias is not None or (x.device.type == "cpu" and x.dtype == torch.float32)
    if ours:
        return residual + linear(x, weight, bias)
    residual.view(-1, residual.shape[-1]).addmm_(x.view(-1, x.shape[-1]), weight.t())
    return residual


def linear_float(x: Float[Tensor, "*B K"], weight: Float[Tensor, "M K"]) -> Float[Tensor, "*B M"]:
    """``x @ weight.T`` in float32, without a rounding to the dtype of ``x`` on its way where a GPU computes it."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return linear(x, weight).float()


def turns(rope: Float[Tensor, "B T 2 H"]) -> Shaped[Tensor, "B T *R"]:
    """A table's rows in the form that ``apply_rope`` is quickest with: complex numbers [B, T, H/2].

    A compiler fuses the real form, and knows little of complex numbers: for it the rows stay as they are.
    """
    half = rope.shape[-1] // 2
    return torch.complex(rope[..., 0, :half], rope[..., 1, half:])


def apply_rope(x: Float[Tensor, "B T M H"], rope: Shaped[Tensor, "B T *R"], out: Float[Tensor, "B T M H"]) -> None:
    """Rotate halves into ``out``, which may be ``x`` (transformers' rotate_half); in float32, rounded once.

    ``rope`` is as ``turns`` gives it, or rows of a table: cosines, and sines with the sign of their half.
    """
    if rope.is_complex():
        # A pair is an element of each half. Three kernels; products of mixed dtypes take four times as long.
        pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2).to(torch.float32, memory_format=torch.contiguous_format)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rope[:, :, None])
        out.unflatten(-1, (2, -1)).copy_(turned.transpose(-1, -2))
    else:
        cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]
        out.copy_(x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin)


def cache_rows(positions: Int[Tensor, "B T"], kv_heads: int, slots: int) -> Int[Tensor, " R"]:
    """Where ``write_cache`` puts heads: rows of keys, or of values, [B, K, S, H] seen as [B * K * S, H]; int64.

    The same for every layer, so it is computed once a step. Positions must be below S: one past the
    end would name the next head's first slot. Callers check room on the host.
    """
    heads = torch.arange(positions.shape[0] * kv_heads, device=positions.device).view(-1, kv_heads, 1)
    return (heads * slots + positions[:, None]).flatten()


def write_cache(cache: Float[Tensor, "2 B K S H"], new: Float[Tensor, "B T K2 H"], rows: Int[Tensor, " R"]) -> None:
    """Store key heads and then value heads (K2 = 2 K) in the cache, in place; ``rows`` as ``cache_rows`` gives them."""
    sides = new.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
    cache.flatten(1, 3).index_copy_(1, rows, sides.reshape(2, -1, new.shape[-1]))


class Seen(NamedTuple):
    """What queries may look at, the same for all layers of one window: a mask, lengths on the device, or the slots up to their own."""

    mask: Float[Tensor, "B 1 T S"] | None = None  # 0 where a query may look, else -inf
    lengths: Int[Tensor, " R"] | None = None  # valid slots of each row and key head, R = B * K; int32
    starts: Int[Tensor, "2 R1"] | None = None  # where each begins among queries, and in a cache seen as [R * S, H]; R1 is R + 1, int32
    window: int | None = None
    first: int | None = None  # the position of the first of T queries in a row, known on the host


def seen(positions: Int[Tensor, "B T"], cache: Float[Tensor, "2 B K S H"], windows: Collection[int | None], first: int | None = None) -> dict[int | None, Seen]:
    """For each window what queries at ``positions`` may look at, in the form that ``attend`` wants it.

    ``first``: of a piece of a prompt, the position of its first token; the others follow it.
    """
    kv_heads, slots = cache.shape[2:4]
    if first is not None and positions.shape[1] > 1 and _flash_takes(cache):
        return {window: Seen(window=window, first=first) for window in windows}
    if positions.shape[1] == 1 and _flash_takes(cache):
        lengths = (positions + 1).int().repeat(1, kv_heads).flatten()
        order = torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=cache.device)
        starts = torch.stack([order, order * slots])
        return {window: Seen(None, lengths, starts, window) for window in windows}
    dtype = torch.float32 if cache.is_cuda and positions.shape[1] == 1 else cache.dtype  # of the scores which it is added to
    distance = positions[:, None, :, None] - torch.arange(slots, device=cache.device)
    minus_infinity = torch.full((), float("-inf"), dtype=dtype, device=cache.device)
    masks = {}
    for window in windows:
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        masks[window] = Seen(torch.where(visible, torch.zeros_like(minus_infinity), minus_infinity))
    return masks


def _flash_takes(cache: Tensor) -> bool:
    """Does the library's flash attention take this cache on its device?"""
    if not cache.is_cuda or cache.dtype not in (torch.bfloat16, torch.float16) or cache.shape[-1] % 8 or cache.shape[-1] > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(cache.device) >= (8, 0)


def attend(q: Float[Tensor, "B T N H"], cache: Float[Tensor, "2 B K S H"], seen: Seen) -> Float[Tensor, "B T M"]:
    """Softmax attention over what is ``seen`` of the cache; M is N * H.

    Behind a mask, slots past the row's end must hold finite values. The cache is read as it lies
    (transformers repeats it for grouped heads): grouped queries become further queries of their
    key head. The library's choice on an H200, cuDNN, is left out: two runs of the same steps
    differed there, first behind an attention over more than 128 positions.
    """
    batch, length, heads, width = q.shape
    kv_heads = cache.shape[2]
    group = heads // kv_heads
    if q.is_cuda and length == 1:
        attend_step = attend_one if seen.mask is not None else attend_lengths
        return attend_step(q.reshape(batch, kv_heads, group, width), cache, seen).view(batch, 1, heads * width)
    if seen.first is not None:
        return attend_piece(q, cache, seen).reshape(batch, length, heads * width)
    grouped = q.reshape(batch, length, kv_heads, group, width).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * length, width)
    mask = seen.mask.repeat(1, 1, group, 1) if length > 1 and group > 1 else seen.mask
    with sdpa_kernel(REPEATABLE) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(grouped, cache[0], cache[1], attn_mask=mask, scale=width**-0.5)
    out = out.view(batch, kv_heads, group, length, width).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads * width)


def attend_lengths(q: Float[Tensor, "B K G H"], cache: Float[Tensor, "2 B K S H"], seen: Seen) -> Float[Tensor, "B K G H"]:
    """``attend`` for one query a head in half precision: the library's flash attention, which reads lengths on the device.

    Each row and key head is a sequence of its own, so that it looks at no slot past its length. The
    public ``varlen_attn`` takes lengths since PyTorch 2.11, and fills a tensor that we need not have.
    """
    slots, width = cache.shape[3:]
    keys, values = cache.reshape(2, -1, 1, width)
    left, right = (None, None) if seen.window is None else (seen.window - 1, 0)
    out = _FLASH(
        q.reshape(-1, q.shape[2], width), keys, values, *seen.starts, 1, slots, 0.0, False, False,
        scale=width**-0.5, window_size_left=left, window_size_right=right, seqused_k=seen.lengths, **(_UNSPLIT if slots <= UNSPLIT_SLOTS else {}),
    )[0]  # fmt: skip
    return out.view(q.shape)


def attend_piece(q: Float[Tensor, "B T N H"], cache: Float[Tensor, "2 B K S H"], seen: Seen) -> Float[Tensor, "B T N H"]:
    """``attend`` for a piece of a prompt in half precision: the library's flash attention, which makes no scores in memory.

    Its last query lies in the last slot that is given, so each sees the slots up to its own.
    """
    length, end = q.shape[1], seen.first + q.shape[1]
    keys, values = cache[:, :, :, :end].transpose(2, 3)  # [B, end, K, H]
    left, right = (None, None) if seen.window is None else (seen.window - 1, 0)
    return _FLASH(q, keys, values, None, None, length, end, 0.0, True, False, scale=q.shape[-1] ** -0.5, window_size_left=left, window_size_right=right)[0]


def attend_one(q: Float[Tensor, "B K G H"], cache: Float[Tensor, "2 B K S H"], seen: Seen) -> Float[Tensor, "B K G H"]:
    """``attend`` for one query a head as two products behind a mask; scores and softmax in float32."""
    k, v = cache
    rows = q.shape[0] * q.shape[1]
    queries, keys = q.reshape(rows, *q.shape[2:]), k.reshape(rows, *k.shape[2:]).transpose(1, 2)
    if q.is_cuda and q.dtype != torch.float32:
        scores = torch.bmm(queries, keys, out_dtype=torch.float32)  # rounded to half precision they would cost accuracy
    else:
        scores = torch.bmm(queries.float(), keys.float())
    scores = torch.add(seen.mask, scores.view(*q.shape[:3], -1), alpha=q.shape[-1] ** -0.5)
    weights = scores.softmax(-1).to(v.dtype)
    return torch.bmm(weights.view(rows, q.shape[2], -1), v.reshape(rows, *v.shape[2:])).view(q.shape)


def gated_silu(gate_up: Float[Tensor, "*B F2"]) -> Float[Tensor, "*B F"]:
    """``silu(gate) * up`` of the fused projection, F2 = 2 F (arXiv 2002.05202; LlamaMLP)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
