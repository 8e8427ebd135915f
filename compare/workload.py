"""What is compared: a workload, and the variants that run it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jax_decoder.errors import ConfigError
from jax_decoder.kernels.tiles import FUSED_ROWS

# Prompts of the quick comparison; rows take them in turn, so their lengths differ.
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at one hundred degrees because",
    "Once upon a time, in a small village by the sea, there lived",
)


FEWEST_TOKENS = 5


@dataclass(frozen=True)
class Workload:
    """model (directory or ``shape:NAME``), dtype, batch (rows), new tokens a row, cache length in tokens.

    ``prompt_tokens`` is the length of every prompt, of ids made by a rule; None: short texts of
    different lengths. ``uneven``: that of the last row; the others are shorter, the first an eighth.
    """

    model: str
    dtype: str = "float32"
    batch: int = 1
    new_tokens: int = 64
    max_seq_len: int = 128
    prompt_tokens: int | None = None
    uneven: bool = False

    def prompt_lengths(self) -> list[int] | None:
        """Tokens of each row's prompt; None for texts."""
        if self.prompt_tokens is None:
            return None
        shortest = max(1, self.prompt_tokens // 8) if self.uneven else self.prompt_tokens
        return [self.prompt_tokens - (self.prompt_tokens - shortest) * (self.batch - 1 - row) // max(1, self.batch - 1) for row in range(self.batch)]

    def __post_init__(self) -> None:
        for name in ("batch", "new_tokens", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.prompt_tokens is not None and not 1 <= self.prompt_tokens <= self.max_seq_len + 1 - self.new_tokens:
            raise ConfigError(
                f"prompt_tokens is {self.prompt_tokens}, expected 1 to {self.max_seq_len + 1 - self.new_tokens}: {self.new_tokens} new tokens follow in a cache of {self.max_seq_len}"
            )
        if self.uneven and self.prompt_tokens is None:
            raise ConfigError("uneven prompts need prompt_tokens, the length of the longest one")
        if self.new_tokens < FEWEST_TOKENS:
            raise ConfigError(f"new_tokens is {self.new_tokens}, expected at least {FEWEST_TOKENS}: the first few steps warm up, and others must be left to be timed")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}, expected float32, bfloat16 or float16")


@dataclass(frozen=True)
class Variant:
    """One arm: framework, launch mode, kernels and sampling kind."""

    framework: str
    launch: str
    kernels: str = "plain"
    sampling: str = "greedy"

    def label(self) -> str:
        return f"{self.framework} {self.launch} {self.kernels}" + (" sampled" if self.sampling == "sampled" else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def absent(self, batch: int, reason: str) -> dict[str, Any]:
        """Its entry in a result that does not measure it."""
        return {**self.as_dict(), "batch": batch, "bucket": batch, "not_measured": reason}


# Everything that is or will be compared; the second table says what a machine lacks for a variant.
VARIANTS = (
    Variant("transformers", "eager"),
    Variant("transformers", "cuda_graph"),
    Variant("transformers", "cuda_graph", "compiled"),
    Variant("torch", "eager"),
    Variant("torch", "eager", "compiled"),
    Variant("torch", "cuda_graph"),
    Variant("torch", "cuda_graph", "compiled"),
    Variant("torch", "cuda_graph", "plain", "sampled"),
    Variant("torch", "eager", "fused"),
    Variant("torch", "cuda_graph", "fused"),
    Variant("torch", "cuda_graph", "fused", "sampled"),
    Variant("torch", "device_loop"),
    Variant("jax", "op_by_op"),
    Variant("jax", "jit"),
    Variant("jax", "command_buffer"),
    Variant("jax", "command_buffer", "plain", "sampled"),
    Variant("jax", "device_loop"),
    Variant("jax", "jit", "fused"),
    Variant("jax", "command_buffer", "fused"),
    Variant("jax", "command_buffer", "fused", "sampled"),
)
# The launch mode of each framework that runs the same step without a graph.
WITHOUT_GRAPH = {"torch": "eager", "jax": "jit"}
WITH_GRAPH = {"torch": "cuda_graph", "jax": "command_buffer"}  # and in one, step by step
NEEDS_CUDA = {"cuda_graph", "command_buffer", "hybrid", "device_loop"}


def why_not(variant: Variant, cuda: dict[str, bool], batch: int = 1) -> str | None:
    """Why a variant cannot run here, or None. ``cuda`` says for each framework whether it sees a GPU."""
    if variant.kernels == "fused" and batch > FUSED_ROWS:
        return f"fused kernels take at most {FUSED_ROWS} rows"
    if (variant.launch in NEEDS_CUDA or variant.kernels == "fused") and not cuda.get(variant.framework, False):
        return "no CUDA device"
    return None
