"""Fused kernels against the plain ones, in Triton's interpreter on a CPU and as compiled on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.helpers import FAMILIES, P24, ROOT, decoder, forced_steps
from torch_decoder import ConfigError, Decoder, DeviceError
from torch_decoder.decode import FAILED, IDLE, LENGTH, RUNNING, STOPPED, DecodeState, _advance
from torch_decoder.kernels import plain, why_not_fused

triton = pytest.importorskip("triton")

from torch_decoder.kernels import advance, attention, products, tiles  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the largest result: float32 sums in another order; half precision rounds its inputs alike, its results once more.
BAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, least: float | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(*shape, generator=generator) if least is None else least + torch.rand(*shape, generator=generator)
    return values.to(DEVICE, dtype)


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (ours.float() - expected).abs().max() / expected.abs().max()
    assert error <= BAR[dtype], f"relative error {error:.2e}"


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize(("rows", "inner"), [(96, 64), (50, 72), (7, 1032)], ids=str)
def test_products_equal_the_plain_ones(rows, inner, batch, dtype):
    """Rows and columns that fill no tile; with and without bias."""
    x, norm, bias = random(batch, inner, dtype=dtype), random(inner, dtype=dtype, least=0.5), random(2 * rows, dtype=dtype)
    weight, residual = random(2 * rows, inner, dtype=dtype, seed=1) * inner**-0.5, random(batch, rows, dtype=dtype, seed=2)
    wide, half = weight.float(), weight[:rows].contiguous()
    normed = plain.rms_norm(x.float(), norm.float(), 1e-5)
    close(products.norm_linear(x, norm, 1e-5, half, bias[:rows], torch.float32), normed @ wide[:rows].T + bias[:rows].float(), dtype)
    for given in (None, bias):
        expected = plain.gated_silu(normed @ wide.T + (0 if given is None else given.float()))
        close(products.norm_gated_silu(x, norm, 1e-5, weight, given), expected, dtype)
    close(products.linear_add(x, half, None, residual), residual.float() + x.float() @ wide[:rows].T, dtype)
    out = torch.full((batch, rows), float("nan"), device=DEVICE)
    close(products.norm_logits(x, norm, 1e-5, half, out), normed @ wide[:rows].T, dtype)


def test_large_activations_do_not_overflow_float16():
    """Before they are normalised, rows of a real model reach thousands."""
    x, norm, weight = random(2, 64, dtype=torch.float16) * 2000, random(64, dtype=torch.float16, least=20.0), random(32, 64, dtype=torch.float16)
    expected = plain.rms_norm(x.float(), norm.float(), 1e-5) @ weight.float().T
    close(products.norm_linear(x, norm, 1e-5, weight, None, torch.float32), expected, torch.float16)


def test_a_tile_covers_every_shape():
    for rows, inner, batch in ((1, 8, 1), (151936, 1024, 1), (4096, 14336, 1), (5, 24, 16), (28672, 4096, 8)):
        tile = tiles.tile_for(rows, inner, batch, False)
        assert all(n & (n - 1) == 0 for n in tile) and (batch == 1 or min(tile[:2]) >= tiles.MIN_DOT)


def test_spans_and_early_starts_come_from_the_table(monkeypatch):
    monkeypatch.setattr(tiles, "_measured", lambda: {"attend 128": [64, 32, 2], "early 1024": [2], "early 4096": [0]})
    assert tiles.span_for(128) == tiles.Span(64, 32, 2) and tiles.span_for(64) == tiles.Span(256, 64, 4)
    assert tiles.span_for(128, itemsize=4) == tiles.Span(256, 16, 4), "measured for numbers of two bytes"
    assert [tiles.starts_early(width) for width in (1024, 4096, 2048)] == [2, 0, 0]


def test_measured_tiles_are_for_numbers_of_two_bytes(monkeypatch):
    """A tile of twice the bytes may not fit."""
    monkeypatch.setattr(tiles, "_measured", lambda: {"64x128": [16, 128, 8]})
    assert tiles.tile_for(64, 128, 1, False) == tiles.Tile(16, 128, 8) != tiles.tile_for(64, 128, 1, False, itemsize=4)


# ---- attention ---------------------------------------------------------------------------------


def rope_table(slots: int, width: int) -> torch.Tensor:
    angles = torch.arange(slots)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(DEVICE)


def expected_attention(heads, norms, rope, positions, k_cache, v_cache, window, num_heads):
    """Row by row over the valid slots alone: float32 [B, N * H], and the new keys and values [B, K, H]."""
    batch, kv_heads, _, width = k_cache.shape
    q, k, v = heads.view(batch, 1, -1, width).split([num_heads, kv_heads, kv_heads], 2)
    if norms is not None:
        q, k = plain.rms_norm(q, norms[0].float(), norms[2]), plain.rms_norm(k, norms[1].float(), norms[2])
    turns = plain.turns(rope[positions.long()][:, None])
    q, k = q.clone(), k.clone()
    for x in (q, k):
        plain.apply_rope(x, turns, out=x)
    q, k = (x.to(k_cache.dtype)[:, 0] for x in (q, k))
    v = v[:, 0].to(k_cache.dtype)
    out = []
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = (torch.cat([old[row, :, :position], new[row][:, None]], 1)[:, first:].float() for old, new in ((k_cache, k), (v_cache, v)))
        scores = torch.einsum("kgh,ksh->kgs", q[row].view(kv_heads, -1, width).float(), keys) * width**-0.5
        out.append(torch.einsum("kgs,ksh->kgh", scores.softmax(-1), values).flatten())
    return torch.stack(out), k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 20])
@pytest.mark.parametrize(("num_heads", "kv_heads", "width", "normed"), [(4, 2, 16, True), (6, 2, 24, False), (3, 3, 8, True)])
def test_attention_over_poisoned_caches(num_heads, kv_heads, width, normed, window, dtype, monkeypatch):
    """One valid position, the last slot, several splits: slots outside hold NaN, and nothing but one slot is written."""
    monkeypatch.setattr(attention, "span_for", lambda *_: tiles.Span(48, 16, 4))  # three blocks: the last row has two splits and loops in both
    slots, positions = 70, torch.tensor([0, 43, 69], dtype=torch.int32, device=DEVICE)
    k_cache = torch.full((3, kv_heads, slots, width), float("nan"), dtype=dtype, device=DEVICE)
    v_cache = k_cache.clone()
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        for cache, seed in ((k_cache, 3), (v_cache, 4)):
            cache[row, :, first:position] = random(kv_heads, position - first, width, dtype=dtype, seed=seed)
    heads = random(3, (num_heads + 2 * kv_heads) * width)
    norms = (random(width, dtype=dtype, least=0.5), random(width, dtype=dtype, least=0.5, seed=1), 1e-6) if normed else None
    rope, finished = rope_table(slots, width), torch.zeros(3 * kv_heads, dtype=torch.int32, device=DEVICE)
    expected, k, v = expected_attention(heads, norms, rope, positions, k_cache, v_cache, window, num_heads)
    ours_k, ours_v = k_cache.clone(), v_cache.clone()
    out = attention.attend(heads, norms, rope, positions, ours_k, ours_v, window, finished)
    close(out, expected, dtype)
    assert (finished == 0).all(), "the next step would count from here"
    for ours, old, new in ((ours_k, k_cache, k), (ours_v, v_cache, v)):
        for row, position in enumerate(positions.tolist()):
            close(ours[row, :, position], new[row].float(), dtype)
            ours[row, :, position] = old[row, :, position]
        assert ours.cpu().view(torch.uint8).equal(old.cpu().view(torch.uint8))


# ---- the end of a step -------------------------------------------------------------------------


def make_state(vocabulary: int, seed: int, slots: int = 12) -> DecodeState:
    """Rows that run on, stop at a token, reach their limit, are idle, hold NaN, infinity and ties, and are forced."""
    rows = 9
    logits = random(rows, vocabulary, seed=seed) * 3
    integers = {"dtype": torch.int32, "device": DEVICE}
    forced, stop_ids = torch.full((rows, slots + 1), -1, **integers), torch.full((rows, 16), -1, **integers)
    positions = torch.arange(rows, **integers) + 1
    limits = torch.full((rows,), slots, **integers)
    stop_ids[1, 5] = int(logits[1].argmax())
    limits[2] = positions[2] + 1
    logits[4, 3], logits[5, 2] = float("nan"), float("inf")
    logits[6, [7, vocabulary - 1]] = logits[6].max() + 1
    logits[7, ::2] = float("-inf")
    forced[8, positions[8] + 1] = 5
    status = torch.full((rows,), RUNNING, **integers)
    status[3] = STOPPED
    fill = {"ring": torch.full_like(forced, -1), "logprobs": torch.zeros(rows, slots + 1, device=DEVICE), "tokens": torch.arange(rows, **integers)}
    return DecodeState(
        None, logits, status, fill["ring"], fill["logprobs"], forced, fill["tokens"], positions, limits, stop_ids, torch.zeros(rows, 3, device=DEVICE), forced[:, :3].clone()
    )


@pytest.mark.parametrize("vocabulary", [64, 257, 9000])
def test_the_end_of_a_step_equals_the_plain_one(vocabulary):
    ours, theirs = make_state(vocabulary, 1), make_state(vocabulary, 1)
    _advance(theirs, "greedy")
    advance.advance(ours, None, (IDLE, RUNNING, STOPPED, LENGTH, FAILED))
    assert theirs.status.tolist() == [RUNNING, STOPPED, LENGTH, STOPPED, FAILED, FAILED, RUNNING, RUNNING, RUNNING]
    for name in ("status", "ring", "tokens", "positions"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    assert (ours.logprobs - theirs.logprobs).abs().max() < 1e-5


def test_a_given_choice_is_taken():
    ours, theirs = make_state(300, 2), make_state(300, 2)
    choice = torch.arange(9, dtype=torch.int32, device=DEVICE) + 40
    theirs.forced[torch.arange(8), theirs.positions[:8].long() + 1] = choice[:8]
    _advance(theirs, "greedy")
    advance.advance(ours, choice, (IDLE, RUNNING, STOPPED, LENGTH, FAILED))
    for name in ("status", "ring", "tokens", "positions"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


# ---- whole steps -------------------------------------------------------------------------------


@pytest.fixture
def few_programs(monkeypatch):
    """The interpreter's time goes by programs: here each takes many rows."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(products, "tile_for", lambda *_: tiles.Tile(64, 64, 4))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_plain_ones_for_every_family(family, rows, strong, few_programs):
    prompts = [P24[:5], P24[5:17], [9]][:rows]
    ours, theirs = (forced_steps("torch", strong(family), kernels, prompts, 3) for kernels in ("fused", "plain"))
    assert np.abs(ours[0] - theirs[0]).max() < 1e-3
    assert ours[1] == theirs[1]


def test_steps_in_bfloat16_are_as_exact_as_plain_ones(strong, few_programs):
    """Against float32: the interpreter cuts bits off where a GPU rounds, hence the factor."""
    exact = forced_steps("torch", strong("qwen3"), "plain", [P24[:9]], 4)[0]
    plain_error, fused_error = (np.sqrt(np.mean((forced_steps("torch", strong("qwen3"), k, [P24[:9]], 4, "bfloat16")[0] - exact) ** 2)) for k in ("plain", "fused"))
    assert fused_error < 1.6 * plain_error


def test_a_sampled_step_takes_the_plain_choice(strong, few_programs):
    from torch_decoder import Sampling

    settings = Sampling(temperature=0.9, top_p=0.8, seed=3)
    ours, theirs = (forced_steps("torch", strong("llama"), kernels, [P24[:4]], 1, sampling=settings)[1] for kernels in ("fused", "plain"))
    assert ours == theirs


def test_more_rows_than_fused_kernels_take_run_plain(strong):
    with decoder("torch", strong("llama"), kernels="fused", device=DEVICE.type, max_batch=32) as d:
        model = d._runner.model
        assert model.fused(16) and not model.fused(17) and not model.fused(1, 2)


def test_a_broken_kernel_is_seen(strong, monkeypatch, few_programs):
    """The control: a residual that is left out."""
    real = products.linear_add
    monkeypatch.setattr(products, "linear_add", lambda x, weight, bias, residual, early: real(x, weight, bias, torch.zeros_like(residual), early))
    ours = forced_steps("torch", strong("llama"), "fused", [P24[:5]], 1)[0]
    assert np.abs(ours - forced_steps("torch", strong("llama"), "plain", [P24[:5]], 1)[0]).max() > 0.1


def test_where_they_cannot_run_the_remedy_is_named(strong, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert why_not_fused(torch.device("cuda")) is None
    with pytest.raises(DeviceError, match="fused kernels need a CUDA device, and the device is cpu: use kernels='plain'"):
        Decoder.from_pretrained(strong("llama"), device="cpu", kernels="fused")
    monkeypatch.setattr("torch_decoder.kernels.find_spec", lambda name: None)
    assert "pip install triton" in why_not_fused(torch.device("cuda"))
    with pytest.raises(ConfigError, match="kernels is 'flash'"):
        Decoder.from_pretrained(strong("llama"), device="cpu", kernels="flash")


def test_every_kernel_compiles_for_hopper_without_spills():
    """The interpreter takes programs that the compiler does not; the compiler needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.hopper"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 20
    assert {name: r for name, r in found.items() if (r["stack"] or r["local"] or r["reg"] > 192) and "4 bytes" not in name} == {}
    assert {name: r for name, r in found.items() if r["shared"] > 227 * 1024} == {}, "more than a multiprocessor of Hopper has"
