"""Models whose reference does not fit: one layer of transformers at a time, and a verdict by stages."""

from __future__ import annotations

import numpy as np
import pytest

from compare import staged, synthetic
from compare.models import open_decoder
from compare.run import Plan, compare
from compare.stages import run_stages, stage_names, step_stages
from compare.workload import VARIANTS, Variant, Workload
from jax_decoder import ConfigError
from tests.helpers import DECODERS
from tests.test_synthetic import TINY

MODEL = TINY.format("qwen3-0.6b")
UNTIED = TINY.format("qwen2.5-7b")


@pytest.fixture(scope="module", params=[MODEL, UNTIED, TINY.format("llama-3.2-1b"), TINY.format("mistral-7b-v0.1")])
def reference(request):
    return request.param, *staged.reference_stages(request.param, "bfloat16", "cpu")


def test_pieces_give_the_stages_of_the_whole(reference):
    model, wanted, theirs = reference
    tokens = staged.tokens_of(256)
    whole = run_stages("transformers", model, tokens, "float32")
    assert set(wanted) == set(whole) and set(theirs) == set(whole)
    for name in whole:
        np.testing.assert_allclose(wanted[name], whole[name], atol=1e-4, err_msg=name)
    inputs = {name: value for name, value in whole.items() if name.endswith(".input")}
    reduced = run_stages("transformers", model, tokens, "bfloat16", inputs)
    # Whole layers are fed as a whole here, and in parts there.
    assert all(np.abs(theirs[name] - reduced[name]).max() <= (0.05 if "." in name else 0.02) * np.abs(reduced[name]).max() + 1e-3 for name in reduced)


@pytest.mark.parametrize("which", DECODERS)
def test_steps_of_both_decoders_pass(which, reference):
    model, wanted, theirs = reference
    with open_decoder(model, which, dtype="bfloat16", device="cpu", max_batch=1, max_seq_len=64) as decoder:
        verdict = staged.judge_stages(decoder, which, wanted, theirs)
        assert verdict.verdict == "pass" and verdict.reference == staged.REFERENCE, verdict.reason
        # The hooks are gone: a step is as quick, and as free, as before.
        if which == "torch":
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.model.modules())


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("tensor", ["layers.1.self_attn.q_norm.weight", "layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_a_wrong_tensor_fails_and_is_named(which, tensor, monkeypatch):
    wanted, theirs = staged.reference_stages(MODEL, "bfloat16", "cpu")
    original, ones = synthetic.law_of, synthetic.Law(0, 2.0**24, 2.0**-24)
    monkeypatch.setattr(synthetic, "law_of", lambda name, *rest: ones if name.endswith(tensor) else original(name, *rest))
    with open_decoder(MODEL, which, dtype="bfloat16", device="cpu", max_batch=1, max_seq_len=64) as decoder:
        verdict = staged.judge_stages(decoder, which, wanted, theirs)
    stage = {"q_norm": "layers.1.self_attn", "down_proj": "layers.0.mlp", "model.norm": "norm"}[next(k for k in ("q_norm", "down_proj", "model.norm") if k in tensor)]
    assert verdict.verdict == "fail" and f"first to fail: {stage}" in verdict.reason


@pytest.mark.parametrize("which", DECODERS)
def test_a_step_at_a_wrong_position_fails(which):
    """Steps, not a pass: each token's own position and slot count."""
    wanted, _ = staged.reference_stages(MODEL, "bfloat16", "cpu")
    inputs = {name: value for name, value in wanted.items() if name.endswith(".input")}
    tokens = staged.tokens_of(256)
    with open_decoder(MODEL, which, dtype="bfloat16", device="cpu", max_batch=1, max_seq_len=64) as decoder:
        found = step_stages(decoder, which, tokens, inputs)
        late = step_stages(decoder, which, tokens[1:], {name: value[1:] for name, value in inputs.items()})
    name = "layers.1.self_attn"
    assert np.abs(found[name][1:] - late[name]).max() > 10 * np.abs(found[name] - wanted[name]).max()
    assert set(stage_names(2)) <= set(found) and found[name].shape == wanted[name].shape


def test_a_run_of_such_a_model_is_judged_by_stages(monkeypatch):
    monkeypatch.setattr("compare.run.too_large", lambda *arguments: True)
    variants = [v for v in VARIANTS if v in (Variant("transformers", "eager"), Variant("torch", "eager"), Variant("torch", "eager", "compiled"), Variant("jax", "jit"))]
    result = compare(Workload(MODEL, "bfloat16", new_tokens=8, max_seq_len=32), variants, Plan(rounds=2, repeats=1))
    found = {Variant(v["framework"], v["launch"], v["kernels"]): v for v in result["variants"]}
    for variant in (Variant("torch", "eager"), Variant("jax", "jit")):
        assert found[variant]["parity"]["verdict"] == "pass" and found[variant]["parity"]["reference"] == staged.REFERENCE, found[variant]
        assert found[variant]["step_ms"]["p50"] > 0
    assert "stage by stage" in found[variants[0]]["not_measured"] and "plain kernels alone" in found[variants[2]]["not_measured"]


def test_only_shapes_that_do_not_fit_are_judged_so():
    assert staged.too_large("shape:llama-3.1-70b", 282e9, 150_000_000_000) and not staged.too_large("shape:llama-3.1-8b", 32e9, 150_000_000_000)
    assert not staged.too_large("models/real", 282e9, 1)


def test_a_window_shorter_than_the_row_is_refused():
    with pytest.raises(ConfigError, match="sliding window of 8"):
        staged.reference_stages(TINY.format("mistral-7b-v0.1") + ",sliding_window=8", "bfloat16", "cpu")
