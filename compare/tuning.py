"""Tiles of the fused kernels as data: what there is to try, and the decoders' tiles.json that holds what was found."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from .models import model_config
from .results import as_text, write_whole

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("shape:qwen3-0.6b", "shape:llama-3.2-1b", "shape:llama-3.1-8b")  # tuned by default
# Of attention: slots a program takes, slots at a time, warps.
SPANS = ((256, 64, 4), (128, 64, 4), (64, 64, 4), (256, 64, 8), (64, 32, 4), (128, 64, 8), (128, 128, 8), (256, 128, 8), (32, 32, 2), (64, 64, 8))
Entries = dict[str, list[int]]


def products_of(model: str) -> Iterator[tuple[str, int, int]]:
    """The products of a step: kind (norm, add, gated), rows and columns of the weight."""
    c = model_config(model)
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    yield "norm", heads, c.hidden_size
    yield "add", c.hidden_size, c.num_heads * c.head_dim
    yield "gated", c.intermediate_size, c.hidden_size
    yield "add", c.hidden_size, c.intermediate_size
    yield "norm", c.vocab_size, c.hidden_size


def candidates(rows: int, inner: int, batch: int) -> list[tuple[int, int, int]]:
    """Tiles worth a try for a [rows, inner] weight: rows, columns at a time, warps."""
    if batch > 1:
        return [(r, k, w) for r, k, w in product((16, 32, 64), (64, 128, 256), (4, 8)) if inner % k == 0]
    wide = sorted({512, 1024, 2048, 4096, min(inner & -inner, 8192)})
    found = [(r, k, w) for r, k, w in product((1, 2, 4, 8, 16), wide, (2, 4, 8)) if inner % k == 0]
    # Numbers of the weight that a thread holds at a time: few leave memory waiting, many leave no registers.
    return [(r, k, w) for r, k, w in found if rows >= r and 8 <= r * k // (32 * w) <= 64]


@contextmanager
def tiles_in_force(framework: str, table: Mapping[str, list[int]]) -> Iterator[None]:
    """Inside, kernels of a decoder are compiled with the tiles of ``table`` in place of those of tiles.json."""
    tiles = importlib.import_module(f"{framework}_decoder.kernels.tiles")
    measured, tiles._measured = tiles._measured, lambda: dict(table)
    try:
        yield
    finally:
        tiles._measured = measured


def read_tiles(out: Path, framework: str, device: str) -> Entries:
    """What a decoder's tiles.json below ``out`` (or else the project's) says of a device."""
    return _tables(out, framework).get(device, {})


def update_tiles(out: Path, framework: str, device: str, found: Mapping[str, list[int]]) -> Path:
    """Put entries of a device into that decoder's table below ``out``, beside those it has (or the project's); its path."""
    path, table = _path(out, framework), _tables(out, framework)
    table.setdefault(device, {}).update(found)
    write_whole(path, as_text(table) + "\n")
    return path


def _tables(out: Path, framework: str) -> dict[str, Entries]:
    path = _path(out, framework)
    return json.loads((path if path.exists() else _path(ROOT, framework)).read_text())


def _path(out: Path, framework: str) -> Path:
    return out / f"{framework}_decoder/kernels/tiles.json"
