"""Both decoders against transformers, on tiny models in which every tensor moves the logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.helpers import DECODERS, P24, TOLERANCE, decoder, numpy, reference_greedy, reference_logits

SPLIT = 5  # tokens of the prompt; the others are forced, one a step
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

CASES = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-1-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-4-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-28-layers": ("llama", {"num_hidden_layers": 28}),  # as text, layers.10 sorts before layers.2
    "mistral-window": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", QWEN_WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-window": ("qwen3", QWEN_WINDOW),
    "qwen3-1-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3-4-kv-heads": ("qwen3", {"num_key_value_heads": 4}),
}


class Subject(NamedTuple):
    """One decoder on one checkpoint."""

    decoder: object
    path: object


@pytest.fixture(scope="module", params=[(name, which) for name in CASES for which in DECODERS], ids="-".join)
def subject(request, strong):
    name, which = request.param
    family, overrides = CASES[name]
    path = strong(family, **overrides)
    with decoder(which, path, max_batch=1) as made:
        yield Subject(made, path)


def largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())


def test_score_equals_transformers(subject):
    """Every row counts: position 0 alone hides a wrong rotation, early ones hide a wrong window."""
    ours = numpy(subject.decoder.score([P24]))[0]
    assert largest_difference(ours, reference_logits(subject.path, P24)) < TOLERANCE


def test_forced_steps_equal_transformers(subject):
    """The step reads what prefill and earlier steps wrote, so a wrong slot or position shows here."""
    state = subject.decoder.prefill([P24[:SPLIT]], forced=[P24[SPLIT:]])
    rows = [numpy(state.logits)[0].copy()]  # a copy, because the next step writes in place
    for _ in P24[SPLIT:]:
        state = subject.decoder.decode_step(state)
        rows.append(numpy(state.logits)[0].copy())
    assert largest_difference(np.stack(rows), reference_logits(subject.path, P24)[SPLIT - 1 :]) < TOLERANCE


def test_greedy_tokens_equal_transformers(subject):
    done = subject.decoder.generate([P24[:SPLIT]], max_new_tokens=8)[0]
    assert done.token_ids == reference_greedy(subject.path, P24[:SPLIT], 8)
    assert done.finish_reason == "length"
