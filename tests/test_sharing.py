"""Several decoders of one set of weights: ``with_options``, in both decoders."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

FRAMEWORKS = ("torch", "jax")
PROMPTS = [[1, 2, 3], [9, 8, 7, 6]]


def opened(framework: str, path, **options):
    return importlib.import_module(f"{framework}_decoder").Decoder.from_pretrained(path, dtype="float32", device="cpu", max_batch=2, max_seq_len=32, **options)


def texts(decoder) -> list[list[int]]:
    return [c.token_ids for c in decoder.generate(PROMPTS, max_new_tokens=6)]


def addresses(decoder) -> list[int]:
    if hasattr(decoder, "model"):
        return [p.data_ptr() for p in decoder.model.parameters()]
    return [array.unsafe_buffer_pointer() for name, array in decoder._runner.programs.parameters().items() if name != "rope"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_are_shared_and_nothing_else(framework, strong):
    with opened(framework, strong("qwen3")) as first:
        expected, handle = texts(first), first.prefill(PROMPTS)
        kernels = "fused" if framework == "torch" else "plain"  # on a CPU, JAX's fused kernels want other arrays
        other = first.with_options(max_seq_len=64, max_batch=4, kernels=kernels)
        assert addresses(other) == addresses(first)
        assert (other.max_seq_len, other.max_batch, other.launch_report()["kernels"]) == (64, 4, kernels)
        assert texts(other) == expected
        other.close()
        assert texts(first) == expected  # closing one leaves the other its weights
        assert np.asarray(first.decode_step(handle).tokens).shape == (2,)  # and its states


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_first_may_be_closed(framework, strong):
    first = opened(framework, strong("llama"))
    expected, other = texts(first), first.with_options()
    first.close()
    with other:
        assert texts(other) == expected


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_the_weights_fix_cannot_change(framework, strong):
    errors = importlib.import_module(f"{framework}_decoder.errors")
    with opened(framework, strong("llama")) as decoder:
        for changes, word in (({"dtype": "bfloat16"}, "dtype"), ({"device": "cuda"}, "device"), ({"batch": 3}, "batch"), ({"memory_budget": 1000}, "max_batch")):
            with pytest.raises(errors.ConfigError, match=word):
                decoder.with_options(**changes)
        if framework == "jax":
            with pytest.raises(errors.ConfigError, match="packed"):
                decoder.with_options(kernels="fused")
        assert decoder.with_options(dtype="float32", device="cpu").max_batch == 2


@pytest.mark.parametrize(("framework", "both"), [("torch", True), ("jax", False)])
def test_whom_new_weights_reach(framework, both, strong):
    with opened(framework, strong("llama")) as first, first.with_options() as other:
        old = texts(other)
        first.load_weights(strong("llama", seed=5))
        new = texts(first)
        assert new != old
        assert texts(other) == (new if both else old)


def test_what_is_compiled_is_shared_where_the_model_is_the_same(strong):
    with opened("jax", strong("llama")) as first:
        texts(first)
        compiled = first._runner.programs._prefill
        before = compiled._cache_size()
        with first.with_options(max_batch=2) as same, first.with_options(max_seq_len=64) as longer:
            assert texts(same) == texts(longer) == texts(first)
            assert same._runner.programs._prefill is compiled and compiled._cache_size() == before
            assert longer._runner.programs._prefill is not compiled
