"""The search for the quickest tiles, spans of attention and early starts, by whole steps.

Kernels that start early load while the one before them ends, so what is best for one depends on its
neighbours: entries of tiles.json are changed one at a time, and each change is timed as a whole step
in a graph of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from statistics import median
from typing import Protocol

from .arms import DecoderArm
from .models import model_config
from .tuning import SPANS, Entries, candidates, products_of, tiles_in_force
from .workload import WITH_GRAPH, Variant, Workload

CACHE, BLOCKS, STEPS = 2048, 3, 24
WORTH = 0.002  # a smaller gain is noise
FEW_SPANS = 4  # of attention, where a trial compiles the whole step


class Timed(Protocol):
    """What the search asks of the steps of a model."""

    def ms(self, table: Entries, count: int | None = None) -> list[float]:
        """Milliseconds a step with the tiles of ``table`` at the first ``count`` lengths (default: all)."""


class Steps:
    """Steps of one model at several lengths, recorded anew with any table of tiles."""

    def __init__(self, model: str, framework: str, lengths: Sequence[int], table: Entries):
        vocab, self.framework, self.arms = model_config(model).vocab_size, framework, []
        with tiles_in_force(framework, table):
            for length in lengths:
                workload = Workload(model, "bfloat16", new_tokens=STEPS * BLOCKS + 8, max_seq_len=CACHE, prompt_tokens=length)
                prompt = [(37 * t + 5) % vocab for t in range(length)]
                forced = [[(11 * t + 3) % vocab for t in range(STEPS * BLOCKS + 8)]]
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
            arm.wait()
            blocks = []
            for _ in range(BLOCKS):
                started = time.perf_counter()
                arm.steps(STEPS)
                arm.wait()
                blocks.append((time.perf_counter() - started) / STEPS * 1e3)
            found.append(float("inf") if arm.decoder.launch_report()["fallbacks"] else median(blocks))
        return found

    def close(self) -> None:
        for arm in reversed(self.arms):
            arm.close()


def trials(model: str, framework: str) -> Iterator[tuple[list[Entries], int | None]]:
    """Rounds of alternatives, and how many of the lengths judge them (None: all)."""
    config = model_config(model)
    spans: list[Entries] = [{f"attend {config.head_dim}": list(span)} for span in SPANS]
    yield [{f"early {config.hidden_size}": [1]}], None
    if framework == "torch":
        from torch_decoder.kernels.tiles import key

        yield spans, None
        for kind, rows, inner in products_of(model):
            yield [{key(rows, inner, 1, kind == "gated"): list(tile)} for tile in candidates(rows, inner, 1)], 1
        yield spans, None
    else:
        yield spans[:FEW_SPANS], None
    yield [{f"early {config.hidden_size}": [0]}], None


def search(steps: Timed, table: Entries, rounds: Iterator[tuple[list[Entries], int | None]], deadline: float) -> Entries:
    """The entries to change in ``table``; prints every change that is kept. No trial begins after ``deadline``."""
    found: Entries = {}
    for alternatives, count in rounds:
        best, tried = sum(steps.ms({**table, **found}, count)), 0
        for change in alternatives:
            if time.monotonic() > deadline:
                break
            tried += 1
            try:
                ms = _better(steps, {**table, **found}, change, best, count)
            except Exception as error:  # what does not compile or fit is no candidate
                print(f"  {change}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            if ms is not None:
                print(f"  {change}: {best:.4f} -> {ms:.4f} ms", flush=True)
                found, best = {**found, **change}, ms
        print(f"  {next(iter(alternatives[0]))}: {tried} of {len(alternatives)} tried", flush=True)
    return found


def _better(steps: Timed, table: Entries, change: Entries, limit: float, count: int | None) -> float | None:
    """The ms of all lengths together if ``change`` beats ``limit``, and once more in turns with ``table``; else None."""
    if sum(steps.ms({**table, **change}, count)) > limit * (1 - WORTH):
        return None
    old, new = zip(*((sum(steps.ms(table, count)), sum(steps.ms({**table, **change}, count))) for _ in range(2)))
    return min(new) if min(new) < min(old) * (1 - WORTH) else None


def tune(model: str, framework: str, lengths: Sequence[int], table: Entries, seconds: float) -> Entries:
    """Changed entries of ``table`` for the steps of a model; prints what was gained at each length. Loading does not count."""
    steps = Steps(model, framework, lengths, table)
    deadline, start = time.monotonic() + seconds, steps.ms(table)
    found = search(steps, table, trials(model, framework), deadline)
    for length, old, new in zip(lengths, start, steps.ms({**table, **found})):
        print(f"{model} {framework}, prompt of {length}: {old:.4f} -> {new:.4f} ms a step", flush=True)
    steps.close()
    return found


def compile_product(kind: str, rows: int, inner: int, tile: tuple[int, int, int]) -> None:
    """Compile one product that starts early, into Triton's cache; what does not compile shows when it is timed."""
    import torch

    from torch_decoder.kernels import products
    from torch_decoder.kernels.tiles import key

    with tiles_in_force("torch", {key(rows, inner, 1, kind == "gated"): list(tile)}):
        options = {"device": "cuda", "dtype": torch.bfloat16}
        weight = torch.zeros(rows * (1 + (kind == "gated")), inner, **options)
        x, norm, residual = torch.zeros(1, inner, **options), torch.ones(inner, **options), torch.zeros(1, rows, **options)
        if kind == "gated":
            products.norm_gated_silu(x, norm, 1e-5, weight, None, early=True)
        elif kind == "norm":
            products.norm_linear(x, norm, 1e-5, weight, None, torch.float32, early=True)
        else:
            products.linear_add(x, weight, None, residual, early=True)


def compile_all(models: Sequence[str], seconds: float) -> None:
    """Compile candidates side by side; what is not done in time is compiled when it is tried."""
    started = time.monotonic()
    wanted = dict.fromkeys((*shape, tile) for model in models for shape in products_of(model) for tile in candidates(*shape[1:], 1))
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_product, *job) for job in wanted]
        wait(jobs, timeout=seconds)
        pool.shutdown(cancel_futures=True)
    print(f"compiled {sum(not job.cancelled() for job in jobs)} of {len(jobs)} candidates in {time.monotonic() - started:.0f} s", flush=True)
