"""Recorded steps against eager ones, in the PyTorch runner, with recordings that need no GPU."""

from __future__ import annotations

import gc
import logging
import math

import numpy as np
import pytest
import torch

from tests.helpers import P24, decoder
from tests.recorders import POINTS, graph_decoder
from torch_decoder import CaptureError, DecoderError, DeviceError, Sampling
from torch_decoder.decode import RUNNING, leaves
from torch_decoder.runner import GraphKey

PROMPTS = [P24[i : i + 3 + i] for i in range(8)]
SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=7)
GRAPH_LAUNCHES = ("cuda_graph", "device_loop")


@pytest.fixture
def path(strong):
    return strong("qwen3")


@pytest.fixture
def eager(path):
    with decoder("torch", path, max_batch=4) as one:
        yield one


@pytest.fixture(params=GRAPH_LAUNCHES)
def graphs(request, path):
    with graph_decoder(path, launch=request.param) as one:
        yield one


@pytest.fixture
def one_graph(path):
    with graph_decoder(path) as one:
        yield one


def same(ours, theirs) -> None:
    assert [(c.token_ids, c.logprobs, c.finish_reason) for c in ours] == [(c.token_ids, c.logprobs, c.finish_reason) for c in theirs]


def state_of(made, bucket: int):
    return made._runner._bucket_state(bucket)


def bits(state) -> list[bytes]:
    return [leaf.contiguous().numpy().tobytes() for leaf in leaves(state)]


def reports(made) -> dict[tuple[int, str], dict]:
    return {(g["bucket"], g["kind"]): g for g in made.launch_report()["graphs"]}


# ---- graph on against off ----------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_generate_is_the_same_with_and_without_graphs(graphs, eager, sampling, count):
    settings = {"max_new_tokens": 12, "sampling": sampling}
    same(graphs.generate(PROMPTS[:count], **settings), eager.generate(PROMPTS[:count], **settings))


def test_every_leaf_is_equal_bit_for_bit(path, eager):
    """Tokens, logits, cache and ring after 20 steps, and the padded row too."""
    with graph_decoder(path) as made:
        ours, theirs = (one.prefill(PROMPTS[:3], sampling=SAMPLED) for one in (made, eager))
        for _ in range(20):
            ours, theirs = made.decode_step(ours), eager.decode_step(theirs)
        assert bits(ours.peek()) == bits(theirs.peek())


def test_one_flipped_bit_is_seen(path, eager):
    """The control of the comparison above."""
    with graph_decoder(path) as made:
        ours, theirs = (one.decode_step(one.prefill(PROMPTS[:3])) for one in (made, eager))
        ours.peek().cache.v[1].view(torch.int32)[0, 0, 1, 0] ^= 1
        assert bits(ours.peek()) != bits(theirs.peek())


def test_a_step_is_one_replay(one_graph):
    one_graph.generate(PROMPTS[:1], max_new_tokens=9)
    report = reports(one_graph)[1, "greedy"]
    assert report["replays"] == report["steps"] == 9 == one_graph.backend.reached.count("replay")
    assert report["nodes"] > 50 and report["capture_s"] > 0 and report["instantiate_s"] > 0


def test_greedy_and_sampled_have_a_graph_each(one_graph):
    for sampling in (None, SAMPLED, None, SAMPLED):
        one_graph.generate(PROMPTS[:1], max_new_tokens=3, sampling=sampling)
    assert one_graph.backend.reached.count("capture") == 2 and set(reports(one_graph)) == {(1, "greedy"), (1, "sampled")}


def test_a_temperature_of_zero_in_the_sampled_graph_is_greedy(one_graph):
    alone = one_graph.generate(PROMPTS[:1], max_new_tokens=9)[0]
    mixed = one_graph.generate(PROMPTS[:2], max_new_tokens=9, sampling=[Sampling(temperature=0.0), SAMPLED])[0]
    assert mixed.token_ids == alone.token_ids


# ---- what changes without recording again ------------------------------------------------------


def test_new_prompts_lengths_and_settings_record_nothing_again(one_graph, eager):
    one_graph.generate(PROMPTS[:1], max_new_tokens=2, sampling=SAMPLED)
    before = one_graph.backend.reached.count("capture")
    for prompt, sampling, stop in [
        (P24[:20], Sampling(temperature=0.5, seed=1), [1]),
        (P24[3:4], Sampling(temperature=1.5, top_k=5, seed=2), [7, 9]),
        (P24[9:13], Sampling(temperature=0.9, min_p=0.1, top_p=0.5, seed=2**32 - 1), None),
    ]:
        settings = {"max_new_tokens": 15, "sampling": sampling, "stop_token_ids": stop}
        same(one_graph.generate([prompt], **settings), eager.generate([prompt], **settings))
    assert one_graph.backend.reached.count("capture") == before


def test_a_seed_set_after_capture_takes_effect(strong, tmp_path):
    """A flat distribution: what differs is the draw alone."""
    with graph_decoder(strong("qwen3", tie_word_embeddings=False)) as made:
        made.model.lm_head.weight.zero_()
        draws = [made.generate([[5]], max_new_tokens=60, sampling=Sampling(seed=seed))[0].token_ids for seed in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]
    assert len(set(draws[0])) > 40, "draws repeat: the offset does not move"


def test_row_ids_are_read_at_every_replay(one_graph, eager):
    for row_id in (0, 9):
        settings = {"max_new_tokens": 12, "sampling": SAMPLED, "row_ids": [row_id]}
        same(one_graph.generate(PROMPTS[:1], **settings), eager.generate(PROMPTS[:1], **settings))


def test_new_weights_reach_the_graph(one_graph, strong):
    one_graph.generate(PROMPTS[:1], max_new_tokens=8)
    one_graph.load_weights(strong("qwen3", seed=1))
    after = one_graph.generate(PROMPTS[:1], max_new_tokens=8)
    with decoder("torch", strong("qwen3", seed=1)) as fresh:
        same(after, fresh.generate(PROMPTS[:1], max_new_tokens=8))
    assert one_graph.backend.reached.count("capture") == 1


@pytest.mark.parametrize("field", GraphKey._fields)
def test_each_part_of_the_key_is_part_of_the_key(one_graph, field):
    """Two graphs that differ in one part only must not be taken for each other."""
    state = one_graph._runner.state(2)
    key = one_graph._runner._key(state, "greedy", False)
    other = {"bucket": 4, "kind": "sampled", "loop": True, "dtype": torch.float16, "kernels": "compiled", "max_seq_len": 65}[field]
    one_graph._runner._recorded(key, state)
    if field in ("dtype",):
        one_graph._runner.dtype = other
    elif field in ("kernels", "max_seq_len"):
        setattr(one_graph.model, field, other)
    changed = one_graph._runner._key(one_graph._runner.state(4) if field == "bucket" else state, "sampled" if field == "kind" else "greedy", field == "loop")
    assert changed == key._replace(**{field: other}) and changed not in one_graph._runner._graphs


# ---- fixed addresses ---------------------------------------------------------------------------


def test_nothing_moves_in_a_thousand_steps(path):
    with graph_decoder(path, max_batch=1, max_seq_len=1100) as made:
        state = made.prefill([P24[:4]])
        before = [leaf.data_ptr() for leaf in leaves(state.peek())]
        for _ in range(1000):
            state = made.decode_step(state)
        assert [leaf.data_ptr() for leaf in leaves(state.peek())] == before
        assert int(state.positions[0]) == 1004


def test_buckets_are_the_first_rows_of_one_state(one_graph):
    """One piece of memory serves every bucket, so smaller buckets cost nothing."""
    small, large = (state_of(one_graph, bucket) for bucket in (2, 4))
    for x, y in zip(leaves(small), leaves(large)):
        assert x.data_ptr() == y.data_ptr() and x.shape[1:] == y.shape[1:] and (x.shape[0], y.shape[0]) == (2, 4)


@pytest.mark.parametrize("what", ["weight", "rope", "state"])
def test_a_moved_buffer_is_not_read_where_it_was(one_graph, eager, what, caplog):
    one_graph.generate(PROMPTS[:1], max_new_tokens=3)
    if what == "weight":
        one_graph.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(one_graph.model.layers[0].mlp.down_proj.weight.clone(), requires_grad=False)
    elif what == "rope":
        one_graph.model.rebuild_buffers()
    else:
        one_graph._runner._fixed, one_graph._runner._views = None, {}
    with caplog.at_level(logging.WARNING):
        done = one_graph.generate(PROMPTS[:1], max_new_tokens=9)
    same(done, eager.generate(PROMPTS[:1], max_new_tokens=9))
    assert "moved" in caplog.text and "moved" in one_graph.launch_report()["fallbacks"][0]["reason"]


def test_a_moved_buffer_is_an_error_when_strict(path):
    with graph_decoder(path, strict=True) as made:
        made.generate(PROMPTS[:1], max_new_tokens=3)
        made.model.rebuild_buffers()
        with pytest.raises(CaptureError, match="moved"):
            made.generate(PROMPTS[:1], max_new_tokens=3)


# ---- warm-up and recording ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("loop", [False, True])
def test_recording_leaves_the_state_as_it_was(one_graph, kind, loop):
    """Rows in the middle of a generation, one at the last slot, one ended, one never used."""
    runner = one_graph._runner
    state = runner.state(4)
    row = {"status": RUNNING, "tokens": 9, "positions": 2, "limits": 40, "stop_ids": [5], "filters": [0.7, 0.9, 0.0], "draws": [5, 1, 0]}
    runner.admit(state, 0, [3, 4, 9], row)
    runner.admit(state, 1, list(range(64)), {**row, "positions": 63, "limits": 64})
    runner.admit(state, 2, [3, 4, 9], row)
    for _ in range(5):
        state = runner.step(state, "greedy", 3)
    runner._control.copy_(torch.tensor([9, 1, 1]))
    before, control = bits(state), runner._control.tolist()
    runner._recorded(runner._key(state, kind, loop)._replace(max_seq_len=-1), state)
    assert bits(state) == before and runner._control.tolist() == control


def test_garbage_is_not_collected_while_recording(one_graph, monkeypatch):
    seen = []
    monkeypatch.setattr(one_graph.backend, "reach", lambda point: seen.append(gc.isenabled()))
    assert gc.isenabled()
    one_graph.generate(PROMPTS[:1], max_new_tokens=1)
    assert seen[:3] == [False] * 3 and gc.isenabled()


def test_capturing_ahead_records_the_largest_bucket_first(path, caplog):
    with graph_decoder(path, buckets=[1, 2, 4]) as made:
        order = []
        made._runner.prepare(("greedy", "sampled"), order.append)
        made.generate(PROMPTS[:3], max_new_tokens=2, sampling=SAMPLED)
        assert made.backend.reached.count("capture") == 6
    assert [line.split("bucket ")[1] for line in order] == [f"{b}, {k}" for b in (4, 2, 1) for k in ("greedy", "sampled")]
    assert order[0].startswith("recording graph 1 of 6")


# ---- batches and padding -----------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, 1e4, math.inf])
def test_poison_in_spare_rows_and_slots_changes_nothing(graphs, eager, poison):
    """What an earlier call left, in the cache, the logits and every other leaf."""
    graphs.generate(PROMPTS[:4], max_new_tokens=4)
    for leaf in leaves(state_of(graphs, 4)):
        leaf.fill_(poison if leaf.is_floating_point() else 99)
    same(graphs.generate(PROMPTS[:3], max_new_tokens=12), eager.generate(PROMPTS[:3], max_new_tokens=12))


def test_the_spare_row_may_be_any_row(one_graph, eager):
    """Rows that end at once leave their place empty between the others."""
    for spare in range(4):
        prompts = [*PROMPTS[:spare], [1], *PROMPTS[spare:3]]
        first = one_graph.generate([[1]], max_new_tokens=1)[0].token_ids
        ids = [c.token_ids for c in one_graph.generate(prompts, max_new_tokens=12, stop_token_ids=first)]
        alone = [eager.generate([p], max_new_tokens=12, stop_token_ids=first)[0].token_ids for p in prompts]
        assert ids == alone
        assert len(ids[spare]) == 1 and max(map(len, ids)) > 1, "one row ends at once, others go on"


def test_a_row_writes_nothing_outside_its_own_row(one_graph):
    state = one_graph.prefill(PROMPTS[:2])
    spare = [leaf[2:].clone() for leaf in leaves(state_of(one_graph, 4))]
    for _ in range(10):
        state = one_graph.decode_step(state)
    for leaf, before in zip(leaves(state_of(one_graph, 4)), spare):
        assert torch.equal(leaf[2:], before)


def test_an_idle_row_in_the_bucket_changes_no_live_row(path):
    """Bucket 4 with three rows: other contents of the fourth change 0 bits."""
    found = []
    for garbage in (0, 1):
        with graph_decoder(path, buckets=[4]) as made:
            state = made.prefill(PROMPTS[:3])
            raw = state.peek()
            if garbage:
                raw.tokens[3], raw.positions[3] = 77, 40
                for cache in (*raw.cache.k, *raw.cache.v):
                    cache[3].normal_()
            for _ in range(16):
                state = made.decode_step(state)
            found.append([leaf[:3].clone() for leaf in leaves(state.peek())])
    assert all(torch.equal(x, y) for x, y in zip(*found))


def test_rows_are_refilled_without_recording_again(graphs, eager):
    stop = eager.generate([PROMPTS[0]], max_new_tokens=1)[0].token_ids
    prompts = [PROMPTS[i % 8] for i in (0, 1, 0, 2, 3, 0, 4, 5, 0, 1, 6)]
    settings = {"max_new_tokens": 10, "stop_token_ids": stop}
    done = graphs.generate(prompts, **settings)
    assert [c.token_ids for c in done] == [eager.generate([p], **settings)[0].token_ids for p in prompts]
    assert graphs.backend.reached.count("capture") == 1


def test_a_report_says_which_kernels_a_bucket_runs(one_graph):
    """Fused ones take few rows: a larger bucket of the same decoder runs plain ones."""
    one_graph.generate(PROMPTS[:1], max_new_tokens=2)
    assert reports(one_graph)[1, "greedy"]["kernels"] == "plain"
    one_graph.model.kernels = "fused"
    accounts = {bucket: one_graph._runner._account(GraphKey(bucket, "greedy", False, torch.float32, "fused", 64)) for bucket in (16, 32)}
    assert (accounts[16].kernels, accounts[32].kernels) == ("fused", "plain")


def test_padding_is_counted(one_graph):
    one_graph.generate(PROMPTS[:3], max_new_tokens=6)
    report = reports(one_graph)[4, "greedy"]
    assert (report["steps"], report["padded_rows"]) == (6, 6)


@pytest.mark.parametrize("count", range(1, 7))
def test_a_batch_takes_the_next_larger_bucket(path, eager, count):
    with graph_decoder(path, buckets=[1, 2, 4]) as made:
        same(made.generate(PROMPTS[:count], max_new_tokens=6), eager.generate(PROMPTS[:count], max_new_tokens=6))
        assert set(reports(made)) == {({1: 1, 2: 2}.get(count, 4), "greedy")}


# ---- handles -----------------------------------------------------------------------------------


def test_two_continuations_share_the_graph_and_nothing_else(one_graph, eager):
    """Only one state lies in the fixed memory; stepping the other one brings it there."""
    left = one_graph.prefill([PROMPTS[0]], forced=[[1, 2, 3]])
    right = one_graph.fork(left)
    other = one_graph.prefill(PROMPTS[:2])
    expected = [eager.prefill([PROMPTS[0]], forced=[[1, 2, 3]]), eager.prefill([PROMPTS[0]], forced=[[1, 2, 3]]), eager.prefill(PROMPTS[:2])]
    found = [left, right, other]
    for _ in range(6):
        for i in (0, 2, 1):
            found[i], expected[i] = one_graph.decode_step(found[i]), eager.decode_step(expected[i])
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.positions, theirs.positions)


def test_generate_between_two_steps_keeps_the_callers_state(one_graph, eager):
    ours, theirs = one_graph.prefill(PROMPTS[:2]), eager.prefill(PROMPTS[:2])
    one_graph.generate(PROMPTS[3:6], max_new_tokens=5)
    for _ in range(5):
        ours, theirs = one_graph.decode_step(ours), eager.decode_step(theirs)
    assert torch.equal(ours.logits, theirs.logits)


def test_a_dropped_state_is_not_copied(one_graph, monkeypatch):
    copies, real = [], one_graph._runner.copy
    monkeypatch.setattr(one_graph._runner, "copy", lambda held: copies.append(1) or real(held))
    state = one_graph.prefill(PROMPTS[:2])
    del state
    one_graph.generate(PROMPTS[:1], max_new_tokens=2)
    assert copies == []


# ---- a loop on the device ----------------------------------------------------------------------


def test_a_generation_is_one_launch(path, eager):
    with graph_decoder(path, launch="device_loop", max_seq_len=64) as made:
        same(made.generate([P24[:4]], max_new_tokens=50), eager.generate([P24[:4]], max_new_tokens=50))
        assert made.backend.reached.count("replay") == 1
        assert made.launch_report()["graphs"][0]["steps"] == 50


def test_a_loop_stops_at_stop_ids(path, eager):
    whole = eager.generate([P24[:4]], max_new_tokens=30)[0].token_ids
    stop = [whole[11]]
    with graph_decoder(path, launch="device_loop") as made:
        done = made.generate([P24[:4]], max_new_tokens=30, stop_token_ids=stop)[0]
        assert done.token_ids == whole[: whole.index(stop[0]) + 1] and done.finish_reason == "stop"
        assert made.launch_report()["graphs"][0]["steps"] == len(done.token_ids), "the device went on after the end"


def test_steps_of_a_loop_equal_single_steps(path, eager):
    with graph_decoder(path, launch="device_loop") as made:
        ours, theirs = made.decode_steps(made.prefill(PROMPTS[:3]), 20), eager.decode_steps(eager.prefill(PROMPTS[:3]), 20)
        assert bits(ours.peek()) == bits(theirs.peek())
        assert made.backend.reached.count("replay") == 2  # the prefill's own step, and the loop


def test_a_loop_ends_early_to_refill_a_row(path, eager):
    """Otherwise the queue would wait for the longest row."""
    stop = eager.generate([PROMPTS[0]], max_new_tokens=1)[0].token_ids
    with graph_decoder(path, launch="device_loop", max_batch=2) as made:
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
        done = made.generate(prompts, max_new_tokens=20, stop_token_ids=stop)
        assert [c.token_ids for c in done] == [eager.generate([p], max_new_tokens=20, stop_token_ids=stop)[0].token_ids for p in prompts]
        steps = sum(g["steps"] for g in made.launch_report()["graphs"])
        assert steps <= 1 + max(len(done[1].token_ids), 0) + len(done[2].token_ids)


def test_streams_come_token_by_token_in_a_loop_too(path):
    with graph_decoder(path, launch="device_loop") as made:
        made._runner.advance(made._runner.state(1), "greedy", 1, 1)
        assert [key.loop for key in made._runner._graphs] == [False]


def test_without_conditional_nodes_a_loop_falls_back_to_graphs(path, eager, monkeypatch, caplog):
    with graph_decoder(path, launch="device_loop") as made:

        def refuses(captured, flag):
            raise CaptureError("the driver is CUDA 12.2, device_loop needs 12.4")

        monkeypatch.setattr(made.backend, "instantiate_loop", refuses)
        same(made.generate(PROMPTS[:2], max_new_tokens=9), eager.generate(PROMPTS[:2], max_new_tokens=9))
        (fallback,) = made.launch_report()["fallbacks"]
        assert fallback["launch"] == "device_loop" and "12.4" in fallback["reason"] and "cuda_graph" in caplog.text


# ---- recovery ----------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", GRAPH_LAUNCHES)
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: operation not permitted"), torch.cuda.OutOfMemoryError("out of memory"), MemoryError(), CaptureError("refused")])
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_point_is_survived(path, eager, point, error, launch, caplog):
    with graph_decoder(path, launch=launch) as made:
        made.backend.fail[point] = error
        with caplog.at_level(logging.WARNING):
            same(made.generate(PROMPTS[:2], max_new_tokens=9, sampling=SAMPLED), eager.generate(PROMPTS[:2], max_new_tokens=9, sampling=SAMPLED))
            made.generate(PROMPTS[:2], max_new_tokens=3, sampling=SAMPLED)
        fallbacks = made.launch_report()["fallbacks"]
        assert {(f["bucket"], f["kind"]) for f in fallbacks} == {(2, "sampled")}
        assert len(caplog.records) == len(fallbacks) == made.backend.memory_returned, "one warning for each, and its memory given back"
        assert made.backend.open_graphs == 0
        made.backend.fail.clear()
        same(made.generate(PROMPTS[:1], max_new_tokens=5), eager.generate(PROMPTS[:1], max_new_tokens=5))
        assert made.backend.open_graphs == 1, "other buckets still get graphs"


def test_a_kernel_of_tritons_that_does_not_fit_is_survived(path, eager):
    """Triton's errors are no RuntimeErrors."""
    errors = pytest.importorskip("triton.errors")
    with graph_decoder(path) as made:
        made.backend.fail["warm_up"] = errors.TritonError("out of resource: shared memory, Required: 282688, Hardware limit: 232448")
        same(made.generate(PROMPTS[:1], max_new_tokens=5), eager.generate(PROMPTS[:1], max_new_tokens=5))
        assert "shared memory" in made.launch_report()["fallbacks"][0]["reason"]


@pytest.mark.parametrize("failing", [1, 4, 9])
def test_a_replay_that_fails_in_the_middle_loses_no_token(one_graph, eager, monkeypatch, failing):
    real, calls = one_graph.backend.reach, []

    def at_last(point):
        calls.append(point)
        if calls.count("replay") == failing and point == "replay":
            raise RuntimeError("launch refused")
        real(point)

    monkeypatch.setattr(one_graph.backend, "reach", at_last)
    settings = {"max_new_tokens": 12, "sampling": SAMPLED, "stop_token_ids": [3]}
    done, expected = one_graph.generate(PROMPTS[:5], **settings), eager.generate(PROMPTS[:5], **settings)
    assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in expected]
    for ours, theirs in zip(done, expected):  # rebuilt by prefill, whose sums run in another order
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert one_graph.launch_report()["fallbacks"], "nothing failed"


@pytest.mark.parametrize("point", POINTS)
def test_a_state_in_a_callers_hands_survives_too(path, eager, point):
    with graph_decoder(path) as made:
        made.backend.fail[point] = RuntimeError("refused")
        ours, theirs = (one.prefill(PROMPTS[:3], sampling=SAMPLED) for one in (made, eager))
        for _ in range(6):
            ours, theirs = made.decode_step(ours), eager.decode_step(theirs)
        assert bits(ours.peek()) == bits(theirs.peek())


@pytest.mark.parametrize("point", POINTS)
def test_strict_raises_and_leaves_the_decoder_usable(path, eager, point):
    with graph_decoder(path, strict=True) as made:
        made.backend.fail[point] = RuntimeError("operation not permitted when stream is capturing\nmore")
        with pytest.raises(CaptureError, match=r"bucket 2, greedy: operation not permitted when stream is capturing$"):
            made.generate(PROMPTS[:2], max_new_tokens=3)
        made.backend.fail.clear()
        same(made.generate(PROMPTS[:2], max_new_tokens=3), eager.generate(PROMPTS[:2], max_new_tokens=3))


def test_a_fault_of_our_own_is_not_swallowed(one_graph):
    one_graph.backend.fail["capture"] = TypeError("a bug")
    with pytest.raises(TypeError, match="a bug"):
        one_graph.generate(PROMPTS[:1], max_new_tokens=3)


def test_a_lost_context_closes_the_decoder(one_graph):
    one_graph.generate(PROMPTS[:1], max_new_tokens=3)
    one_graph.backend.fail["replay"], one_graph.backend.is_alive = RuntimeError("an illegal memory access was encountered"), False
    with pytest.raises(DeviceError, match=r"illegal memory access.*new one"):
        one_graph.generate(PROMPTS[:1], max_new_tokens=3)
    with pytest.raises(DecoderError, match="closed"):
        one_graph.generate(PROMPTS[:1], max_new_tokens=3)
    one_graph.close()


def test_failures_while_capturing_ahead_are_reported_and_survived(path, eager):
    with graph_decoder(path, buckets=[1, 2]) as made:
        made.backend.fail["capture"] = RuntimeError("refused")
        made.capture()
        assert len(made.launch_report()["fallbacks"]) == 4
        same(made.generate(PROMPTS[:2], max_new_tokens=3), eager.generate(PROMPTS[:2], max_new_tokens=3))


# ---- release -----------------------------------------------------------------------------------


def test_closing_releases_every_graph(graphs):
    for count in (1, 2, 4):
        graphs.generate(PROMPTS[:count], max_new_tokens=2)
        graphs.generate(PROMPTS[:count], max_new_tokens=2, sampling=SAMPLED)
    assert graphs.backend.open_graphs == 6
    graphs.close()
    graphs.close()
    assert graphs.backend.open_graphs == 0
    with pytest.raises(DecoderError, match="closed"):
        graphs.generate([[1]], max_new_tokens=1)


def test_released_graphs_are_recorded_anew_and_the_state_goes_on(one_graph, eager):
    ours, theirs = (d.prefill(PROMPTS[:1]) for d in (one_graph, eager))
    ours, theirs = (d.decode_steps(s, 3) for d, s in ((one_graph, ours), (eager, theirs)))
    returned = one_graph.backend.memory_returned
    one_graph.release_graphs()
    assert one_graph.backend.open_graphs == 0 and one_graph.backend.memory_returned == returned + 1
    ours, theirs = (d.decode_steps(s, 3) for d, s in ((one_graph, ours), (eager, theirs)))
    assert bits(ours.peek()) == bits(theirs.peek())
    report = reports(one_graph)[1, "greedy"]
    assert report["captures"] == one_graph.backend.reached.count("capture") == 2 and report["replays"] == report["steps"] == 7
    eager.release_graphs()  # there are none, which is no error


def test_graphs_of_a_lost_device_are_not_released(one_graph):
    one_graph.generate(PROMPTS[:1], max_new_tokens=2)
    one_graph.backend.is_alive = False
    with pytest.raises(DeviceError, match="new one"):
        one_graph.release_graphs()


def test_nothing_of_a_closed_decoder_stays_in_memory(path):
    """The weights of a closed decoder must be free for the next one."""
    import weakref

    made = graph_decoder(path)
    made.generate(PROMPTS[:2], max_new_tokens=2)
    watched = [weakref.ref(made.model.layers[0].mlp.down_proj.weight), weakref.ref(state_of(made, 4).cache.k[0])]
    made.close()
    gc.collect()
    assert [ref() is None for ref in watched] == [True, True]


def test_reports_are_plain_data(graphs):
    import json

    graphs.generate(PROMPTS[:2], max_new_tokens=2)
    report = json.loads(json.dumps(graphs.launch_report()))
    assert report["graphs"][0]["bucket"] == 2 and report["memory_map"][0]["offset"] == 0
    assert np.prod(report["memory_map"][0]["shape"]) * 4 == report["memory_map"][0]["bytes"]


def test_memory_of_warm_up_and_of_the_graph_are_counted_apart(path):
    """A library's workspace of 32 MiB, taken once at the first warm-up, is no part of a graph."""
    with graph_decoder(path) as made:
        backend, free = made.backend, [10_000]
        backend.free_bytes = lambda: free[0]
        real_warm_up, real_capture = backend.warm_up, backend.capture
        backend.warm_up = lambda step, times: (real_warm_up(step, times), free.__setitem__(0, free[0] - 3200))
        backend.capture = lambda step: (free.__setitem__(0, free[0] - 17), real_capture(step))[1]
        made.generate([[5, 6, 7]], max_new_tokens=2)
        (report,) = reports(made).values()
        assert (report["warm_up_bytes"], report["graph_bytes"]) == (3200, 17)
