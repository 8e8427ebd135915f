"""Prefill with and without a graph: what capturing a prompt's pass costs, what it saves a call, and when that pays.

A graph of a prefill serves one prompt length (torch) or one length of pieces (jax, whose pieces are
padded to one size).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from .parity import differing_bits
from .workload import NEEDS_CUDA

CALLS = 5  # of which the median is taken


class Prefill(NamedTuple):
    """One prompt length in one framework: both ways to run it, what making the graph took, and the keys and values it left."""

    without: Callable[[], None]
    within: Callable[[], None]
    capture_s: float
    wait: Callable[[], None]
    cache: Callable[[], np.ndarray]  # float32, of the last layer, which every other one leads to


def prefill_costs(arm: Any, lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """For each prompt length in tokens: ``eager_ms``, ``graph_ms``, ``capture_s``, ``differing_bits``, ``calls_to_pay_back`` (None: never).

    Of arms that run in graphs; empty for others.
    """
    if arm.variant.launch not in NEEDS_CUDA:
        return {}
    make = {"torch": _torch, "jax": _jax}[arm.variant.framework]
    prompts = {length: [(37 * t + 5) % arm.config.vocab_size for t in range(length)] for length in lengths}
    return {str(length): measure(make(arm.decoder, prompt)) for length, prompt in prompts.items()}


def measure(one: Prefill) -> dict[str, Any]:
    """The figures of one prompt length; see ``prefill_costs``."""
    eager_s = median_s(one.without, one.wait, CALLS)
    eager = one.cache()
    graph_s = median_s(one.within, one.wait, CALLS)
    pay_back = None if graph_s >= eager_s else one.capture_s / (eager_s - graph_s)
    return {"eager_ms": eager_s * 1e3, "graph_ms": graph_s * 1e3, "capture_s": one.capture_s, "differing_bits": differing_bits(eager, one.cache()), "calls_to_pay_back": pay_back}


def median_s(work: Callable[[], None], wait: Callable[[], None], times: int) -> float:
    """Median wall seconds of ``work`` until the device has done it; once before, unmeasured."""
    return float(np.median([_seconds(work, wait) for _ in range(times + 1)][1:]))


def _seconds(work: Callable[[], None], wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def _pieces(length: int, longest: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each forward pass."""
    return [(start, min(longest, length - start)) for start in range(0, length, longest)]


def _torch(decoder: Any, prompt: Sequence[int]) -> Prefill:
    import torch

    from torch_decoder.decode import prefill_chunk
    from torch_decoder.graphs import record
    from torch_decoder.runner import PREFILL_CHUNK

    runner = decoder._runner
    cache, tokens = runner.new_state(1).cache, torch.tensor([prompt], dtype=torch.int32, device=runner.device)

    def work() -> None:
        for start, count in _pieces(len(prompt), PREFILL_CHUNK):
            prefill_chunk(decoder.model, cache, tokens[:, start : start + count], start)

    def last_layer() -> np.ndarray:
        return cache.layers[-1][:, 0, :, : len(prompt)].float().cpu().numpy()

    recorded = record(work, runner.backend, tuple, nullcontext)
    return Prefill(work, recorded.graph.replay, recorded.capture_s + recorded.instantiate_s, lambda: cache.layers[-1].flatten()[0].item(), last_layer)


def _jax(decoder: Any, prompt: Sequence[int]) -> Prefill:
    import jax

    from jax_decoder import xla_flags
    from jax_decoder.decode import prefill_chunk
    from jax_decoder.runner import PREFILL_CHUNK

    runner = decoder._runner
    platform, programs, held = runner.device.platform, runner.programs, [runner.new_state(1)]
    pieces = _pieces(len(prompt), PREFILL_CHUNK["gpu"])
    size = pieces[0][1]
    calls = [(np.int32(0), np.array((*prompt[start : start + count], *[0] * (size - count)), np.int32), np.int32(start), np.int32(count)) for start, count in pieces]
    function = jax.jit(lambda weights, state, *rest: prefill_chunk(programs.merge(weights), state, *rest), donate_argnums=1, keep_unused=True)
    lowered = function.lower(programs.weights, held[0], *calls[0])

    def way(graphs: bool) -> Callable[[], None]:
        executable = lowered.compile(compiler_options=xla_flags.step_options(graphs, platform))

        def work() -> None:
            for call in calls:
                held[0] = executable(programs.weights, held[0], *call)

        return work

    def last_layer() -> np.ndarray:
        sides = [side[-1] if side[-1].ndim == 4 else side[-1][-1] for side in (held[0].cache.k, held[0].cache.v)]  # [B, K, S, H]
        return np.stack([np.asarray(side[0, :, : len(prompt)], np.float32) for side in sides])

    def wait() -> None:
        jax.block_until_ready(held[0])

    without, within = way(False), way(True)
    runs = [_seconds(within, wait) for _ in range(3)]  # the first runs plainly, the second records
    return Prefill(without, within, max(0.0, runs[1] - runs[2]), wait, last_layer)
