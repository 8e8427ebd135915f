"""Run a comparison: one worker process a framework, one after the other, results in one file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import results
from .environment import cuda_visible, environment
from .workload import VARIANTS, Variant, Workload, why_not

log = logging.getLogger(__name__)


def compare(workload: Workload, variants: Sequence[Variant] = VARIANTS, rounds: int = 12, repeats: int = 3) -> dict[str, Any]:
    """Measure every variant that this machine can run; the others say why not. Returns a result object.

    Workers never run at the same time. The transformers worker goes first: it makes the reference.
    """
    cuda = cuda_visible()
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.npz"
        for framework in ("transformers", "torch", "jax"):
            wanted = [v for v in variants if v.framework == framework and why_not(v, cuda) is None]
            if not wanted and framework != "transformers":
                continue
            log.info("measuring %s: %s", framework, ", ".join(v.label() for v in wanted) or "reference only")
            job = {
                "framework": framework,
                "workload": asdict(workload),
                "variants": [v.as_dict() for v in wanted],
                "reference": str(reference),
                "rounds": rounds,
                "repeats": repeats,
            }
            measured += _work(job, Path(folder))
            if framework == "transformers" and not reference.exists():
                raise results.ResultError("the reference run failed, so no parity verdict can be given: see the lines above")
    for variant in variants:
        reason = why_not(variant, cuda)
        if reason is not None:
            measured.append({**variant.as_dict(), "batch": workload.batch, "bucket": workload.batch, "not_measured": reason})
    order = {v: i for i, v in enumerate(variants)}
    measured.sort(key=lambda r: order[Variant(*(r[k] for k in ("framework", "launch", "kernels", "sampling")))])
    return results.make(asdict(workload), environment(), {"copy_gb_per_s": copy_bandwidth()}, measured)


def _work(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run one worker; if it dies, its variants say so."""
    job["out"] = str(folder / f"{job['framework']}.json")
    job_file = folder / f"{job['framework']}.job.json"
    job_file.write_text(json.dumps(job))
    # JAX takes most of a GPU's memory at the start unless told otherwise.
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    root = Path(__file__).resolve().parents[1]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-m", "compare.worker", str(job_file)], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0 and Path(job["out"]).exists():
        return json.loads(Path(job["out"]).read_text())
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    reason = f"the {job['framework']} worker ended with code {done.returncode}: {lines[-1] if lines else 'no message'}"
    log.error("%s", reason)
    log.debug("%s", done.stderr)
    return [{**v, "batch": job["workload"]["batch"], "bucket": job["workload"]["batch"], "not_measured": reason} for v in job["variants"]]


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
