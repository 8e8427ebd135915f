"""The search for the quickest tiles, spans of attention and early starts, by whole steps.

Kernels that start early load while the one before them ends, so what is best for one depends on its
neighbours: entries of tiles.json are changed one at a time, and each change is timed as a whole step
in a graph of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from statistics import median
from typing import NamedTuple, Protocol

from .arms import DecoderArm
from .models import model_config
from .tuning import SPANS, Entries, candidates, products_of, tiles_in_force
from .workload import WITH_GRAPH, Variant, Workload

CACHE, BLOCKS, STEPS = 2048, 3, 24  # at most so many steps a block
BLOCK_S = 0.03  # of one block, if that is fewer steps
WORTH = 0.002  # a smaller gain is noise
EARLY = {"torch": (0, 1, 2), "jax": (0, 1)}  # kinds of early starts
FEW_SPANS = 4  # of attention, where a trial compiles the whole step


class Timed(Protocol):
    """What the search asks of the steps of a model."""

    def ms(self, table: Entries, count: int | None = None) -> list[float]:
        """Milliseconds a step with the tiles of ``table`` at the first ``count`` lengths (default: all)."""


class Round(NamedTuple):
    """One entry of a table: what it may be, how many of the lengths judge it (None: all), and whether only neighbours of the best so far are tried."""

    name: str
    values: list[list[int]]
    count: int | None
    near: bool = False


class Steps:
    """Steps of one model at several lengths, recorded anew with any table of tiles."""

    def __init__(self, model: str, framework: str, lengths: Sequence[int], table: Entries):
        vocab, self.framework, self.arms = model_config(model).vocab_size, framework, []
        with tiles_in_force(framework, table):
            for length in lengths:
                workload = Workload(model, "bfloat16", new_tokens=STEPS * BLOCKS + 16, max_seq_len=CACHE, prompt_tokens=length)
                prompt = [(37 * t + 5) % vocab for t in range(length)]
                forced = [[(11 * t + 3) % vocab for t in range(STEPS * BLOCKS + 16)]]
                variant = Variant(framework, WITH_GRAPH[framework], "fused")
                self.arms.append(DecoderArm(variant, workload, [prompt], forced, self.arms[0].decoder if self.arms else None))

    def ms(self, table: Entries, count: int | None = None) -> list[float]:
        """Median milliseconds a step at the first ``count`` lengths (default: all); infinity where the step cannot run."""
        found = []
        for arm in self.arms[:count]:
            with tiles_in_force(self.framework, table):
                arm.decoder.release_graphs()
                arm.restart()
                arm.steps(4)
            one = _seconds(arm, 2)
            count_steps = max(4, min(STEPS, int(BLOCK_S / one)))
            blocks = [_seconds(arm, count_steps) * 1e3 for _ in range(BLOCKS)]
            found.append(float("inf") if arm.decoder.launch_report()["fallbacks"] else median(blocks))
        return found

    def close(self) -> None:
        for arm in reversed(self.arms):
            arm.close()


def _seconds(arm: DecoderArm, steps: int) -> float:
    """Of one step."""
    arm.wait()
    started = time.perf_counter()
    arm.steps(steps)
    arm.wait()
    return (time.perf_counter() - started) / steps


def rounds_of(model: str, framework: str) -> list[Round]:
    """The entries to search, in order; attention once more behind the products, on which its best depends."""
    width = model_config(model).head_dim
    spans = Round(f"attend {width}", [list(span) for span in SPANS], None)
    if framework == "jax":
        return [spans._replace(values=spans.values[:FEW_SPANS])]
    from torch_decoder.kernels.tiles import key

    products = [Round(key(rows, inner, 1, kind == "gated"), [list(t) for t in candidates(rows, inner, 1)], 1, near=True) for kind, rows, inner in products_of(model)]
    return [spans, *products, spans]


def search(steps: Timed, table: Entries, rounds: Sequence[Round], deadline: float) -> Entries:
    """The entries to change in ``table``; prints every change that is kept. No trial begins after ``deadline``."""
    found: Entries = {}
    for name, values, count, near in rounds:
        now = {**table, **found}.get(name)
        best, tried = sum(steps.ms({**table, **found}, count)), [now]
        left = _neighbours(now, values) if near and now is not None else list(values)
        while left and time.monotonic() < deadline:
            value = left.pop(0)
            if value in tried:
                continue
            tried.append(value)
            ms = _better(steps, {**table, **found}, {name: value}, best, count)
            if ms is not None:
                print(f"  {name}: {value}: {best:.4f} -> {ms:.4f} ms", flush=True)
                found, best = {**found, name: value}, ms
                left = _neighbours(value, values) if near else left
        print(f"  {name}: {len(tried) - 1} of {len(values)} tried", flush=True)
    return found


def _neighbours(value: Sequence[int], values: Sequence[list[int]]) -> list[list[int]]:
    """Those whose numbers are the same, doubled or halved, and at least one of them the same."""
    steps = [[a == 2 * b or 2 * a == b for a, b in zip(value, other)] for other in values]
    same = [[a == b for a, b in zip(value, other)] for other in values]
    return [other for other, step, equal in zip(values, steps, same) if any(step) and any(equal) and all(s or e for s, e in zip(step, equal))]


def _better(steps: Timed, table: Entries, change: Entries, limit: float, count: int | None) -> float | None:
    """The ms of all lengths together if ``change`` beats ``limit``, and once more in turns with ``table``; else None."""
    try:
        if sum(steps.ms({**table, **change}, count)) > limit * (1 - WORTH):
            return None
    except Exception as error:  # what does not compile or fit is no candidate
        print(f"  {change}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None
    old, new = zip(*((sum(steps.ms(table, count)), sum(steps.ms({**table, **change}, count))) for _ in range(2)))
    return min(new) if min(new) < min(old) * (1 - WORTH) else None


def tune(model: str, framework: str, lengths: Sequence[int], table: Entries, seconds: float) -> Entries:
    """Changed entries of ``table`` for the steps of a model: the search runs with each kind of early starts and without,
    for its part of ``seconds`` (loading does not count), and the quickest is kept. Prints what was gained."""
    steps, name = Steps(model, framework, lengths, table), f"early {model_config(model).hidden_size}"
    started, start, found = time.monotonic(), steps.ms(table), [table]
    starts = EARLY[framework]
    for number, early in enumerate(starts, 1):
        print(f"{model} {framework}, early starts {early}", flush=True)
        ours = {**found[-1], name: [early]}  # from what the one before found: most of it stays
        found.append({**ours, **search(steps, ours, rounds_of(model, framework), started + seconds * number / len(starts))})
    times = [[min(pair) for pair in zip(steps.ms(t), steps.ms(t))] for t in found]
    best, ms = min(zip(found, times), key=lambda pair: sum(pair[1]))
    for number, length in enumerate(lengths):
        by_start = ", ".join(f"{ours[number]:.4f} with early starts {early}" for early, ours in zip(starts, times[1:]))
        print(f"{model} {framework}, prompt of {length}: {start[number]:.4f} ms a step; {by_start}; kept {ms[number]:.4f}", flush=True)
    steps.close()
    return {entry: value for entry, value in best.items() if table.get(entry) != value}


def compile_product(kind: str, rows: int, inner: int, tile: tuple[int, int, int], early: int) -> None:
    """Compile one product, into Triton's cache; what does not compile shows when it is timed."""
    import torch

    from torch_decoder.kernels import products
    from torch_decoder.kernels.tiles import key

    with tiles_in_force("torch", {key(rows, inner, 1, kind == "gated"): list(tile)}):
        options = {"device": "cuda", "dtype": torch.bfloat16}
        weight = torch.zeros(rows * (1 + (kind == "gated")), inner, **options)
        x, norm, residual = torch.zeros(1, inner, **options), torch.ones(inner, **options), torch.zeros(1, rows, **options)
        if kind == "gated":
            products.norm_gated_silu(x, norm, 1e-5, weight, None, early=early)
        elif kind == "norm":
            products.norm_linear(x, norm, 1e-5, weight, None, torch.float32, early=early)
        else:
            products.linear_add(x, weight, None, residual, early=early)


def compile_all(models: Sequence[str], seconds: float) -> None:
    """Compile candidates side by side; what is not done in time is compiled when it is tried."""
    started = time.monotonic()
    shapes = dict.fromkeys(shape for model in models for shape in products_of(model))
    wanted = [(*shape, tile, early) for shape in shapes for tile in candidates(*shape[1:], 1) for early in EARLY["torch"]]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_product, *job) for job in wanted]
        wait(jobs, timeout=seconds)
        pool.shutdown(cancel_futures=True)
    print(f"compiled {sum(not job.cancelled() for job in jobs)} of {len(jobs)} candidates in {time.monotonic() - started:.0f} s", flush=True)
