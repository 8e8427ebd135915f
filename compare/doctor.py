"""What this machine has, which variants can run, and why the others cannot."""

from __future__ import annotations

from typing import Any

from jax_decoder import xla_flags

from .environment import cuda_visible, environment, installed
from .workload import VARIANTS, why_not


def diagnose() -> dict[str, Any]:
    """Environment, variants with a reason or None, XLA flags with whether this version knows them."""
    cuda = cuda_visible()
    return {
        "environment": environment(),
        "cuda": cuda,
        "variants": {v.label(): why_not(v, cuda) for v in VARIANTS},
        "ledger": None if installed("cupti") else "cupti-python is not installed",
        "xla_flags": xla_flags.known(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    env = found["environment"]
    gpu = env["gpu"]
    out = [f"processor   {env['cpu']}, {env['cores']} cores", f"GPU         {gpu['name'] + ', driver ' + gpu['driver_version'] if gpu else 'none'}"]
    out += [f"{name:<11} {version or 'not installed'}" for name, version in env["versions"].items()]
    out += ["", "variants:"] + [f"  {name:<26} {'can run' if reason is None else 'cannot run: ' + reason}" for name, reason in found["variants"].items()]
    out += ["", f"launch ledger: {found['ledger'] or 'cupti-python'}"]
    out += ["XLA flags of this project:"] + [f"  {name:<46} {'known' if ok else 'not known to this version'}" for name, ok in found["xla_flags"].items()]
    return out
