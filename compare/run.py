"""Run a comparison: one worker process a framework, one after the other, results in one file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import results
from .environment import cuda_visible, environment
from .ledger import merge
from .workload import VARIANTS, Variant, Workload, why_not

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """How to measure: timed blocks and generations a variant, and whether driver calls are counted.

    ``xla_flags`` become XLA_FLAGS of the JAX worker, ``xla_options`` compiler options of its steps.
    """

    rounds: int = 12
    repeats: int = 3
    ledger: bool = True
    xla_flags: str = ""
    xla_options: Mapping[str, str] = field(default_factory=dict)


def compare(workload: Workload, variants: Sequence[Variant] = VARIANTS, plan: Plan | None = None) -> dict[str, Any]:
    """Measure every variant that this machine can run; the others say why not. Returns a result object.

    Workers never run at the same time. The transformers worker goes first: it makes the reference.
    """
    plan, cuda = plan or Plan(), cuda_visible()
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for framework in ("transformers", "torch", "jax"):
            wanted = [v for v in variants if v.framework == framework and why_not(v, cuda, workload.batch) is None]
            if not wanted and framework != "transformers":
                continue
            log.info("measuring %s: %s", framework, ", ".join(v.label() for v in wanted) or "reference only")
            job = _job(framework, workload, wanted, plan, cuda, folder)
            found = _work(job, folder)
            if framework == "transformers" and not Path(job["reference"]).exists():
                raise results.ResultError("the reference run failed, so no parity verdict can be given: see the lines above")
            if framework != "transformers" and cuda[framework] and plan.ledger:
                log.info("counting driver calls of %s", framework)
                merge(found, _work({**job, "count": True}, folder))
            measured += found
    for variant in variants:
        reason = why_not(variant, cuda, workload.batch)
        if reason is not None:
            measured.append({**variant.as_dict(), "batch": workload.batch, "bucket": workload.batch, "not_measured": reason})
    order = {v: i for i, v in enumerate(variants)}
    measured.sort(key=lambda r: order[Variant(*(r[k] for k in ("framework", "launch", "kernels", "sampling")))])
    ceilings = {"copy_gb_per_s": copy_bandwidth()}
    if cuda["torch"]:
        ceilings["device_copy_gb_per_s"] = device_copy_bandwidth()
    return results.make(asdict(workload), {**environment(), **_flags(plan, cuda["jax"])}, ceilings, measured)


def _job(framework: str, workload: Workload, variants: Sequence[Variant], plan: Plan, cuda: Mapping[str, bool], folder: Path) -> dict[str, Any]:
    return {
        "framework": framework,
        "workload": asdict(workload),
        "variants": [v.as_dict() for v in variants],
        "reference": str(folder / "reference.npz"),
        "rounds": plan.rounds,
        "repeats": plan.repeats,
        "device": "cuda" if cuda[framework] else "cpu",
        "count": False,
        "xla_flags": plan.xla_flags,
        "xla_options": dict(plan.xla_options),
    }


def _flags(plan: Plan, gpu: bool) -> dict[str, Any]:
    """What XLA was told: the environment's flags, and the compiler options of a step with graphs."""
    from jax_decoder import xla_flags

    options = {**xla_flags.step_options(True, "gpu" if gpu else "cpu"), **plan.xla_options}
    return {"xla_flags": " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), plan.xla_flags])), "xla_options": options}


def _work(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run one worker; if it dies, its variants say so."""
    job["out"] = str(folder / f"{job['framework']}.json")
    Path(job["out"]).unlink(missing_ok=True)
    job_file = folder / f"{job['framework']}.job.json"
    job_file.write_text(json.dumps(job))
    # JAX takes most of a GPU's memory at the start unless told otherwise.
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if job["framework"] == "jax" and job["xla_flags"]:
        environ["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), job["xla_flags"]]))
    root = Path(__file__).resolve().parents[1]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-m", "compare.worker", str(job_file)], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0 and Path(job["out"]).exists():
        return json.loads(Path(job["out"]).read_text())
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    reason = f"the {job['framework']} worker ended with code {done.returncode}: {lines[-1] if lines else 'no message'}"
    log.error("%s", reason)
    log.debug("%s", done.stderr)
    if job["count"]:
        return [{**v, "ledger": {"not_measured": reason}} for v in job["variants"]]
    return [{**v, "batch": job["workload"]["batch"], "bucket": job["workload"]["batch"], "not_measured": reason} for v in job["variants"]]


def device_copy_bandwidth(megabytes: int = 1024) -> float:
    """GB/s of a copy within the GPU's memory, bytes read and written counted: the ceiling of a GPU step."""
    code = (
        "import torch; n = int(__import__('sys').argv[1]) * 2**20; a = torch.zeros(n, dtype=torch.int8, device='cuda'); b = torch.empty_like(a); best = 1e9\n"
        "for _ in range(10):\n"
        "    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\n"
        "    s.record(); b.copy_(a); e.record(); e.synchronize(); best = min(best, s.elapsed_time(e))\n"
        "print(2 * n / best / 1e6)"
    )
    return float(subprocess.run([sys.executable, "-c", code, str(megabytes)], capture_output=True, text=True, check=True).stdout)


def copy_bandwidth(megabytes: int = 256) -> float:
    """GB/s of a host copy, bytes read and written counted: the ceiling of a CPU step."""
    import time

    source = np.ones(megabytes * 125_000)  # float64
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best / 1e9
