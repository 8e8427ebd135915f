"""One process a framework: builds its variants, checks their logits, then times them interleaved.

``python -m compare.worker JOB.json``: the job names workload, variants, where the reference
lies and where the result goes. Only what the framework needs is imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .parity import Verdict, compare_logits
from .timing import time_generations, time_steps
from .workload import Variant, Workload


class DecoderArm:
    """A variant of one of this project's decoders, stepping rows through forced tokens."""

    def __init__(self, variant: Variant, workload: Workload, prompts: list[list[int]], forced: list[list[int]]):
        started = time.perf_counter()
        self.variant, self.prompts, self.forced = variant, prompts, forced
        self.decoder = _decoder_class(variant.framework).from_pretrained(
            workload.directory,
            dtype=workload.dtype,
            max_batch=len(prompts),
            buckets=[len(prompts)],
            max_seq_len=workload.max_seq_len,
            launch=variant.launch,
            kernels=variant.kernels,
        )
        self.load_s = time.perf_counter() - started
        self.handle: Any = None
        started = time.perf_counter()
        self.restart()  # compiles the step
        self.wait()
        self.start_s = time.perf_counter() - started

    def __str__(self) -> str:
        return self.variant.label()

    def restart(self) -> None:
        self.handle = None  # a state that someone still holds would be copied out of the graphs' memory
        self.handle = self.decoder.prefill(self.prompts, forced=self.forced)

    def step(self) -> None:
        self.handle = self.decoder.decode_step(self.handle)

    def wait(self) -> None:
        np.asarray(_host(self.handle.tokens))

    def compilations(self) -> int:
        graphs = sum(graph.get("compilations", 0) for graph in self.decoder.launch_report()["graphs"])
        return graphs + (_dynamo_compilations() if self.variant.kernels == "compiled" else 0)

    def logits(self) -> np.ndarray:
        """float32 [steps, B, V] of the very steps that are timed, teacher-forced."""
        self.restart()
        collected = [_host(self.handle.logits)]
        for _ in range(len(self.forced[0]) - 1):
            self.step()
            collected.append(_host(self.handle.logits))
        return np.stack(collected)

    def generate(self) -> None:
        """A whole generation: prefill and every step, then wait."""
        self.restart()
        for _ in range(len(self.forced[0]) - 1):
            self.step()
        self.wait()

    def compile_s(self) -> float | None:
        seconds = [graph["compile_s"] for graph in self.decoder.launch_report()["graphs"] if "compile_s" in graph]
        return sum(seconds) if seconds else self.start_s if self.variant.kernels == "compiled" else None


def _decoder_class(framework: str) -> Any:
    if framework == "torch":
        from torch_decoder import Decoder
    else:
        from jax_decoder import Decoder
    return Decoder


def _host(array: Any) -> np.ndarray:
    """A host copy; waits for the device."""
    return array.detach().cpu().numpy().copy() if hasattr(array, "detach") else np.array(array)


def _dynamo_compilations() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def measure(arms: Sequence[DecoderArm], workload: Workload, reference: np.ndarray, theirs: np.ndarray | None, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Parity first, from each arm's own steps; then the clocks. One result object an arm."""
    verdicts = [judge(arm, workload, reference, theirs) for arm in arms]
    steps = time_steps(arms, rounds, len(arms[0].forced[0]) - 1)
    seconds = time_generations([arm.generate for arm in arms], repeats)
    return [result_of(arm, verdict, clocks, total, workload) for arm, verdict, clocks, total in zip(arms, verdicts, steps, seconds)]


def judge(arm: DecoderArm, workload: Workload, reference: np.ndarray, theirs: np.ndarray | None) -> Verdict:
    return compare_logits(arm.logits(), reference, workload.dtype, theirs)


def result_of(arm: DecoderArm, verdict: Verdict, clocks: dict[str, Any], seconds: float, workload: Workload) -> dict[str, Any]:
    rows, tokens = len(arm.prompts), len(arm.forced[0])
    moved = weight_bytes(arm.decoder.config, workload.dtype)
    return {
        **arm.variant.as_dict(),
        "batch": rows,
        "bucket": rows,
        "parity": verdict.as_dict(),
        **clocks,
        "tokens_per_s": rows * tokens / seconds,
        "achieved_gb_per_s": moved / clocks["step_ms"]["p50"] / 1e6,
        "compile_s": arm.compile_s(),
        "load_s": arm.load_s,
        "compilations_while_timed": 0,  # time_steps raises if there was one
        "matmul_precision": "ieee float32" if workload.dtype == "float32" else workload.dtype,
    }


def weight_bytes(config: Any, dtype: str) -> int:
    """Bytes of weights that a step must read once; the embedding row of a token is negligible."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * heads + config.num_heads * config.head_dim * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    return (config.num_layers * layer + config.vocab_size * config.hidden_size) * (4 if dtype == "float32" else 2)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    workload, variants = Workload(**job["workload"]), [Variant(**v) for v in job["variants"]]
    if job["framework"] == "transformers":
        from .peer import measure_transformers

        return measure_transformers(workload, job)
    if job["framework"] == "jax":
        from jax_decoder import xla_flags

        xla_flags.check_environment()
    stored = np.load(job["reference"])
    prompts, forced = json.loads(str(stored["prompts"])), stored["tokens"].tolist()
    theirs = stored.get("theirs")
    arms, failures = [], []
    for variant in variants:
        try:
            arms.append(DecoderArm(variant, workload, prompts, forced))
        except Exception as error:  # one variant that cannot start must not take the others along
            if error.__class__.__module__.startswith(("jax_decoder", "torch_decoder")) and not isinstance(error, RuntimeError):
                reason = str(error)
            else:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            failures.append({**variant.as_dict(), "batch": workload.batch, "bucket": workload.batch, "not_measured": reason})
    measured = measure(arms, workload, stored["logits"], theirs, job["rounds"], job["repeats"]) if arms else []
    return measured + failures


def main(argv: Sequence[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    Path(job["out"]).write_text(json.dumps(run(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
