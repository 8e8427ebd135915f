"""When are two sets of logits the same? The verdicts of the comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
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
    kl_mean: float | None  # None where stages were judged
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
    return Reference(reference).kl(other)


class Reference:
    """float32 logits [..., V] to judge by, and transformers' own in a reduced precision; what every verdict needs of them is computed once."""

    def __init__(self, logits: np.ndarray, theirs: np.ndarray | None = None):
        self.logits = logits.reshape(-1, logits.shape[-1])
        self.theirs = None if theirs is None else theirs.reshape(self.logits.shape)

    @cached_property
    def _log_p(self) -> np.ndarray:
        return log_softmax(self.logits)

    @cached_property
    def _p(self) -> np.ndarray:
        return np.exp(self._log_p)

    @cached_property
    def _negative_entropy(self) -> np.ndarray:
        return np.einsum("pv,pv->p", self._p, self._log_p)

    def prepare(self, dtype: str) -> None:
        """Compute what verdicts share, before threads ask for it."""
        _ = self._negative_entropy, self.greedy
        if dtype != "float32" and self.theirs is not None:
            _ = self.their_kl, self.their_tail

    def kl(self, other: np.ndarray) -> np.ndarray:
        """KL(reference || other) in nats, one a position."""
        return self._negative_entropy - np.einsum("pv,pv->p", self._p, log_softmax(other.reshape(self.logits.shape)))

    @cached_property
    def their_kl(self) -> np.ndarray:
        return self.kl(self.theirs)

    @cached_property
    def their_tail(self) -> float:
        return _tail(np.abs(self.theirs - self.logits))

    @cached_property
    def greedy(self) -> tuple[np.ndarray, np.ndarray]:
        """The greedy token of each position, and how far its logit is above the next."""
        top = np.partition(self.logits, -2, axis=-1)[:, -2:]
        return self.logits.argmax(-1), top[:, 1] - top[:, 0]

    def judge(self, ours: np.ndarray, dtype: str) -> Verdict:
        """A verdict on logits of the same shape.

        float32: every value within FLOAT32_BAR and greedy tokens equal but for ties within the noise.
        Reduced precision: against ``theirs``, transformers' own logits in that dtype.
        """
        ours = ours.reshape(self.logits.shape)
        if not np.isfinite(ours).all():
            return Verdict("fail", "transformers float32", float("inf"), float("inf"), len(ours), 0, "logits are not finite")
        error = np.abs(ours - self.logits)
        divergence, our_kl, largest = self._first_divergence(ours, float(error.max())), self.kl(ours), float(error.max())
        numbers = {"reference": "transformers float32", "max_abs": largest, "kl_mean": float(our_kl.mean()), "positions": len(ours), "first_divergence": divergence}
        if dtype != "float32":
            return self._reduced(our_kl, _tail(error), numbers)
        good = largest < FLOAT32_BAR and divergence is None
        reason = f"largest difference {largest:.1e}, bar {FLOAT32_BAR:.0e}" + ("" if divergence is None else f"; greedy tokens differ at position {divergence}")
        return Verdict("pass" if good else "fail", **numbers, reason=reason)

    def _reduced(self, our_kl: np.ndarray, our_tail: float, numbers: dict[str, Any]) -> Verdict:
        if self.theirs is None:
            raise ValueError("a reduced-precision verdict needs transformers' logits in that dtype")
        ratio, upper = kl_ratio(our_kl, self.their_kl)
        tail = our_tail / self.their_tail
        good = upper < KL_RATIO_BAR and tail <= TAIL_RATIO_BAR and numbers["first_divergence"] is None
        reason = f"KL {ratio:.2f} of transformers' own (95 % below {upper:.2f}, bar {KL_RATIO_BAR}), tail {tail:.2f} (bar {TAIL_RATIO_BAR})"
        if len(our_kl) < POSITIONS_ASKED:
            reason += f"; {len(our_kl)} positions, {POSITIONS_ASKED} are asked for a firm verdict"
        return Verdict("pass" if good else "fail", **numbers, reason=reason, kl_ratio=ratio, tail_ratio=tail)

    def _first_divergence(self, ours: np.ndarray, noise: float) -> int | None:
        """First position whose greedy tokens differ although the reference's margin exceeds the noise."""
        tokens, margin = self.greedy
        different = (ours.argmax(-1) != tokens) & (margin > 2 * noise)
        return int(np.argmax(different)) if different.any() else None


def _tail(error: np.ndarray) -> float:
    return float(np.quantile(error, 0.999))


def kl_ratio(ours: np.ndarray, theirs: np.ndarray, draws: int = 1000) -> tuple[float, float]:
    """Ratio of mean KL and the upper end of its 95 % bootstrap interval over positions."""
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(ours), (draws, len(ours)))
    ratios = ours[picks].mean(1) / theirs[picks].mean(1)
    return float(ours.mean() / theirs.mean()), float(np.quantile(ratios, 0.975))
