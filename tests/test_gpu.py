"""What only a GPU can show: real captures against eager steps, launches counted, memory given back."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
import torch

import torch_decoder.decode
from compare.ceilings import device_ceilings
from compare.ledger import Ledger, tally
from jax_decoder import xla_flags
from tests.helpers import DECODERS, P24, numpy
from torch_decoder.kernels import plain

pytestmark = pytest.mark.gpu
needs_cupti = pytest.mark.skipif(importlib.util.find_spec("cupti") is None, reason="cupti-python is not installed: driver calls cannot be counted")
PROMPTS = [P24[i % 8 : i % 8 + 3 + i % 5] for i in range(16)]
GRAPH = {"torch": "cuda_graph", "jax": "command_buffer"}
PLAIN = {"torch": "eager", "jax": "jit"}


def open_one(which: str, path, launch: str, **settings):
    return DECODERS[which].Decoder.from_pretrained(path, **{"dtype": "bfloat16", "device": "auto", "launch": launch, "max_batch": 4, "max_seq_len": 300, **settings})


def sampling(which: str, kind: str):
    return DECODERS[which].Sampling(temperature=0.8, top_p=0.9, seed=7) if kind == "sampled" else None


def live_rows(handle) -> list[bytes]:
    """Every field of the handle's state, its live rows only, as bytes."""
    state = handle.peek()
    found = []
    for leaf in (*state.cache.k, *state.cache.v, *(getattr(state, name) for name in torch_decoder.decode.STATE_FIELDS[1:])):
        stacked = leaf.ndim == 5  # layers come before rows
        rows = leaf[:, : handle.rows] if stacked else leaf[: handle.rows]
        found.append(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes() if isinstance(rows, torch.Tensor) else np.asarray(rows).tobytes())
    return found


def driver_calls(ledger: Ledger, run) -> dict[str, int]:
    with ledger.counting() as calls:
        run()
        return tally(calls)


@pytest.fixture
def ledger():
    made = Ledger()
    yield made
    made.close()


# ---- graph on against off ----------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("bucket", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("which", DECODERS)
def test_256_steps_differ_in_no_bit(which, bucket, kind, kernels, strong):
    """Every number of live rows: tokens, logits, cache, ring and log-probabilities."""
    path, states = strong("qwen3"), {}
    for launch in (PLAIN[which], GRAPH[which]):
        with open_one(which, path, launch, max_batch=bucket, buckets=[bucket], kernels=kernels) as d:
            for rows in range(1, bucket + 1):
                handle = d.prefill(PROMPTS[:rows], sampling=sampling(which, kind))
                states[launch, rows] = live_rows(d.decode_steps(handle, 256))
                del handle
            assert d.launch_report()["fallbacks"] == []
    different = [rows for rows in range(1, bucket + 1) if states[GRAPH[which], rows] != states[PLAIN[which], rows]]
    assert different == [], f"numbers of live rows whose states differ: {different}"


@pytest.mark.parametrize("which", DECODERS)
def test_the_same_steps_give_the_same_bits_every_time(which, strong):
    """Positions beyond 128, where a library may add up the parts of a cache in the order in which they are done."""
    with open_one(which, strong("qwen3"), GRAPH[which], buckets=[4]) as d:
        found = {tuple(live_rows(d.decode_steps(d.prefill([p * 20 for p in PROMPTS[:3]], sampling=sampling(which, "sampled")), 150))) for _ in range(30)}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 40, 100])
@pytest.mark.parametrize("places", [(0, 63, 64, 130, 299), (130,)], ids=["rows", "one_row"])
@pytest.mark.parametrize(("kv_heads", "group", "width"), [(2, 2, 128), (1, 7, 64), (3, 1, 16), (2, 4, 256)])
def test_attention_by_lengths_equals_two_products(kv_heads, group, width, places, window, dtype):
    """The library's kernel reads no slot past a row's length: those hold NaN."""
    slots, positions, rows = 300, torch.tensor(places, dtype=torch.int32, device="cuda")[:, None], len(places)
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(rows, 1, kv_heads * group, width, generator=generator, device="cuda").to(dtype)
    cache = torch.randn(2, rows, kv_heads, slots, width, generator=generator, device="cuda").to(dtype)
    distance = positions - torch.arange(slots, device="cuda")
    mask = torch.where((distance >= 0) & (distance < (window or slots)), 0.0, float("-inf"))[:, None, None]
    expected = plain.attend_one(q.view(rows, kv_heads, group, width), cache, plain.Seen(mask)).view(rows, 1, -1)
    poisoned = torch.where((distance >= 0)[None, :, None, :, None], cache, float("nan"))
    seen = plain.seen(positions, poisoned, {window})[window]
    assert seen.mask is None
    assert (plain.attend(q, poisoned, seen) - expected).abs().max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize(("first", "length"), [(0, 300), (0, 2), (37, 100), (299, 1), (150, 150)])
@pytest.mark.parametrize(("kv_heads", "group", "width"), [(2, 2, 128), (1, 7, 64), (3, 1, 16), (2, 4, 256)])
def test_attention_of_a_piece_equals_a_mask(kv_heads, group, width, first, length, window, dtype):
    """A piece of a prompt, its first token anywhere; slots that later pieces will fill hold NaN."""
    slots, generator = 300, torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, length, kv_heads * group, width, generator=generator, device="cuda").to(dtype)
    cache = torch.randn(2, 2, kv_heads, slots, width, generator=generator, device="cuda").to(dtype)
    positions = torch.arange(first, first + length, dtype=torch.int32, device="cuda").expand(2, length)
    (by_mask,) = plain.seen(positions, cache.float(), {window}).values()
    expected = plain.attend(q.float(), cache.float(), by_mask)
    cache[:, :, :, first + length :] = float("nan")
    (piece,) = plain.seen(positions, cache, {window}, first).values()
    assert by_mask.mask is not None and piece.mask is None
    assert (plain.attend(q, cache, piece).float() - expected).abs().max() < 2e-2


def test_one_flipped_bit_is_seen(strong):
    with open_one("torch", strong("qwen3"), "cuda_graph") as d:
        handle = d.prefill(PROMPTS[:2])
        before = live_rows(handle)
        handle.peek().cache.v[1].view(torch.int16)[0, 0, 1, 0] ^= 1
        assert live_rows(handle) != before


@pytest.mark.parametrize("which", DECODERS)
def test_a_loop_on_the_device_equals_stepping(which, strong):
    """torch: 1,000 steps in one launch, bit for bit. JAX: another compilation, so tokens alone."""
    path, found = strong("qwen3"), {}
    for launch in (GRAPH[which], "device_loop"):
        with open_one(which, path, launch, max_batch=1, max_seq_len=1100) as d:
            handle = d.decode_steps(d.prefill([P24[:4]]), 1000)
            found[launch] = (numpy(handle.ring).tolist(), live_rows(handle) if which == "torch" else None)
            replays = sum(g["replays"] for g in d.launch_report()["graphs"] if g["launch"] == "device_loop")
            assert launch != "device_loop" or replays == (1 if which == "torch" else 250)
    assert found["device_loop"] == found[GRAPH[which]]


@pytest.mark.parametrize("which", DECODERS)
def test_each_part_of_the_key_gets_a_graph_of_its_own(which, strong):
    """Buckets, kinds and kernels: a graph each, and in each the answers of no graph."""
    path, found = strong("qwen3"), {}
    for launch in (PLAIN[which], GRAPH[which]):
        with open_one(which, path, launch) as first, first.with_options(kernels="fused") as second:
            for d in (first, second):
                for rows, kind in ((1, "greedy"), (2, "greedy"), (1, "sampled"), (1, "greedy")):
                    out = d.generate(PROMPTS[:rows], max_new_tokens=40, sampling=sampling(which, kind))
                    found.setdefault(launch, []).append([c.token_ids for c in out])
                graphs = d.launch_report()["graphs"]
                assert sorted((g["bucket"], g["kind"]) for g in graphs) == [(1, "greedy"), (1, "sampled"), (2, "greedy")]
                assert all(g.get("captures", g.get("compilations")) == (1 if launch == GRAPH[which] or which == "jax" else 0) for g in graphs)
    assert found[GRAPH[which]] == found[PLAIN[which]]


@pytest.mark.parametrize("which", DECODERS)
def test_nothing_moves_in_a_thousand_steps(which, strong):
    with open_one(which, strong("qwen3"), GRAPH[which], max_batch=1, max_seq_len=1100) as d:

        def addresses(handle):
            state = handle.peek()
            return [x.data_ptr() if which == "torch" else x.unsafe_buffer_pointer() for x in (*state.cache.k, *state.cache.v, *state[1:])]

        handle = d.decode_steps(d.prefill([P24[:4]]), 4)
        before = addresses(handle)
        for _ in range(10):
            handle = d.decode_steps(handle, 100)
            assert addresses(handle) == before


# ---- launches ----------------------------------------------------------------------------------


@needs_cupti
@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("which", DECODERS)
def test_a_step_is_one_launch(which, kind, kernels, strong, ledger):
    for launch, graphs in ((GRAPH[which], 20), (PLAIN[which], 0)):
        with open_one(which, strong("qwen3"), launch, kernels=kernels) as d:
            handle = d.decode_steps(d.prefill(PROMPTS[:3], sampling=sampling(which, kind)), 10)
            numpy(handle.tokens)

            def steps(d=d, held=[handle]):  # noqa: B006
                held[0] = d.decode_steps(held[0], 20)

            found = driver_calls(ledger, steps)
        assert (found["graph_launches"], found["graph_updates"]) == (graphs, 0), found
        assert (found["other_launches"] == 0) == (graphs > 0), found


@needs_cupti
def test_a_state_that_is_not_wholly_donated_is_patched(strong, ledger):
    """The control of the counter: with fresh outputs XLA patches the graph at every step."""
    import jax

    from jax_decoder import decode

    with open_one("jax", strong("qwen3"), "command_buffer", max_batch=1) as d:
        programs = d._runner.programs

        def step(weights, cache, rest):
            state = decode.decode_step(programs.merge(weights), decode.DecodeState(cache, *rest), "greedy")
            return state.cache, tuple(state[1:])

        state = d._runner.new_state(1)
        lowered = jax.jit(step, donate_argnums=1, keep_unused=True).lower(programs.weights, state.cache, tuple(state[1:]))
        executable = lowered.compile(compiler_options=xla_flags.step_options(True, "gpu"))
        held, kept = [(state.cache, tuple(state[1:]))], []

        def run(count):
            for _ in range(count):
                held[0] = executable(programs.weights, *held[0])
                kept.append(held[0][1])

        run(6)
        jax.block_until_ready(held[0])
        found = driver_calls(ledger, lambda: run(10))
    assert found["graph_updates"] > 10, found


@needs_cupti
@pytest.mark.parametrize("flag", [xla_flags.TEMPORARIES, ""], ids=["temporaries_apart", "default"])
def test_disturbance_leaves_few_updates_and_none_afterwards(flag, strong, record_property):
    """The default is the flag's control: there XLA's temporaries lie where a caller's arrays do too, and move when it takes their place."""
    environment = {**os.environ, "XLA_FLAGS": f"--{flag}=true" if flag else ""}
    done = subprocess.run([sys.executable, "-m", "tests.disturbance", str(strong("qwen3"))], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    record_property(f"steps_patched_of_{found['steps']}", found["patched"])
    assert found["steps"] == 200 and (found["patched"] <= 10) == bool(flag) and found["quiet"] == 0, found


@needs_cupti
def test_fewer_command_types_mean_more_launches(strong, ledger):
    """Both routes of the flags make the same graph; without fusions it holds less."""
    import jax

    with open_one("jax", strong("qwen3"), "jit", max_batch=1) as d:
        programs, counts = d._runner.programs, {}
        for name, types in (("all", ",".join(xla_flags.COMMAND_TYPES)), ("no fusions", "CUBLAS,CUBLASLT,CUSTOM_CALL"), ("none", "")):
            state = d._runner.new_state(1)
            executable = programs.lower_step(state, "greedy").compile(compiler_options={**xla_flags.step_options(True, "gpu"), "xla_gpu_enable_command_buffer": types})
            held = [state]

            def run(count, held=held, executable=executable):
                for _ in range(count):
                    held[0] = executable(programs.weights, held[0])

            run(5)
            jax.block_until_ready(held[0])
            counts[name] = driver_calls(ledger, lambda run=run: run(10))
    assert counts["all"]["other_launches"] == 0 < counts["no fusions"]["other_launches"] <= counts["none"]["other_launches"], counts
    assert counts["all"]["graph_launches"] == 10 and counts["none"]["graph_launches"] == 0, counts


# ---- hosts, threads, memory --------------------------------------------------------------------


def test_without_its_guard_the_feed_would_lose_values():
    """A kernel that waits stands in front of the copies, so the host runs far ahead of them."""
    from torch_decoder.feed import SLOTS, Feed

    class NoGuard:
        def record(self): ...

        def synchronize(self): ...

    def uploads(feed):
        torch.cuda._sleep(200_000_000)
        return [feed.upload([i] * 4).clone() for i in range(3 * SLOTS)]

    cuda = torch.device("cuda")
    wanted = list(range(3 * SLOTS))
    assert [int(x[0]) for x in uploads(Feed(cuda, 4))] == wanted
    assert [int(x[0]) for x in uploads(Feed(cuda, 4, NoGuard))] != wanted


def test_another_thread_may_use_the_gpu_while_a_step_is_recorded(strong):
    """But not PyTorch's default random numbers: their generator belongs to the recording until it ends."""
    stop, failures, generator = threading.Event(), [], torch.Generator("cuda")

    def busy():
        try:
            while not stop.is_set():
                x = torch.randn(256, 256, device="cuda", generator=generator)
                float((x @ x).sum())
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with open_one("torch", strong("qwen3"), "cuda_graph", capture="ahead") as d:
            assert d.launch_report()["fallbacks"] == []
            d.generate(PROMPTS[:3], max_new_tokens=8)
    finally:
        stop.set()
        thread.join()
    assert failures == []


@pytest.mark.parametrize("which", DECODERS)
def test_a_hundred_decoders_leave_no_memory_behind(which, strong):
    path, process = strong("qwen3"), psutil.Process()

    def cycle():
        with open_one(which, path, GRAPH[which], max_batch=1, max_seq_len=64) as d:
            d.generate([P24[:4]], max_new_tokens=6)
        gc.collect()

    def used():
        free, total = torch.cuda.mem_get_info()
        return total - free, process.memory_info().rss

    for _ in range(10):
        cycle()
    device, host = used()
    for _ in range(100):
        cycle()
    device_after, host_after = used()
    assert device_after - device < 0.1e9, f"device memory grew by {(device_after - device) / 1e6:.0f} MB"
    assert host_after - host < 50e6, f"host memory grew by {(host_after - host) / 1e6:.0f} MB"


@pytest.mark.parametrize("which", DECODERS)
def test_captures_are_quick_and_small(which, strong, record_property):
    with open_one(which, strong("qwen3"), GRAPH[which], max_batch=16, capture="ahead") as d:
        graphs = [g for g in d.launch_report()["graphs"] if g["capture_s"] is not None]
    record_property("capture_ms", [round(g["capture_s"] * 1e3, 2) for g in graphs])
    record_property("graph_bytes", [g["graph_bytes"] for g in graphs])
    seconds = [g["capture_s"] for g in graphs]  # of 5 buckets, greedy and sampled
    assert len(graphs) == 10 and max(seconds) < 0.1 and sum(seconds) < 1


def test_ceilings_hold_together():
    """A graph of many kernels costs the host little more than one of few; the device pays for each."""
    found = device_ceilings(256)
    graphs = found["graph_launch"]
    assert 0.3 < found["gemv_gb_per_s"] / found["device_copy_gb_per_s"] < 1.3
    assert graphs["1000"]["host_us"] < 1000 * found["null_kernel"]["host_us"] / 4
    assert graphs["1000"]["device_us"] > 3 * graphs["100"]["device_us"] > 3 * graphs["10"]["device_us"]
    assert 0.1 < found["switch_node"]["device_us"] < 50, found["switch_node"]
