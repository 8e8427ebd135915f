"""A whole generation in one launch: a captured step as the body of a WHILE node.

CUDA's conditional nodes (driver 12.4 and later) hold a graph that runs again for as long as a
handle is not 0. The body is the captured step as a child graph, followed by a kernel of one
thread that copies a flag from memory into the handle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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
        self._graph = ConditionalGraph(device)
        handle = self._graph.condition(default=1)
        (body,), _ = self._graph.add_conditional(handle, "WHILE", 1)
        step = self._graph.add_child(body, captured)
        self._graph.add_setter(body, handle, flag, [step])
        self.nodes = count_nodes(captured.raw_cuda_graph())
        self._graph.instantiate()

    def replay(self) -> None:
        """One launch, however many steps it runs."""
        self._graph.replay()

    def close(self) -> None:
        if self._graph.close():
            self._captured.reset()


class ConditionalGraph:
    """A CUDA graph put together node by node: conditional nodes, captured graphs, and kernels that set a condition.

    Every method raises CaptureError where driver or Python bindings cannot do it.
    """

    def __init__(self, device: torch.device):
        self._device, self._exec = device, None
        self._cuda = _driver()
        major, minor = torch.cuda.get_device_capability(device)
        self._module = _call(self._cuda.cuModuleLoadData, _PTX.format(major=major, minor=minor).encode() + b"\0")
        self.root = _call(self._cuda.cuGraphCreate, 0)

    def condition(self, default: int) -> Any:
        """The handle of a condition, which is ``default`` whenever the graph is launched."""
        context = _call(self._cuda.cuCtxGetCurrent)
        return _call(self._cuda.cuGraphConditionalHandleCreate, self.root, context, default, int(self._cuda.CU_GRAPH_COND_ASSIGN_DEFAULT))

    def add_conditional(self, handle: Any, kind: str, bodies: int, after: Sequence[Any] = ()) -> tuple[list[Any], Any]:
        """An IF, WHILE or SWITCH node behind others: the graphs of its bodies, and the node itself."""
        cuda, context = self._cuda, _call(self._cuda.cuCtxGetCurrent)
        node = cuda.CUgraphNodeParams()
        node.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.ctx, node.conditional.size = handle, context, bodies
        kinds = cuda.CUgraphConditionalNodeType
        if not hasattr(kinds, name := f"CU_GRAPH_COND_TYPE_{kind}"):
            raise CaptureError(f"the installed cuda-bindings know no {kind} nodes: pip install --upgrade cuda-bindings")
        node.conditional.type = getattr(kinds, name)
        before = list(after) or None
        try:
            made = _call(cuda.cuGraphAddNode, self.root, before, None, len(after), node)
        except TypeError:  # bindings before CUDA 13 take no edge data
            made = _call(cuda.cuGraphAddNode, self.root, before, len(after), node)
        return [node.conditional.phGraph_out[i] for i in range(bodies)], made

    def add_child(self, graph: Any, captured: torch.cuda.CUDAGraph, after: Sequence[Any] = ()) -> Any:
        """A captured graph (``keep_graph=True``) as one node of ``graph``, behind others."""
        return _call(self._cuda.cuGraphAddChildGraphNode, graph, list(after) or None, len(after), self._cuda.CUgraph(captured.raw_cuda_graph()))

    def add_setter(self, graph: Any, handle: Any, flag: Tensor, after: Sequence[Any] = ()) -> Any:
        """A kernel of one thread, behind others, that copies an int32 from memory into a condition."""
        cuda = self._cuda
        kernel = cuda.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = _call(cuda.cuModuleGetFunction, self._module, b"set_condition")
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
        kernel.kernelParams = ((int(handle), flag.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p))
        return _call(cuda.cuGraphAddKernelNode, graph, list(after) or None, len(after), kernel)

    def instantiate(self) -> None:
        """Make it launchable; nothing can be added afterwards."""
        self._exec = _call(self._cuda.cuGraphInstantiate, self.root, 0)

    def replay(self) -> None:
        """One launch on the current stream."""
        _call(self._cuda.cuGraphLaunch, self._exec, torch.cuda.current_stream(self._device).cuda_stream)

    def close(self) -> bool:
        """Release it; False if that was done before."""
        if self._exec is None:
            return False
        _call(self._cuda.cuGraphExecDestroy, self._exec)
        _call(self._cuda.cuGraphDestroy, self.root)
        _call(self._cuda.cuModuleUnload, self._module)
        self._exec = None
        return True


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
