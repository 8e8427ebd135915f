"""The README's tables, made from committed result files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results

BEGIN, END = "<!-- launch table: made by scripts/readme_tables -->", "<!-- end of launch table -->"
COLUMNS = ("model", "variant", "parity", "bits that differ from no graph", "graph launches", "other launches", "updates", "step ms (p50)", "host µs", "capture ms")


def launch_table(folder: Path) -> str:
    """Markdown of every measured variant of the result files in ``folder``, and where they were measured."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise results.ResultError(f"{folder} holds no result file, expected those of scripts/gpu_lane: run it and copy them there")
    loaded = [results.load(file) for file in files]
    rows = [_row(result, variant) for result in loaded for variant in result["variants"] if "step_ms" in variant]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join([*lines, "", *sorted({_where(result) for result in loaded})])


def _row(result: dict[str, Any], v: dict[str, Any]) -> Sequence[str]:
    def number(name: str, digits: int, factor: float = 1.0) -> str:
        return "–" if v.get(name) is None else f"{v[name] * factor:.{digits}f}"

    bits = v["parity"].get("differing_bits")
    w = result["workload"]
    model = Path(w["model"]).name.removeprefix("shape:") + ("" if w["batch"] == 1 else f", batch {w['batch']}")
    return (
        model,
        results.variant_of(v).label(),
        v["parity"]["verdict"],
        "–" if bits is None else str(bits),
        *(number(f"{name}_per_step", 2) for name in ("graph_launches", "other_launches", "graph_updates")),
        f"{v['step_ms']['p50']:.3f}",
        number("host_dispatch_us", 0),
        number("capture_s", 1, 1e3),
    )


def _where(result: dict[str, Any]) -> str:
    environment, w = result["environment"], result["workload"]
    gpu, versions = environment["gpu"], environment["versions"]
    name = f"{gpu['name']}, driver {gpu['driver_version']}" if gpu else environment["cpu"]
    return f"{name}; torch {versions['torch']}, jax {versions['jax']}; {w['dtype']}, cache of {w['max_seq_len']} tokens, {w['new_tokens']} new tokens a row."


def with_table(readme: str, table: str) -> str:
    """The README's text with what lies between the markers replaced."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise results.ResultError(f"the README has no place for the table, expected {BEGIN} and {END} once each")
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", readme)
