"""The terminal table of a result."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def peer_tokens_per_s(result: dict[str, Any]) -> float | None:
    """Tokens/s of transformers' eager generate in this run: what the speed-up column divides by."""
    return next((v["tokens_per_s"] for v in result["variants"] if v["framework"] == "transformers" and "tokens_per_s" in v), None)


def print_table(result: dict[str, Any], console: Console | None = None) -> None:
    """Every variant a row; a latency never without its verdict."""
    w, peer = result["workload"], peer_tokens_per_s(result)
    title = f"{w['model']} · {w['dtype']} · batch {w['batch']} · {w['new_tokens']} new tokens"
    table = Table(title=title, title_justify="left")
    for name in ("framework", "launch", "kernels"):
        table.add_column(name)
    for name in ("parity", "max |Δ|", "step ms p50", "p10–p90", "tokens/s", "vs transformers", "compile s"):
        table.add_column(name, justify="right")
    table.add_column("not measured because")
    for v in result["variants"]:
        names = [v["framework"], v["launch"], v["kernels"]]
        if "not_measured" in v:
            table.add_row(*names, "–", "–", "–", "–", "–", "–", "–", v["not_measured"])
            continue
        good, step = v["parity"]["verdict"] == "pass", v["step_ms"]
        ratio = f"{v['tokens_per_s'] / peer:.2f}x" if peer else "–"
        compile_s = f"{v['compile_s']:.1f}" if v.get("compilations") or (v.get("compile_s") or 0) > 0.05 else "–"
        verdict = f"[{'green' if good else 'red'}]{v['parity']['verdict']}[/]"
        table.add_row(*names, verdict, f"{v['parity']['max_abs']:.1e}", f"{step['p50']:.2f}", f"{step['p10']:.2f}–{step['p90']:.2f}", f"{v['tokens_per_s']:.1f}", ratio, compile_s)
    (console or Console(width=140)).print(table)
    environment = result["environment"]
    gpu = environment["gpu"]["name"] if environment["gpu"] else "no GPU"
    (console or Console(width=140)).print(
        f"{environment['cpu']}, {environment['cores']} cores, {gpu}; torch {environment['versions']['torch']}, jax {environment['versions']['jax']}", style="dim"
    )
