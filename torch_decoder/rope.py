"""Rotary position embedding as a table, made on the host once (RoFormer, arXiv 2104.09864).

A table rather than sines inside the step: it costs a step one small gather, both decoders
share its bits, and no device's sine has to be accurate at an angle of 100,000 radians.
"""

from __future__ import annotations

import math

import numpy as np

from .config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [H/2], and the factor that multiplies cos and sin.

    Source: transformers.modeling_rope_utils (default, linear, llama3, yarn).
    """
    wavelengths = rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    inverse = 1.0 / wavelengths
    if rope.rope_type == "linear":
        inverse = inverse / rope.factor
    elif rope.rope_type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.rope_type == "yarn":
        return _yarn(rope, inverse, head_dim).astype(np.float32), _yarn_attention_factor(rope)
    return inverse.astype(np.float32), 1.0


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    original = rope.original_max_position_embeddings
    turns = original * inverse / (2 * math.pi)  # full rotations within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    """Blend interpolated and extrapolated frequencies (YaRN, arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        original = rope.original_max_position_embeddings
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * multiplier * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rope_table(config: ModelConfig, length: int) -> np.ndarray:
    """Cosines and sines of positions 0 to ``length`` - 1: float32 [length, 2, H/2].

    The angle is a float32 product, as in transformers, so that both round alike; its cosine
    is then taken in float64, so that the table itself adds no error.
    """
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse
    angles = angles.astype(np.float64)
    return (np.stack([np.cos(angles), np.sin(angles)], axis=1) * factor).astype(np.float32)
