"""One process a framework: builds its variants, checks their logits, then times them interleaved.

``python -m compare.worker JOB.json``: the job names workload, variants, where the reference
lies and where the result goes. Only what the framework needs is imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .models import open_decoder
from .parity import Verdict, compare_logits, differing_bits
from .timing import STEPS_A_BLOCK, MeasurementError, time_generations, time_steps
from .workload import NEEDS_CUDA, WITHOUT_GRAPH, Variant, Workload

LOOP = 8  # steps of a device loop between two looks at its logits
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 1}  # settings of the sampled variants


class DecoderArm:
    """A variant of one of this project's decoders, stepping rows through forced tokens."""

    def __init__(self, variant: Variant, workload: Workload, prompts: list[list[int]], forced: list[list[int]]):
        started = time.perf_counter()
        self.variant, self.prompts, self.forced = variant, prompts, forced
        self.decoder = open_decoder(
            workload.model,
            variant.framework,
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
        self.check_launch()

    def __str__(self) -> str:
        return self.variant.label()

    def restart(self) -> None:
        self.handle = None  # a state that someone still holds would be copied out of the graphs' memory
        settings = {} if self.variant.sampling == "greedy" else {"sampling": import_module(f"{self.variant.framework}_decoder").Sampling(**SAMPLED)}
        self.handle = self.decoder.prefill(self.prompts, forced=self.forced, **settings)

    def steps(self, count: int) -> None:
        self.handle = self.decoder.decode_steps(self.handle, count)

    def wait(self) -> None:
        np.asarray(_host(self.handle.tokens))

    def compilations(self) -> int:
        graphs = sum(graph.get("compilations", 0) for graph in self.decoder.launch_report()["graphs"])
        return graphs + (_dynamo_compilations() if self.variant.kernels == "compiled" else 0)

    def logits(self) -> np.ndarray:
        """float32 [steps, B, V] of the very steps that are timed, teacher-forced.

        A loop on the device shows the logits of its last step only: those stand in the place of
        the ones that single steps gave.
        """
        collected = self._logits_every(1)
        if self.variant.launch == "device_loop":
            collected[::LOOP] = self._logits_every(LOOP)
        return collected

    def _logits_every(self, steps: int) -> np.ndarray:
        self.restart()
        collected = [_host(self.handle.logits)]
        for _ in range((len(self.forced[0]) - 1) // steps):
            self.steps(steps)
            collected.append(_host(self.handle.logits))
        return np.stack(collected)

    def generate(self) -> None:
        """A whole generation: prefill and every step, then wait."""
        self.restart()
        self.steps(len(self.forced[0]) - 1)
        self.wait()

    def compile_s(self) -> float | None:
        seconds = [graph["compile_s"] for graph in self.decoder.launch_report()["graphs"] if "compile_s" in graph]
        return sum(seconds) if seconds else self.start_s if self.variant.kernels == "compiled" else None

    def graph_account(self) -> dict[str, Any]:
        """Cost of the graph that the timed steps ran in; empty where they ran in none."""
        report = self.decoder.launch_report()
        graphs = [g for g in report["graphs"] if g["launch"] == self.variant.launch and g["kind"] == self.variant.sampling]
        if self.variant.launch not in NEEDS_CUDA or not graphs:
            return {}
        nodes = {} if graphs[0]["nodes"] is None else {"kernels_per_step": graphs[0]["nodes"]}
        return {**nodes, **{name: graphs[0][name] for name in ("capture_s", "instantiate_s", "warm_up_bytes", "graph_bytes") if graphs[0].get(name) is not None}}

    def check_launch(self) -> None:
        """Raise MeasurementError if the variant ran another way than its name says."""
        for fallback in self.decoder.launch_report()["fallbacks"]:
            raise MeasurementError(f"{fallback['launch']} fell back: {fallback['reason']}")

    def close(self) -> None:
        self.handle = None
        self.decoder.close()


def _host(array: Any) -> np.ndarray:
    """A host copy; waits for the device."""
    return array.detach().cpu().numpy().copy() if hasattr(array, "detach") else np.array(array)


def _dynamo_compilations() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def measure(arms: Sequence[DecoderArm], workload: Workload, reference: np.ndarray, theirs: np.ndarray | None, rounds: int, repeats: int, block: int) -> list[dict[str, Any]]:
    """Parity first, from each arm's own steps; then the clocks. One result object an arm."""
    logits = {arm.variant: arm.logits() for arm in arms}
    verdicts = [judge(arm.variant, logits, workload, reference, theirs) for arm in arms]
    del logits
    steps = time_steps(arms, rounds, len(arms[0].forced[0]) - 1, block)
    seconds = time_generations([arm.generate for arm in arms], repeats)
    for arm in arms:
        arm.check_launch()
    return [result_of(arm, verdict, clocks, total, workload) for arm, verdict, clocks, total in zip(arms, verdicts, steps, seconds)]


def judge(variant: Variant, logits: Mapping[Variant, np.ndarray], workload: Workload, reference: np.ndarray, theirs: np.ndarray | None) -> Verdict:
    """A variant's logits against the reference's, and bit by bit against the same step without a graph."""
    own = logits[variant]
    verdict = compare_logits(own, reference, workload.dtype, theirs)
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
        "parity": verdict.as_dict(),
        **clocks,
        "tokens_per_s": rows * tokens / seconds,
        "achieved_gb_per_s": moved / clocks["step_ms"]["p50"] / 1e6,
        "compile_s": arm.compile_s(),
        **arm.graph_account(),
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
        xla_flags.set_options(job["xla_options"])
    stored = np.load(job["reference"])
    prompts, forced = json.loads(str(stored["prompts"])), stored["tokens"].tolist()
    if job["count"]:
        from .ledger import count_variants

        return count_variants(workload, variants, prompts, forced)
    arms, failures = open_arms(workload, variants, prompts, forced)
    measured = measure(arms, workload, stored["logits"], stored.get("theirs"), job["rounds"], job["repeats"], STEPS_A_BLOCK[job["device"]]) if arms else []
    return measured + failures


def open_arms(workload: Workload, variants: Sequence[Variant], prompts: list[list[int]], forced: list[list[int]]) -> tuple[list[DecoderArm], list[dict[str, Any]]]:
    """An arm for every variant that starts, and a result object with the reason for every other."""
    arms, failures = [], []
    for variant in variants:
        try:
            arms.append(DecoderArm(variant, workload, prompts, forced))
        except Exception as error:  # one variant that cannot start must not take the others along
            if error.__class__.__module__.startswith(("jax_decoder", "torch_decoder", "compare")) and not isinstance(error, RuntimeError):
                reason = str(error)
            else:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            failures.append({**variant.as_dict(), "batch": workload.batch, "bucket": workload.batch, "not_measured": reason})
    return arms, failures


def main(argv: Sequence[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    Path(job["out"]).write_text(json.dumps(run(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
