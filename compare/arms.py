"""An arm of a comparison: one of this project's decoders, stepping rows through forced tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np

from .models import open_decoder
from .timing import MeasurementError
from .workload import NEEDS_CUDA, Variant, Workload

LOOP = 8  # steps of a device loop between two looks at its logits
COMPILE_AT_ONCE = 4  # variants of JAX
DOZE_S = 1e-4  # between two looks at an array
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 1}  # settings of the sampled variants


class ForcedArm:
    """What all arms have in common that step rows through forced tokens; see ``timing.Arm``."""

    forced: list[list[int]]

    def restart(self) -> None:
        raise NotImplementedError

    def steps(self, count: int) -> None:
        raise NotImplementedError

    def newest(self, name: str) -> Any:
        """The framework's array of the newest ``tokens`` or ``logits``."""
        raise NotImplementedError

    def wait(self) -> None:
        host(self.newest("tokens"))

    def doze(self) -> None:
        doze(self.newest("tokens"))

    def mark(self) -> Any:
        return cuda_event(self.newest("tokens"))

    def logits(self) -> np.ndarray:
        """float32 [steps, B, V] of the very steps that are timed, teacher-forced."""
        return self.logits_every(1)

    def logits_every(self, steps: int) -> np.ndarray:
        """``logits`` of every so many steps, run in one go."""
        self.restart()
        collected = [host(self.newest("logits"))]
        for _ in range((len(self.forced[0]) - 1) // steps):
            self.steps(steps)
            collected.append(host(self.newest("logits")))
        return np.stack(collected)

    def generate(self) -> None:
        """A whole generation: prefill and every step, then wait."""
        self.restart()
        self.steps(len(self.forced[0]) - 1)
        self.wait()


class DecoderArm(ForcedArm):
    """A variant of one of this project's decoders, stepping rows through forced tokens."""

    def __init__(self, variant: Variant, workload: Workload, prompts: list[list[int]], forced: list[list[int]], weights: Any = None, decoder: Any = None):
        """``weights``: a decoder whose weights this one shares; without it they are loaded. ``decoder``: one that was made for this arm."""
        started = time.perf_counter()
        self.variant, self.prompts, self.forced = variant, prompts, forced
        how = {"launch": variant.launch, "kernels": variant.kernels}
        if decoder is not None:
            self.decoder = decoder
        elif weights is not None:
            self.decoder = weights.with_options(**how)
        else:
            rows = {"max_batch": len(prompts), "buckets": [len(prompts)], "max_seq_len": workload.max_seq_len}
            self.decoder = open_decoder(workload.model, variant.framework, dtype=workload.dtype, **rows, **how)
        self.load_s = time.perf_counter() - started if weights is None else None
        self.restarts = 0
        self.handle: Any = None
        started = time.perf_counter()
        self.restart()  # compiles the step
        self.wait()
        self.start_s = time.perf_counter() - started
        self.check_launch()

    def __str__(self) -> str:
        return self.variant.label()

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.decoder.config

    def restart(self) -> None:
        self.restarts += 1
        self.handle = None  # a state that someone still holds would be copied out of the graphs' memory
        self.handle = self.decoder.prefill(self.prompts, forced=self.forced, **self.sampling())

    def sampling(self) -> dict[str, Any]:
        """Settings of the variant's sampling kind, as ``prefill`` takes them."""
        return {} if self.variant.sampling == "greedy" else {"sampling": import_module(f"{self.variant.framework}_decoder").Sampling(**SAMPLED)}

    def steps(self, count: int) -> None:
        self.handle = self.decoder.decode_steps(self.handle, count)

    def steps_available(self) -> int:
        """Steps that the cache holds behind the longest prompt."""
        return self.decoder.max_seq_len - max(map(len, self.prompts))

    def newest(self, name: str) -> Any:
        return getattr(self.handle, name)

    def compilations(self) -> int:
        graphs = sum(graph.get("compilations", 0) for graph in self.decoder.launch_report()["graphs"])
        return graphs + (_dynamo_compilations() if self.variant.kernels == "compiled" else 0)

    def logits(self) -> np.ndarray:
        """float32 [steps, B, V] of the very steps that are timed, teacher-forced.

        A loop on the device shows the logits of its last step only: those stand in the place of
        the ones that single steps gave.
        """
        collected = self.logits_every(1)
        if self.variant.launch == "device_loop":
            collected[::LOOP] = self.logits_every(LOOP)
        return collected

    def compile_s(self) -> float | None:
        seconds = [graph["compile_s"] for graph in self.decoder.launch_report()["graphs"] if "compile_s" in graph]
        return sum(seconds) if seconds else self.start_s if self.variant.kernels == "compiled" else None

    def graph_account(self) -> dict[str, Any]:
        """Cost of the graph that the timed steps ran in; empty where they ran in none."""
        report = self.decoder.launch_report()
        graphs = [g for g in report["graphs"] if g["launch"] == self.variant.launch and g["kind"] == self.variant.sampling]
        if self.variant.launch not in NEEDS_CUDA or not graphs:
            return {}
        graph = graphs[0]
        found = {"kernels_per_step": graph["nodes"], "captures": graph.get("captures", graph.get("compilations")), "prompts_served": self.restarts}
        found |= {name: graph.get(name) for name in ("capture_s", "instantiate_s", "warm_up_bytes", "graph_bytes")}
        return {name: value for name, value in found.items() if value is not None}

    def memory_map(self) -> dict[str, list[int]]:
        """Offset and bytes of each region of the state, by name; the layers' keys and values as one."""
        regions = self.decoder.launch_report()["memory_map"]
        layers = [r for r in regions if r["name"].startswith("KV")]
        found = {"KV of all layers": [layers[0]["offset"], sum(r["bytes"] for r in layers)]}
        return found | {r["name"]: [r["offset"], r["bytes"]] for r in regions if r not in layers}

    def check_launch(self) -> None:
        """Raise MeasurementError if the variant ran another way than its name says."""
        for fallback in self.decoder.launch_report()["fallbacks"]:
            raise MeasurementError(f"{fallback['launch']} fell back: {fallback['reason']}")

    def close(self) -> None:
        self.handle = None
        self.decoder.close()


def host(array: Any) -> np.ndarray:
    """A host copy; waits for the device."""
    return array.detach().cpu().numpy().copy() if hasattr(array, "detach") else np.array(array)


def doze(array: Any) -> None:
    """Wait for an array of either framework without keeping a core busy."""
    if hasattr(array, "is_ready"):  # JAX has no wait that does not spin
        while not array.is_ready():
            time.sleep(DOZE_S)
    elif array.is_cuda:
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


def cuda_event(array: Any) -> Any:
    """A CUDA event recorded on the stream that steps run on; None for JAX, which gives none, and on a CPU."""
    if not getattr(array, "is_cuda", False):
        return None
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _dynamo_compilations() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def why(error: Exception) -> str:
    """An error as the reason in ``not_measured``: this project's own say enough, others by their name, too."""
    if error.__class__.__module__.startswith(("jax_decoder", "torch_decoder", "compare")) and not isinstance(error, RuntimeError):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def open_arms(
    workload: Workload,
    variants: Sequence[Variant],
    prompts: list[list[int]],
    forced: list[list[int]],
    limit_s: float = float("inf"),
    opened: Callable[[str], None] = lambda label: None,
) -> tuple[list[DecoderArm], list[dict[str, Any]]]:
    """An arm for every variant that starts, over one copy of the weights, and a result object with the reason for every other.

    None is begun after ``limit_s`` seconds. ``opened`` hears of each one.
    """
    arms: list[DecoderArm] = []
    failures = []
    compiled: dict[Variant, Any] = {}
    started = time.perf_counter()
    for number, variant in enumerate(variants):
        try:
            if (seconds := time.perf_counter() - started) > limit_s:
                raise MeasurementError(f"not prepared: the variants before it took {seconds:.0f} s, and --prepare-limit is {limit_s:.0f}")
            arms.append(DecoderArm(variant, workload, prompts, forced, arms[0].decoder if arms else None, compiled.get(variant)))
            if not compiled and variant.framework == "jax" and variant.launch != "op_by_op":
                compiled = _compiled(arms[0].decoder, variants[number + 1 :])
        except Exception as error:  # one variant that cannot start must not take the others along
            failures.append(variant.absent(workload.batch, why(error)))
        opened(variant.label())
    return arms, failures


def _compiled(weights: Any, variants: Sequence[Variant]) -> dict[Variant, Any]:
    """Decoders of JAX variants over shared weights whose steps were compiled side by side; what failed here fails again, and is told, when it is opened.

    The weights' own decoder has compiled before: what XLA chose for its library products serves these, too.
    """

    def compile_one(variant: Variant) -> Any:
        try:
            decoder = weights.with_options(launch=variant.launch, kernels=variant.kernels)
            decoder.compile([variant.sampling])
            return decoder
        except Exception:
            return None

    with ThreadPoolExecutor(COMPILE_AT_ONCE) as pool:
        return {variant: decoder for variant, decoder in zip(variants, pool.map(compile_one, variants)) if decoder is not None}
