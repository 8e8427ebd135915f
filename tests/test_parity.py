"""The verdicts: noise passes, and every planted fault turns them to fail.

The faults are those that a whole-model KL alone would hide: a norm left out, a position off by
one, a cache slot or a stretch of the cache not read, one tile of a product missing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compare.ladder import climb, default_tokens
from compare.parity import Reference, kl, kl_ratio
from compare.stages import stage_names, suspects
from tests.helpers import DECODERS, P24, copy_of, decoder, edit_tensors, numpy, reference_logits

LONG = 2000  # tokens; a stretch of this many is where split attention goes wrong


def noisy(reference: np.ndarray, scale: float, seed: int = 0) -> np.ndarray:
    return (reference + scale * np.random.default_rng(seed).standard_normal(reference.shape)).astype(np.float32)


def verdict_of(ours, reference, dtype, theirs=None):
    return Reference(reference, theirs).judge(ours, dtype)


@pytest.fixture(scope="module")
def reference():
    return np.random.default_rng(7).standard_normal((2048, 128)).astype(np.float32) * 3


def test_float32_verdict_passes_noise_and_fails_beyond_the_bar(reference):
    assert verdict_of(noisy(reference, 1e-5), reference, "float32").verdict == "pass"
    broken = reference.copy()
    broken[1000, 5] += 2e-3
    verdict = verdict_of(broken, reference, "float32")
    assert verdict.verdict == "fail" and verdict.max_abs == pytest.approx(2e-3, rel=1e-2)


def test_logits_that_are_not_finite_fail(reference):
    broken = reference.copy()
    broken[3, 4] = np.nan
    assert verdict_of(broken, reference, "float32").verdict == "fail"


def test_another_greedy_token_is_named_unless_it_is_a_tie_within_the_noise(reference):
    swapped = reference.copy()
    top = swapped[17].argmax()
    swapped[17, [top, (top + 1) % 128]] = swapped[17, [(top + 1) % 128, top]]
    assert verdict_of(swapped, swapped, "float32").first_divergence is None
    tied = np.zeros((4, 8), np.float32)
    tied[:, 3] = 1e-6
    other = np.zeros_like(tied)
    other[:, 2] = 1e-6
    assert verdict_of(other, tied, "float32").verdict == "pass"


def test_reduced_precision_is_judged_against_transformers_own_error(reference):
    theirs = noisy(reference, 0.05, seed=1)
    assert verdict_of(noisy(reference, 0.05, seed=2), reference, "bfloat16", theirs).verdict == "pass"
    for scale, name in ((0.06, "kl_ratio"), (0.08, "tail_ratio")):
        verdict = verdict_of(noisy(reference, scale, seed=2), reference, "bfloat16", theirs)
        assert verdict.verdict == "fail" and getattr(verdict, name) > 1.1


def test_few_positions_are_said_to_be_few(reference):
    verdict = verdict_of(noisy(reference[:64], 0.05), reference[:64], "bfloat16", noisy(reference[:64], 0.05, 3))
    assert "64 positions" in verdict.reason


def test_kl_is_zero_for_equal_logits_and_shifts_do_not_matter(reference):
    assert np.abs(kl(reference, reference + 5)).max() < 1e-9
    ratio, upper = kl_ratio(kl(reference, noisy(reference, 0.1)), kl(reference, noisy(reference, 0.1, 4)))
    assert 0.9 < ratio < 1.1 and upper > ratio


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_stage_agrees(family, dtype, which, strong):
    rungs = climb(strong(family), which, dtype)
    assert [r.stage for r in rungs] == stage_names(3) + (["logits"] if dtype == "float32" else [])
    assert [r for r in rungs if not r.passed] == []


@pytest.mark.parametrize("which", DECODERS)
def test_every_stage_agrees_at_28_layers(which, strong):
    rungs = climb(strong("qwen3", num_hidden_layers=28, max_window_layers=28), which)
    assert len(rungs) == 3 * 28 + 3 + 1
    assert [r for r in rungs if not r.passed] == []


def ones_for_q_norm(tensors):
    tensors["model.layers.1.self_attn.q_norm.weight"].fill_(1.0)


def zero_tile(tensors):
    tensors["model.layers.1.self_attn.o_proj.weight"][:, :16] = 0.0


def zero_mlp_tile(tensors):
    tensors["model.layers.1.mlp.down_proj.weight"][:, 16:32] = 0.0


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "stage"), [(ones_for_q_norm, "layers.1.self_attn"), (zero_tile, "layers.1.self_attn"), (zero_mlp_tile, "layers.1.mlp")], ids=lambda x: getattr(x, "__name__", x)
)
def test_a_fault_in_one_weight_fails_at_its_stage(fault, stage, dtype, which, strong, tmp_path):
    """The first rung that fails is the faulty stage, and the message names its tensors."""
    damaged = copy_of(strong("qwen3"), tmp_path / "damaged")
    edit_tensors(damaged, fault)
    first = next(r for r in climb(damaged, which, dtype, reference=str(strong("qwen3"))) if not r.passed)
    assert first.stage == stage and stage in first.suspect


def hide(package: str, monkeypatch, hidden) -> None:
    """Make attention blind to the slots for which ``hidden(slots, query positions)`` is true."""
    if package == "torch_decoder":
        import torch_decoder.kernels.plain as module

        sees = module.seen

        def seen(positions, cache, windows, first):
            blind = hidden(torch.arange(cache.shape[3]), positions[:, None, :, None])
            return {w: s._replace(mask=s.mask.masked_fill(blind, float("-inf"))) for w, s in sees(positions, cache, windows, first).items()}

        monkeypatch.setattr(module, "seen", seen)
        return
    import jax.numpy as jnp

    from jax_decoder.model import Model

    original = Model._masks

    def masks(self, positions, slots):
        blind = hidden(jnp.arange(slots), positions[..., None])
        return {w: mask & ~blind for w, mask in original(self, positions, slots).items()}

    monkeypatch.setattr(Model, "_masks", masks)


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dropped_newest_slot_fails(dtype, which, strong, monkeypatch):
    hide(f"{which}_decoder", monkeypatch, lambda slots, query: (slots == query) & (query > 0))
    assert not all(r.passed for r in climb(strong("llama"), which, dtype))


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_dropped_stretch_of_the_cache_fails_at_length_2000(dtype, which, strong, monkeypatch):
    path = strong("llama", max_position_embeddings=2048)
    tokens = (default_tokens(256) * (LONG // 48 + 1))[:LONG]
    hide(f"{which}_decoder", monkeypatch, lambda slots, query: (slots >= 512) & (slots < 640) & (query >= 640))
    assert not all(r.passed for r in climb(path, which, dtype, tokens=tokens))


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_one_position_late_fail(dtype, which, strong, monkeypatch):
    """Keys and queries shifted alike would change nothing, so only the queries are."""
    module = __import__(f"{which}_decoder.kernels.plain", fromlist=["apply_rope"])
    original, calls = module.apply_rope, []

    def late_torch(x, rope, out):
        """Queries and keys come in one call, the queries first."""
        keys = x[:, :, 4:].clone()
        original(x[:, :, :4], torch.roll(rope, -1, 1), out=out[:, :, :4])
        original(keys, rope, out=out[:, :, 4:])

    def late_jax(x, rope):
        """Keys come first, queries in the next call."""
        calls.append(1)
        return original(x, rope if len(calls) % 2 else __import__("jax").numpy.roll(rope, -1, 1))

    late = {"torch": late_torch, "jax": late_jax}[which]
    monkeypatch.setattr(module, "apply_rope", late)
    assert not all(r.passed for r in climb(strong("llama"), which, dtype))


@pytest.mark.parametrize("which", DECODERS)
def test_faults_also_fail_the_verdict_on_decode_steps(which, strong, tmp_path):
    """The comparison judges logits of steps: they too must notice one norm left out."""
    damaged = copy_of(strong("qwen3"), tmp_path / "damaged")
    edit_tensors(damaged, ones_for_q_norm)
    wanted = reference_logits(strong("qwen3"), P24)[3:]
    for path, expected in ((strong("qwen3"), "pass"), (damaged, "fail")):
        with decoder(which, path, max_batch=1) as d:
            handle = d.prefill([P24[:4]], forced=[P24[4:]])
            logits = [numpy(handle.logits)[0].copy()]
            for _ in P24[4:]:
                handle = d.decode_step(handle)
                logits.append(numpy(handle.logits)[0].copy())
        assert verdict_of(np.stack(logits), wanted, "float32").verdict == expected


def test_suspects_name_tensors_of_every_stage():
    for stage in stage_names(2):
        assert "model." in suspects(stage) or "lm_head" in suspects(stage)
