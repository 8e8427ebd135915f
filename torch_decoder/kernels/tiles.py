"""Tile sizes of the fused products: data, by shape."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

MIN_DOT = 16  # the smallest side that tensor cores take


def launch_options(early: int) -> dict[str, Any]:
    """Launch arguments of a kernel. ``early`` 1: it starts while the one before it ends (programmatic
    dependent launch, Hopper and newer), and waits before it reads or writes what others do; 2: before
    that it also asks for all of its weights, not for what its registers hold alone."""
    return {"OVERLAP": early, "launch_pdl": True} if early else {"OVERLAP": 0}


class Tile(NamedTuple):
    """Rows of the weight a program takes, columns at a time, and its warps."""

    rows: int
    inner: int
    warps: int


def tile_for(rows: int, inner: int, batch: int, gated: bool, itemsize: int = 2) -> Tile:
    """A tile for a [rows, inner] weight and ``batch`` rows of input; ``gated`` reads two such weights.

    Measured ones come from tiles.json (``scripts/tune_tiles``, weights of two bytes a number; others
    take twice the room); the rest from a heuristic: enough programs to keep every multiprocessor
    loading, each with some thousand numbers in flight.
    """
    if itemsize == 2 and (measured := _measured().get(key(rows, inner, batch, gated))) is not None:
        return Tile(*measured)
    if batch > 1:
        return Tile(MIN_DOT if rows <= 4096 else 2 * MIN_DOT, 128 if inner >= 128 else max(MIN_DOT, _power_of_2_above(inner)), 4)
    columns = min(1024, _power_of_2_above(inner))
    if rows >= 65536:
        return Tile(8, columns, 4)
    return Tile(2 if rows <= 4096 or gated else 4, columns, 4)


class Span(NamedTuple):
    """Slots of a cache that a program of attention takes, slots at a time, and its warps."""

    split: int
    block: int
    warps: int


def span_for(width: int, itemsize: int = 2) -> Span:
    """The span for heads of that width: measured, or one whose keys and values fit the registers."""
    if itemsize == 2 and (measured := _measured().get(f"attend {width}")) is not None:
        return Span(*measured)
    numbers = 8192 if itemsize == 2 else 2048  # of keys in registers; as many of values, and as many again on their way
    return Span(256, min(64, max(MIN_DOT, numbers // _power_of_2_above(width))), 4 if width <= 128 else 8)


def starts_early(hidden_size: int) -> int:
    """How kernels of a model of that width start best, as in ``launch_options``. Early only where measured: it also costs some."""
    return _measured().get(f"early {hidden_size}", [0])[0]


def key(rows: int, inner: int, batch: int, gated: bool) -> str:
    """The name of a shape in tiles.json."""
    return f"{rows}x{inner}{' gated' * gated}{' many' * (batch > 1)}"


@lru_cache
def _measured() -> dict[str, list[int]]:
    """Measured tiles of this machine's GPU, by ``key``."""
    if not torch.cuda.is_available():
        return {}
    return json.loads(Path(__file__).with_name("tiles.json").read_text()).get(torch.cuda.get_device_name(), {})


def _power_of_2_above(n: int) -> int:
    return 1 << (n - 1).bit_length()
