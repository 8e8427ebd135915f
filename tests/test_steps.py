"""Prefill, decode_step and fork: states that cannot be misused, and rows that cannot reach each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers import DECODERS, P24, TOLERANCE, decoder, numpy, reference_logits

PROMPTS = [P24[:3], P24[3:8], P24[8:15]]
SLOTS = 32


@pytest.fixture(scope="module", params=list(DECODERS))
def made(request, strong):
    """States belong to their handles, so one decoder serves all tests; errors are those of ``package``."""
    with decoder(request.param, strong("qwen3"), max_batch=4, max_seq_len=SLOTS) as one:
        one.package = DECODERS[request.param]
        yield one


def copy(array) -> np.ndarray:
    """PyTorch writes states in place: what is compared later must be copied now."""
    return numpy(array).copy()


def run(made, state, steps: int) -> tuple[list, list]:
    """Tokens and logits of the state and of ``steps`` steps after it; uses the state up."""
    tokens, logits = [copy(state.tokens)], [copy(state.logits)]
    for _ in range(steps):
        state = made.decode_step(state)
        tokens.append(copy(state.tokens))
        logits.append(copy(state.logits))
    return tokens, logits


def alone(made, prompt: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, logits = run(made, made.prefill([prompt]), steps)
    return np.stack(tokens)[:, 0], np.stack(logits)[:, 0]


def plant(state, value: float, rows=slice(None), slots=slice(None)) -> None:
    """Write ``value`` into cache slots of a state that has not been used up."""
    raw = state.peek()
    if hasattr(raw.tokens, "device") and hasattr(raw.tokens, "copy_"):  # PyTorch: in place
        for leaf in (*raw.cache.k, *raw.cache.v):
            leaf[rows, :, slots] = value
        return
    k, v = (tuple(x.at[rows, :, slots].set(value) for x in side) for side in raw.cache)
    state._state = raw._replace(cache=type(raw.cache)(k, v))


def set_row(state, row: int, **values: int) -> None:
    """Set integer fields of one row of a state."""
    raw = state.peek()
    for name, value in values.items():
        leaf = getattr(raw, name)
        if hasattr(leaf, "copy_"):
            leaf[row] = value
        else:
            raw = raw.with_fields(**{name: leaf.at[row].set(value)})
    state._state = raw


def cache_of_row(state, row: int) -> list[np.ndarray]:
    return [copy(leaf[row]) for leaf in (*state.cache.k, *state.cache.v)]


# ---- who owns a state --------------------------------------------------------------------------


def test_a_used_state_is_refused_with_its_reason(made):
    """Without this check JAX fails far from the cause, and PyTorch goes on with changed memory."""
    first = made.prefill([P24[:4]])
    second = made.decode_step(first)
    for use in (lambda: made.decode_step(first), lambda: made.fork(first), lambda: first.logits, lambda: first.cache):
        with pytest.raises(made.package.DecoderError, match="cache already used"):
            use()
    assert copy(second.logits).shape == (1, 256)


def test_two_continuations_of_one_prefill_equal_separate_runs(made):
    expected_tokens, expected_logits = alone(made, P24[:6], 6)
    trunk = made.prefill([P24[:6]])
    branch = made.fork(trunk)
    tokens, logits = run(made, trunk, 6)
    other_tokens, other_logits = run(made, branch, 6)  # after the trunk has written all its slots
    for found_tokens, found_logits in ((tokens, logits), (other_tokens, other_logits)):
        np.testing.assert_array_equal(np.stack(found_tokens)[:, 0], expected_tokens)
        np.testing.assert_array_equal(np.stack(found_logits)[:, 0], expected_logits)


def test_branches_may_take_different_tokens(made):
    """A fork that shared memory would mix the two histories."""
    left, right = (made.prefill([P24[:4]], forced=[forced]) for forced in ([1, 2, 3], [9, 8, 7]))
    fork = made.fork(left)
    left, right = run(made, left, 3), run(made, right, 3)
    again = run(made, fork, 3)
    np.testing.assert_array_equal(np.stack(left[1]), np.stack(again[1]))
    assert np.abs(left[1][-1] - right[1][-1]).max() > 0.1


def test_a_failed_step_leaves_the_state_usable(made, monkeypatch):
    state = made.prefill([P24[:4]])
    kept = made.fork(state)

    def broken(*_):
        raise RuntimeError("the device went away")

    with monkeypatch.context() as patch:
        patch.setattr(made._runner, "step", broken)
        with pytest.raises(RuntimeError, match="went away"):
            made.decode_step(state)
    tokens, _ = run(made, kept, 4)
    np.testing.assert_array_equal(np.stack(tokens)[:, 0], alone(made, P24[:4], 4)[0])


def test_names_that_are_no_leaf_are_no_attributes(made):
    with pytest.raises(AttributeError, match="no_such_leaf"):
        _ = made.prefill([P24[:4]]).no_such_leaf


def test_a_handle_shows_its_own_rows_only(made):
    """Three rows run in a bucket of four; the spare row is nobody's result."""
    state = made.prefill(PROMPTS)
    assert state.peek().tokens.shape == (4,)
    assert copy(state.logits).shape == (3, 256)
    assert copy(state.tokens).shape == copy(state.positions).shape == (3,)
    assert copy(state.positions).tolist() == [3, 5, 7]


# ---- the last slot -----------------------------------------------------------------------------


def test_the_last_slot_is_used_and_no_step_goes_past_it(made):
    """The last token of a full cache needs no slot; a step beyond would overwrite a live key."""
    prompt = P24[: SLOTS - 12]
    state, steps = made.prefill([prompt]), SLOTS - len(prompt)
    for _ in range(steps):
        state = made.decode_step(state)
    before = cache_of_row(state, 0)
    with pytest.raises(made.package.CacheOverflowError, match=str(SLOTS)):
        made.decode_step(state)
    for x, y in zip(before, cache_of_row(state, 0)):
        np.testing.assert_array_equal(x, y)
    tokens = prompt + made.generate([prompt], max_new_tokens=steps + 1)[0].token_ids
    assert len(tokens) == SLOTS + 1
    expected = numpy(made.score([tokens[:SLOTS]]))[0, -1]
    assert np.abs(copy(state.logits)[0] - expected).max() < 1e-3


def test_prefill_and_forced_tokens_that_do_not_fit_are_refused(made):
    long = [(7 * i) % 256 for i in range(SLOTS + 1)]
    with pytest.raises(made.package.CacheOverflowError, match=rf"{SLOTS + 1} tokens.*{SLOTS}"):
        made.prefill([long])
    with pytest.raises(made.package.CacheOverflowError, match="row 0"):
        made.prefill([P24[:4]], forced=[long])
    assert copy(made.prefill([long[:SLOTS]]).logits).shape == (1, 256)


def test_a_prefill_of_too_many_rows_is_refused(made):
    with pytest.raises(made.package.DecoderError, match=r"5 rows.*max_batch 4"):
        made.prefill([[1]] * 5)


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", range(4))
def test_a_spare_row_touches_nothing_wherever_it_lies(made, spare):
    """Its position is a valid slot of its own row, whatever garbage an earlier call left there."""
    prompts = list(PROMPTS)
    prompts.insert(spare, [77])
    state = made.prefill(prompts)
    plant(state, 1e4, rows=spare)
    set_row(state, spare, status=0, tokens=255, positions=SLOTS - 1)
    full = made.prefill(prompts)
    for _ in range(16):
        state, full = made.decode_step(state), made.decode_step(full)
    for row in set(range(4)) - {spare}:
        np.testing.assert_array_equal(copy(state.tokens)[row], copy(full.tokens)[row])
        np.testing.assert_array_equal(copy(state.logits)[row], copy(full.logits)[row])
        for x, y in zip(cache_of_row(state, row), cache_of_row(full, row)):
            np.testing.assert_array_equal(x, y)


def test_rows_of_unequal_length_equal_separate_runs(made):
    """A shared position or a missing mask costs 12 in the logits; float32 noise is below 1e-4."""
    prompts = [P24[:5], [0, 7, 0, 0, *P24[:8]]]  # id 0 inside a prompt is a token and no padding
    tokens, logits = run(made, made.prefill(prompts), 8)
    for row, prompt in enumerate(prompts):
        expected_tokens, expected_logits = alone(made, prompt, 8)
        np.testing.assert_array_equal(np.stack(tokens)[:, row], expected_tokens)
        assert np.abs(np.stack(logits)[:, row] - expected_logits).max() < 1e-4


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_slots_past_a_rows_end_change_no_bit(made, value):
    state = made.prefill(PROMPTS)
    noisy = made.fork(state)
    for row in range(3):
        plant(noisy, value, rows=row, slots=slice(int(copy(state.positions)[row]), None))
    plant(noisy, value, rows=3)
    clean, dirty = run(made, state, 6), run(made, noisy, 6)
    np.testing.assert_array_equal(np.stack(clean[0]), np.stack(dirty[0]))
    np.testing.assert_array_equal(np.stack(clean[1]), np.stack(dirty[1]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stops_alone(made, value):
    """A NaN that spread, or a row that went on with id 0, would both look like an answer."""
    state, expected = made.prefill(PROMPTS), made.prefill(PROMPTS)
    ring = copy(state.ring)[1]
    plant(state, value, rows=1, slots=slice(0, 1))
    for _ in range(4):
        state, expected = made.decode_step(state), made.decode_step(expected)
    assert copy(state.status).tolist() == [1, 4, 1], "RUNNING, FAILED, RUNNING"
    np.testing.assert_array_equal(copy(state.ring)[1], ring)
    for row in (0, 2):
        np.testing.assert_array_equal(copy(state.logits)[row], copy(expected.logits)[row])
        np.testing.assert_array_equal(copy(state.ring)[row], copy(expected.ring)[row])


def test_a_poisoned_row_is_admitted_cleanly(made):
    """A masked score still multiplies its value, and 0 times a leftover NaN is NaN."""
    expected = alone(made, P24[:4], 4)
    state = made.prefill(PROMPTS[:2])
    plant(state, math.nan)
    held = state.give_up()
    in_place = hasattr(held, "state")  # PyTorch writes into what it holds, JAX returns a new state
    raw = held.state if in_place else held
    for row, prompt in enumerate((P24[:4], P24[:4])):
        settings = {"status": 1, "tokens": prompt[-1], "positions": 3, "limits": SLOTS, "stop_ids": [], "filters": [0.0, 1.0, 0.0], "draws": [0, 0, row]}
        raw = made._runner.admit(raw, row, prompt, settings)
    raw = made._runner.step(raw, "greedy", 2)
    tokens, logits = run(made, made.package.DecodeHandle(held if in_place else raw, 2, "greedy", 8), 4)
    for row in range(2):
        np.testing.assert_array_equal(np.stack(tokens)[:, row], expected[0])
        assert np.abs(np.stack(logits)[:, row] - expected[1]).max() < 1e-4


def test_forced_tokens_are_taken_and_then_the_choice(made):
    state = made.prefill([P24[:4], P24[:4]], forced=[[9, 8], []])
    tokens, _ = run(made, state, 2)
    tokens = np.stack(tokens)
    assert tokens[:2, 0].tolist() == [9, 8]
    np.testing.assert_array_equal(tokens[:, 1], alone(made, P24[:4], 2)[0])
    assert tokens[2, 0] == alone(made, [*P24[:4], 9, 8], 0)[0][0]


@pytest.mark.parametrize("bad", [[5, 256], [-1], [5, 2**31], [5.0], [True], [None], []])
def test_ids_outside_the_vocabulary_are_refused_by_every_entry(made, bad):
    """Inside a compiled step an index is clamped or wraps, so only the host can notice."""
    for use in (lambda: made.prefill([bad]), lambda: made.score([bad]), lambda: made.generate([bad], max_new_tokens=1)):
        with pytest.raises(made.package.DecoderError):
            use()
    if bad:
        with pytest.raises(made.package.DecoderError):
            made.prefill([P24[:4]], forced=[bad])
    assert copy(made.prefill([P24[:4]]).logits).shape == (1, 256)


def test_rows_of_unequal_length_cannot_be_scored_together(made):
    with pytest.raises(made.package.DecoderError, match=r"\[2, 3\]"):
        made.score([[1, 2], [1, 2, 3]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", DECODERS)
def test_a_row_does_not_depend_on_the_others(which, strong, dtype):
    """At one batch size not a bit may change. Against batch 1 only the order of sums may differ."""
    others = [[(11 * i + 3 * j + k) % 256 for i in range(3 + k)] for k, j in enumerate(range(14))]
    with decoder(which, strong("qwen2"), max_batch=8, buckets=[1, 8], max_seq_len=SLOTS, dtype=dtype) as made:
        single = np.stack(run(made, made.prefill([P24]), 2)[1])[:, 0]
        for place in (0, 5, 7):
            found = []
            for seven in (others[:7], others[7:]):
                prompts = [*seven[:place], P24, *seven[place:]]
                found.append(np.stack(run(made, made.prefill(prompts), 2)[1])[:, place])
            np.testing.assert_array_equal(found[0], found[1])
        if dtype == "float32":
            assert np.abs(found[0] - single).max() < 1e-4
            np.testing.assert_array_equal(found[0].argmax(1), single.argmax(1))
        else:  # 8 significant bits and logits up to 13 in size: one rounding step there is 0.06
            assert np.abs(found[0][0] - single[0]).max() < 0.5


@pytest.mark.parametrize("which", DECODERS)
def test_a_chunk_that_ends_with_the_cache_spoils_no_slot(which, strong):
    """40 slots and chunks of 32: the padding of the last chunk lies past the end, where a clamped write would hit slot 39."""
    tokens = [(37 * i + 5) % 256 for i in range(40)]
    with decoder(which, strong("qwen3"), max_batch=1, max_seq_len=40) as d:
        assert np.abs(numpy(d.score([tokens]))[0] - reference_logits(strong("qwen3"), tokens)).max() < TOLERANCE
