"""What only the CUDA driver knows: memory that is free beside JAX's own pool."""

from __future__ import annotations

import ctypes

import jax


def free_bytes(device: jax.Device) -> int | None:
    """Free bytes of a GPU as the driver counts them; None on other devices.

    Graphs live outside JAX's pool, so its own statistics do not show them.
    """
    if device.platform != "gpu":
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    # JAX's threads hold the primary context; retaining it here makes no second one.
    if cuda.cuDeviceGet(ctypes.byref(ordinal), device.local_hardware_id) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal):
        return None
    try:
        cuda.cuCtxPushCurrent_v2(context)
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(ordinal)
    return None if failed else free.value
