"""What scripts measure for the fused kernels goes into the decoders' tiles.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .results import as_text, write_whole

ROOT = Path(__file__).resolve().parents[1]


def update_tiles(out: Path, framework: str, device: str, found: Mapping[str, list[int]]) -> Path:
    """Put entries of a device into that decoder's table below ``out``, beside those it has (or the project's); its path."""
    name = f"{framework}_decoder/kernels/tiles.json"
    path = out / name
    table = json.loads((path if path.exists() else ROOT / name).read_text())
    table.setdefault(device, {}).update(found)
    write_whole(path, as_text(table) + "\n")
    return path
