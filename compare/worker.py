"""One process a framework: builds its variants, checks their logits, then times them interleaved.

``python -m compare.worker JOB.json``: the job names workload, variants, where the reference
lies and where the result goes; ``line`` says when to go on. Only what the framework needs is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .arms import DecoderArm, open_arms
from .conditions import Conditions
from .ledger import count_arms, with_counts
from .line import Line
from .models import weight_bytes
from .parity import Reference, Verdict, differing_bits
from .timing import STEPS_A_BLOCK, time_generations, time_steps
from .trace import trace_arms
from .workload import NEEDS_CUDA, WITHOUT_GRAPH, Variant, Workload


def judge_all(arms: Sequence[DecoderArm], workload: Workload, reference: Reference) -> list[Verdict]:
    """Each arm's verdict, from its own steps."""
    logits = {arm.variant: arm.logits() for arm in arms}
    reference.prepare(workload.dtype)
    with ThreadPoolExecutor(min(len(arms), os.cpu_count() or 1, 8)) as pool:  # numpy leaves the other cores idle
        return list(pool.map(lambda variant: judge(variant, logits, workload, reference), logits))


def time_all(arms: Sequence[DecoderArm], verdicts: Sequence[Verdict], workload: Workload, rounds: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """The clocks; one result object an arm."""
    conditions = Conditions(device == "cuda")
    steps = time_steps(arms, rounds, len(arms[0].forced[0]) - 1, STEPS_A_BLOCK[device], conditions.look)
    seconds = time_generations([arm.generate for arm in arms], repeats)
    conditions.look()
    seen = conditions.summary()
    for arm in arms:
        arm.check_launch()
    return [{**result_of(arm, verdict, clocks, total, workload), "conditions": seen} for arm, verdict, clocks, total in zip(arms, verdicts, steps, seconds)]


def judge(variant: Variant, logits: Mapping[Variant, np.ndarray], workload: Workload, reference: Reference) -> Verdict:
    """A variant's logits against the reference's, and bit by bit against the same step without a graph."""
    own = logits[variant]
    verdict = reference.judge(own, workload.dtype)
    # Selection plays no part in logits, so the greedy step is the twin of the sampled one too.
    twin = logits.get(replace(variant, launch=WITHOUT_GRAPH[variant.framework], sampling="greedy"))
    if variant.launch not in NEEDS_CUDA or twin is None:
        return verdict
    verdict = replace(verdict, differing_bits=differing_bits(own, twin))
    # Several steps compiled into one executable are another compilation: there bits may differ.
    exact = variant.framework == "torch" or variant.launch == "command_buffer"
    if exact and verdict.differing_bits:
        return replace(verdict, verdict="fail", reason=f"{verdict.differing_bits} bits differ from the same step without a graph; {verdict.reason}")
    return verdict


def result_of(arm: DecoderArm, verdict: Verdict, clocks: dict[str, Any], seconds: float, workload: Workload) -> dict[str, Any]:
    rows, tokens = len(arm.prompts), len(arm.forced[0])
    moved = weight_bytes(arm.decoder.config, workload.dtype)
    return {
        **arm.variant.as_dict(),
        "batch": rows,
        "bucket": rows,
        "num_layers": arm.decoder.config.num_layers,
        "parity": verdict.as_dict(),
        **clocks,
        "tokens_per_s": rows * tokens / seconds,
        "achieved_gb_per_s": moved / clocks["step_ms"]["p50"] / 1e6,
        "compile_s": arm.compile_s(),
        **arm.graph_account(),
        **({} if arm.load_s is None else {"load_s": arm.load_s}),
        "compilations_while_timed": 0,  # time_steps raises if there was one
        "matmul_precision": "ieee float32" if workload.dtype == "float32" else workload.dtype,
    }


def run(job: dict[str, Any], line: Line) -> list[dict[str, Any]]:
    workload, variants = Workload(**job["workload"]), [Variant(**v) for v in job["variants"]]
    if job["framework"] == "transformers":
        from .peer import measure_transformers

        return measure_transformers(workload, job, line)
    if job["framework"] == "jax":
        from jax_decoder import xla_flags

        xla_flags.check_environment()
        xla_flags.set_options(job["xla_options"])
    # The tokens to force are not known before the reference is: any will do until then.
    forced = [[0] * workload.new_tokens] * workload.batch
    arms, failures = open_arms(workload, variants, job["prompts"], forced, job["prepare_limit"], lambda label: line.say("opened", f"opened {label}"))
    line.wait("reference")
    measured = _measure(arms, workload, job, line) if arms else []
    return measured + failures


def _measure(arms: Sequence[DecoderArm], workload: Workload, job: dict[str, Any], line: Line) -> list[dict[str, Any]]:
    stored = np.load(job["reference"])
    for arm in arms:
        arm.forced = stored["tokens"].tolist()
    verdicts = judge_all(arms, workload, Reference(stored["logits"], stored.get("theirs")))
    line.say("ready", "ready to be timed")
    line.wait("go")
    measured = time_all(arms, verdicts, workload, job["rounds"], job["repeats"], job["device"])
    measured = [{**result, **_cold(arm, job["cold"])} for arm, result in zip(arms, measured)]
    if not job["ledger"]:
        return measured
    line.say("timed")
    counted = [with_counts(result, ledger) for result, ledger in zip(measured, count_arms(arms))]
    return [{**result, "timeline": timeline} for result, timeline in zip(counted, trace_arms(arms))]


def _cold(arm: DecoderArm, lengths: Sequence[int]) -> dict[str, Any]:
    try:
        return {"cold_generation_s": {str(n): arm.cold_generation_s(n) for n in lengths}} if lengths else {}
    except Exception as error:  # the times that were measured before must not be lost with these
        return {"cold_not_measured": f"{type(error).__name__}: {error}"}


def main(argv: Sequence[str]) -> int:
    job, line = json.loads(Path(argv[0]).read_text()), Line.of_this_process()
    Path(job["out"]).write_text(json.dumps(run(job, line)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
