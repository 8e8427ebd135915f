"""Run a comparison: one worker process a framework, timed one after the other, results in one file."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import results
from .ceilings import ceilings
from .environment import cuda_visible, environment, gpu
from .line import Worker
from .models import encode_prompts, model_config, weight_bytes
from .repeats import merged
from .staged import too_large
from .turns import Turns
from .workload import VARIANTS, Variant, Workload, why_not

log = logging.getLogger(__name__)
ROOM = 0.6  # of the free memory, for weights
INTERRUPTED = "interrupted before it was timed"


@dataclass(frozen=True)
class Plan:
    """How to measure: timed blocks and generations a variant, and whether driver calls are counted.

    ``cold``: lengths of generations timed from a decoder on that has compiled and captured nothing;
    ``recapture``: steps between two recordings of a graph; ``prefill``: prompt lengths timed with and without one.
    ``processes``: how often everything is timed in fresh processes; driver calls and costs are of the first.
    No variant is begun after ``prepare_limit`` seconds of preparing others of its framework.
    ``xla_flags`` become XLA_FLAGS of the JAX worker, ``xla_options`` compiler options of its steps.
    """

    rounds: int = 12
    repeats: int = 3
    ledger: bool = True
    xla_flags: str = ""
    xla_options: Mapping[str, str] = field(default_factory=dict)
    prepare_limit: float = float("inf")
    cold: tuple[int, ...] = ()
    recapture: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    processes: int = 1


def compare(workload: Workload, variants: Sequence[Variant] = VARIANTS, plan: Plan | None = None, turns: Turns | None = None) -> dict[str, Any]:
    """Measure every variant that this machine can run; the others say why not. Returns a result object.

    Workers prepare side by side where memory allows; while one is timed, nothing else runs. With
    ``turns`` comparisons in other threads prepare at the same time, too.
    """
    turns = turns or Turns(1, bytes_needed(workload))
    try:
        plan, cuda = plan or Plan(), cuda_visible()
        return _compared(workload, variants, plan, cuda, turns)
    except BaseException:
        turns.give_up()  # once too often if the turn was taken: it counts no further down than to nobody
        raise


def _compared(workload: Workload, variants: Sequence[Variant], plan: Plan, cuda: Mapping[str, bool], turns: Turns) -> dict[str, Any]:
    prompts, runs, interrupted = encode_prompts(workload), [], False
    with tempfile.TemporaryDirectory() as kept:
        for number in range(plan.processes):
            if number:
                log.info("once more in fresh processes (%d of %d)", number + 1, plan.processes)
                plan = replace(plan, ledger=False, cold=(), recapture=(), prefill=())
            try:
                runs.append(_one_run(workload, variants, plan, cuda, prompts, Turns(1, bytes_needed(workload)) if number else turns, kept))
            except KeyboardInterrupt as stop:  # what was measured is kept
                if not runs and not isinstance(stop, Interrupted):
                    raise
                runs = runs or [stop.measured]
                interrupted = True
                break
    measured = merged(runs)
    measured += [v.absent(workload.batch, reason) for v in variants if (reason := why_not(v, cuda, workload.batch)) is not None]
    order = {v: i for i, v in enumerate(variants)}
    measured.sort(key=lambda r: order[results.variant_of(r)])
    with turns.alone():
        limits = ceilings(cuda["torch"])
    made = results.make(asdict(workload), {**environment(), **_flags(plan, cuda["jax"])}, limits, measured)
    return {**made, "interrupted": True} if interrupted else made


def _one_run(workload: Workload, variants: Sequence[Variant], plan: Plan, cuda: Mapping[str, bool], prompts: list[list[int]], turns: Turns, kept: str) -> list[dict[str, Any]]:
    """What the workers of one set of processes measured. ``kept``: a folder for what JAX compiled, which a later set need not compile again."""
    with tempfile.TemporaryDirectory() as name:
        jobs, staged = [], too_large(workload.model, 2 * weight_bytes(model_config(workload.model), "bfloat16"), free_bytes(cuda["torch"]))
        for framework in ("torch", "jax") if staged else ("transformers", "torch", "jax"):
            wanted = [v for v in variants if v.framework == framework and why_not(v, cuda, workload.batch) is None]
            if wanted or framework == "transformers":  # it makes the reference
                log.info("%s: %s", framework, ", ".join(v.label() for v in wanted) or "reference only")
                job = _job(framework, workload, wanted, plan, cuda, Path(name))
                jobs.append({**job, "prompts": prompts, "compiled": kept if plan.processes > 1 else "", "staged": staged})
        found = measure(jobs, Path(name), not staged and turns.needed_bytes <= ROOM * free_bytes(cuda["torch"]), turns)
    peers = [v for v in variants if staged and v.framework == "transformers" and why_not(v, cuda, workload.batch) is None]
    return found + [v.absent(workload.batch, "its float32 reference does not fit this device: the decoders are judged stage by stage") for v in peers]


def _job(framework: str, workload: Workload, variants: Sequence[Variant], plan: Plan, cuda: Mapping[str, bool], folder: Path) -> dict[str, Any]:
    return {
        "framework": framework,
        "workload": asdict(workload),
        "variants": [v.as_dict() for v in variants],
        "reference": str(folder / "reference.npz"),
        "rounds": plan.rounds,
        "repeats": plan.repeats,
        "device": "cuda" if cuda[framework] else "cpu",
        "ledger": plan.ledger and cuda[framework],
        "prepare_limit": plan.prepare_limit,
        "cold": list(plan.cold),
        "recapture": list(plan.recapture),
        "prefill": list(plan.prefill),
        "xla_flags": plan.xla_flags,
        "xla_options": dict(plan.xla_options),
    }


def _flags(plan: Plan, gpu: bool) -> dict[str, Any]:
    """What XLA was told: the environment's flags, and the compiler options of a step with graphs."""
    from jax_decoder import xla_flags

    options = {**xla_flags.step_options(True, "gpu" if gpu else "cpu"), **plan.xla_options}
    return {"xla_flags": " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), plan.xla_flags])), "xla_options": options}


def measure(jobs: Sequence[Mapping[str, Any]], folder: Path, together: bool, turns: Turns | None = None) -> list[dict[str, Any]]:
    """Run a worker for each job, the reference's first; result objects of all. Raises ResultError without a reference.

    ``together``: all prepare at the same time; otherwise each starts when the one before has ended.
    """
    turns = turns or Turns()
    workers: list[Worker] = []
    turns.watch(workers)
    try:
        if not together:
            with turns.take():
                return _each([(job,) for job in jobs], lambda one: _alone(one[0], folder, workers, first=one[0] is jobs[0]))
        workers += [Worker(job, folder, _environ(job)) for job in jobs]
        _await_reference(workers[0], jobs[0])
        for worker in workers[1:]:
            worker.tell("reference")
        for worker in workers:  # nothing may prepare while one is timed
            worker.ready()
        with turns.take():
            return _each(list(zip(jobs, workers)), lambda pair: _timed(pair[1], pair[0]))
    finally:
        for worker in workers:
            worker.close()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after some were timed: ``measured`` holds an entry of every variant, the others' say so."""

    def __init__(self, measured: list[dict[str, Any]]):
        super().__init__()
        self.measured = measured


def _each(work: Sequence[tuple], measured_by: Callable[[tuple], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Entries of all of ``work``, which begins with a job each. Raises Interrupted with what there is by then."""
    found: list[dict[str, Any]] = []
    for number, one in enumerate(work):
        try:
            found += measured_by(one)
        except KeyboardInterrupt:
            if not found:
                raise
            left = [Variant(**v).absent(job["workload"]["batch"], INTERRUPTED) for job, *_ in work[number:] for v in job["variants"]]
            raise Interrupted(found + left) from None
    return found


def _alone(job: Mapping[str, Any], folder: Path, workers: list[Worker], first: bool) -> list[dict[str, Any]]:
    """Run a worker from its start to its end; it joins ``workers``."""
    worker = Worker(job, folder, _environ(job))
    workers.append(worker)
    if not job.get("staged"):  # such a worker makes its own
        if first:
            _await_reference(worker, job)
        else:
            worker.tell("reference")
    worker.ready()
    return _timed(worker, job)


def _await_reference(worker: Worker, job: Mapping[str, Any]) -> None:
    worker.hear("reference")
    if not Path(job["reference"]).exists():
        raise results.ResultError(f"no parity verdict can be given without a reference: {worker.result()}")


def _timed(worker: Worker, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    worker.tell("go")
    return _outcome(worker, job)


def _outcome(worker: Worker, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a worker measured; if it died, its variants say so."""
    found = worker.result()
    if not isinstance(found, str):
        return found
    log.error("%s", found)
    return [Variant(**v).absent(job["workload"]["batch"], found) for v in job["variants"]]


def _environ(job: Mapping[str, Any]) -> dict[str, str]:
    # JAX takes most of a GPU's memory at the start unless told otherwise.
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if job["framework"] == "jax" and job["xla_flags"]:
        environ["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), job["xla_flags"]]))
    if job.get("compiled"):
        environ |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": job["compiled"], "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    root = Path(__file__).resolve().parents[1]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return environ


def bytes_needed(workload: Workload) -> float:
    """Bytes of three copies of the weights, one of them in float32: what workers hold that prepare side by side. ResultError for an unknown model."""
    return weight_bytes(model_config(workload.model), "bfloat16") / 2 * (4 + 2 * (4 if workload.dtype == "float32" else 2))


def free_bytes(cuda: bool) -> int:
    if not cuda:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(gpu()["memory.free"].removesuffix(" MiB")) * 2**20
