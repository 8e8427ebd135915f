"""A result as one self-contained HTML file: verdict first, then table, charts, environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from . import claims
from .answers import answers
from .charts import speed_chart, step_chart, sweep_chart, timeline_chart
from .gains import gains
from .repeats import lines as agreement_lines
from .results import label, measured, name_of, variant_of
from .series import series_of
from .sweep import SWEEPS
from .table import disturbances, peer_tokens_per_s


def headline(result: dict[str, Any]) -> list[str]:
    """The answer in a few sentences, computed from the data."""
    arms = measured(result)
    if not arms:
        return ["Nothing could be measured on this machine; the table says why."]
    failed = [label(v) for v in arms if v["parity"]["verdict"] != "pass"]
    worst = max(v["parity"]["max_abs"] for v in arms)
    same = f"All {len(arms)} measured variants give the same numbers as transformers in float32 (largest logit difference {worst:.1e})."
    sentences = [same if not failed else f"These variants do not give the reference's numbers: {', '.join(failed)}."]
    passing = [v for v in arms if v["parity"]["verdict"] == "pass"]
    if passing:
        best, peer = max(passing, key=lambda v: v["tokens_per_s"]), peer_tokens_per_s(result)
        against = f", {best['tokens_per_s'] / peer:.2f} times transformers' generate" if peer and best["framework"] != "transformers" else ""
        sentences.append(f"The fastest is {label(best)}: {best['tokens_per_s']:.1f} tokens/s at {best['step_ms']['p50']:.2f} ms a step{against}.")
    for framework, reasons in disturbances(result).items():
        sentences.append(f"Take the times of {framework} with care: {'; '.join(reasons)} while they were taken.")
    missing = sorted({v["not_measured"] for v in result["variants"] if "not_measured" in v})
    if missing:
        sentences.append(f"Some variants were not measured here ({'; '.join(missing)}).")
    return sentences


def side_by_side(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table with a column a run: its step p50 where a variant passes, and what it says otherwise."""
    entries = [{variant_of(v): v for v in result["variants"]} for result in found]
    rows = [[variant.label(), *(_cell(run.get(variant)) for run in entries)] for variant in dict.fromkeys(v for run in entries for v in run)]
    return [f"{name_of(result)}, {_machine(result)}, {result['created'][:10]}: ms" for result in found], rows


def _cell(v: dict[str, Any] | None) -> str:
    if v is None or "step_ms" not in v:
        return "–"
    return f"{v['step_ms']['p50']:.3f}" if v["parity"]["verdict"] == "pass" else "parity fails"


def _machine(result: dict[str, Any]) -> str:
    environment = result["environment"]
    return environment["gpu"]["name"] if environment["gpu"] else environment["cpu"]


def render(found: Sequence[dict[str, Any]], tests: Mapping[str, str] | None = None) -> str:
    """The page as text: the first result at length, all of them side by side, sweeps, claims (``tests``: see there). What comes from files or models is escaped."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    result, *others = found
    charts = {"Speed": speed_chart(result), "Step time": step_chart(result)} if measured(result) else {}
    timelines = {f"One step of {framework} on the clock": timeline_chart(result, framework) for framework in ("torch", "jax")}
    charts |= {title: chart for title, chart in timelines.items() if chart is not None}
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        if "sweep" in one:
            sweeps.setdefault(one["sweep"]["name"], []).append(one)
    for name, points in sweeps.items():
        if name in SWEEPS:  # a later version may know others
            charts |= {f"Sweep: {series.axis}": sweep_chart(series) for series in series_of(name, points)}
    return environment.get_template("report.html").render(
        result=result,
        headline=headline(result),
        charts=charts,
        peer=peer_tokens_per_s(result),
        label=label,
        answers=answers(found),
        gains=gains(result),
        agreement=agreement_lines(result),
        memory=next((v for v in measured(result) if "memory_map" in v), None),
        beside=side_by_side(found) if [one for one in others if "sweep" not in one] else None,
        claims=claims.table(found, tests),
        raw=json.dumps(result["environment"], indent=1),
    )


def write(found: Sequence[dict[str, Any]], path: Path, tests: Mapping[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(found, tests))
