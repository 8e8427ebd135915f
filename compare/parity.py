"""When are two sets of logits the same? The verdicts of the comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FLOAT32_BAR = 1e-3  # largest absolute difference of float32 logits
KL_RATIO_BAR = 1.10  # 95 % upper bound of mean KL, ours over theirs
TAIL_RATIO_BAR = 1.25  # 99.9th percentile of absolute error, ours over theirs
POSITIONS_ASKED = 2048  # positions that a reduced-precision verdict should rest on


@dataclass(frozen=True)
class Verdict:
    """``verdict`` is "pass" or "fail"; the numbers are what it was made from."""

    verdict: str
    reference: str
    max_abs: float
    kl_mean: float
    positions: int
    first_divergence: int | None  # of greedy tokens: the step; None if equal
    reason: str
    differing_bits: int | None = None  # against another launch mode; None where not compared
    kl_ratio: float | None = None
    tail_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def differing_bits(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Bits that differ between two float32 arrays of one shape."""
    different = np.bitwise_xor(np.ascontiguousarray(ours).view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32))
    return int(np.bitwise_count(different[different != 0]).sum())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities over the last axis."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def kl(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) in nats, one a position."""
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)


def compare_logits(ours: np.ndarray, reference: np.ndarray, dtype: str, theirs: np.ndarray | None = None) -> Verdict:
    """Judge logits [..., V] against a float32 reference of the same shape.

    float32: every value within FLOAT32_BAR and greedy tokens equal but for ties within the noise.
    Reduced precision: against ``theirs``, transformers' own logits in that dtype.
    """
    ours, reference = ours.reshape(-1, ours.shape[-1]), reference.reshape(-1, reference.shape[-1])
    if not np.isfinite(ours).all():
        return Verdict("fail", "transformers float32", float("inf"), float("inf"), len(ours), 0, "logits are not finite")
    error = np.abs(ours - reference)
    divergence = _first_divergence(ours, reference, float(error.max()))
    numbers = {"reference": "transformers float32", "max_abs": float(error.max()), "kl_mean": float(kl(reference, ours).mean()), "positions": len(ours)}
    if dtype == "float32":
        good = error.max() < FLOAT32_BAR and divergence is None
        reason = f"largest difference {error.max():.1e}, bar {FLOAT32_BAR:.0e}" + ("" if divergence is None else f"; greedy tokens differ at position {divergence}")
        return Verdict("pass" if good else "fail", **numbers, first_divergence=divergence, reason=reason)
    if theirs is None:
        raise ValueError("a reduced-precision verdict needs transformers' logits in that dtype")
    return _reduced(ours, reference, theirs.reshape(ours.shape), numbers, divergence)


def _reduced(ours: np.ndarray, reference: np.ndarray, theirs: np.ndarray, numbers: dict[str, Any], divergence: int | None) -> Verdict:
    ratio, upper = kl_ratio(kl(reference, ours), kl(reference, theirs))
    tail = float(np.quantile(np.abs(ours - reference), 0.999) / np.quantile(np.abs(theirs - reference), 0.999))
    good = upper < KL_RATIO_BAR and tail <= TAIL_RATIO_BAR and divergence is None
    reason = f"KL {ratio:.2f} of transformers' own (95 % below {upper:.2f}, bar {KL_RATIO_BAR}), tail {tail:.2f} (bar {TAIL_RATIO_BAR})"
    if len(ours) < POSITIONS_ASKED:
        reason += f"; {len(ours)} positions, {POSITIONS_ASKED} are asked for a firm verdict"
    return Verdict("pass" if good else "fail", **numbers, first_divergence=divergence, reason=reason, kl_ratio=ratio, tail_ratio=tail)


def kl_ratio(ours: np.ndarray, theirs: np.ndarray, draws: int = 1000) -> tuple[float, float]:
    """Ratio of mean KL and the upper end of its 95 % bootstrap interval over positions."""
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(ours), (draws, len(ours)))
    ratios = ours[picks].mean(1) / theirs[picks].mean(1)
    return float(ours.mean() / theirs.mean()), float(np.quantile(ratios, 0.975))


def _first_divergence(ours: np.ndarray, reference: np.ndarray, noise: float) -> int | None:
    """First position whose greedy tokens differ although the reference's margin exceeds the noise."""
    top = np.sort(np.partition(reference, -2, axis=-1)[:, -2:], axis=-1)
    margin = top[:, 1] - top[:, 0]
    different = (ours.argmax(-1) != reference.argmax(-1)) & (margin > 2 * noise)
    return int(np.argmax(different)) if different.any() else None
