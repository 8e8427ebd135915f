"""Arms judged by their logits, then timed in turns: what every worker does with the variants that it opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from .conditions import Conditions
from .ledger import count_arms, with_counts
from .line import Line
from .models import weight_bytes
from .parity import Reference, Verdict, differing_bits
from .timing import STEPS_A_BLOCK, WARM_UP_STEPS, cpu_use, time_generations, time_steps
from .trace import trace_arms
from .workload import NEEDS_CUDA, WITHOUT_GRAPH, Variant, Workload

CPU_STEPS = 32  # for which CPU time is measured
TRACED_MAY_EXCEED = 0.05  # part by which kernels under CUPTI may last longer than the step without it


def judge_all(arms: Sequence[Any], workload: Workload, reference: Reference) -> list[Verdict]:
    """Each arm's verdict, from its own steps."""
    if not arms:
        return []
    logits = {arm.variant: arm.logits() for arm in arms}
    reference.prepare(workload.dtype)
    with ThreadPoolExecutor(min(len(arms), os.cpu_count() or 1, 8)) as pool:  # numpy leaves the other cores idle
        return list(pool.map(lambda variant: judge(variant, logits, workload, reference), logits))


def time_all(arms: Sequence[Any], verdicts: Sequence[Verdict], workload: Workload, rounds: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """The clocks; one result object an arm."""
    if not arms:
        return []
    conditions = Conditions(device == "cuda")
    steps = time_steps(arms, rounds, len(arms[0].forced[0]) - 1, STEPS_A_BLOCK[device], conditions.look)
    seconds = time_generations([arm.generate for arm in arms], repeats)
    conditions.look()
    uses = cpu_use(arms, min(CPU_STEPS, len(arms[0].forced[0]) - 1 - WARM_UP_STEPS))
    seen = conditions.summary()
    for arm in arms:
        arm.check_launch()
    measured = [result_of(arm, verdict, clocks, total, workload) for arm, verdict, clocks, total in zip(arms, verdicts, steps, seconds)]
    return [{**result, "cpu_use": use, "conditions": seen} for result, use in zip(measured, uses)]


def judge(variant: Variant, logits: Mapping[Variant, np.ndarray], workload: Workload, reference: Reference) -> Verdict:
    """A variant's logits against the reference's, and bit by bit against the same step without a graph."""
    return with_bits(variant, logits, reference.judge(logits[variant], workload.dtype))


def with_bits(variant: Variant, logits: Mapping[Variant, np.ndarray], verdict: Verdict) -> Verdict:
    """The verdict with the bits that differ from the same step without a graph, where that is among ``logits``; fail if any may not."""
    without = WITHOUT_GRAPH.get(variant.framework)
    # Selection plays no part in logits, so the greedy step is the twin of the sampled one too.
    twin = None if without is None else logits.get(replace(variant, launch=without, sampling="greedy"))
    if variant.launch not in NEEDS_CUDA or twin is None:
        return verdict
    verdict = replace(verdict, differing_bits=differing_bits(logits[variant], twin))
    # Several steps compiled into one executable are another compilation: there bits may differ.
    exact = variant.framework == "torch" or variant.launch == "command_buffer"
    if exact and verdict.differing_bits:
        return replace(verdict, verdict="fail", reason=f"{verdict.differing_bits} bits differ from the same step without a graph; {verdict.reason}")
    return verdict


def result_of(arm: Any, verdict: Verdict, clocks: dict[str, Any], seconds: float, workload: Workload) -> dict[str, Any]:
    rows, tokens = len(arm.prompts), len(arm.forced[0])
    moved = weight_bytes(arm.config, workload.dtype)
    return {
        **arm.variant.as_dict(),
        "batch": rows,
        "bucket": rows,
        "num_layers": arm.config.num_layers,
        "parity": verdict.as_dict(),
        **clocks,
        "tokens_per_s": rows * tokens / seconds,
        "achieved_gb_per_s": moved / clocks["step_ms"]["p50"] / 1e6,
        "compile_s": arm.compile_s(),
        **arm.graph_account(),
        **({"memory_map": regions} if (regions := arm.memory_map()) else {}),
        **({} if arm.load_s is None else {"load_s": arm.load_s}),
        "compilations_while_timed": 0,  # time_steps raises if there was one
        "matmul_precision": "ieee float32" if workload.dtype == "float32" else workload.dtype,
    }


def looked_into(arms: Sequence[Any], measured: Sequence[dict[str, Any]], job: Mapping[str, Any], line: Line) -> list[dict[str, Any]]:
    """The results with driver calls and traced steps, if the job asks for them. Nothing may be timed in this process afterwards."""
    if not arms or not job["ledger"]:
        return list(measured)
    line.say("timed")
    counted = [with_counts(result, ledger) for result, ledger in zip(measured, count_arms(arms))]
    return [{**result, "timeline": timeline, **idle(result, timeline)} for result, timeline in zip(counted, trace_arms(arms))]


def idle(result: dict[str, Any], timeline: dict[str, Any]) -> dict[str, Any]:
    """``device_busy_us``, ``launch_gap_us`` (the rest of the untraced step) and ``idle_share``; the reason where clocks contradict each other."""
    if "busy_us" not in timeline:
        return {}
    step_us, busy_us = result["step_ms"]["p50"] * 1e3, timeline["busy_us"]
    if busy_us > step_us * (1 + TRACED_MAY_EXCEED):
        return {
            "device_busy_us": busy_us,
            "idle_not_measured": f"the trace says that the device was busy for {busy_us:.0f} µs of a step of {step_us:.0f} µs: tracing stretched the kernels",
        }
    gap_us = max(0.0, step_us - busy_us)
    return {"device_busy_us": busy_us, "launch_gap_us": gap_us, "idle_share": gap_us / step_us}
