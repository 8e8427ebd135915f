"""A PyTorch decoder whose step is made to be captured as one CUDA graph."""

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
