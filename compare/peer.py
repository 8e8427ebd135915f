"""transformers: the reference for numbers, and the peer for speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from .arms import why
from .bench import judge_all, looked_into, time_all
from .conditions import Conditions
from .line import Line
from .models import model_config, open_transformers, weight_bytes
from .parity import Reference
from .static_peer import StaticPeer
from .timing import quantiles
from .workload import Variant, Workload

EAGER = Variant("transformers", "eager")


class _Forcing(LogitsProcessor):
    """Notes the time and, where asked, the logits of each step of ``generate``; forces its tokens."""

    def __init__(self, forced: torch.Tensor, keep_logits: bool):
        self.forced, self.keep_logits = forced, keep_logits
        self.times: list[float] = []
        self.logits: list[np.ndarray] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.device.type == "cuda":
            torch.cuda.synchronize()
        if self.keep_logits:
            self.logits.append(scores.float().cpu().numpy())
        chosen = self.forced[:, len(self.times)]
        self.times.append(time.perf_counter())
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen[:, None], 0.0)


def measure_transformers(workload: Workload, job: dict[str, Any], line: Line) -> list[dict[str, Any]]:
    """Write the reference file, then judge and time ``generate`` itself and what of it runs in graphs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = job["prompts"]
    model = open_transformers(workload.model, "float32", device)
    tokens, logits = _reference(model, prompts, workload.new_tokens)
    stored = {"tokens": tokens, "logits": logits}
    started = time.perf_counter()
    if workload.dtype != "float32":
        del model  # never two of them on the device
        model = open_transformers(workload.model, workload.dtype, device)
        stored["theirs"] = _teacher_forced(model, prompts, tokens)
    load_s = time.perf_counter() - started
    np.savez(job["reference"], **stored)
    line.say("reference")
    if not job["variants"]:
        return []
    reference, variants = Reference(logits, stored.get("theirs")), [Variant(**v) for v in job["variants"]]
    generation = _Generation(model, workload, prompts, tokens, reference, load_s) if EAGER in variants else None
    arms, failures = _open_peers(model, workload, prompts, tokens, [v for v in variants if v != EAGER])
    verdicts = judge_all(arms, workload, reference)
    line.say("ready")
    line.wait("go")
    measured = [generation.measure(job["repeats"], device)] if generation else []
    measured += looked_into(arms, time_all(arms, verdicts, workload, job["rounds"], job["repeats"], device), job, line)
    return measured + failures


def _open_peers(
    model: torch.nn.Module, workload: Workload, prompts: list[list[int]], tokens: np.ndarray, variants: Sequence[Variant]
) -> tuple[list[StaticPeer], list[dict[str, Any]]]:
    arms, failures = [], []
    for variant in variants:
        try:
            arms.append(StaticPeer(variant, model, workload, prompts, tokens))
        except Exception as error:  # one that cannot start must not take the others along
            failures.append(variant.absent(workload.batch, why(error)))
    return arms, failures


class _Generation:
    """transformers' own ``generate``, judged at once and timed when asked."""

    def __init__(self, model: torch.nn.Module, workload: Workload, prompts: list[list[int]], tokens: np.ndarray, reference: Reference, load_s: float):
        self._model, self._workload, self._tokens, self._load_s = model, workload, tokens, load_s
        self._batch = _left_padded(model, prompts, model.device.type)
        self._verdict = reference.judge(np.stack(_generate(model, self._batch, tokens, keep_logits=True).logits), workload.dtype)
        _plain_generate(model, self._batch, tokens.shape[1])  # warm-up

    def measure(self, repeats: int, device: str) -> dict[str, Any]:
        """Its result object."""
        conditions, workload = Conditions(device == "cuda"), self._workload
        samples, seconds, cpu = _time(self._model, self._batch, self._tokens, repeats, conditions.look)
        step_ms = quantiles(samples)
        return {
            **EAGER.as_dict(),
            "batch": workload.batch,
            "bucket": workload.batch,
            "parity": self._verdict.as_dict(),
            "step_ms": step_ms,
            "cpu_ms_per_step": cpu,
            "tokens_per_s": self._tokens.size / seconds,
            "achieved_gb_per_s": weight_bytes(model_config(workload.model), workload.dtype) / step_ms["p50"] / 1e6,
            "load_s": self._load_s,
            "matmul_precision": "ieee float32" if workload.dtype == "float32" else workload.dtype,
            "conditions": conditions.summary(),
        }


@torch.no_grad()
def _reference(model: torch.nn.Module, prompts: list[list[int]], new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [B, steps] row by row, and float32 logits [steps, B, V] of one full pass each."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
        rows.append(out[0, len(prompt) :].cpu().numpy())
    tokens = np.stack(rows)
    return tokens, _teacher_forced(model, prompts, tokens)


@torch.no_grad()
def _teacher_forced(model: torch.nn.Module, prompts: list[list[int]], tokens: np.ndarray) -> np.ndarray:
    collected = []
    for prompt, row in zip(prompts, tokens):
        whole = torch.tensor([[*prompt, *row[:-1].tolist()]], device=model.device)
        collected.append(model(whole, logits_to_keep=len(row)).logits[0].float().cpu().numpy())  # those of a long prompt would fill the memory
    return np.stack(collected, axis=1)


def _left_padded(model: torch.nn.Module, prompts: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def _generate(model: torch.nn.Module, batch: dict[str, torch.Tensor], tokens: np.ndarray, keep_logits: bool) -> _Forcing:
    forcing = _Forcing(torch.from_numpy(tokens).to(model.device), keep_logits)
    count = tokens.shape[1]
    model.generate(**batch, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, logits_processor=LogitsProcessorList([forcing]))
    return forcing


@torch.no_grad()
def _plain_generate(model: torch.nn.Module, batch: dict[str, torch.Tensor], count: int) -> None:
    model.generate(**batch, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _time(model: torch.nn.Module, batch: dict[str, torch.Tensor], tokens: np.ndarray, repeats: int, between: Callable[[], None]) -> tuple[list[float], float, float]:
    """Step samples in ms from forced runs of a warm model; median seconds and CPU ms a step of plain ``generate``."""
    samples: list[float] = []
    seconds, cpu = [], []
    for _ in range(repeats):
        between()
        samples += (np.diff(_generate(model, batch, tokens, keep_logits=False).times) * 1e3).tolist()
        started, cpu_started = time.perf_counter(), time.process_time()
        _plain_generate(model, batch, tokens.shape[1])
        seconds.append(time.perf_counter() - started)
        cpu.append((time.process_time() - cpu_started) / tokens.shape[1] * 1e3)
    return samples, float(np.median(seconds)), float(np.median(cpu))
