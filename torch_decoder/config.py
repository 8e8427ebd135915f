"""What a model is: a frozen :class:`ModelConfig` made from a Hugging Face config.json.

Four dense families are known: llama (SmolLM2 included), mistral, qwen2 and qwen3. Defaults
for absent fields are those of the family's class in transformers, because that is what the
file format means. A field that would change the arithmetic and is not supported is an error:
a decoder that guesses gives fluent text and wrong numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError, ConfigError

# Per family: what an absent field means, and what the family always has.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "qkv_bias": True},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "qk_norm": True},
}
# Families whose config can switch attention or MLP biases on.
_ATTENTION_BIAS_FAMILIES = {"llama", "qwen3"}
_MLP_BIAS_FAMILIES = {"llama"}
_WINDOW_SWITCH_FAMILIES = {"qwen2", "qwen3"}

# Fields that this module reads.
_READ = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "layer_types", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("dtype", "torch_dtype", "partial_rotary_factor", "original_max_position_embeddings"),
}
# Fields that do not change a forward pass at inference.
_HARMLESS = {
    *("architectures", "transformers_version", "use_cache", "initializer_range", "auto_map"),
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_implementation"),
    *("pretraining_tp", "unk_token_id", "sep_token_id", "decoder_start_token_id", "name_or_path"),
    *("is_llama_config", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    *("chunk_size_feed_forward", "return_dict", "output_attentions", "output_hidden_states", "torchscript"),
    *("use_bfloat16", "is_encoder_decoder", "is_decoder", "tokenizer_class", "prefix", "model_name"),
    # generation defaults that older versions of transformers wrote into config.json
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "transformers.js_config"),
}
_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
    },
}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and scaling (``rope_type`` as transformers names it)."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass depends on; shapes in the letters of the style guide."""

    family: str
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_windows: tuple[int | None, ...] = ()  # one entry a layer; None attends to everything
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"  # of the stored weights

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read the contents of a config.json.

        Raises ConfigError naming the field for anything missing, contradictory or unsupported.
        Source: the configuration classes of transformers' llama, mistral, qwen2 and qwen3.
        """
        return _Reader(raw, source).read()

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read config.json and, for the stop ids, generation_config.json of a model directory."""
        path = Path(directory) / "config.json"
        raw = read_json(path)
        config = cls.from_dict(raw, str(path))
        generation_path = path.with_name("generation_config.json")
        if not generation_path.exists():
            return config
        # generation_config.json wins where it speaks, as in transformers' generate.
        generation = read_json(generation_path)
        eos = generation.get("eos_token_id")
        if eos is None:
            return config
        values = {name: getattr(config, name) for name in config.__dataclass_fields__}
        ids = _token_ids("eos_token_id", eos, config.vocab_size, str(generation_path))
        return cls(**{**values, "eos_token_ids": ids})


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; CheckpointError names the file, its size and what is wrong."""
    if not path.is_file():
        raise CheckpointError(f"{path}: not found, expected a JSON file there: is this a model directory?")
    text = path.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {len(text)} bytes that are not valid JSON ({error}): the file is probably cut off, fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object: fetch it again")
    return value


def _token_ids(name: str, value: Any, vocab_size: int, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise ConfigError(f"{source}: {name} holds {item!r}, expected integers from 0 to {vocab_size - 1}")
    return tuple(ids)


class _Reader:
    """One pass over a raw config; each method reads one concern."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError(f"{source}: model_type is {family!r}, expected one of {', '.join(sorted(FAMILIES))}")
        self.family: str = family
        self.defaults = FAMILIES[family]

    def fail(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {name} {problem}")

    def read(self) -> ModelConfig:
        self.refuse_unknown_fields()
        activation = self.raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self.fail("hidden_act", f"is {activation!r}, only 'silu' is supported")
        num_layers, num_heads = self.positive("num_hidden_layers"), self.positive("num_attention_heads")
        hidden_size = self.positive("hidden_size")
        head_dim, num_kv_heads = self.head_dim(hidden_size, num_heads), self.num_kv_heads(num_heads)
        vocab_size = self.positive("vocab_size")
        max_positions = self.positive("max_position_embeddings", {"mistral": 131072, "llama": 2048}.get(self.family, 32768))
        attention_bias = self.bias("attention_bias", _ATTENTION_BIAS_FAMILIES)
        return ModelConfig(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            rope=self.rope(max_positions),
            sliding_windows=self.sliding_windows(num_layers),
            qkv_bias=self.defaults.get("qkv_bias", attention_bias),
            o_bias=attention_bias,
            mlp_bias=self.bias("mlp_bias", _MLP_BIAS_FAMILIES),
            qk_norm=self.defaults.get("qk_norm", False),
            tie_word_embeddings=self.flag("tie_word_embeddings", False),
            eos_token_ids=_token_ids("eos_token_id", self.raw.get("eos_token_id"), vocab_size, self.source),
            bos_token_id=self.raw.get("bos_token_id"),
            pad_token_id=self.raw.get("pad_token_id"),
            dtype=self.dtype(),
        )

    def refuse_unknown_fields(self) -> None:
        for name, value in self.raw.items():
            if name in _READ or name in _HARMLESS or name.startswith(("_", "unsloth")):
                continue
            if value is None or value is False or value == [] or value == {}:
                continue  # switched off
            raise self.fail(
                name,
                f"is {value!r}, which this decoder does not support: remove the field only if you know that it does not change the forward pass",
            )
        if self.raw.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise self.fail("partial_rotary_factor", f"is {self.raw['partial_rotary_factor']!r}, only 1.0 is supported")

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name, default)
        if value is None:
            raise self.fail(name, "is missing, expected a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.fail(name, f"is {value!r}, expected a positive integer")
        return value

    def number(self, name: str, default: Any, table: Mapping[str, Any] | None = None) -> float:
        value = (self.raw if table is None else table).get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.fail(name, f"is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"is {value!r}, expected true or false")
        return value

    def bias(self, name: str, families: set[str]) -> bool:
        value = self.flag(name, False)
        if value and self.family not in families:
            raise self.fail(name, f"is true, but transformers' {self.family} model has no such bias: remove the field")
        return value

    def dtype(self) -> str:
        value = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if value not in DTYPES:
            raise self.fail("dtype", f"is {value!r}, expected one of {', '.join(DTYPES)}")
        return value

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        value = self.raw.get("head_dim", self.defaults["head_dim"])
        if value is None:
            if hidden_size % num_heads:
                raise self.fail("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}, and head_dim is not given")
            value = hidden_size // num_heads
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % 2:
            raise self.fail("head_dim", f"is {value!r}, expected an even positive integer")
        return value

    def num_kv_heads(self, num_heads: int) -> int:
        value = self.raw.get("num_key_value_heads", self.defaults["num_key_value_heads"])
        value = num_heads if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or num_heads % value:
            raise self.fail("num_key_value_heads", f"is {value!r}, expected a divisor of num_attention_heads {num_heads}")
        return value

    def sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """One window a layer.

        Mistral: all layers, when sliding_window is set. Qwen: only with use_sliding_window, and
        then the layers from max_window_layers on, unless layer_types lists them.
        """
        layer_types = self.raw.get("layer_types")
        if self.family == "llama":
            if self.raw.get("sliding_window") is not None or self.flag("use_sliding_window", False):
                raise self.fail("sliding_window", "is set, but transformers' llama model has none: remove the field")
            window = None
        else:
            window = self.raw.get("sliding_window", 4096)
        if self.family in _WINDOW_SWITCH_FAMILIES and not self.flag("use_sliding_window", False):
            window = None
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window <= 0):
            raise self.fail("sliding_window", f"is {window!r}, expected a positive integer or null")
        if layer_types is None:
            first = self.raw.get("max_window_layers", 28) if self.family in _WINDOW_SWITCH_FAMILIES else 0
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise self.fail("max_window_layers", f"is {first!r}, expected an integer >= 0")
            return tuple(window if i >= first else None for i in range(num_layers))
        return self.windows_from_layer_types(layer_types, window, num_layers)

    def windows_from_layer_types(self, layer_types: Any, window: int | None, num_layers: int) -> tuple[int | None, ...]:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(layer_types, list) or len(layer_types) != num_layers or not all(isinstance(kind, str) and kind in known for kind in layer_types):
            raise self.fail("layer_types", f"is {layer_types!r}, expected {num_layers} entries from {sorted(known)}")
        if self.family == "mistral" and len(set(layer_types)) > 1:
            raise self.fail("layer_types", "mixes kinds of attention, which transformers' mistral model does not support")
        if "sliding_attention" in layer_types and window is None:
            raise self.fail("sliding_window", "is not set (or use_sliding_window is false), but layer_types names sliding_attention")
        if self.family == "mistral" and window is not None and "full_attention" in layer_types:
            raise self.fail("layer_types", "says full_attention, but sliding_window is set: make one of them agree")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

    def rope(self, max_positions: int) -> RopeConfig:
        """Read rotary settings from rope_parameters (new), or rope_scaling and rope_theta (old)."""
        name = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        table = self.raw.get(name) or {}
        if not isinstance(table, Mapping):
            raise self.fail(name, f"is {table!r}, expected an object")
        top_theta = self.raw.get("rope_theta")
        theta = self.number("rope_theta", 10000.0 if top_theta is None else top_theta, table)
        rope_type = table.get("rope_type", table.get("type", "default"))
        if not isinstance(rope_type, str) or rope_type not in _ROPE_FIELDS:
            raise self.fail(f"{name}.rope_type", f"is {rope_type!r}, expected one of {', '.join(_ROPE_FIELDS)} (dynamic and longrope depend on the length at run time)")
        allowed = _ROPE_FIELDS[rope_type] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        unknown = sorted(key for key, value in table.items() if key not in allowed and value is not None)
        if rope_type == "default":  # transformers ignores the rest for the default type
            unknown = [key for key in unknown if key not in set().union(*_ROPE_FIELDS.values())]
        if unknown:
            raise self.fail(f"{name}.{unknown[0]}", f"is not known for rope_type {rope_type!r}")
        if table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise self.fail(f"{name}.partial_rotary_factor", "is set, only 1.0 is supported")
        return self.rope_scaling(table, theta, rope_type, max_positions)

    def rope_scaling(self, table: Mapping[str, Any], theta: float, rope_type: str, max_positions: int) -> RopeConfig:
        if rope_type == "default":
            return RopeConfig(theta=theta)
        if rope_type == "linear":
            return RopeConfig(theta, rope_type, self.number("factor", None, table))
        # A value beside rope_parameters wins over one inside, as in transformers.
        original = self.raw.get("original_max_position_embeddings") or table.get("original_max_position_embeddings", max_positions)
        if isinstance(original, bool) or not isinstance(original, int) or original <= 0:
            raise self.fail("original_max_position_embeddings", f"is {original!r}, expected a positive integer")
        if rope_type == "llama3":
            low, high = (self.number(key, None, table) for key in ("low_freq_factor", "high_freq_factor"))
            if low >= high:
                raise self.fail("high_freq_factor", f"is {high}, expected more than low_freq_factor {low}")
            return RopeConfig(theta, rope_type, self.number("factor", None, table), low, high, original)
        factor = table.get("factor")
        optional = {key: None if table.get(key) is None else self.number(key, None, table) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        beta_fast, beta_slow = (default if table.get(key) is None else self.number(key, None, table) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
        truncate = True if table.get("truncate") is None else table["truncate"]
        if not isinstance(truncate, bool):
            raise self.fail("truncate", f"is {truncate!r}, expected true or false")
        return RopeConfig(
            theta=theta,
            rope_type=rope_type,
            factor=max_positions / original if factor is None else self.number("factor", None, table),
            original_max_position_embeddings=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
            **optional,
        )
