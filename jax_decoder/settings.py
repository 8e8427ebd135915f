"""Sampling settings of a row, checked on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError

KINDS = ("greedy", "sampled")


@dataclass(frozen=True)
class Sampling:
    """Settings of one row. Temperature 0 is greedy; 0, 1.0 and 0.0 switch top_k, top_p and min_p off.

    Filters apply in the order of transformers: temperature, top_k, top_p, min_p. top_k keeps all
    tokens that tie with the k-th; top_p takes tied tokens in ascending id order until the mass is
    reached. ``seed`` is an integer from 0 to 2**32 - 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (float, lambda x: 0 <= x < math.inf, "a finite number >= 0"),
            "top_k": (int, lambda x: 0 <= x < 2**31, "an integer >= 0 (0: off)"),
            "top_p": (float, lambda x: 0 <= x <= 1, "a number from 0 to 1 (1: off)"),
            "min_p": (float, lambda x: 0 <= x <= 1, "a number from 0 to 1 (0: off)"),
            "seed": (int, lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"),
        }
        for name, (kind, valid, expected) in checks.items():
            value = _scalar(getattr(self, name), kind)
            if value is None or not valid(value):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected {expected}")
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        return "greedy" if self.temperature == 0 else "sampled"


def _scalar(value: object, kind: type) -> float | int | None:
    """A Python number from a number, numpy scalar or array of one element; None if it is none."""
    try:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "iuf":
            return None
        number = array.reshape(()).item()
    except (TypeError, ValueError):
        return None
    return kind(number) if kind is float or (math.isfinite(number) and number == int(number)) else None


GREEDY = Sampling(temperature=0.0)
