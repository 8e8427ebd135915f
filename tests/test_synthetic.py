"""Random weights at published shapes: the same bits everywhere, strong, and opened by every framework."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from compare import synthetic
from compare.ladder import climb
from compare.models import model_config, open_decoder, open_transformers
from compare.shapes import SHAPES, config_dict
from jax_decoder import ConfigError
from tests.helpers import DECODERS, P24, TOLERANCE, numpy

TINY = "shape:{},num_hidden_layers=2,hidden_size=64,intermediate_size=96,num_attention_heads=4,num_key_value_heads=2,head_dim=32,vocab_size=256"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["model.layers.3.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias"])
def test_both_frameworks_make_the_same_bits(name, dtype):
    shape = (96,) if "norm" in name or "bias" in name else (48, 96)
    law = synthetic.law_of(name, shape, tied=True)
    ours = synthetic.torch_tensor(law, shape, getattr(torch, dtype), "cpu")
    theirs = np.asarray(synthetic.jax_array(law, shape, getattr(jnp, dtype)))
    assert ours.view(torch.uint8).numpy().tobytes() == theirs.tobytes()


def test_large_tensors_are_made_in_pieces_without_a_seam(monkeypatch):
    law = synthetic.law_of("model.layers.0.mlp.up_proj.weight", (64, 32), tied=True)
    whole = synthetic.torch_tensor(law, (64, 32), torch.float32, "cpu")
    monkeypatch.setattr(synthetic, "_CHUNK", 100)
    assert torch.equal(synthetic.torch_tensor(law, (64, 32), torch.float32, "cpu"), whole)


def test_values_are_spread_as_meant_and_differ_between_tensors():
    """A poor hash shows as correlated rows, repeated values or a lopsided distribution."""
    laws = [synthetic.law_of(f"model.layers.{i}.mlp.up_proj.weight", (512, 512), tied=False) for i in (0, 1)]
    first, second = (synthetic.torch_tensor(law, (512, 512), torch.float32, "cpu").double() for law in laws)
    assert abs(first.mean()) < 3 * first.std() / 512 and first.std() == pytest.approx(512**-0.5, rel=0.01)
    for other in (second, first.roll(1, 0), first.roll(1, 1), first.T):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]) < 0.01
    assert len(first.unique()) > 0.98 * first.numel()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_config_of_both_decoders(shape):
    ours, theirs = (model_config(f"shape:{shape}", which) for which in DECODERS)
    assert ours.vocab_size == theirs.vocab_size and ours.sliding_windows == theirs.sliding_windows


# Parameters in billions as published; what rounds to another figure would be another model.
@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen3-0.6b", 0.596),
        ("llama-3.2-1b", 1.236),
        ("qwen2.5-7b", 7.616),
        ("mistral-7b-v0.1", 7.242),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
    ],
)
def test_shapes_have_the_published_number_of_parameters(shape, billions):
    from torch_decoder.budget import weight_count

    assert weight_count(model_config(f"shape:{shape}")) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.2-1b", "qwen2.5-7b", "mistral-7b-v0.1"])
def test_both_decoders_equal_transformers(shape):
    model = TINY.format(shape)
    with torch.no_grad():
        wanted = open_transformers(model, "float32")(torch.tensor([P24])).logits[0].numpy()
    assert 1 < wanted.std() < 10, "logits should spread as a trained model's"
    for which in DECODERS:
        with open_decoder(model, which, dtype="float32", device="cpu", max_batch=1, max_seq_len=32) as made:
            assert np.abs(numpy(made.score([P24]))[0] - wanted).max() < TOLERANCE


@pytest.mark.parametrize("which", DECODERS)
def test_a_forgotten_norm_fails_the_ladder(which, monkeypatch):
    """Strong enough: one head norm left at one must not pass."""
    model, original = TINY.format("qwen3-0.6b"), synthetic.law_of
    assert all(rung.passed for rung in climb(model, which, "bfloat16"))
    import compare.stages as stages

    def damaged(name, framework, **options):
        ones = synthetic.Law(0, 2.0**24, 2.0**-24)  # what is added drowns the random part
        monkeypatch.setattr(synthetic, "law_of", lambda n, *rest: ones if n.endswith("layers.1.self_attn.q_norm.weight") else original(n, *rest))
        try:
            return open_decoder(name, framework, **options)
        finally:
            monkeypatch.setattr(synthetic, "law_of", original)

    monkeypatch.setattr(stages, "open_decoder", damaged)
    first = next(rung for rung in climb(model, which, "bfloat16") if not rung.passed)
    assert first.stage == "layers.1.self_attn"


@pytest.mark.parametrize("model", ["shape:gpt-9", "shape:qwen3-0.6b,layers=2", "shape:qwen3-0.6b,num_hidden_layers=", "shape:qwen3-0.6b,num_hidden_layers=two"])
def test_a_shape_that_does_not_exist_is_an_error(model):
    with pytest.raises(ConfigError, match=r"expected"):
        config_dict(model)
