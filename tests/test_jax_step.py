"""What a command buffer relies on: state written in place, one trace, and no copies in the program."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_decoder
import jax_decoder.decode
from compare.program import result_sizes
from jax_decoder import xla_flags
from jax_decoder.cache import KVCache
from jax_decoder.checkpoint import load_parameters
from jax_decoder.model import PACKINGS, Model
from jax_decoder.runner import StepRunner
from tests.helpers import P24, ROOT, TOLERANCE, decoder, reference_logits

KINDS = ("greedy", "sampled")
ROW = {"status": 1, "tokens": P24[3], "positions": 3, "limits": 40, "stop_ids": [], "filters": [0.7, 0.9, 0.0], "draws": [5, 1, 0]}


def make_runner(path, packing: str = "separate", launch: str = "jit") -> StepRunner:
    device = jax.devices("cpu")[0]
    dtype = jnp.dtype("float32")
    model, parameters = load_parameters(path, dtype, jax.sharding.SingleDeviceSharding(device), 64, packing)
    return StepRunner(model, parameters, launch, (1, 2), dtype, device)


@pytest.fixture(scope="module", params=PACKINGS)
def runner(request, strong):
    return make_runner(strong("qwen3"), request.param)


@pytest.fixture(scope="module")
def programs(runner):
    """The compiled step's text, by sampling kind."""
    return {kind: runner.programs.lower_step(runner.new_state(2), kind).compile().as_text() for kind in KINDS}


def aliases(text: str) -> dict[int, int]:
    """Output number to parameter number, from the header of a compiled module."""
    header = text[: text.index("\n")]
    return {int(out): int(parameter) for out, parameter in re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)}


# ---- donation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_is_aliased_to_its_own_output(runner, programs, kind):
    """A leaf that went to fresh memory would give the recorded graph new addresses each step."""
    leaves = len(jax.tree.leaves(runner.new_state(2)))
    first = len(runner.programs.weights)
    assert aliases(programs[kind]) == {i: first + i for i in range(leaves)}


@pytest.mark.parametrize("kind", KINDS)
def test_no_leaf_moves_over_steps(runner, kind):
    state = runner.admit(runner.new_state(2), 0, P24[:4], ROW)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    for _ in range(5):
        state = runner.step(state, kind, 1)
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == before
    assert int(state.positions[0]) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["copy", "transpose"])
def test_the_program_copies_no_weight_and_no_cache(runner, programs, kind, operation):
    """A layout that the products do not want, or a cache read after it was written, costs a copy a step."""
    sizes = [leaf.size for leaf in (*runner.programs.weights, *runner.new_state(2).cache.k) if leaf.ndim > 1]
    layers = runner.config.num_layers if runner.packing == "stacked" else 1
    smallest = min(size for size in sizes if size > 4096) // layers
    assert re.search(r" (dot|fusion|custom-call)\(", programs[kind]), "the text is not the compiled program"
    assert [n for n in result_sizes(programs[kind], operation) if n >= smallest] == []


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_token_past_the_end_is_not_written(batch, layers):
    """A slice would be clamped to the last slot, in the stacked cache and in one array a layer."""
    shape = (batch, 2, 4, 3) if layers is None else (layers, batch, 2, 4, 3)
    cache = KVCache((jnp.zeros(shape),), (jnp.ones(shape),))
    new = jnp.full((batch, 1, 2, 3), 5.0)
    for slot in (4, 9):
        written = cache.write(0, new, new, jnp.full((batch, 1), slot, jnp.int32))
        assert all((x == y).all() for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(cache)))
    k, v = cache.write(0, new, new, jnp.full((batch, 1), 3, jnp.int32)).read(0)
    assert (k[:, :, 3] == 5).all() and (v[:, :, 3] == 5).all() and (k[:, :, :3] == 0).all() and (v[:, :, :3] == 1).all()


def test_the_rows_fields_share_one_array(runner):
    """Few arrays: each costs the host time at every step. Fields do not overlap, and floats keep their bits."""
    state = runner.new_state(2)
    assert len(jax.tree.leaves(state)) == 2 + len(jax.tree.leaves(state.cache))
    values = {name: np.arange(math.prod(region.shape)).reshape(region.shape).astype(region.dtype) - 0.25 for name, region in state.regions.items()}
    values = {name: value.astype(state.regions[name].dtype) for name, value in values.items()}
    changed = state.with_fields(**{name: jnp.asarray(value) for name, value in values.items()})
    for name, value in values.items():
        np.testing.assert_array_equal(getattr(changed, name), value)
    one = changed.with_row(jnp.int32(1), filters=jnp.asarray([0.5, 0.25, 2.0]), tokens=-3)
    for name, value in values.items():
        expected = value.copy()
        if name in ("filters", "tokens"):
            expected[1] = [0.5, 0.25, 2.0] if name == "filters" else -3
        np.testing.assert_array_equal(getattr(one, name), expected)


def test_both_packings_give_equal_logits(strong):
    path, found = strong("qwen3"), []
    for packing in PACKINGS:
        one = make_runner(path, packing)
        state = one.step(one.admit(one.new_state(2), 1, P24[:4], ROW), "greedy", 1)
        found.append((np.asarray(one.score(P24)), np.asarray(state.logits)[1]))
    assert np.abs(found[0][0] - found[1][0]).max() < 1e-4
    assert np.abs(found[0][1] - found[1][1]).max() < 1e-4
    assert np.abs(found[0][0] - reference_logits(path, P24)).max() < TOLERANCE
    assert np.abs(found[1][1] - reference_logits(path, P24)[3]).max() < TOLERANCE


def test_op_by_op_equals_the_compiled_step(strong):
    found = []
    for launch in ("jit", "op_by_op"):
        one = make_runner(strong("qwen3", num_hidden_layers=1), launch=launch)
        state = one.step(one.admit(one.new_state(1), 0, P24[:4], ROW), "greedy", 1)
        found.append(np.asarray(state.logits))
    assert np.abs(found[0] - found[1]).max() < 1e-4


# ---- traces ------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """A list that grows by the sampling kind at each trace: Python runs only while tracing."""
    found, real = [], jax_decoder.decode.decode_step

    def counted(model, state, kind):
        found.append((state.tokens.shape[0], kind))
        return real(model, state, kind)

    monkeypatch.setattr(jax_decoder.decode, "decode_step", counted)
    return found


def test_the_step_is_traced_once_for_each_shape_and_kind(traces, strong):
    """A Python number where an array was has another type and would compile the step again."""
    sampling = jax_decoder.Sampling
    kinds = [sampling(0.5, seed=1), sampling(np.float32(0.7), seed=np.int64(2)), sampling(np.array(0.9), top_k=np.int32(3), seed=np.array(3))]
    with decoder("jax", strong("llama"), max_batch=2, buckets=[2]) as one:
        for count in (8, np.int32(8), np.array(8)):
            one.generate([P24[:3]], max_new_tokens=count)
            one.generate([P24[:5], np.array(P24[2:9])], max_new_tokens=count)
        assert traces == [(2, "greedy")]
        for settings in kinds:
            one.generate([P24[:3], P24[:5]], max_new_tokens=8, sampling=settings)
        one.decode_step(one.prefill([P24[:3]], sampling=kinds[0], forced=[[1, 2]]))
        one.load_weights(strong("llama", seed=1))
        one.generate([P24[:3]], max_new_tokens=8)
        assert traces == [(2, "greedy"), (2, "sampled")]
        assert [account["compilations"] for account in one.launch_report()["graphs"]] == [1, 1]


def test_admission_and_prefill_are_traced_once(monkeypatch, strong):
    """Prompts come in many lengths; each must not compile anew."""
    counts = Counter()

    def counted(name, real):
        return lambda *arguments: counts.update([name]) or real(*arguments)

    for name in ("admit", "prefill_chunk", "release"):
        monkeypatch.setattr(jax_decoder.decode, name, counted(name, getattr(jax_decoder.decode, name)))
    with decoder("jax", strong("llama"), max_batch=1) as one:
        for length in (1, 2, 7, 32, 33, 50):
            one.generate([[(3 * i) % 256 for i in range(length)]], max_new_tokens=2)
    assert counts == {"admit": 1, "prefill_chunk": 1, "release": 1}


def test_the_module_itself_is_what_the_step_traces(monkeypatch, strong):
    """A second forward pass beside the module's would drift from it unnoticed."""
    real, seen = Model.__call__, []

    def watched(self, tokens, *arguments, **settings):
        seen.append(isinstance(tokens, jax.core.Tracer))
        return real(self, tokens, *arguments, **settings)

    monkeypatch.setattr(Model, "__call__", watched)
    one = make_runner(strong("qwen3", num_hidden_layers=1))
    state = one.new_state(1)
    one.step(one.step(state, "greedy", 1), "greedy", 1)
    assert seen == [True]


# ---- XLA flags ---------------------------------------------------------------------------------

UNKNOWN = "--xla_gpu_no_such_flag=1"


def test_unknown_flags_are_found_without_ending_this_process():
    flags = f"--xla_gpu_autotune_level=0 {UNKNOWN} --xla_gpu_graph_level=0"
    assert set(xla_flags.unknown(flags)) == {"xla_gpu_no_such_flag", "xla_gpu_graph_level"}
    assert xla_flags.unknown("--xla_gpu_autotune_level=0") == ()


def test_every_flag_of_this_project_exists_here():
    """But for one that came with jaxlib 0.11, which is passed where it is accepted."""
    known = xla_flags.known()
    assert {name for name in known if not known[name]} <= {xla_flags.EARLY[1]} and set(known) == set(xla_flags.FLAGS)


def test_flags_of_the_user_are_kept_and_unknown_ones_are_errors(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert xla_flags.check_environment() == "--xla_gpu_autotune_level=0" == os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", UNKNOWN)
    with pytest.raises(jax_decoder.ConfigError, match="xla_gpu_no_such_flag"):
        xla_flags.check_environment()
    monkeypatch.delenv("XLA_FLAGS")
    assert xla_flags.check_environment() == ""


def test_the_command_line_names_an_unknown_flag():
    """XLA alone would end the process without a Python exception."""
    environment = {**os.environ, "XLA_FLAGS": UNKNOWN}
    done = subprocess.run([sys.executable, "-m", "jax_decoder", "hi"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2, done.stderr
    assert "xla_gpu_no_such_flag" in done.stderr and len(done.stderr.splitlines()) == 1
