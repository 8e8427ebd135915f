"""One process a framework: builds its variants, checks their logits, then times them interleaved.

``python -m compare.worker JOB.json``: the job names workload, variants, where the reference
lies and where the result goes; ``line`` says when to go on. Only what the framework needs is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .arms import DecoderArm, open_arms
from .bench import judge_all, looked_into, time_all
from .costs import capture_costs
from .line import Line
from .models import model_config
from .parity import Reference, Verdict
from .workload import Variant, Workload

STAGES_OF_PLAIN = "the reference does not fit this device, and stages are judged of plain kernels alone"


def run(job: dict[str, Any], line: Line) -> list[dict[str, Any]]:
    workload, variants = Workload(**job["workload"]), [Variant(**v) for v in job["variants"]]
    if job["framework"] == "transformers":
        from .peer import measure_transformers

        return measure_transformers(workload, job, line)
    if job["framework"] == "jax":
        from jax_decoder import xla_flags

        xla_flags.check_environment()
        xla_flags.set_options(job["xla_options"])
    if job["staged"]:
        return _run_staged(job, workload, variants, line)
    # The tokens to force are not known before the reference is: any will do until then.
    forced = [[0] * workload.new_tokens] * workload.batch
    arms, failures = _open(job, workload, variants, forced, line)
    line.wait("reference")
    if not arms:
        return failures
    stored = np.load(job["reference"])
    for arm in arms:
        arm.forced = stored["tokens"].tolist()
    verdicts = judge_all(arms, workload, Reference(stored["logits"], stored.get("theirs")))
    return _measure(arms, verdicts, workload, job, line) + failures


def _run_staged(job: dict[str, Any], workload: Workload, variants: Sequence[Variant], line: Line) -> list[dict[str, Any]]:
    """As ``run``, for a model whose reference is made here, piece by piece, before the weights are."""
    from .staged import forced_tokens, judge_by_stages, reference_stages

    plain = [v for v in variants if v.kernels == "plain"]
    odd = [v.absent(workload.batch, STAGES_OF_PLAIN) for v in variants if v not in plain]
    wanted, theirs = reference_stages(workload.model, workload.dtype, job["device"])
    arms, failures = _open(job, workload, plain, forced_tokens(workload, model_config(workload.model).vocab_size), line)
    if not arms:
        return failures + odd
    return _measure(arms, judge_by_stages(arms, wanted, theirs), workload, job, line) + failures + odd


def _open(job: dict[str, Any], workload: Workload, variants: Sequence[Variant], forced: list[list[int]], line: Line) -> tuple[list[DecoderArm], list[dict[str, Any]]]:
    return open_arms(workload, variants, job["prompts"], forced, job["prepare_limit"], lambda label: line.say("opened", f"opened {label}"))


def _measure(arms: Sequence[DecoderArm], verdicts: Sequence[Verdict], workload: Workload, job: dict[str, Any], line: Line) -> list[dict[str, Any]]:
    line.say("ready", "ready to be timed")
    line.wait("go")
    measured = time_all(arms, verdicts, workload, job["rounds"], job["repeats"], job["device"])
    measured = [{**result, **capture_costs(arm, job)} for arm, result in zip(arms, measured)]
    return looked_into(arms, measured, job, line)


def main(argv: Sequence[str]) -> int:
    job, line = json.loads(Path(argv[0]).read_text()), Line.of_this_process()
    Path(job["out"]).write_text(json.dumps(run(job, line)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
