"""Plain kernels: the framework's own operations, and the form that fused kernels must equal."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Attention of the library that gives the same bits every time.
REPEATABLE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
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


def apply_rope(x: Float[Tensor, "B T M H"], rope: Float[Tensor, "B T 2 H"]) -> Float[Tensor, "B T M H"]:
    """Rotate halves; ``rope`` holds cosines, and sines with the sign of their half (transformers' rotate_half)."""
    cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]
    # The float32 table makes the products float32: rounding those to bfloat16 would cost twice the
    # error of rounding the result, which ``out`` does without a kernel of its own.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin, out=torch.empty_like(x))


def cache_rows(positions: Int[Tensor, "B T"], kv_heads: int, slots: int) -> Int[Tensor, " R"]:
    """Where ``write_cache`` puts heads: rows of a cache [B, K, S, H] seen as [B * K * S, H]; int64.

    The same for every layer, so it is computed once a step. Positions must be below S: one past the
    end would name the next head's first slot. Callers check room on the host.
    """
    heads = torch.arange(positions.shape[0] * kv_heads, device=positions.device).view(-1, kv_heads, 1)
    return (heads * slots + positions[:, None]).flatten()


def write_cache(cache: Float[Tensor, "B K S H"], new: Float[Tensor, "B T K H"], rows: Int[Tensor, " R"]) -> None:
    """Store ``new`` in the cache, in place; ``rows`` as ``cache_rows`` gives them."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, rows, new.transpose(1, 2).reshape(-1, cache.shape[-1]))


def mask_dtype(length: int, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which ``attend`` wants its mask: that of the scores which it is added to."""
    return torch.float32 if length == 1 and device.type == "cuda" else dtype


def attend(
    q: Float[Tensor, "B T N H"],
    k: Float[Tensor, "B K S H"],
    v: Float[Tensor, "B K S H"],
    mask: Float[Tensor, "B 1 T S"],
) -> Float[Tensor, "B T M"]:
    """Softmax attention over the whole cache; ``mask`` is 0 where a query may look, else -inf.

    M is N * H. Slots past the row's end must hold finite values. The cache is read as it lies
    (transformers repeats it for grouped heads): grouped queries become further queries of their
    key head. The library's choice on an H200, cuDNN, is left out: two runs of the same steps
    differed there, first behind an attention over more than 128 positions.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if q.is_cuda and length == 1:
        return attend_one(q.view(batch, kv_heads, group, width), k, v, mask).view(batch, 1, heads * width)
    grouped = q.reshape(batch, length, kv_heads, group, width).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * length, width)
    if length > 1 and group > 1:
        mask = mask.repeat(1, 1, group, 1)
    with sdpa_kernel(REPEATABLE) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=width**-0.5)
    out = out.view(batch, kv_heads, group, length, width).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads * width)


def attend_one(q: Float[Tensor, "B K G H"], k: Float[Tensor, "B K S H"], v: Float[Tensor, "B K S H"], mask: Float[Tensor, "B 1 1 S"]) -> Float[Tensor, "B K G H"]:
    """``attend`` for one query a head, G of them a key head, as two products; scores and softmax in float32."""
    rows = q.shape[0] * q.shape[1]
    queries, keys = q.reshape(rows, *q.shape[2:]), k.reshape(rows, *k.shape[2:]).transpose(1, 2)
    if q.is_cuda and q.dtype != torch.float32:
        scores = torch.bmm(queries, keys, out_dtype=torch.float32)  # rounded to half precision they would cost accuracy
    else:
        scores = torch.bmm(queries.float(), keys.float())
    scores = torch.add(mask, scores.view(*q.shape[:3], -1), alpha=q.shape[-1] ** -0.5)
    weights = scores.softmax(-1).to(v.dtype)
    return torch.bmm(weights.view(rows, q.shape[2], -1), v.reshape(rows, *v.shape[2:])).view(q.shape)


def gated_silu(gate_up: Float[Tensor, "*B F2"]) -> Float[Tensor, "*B F"]:
    """``silu(gate) * up`` of the fused projection, F2 = 2 F (arXiv 2002.05202; LlamaMLP)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
