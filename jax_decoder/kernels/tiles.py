"""Tile sizes of the fused kernels: data, by shape. And where they can run."""

from __future__ import annotations

import os
from typing import NamedTuple

MIN_DOT = 16  # the smallest side that tensor cores take
FUSED_ROWS = MIN_DOT  # the most rows that fused kernels take


class Tile(NamedTuple):
    """Rows of the weight a program takes, columns at a time, and its warps."""

    rows: int
    inner: int
    warps: int


def tile_for(rows: int, inner: int, batch: int, gated: bool) -> Tile:
    """A tile that divides a [rows, inner] weight, for ``batch`` rows of input; ``gated`` reads two such weights.

    The heuristic: enough programs to keep every multiprocessor loading, each with some thousand
    numbers in flight.
    """
    if batch > 1:
        return Tile(_divisor(rows, MIN_DOT if rows <= 4096 else 2 * MIN_DOT), _divisor(inner, 128), 4)
    return Tile(_divisor(rows, 8 if rows >= 65536 else 2 if rows <= 4096 or gated else 4), _divisor(inner, 1024), 4)


def padded_rows(batch: int) -> int:
    """How many rows fused products make of ``batch``: the tensor cores take no fewer."""
    return 1 if batch == 1 else MIN_DOT


def interpreted() -> bool:
    """Are kernels interpreted, for tests on a CPU?"""
    return os.environ.get("DECODE_PALLAS_INTERPRET") == "1"


def _divisor(n: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides n."""
    return min(n & -n, most)
