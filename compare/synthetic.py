"""Strong random weights without a file: the same values in every framework, made on the device.

Each value is a hash of its tensor's name and its own index, so every framework computes it by
itself. The steps from hash to value are exact in float32 but for one product, so all round alike.
Strong: norm weights and biases are far from their neutral values, and projections are scaled such
that logits spread as a trained model's do; a forgotten or misplaced tensor moves them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

# lowbias32 of Chris Wellons' hash prospector: each bit of the input moves half of the output's.
_ROUND = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
_WORD = 0xFFFFFFFF
_CHUNK = 2**26  # values that PyTorch, which hashes in int64, makes at a time
LOGIT_SPREAD = 3.0  # standard deviation of logits for a final norm with weights of one


class Law(NamedTuple):
    """``(u + shift) * scale``, u uniform over [0, 1) in steps of 2**-24."""

    key: int
    shift: float
    scale: float


def law_of(name: str, shape: tuple[int, ...], tied: bool) -> Law:
    """How the values of a tensor with a Hugging Face name are distributed; ``tied``: no head of its own."""
    key = zlib.crc32(name.encode())
    if name.endswith(".bias"):
        return Law(key, -0.5, 2.0)
    if len(shape) == 1:  # norm weights, 0.5 to 1.5: wider ones make attention so sharp that roundings grow tenfold over 28 layers
        return Law(key, 0.5, 1.0)
    if "embed_tokens" in name and not tied:
        deviation = 1.0
    elif "embed_tokens" in name or "lm_head" in name:
        deviation = LOGIT_SPREAD / shape[-1] ** 0.5
    else:
        deviation = 1.0 / shape[-1] ** 0.5
    return Law(key, -0.5, deviation * 12**0.5)


def torch_tensor(law: Law, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """The tensor for PyTorch, in ``dtype`` on ``device``."""
    import torch

    out = torch.empty(prod(shape), dtype=dtype, device=device)
    for start in range(0, len(out), _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, len(out)), dtype=torch.int64, device=device)
        bits = _mix_int64(_mix_int64(index) ^ law.key)
        out[start : start + len(index)] = ((bits >> 8).float() * 2.0**-24 + law.shift) * law.scale
    return out.view(shape)


def _mix_int64(x: Any) -> Any:
    for shift, factor in _ROUND:
        x = ((x ^ (x >> shift)) * factor) & _WORD  # the product wraps, which leaves its low word right
    return x


def jax_array(law: Law, shape: tuple[int, ...], dtype: Any, device: Any = None) -> Any:
    """The array for JAX, in ``dtype`` on ``device`` (None: the default one)."""
    import jax
    import numpy as np

    with jax.default_device(device):
        return _jax_fill(shape, dtype)(np.uint32(law.key), np.float32(law.shift), np.float32(law.scale))


def _jax_fill(shape: tuple[int, ...], dtype: Any) -> Any:
    """Compiled once for each shape; the law is an argument."""
    if (shape, dtype) not in _FILLS:
        import jax
        import jax.numpy as jnp

        def mix(x: jax.Array) -> jax.Array:
            for shift, factor in _ROUND:
                x = (x ^ (x >> shift)) * jnp.uint32(factor)
            return x

        def fill(key: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
            index = jax.lax.iota(jnp.uint32, prod(shape)).reshape(shape)
            bits = mix(mix(index) ^ key)
            return (((bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) + shift) * scale).astype(dtype)

        _FILLS[shape, dtype] = jax.jit(fill)
    return _FILLS[shape, dtype]


_FILLS: dict[tuple[tuple[int, ...], Any], Any] = {}


def torch_tensors(config: Any, dtype: Any, device: Any) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, tensor) of every weight of a PyTorch decoder's ModelConfig."""
    from torch_decoder.checkpoint import table

    for name, slot in table(config).items():
        yield name, torch_tensor(law_of(name, slot.shape, config.tie_word_embeddings), slot.shape, dtype, device)


def jax_arrays(config: Any, dtype: Any, device: Any = None) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, array) of every weight of a JAX decoder's ModelConfig."""
    from jax_decoder.checkpoint import table

    for name, slot in table(config, "separate").items():
        yield name, jax_array(law_of(name, slot.shape, config.tie_word_embeddings), slot.shape, dtype, device)
