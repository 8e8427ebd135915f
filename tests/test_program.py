"""The JAX step compiled for a GPU without one: one command buffer, few arrays, nothing copied."""

from __future__ import annotations

import json

import pytest

from compare.cli import main
from compare.program import compiler_path, describe
from compare.results import ResultError
from jax_decoder import thunks, xla_flags
from tests.helpers import has_gpu_compiler

SMALL = "shape:{},num_hidden_layers={},vocab_size=4096"
# Commands a layer: projections 4, rotated heads 2, cache writes 2, attention 2, SiLU 1, norms 4 or 5 with the residual.
A_LAYER = 16


needs_compiler = pytest.mark.skipif(not has_gpu_compiler(), reason="JAX's CUDA plugin is not installed: scripts/test puts it into .venv/gpu-compiler")


def program(family: str, layers: int, batch: int, kind: str = "greedy", **options: str) -> dict:
    return describe(SMALL.format(family, layers), "bfloat16", batch, kind, 256, options)


@needs_compiler
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", ["qwen3-0.6b", "llama-3.2-1b"])
def test_the_step_is_one_command_buffer(family, batch, kind):
    """XLA's sort of a top-p filter, a library call or a state that is not donated would end that."""
    found = program(family, 2, batch, kind)
    assert len(found["buffers"]) == 1 and found["outside"] == []
    assert found["in_place"] and found["state_arrays"] == 4 and found["arguments"] <= 15
    # No weight, no layer of the cache, nothing of that size: the smallest of them is 256 slots of 8 heads.
    assert max(found["copied"], default=0) < 256 * 8 * 64 * batch


@needs_compiler
@pytest.mark.parametrize("family", ["qwen3-0.6b", "llama-3.2-1b"])
def test_a_layer_is_few_commands(family):
    """Each command costs the host 0.25 µs and the device about 1: one careless slice a layer is 28 of them."""
    two, four = (program(family, layers, 1)["commands"] for layers in (2, 4))
    assert (four - two) / 2 <= A_LAYER
    assert two - 2 * A_LAYER <= 16


@needs_compiler
def test_command_buffers_switched_off_are_seen():
    found = program("qwen3-0.6b", 1, 1, xla_gpu_enable_command_buffer="")
    assert found["buffers"] == [] and found["commands"] == 0 and len(found["outside"]) > 10


@needs_compiler
def test_removing_a_kind_of_command_ends_the_single_buffer():
    found = program("qwen3-0.6b", 1, 1, xla_gpu_enable_command_buffer="CUBLAS")
    assert found["buffers"] == [] and len(found["outside"]) > 10


@needs_compiler
def test_flags_in_the_environment_give_the_same_program(monkeypatch):
    """The two routes of the README: compiler options, and XLA_FLAGS set before JAX starts."""
    options = program("qwen3-0.6b", 1, 1)
    monkeypatch.setenv("XLA_FLAGS", xla_flags.as_environment(xla_flags.step_options(True, "gpu"), process=True))
    assert program("qwen3-0.6b", 1, 1) == options
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_enable_command_buffer= {xla_flags.as_environment({'xla_disable_hlo_passes': 'slice-sinker'})}")
    assert program("qwen3-0.6b", 1, 1)["buffers"] == []


@needs_compiler
def test_program_on_the_command_line(capsys, tmp_path):
    assert main(["program", "--model", SMALL.format("qwen3-0.6b", 1), "--dump", str(tmp_path)]) == 0
    assert "1 command buffer " in capsys.readouterr().out
    assert list(tmp_path.glob("*thunk_sequence*"))
    assert main(["program", "--model", SMALL.format("qwen3-0.6b", 1), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["in_place"] is True


def test_bad_input_is_one_line(capsys):
    assert main(["program", "--model", "shape:qwen3-0.6b", "--batch", "0"]) == 2
    assert "--batch is 0, expected at least 1" in capsys.readouterr().err


def test_without_the_compiler_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("compare.program.COMPILER", tmp_path)
    monkeypatch.setattr("compare.program.PLUGINS", ("jax_plugins.absent",))
    with pytest.raises(ResultError, match="pip install jax-cuda13-plugin"):
        compiler_path()


LISTING = """000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=006 (5)] kCopy
    002: kCustomKernel [source       | next=003 (1)] fusion grid: [1, 1, 1]
003: kWhile [prev=002 (1)]
    004: kCustomKernel [source] body
005: kCommandBuffer [prev=003 (1) | sink]
    006: kGemm [source | sink] gemm
007: kCustomKernel [prev=005 (1) | sink] last
"""


def test_thunks_are_read_from_xlas_listing(tmp_path):
    found = thunks.parse(LISTING)
    assert found.buffers == (("Copy", "CustomKernel"), ("Gemm",)) and found.nodes == 3
    assert found.outside == ("While", "CustomKernel")
    assert thunks.from_dump(tmp_path) is None
    (tmp_path / "m.thunk_sequence_after_thunk_passes.txt").write_text(LISTING)
    (tmp_path / "small.thunk_sequence_after_thunk_passes.txt").write_text("000: kCopy [source | sink] kCopy\n")
    assert thunks.from_dump(tmp_path) == found
