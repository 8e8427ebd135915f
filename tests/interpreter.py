"""Triton's interpreter, which runs the fused kernels on a CPU, with three gaps of its own closed."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def _float32(handle: TensorHandle) -> TensorHandle:
    """bfloat16 lies in the interpreter as its 16 bits; its matrix product would take them for numbers."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def mend() -> None:
    """Call once before a kernel runs."""
    real_dot, real_patch, real_op = InterpreterBuilder.create_dot, interpreter._patch_lang_tensor, InterpreterBuilder.binary_op
    if getattr(real_dot, "mended", False):
        return

    def create_dot(self, a, b, *rest):
        return real_dot(self, _float32(a), _float32(b), *rest)

    def binary_op(self, left, right, op):
        out = real_op(self, left, right, op)
        # Triton 3.9 gives what a comparison yields the kind of its operands, and then refuses it as a mask.
        return TensorHandle(out.data.astype(bool), tl.int1) if op in COMPARISONS else out

    def patch(tensor, scope):
        real_patch(tensor, scope)
        # Scalars are arrays of one number, which new numpy no longer takes for an index.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    create_dot.mended = True
    InterpreterBuilder.create_dot, InterpreterBuilder.binary_op, interpreter._patch_lang_tensor = create_dot, binary_op, patch
