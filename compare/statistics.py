"""How sure a figure is: bootstrap intervals of medians and of their ratios, and drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES, CONFIDENCE = 2000, 0.95
FEWEST = 6  # samples: an interval of fewer holds the median less often than it says


class Interval(NamedTuple):
    """A figure and the bounds of its 95 % interval, in the figure's own unit; 0 and infinity of fewer than FEWEST samples."""

    value: float
    low: float
    high: float


def median_interval(samples: Sequence[float]) -> Interval:
    """The median with its percentile bootstrap interval (Efron 1979)."""
    return _interval(np.median(samples), np.median(_resampled(samples), axis=1), len(samples))


def ratio_interval(above: Sequence[float], below: Sequence[float], interleaved: bool) -> Interval:
    """Median of ``above`` over median of ``below``.

    ``interleaved`` arms of one run took their samples in turns: those of one round are drawn
    together, so that what slowed both does not widen the interval.
    """
    together = interleaved and len(above) == len(below)
    top, bottom = _resampled(above), _resampled(below, seed=0 if together else 1)
    return _interval(np.median(above) / np.median(below), np.median(top, axis=1) / np.median(bottom, axis=1), min(len(above), len(below)))


def drift(samples: Sequence[float]) -> float:
    """How much slower (+) or faster (-) the last third of samples in time is than the first: 0.05 is 5 %."""
    third = max(1, len(samples) // 3)
    return float(np.median(samples[-third:]) / np.median(samples[:third]) - 1)


def _resampled(samples: Sequence[float], seed: int = 0) -> np.ndarray:
    """[RESAMPLES, n], each row drawn with replacement; the same draws for the same seed and number of samples."""
    return np.random.default_rng(seed).choice(np.asarray(samples, np.float64), (RESAMPLES, len(samples)))


def _interval(value: float, resampled: np.ndarray, count: int) -> Interval:
    if count < FEWEST:
        return Interval(float(value), 0.0, float("inf"))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(value), float(low), float(high))
