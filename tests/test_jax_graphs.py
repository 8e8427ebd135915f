"""Launch modes of the JAX runner on a CPU: fallbacks, several steps in one program, accounts.

Everything but the recording itself, which XLA does on a GPU only; tests/gpu has the rest.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_decoder import CaptureError, Decoder, DecoderError, DeviceError, Sampling, runner, xla_flags
from jax_decoder.buckets import check_buckets
from jax_decoder.checkpoint import load_parameters
from jax_decoder.runner import FIRST_RUNS, LOOP_STEPS, GraphKey, StepRunner, compile_lowered
from jax_decoder.text import Tokenizer
from tests.helpers import P24, decoder

PROMPTS = [P24[i : i + 3 + i] for i in range(8)]
SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=7)
GRAPH_LAUNCHES = ("command_buffer", "device_loop")


class Compiler:
    """Stands in for compilation: counts, and fails where it is told to."""

    def __init__(self) -> None:
        self.compiled: list[dict] = []
        self.fail_compiling: BaseException | None = None
        self.fail_running: dict[int, BaseException] = {}  # by number of the run
        self.use_up = False  # a failed run took the donated state with it
        self.runs = 0

    def __call__(self, lowered, options):
        self.compiled.append(options)
        if self.fail_compiling is not None and len(self.compiled) == 1:
            raise self.fail_compiling
        executable = compile_lowered(lowered, options)

        def run(weights, state):
            self.runs += 1
            if error := self.fail_running.pop(self.runs, None):
                if self.use_up:
                    for leaf in jax.tree.leaves(state):
                        leaf.delete()
                raise error
            return executable(weights, state)

        return run


def graph_decoder(path, launch: str = "command_buffer", max_batch: int = 4, buckets=None, strict: bool = False, packing: str = "separate") -> Decoder:
    """A CPU decoder in a graph mode; ``decoder.compiler`` is what compiles its steps."""
    device, dtype, compiler = jax.devices("cpu")[0], jnp.dtype("float32"), Compiler()
    model, parameters = load_parameters(path, dtype, jax.sharding.SingleDeviceSharding(device), 64, packing)
    runner = StepRunner(model, parameters, launch, check_buckets(buckets, max_batch), dtype, device, compiler, strict)
    made = Decoder(runner, Tokenizer(path))
    made.compiler = compiler
    return made


@pytest.fixture(scope="module")
def path(strong):
    return strong("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(path):
    with decoder("jax", path, max_batch=4) as one:
        yield one


@pytest.fixture(params=GRAPH_LAUNCHES)
def graphs(request, path):
    with graph_decoder(path, request.param) as one:
        yield one


def same(ours, theirs) -> None:
    assert [(c.token_ids, c.finish_reason) for c in ours] == [(c.token_ids, c.finish_reason) for c in theirs]
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def addresses(state) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


# ---- the same answers --------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_generate_is_the_same_in_every_mode(graphs, plain, sampling, count):
    settings = {"max_new_tokens": 11, "sampling": sampling, "stop_token_ids": [9]}
    same(graphs.generate(PROMPTS[:count], **settings), plain.generate(PROMPTS[:count], **settings))


def test_rows_are_refilled_in_every_mode(graphs, plain):
    stop = plain.generate([PROMPTS[0]], max_new_tokens=1)[0].token_ids
    prompts = [PROMPTS[i] for i in (0, 1, 0, 2, 3, 0, 4)]
    settings = {"max_new_tokens": 10, "stop_token_ids": stop}
    done = graphs.generate(prompts, **settings)
    assert [c.token_ids for c in done] == [plain.generate([p], **settings)[0].token_ids for p in prompts]


# ---- fixed addresses ---------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["separate", "stacked"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_no_leaf_moves_in_a_thousand_steps(path, packing, kind):
    """The map's leaves are donated one by one; each comes back where it was."""
    with graph_decoder(path, packing=packing) as made:
        runner = made._runner
        state = runner.new_state(2)
        before = addresses(state)
        for _ in range(1000):
            state = runner.step(state, kind, 0)
        assert addresses(state) == before


def test_no_leaf_moves_when_rows_come_and_go(path):
    with graph_decoder(path) as made:
        runner, row = made._runner, {"status": 1, "tokens": 9, "positions": 2, "limits": 40, "stop_ids": [5], "filters": [0.7, 0.9, 0.0], "draws": [5, 1, 0]}
        state = runner.new_state(2)
        before = addresses(state)
        for i in range(10):
            state = runner.release(runner.force(runner.step(runner.admit(state, i % 2, [3, 4, 9], row), "greedy", 1), 1, 4, [8]), 0)
        assert addresses(state) == before


def test_a_state_that_moves_is_noticed_at_the_first_runs(path, plain, caplog, monkeypatch):
    """Without the alias XLA would patch the graph at every step."""
    with graph_decoder(path) as made:
        real = made._runner.programs.step

        def not_donated(state, kind, steps=1):
            return jax.jit(real(kind, steps)).lower(made._runner.programs.weights, state)

        monkeypatch.setattr(made._runner.programs, "lower_step", not_donated)
        with caplog.at_level(logging.WARNING):
            same(made.generate(PROMPTS[:1], max_new_tokens=9), plain.generate(PROMPTS[:1], max_new_tokens=9))
        assert "buffers of the state moved" in caplog.text and len(made.launch_report()["fallbacks"]) == 1


# ---- several steps in one program --------------------------------------------------------------


def test_a_loop_takes_few_launches(path, plain):
    with graph_decoder(path, "device_loop") as made:
        same(made.generate(PROMPTS[:1], max_new_tokens=50), plain.generate(PROMPTS[:1], max_new_tokens=50))
        (report,) = made.launch_report()["graphs"]
        assert report["replays"] <= -(-50 // LOOP_STEPS) and report["steps"] == report["replays"] * LOOP_STEPS


@pytest.mark.parametrize("count", [1, 3, 4, 6, 9])
def test_a_counted_number_of_steps_is_exact(path, plain, count):
    with graph_decoder(path, "device_loop") as made:
        ours, theirs = (one.decode_steps(one.prefill(PROMPTS[:2]), count) for one in (made, plain))
        assert ours.positions.tolist() == theirs.positions.tolist()
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)


def test_rows_stand_still_inside_a_loop(path, plain):
    """A stop in the middle of the unrolled steps: nothing after it."""
    whole = plain.generate([P24[:4]], max_new_tokens=12)[0].token_ids
    with graph_decoder(path, "device_loop") as made:
        for stop in whole[:6]:
            cut = whole[: whole.index(stop) + 1]
            assert made.generate([P24[:4]], max_new_tokens=12, stop_token_ids=[stop])[0].token_ids == cut


# ---- options -----------------------------------------------------------------------------------


def test_graphs_and_no_graphs_differ_in_options_only():
    on, off = xla_flags.step_options(True, "gpu"), xla_flags.step_options(False, "gpu")
    assert on["xla_gpu_enable_command_buffer"] == ",".join(xla_flags.COMMAND_TYPES) and off["xla_gpu_enable_command_buffer"] == ""
    assert set(on) - set(off) == {"xla_gpu_graph_min_graph_size", "xla_enable_command_buffers_during_profiling"}, "the arms must share all that shapes their kernels"
    assert xla_flags.step_options(True, "cpu") == xla_flags.step_options(False, "cpu") == {}


def test_kernels_start_early_where_the_version_can(monkeypatch):
    monkeypatch.setattr(xla_flags, "accepts", lambda name: name == xla_flags.EARLY[0])
    for graph in (True, False):
        early = xla_flags.step_options(graph, "gpu", early=True)
        assert {**xla_flags.step_options(graph, "gpu"), xla_flags.EARLY[0]: True} == early
    assert xla_flags.step_options(True, "cpu", early=True) == {}


def test_what_a_version_accepts_is_asked_of_it():
    assert xla_flags.accepts("xla_gpu_autotune_level", "0") and not xla_flags.accepts("xla_gpu_no_such_flag")


def test_a_profiler_does_not_switch_graphs_off():
    assert xla_flags.step_options(True, "gpu")["xla_enable_command_buffers_during_profiling"] is True


def test_the_options_are_accepted_by_the_installed_version():
    lowered = jax.jit(lambda x: x * 2).lower(jnp.ones(3))
    for graph in (True, False):
        lowered.compile(compiler_options=xla_flags.step_options(graph, "gpu"))


def test_both_routes_say_the_same():
    text = xla_flags.as_environment({**xla_flags.step_options(True, "gpu")}, process=True)
    assert (
        "--xla_gpu_enable_command_buffer=FUSION," in text
        and "profiling=true " in text
        and text.endswith("--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_temp_buffer_use_separate_color=true")
    )
    assert xla_flags.unknown(text) == ()


def test_types_chosen_in_xla_flags_are_not_overridden(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert "xla_gpu_enable_command_buffer" not in xla_flags.step_options(True, "gpu")


@pytest.mark.parametrize("bad", [{"xla_gpu_no_such_flag": "1"}, {"xla_gpu_enable_command_buffer": "NO_SUCH_TYPE"}])
def test_an_option_of_the_users_that_is_refused_is_named(bad):
    with pytest.raises(xla_flags.ConfigError, match="|".join(bad)):
        xla_flags.set_options(bad)


def test_options_of_the_user_reach_every_step(path, monkeypatch):
    monkeypatch.setattr(xla_flags, "_user_options", {})
    xla_flags.set_options({"xla_gpu_graph_min_graph_size": "3"})
    with graph_decoder(path) as made:
        made.generate(PROMPTS[:1], max_new_tokens=2)
        assert made.compiler.compiled == [{"xla_gpu_graph_min_graph_size": "3"}]
    assert xla_flags.step_options(True, "gpu")["xla_gpu_graph_min_graph_size"] == "3"


# ---- accounts ----------------------------------------------------------------------------------


def test_everything_is_compiled_before_anything_runs_when_ahead(path):
    """A compilation evicts the graphs that exist already."""
    with graph_decoder(path, buckets=[1, 2]) as made:
        lines = []
        made._runner.prepare(("greedy", "sampled"), lines.append)
        assert [line.split()[0] for line in lines] == ["compiling"] * 4 + ["recording"] * 4
        assert "bucket 2" in lines[0] and made.compiler.runs == 4 * FIRST_RUNS
        made.generate(PROMPTS[:2], max_new_tokens=3, sampling=SAMPLED)
        assert len(made.compiler.compiled) == 4
        for report in made.launch_report()["graphs"]:
            assert report["capture_s"] is not None and len(report["first_runs_s"]) == FIRST_RUNS and report["compile_s"] > 0


@pytest.mark.parametrize("field", GraphKey._fields)
def test_each_part_of_the_key_is_part_of_the_key(path, field):
    with graph_decoder(path) as made:
        runner = made._runner
        state = runner.new_state(2)
        key = runner._key(state, "greedy")
        other = {"bucket": 4, "kind": "sampled", "steps": 4, "dtype": "float16", "packing": "stacked", "kernels": "fused", "max_seq_len": 65}[field]
        if field in ("packing", "kernels", "max_seq_len"):
            setattr(runner, field, other)
        elif field == "dtype":
            runner.dtype = jnp.dtype(other)
        changed = runner._key(runner.new_state(4) if field == "bucket" else state, "sampled" if field == "kind" else "greedy", 4 if field == "steps" else 1)
        assert changed == key._replace(**{field: other}) != key


# ---- recovery ----------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", GRAPH_LAUNCHES)
@pytest.mark.parametrize("error", [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), MemoryError()])
def test_a_failed_compilation_is_survived(path, plain, error, launch, caplog):
    with graph_decoder(path, launch) as made:
        made.compiler.fail_compiling = error
        same(made.generate(PROMPTS[:2], max_new_tokens=9), plain.generate(PROMPTS[:2], max_new_tokens=9))
        (fallback,) = made.launch_report()["fallbacks"]
        assert (fallback["bucket"], fallback["kind"]) == (2, "greedy") and len(caplog.records) == 1


@pytest.mark.parametrize("use_up", [True, False])
@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_failed_run_loses_no_token(path, plain, failing, use_up, caplog):
    """The donated state is gone after a failed run: rows are rebuilt from what the host knows."""
    with graph_decoder(path) as made:
        made.compiler.fail_running[failing], made.compiler.use_up = RuntimeError("INTERNAL: failed to launch CUDA graph"), use_up
        settings = {"max_new_tokens": 10, "sampling": SAMPLED}
        same(made.generate(PROMPTS[:5], **settings), plain.generate(PROMPTS[:5], **settings))
        assert "failed to launch" in caplog.text and len(made.launch_report()["fallbacks"]) == 1
        assert len(made.compiler.compiled) == 2, "what failed must be compiled anew, without command buffers"


def test_a_state_in_a_callers_hands_survives_a_failed_compilation(path, plain):
    with graph_decoder(path) as made:
        made.compiler.fail_compiling = RuntimeError("refused")
        ours, theirs = made.prefill(PROMPTS[:2]), plain.prefill(PROMPTS[:2])
        for _ in range(3):
            ours, theirs = made.decode_step(ours), plain.decode_step(theirs)
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)


def test_a_state_in_a_callers_hands_that_is_lost_is_an_error(path):
    with graph_decoder(path) as made:
        state = made.prefill(PROMPTS[:1])
        made.compiler.fail_running[2], made.compiler.use_up = RuntimeError("failed to launch"), True
        with pytest.raises(DecoderError, match=r"this state is lost.*prefill again"):
            made.decode_step(state)
        assert made.generate(PROMPTS[:1], max_new_tokens=2)[0].token_ids


def test_strict_raises_and_leaves_the_decoder_usable(path, plain):
    with graph_decoder(path, strict=True) as made:
        made.compiler.fail_compiling = RuntimeError("refused\nmore")
        with pytest.raises(CaptureError, match=r"bucket 2, greedy: refused$"):
            made.generate(PROMPTS[:2], max_new_tokens=3)
        made.compiler.fail_compiling = None
        same(made.generate(PROMPTS[:2], max_new_tokens=3), plain.generate(PROMPTS[:2], max_new_tokens=3))


def test_a_step_that_fails_without_graphs_too_is_an_error(path):
    with graph_decoder(path) as made:
        made.compiler.fail_running = {1: RuntimeError("first"), 2: RuntimeError("second")}
        with pytest.raises(DeviceError, match=r"without command buffers too.*second"):
            made.generate(PROMPTS[:1], max_new_tokens=3)


def test_a_lost_device_closes_the_decoder(path, monkeypatch):
    with graph_decoder(path) as made:
        made.generate(PROMPTS[:1], max_new_tokens=3)
        monkeypatch.setattr(made._runner, "_alive", lambda: False)
        made.compiler.fail_running[made.compiler.runs + 1] = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS.*new one"):
            made.generate(PROMPTS[:1], max_new_tokens=3)
        with pytest.raises(DecoderError, match="closed"):
            made.generate(PROMPTS[:1], max_new_tokens=3)


def test_a_result_that_cannot_be_read_means_a_lost_device(path, monkeypatch):
    """Errors of asynchronous work come out where the host reads."""
    with graph_decoder(path) as made:

        def broken(_):
            raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

        monkeypatch.setattr(runner, "_host_copy", broken)
        with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
            made.generate(PROMPTS[:1], max_new_tokens=3)


def test_a_report_says_which_kernels_a_bucket_runs(path):
    with graph_decoder(path) as made:
        accounts = {bucket: made._runner._account(GraphKey(bucket, "greedy", 1, "float32", "separate", "fused", 64)) for bucket in (16, 32)}
        assert (accounts[16].kernels, accounts[32].kernels) == ("fused", "plain")


def test_released_executables_are_compiled_anew_and_the_state_goes_on(path, plain):
    with graph_decoder(path, max_batch=1) as made:
        ours, theirs = (d.decode_steps(d.prefill(PROMPTS[:1]), 4) for d in (made, plain))
        made.release_graphs()
        ours, theirs = (d.decode_steps(s, 5) for d, s in ((made, ours), (plain, theirs)))
        assert ours.ring.tolist() == theirs.ring.tolist()
        (report,) = made.launch_report()["graphs"]
        assert report["compilations"] == 2 and len(report["first_runs_s"]) == 3, "a new executable records again"


def test_closing_drops_executables_and_states(graphs):
    graphs.generate(PROMPTS[:2], max_new_tokens=2)
    runner = graphs._runner
    graphs.close()
    graphs.close()
    assert not runner._steps and not runner._states and not runner.programs.weights
