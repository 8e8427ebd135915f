"""A JAX/Flax decoder whose step XLA can run as one command buffer, that is a CUDA graph."""

from .config import ModelConfig
from .errors import CacheOverflowError, CaptureError, CheckpointError, ConfigError, DecoderError, DeviceError
from .generate import DecodeHandle, Decoder
from .requests import Completion
from .settings import Sampling

__all__ = [
    "CacheOverflowError",
    "CaptureError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DecodeHandle",
    "Decoder",
    "DecoderError",
    "DeviceError",
    "ModelConfig",
    "Sampling",
]
