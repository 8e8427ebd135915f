"""Triton's interpreter, which runs the fused kernels on a CPU, with two gaps of its own closed."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _float32(handle: TensorHandle) -> TensorHandle:
    """bfloat16 lies in the interpreter as its 16 bits; its matrix product would take them for numbers."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def mend() -> None:
    """Call once before a kernel runs."""
    real_dot, real_patch = InterpreterBuilder.create_dot, interpreter._patch_lang_tensor
    if getattr(real_dot, "mended", False):
        return

    def create_dot(self, a, b, *rest):
        return real_dot(self, _float32(a), _float32(b), *rest)

    def patch(tensor, scope):
        real_patch(tensor, scope)
        # Scalars are arrays of one number, which new numpy no longer takes for an index.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    create_dot.mended = True
    InterpreterBuilder.create_dot, interpreter._patch_lang_tensor = create_dot, patch
