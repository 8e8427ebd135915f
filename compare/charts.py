"""Charts of a result as inline SVG: text as text, the page's own ink, colours that colour-blind readers tell apart."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import jinja2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from .results import label, measured
from .series import Series
from .trace import StepTrace
from .workload import WITH_GRAPH, WITHOUT_GRAPH

# Okabe-Ito.
COLOURS = {"transformers": "#999999", "torch": "#D55E00", "jax": "#0072B2"}
LAUNCH, COMPUTE = "#E69F00", "#009E73"
_INK = "#123457"  # stands for the page's text colour, so that charts follow dark mode


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
    figure, one = plt.subplots(figsize=(7.2, height))
    return figure, axes(one)


def axes(one: Any) -> Any:
    """A plot's axes in the style of the page."""
    one.tick_params(colors=_INK, labelsize=9)
    for side, spine in one.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    one.xaxis.label.set_color(_INK)
    return one


def _plain_ticks(axis: Any) -> None:
    """Numbers as they are on a logarithmic axis: 2 and 50, no powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


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
    _plain_ticks(axes.xaxis)
    axes.set_xlabel("ms a step, logarithmic; the diamond is the median (less is better)")
    return _svg(figure, "Step times: " + ", ".join(f"{label(v)} {v['step_ms']['p50']:.2f} ms" for v in arms[::-1]))


def traced_pair(result: dict[str, Any], framework: str) -> list[tuple[str, StepTrace]] | None:
    """Launch mode and traced step without a graph and in one, plain kernels; None unless both were traced."""
    kept = {(v["launch"], v["kernels"]): StepTrace.from_dict(v["timeline"]) for v in measured(result) if v["framework"] == framework and v.get("timeline", {}).get("spans")}
    pairs = [(launch, kept.get((launch, "plain"))) for launch in (WITHOUT_GRAPH[framework], WITH_GRAPH[framework])]
    return None if any(trace is None for _, trace in pairs) else pairs


def draw_timeline(pairs: Sequence[tuple[str, StepTrace]]) -> tuple[Any, str]:
    """The figure of a pair on one axis (calls, work, and blank where nothing runs), and its text alternative."""
    figure, one = _axes(2.6)
    places, names = [], []
    for row, (launch, trace) in enumerate(pairs):
        zero = min(span.start for span in trace.spans)
        for lane, colour, place in (("host", LAUNCH, 3.3 - 2.2 * row), ("device", COMPUTE, 2.5 - 2.2 * row)):
            bars = [((span.start - zero) / 1e3, (span.end - span.start) / 1e3) for span in trace.lane(lane)]
            one.broken_barh(bars, (place - 0.3, 0.6), facecolors=colour, linewidth=0, antialiased=False)
            places.append(place)
            names.append(f"{launch}: {'host calls' if lane == 'host' else 'device'}")
        one.annotate(f"device idle {trace.idle_share:.0%} of {trace.span_us:.0f} µs", (trace.span_us, places[-1] - 0.34), ha="right", va="top", color=_INK, fontsize=9)
    one.set_ylim(-0.6, 3.7)
    one.set_yticks(places, names)
    one.set_xlabel("µs since the step's first call; traced, so longer than measured")
    return figure, ", ".join(f"{launch} {trace.idle_share:.0%} idle over {trace.span_us:.0f} µs" for launch, trace in pairs)


def timeline_chart(result: dict[str, Any], framework: str) -> str | None:
    """One step without a graph above the same step in one. None without traces."""
    pairs = traced_pair(result, framework)
    if pairs is None:
        return None
    figure, shares = draw_timeline(pairs)
    return _svg(figure, f"Timeline of one {framework} step: {shares}")


def sweep_chart(series: Series) -> str:
    """A line a curve over the points of a sweep; points that fail their parity check are left out."""
    figure, axes = _axes(3.4)
    places = list(dict.fromkeys(x for curve in series.curves for x, _, _ in curve.points))
    styles = ("-", "--", ":", "-.")
    for number, curve in enumerate(series.curves):
        kept = [(places.index(x), y) for x, y, verdict in curve.points if verdict == "pass"]
        if kept:
            axes.plot(*zip(*kept), styles[number % 4], marker="o", markersize=4, color=COLOURS[curve.variant.framework], label=curve.name)
    axes.set_xticks(range(len(places)), places)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xlabel(series.axis)
    axes.set_ylabel(series.unit, color=_INK)
    axes.legend(fontsize=8, frameon=False, labelcolor=_INK)
    return _svg(figure, f"{series.unit} by {series.axis}: " + "; ".join(f"{curve.name} " + ", ".join(f"{x} {y:.3g}" for x, y, _ in curve.points) for curve in series.curves))
