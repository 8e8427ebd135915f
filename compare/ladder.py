"""The parity ladder: climb stage by stage and name the first that differs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .models import model_config
from .stages import Stages, run_stages, stage_names, suspects

FLOAT32_BAR = 1e-3  # absolute, each stage of each layer
# Trained models have stages with values in the ten thousands, where a float32 rounding alone is
# 2e-3: beyond a magnitude of 100 the bar grows with the stage's largest value.
BAR_MAGNITUDE = 100.0
RMS_RATIO_BAR = 1.2  # bfloat16: relative rms error over transformers' own
DEFAULT_TOKENS = 48


@dataclass(frozen=True)
class Rung:
    """One stage: the worst element with both values, and the verdict."""

    framework: str
    stage: str
    passed: bool
    error: float  # float32: largest absolute difference; else relative rms error
    allowed: float
    index: tuple[int, ...]
    ours: float
    reference: float
    suspect: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def climb(model: str | Path, framework: str, dtype: str = "float32", reference: str = "transformers", tokens: list[int] | None = None) -> list[Rung]:
    """Compare every stage of a decoder with the reference (transformers, or another model).

    Each stage is fed the float32 reference's own input, so that its error is its own: at 28 layers
    even transformers' float32 residual stream is 1e-3 to 3e-3 away from float64. float32: within
    FLOAT32_BAR (see BAR_MAGNITUDE), and a last rung, ``logits``, for a whole pass from the tokens.
    Reduced precision: relative rms error at most RMS_RATIO_BAR times that of transformers' own
    stage in that dtype.
    """
    config = model_config(model)
    tokens = tokens or default_tokens(config.vocab_size)
    source = model if reference == "transformers" else reference
    wanted = run_stages("transformers", source, tokens, "float32")
    names = stage_names(config.num_layers)
    inputs = {name: value for name, value in wanted.items() if name.endswith(".input")}
    found = run_stages(framework, model, tokens, dtype, inputs)
    if dtype == "float32":
        whole = run_stages(framework, model, tokens, dtype)["lm_head"]
        return [*(_absolute(framework, name, found[name], wanted[name]) for name in names), _absolute(framework, "logits", whole, wanted["lm_head"])]
    theirs = run_stages("transformers", source, tokens, dtype, inputs)  # of the reference's weights: it sets the bar
    return [relative(framework, name, found, theirs, wanted) for name in names]


def default_tokens(vocab_size: int) -> list[int]:
    """Ids by a rule: longer than any warm start, the same for everyone."""
    return [(37 * i + 5) % vocab_size for i in range(DEFAULT_TOKENS)]


def _absolute(framework: str, name: str, ours: np.ndarray, reference: np.ndarray) -> Rung:
    error = np.abs(ours - reference)
    error = np.where(np.isfinite(error), error, np.inf)
    at = np.unravel_index(error.argmax(), error.shape)
    allowed = FLOAT32_BAR * max(1.0, float(np.abs(reference).max()) / BAR_MAGNITUDE)
    return Rung(framework, name, bool(error[at] < allowed), float(error[at]), allowed, tuple(map(int, at)), float(ours[at]), float(reference[at]), suspects(name))


def relative_rms(ours: np.ndarray, reference: np.ndarray) -> float:
    return float(np.sqrt(np.mean((ours - reference) ** 2) / np.mean(reference**2)))


def relative(framework: str, name: str, found: Stages, theirs: Stages, wanted: Stages) -> Rung:
    ours, reference = found[name], wanted[name]
    error = relative_rms(ours, reference)
    # An embedding is copied: both err by the same rounding of the weights.
    allowed = RMS_RATIO_BAR * relative_rms(theirs[name], reference) + 1e-7
    at = np.unravel_index(np.abs(ours - reference).argmax(), ours.shape)
    return Rung(framework, name, error <= allowed, error, allowed, tuple(map(int, at)), float(ours[at]), float(reference[at]), suspects(name))
