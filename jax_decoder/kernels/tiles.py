"""Tile sizes of the fused kernels: data, by shape. And where they can run."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

MIN_DOT = 16  # the smallest side that tensor cores take
FUSED_ROWS = MIN_DOT  # the most rows that fused kernels take


class Tile(NamedTuple):
    """Rows of the weight a program takes, columns at a time, and its warps."""

    rows: int
    inner: int
    warps: int


def tile_for(rows: int, inner: int, batch: int, gated: bool, itemsize: int = 2) -> Tile:
    """A tile that divides a [rows, inner] weight, for ``batch`` rows of input; ``gated`` reads two such weights.

    Measured ones come from tiles.json (``scripts/tune_tiles``, weights of two bytes a number; others
    take twice the room); the rest from a heuristic: enough programs to keep every multiprocessor
    loading, each with some thousand numbers in flight.
    """
    measured = _measured().get(key(rows, inner, batch, gated)) if itemsize == 2 else None
    if measured is not None and rows % measured[0] == 0 and inner % measured[1] == 0:
        return Tile(*measured)
    if batch > 1:
        return Tile(_divisor(rows, MIN_DOT if rows <= 4096 else 2 * MIN_DOT), _divisor(inner, 128), 4)
    return Tile(_divisor(rows, 8 if rows >= 65536 else 2 if rows <= 4096 or gated else 4), _divisor(inner, 1024), 4)


class Span(NamedTuple):
    """Slots of a cache that a program of attention takes, slots at a time, and its warps."""

    split: int
    block: int
    warps: int


def span_for(width: int, itemsize: int = 2) -> Span:
    """The span for heads of that width: measured, or one that was found good."""
    measured = _measured().get(f"attend {width}") if itemsize == 2 else None
    return Span(*measured) if measured is not None else Span(256, 64, 4)


def starts_early(hidden_size: int) -> bool:
    """Do kernels of a model of that width gain by starting while the one before them ends? Only where measured."""
    return bool(_measured().get(f"early {hidden_size}", [0])[0])


def let_next_start(early: bool) -> jax.Array:
    """In a kernel: from here on the next one may start; XLA has it wait, before it reads anything, until this one has ended.

    Returns float32 [1], a zero that sums have to begin with: what nothing depends on would be left out.
    """
    if not early or interpreted():
        return jnp.zeros((1,), jnp.float32)
    asm, word = "griddepcontrol.launch_dependents; mov.f32 $0, 0f00000000;", jax.ShapeDtypeStruct((1,), jnp.float32)
    (zero,) = triton.elementwise_inline_asm(asm, args=[jax.lax.iota(jnp.int32, 1)], constraints="=f,r", pack=1, result_shape_dtypes=[word])
    return zero


def key(rows: int, inner: int, batch: int, gated: bool) -> str:
    """The name of a shape in tiles.json."""
    return f"{rows}x{inner}{' gated' * gated}{' many' * (batch > 1)}"


@lru_cache
def _measured() -> dict[str, list[int]]:
    """Measured tiles of this machine's GPU, by ``key``."""
    return json.loads(Path(__file__).with_name("tiles.json").read_text()).get(jax.devices()[0].device_kind, {})


def padded_rows(batch: int) -> int:
    """How many rows fused products make of ``batch``: the tensor cores take no fewer."""
    return 1 if batch == 1 else MIN_DOT


def interpreted() -> bool:
    """Are kernels interpreted, for tests on a CPU?"""
    return os.environ.get("DECODE_PALLAS_INTERPRET") == "1"


def _divisor(n: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides n."""
    return min(n & -n, most)
