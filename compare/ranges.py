"""NVTX ranges, so that Nsight Systems shows which variant a stretch of the timeline is of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

try:
    import nvtx
except ImportError:  # the ranges are for a profiler: nothing else needs them
    nvtx = None


def span(name: str) -> AbstractContextManager[None]:
    """A named range of the host's time; nothing without the nvtx package."""
    return nullcontext() if nvtx is None else nvtx.annotate(name)
