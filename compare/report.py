"""A result as one self-contained HTML file: verdict first, then table, charts, environment."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from .gains import gains
from .table import peer_tokens_per_s

# Okabe-Ito: told apart by colour-blind readers.
COLOURS = {"transformers": "#999999", "torch": "#D55E00", "jax": "#0072B2"}
_INK = "#123457"  # stands for the page's text colour, so that charts follow dark mode


def label(variant: dict[str, Any]) -> str:
    special = [word for word, usual in ((variant["kernels"], "plain"), (variant["sampling"], "greedy")) if word != usual]
    return f"{variant['framework']} {variant['launch']}" + (f" ({', '.join(special)})" if special else "")


def measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [v for v in result["variants"] if "step_ms" in v]


def headline(result: dict[str, Any]) -> list[str]:
    """The answer in at most three sentences, computed from the data."""
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
    missing = sorted({v["not_measured"] for v in result["variants"] if "not_measured" in v})
    if missing:
        sentences.append(f"Some variants were not measured here ({'; '.join(missing)}).")
    return sentences


def _svg(figure: Any, alternative: str) -> str:
    """Inline SVG with text as text and the page's own ink."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK.lower(), "currentColor").replace(_INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{jinja2.filters.escape(alternative)}" class="chart" ', 1)


def _axes(height: float) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(7.2, height))
    axes.tick_params(colors=_INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    return figure, axes


def speed_chart(result: dict[str, Any]) -> str:
    """Tokens a second of every measured variant."""
    arms = measured(result)[::-1]
    figure, axes = _axes(0.6 + 0.36 * len(arms))
    bars = axes.barh([label(v) for v in arms], [v["tokens_per_s"] for v in arms], color=[COLOURS[v["framework"]] for v in arms])
    axes.bar_label(bars, fmt="%.1f", padding=3, color=_INK, fontsize=9)
    axes.set_xlabel("tokens/s (more is better)")
    alternative = "Tokens a second: " + ", ".join(f"{label(v)} {v['tokens_per_s']:.1f}" for v in arms[::-1])
    return _svg(figure, alternative)


def step_chart(result: dict[str, Any]) -> str:
    """Every step sample of every measured variant, with the median."""
    arms = measured(result)[::-1]
    figure, axes = _axes(0.6 + 0.36 * len(arms))
    for row, v in enumerate(arms):
        samples = v["step_ms"]["samples"]
        axes.plot(samples, [row] * len(samples), "|", color=COLOURS[v["framework"]], markersize=12, alpha=0.6)
        axes.plot([v["step_ms"]["p50"]], [row], "D", color=_INK, markersize=4)
    axes.set_yticks(range(len(arms)), [label(v) for v in arms])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ms a step, logarithmic; the diamond is the median (less is better)")
    return _svg(figure, "Step times: " + ", ".join(f"{label(v)} {v['step_ms']['p50']:.2f} ms" for v in arms[::-1]))


def render(result: dict[str, Any]) -> str:
    """The page as text; everything that comes from files or models is escaped."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    charts = {"Speed": speed_chart(result), "Step time": step_chart(result)} if measured(result) else {}
    peer = peer_tokens_per_s(result)
    return environment.get_template("report.html").render(
        result=result, headline=headline(result), charts=charts, peer=peer, label=label, gains=gains(result), raw=json.dumps(result["environment"], indent=1)
    )


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result))
