"""Every tensor of a checkpoint is loaded, at its place, or loading stops and names it."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import jax_decoder.checkpoint
import torch_decoder.checkpoint
from compare.convert import convert
from tests.helpers import DECODERS, FAMILIES, P24, ROOT, TOLERANCE, copy_of, decoder, edit_config, edit_tensors, numpy, reference_logits

both = pytest.mark.parametrize("which", DECODERS)
VARIANTS = [(family, {}) for family in FAMILIES] + [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 1}),
    ("qwen3", {"num_key_value_heads": 4}),
]
variants = pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=[f"{f}-{'-'.join(o)}{list(o.values())[-1] if o else ''}" for f, o in VARIANTS])


def scores(which: str, path, **settings) -> np.ndarray:
    with decoder(which, path, **settings) as d:
        return numpy(d.score([P24]))[0]


def refusal(which: str, path, **settings) -> str:
    with pytest.raises(DECODERS[which].CheckpointError) as caught:
        decoder(which, path, **settings)
    return str(caught.value)


def expected_names(path) -> list[str]:
    return list(torch_decoder.checkpoint.table(torch_decoder.ModelConfig.from_directory(path)))


def packed(which: str, path, packing: str = "separate"):
    """The packed parameters of a checkpoint, and a function that unpacks them again."""
    if which == "torch":
        module = torch_decoder.checkpoint
        config = torch_decoder.ModelConfig.from_directory(path)
        model = module.build_model(config, module.read_tensors(path, config), torch.float32, torch.device("cpu"), 8, "plain")
        parameters = dict(model.named_parameters())
        return parameters, lambda: module.unpack(model.config, parameters)
    module = jax_decoder.checkpoint
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model, parameters = module.load_parameters(path, jnp.dtype(jnp.float32), place, 8, packing)
    return parameters, lambda: module.unpack(model.config, packing, parameters)


@both
@variants
def test_logits_equal_transformers(which, family, overrides, strong):
    """Strong weights: each bias, norm and projection that is forgotten moves the logits by far more."""
    path = strong(family, **overrides)
    assert np.abs(scores(which, path) - reference_logits(path, P24)).max() < TOLERANCE


@both
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_cache_and_scores_use_the_given_head_size(which, heads, strong):
    """Hidden size 64 and 4 heads would make 16; the file says 32."""
    path = strong("qwen3", num_key_value_heads=heads)
    with decoder(which, path, max_batch=1, max_seq_len=48) as d:
        handle = d.prefill([P24])
        ours = numpy(handle.logits)[0].copy()  # a view of memory that the next step writes
        for array in (*handle.cache.k, *handle.cache.v):
            assert tuple(array.shape)[-3:] == (heads, 48, 32)
        ours_next = numpy(d.decode_step(handle).logits)[0]
    first = int(ours.argmax())
    assert np.abs(ours - reference_logits(path, P24)[-1]).max() < TOLERANCE
    assert np.abs(ours_next - reference_logits(path, [*P24, first])[-1]).max() < TOLERANCE


@pytest.mark.parametrize(("which", "packing"), [("torch", "separate"), ("jax", "separate"), ("jax", "stacked")])
@variants
def test_unpack_is_the_inverse_of_pack(which, packing, family, overrides, strong):
    """Query, key and value share a matrix; a row at the wrong place would still have the right shape."""
    path = strong(family, **overrides)
    stored = load_file(path / "model.safetensors")
    parameters, unpack = packed(which, path, packing)
    tree = unpack()
    assert set(tree) == set(stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(numpy(tree[name]), tensor.numpy(), err_msg=name)
    assert sum(np.prod(p.shape) for n, p in parameters.items() if n != "rope") == sum(t.numel() for t in stored.values())


def test_saved_tensors_are_the_loaded_ones(strong, tmp_path):
    config = torch_decoder.ModelConfig.from_directory(strong("qwen2"))
    parameters, _ = packed("torch", strong("qwen2"))
    torch_decoder.checkpoint.save_tensors(tmp_path, config, parameters)
    before, after = load_file(strong("qwen2") / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@both
def test_untied_config_without_a_head(which, strong, tmp_path):
    """Random values, zeros or the embedding in its place would give logits that mean nothing."""
    path = copy_of(strong("qwen2"), tmp_path / "m")
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    message = refusal(which, path)
    assert "lm_head.weight" in message and "tie_word_embeddings" in message
    edit_config(path, tie_word_embeddings=True)
    assert np.abs(scores(which, path) - reference_logits(path, P24)).max() < TOLERANCE


@both
def test_tied_config_with_a_head_of_its_own(which, strong, tmp_path):
    """Either the config or the file is wrong, and nothing says which."""
    path = copy_of(strong("qwen2"), tmp_path / "m")
    edit_config(path, tie_word_embeddings=True)
    message = refusal(which, path)
    assert "lm_head.weight" in message and "tie_word_embeddings" in message and "model.embed_tokens.weight" in message


@both
def test_tied_config_with_an_equal_copy_of_the_head(which, strong, tmp_path):
    path = copy_of(strong("qwen2", tie_word_embeddings=True), tmp_path / "m")
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    np.testing.assert_array_equal(scores(which, path), scores(which, strong("qwen2", tie_word_embeddings=True)))


@both
@variants
def test_each_absent_tensor_is_named(which, family, overrides, strong, tmp_path):
    """An absent bias is not zero and an absent norm is not one."""
    path = copy_of(strong(family, **overrides), tmp_path / "m")
    whole = load_file(path / "model.safetensors")
    assert set(whole) == set(expected_names(path))
    for name in whole:
        save_file({n: t for n, t in whole.items() if n != name}, path / "model.safetensors", metadata={"format": "pt"})
        assert f"\n{name}: missing" in refusal(which, path)


@both
@pytest.mark.parametrize(
    "name", ["model.layers.3.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight", "transformer.wte.weight"]
)
def test_a_tensor_that_the_config_does_not_describe_is_named(which, name, strong, tmp_path):
    """A loader that skips what it does not know drops biases and whole layers."""
    path = copy_of(strong("llama"), tmp_path / "m")
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert name in refusal(which, path)


@both
def test_rotary_buffers_of_old_files_are_passed_over(which, strong, tmp_path):
    path = copy_of(strong("llama"), tmp_path / "m")
    edit_tensors(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    np.testing.assert_array_equal(scores(which, path), scores(which, strong("llama")))


@both
def test_several_problems_are_reported_at_once(which, strong, tmp_path):
    def damage(tensors: dict) -> None:
        del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["model.layers.2.self_attn.k_norm.weight"]
        tensors["model.norm.weight"] = torch.zeros(63)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(160, 64, dtype=torch.int8)
        tensors["surplus.weight"] = torch.zeros(1)

    path = copy_of(strong("qwen3"), tmp_path / "m")
    edit_tensors(path, damage)
    message = refusal(which, path)
    assert "5 problems" in message
    for name in ("layers.1.self_attn.q_norm", "layers.2.self_attn.k_norm", "model.norm", "layers.0.mlp.up_proj", "surplus"):
        assert name in message
    assert "[63]" in message and "[64]" in message, "found and expected shape"


@both
@pytest.mark.parametrize(
    "change", [{"hidden_size": 32}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"vocab_size": 300}, {"num_key_value_heads": 4}, {"intermediate_size": 161}]
)
def test_a_config_of_another_size(which, change, strong, tmp_path):
    """No tensor is sliced, padded or left out to make it fit."""
    path = copy_of(strong("mistral"), tmp_path / "m")
    edit_config(path, remove=("layer_types",), **change)
    assert "config.json" in refusal(which, path)


@both
def test_a_transposed_square_matrix_of_equal_count_is_refused(which, strong, tmp_path):
    path = copy_of(strong("llama"), tmp_path / "m")
    edit_tensors(path, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": t["model.layers.0.mlp.down_proj.weight"].T.contiguous()}))
    assert "model.layers.0.mlp.down_proj.weight: shape [160, 64]" in refusal(which, path)


@both
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantised_weights_are_refused(which, dtype, strong, tmp_path):
    """Reading them as numbers would drop their scales."""
    path = copy_of(strong("llama"), tmp_path / "m")
    name = "model.layers.1.mlp.gate_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(160, 64).to(dtype)}))
    message = refusal(which, path)
    assert name in message and "quantised" in message


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(which, value, strong, tmp_path):
    def damage(tensors: dict) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        tensors["model.layers.2.self_attn.v_proj.bias"][-1] = value

    path = copy_of(strong("qwen2"), tmp_path / "m")
    edit_tensors(path, damage)
    message = refusal(which, path)
    assert "layers.1.mlp.up_proj.weight" in message and "layers.2.self_attn.v_proj.bias" in message
    assert "layers.0" not in message


@both
def test_weights_that_float16_cannot_hold_are_named(which, strong, tmp_path):
    path = copy_of(strong("llama"), tmp_path / "m")
    edit_tensors(path, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    message = refusal(which, path, dtype="float16")
    assert "model.norm.weight" in message and "float16" in message
    with decoder(which, path) as d:
        assert d.config.family == "llama"


@both
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_cast_as_they_are_read(which, stored, strong, tmp_path):
    path = copy_of(strong("qwen3"), tmp_path / "m")
    edit_tensors(path, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    with decoder(which, path, dtype="float32") as d:
        ours = numpy(d.score([P24]))[0]
    assert np.abs(ours - reference_logits(path, P24)).max() < TOLERANCE


@both
def test_new_weights_are_checked_before_the_old_ones_go(which, strong, tmp_path):
    bad = copy_of(strong("qwen2", seed=1), tmp_path / "bad")
    edit_tensors(bad, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with decoder(which, strong("qwen2")) as d:
        before = numpy(d.score([P24]))
        with pytest.raises(DECODERS[which].CheckpointError, match=r"model\.norm\.weight"):
            d.load_weights(bad)
        np.testing.assert_array_equal(numpy(d.score([P24])), before)
        with pytest.raises(DECODERS[which].ConfigError, match="family"):
            d.load_weights(strong("qwen3"))
        np.testing.assert_array_equal(numpy(d.score([P24])), before)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 400 MB of bfloat16 in tensors of at most 8.4 MB, so that a second copy stands out."""
    path = tmp_path_factory.mktemp("large")
    raw = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}
    (path / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": 8, "tie_word_embeddings": True, "dtype": "bfloat16"}))
    slots = torch_decoder.checkpoint.table(torch_decoder.ModelConfig.from_directory(path))
    tensors = {name: torch.full(slot.shape, 0.01, dtype=torch.bfloat16) for name, slot in slots.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    yield path
    (path / "model.safetensors").unlink()


MEASURE = """
import sys, threading, time
import {package} as package

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        seen.append(anonymous())
        time.sleep(0.002)

small = package.Decoder.from_pretrained(sys.argv[1], dtype="{dtype}", device="cpu", max_batch=1, max_seq_len=16)
before, seen, done = anonymous(), [], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
decoder = package.Decoder.from_pretrained(sys.argv[2], dtype="{dtype}", device="cpu", max_batch=1, max_seq_len=16)
done.set()
thread.join()
print(max(seen) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("which", "dtype", "to"),
    [("torch", "bfloat16", "hf"), ("torch", "float32", "hf"), ("jax", "bfloat16", "hf"), ("jax", "float32", "hf"), ("jax", "bfloat16", "orbax")],
)
def test_loading_holds_no_second_copy_of_the_weights(which, dtype, to, large, strong, tmp_path):
    """Beyond the weights: twice the largest tensor, and 200 MB for everything else.

    A loader that reads the whole file first needs 400 MB more. Anonymous memory is what counts:
    mapped pages of the file can be dropped at any time. A tiny model is loaded before, so that
    what a framework allocates once is not counted.
    """
    small, model = strong("llama"), large
    if to == "orbax":
        small, model = tmp_path / "small", tmp_path / "large"
        convert(strong("llama"), small, to)
        convert(large, model, to)
    code = MEASURE.format(package=DECODERS[which].__name__, dtype=dtype)
    done = subprocess.run([sys.executable, "-c", code, small, model], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    size = 2 if dtype == "bfloat16" else 4
    slots = torch_decoder.checkpoint.table(torch_decoder.ModelConfig.from_directory(large))
    counts = [int(np.prod(slot.shape)) for slot in slots.values()]
    assert sum(counts) * 2 > 380e6, "too small to tell a second copy from noise"
    beyond = int(done.stdout) - sum(counts) * size
    assert beyond > -50e6, "the weights were not loaded"
    assert beyond <= 2 * max(counts) * size + 200e6


def test_reading_does_not_run_ahead_of_placing(strong, monkeypatch):
    """JAX places without waiting: what was read and still waits must not grow to a copy of the weights."""
    waiting, most = [], 0

    class Flag:
        def block_until_ready(self):
            waiting.remove(self)

    def place(target, part, start):
        nonlocal most
        waiting.append(flag := Flag())
        most = max(most, len(waiting))
        return target, flag

    monkeypatch.setattr(jax_decoder.checkpoint, "_place", place)
    jax_decoder.checkpoint.load_parameters(strong("llama"), np.dtype("float32"), jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]), 16, "separate")
    assert len(waiting) == jax_decoder.checkpoint.IN_FLIGHT
    assert most == jax_decoder.checkpoint.IN_FLIGHT + 1
