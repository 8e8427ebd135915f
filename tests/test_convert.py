"""Conversion keeps every byte, tells what it cast, and leaves an older result alone when it fails."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compare import convert as module
from compare.convert import convert
from jax_decoder import CheckpointError, ConfigError, ModelConfig
from tests.helpers import DECODERS, FAMILIES, P24, TOLERANCE, copy_of, decoder, edit_config, numpy, reference_logits

both = pytest.mark.parametrize("which", DECODERS)


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(path.glob("*.safetensors")) for name, array in load_file(file).items()}


def assert_equal_bytes(left: dict, right: dict) -> None:
    assert set(left) == set(right)
    for name, array in left.items():
        assert (array.dtype, array.shape, array.tobytes()) == (right[name].dtype, right[name].shape, right[name].tobytes()), name


@pytest.fixture
def source(strong, tmp_path) -> Path:
    return copy_of(strong("qwen2"), tmp_path / "source")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_equal_byte_for_byte(family, tied, strong, tmp_path):
    source = strong(family, tie_word_embeddings=tied)
    report = convert(source, tmp_path / "orbax", "orbax")
    convert(tmp_path / "orbax", tmp_path / "hf", "hf")
    before, after = weights(source), weights(tmp_path / "hf")
    assert_equal_bytes(before, after)
    assert report == {"tensors": len(before), "bytes": sum(a.nbytes for a in before.values()), "casts": {}}
    assert ModelConfig.from_directory(tmp_path / "hf") == ModelConfig.from_directory(source)


def test_tensors_of_several_types_keep_their_own(source, tmp_path):
    """One type for all would round the norms that were kept in float32 on purpose."""
    tensors = {n: a if a.ndim == 1 else a.astype(ml_dtypes.bfloat16) for n, a in weights(source).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "orbax", "orbax")
    convert(tmp_path / "orbax", tmp_path / "hf", "hf")
    assert_equal_bytes(tensors, weights(tmp_path / "hf"))


def test_companion_files_come_along(source, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "LICENSE"):
        (source / name).write_text(name)
    (source / "training_args.bin").write_text("not these")
    convert(source, tmp_path / "orbax", "orbax")
    convert(tmp_path / "orbax", tmp_path / "hf", "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "LICENSE", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "hf" / "training_args.bin").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_casts_are_counted_and_logged(dtype, to, source, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger=module.__name__):
        report = convert(source, tmp_path / "out", to, dtype)
    before = weights(source)
    assert report["casts"] == {f"float32 -> {dtype}": len(before)}
    assert report["bytes"] == sum(a.nbytes for a in before.values()) // 2
    assert f"{len(before)} tensors float32 -> {dtype}" in caplog.text
    assert ModelConfig.from_directory(tmp_path / "out").dtype == dtype
    if to == "hf":
        assert_equal_bytes({n: a.astype(module.DTYPES[dtype]) for n, a in before.items()}, weights(tmp_path / "out"))


def test_a_cast_to_the_same_type_is_none(source, tmp_path):
    assert convert(source, tmp_path / "out", "hf", "float32")["casts"] == {}


def test_a_cast_that_overflows_is_refused(source, tmp_path):
    tensors = weights(source)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight as float16"):
        convert(source, tmp_path / "out", "hf", "float16")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value, source, tmp_path):
    tensors = weights(source)
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias"):
        convert(source, tmp_path / "out", "orbax")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("to", ["hf", "orbax"])
@pytest.mark.parametrize("step", ["_verify", "_save_safetensors", "copy2"])
@pytest.mark.parametrize("error", [CheckpointError("x"), OSError("disk full"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_failed_conversion_leaves_the_old_result(to, step, error, source, tmp_path, monkeypatch):
    """A half-written model that has the right name is worse than none."""
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "out", "hf")
    before = contents(tmp_path / "out")
    edit_config(source, rms_norm_eps=0.5)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(module.shutil if step == "copy2" else module, step, fail)
    if step == "_save_safetensors" and to == "orbax":
        monkeypatch.setattr(module.orbax_io, "write", fail)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "out", to)
    assert contents(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"], "a temporary folder was left"


@pytest.mark.parametrize("call", [1, 2])
def test_an_interruption_while_names_are_exchanged(call, source, tmp_path, monkeypatch):
    convert(source, tmp_path / "out", "hf")
    before, rename, calls = contents(tmp_path / "out"), module.os.rename, []

    def interrupted(old, new):
        calls.append(new)
        if len(calls) == call:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(module.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "orbax")
    assert contents(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_new_result_replaces_the_old_one_wholly(source, tmp_path):
    convert(source, tmp_path / "out", "hf")
    convert(source, tmp_path / "out", "orbax")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "weights").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("kind", ["file", "other folder"])
def test_what_is_no_model_is_not_replaced(kind, source, tmp_path):
    """A mistyped destination must not cost the user a folder of something else."""
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no model directory"):
        convert(source, target, "hf")
    assert (target if kind == "file" else target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", [".", "inside", "inside/deeper"])
def test_a_destination_in_the_source_is_refused(place, source):
    before = contents(source)
    with pytest.raises(ConfigError, match="lies in the source"):
        convert(source, source / place, "hf")
    assert contents(source) == before


@pytest.mark.parametrize(("arguments", "name"), [(("gguf", None), "--to"), (("hf", "int8"), "--dtype")])
def test_unknown_formats_and_types_are_refused(arguments, name, source, tmp_path):
    with pytest.raises(ConfigError, match=name):
        convert(source, tmp_path / "out", *arguments)


def test_what_was_written_is_read_back(source, tmp_path, monkeypatch):
    """A disk that drops bytes in silence is noticed at once and not months later."""
    write = module._save_safetensors

    def flip_a_bit(folder, tree):
        write(folder, tree)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-2] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    monkeypatch.setattr(module, "_save_safetensors", flip_a_bit)
    with pytest.raises(CheckpointError, match="read back differently"):
        convert(source, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_large_results_are_sharded_with_an_index(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    convert(source, tmp_path / "out", "hf")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(sum(a.nbytes for a in load_file(f).values()) <= 100_000 for f in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in files}
    assert_equal_bytes(weights(source), weights(tmp_path / "out"))


# ---- GGUF ------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    path, kind = name.rsplit(".", 1)
    if path in GGUF_OUTER:
        return f"{GGUF_OUTER[path]}.{kind}"
    _, _, layer, inner = path.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp keeps the query and key rows of llama models."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(file: Path, source: Path) -> Path:
    config = ModelConfig.from_directory(source)
    writer = gguf.GGUFWriter(file, config.family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, array in weights(source).items():
        if config.family == "llama" and "q_proj" in name:
            array = interleaved(array, config.num_heads)
        if config.family == "llama" and "k_proj" in name:
            array = interleaved(array, config.num_kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


THETA = {"rope_type": "default", "rope_theta": 50000.0}


@both
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_gives_the_logits_of_its_source(which, family, strong, tmp_path):
    """Query rows are put back by the query heads, key rows by the key/value heads; qwen2 has none to put back."""
    source = strong(family, rope_parameters=THETA, rms_norm_eps=1e-4)
    report = convert(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out", "hf")
    config, wanted = ModelConfig.from_directory(tmp_path / "out"), ModelConfig.from_directory(source)
    assert config.rope == wanted.rope and config.rope.theta == 50000.0
    assert config.rms_norm_eps == pytest.approx(1e-4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert report["tensors"] == len(weights(source))
    with decoder(which, tmp_path / "out") as d:
        assert np.abs(numpy(d.score([P24]))[0] - reference_logits(source, P24)).max() < TOLERANCE


def test_gguf_becomes_orbax(strong, tmp_path):
    source = strong("llama", rope_parameters=THETA)
    convert(write_gguf(tmp_path / "m.gguf", source), tmp_path / "orbax", "orbax")
    convert(tmp_path / "orbax", tmp_path / "hf", "hf")
    assert_equal_bytes(weights(source), weights(tmp_path / "hf"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf", "orbax"]


@pytest.mark.parametrize("damage", ["cut", "empty", "pointer"])
def test_a_damaged_gguf_is_named(damage, strong, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", strong("llama", rope_parameters=THETA))
    content = {"cut": file.read_bytes()[: file.stat().st_size // 2], "empty": b"", "pointer": b"version https://git-lfs.github.com/spec/v1\n"}[damage]
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        convert(file, tmp_path / "out", "hf")
    assert str(file) in str(caught.value) and f"{len(content)} bytes" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
