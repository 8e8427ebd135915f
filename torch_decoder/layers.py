"""The parts of a decoder layer as torch modules, with the names that Hugging Face gives them.

Query, key and value projections are one matrix, gate and up another: one product reads them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from .config import ModelConfig
from .kernels import plain


class Linear(nn.Module):
    """``x @ weight.T + bias``; weight [out, in]. Made without values: a checkpoint fills it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Float[Tensor, "*B I"], residual: Float[Tensor, "*B O"] | None = None) -> Float[Tensor, "*B O"]:
        """With ``residual`` the sum of both; it is given up, as sums may be made in place."""
        if residual is None:
            return plain.linear(x, self.weight, self.bias)
        return plain.linear_add(x, self.weight, self.bias, residual)


class RMSNorm(nn.Module):
    """Source: transformers' LlamaRMSNorm."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return plain.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over a static cache (transformers' Qwen3Attention and kin)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, query_width + 2 * kv_width, config.qkv_bias)
        self.o_proj = Linear(query_width, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rope: Shaped[Tensor, "B T *R"],
        cache: Float[Tensor, "2 B K S H"],
        rows: Int[Tensor, " R"],
        seen: plain.Seen,
        residual: Float[Tensor, "B T D"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        batch, length, _ = x.shape
        heads = self.qkv_proj(x).view(batch, length, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        qk = rotated = heads[:, :, : self.num_heads + self.num_kv_heads]
        if self.q_norm is not None:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        plain.apply_rope(qk, rope, out=rotated)
        q, kv = heads.split([self.num_heads, 2 * self.num_kv_heads], dim=2)
        plain.write_cache(cache, kv, rows)
        return self.o_proj(plain.attend(q, cache, seen), residual)


class MLP(nn.Module):
    """Gated SiLU feed-forward (transformers' LlamaMLP)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Float[Tensor, "B T D"], residual: Float[Tensor, "B T D"] | None = None) -> Float[Tensor, "B T D"]:
        return self.down_proj(plain.gated_silu(self.gate_up_proj(x)), residual)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals (transformers' LlamaDecoderLayer)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rope: Shaped[Tensor, "B T *R"],
        cache: Float[Tensor, "2 B K S H"],
        rows: Int[Tensor, " R"],
        seen: plain.Seen,
    ) -> Float[Tensor, "B T D"]:
        if x.shape[1] == 1:  # a step is made of few and short kernels: sums inside of products save two of them
            x = self.self_attn(self.input_layernorm(x), rope, cache, rows, seen, residual=x)
            return self.mlp(self.post_attention_layernorm(x), residual=x)
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, rows, seen)
        return x + self.mlp(self.post_attention_layernorm(x))

    def fused_step(
        self,
        x: Float[Tensor, "B D"],
        rope: Float[Tensor, "S 2 H"],
        positions: Int[Tensor, " B"],
        cache: Float[Tensor, "2 B K S H"],
        window: int | None,
        finished: Int[Tensor, " C"],
        early: int,
    ) -> Float[Tensor, "B D"]:
        """The same layer for one token a row, in five kernels of this project; ``early`` as in ``kernels.tiles``."""
        # Triton is there only where fused kernels can run.
        from .kernels import attention, products

        ours, mlp = self.self_attn, self.mlp
        norms = None if ours.q_norm is None else (ours.q_norm.weight, ours.k_norm.weight, ours.q_norm.eps)
        norm = self.input_layernorm
        heads = products.norm_linear(x, norm.weight, norm.eps, ours.qkv_proj.weight, ours.qkv_proj.bias, torch.float32, early)
        attended = attention.attend(heads, norms, rope, positions, *cache, window, finished, early)
        x = products.linear_add(attended, ours.o_proj.weight, ours.o_proj.bias, x, early)
        norm = self.post_attention_layernorm
        inner = products.norm_gated_silu(x, norm.weight, norm.eps, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, early)
        return products.linear_add(inner, mlp.down_proj.weight, mlp.down_proj.bias, x, early)
