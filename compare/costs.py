"""What capturing costs: generations from a cold start, graphs recorded again and again, prefill in graphs.

Each takes seconds to minutes, so a plan asks for it by the lengths to measure; sweeps do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arms import DecoderArm, host, why
from .prefill import prefill_costs
from .timing import WARM_UP_STEPS
from .workload import NEEDS_CUDA, WITHOUT_GRAPH

RECOVERY_STEPS = 8
RECAPTURES, RECAPTURE_LIMIT_S = 3, 20.0  # times that each interval is measured, and seconds for all intervals of an arm


def capture_costs(arm: DecoderArm, job: Mapping[str, Any]) -> dict[str, Any]:
    """What the job asks for of an arm, by name; the reason where it failed, so that what was measured before is kept."""
    found: dict[str, Any] = {}
    for name, lengths, measure in (
        ("cold_generation_s", job["cold"], cold_generations),
        ("recapture_ms", job["recapture"], recaptures),
        ("prefill", job["prefill"], prefill_costs),
        ("recovery", job["recapture"], recovery),
    ):
        try:
            if lengths and (figures := measure(arm, lengths)):
                found[name] = figures
        except Exception as error:
            found[f"{name}_not_measured"] = why(error)
    return found


def cold_generations(arm: DecoderArm, lengths: Sequence[int]) -> dict[str, float]:
    """Seconds of a generation of each length by a decoder of the same weights whose step is not compiled or captured yet: that, prefill, and every step.

    JAX's prefill is compiled before: decoders of the same weights share it.
    """
    return {str(n): _cold_generation_s(arm, n) for n in lengths}


def _cold_generation_s(arm: DecoderArm, new_tokens: int) -> float:
    started = time.perf_counter()
    with arm.decoder.with_options(launch=arm.variant.launch) as cold:
        handle = cold.decode_steps(cold.prefill(arm.prompts, **arm.sampling()), new_tokens - 1)  # prefill makes the first token
        host(handle.tokens)
        return time.perf_counter() - started


def recaptures(arm: DecoderArm, intervals: Sequence[int]) -> dict[str, float]:
    """ms a step when the graph is thrown away every so many steps and recorded anew, for each interval, the longest first.

    Of arms that run in graphs; empty for others. JAX compiles anew, as an executable and its graph are one. An interval is left out once
    RECAPTURE_LIMIT_S is used up, or where the cache does not hold as many steps.
    """
    found: dict[str, float] = {}
    if arm.variant.launch not in NEEDS_CUDA:
        return found
    began, room = time.perf_counter(), arm.steps_available()
    for interval in sorted(intervals, reverse=True):
        if interval > room - WARM_UP_STEPS or time.perf_counter() - began > RECAPTURE_LIMIT_S:
            continue
        found[str(interval)] = float(np.median([_interval_s(arm, interval) for _ in range(RECAPTURES)])) * 1e3
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _interval_s(arm: DecoderArm, steps: int) -> float:
    """Seconds a step of ``steps`` steps, the graph lost before the first."""
    arm.restart()
    arm.steps(WARM_UP_STEPS)
    arm.wait()
    started = time.perf_counter()
    arm.decoder.release_graphs()
    arm.steps(steps)
    arm.wait()
    return (time.perf_counter() - started) / steps


class _Planted(RuntimeError):
    """The failure that ``recovery`` plants."""


def recovery(arm: DecoderArm, _: Sequence[int]) -> dict[str, Any]:
    """What a graph that cannot be recorded costs: a generation by a decoder whose recording fails, against one that never had graphs.

    ``seconds`` and ``without_s`` of both, from a cold start, and ``tokens_equal``. Of arms that run in graphs; empty for others.
    """
    if arm.variant.launch not in NEEDS_CUDA:
        return {}
    tokens, seconds = [], []
    for launch in (arm.variant.launch, WITHOUT_GRAPH[arm.variant.framework]):
        with arm.decoder.with_options(launch=launch) as cold:
            _fail_to_record(cold, arm.variant.framework)
            started = time.perf_counter()
            handle = cold.decode_steps(cold.prefill(arm.prompts, **arm.sampling()), RECOVERY_STEPS)
            tokens.append(host(handle.ring))
            seconds.append(time.perf_counter() - started)
            fallbacks = cold.launch_report()["fallbacks"]
        if launch in NEEDS_CUDA and not fallbacks:
            raise RuntimeError("the planted failure was not met")
    return {"seconds": seconds[0], "without_s": seconds[1], "tokens_equal": bool((tokens[0] == tokens[1]).all())}


def _fail_to_record(decoder: Any, framework: str) -> None:
    """Plant a failure where a graph is made."""
    runner = decoder._runner

    def fails(*_: Any) -> None:
        raise _Planted("planted to see what recovery costs")

    if framework == "torch":
        if runner.backend is not None:
            runner.backend.capture = fails
        return
    compile_step, graph = runner._compile, runner.launch in NEEDS_CUDA

    def once(lowered: Any, options: dict[str, str]) -> Any:
        nonlocal graph
        if graph:
            graph = False
            fails()
        return compile_step(lowered, options)

    runner._compile = once
