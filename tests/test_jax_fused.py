"""Fused JAX kernels against the plain ones, interpreted on a CPU; and as compiled for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compare.program import describe
from jax_decoder import ConfigError, Decoder, DeviceError, ModelConfig, Sampling
from jax_decoder.kernels import attention, plain, products, summary, tiles
from jax_decoder.kernels.plain import Weight
from jax_decoder.model import check_fused
from jax_decoder.sampling import select_greedy
from tests.helpers import FAMILIES, P24, forced_steps, has_gpu_compiler

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Of the largest result: float32 sums in another order; half precision rounds its inputs alike, its results once more.
BAR = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2, jnp.float16: 3e-3}
ON_GPU = jax.default_backend() == "gpu"


def random(*shape: int, dtype=jnp.float32, seed: int = 0, least: float | None = None) -> jax.Array:
    generator = np.random.default_rng(seed + sum(shape))
    values = generator.normal(size=shape) if least is None else least + generator.random(shape)
    return jnp.asarray(values, dtype)


def wide(*arrays: jax.Array) -> list[jax.Array]:
    return [array.astype(jnp.float32) for array in arrays]


def close(ours: jax.Array, expected: jax.Array, dtype) -> None:
    error = jnp.abs(ours.astype(jnp.float32) - expected).max() / jnp.abs(expected).max()
    assert error <= BAR[dtype], f"relative error {error:.2e}"


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("rows", "inner"), [(96, 64), (48, 80), (16, 1040)], ids=str)
def test_products_equal_the_plain_ones(rows, inner, batch, dtype):
    """One layer of a stacked weight; columns in one piece and in many; with and without bias."""
    x, norm, bias = random(batch, inner, dtype=dtype), random(3, inner, dtype=dtype, least=0.5), random(3, 2 * rows, dtype=dtype)
    weight, residual = random(3, 2 * rows, inner, dtype=dtype, seed=1), random(batch, 2 * rows, dtype=dtype, seed=2)
    weight = (weight * inner**-0.5).astype(dtype)
    wide_x, wide_norm, wide_weight, wide_bias = wide(x, norm, weight, bias)
    normed = plain.rms_norm(wide_x, Weight(wide_norm, 1), 1e-5)
    for layer in (0, 2):
        expected = plain.linear(normed, Weight(wide_weight, layer), Weight(wide_bias, layer))
        ours = products.norm_linear(x, Weight(norm, 1), 1e-5, Weight(weight, layer), Weight(bias, layer), jnp.float32)
        close(ours, expected, dtype)
        gated = products.norm_gated_silu(x, Weight(norm, 1), 1e-5, Weight(weight, layer), Weight(bias, layer))
        close(gated, plain.gated_silu(expected), dtype)
    expected = residual.astype(jnp.float32) + plain.linear(wide_x, Weight(wide_weight, 2))
    close(products.linear_add(x, Weight(weight[2]), None, residual), expected, dtype)


def test_large_activations_do_not_overflow_float16():
    """Before they are normalised, rows of a real model reach thousands."""
    x, norm, weight = random(16, 64, dtype=jnp.float16) * 2000, random(64, dtype=jnp.float16, least=20.0), random(32, 64, dtype=jnp.float16)
    expected = plain.linear(plain.rms_norm(x.astype(jnp.float32), Weight(norm), 1e-5), Weight(weight.astype(jnp.float32)))
    close(products.norm_linear(x, Weight(norm), 1e-5, Weight(weight), None, jnp.float32), expected, jnp.float16)


def test_tiles_divide_every_shape():
    for rows, inner, batch in ((16, 48, 1), (151936, 1024, 1), (4096, 14336, 1), (48, 80, 16), (28672, 4096, 16)):
        tile = tiles.tile_for(rows, inner, batch, False)
        assert rows % tile.rows == 0 and inner % tile.inner == 0 and all(n & (n - 1) == 0 for n in tile)


# ---- attention ---------------------------------------------------------------------------------


def expected_attention(heads, norms, rope, positions, k_cache, v_cache, window, num_heads):
    """Row by row over the valid slots of one layer alone: float32 [B, N * H], new keys and values [B, K, H]."""
    batch, kv_heads, _, width = k_cache.shape
    turned = plain.norm_and_rotate(heads[:batch].reshape(batch, 1, -1, width), num_heads, kv_heads, norms, rope[positions][:, None])[:, 0]
    q, k, v = jnp.split(turned.astype(k_cache.dtype), [num_heads, num_heads + kv_heads], axis=1)
    out = []
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = wide(*(jnp.concatenate([old[row, :, :position], new[row][:, None]], 1)[:, first:] for old, new in ((k_cache, k), (v_cache, v))))
        scores = jnp.einsum("kgh,ksh->kgs", q[row].reshape(kv_heads, -1, width).astype(jnp.float32), keys, precision="highest") * width**-0.5
        out.append(jnp.einsum("kgs,ksh->kgh", jax.nn.softmax(scores, -1), values, precision="highest").ravel())
    return jnp.stack(out), k, v


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: d.__name__)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("num_heads", "kv_heads", "width", "normed"), [(4, 2, 32, True), (6, 2, 64, False), (3, 3, 32, True)])
def test_attention_over_poisoned_caches(num_heads, kv_heads, width, normed, window, dtype, monkeypatch):
    """One valid position, the last slot, several splits: slots outside hold NaN, and nothing but one slot is written."""
    monkeypatch.setattr(attention, "span_for", lambda *_: tiles.Span(48, 16, 4))  # three blocks: the last row has two splits and loops in both
    layer, slots, positions = 1, 70, np.array([0, 43, 69], np.int32)
    shape = (2, 3, kv_heads, slots, width)
    caches = []
    for seed in (3, 4):
        cache = np.full(shape, np.nan, np.float32)
        for row, position in enumerate(positions.tolist()):
            first = 0 if window is None else max(0, position + 1 - window)
            cache[layer, row, :, first:position] = random(kv_heads, position - first, width, seed=seed)
        caches.append(jnp.asarray(cache, dtype))
    heads = random(16, (num_heads + 2 * kv_heads) * width)
    norms = (Weight(random(2, width, dtype=dtype, least=0.5), layer), Weight(random(2, width, dtype=dtype, least=0.5, seed=1), layer), 1e-6) if normed else None
    angles = np.arange(slots)[:, None] * 1e4 ** (-np.arange(0, width, 2) / width)
    rope = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], 1), jnp.float32)
    finished = jnp.zeros(3 * kv_heads, jnp.int32)
    run = jax.jit(lambda heads, k, v: attention.attend(heads, norms, rope, jnp.asarray(positions), k, v, layer, window, finished))
    out, *ours, counters = run(heads, *caches)
    expected, *new = expected_attention(heads, norms, rope, positions, *(cache[layer] for cache in caches), window, num_heads)
    close(out[:3], expected, dtype)
    assert (counters == 0).all(), "the next layer would count from here"
    for written, old, values in zip(ours, caches, new):
        for row, position in enumerate(positions.tolist()):
            close(written[layer, row, :, position], values[row].astype(jnp.float32), dtype)
            written = written.at[layer, row, :, position].set(old[layer, row, :, position])
        assert np.asarray(written).tobytes() == np.asarray(old).tobytes()


# ---- whole steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_plain_ones_for_every_family(family, rows, strong):
    prompts = [P24[:5], P24[5:17], [9]][:rows]
    ours, theirs = (forced_steps("jax", strong(family, head_dim=32), kernels, prompts, 3) for kernels in ("fused", "plain"))
    assert np.abs(ours[0] - theirs[0]).max() < 1e-3
    assert ours[1] == theirs[1]


def test_steps_in_bfloat16_are_as_exact_as_plain_ones(strong):
    exact = forced_steps("jax", strong("qwen3"), "plain", [P24[:9]], 6)[0]
    plain_error, fused_error = (np.sqrt(np.mean((forced_steps("jax", strong("qwen3"), k, [P24[:9]], 6, "bfloat16")[0] - exact) ** 2)) for k in ("plain", "fused"))
    assert fused_error < 1.3 * plain_error


@pytest.mark.parametrize("vocabulary", [64, 257, 9000])
def test_the_summary_of_logits_equals_the_plain_one(vocabulary):
    """Ties, rows of NaN, of infinity and of minus infinity, and what lies past the vocabulary."""
    logits = np.random.default_rng(3).normal(size=(6, vocabulary)).astype(np.float32) * 5
    logits[1, [5, 17, vocabulary - 1]] = 40.0
    logits[2, 7], logits[3, vocabulary - 2], logits[4], logits[5, ::2] = np.nan, np.inf, -np.inf, -np.inf
    token, normaliser = summary.summarise(jnp.asarray(logits))
    expected = jax.nn.logsumexp(jnp.asarray(logits), axis=1)
    good = np.array([0, 1, 5])
    assert token[good].tolist() == select_greedy(jnp.asarray(logits))[good].tolist() and token[1] == 5
    assert np.abs(normaliser[good] - expected[good]).max() < 1e-5
    assert not np.isfinite(normaliser[2:5]).any() and not np.isfinite(expected[2:5]).any()


def test_a_sampled_step_takes_the_plain_choice(strong):
    settings = Sampling(temperature=0.9, top_p=0.8, seed=3)
    ours, theirs = (forced_steps("jax", strong("llama", head_dim=32), kernels, [P24[:4]], 1, sampling=settings)[1] for kernels in ("fused", "plain"))
    assert ours == theirs


def test_a_broken_kernel_is_seen(strong, monkeypatch):
    """The control: a residual that is left out."""
    real = products.linear_add
    monkeypatch.setattr(products, "linear_add", lambda x, weight, bias, residual, early: real(x, weight, bias, jnp.zeros_like(residual), early))
    ours = forced_steps("jax", strong("llama", head_dim=32), "fused", [P24[:5]], 1)[0]
    assert np.abs(ours - forced_steps("jax", strong("llama", head_dim=32), "plain", [P24[:5]], 1)[0]).max() > 0.1


@pytest.mark.skipif(ON_GPU, reason="there is a GPU here")
def test_where_they_cannot_run_the_remedy_is_named(strong, monkeypatch):
    monkeypatch.delenv("DECODE_PALLAS_INTERPRET", raising=False)
    with pytest.raises(DeviceError, match="fused kernels need a CUDA device, and the device is a cpu: use kernels='plain'"):
        Decoder.from_pretrained(strong("llama", head_dim=32), device="cpu", kernels="fused")
    config = ModelConfig.from_directory(strong("llama"))
    with pytest.raises(ConfigError, match=r"head_dim 16, which must be .* at least 32: use kernels='plain'"):
        check_fused(config)


# ---- compiled for a GPU ------------------------------------------------------------------------


@pytest.mark.skipif(not has_gpu_compiler(), reason="JAX's CUDA plugin is not installed: scripts/test puts it into .venv/gpu-compiler")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", ["qwen3-0.6b", "llama-3.2-1b"])
def test_a_layer_is_five_commands_of_one_buffer(family, batch):
    """The lowering takes less than the interpreter; a slice in front of a kernel would be a copy of weights."""
    two, three = (describe(f"shape:{family},num_hidden_layers={n},vocab_size=4096", "bfloat16", batch, "greedy", 600, kernels="fused") for n in (2, 3))
    assert three["commands"] - two["commands"] == 5
    for found in (two, three):
        assert len(found["buffers"]) == 1 and found["outside"] == [] and found["in_place"]
        assert max(found["copied"], default=0) < 2**14
