"""Both decoders keep one contract: what is said of one holds for the other."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import numpy as np
import pytest

import jax_decoder
import torch_decoder
from tests.helpers import FAMILIES

METHODS = ("from_pretrained", "generate", "stream", "encode", "prefill", "decode_step", "fork", "score", "load_weights", "launch_report", "close")
SCALINGS = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.5, "mscale_all_dim": 0.7},
]


def modules(name: str):
    return [importlib.import_module(f"{package.__name__}.{name}") for package in (torch_decoder, jax_decoder)]


def configs(raw: dict):
    return torch_decoder.ModelConfig.from_dict(raw), jax_decoder.ModelConfig.from_dict(raw)


def raw_config(family: str, **fields) -> dict:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": family, **sizes, **fields}


def parameters(function) -> list[tuple]:
    """Names, kinds and defaults; the types may name the framework."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def flags(module) -> dict:
    return {tuple(a.option_strings) or a.dest: (a.dest, a.default, a.type, a.nargs, a.help) for a in module.parser()._actions}


def test_public_names_are_equal():
    assert torch_decoder.__all__ == jax_decoder.__all__
    for package in (torch_decoder, jax_decoder):
        assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("name", ["ConfigError", "CheckpointError", "CacheOverflowError", "CaptureError", "DeviceError"])
def test_every_error_is_a_decoder_error(name):
    for package in (torch_decoder, jax_decoder):
        assert issubclass(getattr(package, name), package.DecoderError)


@pytest.mark.parametrize("method", METHODS)
def test_decoders_take_the_same_arguments(method):
    ours, theirs = (parameters(getattr(package.Decoder, method)) for package in (torch_decoder, jax_decoder))
    assert ours == theirs


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_described(method):
    for package in (torch_decoder, jax_decoder):
        assert getattr(package.Decoder, method).__doc__


@pytest.mark.parametrize("name", ["Sampling", "Completion", "ModelConfig"])
def test_records_have_the_same_fields(name):
    ours, theirs = ([(f.name, f.type, f.default) for f in dataclasses.fields(getattr(package, name))] for package in (torch_decoder, jax_decoder))
    assert ours == theirs


def test_states_have_the_same_fields():
    ours, theirs = (module.STATE_FIELDS for module in modules("decode"))
    assert ours == theirs


def test_command_lines_take_the_same_flags():
    ours, theirs = (flags(module) for module in modules("__main__"))
    assert ours == theirs
    assert len(ours) > 10


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_equal_field_by_field(family, scaling):
    ours, theirs = configs(raw_config(family, rope_parameters=scaling, eos_token_id=[3, 7], dtype="bfloat16"))
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_tables_are_equal_bit_for_bit(family, scaling):
    ours, theirs = (module.rope_table(config, 600) for module, config in zip(modules("rope"), configs(raw_config(family, rope_parameters=scaling))))
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_name_the_same_tensors(family, tied):
    """One checkpoint serves both: names, order and shapes agree, whatever the packing."""
    torch_config, jax_config = configs(raw_config(family, tie_word_embeddings=tied))
    torch_checkpoint, jax_checkpoint = modules("checkpoint")
    ours = [(name, slot.shape) for name, slot in torch_checkpoint.table(torch_config).items()]
    for packing in ("separate", "stacked"):
        assert ours == [(name, slot.shape) for name, slot in jax_checkpoint.table(jax_config, packing).items()]


BAD = [
    {"model_type": "gpt2"},
    {"hidden_act": "gelu"},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"num_key_value_heads": 3},
    {"eos_token_id": 256},
    {"num_experts": 8},
    {"vocab_size": 0},
]


@pytest.mark.parametrize("change", BAD, ids=lambda c: next(iter(c)))
def test_refusals_read_the_same(change):
    messages = []
    for package in (torch_decoder, jax_decoder):
        with pytest.raises(package.ConfigError) as caught:
            package.ModelConfig.from_dict(raw_config("llama") | change)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


BAD_SETTINGS = [{"dtype": "int4"}, {"max_batch": 0}, {"max_seq_len": 0}, {"launch": "teleport"}, {"buckets": [0]}]


@pytest.mark.parametrize("setting", BAD_SETTINGS, ids=lambda s: next(iter(s)))
def test_bad_settings_are_refused_by_both_and_named(setting, strong):
    for package in (torch_decoder, jax_decoder):
        with pytest.raises(package.ConfigError, match=next(iter(setting))):
            package.Decoder.from_pretrained(strong("llama"), device="cpu", **setting)
