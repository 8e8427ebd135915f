"""Random bits, filters and draws: the same in both decoders, and right by an outside measure."""

from __future__ import annotations

import math
import subprocess
import sys

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import jax_decoder.sampling
import torch_decoder.sampling
from tests.helpers import DECODERS, P24, ROOT, copy_of, decoder, edit_tensors

MODULES = {"torch": torch_decoder.sampling, "jax": jax_decoder.sampling}
SEEDS = (0, 1, 7, 2**31, 2**32 - 1)  # the last two are negative as int32

# Key, counter and result of Threefry-2x32 with 20 rounds, from the known answers of Random123.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def to_framework(which: str, array: np.ndarray):
    return torch.from_numpy(array) if which == "torch" else jnp.asarray(array)


def words(which: str, array: np.ndarray):
    """uint32 bit patterns in the integer type that the package computes with."""
    return to_framework(which, array.astype(np.uint32).view(np.int32)) if which == "torch" else jnp.asarray(array, jnp.uint32)


def threefry(which: str, key: tuple, counter: tuple) -> np.ndarray:
    pairs = [tuple(words(which, np.atleast_1d(np.asarray(x, np.uint32))) for x in pair) for pair in (key, counter)]
    return np.stack([np.asarray(x).view(np.uint32) for x in MODULES[which].threefry_2x32(*pairs)])


def kept(which: str, logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Which tokens remain, for one row or several rows of logits with the same settings."""
    rows = np.atleast_2d(np.asarray(logits, np.float32))
    filters = np.tile(np.array([temperature, top_p, min_p], np.float32), (len(rows), 1))
    counts = np.full(len(rows), top_k, np.int32)
    _, keep = MODULES[which].kept_tokens(*(to_framework(which, x) for x in (rows, filters, counts)))
    return np.asarray(keep)


def draw(which: str, logits: np.ndarray, positions: np.ndarray, settings: list) -> np.ndarray:
    """One token a row; ``settings`` is a list of (Sampling, row id)."""
    filters = np.array([[s.temperature, s.top_p, s.min_p] for s, _ in settings], np.float32)
    draws = np.array([[s.top_k, s.seed, row] for s, row in settings], np.uint32).view(np.int32)
    arrays = (logits.astype(np.float32), positions.astype(np.int32), filters, draws)
    return np.asarray(MODULES[which].select_sampled(*(to_framework(which, x) for x in arrays)))


# ---- random bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN_ANSWERS)
def test_threefry_gives_the_known_answers(which, key, counter, expected):
    assert threefry(which, key, counter)[:, 0].tolist() == list(expected)


@pytest.mark.parametrize("which", MODULES)
def test_threefry_equals_that_of_jax(which):
    """Shifts of a signed type would keep the sign: many words with the top bit set find it."""
    generator = np.random.default_rng(3)
    key, counter = generator.integers(0, 2**32, 2, np.uint32), generator.integers(0, 2**32, 512, np.uint32)
    expected = jax.extend.random.threefry_2x32(jnp.asarray(key), jnp.asarray(counter))
    ours = threefry(which, (key[0], key[1]), (counter[:256], counter[256:]))
    np.testing.assert_array_equal(ours.reshape(-1), np.asarray(expected))


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256])
def test_noise_is_the_same_in_both_decoders(vocab_size):
    """Odd sizes too: the second word of the last counter has no entry to serve there."""
    draws = np.array([[0, s, r] for s, r in zip(SEEDS, range(len(SEEDS)))], np.uint32).view(np.int32)
    positions = np.arange(len(SEEDS), dtype=np.int32)
    ours = [np.asarray(MODULES[w].exponential_noise(to_framework(w, draws), to_framework(w, positions), vocab_size)) for w in MODULES]
    assert ours[0].shape == (len(SEEDS), vocab_size)
    np.testing.assert_allclose(ours[0], ours[1], rtol=1e-6)  # the bits are equal, the logarithms round
    assert (ours[0] > 0).all() and np.isfinite(ours[0]).all()


@pytest.mark.parametrize("which", MODULES)
def test_noise_is_exponential_and_differs_by_seed_row_and_position(which):
    draws = np.array([[0, 1, 0], [0, 2, 0], [0, 1, 1], [0, 1, 0]], np.int32)
    positions = np.array([5, 5, 5, 6], np.int32)
    noise = np.asarray(MODULES[which].exponential_noise(to_framework(which, draws), to_framework(which, positions), 4096))
    np.testing.assert_allclose(noise.mean(axis=1), 1.0, atol=0.06)  # 4 standard errors
    np.testing.assert_allclose(np.median(noise, axis=1), math.log(2), atol=0.06)
    correlations = np.corrcoef(noise)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 0.08


# ---- filters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize(
    ("probabilities", "top_p", "count"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.75, 2),
        ([0.5, 0.25, 0.125, 0.125], 1e-6, 1),
        ([0.5, 0.25, 0.125, 0.125], 0.0, 1),
        ([0.5, 0.25, 0.125, 0.125], 1.0, 4),
        ([0.4, 0.2, 0.2, 0.2], 0.5, 2),
        ([0.4, 0.2, 0.2, 0.2], 0.7, 3),
        ([1 / 256] * 256, 0.5, 128),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(which, probabilities, top_p, count):
    """A mass of exactly p is enough, and of tied tokens the lower ids are taken, no more than needed."""
    assert np.flatnonzero(kept(which, np.log(probabilities), top_p=top_p)).tolist() == list(range(count))


@pytest.mark.parametrize("which", MODULES)
def test_tied_tokens_are_taken_in_ascending_order_wherever_they_lie(which):
    logits = np.log([0.2, 0.4, 0.2, 0.2])
    assert np.flatnonzero(kept(which, logits, top_p=0.7)).tolist() == [0, 1, 2]
    assert np.flatnonzero(kept(which, logits, top_k=2)).tolist() == [0, 1, 2, 3], "top_k keeps all that tie with the k-th"


def by_transformers(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    scores = torch.tensor(logits, dtype=torch.float32)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(None, scores)
    return torch.isfinite(scores).numpy()


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize(
    "settings",
    [(0.7, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.6, 20, 0.95, 0.0), (2.0, 0, 1.0, 0.1), (1.5, 50, 0.8, 0.05), (1.0, 10**6, 0.5, 0.0)],
)
def test_filters_equal_those_of_transformers(which, settings):
    """All orders of the filters give other sets, so the combined settings check the order as well."""
    logits = np.random.default_rng(11).normal(0, 3, (6, 257)).astype(np.float32)
    temperature, top_k, top_p, min_p = settings
    np.testing.assert_array_equal(kept(which, logits, temperature, top_k, top_p, min_p), by_transformers(logits, *settings))


@pytest.mark.parametrize("which", MODULES)
def test_a_token_always_stays(which):
    logits = np.stack([np.zeros(16), np.full(16, -1e30), np.linspace(-1e4, 1e4, 16), np.r_[0.0, np.full(15, -np.inf)]])
    for settings in ({"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-3, "top_p": 1e-9, "min_p": 1.0, "top_k": 1}):
        assert kept(which, logits, **settings).any(axis=1).all(), settings


# ---- draws -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODULES)
def test_draws_follow_the_probabilities(which):
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    count = 4000
    logits, positions = np.tile(np.log(probabilities), (count, 1)), np.arange(count)
    sampling = DECODERS[which].Sampling(seed=5)
    shares = np.bincount(draw(which, logits, positions, [(sampling, 0)] * count), minlength=4) / count
    np.testing.assert_allclose(shares, probabilities, atol=4 * math.sqrt(0.25 / count))


@pytest.mark.parametrize("which", MODULES)
def test_a_filtered_token_is_never_drawn(which):
    count = 500
    logits, positions = np.tile(np.log([0.4, 0.3, 0.2, 0.1]), (count, 1)), np.arange(count)
    sampling = DECODERS[which].Sampling(top_k=2, seed=1)
    assert set(draw(which, logits, positions, [(sampling, 0)] * count).tolist()) == {0, 1}


def test_both_decoders_draw_the_same_tokens():
    logits = np.random.default_rng(2).normal(0, 2, (len(SEEDS), 257))
    for position in range(8):
        tokens = []
        for which in MODULES:
            settings = [(DECODERS[which].Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=s), row) for row, s in enumerate(SEEDS)]
            tokens.append(draw(which, logits, np.full(len(SEEDS), position), settings).tolist())
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("which", MODULES)
def test_temperature_zero_is_the_largest_logit_beside_rows_that_draw(which):
    """A division by zero would give NaN, whose argmax is id 0."""
    kinds = DECODERS[which].Sampling
    logits = np.tile(np.array([1.0, 2.0, -1.0]), (3, 1))
    tokens = draw(which, logits, np.zeros(3), [(kinds(temperature=0), 0), (kinds(temperature=np.array(0.0)), 1), (kinds(temperature=1.0), 2)])
    assert tokens[:2].tolist() == [1, 1]
    assert kinds(temperature=np.array(0.0)).kind == "greedy"


@pytest.mark.parametrize("which", MODULES)
def test_equal_logits_choose_the_first(which):
    logits = to_framework(which, np.array([[0, 3, 3, 1], [2, 2, 2, 2]], np.float32))
    assert np.asarray(MODULES[which].select_greedy(logits)).tolist() == [1, 0]


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", x) for x in (-1, -0.1, math.nan, math.inf, "1", None, [0.5, 1.0])],
        *[("top_k", x) for x in (-1, 2.5, 2**31, math.nan, math.inf, None)],
        *[("top_p", x) for x in (-0.1, 1.1, math.nan, None)],
        *[("min_p", x) for x in (-0.1, 1.1, math.nan, None)],
        *[("seed", x) for x in (-1, 2**32, 0.5, math.nan, math.inf, None)],
    ],
)
def test_a_bad_setting_is_named(which, name, value):
    with pytest.raises(DECODERS[which].ConfigError, match=f"^{name} is "):
        DECODERS[which].Sampling(**{name: value})


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize("wrap", [np.float32, np.array, torch.tensor, jnp.asarray, lambda x: np.array([x])], ids=["scalar", "array", "tensor", "jax", "one-entry"])
def test_settings_may_be_scalars_of_any_library(which, wrap):
    sampling = DECODERS[which].Sampling(temperature=wrap(0.5), top_p=wrap(0.25), top_k=wrap(3), seed=wrap(9))
    assert sampling == DECODERS[which].Sampling(temperature=0.5, top_p=0.25, top_k=3, seed=9)
    assert [type(x) for x in (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)] == [float, float, int, int]


# ---- through the decoders ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def flat(strong, tmp_path_factory):
    """A model whose logits are all zero: every draw is uniform."""
    path = copy_of(strong("llama"), tmp_path_factory.mktemp("flat") / "model")
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].zero_())
    return path


@pytest.fixture(scope="module", params=list(DECODERS))
def flat_decoder(request, flat):
    with decoder(request.param, flat, max_batch=4, max_seq_len=128) as made:
        yield request.param, made


def sampled(which: str, made, seed: int, prompts: int = 1, count: int = 64, **settings) -> list[list[int]]:
    sampling = DECODERS[which].Sampling(temperature=1.0, seed=seed)
    return [c.token_ids for c in made.generate([P24[:4]] * prompts, max_new_tokens=count, sampling=sampling, **settings)]


def test_a_new_seed_takes_effect_in_the_same_executable(flat_decoder):
    """A seed that is baked into the compiled step gives the first answer for ever."""
    which, made = flat_decoder
    first, second, again = (sampled(which, made, seed) for seed in (1, 2, 1))
    assert first == again != second
    assert len(set(first[0])) > 32, "the draws repeat: the position does not reach the random bits"


def test_flat_logits_give_each_id_its_share(flat_decoder):
    which, made = flat_decoder
    tokens = np.array([sampled(which, made, seed, prompts=4) for seed in range(8)]).reshape(-1)
    counts = np.bincount(tokens, minlength=256)
    chi_square = float(((counts - 8.0) ** 2 / 8.0).sum())
    assert 150 < chi_square < 390, "255 degrees of freedom: the mean is 255, its deviation 23"


def test_rows_draw_differently_and_a_row_id_fixes_the_draw(flat_decoder):
    which, made = flat_decoder
    rows = sampled(which, made, 3, prompts=4, count=16)
    assert len({tuple(row) for row in rows}) == 4
    assert sampled(which, made, 3, count=16, row_ids=[2]) == [rows[2]], "the place in the batch changed the draw"


def test_both_decoders_sample_the_same_text(strong):
    path, settings = strong("qwen3"), {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    found = {}
    for which, package in DECODERS.items():
        with decoder(which, path, max_batch=4) as made:
            sampling = [package.Sampling(seed=seed, **settings) for seed in SEEDS]
            found[which] = [c.token_ids for c in made.generate([P24[:5]] * len(SEEDS), max_new_tokens=12, sampling=sampling)]
    assert found["torch"] == found["jax"]
    assert len({tuple(row) for row in found["jax"]}) == len(SEEDS)


@pytest.mark.parametrize("which", DECODERS)
def test_greedy_rows_beside_sampled_ones_equal_greedy_rows_bit_for_bit(which, strong):
    package, prompts = DECODERS[which], [P24[:4], P24[4:9]]
    with decoder(which, strong("qwen2"), max_batch=2, buckets=[2]) as made:
        greedy = made.generate(prompts, max_new_tokens=8)
        mixed = made.generate(prompts, max_new_tokens=8, sampling=[package.Sampling(temperature=0.0), package.Sampling(temperature=1.0, seed=4)])
        cold = made.generate(prompts, max_new_tokens=8, sampling=package.Sampling(temperature=0))
    assert (mixed[0].token_ids, mixed[0].logprobs) == (greedy[0].token_ids, greedy[0].logprobs)
    assert cold == greedy
    assert mixed[1].token_ids != greedy[1].token_ids


COMPILE_WHOLE = """
import sys, torch
from torch_decoder import Decoder, Sampling, decode
with Decoder.from_pretrained(sys.argv[1], dtype="float32", device="cpu", max_batch=2, max_seq_len=32) as made:
    sampling = [Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01, seed=1), Sampling(temperature=0)]
    state = made.prefill([[1, 2, 3], [4, 5, 6, 7, 8]], sampling=sampling)
    expected, branch = made.fork(state).peek(), state.peek()
    decode._advance(expected, sys.argv[2])
    torch.compile(decode._advance, fullgraph=True, backend="eager")(branch, sys.argv[2])
    assert all(torch.equal(x, y) for x, y in zip(decode.leaves(branch), decode.leaves(expected)))
    assert (branch.positions == torch.tensor([4, 6])).all(), branch.positions
"""


@pytest.mark.parametrize("kind", torch_decoder.settings.KINDS)
def test_selection_has_no_shapes_that_depend_on_values(kind, strong):
    """Such a shape would make a captured step wait for the host, or not be captured at all.

    Filters, draw, stop ids and ring are traced as one graph. In a process of its own, because the
    checks of signatures that run under pytest cannot be traced.
    """
    done = subprocess.run([sys.executable, "-c", COMPILE_WHOLE, str(strong("qwen2")), kind], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bits", [1, 2, 4, 5])
@pytest.mark.parametrize("kind", ["count", "mass"])
def test_a_search_by_digits_finds_the_largest_key(bits, kind):
    """Against every key that occurs, tried one by one; ties, minus infinity and a maximum of 0 among them."""
    generator = np.random.default_rng(bits)
    values = np.sort(generator.standard_normal((3, 200)).astype(np.float32) * 4)
    values -= values.max(1, keepdims=True)
    values[1, :50], values[2, 100:140] = -np.inf, values[2, 100:101]
    keys = jax_decoder.sampling._ordered_keys(jnp.asarray(values))
    weights = jnp.ones_like(keys) if kind == "count" else jnp.exp(jnp.asarray(values))
    for share in (1e-6, 0.3, 0.9, 0.9999):
        needed = (weights.sum(1, keepdims=True) * share).astype(weights.dtype) if kind == "mass" else jnp.full((3, 1), max(1, int(200 * share)), jnp.int32)
        found = np.asarray(jax_decoder.sampling._search(keys, weights, needed, bits))[:, 0]
        masses = np.asarray(jax_decoder.sampling._mass_from(keys, weights, keys))
        for row in range(3):
            reached = np.asarray(keys)[row][masses[row] >= np.asarray(needed)[row]]
            assert found[row] == reached.max()


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_rows_of_any_number_are_searched_alike(rows, monkeypatch):
    """On a GPU the digits are wider for few rows: as if these tensors lay on one."""
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(0)) * 3
    filters = torch.tensor([[0.8, 0.9, 0.0]]).repeat(rows, 1)
    top_k = torch.full((rows,), 50, dtype=torch.int32)
    expected = torch_decoder.sampling.kept_tokens(logits, filters, top_k)[1]
    search = torch_decoder.sampling._largest_key

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch_decoder.sampling, "_largest_key", lambda keys, weights, needed: search(keys.as_subclass(OnGpu), weights, needed).as_subclass(torch.Tensor))
    assert torch.equal(torch_decoder.sampling.kept_tokens(logits, filters, top_k)[1], expected)
