"""The settings of a decoder, checked before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .buckets import check_buckets
from .checkpoint import DTYPES
from .errors import ConfigError, DeviceError
from .kernels.tiles import interpreted
from .model import KERNELS
from .requests import integer
from .runner import check_launch

CAPTURES = ("lazy", "ahead")


@dataclass(frozen=True)
class Options:
    """See Decoder.from_pretrained. Raises ConfigError naming the setting, DeviceError for the device."""

    dtype: str = "bfloat16"
    device: str = "auto"
    max_batch: int = 8
    max_seq_len: int = 2048
    launch: str = "auto"
    kernels: str = "auto"
    buckets: Sequence[int] | None = None
    capture: str = "lazy"
    memory_budget: int | None = None
    strict: bool = False
    batch_invariant: bool = False
    logits_hook: Any = None
    eager: Sequence[str] = ()
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name, only in (("batch_invariant", False), ("logits_hook", None), ("eager", ()), ("tensor_parallel", 1)):
            value = tuple(self.eager) if name == "eager" else getattr(self, name)
            if value != only:
                raise ConfigError(f"{name} is {value!r}: only {only!r} is supported so far")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kernels", self.kernels, ("auto", *KERNELS))
        _one_of("capture", self.capture, CAPTURES)
        if not isinstance(self.strict, bool):
            raise ConfigError(f"strict is {self.strict!r}, expected True or False")
        for name in ("max_batch", "max_seq_len"):
            object.__setattr__(self, name, integer(getattr(self, name), name, 1))
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", integer(self.memory_budget, "memory_budget", 1))
        object.__setattr__(self, "kernels", "plain" if self.kernels == "auto" else self.kernels)
        if self.kernels == "fused" and self.place.platform != "gpu" and not interpreted():
            raise DeviceError(
                f"fused kernels need a CUDA device, and the device is a {self.place.platform}: use kernels='plain' (DECODE_PALLAS_INTERPRET=1 runs them on a CPU, for tests)"
            )
        object.__setattr__(self, "launch", check_launch(self.launch, self.place.platform))
        object.__setattr__(self, "buckets", check_buckets(self.buckets, self.max_batch))

    @property
    def place(self) -> jax.Device:
        return resolve_device(self.device)

    @property
    def jax_dtype(self) -> jnp.dtype:
        return DTYPES[self.dtype]

    @property
    def packing(self) -> str:
        """How weights lie: many arrays cost the host time on a GPU, stacked ones are copied on a CPU."""
        return "stacked" if self.place.platform == "gpu" or self.kernels == "fused" else "separate"


def changed_options(options: Options, changes: Mapping[str, Any]) -> Options:
    """``options`` with ``changes``, for a decoder of weights that are loaded. Raises ConfigError."""
    for name in ("dtype", "device"):
        if name in changes and changes[name] != getattr(options, name):
            raise ConfigError(f"{name} is {changes[name]!r}, but the weights are loaded with {getattr(options, name)!r}: use from_pretrained")
    unknown = sorted(set(changes) - set(Options.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown options {', '.join(unknown)}, expected some of {', '.join(Options.__dataclass_fields__)}")
    if "max_batch" in changes:
        changes = {"buckets": None, **changes}  # the old ones end at the old max_batch
    changed = replace(options, **changes)
    if changed.packing != options.packing:
        raise ConfigError(f"kernels {changed.kernels!r} take weights packed {changed.packing!r}, but they are loaded {options.packing!r}: use from_pretrained")
    return changed


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")


def resolve_device(device: str) -> jax.Device:
    """ "auto" is JAX's default device. Raises DeviceError for one that is not there."""
    if device == "auto":
        return jax.devices()[0]
    if device not in ("cpu", "gpu", "cuda"):
        raise DeviceError(f"device is {device!r}, expected auto, cpu, gpu or cuda")
    try:
        return jax.devices("gpu" if device == "cuda" else device)[0]
    except RuntimeError:
        raise DeviceError(f"device is {device!r}, but JAX finds no CUDA device: use device='cpu', or install jax[cuda13] and a driver") from None
