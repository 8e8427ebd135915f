"""generate(): batches, stops, limits and state between calls, in both decoders."""

from __future__ import annotations

import json
import math
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.helpers import DECODERS, P24, copy_of, decoder, edit_config, edit_tensors, numpy, reference_logits

PROMPTS = [P24[i : i + 3 + i] for i in range(6)]


@pytest.fixture(scope="module", params=list(DECODERS))
def made(request, strong):
    """Captured sizes 1, 2 and 4; that calls leave nothing behind is itself tested below."""
    with decoder(request.param, strong("qwen2"), max_batch=4, buckets=[1, 2, 4]) as one:
        one.package, one.which = DECODERS[request.param], request.param
        yield one


@pytest.fixture(scope="module")
def singles(made):
    """Each prompt by itself: what every batch has to equal."""
    return [made.generate([prompt], max_new_tokens=10)[0] for prompt in PROMPTS]


def set_stop_ids(path, generation, config) -> None:
    """Write stop ids into generation_config.json and config.json; None leaves the field out."""
    edit_config(path, remove=("eos_token_id",), **({} if config is None else {"eos_token_id": config}))
    (path / "generation_config.json").write_text(json.dumps({} if generation is None else {"eos_token_id": generation}))


def fill_caches(made, value: float) -> None:
    """Overwrite the caches that the decoder keeps between calls."""
    if made.which == "torch":
        cache = made._runner.state(4).cache
        for leaf in (*cache.k, *cache.v):
            leaf.fill_(value)
    else:
        for bucket, state in list(made._runner._states.items()):
            sides = (tuple(jnp.full_like(x, value) for x in side) for side in state.cache)
            made._runner._states[bucket] = state._replace(cache=type(state.cache)(*sides))


def set_embedding(made, token: int, value: float) -> None:
    """Change one embedding row in memory, past the checks of loading."""
    if made.which == "torch":
        made.model.embed_tokens.weight[token] = value
    else:
        name = "embed_tokens.weight"
        made._runner.programs.set_weights({name: made._runner.programs.parameters()[name].at[token].set(value)})


# ---- stop ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize(("generation", "config"), [([72, 123], None), (123, None), (None, [72, 123]), ([72, 123], 136)])
def test_stop_ids_may_be_one_or_a_list_in_either_file(which, generation, config, strong, tmp_path):
    """generation_config.json wins where both speak, as in transformers."""
    path = copy_of(strong("qwen2"), tmp_path / "model")
    set_stop_ids(path, generation, config)
    with decoder(which, path, max_batch=1) as one:
        done = one.generate([P24[:4]], max_new_tokens=6)[0]
    assert (done.token_ids, done.finish_reason) == ([7, 136, 123], "stop")


def test_each_row_ends_at_its_own_stop_id(made, singles):
    """A finished row must neither go on nor hold back the others, in any batch size."""
    first, second = singles[0].token_ids, singles[1].token_ids
    stops = [first[1], second[7]]
    expected = [next(i for i, t in enumerate(s.token_ids) if t in stops) + 1 if set(s.token_ids) & set(stops) else 10 for s in singles]
    assert expected[0] < expected[1] < 10, "the rows have to end at different steps"
    for count in (1, 2, 3, 6):
        done = made.generate(PROMPTS[:count], max_new_tokens=10, stop_token_ids=stops)
        for row, (ours, single) in enumerate(zip(done, singles)):
            assert ours.token_ids == single.token_ids[: expected[row]]
            assert len(ours.logprobs) == expected[row]
            np.testing.assert_allclose(ours.logprobs, single.logprobs[: expected[row]], atol=1e-4)
            assert ours.finish_reason == ("stop" if ours.token_ids[-1] in stops else "length")


def test_a_stop_id_in_the_prompt_stops_nothing(made, singles):
    done = made.generate([PROMPTS[0]], max_new_tokens=10, stop_token_ids=[PROMPTS[0][-1]])[0]
    assert PROMPTS[0][-1] not in singles[0].token_ids
    assert done == singles[0]


def test_a_stop_id_as_the_last_allowed_token_is_a_stop(made, singles):
    done = made.generate([PROMPTS[0]], max_new_tokens=1, stop_token_ids=singles[0].token_ids[:1])[0]
    assert (done.token_ids, done.finish_reason) == (singles[0].token_ids[:1], "stop")


@pytest.mark.parametrize("bad", [[256], [-1], [1.5], 256])
def test_stop_ids_outside_the_vocabulary_are_refused(made, bad):
    with pytest.raises(made.package.DecoderError, match="stop_token_ids"):
        made.generate([P24[:3]], max_new_tokens=1, stop_token_ids=bad)


def test_more_stop_ids_than_the_state_holds_are_refused(made):
    with pytest.raises(made.package.ConfigError, match=r"17 stop ids.*16"):
        made.generate([P24[:3]], max_new_tokens=1, stop_token_ids=list(range(17)))


# ---- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 7))
def test_a_batch_of_any_size_equals_separate_runs(made, singles, count):
    """Three rows run in a bucket of four; five and six are more than the largest bucket holds."""
    done = made.generate(PROMPTS[:count], max_new_tokens=10)
    assert [c.token_ids for c in done] == [c.token_ids for c in singles[:count]]
    assert [c.prompt_token_ids for c in done] == PROMPTS[:count]


def test_rows_are_refilled_as_they_end(made, singles):
    """A row that ends early takes the next prompt while the others are in the middle."""
    stop = singles[0].token_ids[0]
    prompts = [PROMPTS[i % 6] for i in (0, 1, 0, 2, 3, 0, 4, 5, 0, 1)]
    expected = {tuple(p): made.generate([p], max_new_tokens=10, stop_token_ids=[stop])[0].token_ids for p in prompts}
    done = made.generate(prompts, max_new_tokens=10, stop_token_ids=[stop])
    assert [c.token_ids for c in done] == [expected[tuple(p)] for p in prompts]
    assert len(expected[tuple(PROMPTS[0])]) == 1


def test_no_prompts_give_no_completions(made):
    assert made.generate([], max_new_tokens=1) == []


@pytest.mark.parametrize("wrap", [np.array, torch.tensor, jnp.asarray, tuple], ids=["numpy", "torch", "jax", "tuple"])
def test_ids_may_come_from_any_library(made, singles, wrap):
    assert made.generate(wrap(PROMPTS[0]), max_new_tokens=10)[0].token_ids == singles[0].token_ids
    assert made.generate([wrap(PROMPTS[0])], max_new_tokens=10)[0].token_ids == singles[0].token_ids


def test_logprobs_are_those_of_the_raw_logits(made, singles, strong):
    prompt, done = PROMPTS[2], singles[2]
    logits = torch.tensor(reference_logits(strong("qwen2"), prompt + done.token_ids))
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(done.logprobs, expected.numpy(), atol=1e-3)


# ---- limits and bad input ----------------------------------------------------------------------


@pytest.mark.parametrize("which", DECODERS)
def test_the_cache_limit_is_exact(which, strong):
    """The newest token needs no slot: 10 + 7 tokens fit 16 slots, and an eighth is refused in time."""
    prompt, path = P24[:10], strong("qwen2")
    with decoder(which, path, max_batch=1, max_seq_len=64) as long:
        expected = long.generate([prompt], max_new_tokens=7)[0].token_ids
    with decoder(which, path, max_batch=1, max_seq_len=16) as short:
        for count in (6, 7):
            assert short.generate([prompt], max_new_tokens=count)[0].token_ids == expected[:count]
        for count in (8, 20):
            with pytest.raises(DECODERS[which].CacheOverflowError, match=rf"10 tokens and {count} new.*holds 16.*at most 7"):
                short.generate([prompt], max_new_tokens=count)
        assert short.generate([prompt], max_new_tokens=7)[0].token_ids == expected


@pytest.mark.parametrize(("bad", "position", "shown"), [([5, 256], 1, "256"), ([-1], 0, "-1"), ([5, 2**31], 1, str(2**31)), ([5.0], 0, "5.0")])
def test_a_bad_id_is_named_alike_by_both_decoders(bad, position, shown, strong):
    messages = set()
    for which, package in DECODERS.items():
        with decoder(which, strong("qwen2"), max_batch=1) as one:
            with pytest.raises(package.DecoderError) as error:
                one.generate([P24[:3], bad], max_new_tokens=1)
            messages.add(str(error.value))
    (message,) = messages
    assert message.startswith(f"prompt 1: id {shown} at position {position}") and "vocabulary size 256" in message


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", None, True])
def test_a_bad_count_of_new_tokens_is_named(made, bad):
    with pytest.raises(made.package.ConfigError, match="max_new_tokens"):
        made.generate([P24[:3]], max_new_tokens=bad)


def test_lists_of_settings_have_one_entry_a_prompt(made):
    sampling = made.package.Sampling()
    for settings in ({"sampling": [sampling]}, {"row_ids": [1, 2, 3]}):
        with pytest.raises(made.package.ConfigError, match="one for each of the 2 prompts"):
            made.generate(PROMPTS[:2], max_new_tokens=1, **settings)
    with pytest.raises(made.package.ConfigError, match="row_ids"):
        made.generate(PROMPTS[:1], max_new_tokens=1, row_ids=[2**32])


# ---- state between calls -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1e4, math.nan])
def test_a_call_sees_nothing_of_earlier_ones(made, strong, value):
    long, short = [(13 * i + 1) % 256 for i in range(40)], P24[:3]
    with decoder(made.which, strong("qwen2"), max_batch=4, buckets=[1, 2, 4]) as fresh:
        expected = fresh.generate([short], max_new_tokens=8)
    made.generate([long], max_new_tokens=8)
    if value is not None:
        fill_caches(made, value)
    assert made.generate([short], max_new_tokens=8) == expected


def test_an_exception_in_the_middle_leaves_the_decoder_usable(made, singles, monkeypatch):
    real, calls = made._runner.step, []

    def breaks_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("interrupted")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(made._runner, "step", breaks_at_the_third)
        with pytest.raises(RuntimeError, match="interrupted"):
            made.generate(PROMPTS[3:5], max_new_tokens=10)
    assert [c.token_ids for c in made.generate(PROMPTS[:2], max_new_tokens=10)] == [c.token_ids for c in singles[:2]]


# ---- rows that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("which", DECODERS)
def test_a_row_with_bad_logits_ends_with_an_error_and_alone(which, strong):
    """Token 200 is read by the second prompt only; argmax over NaN would give id 0 and go on."""
    prompts = [PROMPTS[0], [200, 7], PROMPTS[1]]
    with decoder(which, strong("qwen2"), max_batch=4, buckets=[4]) as one:
        one.which = which
        before = one.generate(prompts, max_new_tokens=8)
        assert not any(200 in c.token_ids for c in before)
        set_embedding(one, 200, math.nan)
        after = one.generate(prompts, max_new_tokens=8)
        again = one.generate([prompts[0]], max_new_tokens=8)[0]
    assert [after[0], after[2]] == [before[0], before[2]]
    assert (after[1].finish_reason, after[1].token_ids, after[1].logprobs) == ("error", [], [])
    assert "prompt 1" in after[1].error and "not finite" in after[1].error
    assert again.token_ids == before[0].token_ids, "the failed row's cache reached a later call"


@pytest.mark.parametrize("which", DECODERS)
def test_a_row_that_fails_late_keeps_its_good_tokens(which, strong):
    with decoder(which, strong("qwen2"), max_batch=1) as one:
        one.which = which
        good = one.generate([PROMPTS[0]], max_new_tokens=8)[0]
        bad = good.token_ids[3]
        assert bad not in PROMPTS[0] + good.token_ids[:3]
        set_embedding(one, bad, math.inf)
        done = one.generate([PROMPTS[0]], max_new_tokens=8)[0]
    assert (done.finish_reason, done.token_ids) == ("error", good.token_ids[:4])
    assert done.logprobs == good.logprobs[:4]


# ---- new weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", DECODERS)
def test_new_weights_reach_the_compiled_step(which, strong):
    """A step that keeps the old addresses or constants gives old answers and no error."""
    old, new = strong("qwen2"), strong("qwen2", seed=1)
    with decoder(which, new, max_batch=1) as fresh:
        expected, logits = fresh.generate([P24[:4]], max_new_tokens=8), numpy(fresh.score([P24])).copy()
    with decoder(which, old, max_batch=1) as one:
        first = one.generate([P24[:4]], max_new_tokens=8)
        one.load_weights(new)
        assert one.generate([P24[:4]], max_new_tokens=8) == expected != first
        np.testing.assert_array_equal(numpy(one.score([P24])), logits)
        one.load_weights(old)
        assert one.generate([P24[:4]], max_new_tokens=8) == first


@pytest.mark.parametrize("which", DECODERS)
def test_weights_that_cannot_be_used_leave_the_old_ones(which, strong, tmp_path):
    missing, damaged = (copy_of(strong("qwen2", seed=1), tmp_path / name) for name in ("missing", "damaged"))
    edit_tensors(missing, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    edit_tensors(damaged, lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    other = strong("qwen2", num_hidden_layers=2)
    with decoder(which, strong("qwen2"), max_batch=1) as one:
        first = one.generate([P24[:4]], max_new_tokens=8)
        for path, message in ((missing, "layers.2.mlp.up_proj"), (damaged, "model.norm.weight"), (other, "num_layers"), (tmp_path / "none", "none")):
            with pytest.raises(DECODERS[which].DecoderError, match=message):
                one.load_weights(path)
            assert one.generate([P24[:4]], max_new_tokens=8) == first


# ---- one user at a time ------------------------------------------------------------------------


def test_a_second_thread_is_refused(made, singles, monkeypatch):
    """Two threads in one state would mix their rows; waiting would hide the mistake."""
    inside, go_on, real, found = threading.Event(), threading.Event(), made._runner.step, []

    def waits(*arguments):
        inside.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(made._runner, "step", waits)
    thread = threading.Thread(target=lambda: found.extend(made.generate([PROMPTS[0]], max_new_tokens=10)))
    thread.start()
    try:
        assert inside.wait(30)
        for use in (lambda: made.generate([[1]], max_new_tokens=1), lambda: made.prefill([[1]]), lambda: made.score([[1]])):
            with pytest.raises(made.package.DecoderError, match="another thread"):
                use()
    finally:
        go_on.set()
        thread.join(60)
    assert found == [singles[0]]


@pytest.mark.parametrize("which", DECODERS)
def test_a_closed_decoder_says_so(which, strong):
    one = decoder(which, strong("qwen2"), max_batch=1)
    with one:
        state = one.prefill([[1, 2]])
    uses = (lambda: one.generate([[1]], max_new_tokens=1), lambda: one.score([[1]]), lambda: one.decode_step(state), lambda: next(one.stream([1], max_new_tokens=1)))
    for use in (*uses, lambda: one.load_weights(strong("qwen2"))):
        with pytest.raises(DECODERS[which].DecoderError, match="closed"):
            use()
    one.close()  # a second close is harmless


@pytest.mark.parametrize("which", DECODERS)
@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "int8"), ("launch", "none"), ("kernels", "none"), ("max_batch", 0), ("max_seq_len", 1.5), ("buckets", [2, 1]), ("buckets", [8])]
)
def test_a_bad_setting_of_the_decoder_is_named(which, name, value, strong):
    with pytest.raises(DECODERS[which].ConfigError, match=name):
        decoder(which, strong("qwen2"), **{name: value})


def test_the_launch_report_counts_steps_and_idle_rows(strong):
    for which in DECODERS:
        with decoder(which, strong("qwen2"), max_batch=4, buckets=[4]) as one:
            one.generate(PROMPTS[:3], max_new_tokens=5)
            report = one.launch_report()
        (account,) = report["graphs"]
        assert (account["bucket"], account["kind"], account["steps"], account["padded_rows"]) == (4, "greedy", 5, 5)
        assert report["buckets"] == [4] and report["memory_map"]
