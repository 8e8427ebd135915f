"""config.json is read as transformers reads it, or refused with the field's name."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from transformers import AutoConfig

from tests.helpers import DECODERS, FAMILIES, P24, TOLERANCE, copy_of, decoder, edit_config, numpy, reference_greedy, reference_logits

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
both = pytest.mark.parametrize("which", DECODERS)


def minimal(family: str, **changes) -> dict:
    """The fields that have no sensible default, and nothing else."""
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 32}
    return {"model_type": family, **sizes, **changes}


def read(which: str, raw: dict):
    return DECODERS[which].ModelConfig.from_dict(raw)


def scores(which: str, path) -> np.ndarray:
    with decoder(which, path) as d:
        return numpy(d.score([P24]))[0]


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_mean_what_transformers_means(which, family):
    """An absent field stands for the class's default, not for another family's."""
    ours, theirs = read(which, minimal(family)), AutoConfig.for_model(**minimal(family))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] == 10000.0
    assert ours.qkv_bias == (family == "qwen2")
    assert ours.qk_norm == (family == "qwen3")


@both
def test_a_given_head_dim_is_not_derived(which):
    config = read(which, minimal("qwen3", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32))
    assert (config.head_dim, config.num_heads * config.head_dim) == (32, 128)


@both
def test_config_is_frozen(which):
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(which, minimal("qwen3")).hidden_size = 1


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_theta_is_found_in_both_places(which, family):
    """Older files keep theta at the top level, newer ones inside rope_parameters."""
    new = read(which, minimal(family, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}))
    old = read(which, minimal(family, rope_theta=500000.0))
    odd = read(which, minimal(family, rope_theta=500000.0, rope_scaling=None))
    assert new.rope == old.rope == odd.rope
    assert new.rope.theta == 500000.0


@both
def test_theta_may_be_an_integer(which):
    """JSON writers drop the '.0': both spellings are common."""
    assert read(which, minimal("llama", rope_theta=500000)).rope == read(which, minimal("llama", rope_theta=500000.0)).rope


@both
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_and_new_spelling_of_scaling_agree(which, key):
    new = read(which, minimal("llama", rope_parameters={**LLAMA3, "rope_theta": 20000.0}))
    scaling = {key if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    assert read(which, minimal("llama", rope_scaling=scaling, rope_theta=20000.0)).rope == new.rope
    assert (new.rope.rope_type, new.rope.factor, new.rope.original_max_position_embeddings) == ("llama3", 8.0, 32)


WINDOWS = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4, 4)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4, 4)),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}, (None, None, None)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, (4, 4, 4)),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, (None, None, None)),
    ("qwen3", {"sliding_window": 4, "max_window_layers": 0}, (None, None, None)),
    ("mistral", {"sliding_window": 4}, (4, 4, 4)),
    ("mistral", {"sliding_window": None}, (None, None, None)),
    ("mistral", {}, (4096, 4096, 4096)),
    ("llama", {}, (None, None, None)),
]


@both
@pytest.mark.parametrize(("family", "fields", "expected"), WINDOWS)
def test_windows_lie_on_the_right_layers(which, family, fields, expected):
    assert read(which, minimal(family, **fields)).sliding_windows == expected


@both
@pytest.mark.parametrize(("family", "fields", "expected"), WINDOWS[:6])
def test_layer_types_that_transformers_writes_change_nothing(which, family, fields, expected):
    layer_types = AutoConfig.for_model(**minimal(family, **fields)).layer_types
    assert read(which, minimal(family, **fields, layer_types=layer_types)).sliding_windows == expected


@both
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("listed", [True, False], ids=["layer_types", "no layer_types"])
def test_window_covers_the_late_layers(which, family, listed, strong, tmp_path):
    """max_window_layers counts the layers WITHOUT a window, from the first one on."""
    full = strong(family)
    path = copy_of(strong(family, use_sliding_window=True, sliding_window=4, max_window_layers=1), tmp_path / "m")
    if not listed:
        edit_config(path, remove=("layer_types",))
    ours = scores(which, path)
    assert np.abs(ours - reference_logits(path, P24)).max() < TOLERANCE
    apart = np.abs(ours - reference_logits(full, P24)).max(axis=1)
    assert apart[:4].max() < TOLERANCE, "a query sees no more than the window's 4 slots before row 4"
    assert apart[4:].min() > 0.5, "from row 4 on the window hides something"


@both
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_window_on_no_layer_is_full_attention(which, family, strong):
    path = strong(family, use_sliding_window=True, sliding_window=4, max_window_layers=3)
    assert np.abs(scores(which, path) - reference_logits(strong(family), P24)).max() < TOLERANCE


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_theta_reaches_the_logits_from_both_places(which, family, strong, tmp_path):
    new = copy_of(strong(family), tmp_path / "new")
    edit_config(new, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    old = copy_of(new, tmp_path / "old")
    edit_config(old, remove=("rope_parameters",), rope_theta=500000.0)
    ours = scores(which, new)
    np.testing.assert_array_equal(ours, scores(which, old))
    assert np.abs(ours - reference_logits(new, P24)).max() < TOLERANCE
    apart = np.abs(ours - reference_logits(strong(family), P24)).max(axis=1)
    assert apart[0] < TOLERANCE, "position 0 is not rotated"
    assert apart.max() > 1, "theta was not used"


GOOD_ROPE = {**LLAMA3, "rope_theta": 10000.0}
REFUSED = [
    ("model_type", {"model_type": "gpt2"}),
    ("model_type", {"model_type": None}),
    ("model_type", {"model_type": ["llama"]}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("hidden_act", {"hidden_act": None}),
    ("vocab_size", {"vocab_size": None}),
    ("vocab_size", {"vocab_size": 0}),
    ("hidden_size", {"hidden_size": 64.5}),
    ("hidden_size", {"hidden_size": "64"}),
    ("num_hidden_layers", {"num_hidden_layers": True}),
    ("num_hidden_layers", {"num_hidden_layers": -1}),
    ("intermediate_size", {"intermediate_size": None}),
    ("hidden_size", {"hidden_size": 250}),
    ("head_dim", {"head_dim": 7}),
    ("head_dim", {"head_dim": 0}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("num_key_value_heads", {"num_key_value_heads": 64}),
    ("rms_norm_eps", {"rms_norm_eps": 0}),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("rms_norm_eps", {"rms_norm_eps": "1e-6"}),
    ("tie_word_embeddings", {"tie_word_embeddings": "false"}),
    ("attention_bias", {"attention_bias": 1}),
    ("dtype", {"dtype": "float8_e4m3fn"}),
    ("dtype", {"torch_dtype": "int8"}),
    ("eos_token_id", {"eos_token_id": 256}),
    ("eos_token_id", {"eos_token_id": [3, -1]}),
    ("eos_token_id", {"eos_token_id": "2"}),
    ("quantization_config", {"quantization_config": {"bits": 4}}),
    ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    ("num_experts", {"num_experts": 8}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("rope_theta", {"rope_theta": 0}),
    ("rope_theta", {"rope_theta": "1e4"}),
    ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}),
    ("rope_scaling", {"rope_scaling": "linear"}),
    ("rope_type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("rope_type", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}),
    ("rope_type", {"rope_parameters": {"rope_type": "su", "factor": 2.0}}),
    ("rope_type", {"rope_parameters": {"rope_type": ["linear"], "factor": 2.0}}),
    ("factor", {"rope_parameters": {"rope_type": "linear"}}),
    ("factor", {"rope_parameters": {**GOOD_ROPE, "factor": "8"}}),
    ("low_freq_factor", {"rope_parameters": {**GOOD_ROPE, "low_freq_factor": None}}),
    ("high_freq_factor", {"rope_parameters": {**GOOD_ROPE, "high_freq_factor": 1.0}}),
    ("original_max_position_embeddings", {"rope_parameters": {**GOOD_ROPE, "original_max_position_embeddings": 0}}),
    ("short_factor", {"rope_parameters": {**GOOD_ROPE, "short_factor": [1.0]}}),
    ("beta_fast", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "fast"}}),
    ("attention_factor", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": "one"}}),
    ("mscale", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": [1.0], "mscale_all_dim": 1.0}}),
    ("sliding_window", {"sliding_window": 4}),
    ("layer_types", {"layer_types": ["full_attention"]}),
    ("layer_types", {"layer_types": ["full_attention", "full_attention", "chunked_attention"]}),
    ("layer_types", {"layer_types": [["full_attention"]] * 3}),
]


@both
@pytest.mark.parametrize(("field", "changes"), REFUSED, ids=[f"{i}-{name}" for i, (name, _) in enumerate(REFUSED)])
def test_a_field_that_would_be_guessed_is_an_error(which, field, changes):
    """A decoder that ignores such a field gives fluent text and wrong numbers."""
    raw = {name: value for name, value in minimal("llama", **changes).items() if value is not None or name in ("model_type", "hidden_act")}
    with pytest.raises(DECODERS[which].ConfigError, match=field):
        read(which, raw)


REFUSED_ELSEWHERE = [
    ("mlp_bias", "qwen2", {"mlp_bias": True}),
    ("mlp_bias", "qwen3", {"mlp_bias": True}),
    ("attention_bias", "mistral", {"attention_bias": True}),
    ("attention_bias", "qwen2", {"attention_bias": True}),
    ("sliding_window", "mistral", {"sliding_window": 0}),
    ("sliding_window", "mistral", {"sliding_window": "4096"}),
    ("sliding_window", "qwen2", {"use_sliding_window": True, "sliding_window": -4}),
    ("sliding_window", "qwen3", {"layer_types": ["sliding_attention"] * 3}),
    ("max_window_layers", "qwen2", {"use_sliding_window": True, "max_window_layers": "1"}),
    ("use_sliding_window", "qwen2", {"use_sliding_window": "yes"}),
    ("layer_types", "mistral", {"layer_types": ["full_attention"] * 3}),
]


@both
@pytest.mark.parametrize(("field", "family", "changes"), REFUSED_ELSEWHERE)
def test_a_field_that_this_family_does_not_have_is_an_error(which, field, family, changes):
    with pytest.raises(DECODERS[which].ConfigError, match=field):
        read(which, minimal(family, **changes))


@both
def test_fields_without_effect_are_accepted(which):
    plain = read(which, minimal("llama"))
    noise = {"architectures": ["X"], "use_cache": True, "_name_or_path": "x", "unknown_switch": False, "unknown_list": [], "attention_dropout": 0.1}
    assert read(which, minimal("llama", **noise)) == plain


@both
@pytest.mark.parametrize("field", ["dynamic", "surprise", "gelu"])
def test_from_pretrained_refuses_before_it_reads_weights(which, field, strong, tmp_path):
    """The same errors come through the entry point that callers use, with the file's name."""
    changes = {"dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "surprise": {"surprise": 3}, "gelu": {"hidden_act": "gelu"}}[field]
    path = copy_of(strong("llama"), tmp_path / "m")
    edit_config(path, **changes)
    (path / "model.safetensors").unlink()
    with pytest.raises(DECODERS[which].ConfigError, match=field) as caught:
        decoder(which, path)
    assert str(path / "config.json") in str(caught.value)


STOPS = {
    "list in generation_config": (None, [72, 123]),
    "integer in generation_config": (None, 123),
    "list in config": ([72, 123], None),
    "integer in config": (123, None),
    "generation_config wins": (7, [123, 72]),
    "a silent generation_config": ([123], "absent"),
}


@both
@pytest.mark.parametrize("case", STOPS)
def test_stop_ids_may_be_one_or_many(which, case, strong, tmp_path):
    """Code that takes one integer crashes on a list, or runs on to the length limit."""
    in_config, in_generation = STOPS[case]
    assert reference_greedy(strong("qwen2"), P24[:4], 6) == [7, 136, 123, 32, 164, 72]
    path = copy_of(strong("qwen2"), tmp_path / "m")
    edit_config(path, eos_token_id=in_config)
    file = path / "generation_config.json"
    if in_generation is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(json.dumps({} if in_generation == "absent" else {"eos_token_id": in_generation}))
    with decoder(which, path) as d:
        row = d.generate([P24[:4]], max_new_tokens=6)[0]
    assert (row.token_ids, row.finish_reason) == ([7, 136, 123], "stop")


@both
@pytest.mark.parametrize("bad", [[3, 256], "2", [1.5], True])
def test_bad_stop_ids_name_the_file(which, bad, strong, tmp_path):
    path = copy_of(strong("qwen2"), tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(DECODERS[which].ConfigError, match=r"generation_config\.json.*eos_token_id"):
        decoder(which, path)
