"""The README's pictures, drawn from committed results. Each carries a digest of the figures that it shows."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from typing import Any

from .charts import COLOURS, axes, draw_timeline, traced_pair
from .results import Results, label, measured, name_of
from .workload import WITH_GRAPH

DIGEST = "Description"  # the field of the PNG's metadata


def draw(found: Results) -> dict[str, bytes]:
    """PNGs by file name: step times of all models, and the timeline of each framework that was traced."""
    runs = [result for result in found if "sweep" not in result]
    pictures = {"steps.png": _steps(runs)}
    for framework in WITH_GRAPH:
        traced = next(((result, pair) for result in runs if (pair := traced_pair(result, framework)) is not None), None)
        if traced is not None:
            result, pair = traced
            figure, _ = draw_timeline(pair)
            figure.axes[0].set_title(f"{name_of(result)}, {framework}: one step without and with a graph", fontsize=10)
            pictures[f"timeline-{framework}.png"] = _png(figure, [result["created"], framework])
    return pictures


def digest_of(png: bytes) -> str:
    """The digest that a picture of ``draw`` carries."""
    from PIL import Image

    return Image.open(io.BytesIO(png)).info[DIGEST]


def _steps(runs: Results) -> bytes:
    """The step time of every variant that passes, a panel a model."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(runs), figsize=(4.2 * len(runs), 4.6), squeeze=False)
    shown = [list(_passing(result)) for result in runs]
    for panel, result, bars in zip(panels[0], runs, shown):
        axes(panel)
        drawn = panel.barh([name for name, _, _ in bars], [ms for _, ms, _ in bars], color=[COLOURS[framework] for _, _, framework in bars])
        panel.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        panel.invert_yaxis()
        panel.set_title(f"{name_of(result)}: ms a step", fontsize=10)
        panel.margins(x=0.15)
    figure.tight_layout()
    return _png(figure, shown)


def _passing(result: dict[str, Any]) -> Iterator[tuple[str, float, str]]:
    for v in measured(result):
        if v["parity"]["verdict"] == "pass":
            yield label(v), round(v["step_ms"]["p50"], 3), v["framework"]


def _png(figure: Any, shown: Any) -> bytes:
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", facecolor="white", metadata={DIGEST: digest, "Software": None})
    plt.close(figure)
    return buffer.getvalue()
