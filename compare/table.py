"""The terminal table of a result."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .gains import gains
from .repeats import lines as agreement_lines
from .results import variant_of

COLUMNS = ("parity", "max |Δ|", "step ms p50", "p10 – p90", "tokens/s", "× transformers", "compile s")


def peer_tokens_per_s(result: dict[str, Any]) -> float | None:
    """Tokens/s of transformers' eager generate in this run: what the speed-up column divides by."""
    return next((v["tokens_per_s"] for v in result["variants"] if v["framework"] == "transformers" and "tokens_per_s" in v), None)


def print_table(result: dict[str, Any], console: Console | None = None) -> None:
    """Every variant a row; a latency never without its verdict, and below the table why any is absent."""
    console = console or Console(width=120, soft_wrap=True, highlight=False)
    w, environment, peer = result["workload"], result["environment"], peer_tokens_per_s(result)
    console.print(f"{w['model']}, {w['dtype']}, batch {w['batch']}, {w['new_tokens']} new tokens a row", markup=False)
    table = Table()
    table.add_column("variant", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    missing: dict[str, list[str]] = {}
    for v in result["variants"]:
        name = variant_of(v).label()
        if "not_measured" in v:
            missing.setdefault(v["not_measured"], []).append(name)
        else:
            table.add_row(name, *_cells(v, peer))
    console.print(table)
    for reason, names in missing.items():
        console.print(f"not measured: {', '.join(names)}: {reason}", markup=False)
    for gain in gains(result):
        console.print(f"{gain.cause} alone: {gain.line()}", markup=False)
    for line in agreement_lines(result):
        console.print(line, markup=False)
    for framework, reasons in disturbances(result).items():
        console.print(f"disturbed while {framework} was timed: {'; '.join(reasons)}", markup=False)
    gpu = environment["gpu"]["name"] if environment["gpu"] else "no GPU"
    versions = environment["versions"]
    console.print(f"{environment['cpu']}, {environment['cores']} cores, {gpu}; torch {versions['torch']}, jax {versions['jax']}", markup=False)


def disturbances(result: dict[str, Any]) -> dict[str, list[str]]:
    """Framework -> what disturbed the machine while it was timed; only those that were."""
    seen = {v["framework"]: v["conditions"]["disturbed"] for v in result["variants"] if "conditions" in v}
    return {framework: reasons for framework, reasons in seen.items() if reasons}


def _cells(v: dict[str, Any], peer: float | None) -> list[str]:
    step, verdict, compile_s = v["step_ms"], v["parity"]["verdict"], v.get("compile_s") or 0.0
    return [
        f"[{'green' if verdict == 'pass' else 'bold red'}]{verdict}[/]",
        f"{v['parity']['max_abs']:.1e}",
        f"{step['p50']:.2f}",
        f"{step['p10']:.2f} – {step['p90']:.2f}",
        f"{v['tokens_per_s']:.1f}",
        f"{v['tokens_per_s'] / peer:.2f}" if peer else "–",
        f"{compile_s:.1f}" if compile_s > 0.05 else "–",
    ]
