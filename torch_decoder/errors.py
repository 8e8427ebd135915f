"""The errors of this package. A message says what was found, what was expected and the remedy."""


class DecoderError(Exception):
    """Base class; catching it catches every error that this package raises on purpose."""


class ConfigError(DecoderError):
    """A setting, or a field of config.json, that is missing, contradictory or not supported."""


class CheckpointError(DecoderError):
    """A model directory that cannot be read completely and exactly."""


class CacheOverflowError(DecoderError):
    """A request that needs more cache slots than ``max_seq_len`` gives."""


class CaptureError(DecoderError):
    """A step that could not be recorded as a graph."""


class DeviceError(DecoderError):
    """A device that is missing, busy or no longer usable."""
