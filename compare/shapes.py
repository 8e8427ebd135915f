"""Published model shapes: what ``shape:NAME`` means in place of a model directory."""

from __future__ import annotations

import json
from typing import Any

from jax_decoder.errors import ConfigError

PREFIX = "shape:"
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _shape(family: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, positions: int, tied: bool, **rest: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    common = {"vocab_size": vocab, "max_position_embeddings": positions, "tie_word_embeddings": tied, "hidden_act": "silu"}
    # No stop ids: random weights should generate to the length asked for.
    stops = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"model_type": family, **sizes, **common, **stops, **rest}


def _llama3(hidden: int, inner: int, layers: int, heads: int, head_dim: int, tied: bool, factor: float) -> dict[str, Any]:
    rope = {**_LLAMA3_ROPE, "factor": factor}
    return _shape("llama", hidden, inner, layers, heads, 8, head_dim, 128256, 131072, tied, rms_norm_eps=1e-5, rope_parameters=rope)


def _qwen(family: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return _shape(family, hidden, inner, layers, heads, kv_heads, 128, vocab, 40960, tied, rms_norm_eps=1e-6, use_sliding_window=False, rope_parameters=rope)


# The fields of each model's published config.json that its shape and arithmetic depend on.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
    "qwen3-0.6b": _qwen("qwen3", 1024, 3072, 28, 16, 8, 151936, True),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, True, 32.0),
    "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "mistral-7b-v0.1": _shape(
        "mistral", 4096, 14336, 32, 32, 8, 128, 32000, 32768, False, rms_norm_eps=1e-5, sliding_window=4096, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, False, 8.0),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 128, False, 8.0),
}


def is_shape(model: str) -> bool:
    return model.startswith(PREFIX)


def config_dict(model: str) -> dict[str, Any]:
    """The config of ``shape:NAME`` or ``shape:NAME,field=value,...``, as config.json would hold it.

    Fields after the name replace published ones: ``shape:qwen3-0.6b,num_hidden_layers=2``.
    Raises ConfigError for a name or a field that does not exist.
    """
    name, *changes = model.removeprefix(PREFIX).split(",")
    if name not in SHAPES:
        raise ConfigError(f"shape is {name!r}, expected one of {', '.join(SHAPES)}, or a model directory without {PREFIX!r}")
    config = dict(SHAPES[name])
    for change in changes:
        field, _, value = change.partition("=")
        if field not in config or not value:
            raise ConfigError(f"{model}: {change!r} changes no field, expected FIELD=VALUE with one of {', '.join(config)}")
        try:
            config[field] = json.loads(value)
        except ValueError:
            raise ConfigError(f"{model}: the value of {field} is {value!r}, expected a number, true, false or null") from None
    return config
