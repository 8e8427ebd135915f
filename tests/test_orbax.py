"""Orbax checkpoints: any path, any number of devices, and damage that is found and named."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jax_decoder
import torch_decoder
from compare.convert import convert
from jax_decoder import orbax_io
from jax_decoder.checkpoint import read_tensors
from tests.helpers import P24, ROOT, TOLERANCE, copy_of, decoder, edit_config, numpy, reference_logits


@pytest.fixture(scope="module")
def stored(strong, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "m"
    convert(strong("qwen3"), path, "orbax")
    return path


@pytest.fixture
def damaged(stored, tmp_path) -> Path:
    return copy_of(stored, tmp_path / "m")


def refusal(path) -> str:
    with pytest.raises(jax_decoder.CheckpointError) as caught:
        decoder("jax", path)
    return str(caught.value)


def assert_same_weights(directory: Path, source: Path) -> None:
    wanted = load_file(source / "model.safetensors")
    found = dict(read_tensors(directory, jax_decoder.ModelConfig.from_directory(directory)))
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def test_restored_weights_and_logits_equal_the_source(stored, strong):
    assert_same_weights(stored, strong("qwen3"))
    with decoder("jax", stored) as d:
        assert np.abs(numpy(d.score([P24]))[0] - reference_logits(strong("qwen3"), P24)).max() < TOLERANCE


def test_the_directory_stands_alone(stored, tmp_path):
    """It may be moved: nothing in it points back at the source or at its own old place."""
    moved = Path(shutil.copytree(stored, tmp_path / "elsewhere" / "m"))
    with decoder("jax", moved) as d:
        assert d.config.family == "qwen3"


def test_pytorch_answers_with_the_command_that_converts(stored):
    with pytest.raises(torch_decoder.CheckpointError) as caught:
        decoder("torch", stored)
    message = str(caught.value)
    assert str(stored) in message and "Orbax" in message
    assert "scripts/convert_checkpoint.py" in message and "--to hf" in message


@pytest.mark.parametrize("form", ["m", "./m", "../{parent}/m", "~/m", "m/", "a b/m", "Path"])
def test_paths_mean_what_they_mean_in_the_shell(form, strong, tmp_path, monkeypatch):
    """Orbax itself refuses a relative path, and makes a folder that is called '~'."""
    work = tmp_path / "work"
    shutil.copytree(strong("llama"), work / "source")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(work))
    given = Path("m") if form == "Path" else form.format(parent=work.name)
    convert("source/", given, "orbax")
    place = work / "a b" / "m" if form == "a b/m" else work / "m"
    assert (place / "weights").is_dir()
    assert not list(work.rglob("~")), "a folder called ~ was made"
    with decoder("jax", given) as d:
        assert d.config.family == "llama"


@pytest.mark.parametrize("form", ["gone", "./gone", "~/gone"])
def test_an_absent_source_is_named_in_full(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(jax_decoder.CheckpointError, match=str(tmp_path / "gone")):
        convert(form, "target", "orbax")
    assert not list(tmp_path.iterdir())


def largest(path: Path) -> Path:
    return max((p for p in (path / "weights").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_data_file_cut_in_half(damaged):
    file = largest(damaged)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    message = refusal(damaged)
    assert str(file) in message and f"{len(content) // 2} bytes" in message and str(len(content)) in message and "cut off" in message


def test_an_absent_data_file(damaged):
    file = largest(damaged)
    file.unlink()
    assert f"{file}: missing" in refusal(damaged)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_noise_of_the_right_size(damaged):
    """The sizes cannot tell; the library's error must still come out as ours, with the place.

    Orbax leaves its other reads unfinished; they complain when they are collected, so that is done here.
    """
    file = largest(damaged)
    file.write_bytes(np.random.default_rng(0).bytes(file.stat().st_size))
    assert str(damaged) in refusal(damaged)
    gc.collect()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"files": {}}', '{"files": []}'])
def test_a_damaged_manifest(damaged, content):
    (damaged / "manifest.json").write_text(content)
    assert str(damaged / "manifest.json") in refusal(damaged)


def test_an_absent_manifest(damaged):
    (damaged / "manifest.json").unlink()
    assert str(damaged / "manifest.json") in refusal(damaged)


@pytest.mark.parametrize(
    ("change", "name"), [({"num_hidden_layers": 4}, "model.layers.3."), ({"num_hidden_layers": 2}, "model.layers.2."), ({"hidden_size": 32}, "model.norm.weight")]
)
def test_a_config_that_does_not_fit(damaged, change, name):
    edit_config(damaged, remove=("layer_types",), **change)
    message = refusal(damaged)
    assert name in message and "problems" in message


SAVE = """
import sys, shutil
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_decoder import ModelConfig, checkpoint, orbax_io
source, target = Path(sys.argv[1]), Path(sys.argv[2])
assert jax.device_count() == 4
mesh = Mesh(np.array(jax.devices()), ("x",))
place = lambda name, shape: NamedSharding(mesh, PartitionSpec("x" if shape and shape[0] % 4 == 0 else None))
model, parameters = checkpoint.load_parameters(source, jnp.dtype(jnp.float32), place, 64, "separate")
tree = checkpoint.unpack(model.config, "separate", parameters)
assert len(parameters["embed_tokens.weight"].sharding.device_set) == 4
assert not parameters["embed_tokens.weight"].is_fully_replicated
"""
WRITE = """
target.mkdir()
shutil.copy(source / "config.json", target)
orbax_io.write(target, tree)
"""
DUMP = """
np.savez(target, **{name: np.asarray(array) for name, array in tree.items()})
"""
SCORE = """
import sys
import jax, numpy as np
from jax_decoder import Decoder
assert jax.device_count() == int(sys.argv[3])
with Decoder.from_pretrained(sys.argv[1], dtype="float32", device="cpu", max_batch=1, max_seq_len=32) as decoder:
    np.save(sys.argv[2], np.asarray(decoder.score([[(37 * i + 5) % 256 for i in range(24)]])[0]))
"""


def python(code: str, *arguments, devices: int) -> None:
    """Run in a process that sees this many devices; it may not warn."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "topology" not in done.stderr.lower() and "warning" not in done.stderr.lower(), done.stderr


def test_saved_from_four_devices_and_restored_on_one(strong, tmp_path):
    """The stored sharding names devices that are not here."""
    python(SAVE + WRITE, strong("qwen3"), tmp_path / "m", devices=4)
    assert_same_weights(tmp_path / "m", strong("qwen3"))
    python(SCORE, tmp_path / "m", tmp_path / "scores.npy", 1, devices=1)
    assert np.abs(np.load(tmp_path / "scores.npy") - reference_logits(strong("qwen3"), P24)).max() < TOLERANCE


def test_saved_from_one_device_and_restored_on_four(stored, strong, tmp_path):
    python(SAVE + DUMP, stored, tmp_path / "tree.npz", devices=4)
    wanted = load_file(strong("qwen3") / "model.safetensors")
    with np.load(tmp_path / "tree.npz") as found:
        assert set(found) == set(wanted)
        assert all(found[name].tobytes() == array.tobytes() for name, array in wanted.items())
    python(SCORE, stored, tmp_path / "scores.npy", 4, devices=4)
    assert np.abs(np.load(tmp_path / "scores.npy") - reference_logits(strong("qwen3"), P24)).max() < TOLERANCE


def test_a_directory_of_safetensors_is_not_taken_for_orbax(strong, stored):
    assert orbax_io.is_orbax(stored)
    assert not orbax_io.is_orbax(strong("qwen3"))
