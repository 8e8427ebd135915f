"""What only the CUDA driver knows about a graph."""

from __future__ import annotations

import ctypes

from .errors import CaptureError


def count_nodes(graph: int) -> int:
    """Nodes of a CUgraph handle, those inside child graphs not included."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    if status:
        raise CaptureError(f"cuGraphGetNodes returned error {status}")
    return count.value
