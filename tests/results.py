"""Results made by hand: entries of variants with a given step time."""

from __future__ import annotations

import numpy as np

from compare.results import make
from compare.timing import quantiles


def samples(median: float, spread: float = 0.01, count: int = 40, seed: int = 0) -> list[float]:
    return (median * (1 + spread * np.random.default_rng(seed).standard_normal(count))).tolist()


def entry(label: str, ms: float, verdict: str = "pass", seed: int = 0) -> dict:
    framework, launch, kernels = label.split()
    parity = {"verdict": verdict, "reference": "", "reason": "", "max_abs": 0.0}
    clocks = {"step_ms": quantiles(samples(ms, seed=seed)), "host_dispatch_us": 9.0, "cpu_ms_per_step": ms, "tokens_per_s": 1e3 / ms, "achieved_gb_per_s": 1.0}
    return {"framework": framework, "launch": launch, "kernels": kernels, "sampling": "greedy", "batch": 1, "bucket": 1, "parity": parity, **clocks}


def run(*entries: dict, gpu: str = "A", **workload) -> dict:
    environment = {"gpu": {"name": gpu}, "cpu": "C", "cores": 2}
    return make({"model": "m", "dtype": "bfloat16", "batch": 1, "new_tokens": 8, "max_seq_len": 16, **workload}, environment, {"copy_gb_per_s": 1.0}, list(entries))
