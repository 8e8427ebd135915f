"""The README's blocks that are made from committed result files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import results
from .answers import answers
from .claims import lane_outcomes
from .claims import table as claims_table

BEGIN, END = "<!-- {}: made by scripts/update_readme -->", "<!-- end of {} -->"
COLUMNS = ("model", "variant", "parity", "bits that differ from no graph", "graph launches", "other launches", "updates", "step ms (p50)", "host µs", "idle %", "capture ms")
# A cell, by the entry's field: digits behind the point, and a factor.
_NUMBERS = {
    "graph_launches_per_step": (2, 1.0),
    "other_launches_per_step": (2, 1.0),
    "graph_updates_per_step": (2, 1.0),
    "step_ms": (3, 1.0),
    "host_dispatch_us": (0, 1.0),
    "idle_share": (0, 100.0),
    "capture_s": (1, 1e3),
}


def loaded(folder: Path) -> list[dict[str, Any]]:
    """Every result in a folder and the folders in it: whole runs first. ResultError if there is none."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*/*.json"))
    if not files:
        raise results.ResultError(f"{folder} holds no result file, expected those of scripts/gpu_lane: run it and copy them there")
    return [results.load(file) for file in files]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines; what would end a cell is written another way."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *("| " + " | ".join(row) + " |" for row in cells)]


def launch_table(found: Sequence[dict[str, Any]], _: Mapping[str, str]) -> str:
    """Every measured variant of the runs that are no points of sweeps, and where they were measured."""
    runs = [result for result in found if "sweep" not in result]
    lines = markdown(COLUMNS, [_row(result, variant) for result in runs for variant in results.measured(result)])
    return "\n".join([*lines, "", *sorted({_where(result) for result in runs})])


def _row(result: dict[str, Any], v: dict[str, Any]) -> Sequence[str]:
    figures = {**v, "step_ms": v["step_ms"]["p50"]}
    numbers = ["–" if figures.get(name) is None else f"{figures[name] * factor:.{digits}f}" for name, (digits, factor) in _NUMBERS.items()]
    bits = v["parity"].get("differing_bits")
    return (results.name_of(result), results.variant_of(v).label(), v["parity"]["verdict"], "–" if bits is None else str(bits), *numbers)


def _where(result: dict[str, Any]) -> str:
    environment, w = result["environment"], result["workload"]
    gpu, versions = environment["gpu"], environment["versions"]
    name = f"{gpu['name']}, driver {gpu['driver_version']}" if gpu else environment["cpu"]
    return f"{name}; torch {versions['torch']}, jax {versions['jax']}; {w['dtype']}, cache of {w['max_seq_len']} tokens, {w['new_tokens']} new tokens a row."


def answers_block(found: Sequence[dict[str, Any]], _: Mapping[str, str]) -> str:
    """The questions that bring readers, with their answers."""
    return "\n".join(line for question, said in answers(found) for line in (f"**{question}**", "", *(f"- {sentence}" for sentence in said), "")).rstrip()


def claims_block(found: Sequence[dict[str, Any]], tests: Mapping[str, str]) -> str:
    """Each claim with its verdict and what was measured."""
    rows = [(row["claim"], row["verdict"].partition(":")[0].replace("holds when", "holds for some"), row["measured"]) for row in claims_table(found, tests)]
    return "\n".join(markdown(("claim", "verdict", "measured"), rows))


BLOCKS: dict[str, Callable[[Sequence[dict[str, Any]], Mapping[str, str]], str]] = {"answers": answers_block, "launch table": launch_table, "claims": claims_block}


def updated(readme: str, folder: Path) -> str:
    """The README's text with every block made anew from the results in ``folder``. ResultError if a block has no place in it."""
    found, tests = loaded(folder), lane_outcomes(folder)
    for name, block in BLOCKS.items():
        readme = with_block(readme, name, block(found, tests))
    return readme


def with_block(readme: str, name: str, text: str) -> str:
    """The README's text with what lies between a block's markers replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise results.ResultError(f"the README has no place for the block, expected {begin} and {end} once each")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", readme)
