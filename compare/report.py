"""A result as one self-contained HTML file: verdict first, then table, charts, environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from .charts import label, measured, speed_chart, step_chart, timeline_chart
from .gains import gains
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


def render(result: dict[str, Any]) -> str:
    """The page as text; everything that comes from files or models is escaped."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    charts = {"Speed": speed_chart(result), "Step time": step_chart(result)} if measured(result) else {}
    timelines = {f"One step of {framework} on the clock": timeline_chart(result, framework) for framework in ("torch", "jax")}
    charts |= {title: chart for title, chart in timelines.items() if chart is not None}
    peer = peer_tokens_per_s(result)
    return environment.get_template("report.html").render(
        result=result, headline=headline(result), charts=charts, peer=peer, label=label, gains=gains(result), raw=json.dumps(result["environment"], indent=1)
    )


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result))
