"""A whole generation in one launch: a captured step as the body of a WHILE node.

CUDA's conditional nodes (driver 12.4 and later) hold a graph that runs again for as long as a
handle is not 0. The body is the captured step as a child graph, followed by a kernel of one
thread that copies a flag from memory into the handle.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .driver import count_nodes
from .errors import CaptureError

# cudaGraphSetConditional is a device function that the driver resolves when it loads the module.
_PTX = """
.version 8.0
.target sm_{major}{minor}
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry set_condition(.param .u64 handle, .param .u64 flag)
{{
    .reg .b64 %rd<4>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [handle];
    ld.param.u64 %rd2, [flag];
    cvta.to.global.u64 %rd3, %rd2;
    ld.global.u32 %r1, [%rd3];
    {{
        .param .b64 p0;
        st.param.b64 [p0], %rd1;
        .param .b32 p1;
        st.param.b32 [p1], %r1;
        call.uni cudaGraphSetConditional, (p0, p1);
    }}
    ret;
}}
"""
_FIRST_DRIVER = 12040


class DeviceLoop:
    """Replays a captured step on the device until an int32 flag, written by the step, is 0."""

    def __init__(self, captured: torch.cuda.CUDAGraph, flag: Tensor, device: torch.device):
        """Raises CaptureError where driver or Python bindings cannot build the loop."""
        self._captured, self._device = captured, device
        self._cuda = cuda = _driver()
        major, minor = torch.cuda.get_device_capability(device)
        self._module = _call(cuda.cuModuleLoadData, _PTX.format(major=major, minor=minor).encode() + b"\0")
        self._graph = _call(cuda.cuGraphCreate, 0)
        self.nodes = self._build(flag)
        self._exec = _call(cuda.cuGraphInstantiate, self._graph, 0)

    def _build(self, flag: Tensor) -> int:
        """Put the WHILE node together; return the number of nodes in the captured step."""
        cuda, context = self._cuda, _call(self._cuda.cuCtxGetCurrent)
        handle = _call(cuda.cuGraphConditionalHandleCreate, self._graph, context, 1, int(cuda.CU_GRAPH_COND_ASSIGN_DEFAULT))
        node = cuda.CUgraphNodeParams()
        node.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.ctx, node.conditional.size = handle, context, 1
        node.conditional.type = cuda.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        try:
            _call(cuda.cuGraphAddNode, self._graph, None, None, 0, node)
        except TypeError:  # bindings before CUDA 13 take no edge data
            _call(cuda.cuGraphAddNode, self._graph, None, 0, node)
        body, step = node.conditional.phGraph_out[0], cuda.CUgraph(self._captured.raw_cuda_graph())
        child = _call(cuda.cuGraphAddChildGraphNode, body, None, 0, step)
        kernel = cuda.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = _call(cuda.cuModuleGetFunction, self._module, b"set_condition")
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
        kernel.kernelParams = ((int(handle), flag.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p))
        _call(cuda.cuGraphAddKernelNode, body, [child], 1, kernel)
        return count_nodes(self._captured.raw_cuda_graph())

    def replay(self) -> None:
        """One launch, however many steps it runs."""
        _call(self._cuda.cuGraphLaunch, self._exec, torch.cuda.current_stream(self._device).cuda_stream)

    def close(self) -> None:
        if self._exec is None:
            return
        _call(self._cuda.cuGraphExecDestroy, self._exec)
        _call(self._cuda.cuGraphDestroy, self._graph)
        _call(self._cuda.cuModuleUnload, self._module)
        self._exec = None
        self._captured.reset()


def _driver() -> Any:
    """cuda.bindings.driver; CaptureError where it or conditional nodes are missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise CaptureError("the package cuda-bindings is not installed, device_loop needs it: pip install cuda-bindings") from None
    version = _call(driver.cuDriverGetVersion)
    if version < _FIRST_DRIVER:
        raise CaptureError(f"the driver is CUDA {version // 1000}.{version % 1000 // 10}, device_loop needs 12.4 for conditional nodes: update the driver")
    return driver


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver; CaptureError names the function and its error. Returns what it returned."""
    status, *values = function(*arguments)
    if int(status):
        raise CaptureError(f"{function.__name__} returned {status!s}")
    return values[0] if len(values) == 1 else values or None
