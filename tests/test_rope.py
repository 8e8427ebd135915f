"""Rotary embedding: the frequencies of transformers, applied, and never rounded before the angle."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.helpers import DECODERS, P24, TOLERANCE, copy_of, decoder, edit_config, numpy, reference_logits

both = pytest.mark.parametrize("which", DECODERS)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "llama3": LLAMA3,
    "linear": LINEAR,
    "yarn": YARN,
    "yarn untruncated": {**YARN, "truncate": False},
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention factor": {**YARN, "attention_factor": 0.8},
    "yarn mscale": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7},
}
LONG = [(37 * i + 5) % 256 for i in range(300)]  # past 256 bfloat16 skips integers


def rope_of(which: str):
    return importlib.import_module(f"{DECODERS[which].__name__}.rope")


def config_of(which: str, **fields):
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512}
    return DECODERS[which].ModelConfig.from_dict({"model_type": "llama", **sizes, **fields})


def table_of(which: str, d) -> np.ndarray:
    """Cosines and sines [S, 2, H/2] that a loaded decoder looks positions up in.

    torch keeps both halves of a head, with the sign that the rotation gives to each.
    """
    if which == "jax":
        return numpy(d._runner.programs.parameters()["rope"])
    low, high = np.split(numpy(d.model.rope), 2, axis=-1)
    np.testing.assert_array_equal(low * np.float32([[1], [-1]]), high)
    return high


def scores(which: str, path, tokens: list[int] = P24, **settings) -> np.ndarray:
    with decoder(which, path, **settings) as d:
        return numpy(d.score([tokens]))[0]


@both
def test_llama3_frequencies(which):
    config = config_of(which, rope_parameters=LLAMA3)
    inverse, factor = rope_of(which).inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(inverse[:5], [1, 0.09584, 0.0125, 0.0039528, 0.00125], rtol=1e-4)
    assert factor == 1.0 and inverse.dtype == np.float32


@both
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_equal_transformers(which, name, head_dim):
    config = config_of(which, head_dim=head_dim, rope_parameters=SCALINGS[name])
    theirs = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=512, rope_parameters=dict(SCALINGS[name]))
    expected, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](theirs, torch.device("cpu"))
    inverse, ours = rope_of(which).inverse_frequencies(config.rope, head_dim)
    np.testing.assert_allclose(inverse, expected.numpy(), rtol=2e-6)
    assert ours == pytest.approx(factor, rel=1e-6)


@both
@pytest.mark.parametrize("name", ["llama3", "linear", "yarn", "yarn mscale"])
def test_scaling_reaches_the_logits(which, name, strong, tmp_path):
    """Short prompts look right without it: position 0 is not rotated, and the error grows from there."""
    path = strong("llama", rope_parameters=dict(SCALINGS[name]))
    ours = scores(which, path)
    assert np.abs(ours - reference_logits(path, P24)).max() < TOLERANCE
    apart = np.abs(ours - reference_logits(strong("llama"), P24)).max(axis=1)
    assert apart[0] < TOLERANCE
    assert apart.max() > 1, "the scaling was read and not used"


@both
def test_old_spelling_gives_the_same_logits(which, strong, tmp_path):
    path = copy_of(strong("llama", rope_parameters=dict(LLAMA3)), tmp_path / "old")
    scaling = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items() if k != "rope_theta"}
    edit_config(path, remove=("rope_parameters",), rope_scaling=scaling, rope_theta=10000.0)
    np.testing.assert_array_equal(scores(which, path), scores(which, strong("llama", rope_parameters=dict(LLAMA3))))


@both
def test_table_of_a_bfloat16_model_keeps_its_precision(which, strong):
    """Rounding the finished table costs 0.002; rounding the frequencies first 0.03 at 100 and 0.59 at 4095."""
    inverse = (1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)).astype(np.float32)
    angles = np.arange(4096, dtype=np.float32)[:, None] * inverse
    exact = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    with decoder(which, strong("llama", head_dim=64), dtype="bfloat16", max_batch=1, max_seq_len=4096) as d:
        table = table_of(which, d)
        assert table.shape == (4096, 2, 32)
        assert np.abs(table - exact).max() < 1e-5
        if which == "torch":  # a module can be cast as a whole, its buffers with it
            d.model.to(torch.bfloat16)
            assert np.abs(table_of(which, d) - exact).max() < 0.004


@both
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_positions_past_256_are_told_apart(which, family, strong):
    """bfloat16 has no 257: positions rounded to it give two neighbours the same rotation."""
    path = strong(family)
    ours = scores(which, path, LONG, max_seq_len=320, max_batch=1)
    assert np.abs(ours - reference_logits(path, LONG)).max() < TOLERANCE


@both
def test_bfloat16_error_does_not_grow_with_the_position(which, strong):
    """A rounded position or frequency shows as an error that is small early and large late."""
    path = strong("llama")
    error = np.abs(scores(which, path, LONG, max_seq_len=320, max_batch=1, dtype="bfloat16") - reference_logits(path, LONG)).mean(axis=1)
    assert error.max() > 1e-3, "not computed in bfloat16"
    assert error[256:].mean() < 2 * error[:128].mean()
