"""The arithmetic of a layer, kind by kind: ``plain`` uses the framework's own operations, the others are Triton's.

``products``, ``attention`` and ``advance`` together are the kernels called "fused"; they import
Triton, so they are imported where they are called.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def why_not_fused(device: torch.device) -> str | None:
    """Why fused kernels cannot run on a device, with the remedy; None if they can."""
    if find_spec("triton") is None:
        return "fused kernels need Triton: pip install triton, or use kernels='plain'"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"fused kernels need a CUDA device, and the device is {device.type}: use kernels='plain' (TRITON_INTERPRET=1 runs them on a CPU, for tests)"
    return None
