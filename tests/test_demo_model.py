"""The real model: greedy tokens equal transformers' for many kinds of prompts, sampled ones equal between the decoders."""

from __future__ import annotations

import pytest

from tests.helpers import DECODERS, DEMO, decoder, reference_logits

pytestmark = pytest.mark.demo
NEW = 64
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "In 1969, the first man",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "My favourite colour is",
    "Q: What is the largest planet?\nA:",
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Is ice cold?"}],
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main() {",
    "SELECT name, age FROM users WHERE",
    "import numpy as np\n\nx = np.",
    "Der schnelle braune Fuchs springt",
    "La capitale de la France est",
    "今日はとても",
    "Привет, как",
    "I love pizza 🍕 and",
    "🎉🎉🎉 Happy birthday",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who every morning, before the sun rose,",
]


@pytest.mark.parametrize("which", DECODERS)
def test_greedy_tokens_equal_transformers(which):
    """Twenty prompts of different lengths through eight rows, which are refilled as they finish.

    One pass of transformers over a whole text tells its greedy choice after each token: if every
    one of ours is that choice, generating token by token would have given the same text.
    """
    with decoder(which, DEMO, max_batch=8, max_seq_len=160) as d:
        prompts, stops = [d.encode(prompt) for prompt in PROMPTS], d.config.eos_token_ids
        found = [out.token_ids for out in d.generate(PROMPTS, max_new_tokens=NEW)]
    for prompt, tokens in zip(prompts, found):
        choices = reference_logits(DEMO, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens == choices, prompt
        assert len(tokens) == NEW or tokens[-1] in stops
    assert sum(len(tokens) == NEW for tokens in found) > 10, "most texts should be long"


def test_sampled_tokens_are_the_same_in_both_decoders():
    outs = {}
    for which, package in DECODERS.items():
        with decoder(which, DEMO, max_batch=5, max_seq_len=96) as d:
            settings = [package.Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=seed) for seed in range(5)]
            outs[which] = [out.token_ids for out in d.generate([PROMPTS[0]] * 5, max_new_tokens=NEW, sampling=settings, row_ids=[0] * 5)]
    assert outs["torch"] == outs["jax"]
    assert len({tuple(tokens) for tokens in outs["torch"]}) == 5
