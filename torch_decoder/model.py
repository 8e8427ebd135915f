"""The model: embedding, layers, final norm and output head. It is the only forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .cache import KVCache
from .config import ModelConfig
from .errors import ConfigError
from .kernels import plain
from .layers import DecoderLayer, Linear, RMSNorm
from .rope import rope_table

KERNELS = ("plain", "compiled", "fused")
FUSED_ROWS = 16  # the most rows that fused kernels take; more are bound by arithmetic, where libraries are better


class Embedding(nn.Module):
    """Token embedding, weight [V, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return F.embedding(tokens, self.weight)


class Model(nn.Module):
    """A dense decoder-only language model (transformers' LlamaForCausalLM and kin).

    ``kernels`` is "plain", "compiled" (one layer compiled with torch.compile and called for every
    layer: compiling the whole step takes minutes and is no faster) or "fused" (this project's
    Triton kernels for steps of few rows; plain ones for everything else). Build it under
    ``torch.device("meta")``, then ``to_empty`` and a checkpoint fill it.
    """

    def __init__(self, config: ModelConfig, max_seq_len: int, kernels: str = "plain"):
        super().__init__()
        if kernels not in KERNELS:
            raise ConfigError(f"kernels is {kernels!r}, expected one of {', '.join(KERNELS)}")
        self.config, self.max_seq_len, self.kernels = config, max_seq_len, kernels
        self.embed_tokens = Embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # A tied head reads the embedding's own storage: there is no second copy to go stale.
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.register_buffer("rope", torch.empty(max_seq_len, 2, config.head_dim), persistent=False)
        # Of fused attention: programs that have finished, for each row and key head; zero between steps.
        self.register_buffer("finished", torch.empty(FUSED_ROWS * config.num_kv_heads, dtype=torch.int32), persistent=False)
        self._call_layer: Callable = DecoderLayer.__call__
        if kernels == "compiled":
            self._call_layer = torch.compile(DecoderLayer.__call__, fullgraph=True, dynamic=False)

    def rebuild_buffers(self) -> None:
        """Fill what no checkpoint holds; call after ``to_empty``."""
        cos, sin = torch.from_numpy(rope_table(self.config, self.max_seq_len)).unbind(1)
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        self.rope = table.to(self.embed_tokens.weight.device)
        self.finished = torch.zeros_like(self.finished, device=self.rope.device)

    def forward(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "B T"], cache: KVCache, first: int | None = None) -> Float[Tensor, "B T D"]:
        """Hidden states before the final norm; keys and values go into ``cache`` at ``positions``.

        ``first``: of a piece of a prompt, the position of its first token; the others follow it.
        """
        x = self.embed_tokens(tokens)
        if self.fused(*tokens.shape):
            return self._fused_layers(x[:, 0], positions[:, 0], cache)[:, None]
        rope = F.embedding(positions, self.rope.view(self.max_seq_len, -1)).view(*positions.shape, 2, -1)
        # Only the step is compiled: prompts come in many lengths, and each would compile anew.
        call_layer = self._call_layer if tokens.shape[1] == 1 else DecoderLayer.__call__
        rope = plain.turns(rope) if call_layer is DecoderLayer.__call__ else rope
        rows = plain.cache_rows(positions, self.config.num_kv_heads, self.max_seq_len)
        seen = plain.seen(positions, cache.layers[0], set(self.config.sliding_windows), first)
        for index, layer in enumerate(self.layers):
            x = call_layer(layer, x, rope, cache.layers[index], rows, seen[self.config.sliding_windows[index]])
        return x

    def fused(self, rows: int, length: int = 1) -> bool:
        """Do fused kernels take that many rows of that many tokens?"""
        return self.kernels == "fused" and length == 1 and rows <= FUSED_ROWS

    def _fused_layers(self, x: Float[Tensor, "B D"], positions: Int[Tensor, " B"], cache: KVCache) -> Float[Tensor, "B D"]:
        early = self.starts_early
        for index, layer in enumerate(self.layers):
            x = layer.fused_step(x, self.rope, positions, cache.layers[index], self.config.sliding_windows[index], self.finished, early)
        return x

    @property
    def starts_early(self) -> int:
        """How fused kernels start, as in ``kernels.tiles.launch_options``."""
        from .kernels import tiles

        return tiles.starts_early(self.config.hidden_size)

    def logits_into(self, out: Float[Tensor, "B V"], hidden: Float[Tensor, "B 1 D"]) -> None:
        """``logits`` of a step, written where the state keeps them."""
        if self.fused(*hidden.shape[:2]):
            from .kernels import products

            products.norm_logits(hidden[:, 0], self.norm.weight, self.norm.eps, self._head, out, self.starts_early)
        else:
            out.copy_(self.logits(hidden)[:, 0])

    @property
    def _head(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Final norm and output head: float32 logits."""
        return self.head(self.norm(hidden))

    def head(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Output head alone: float32 logits of normalised hidden states."""
        return plain.linear_float(x, self._head)
