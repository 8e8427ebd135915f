"""transformers in a graph: the same numbers as without one, whatever the prompts' lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compare.models import open_transformers
from compare.parity import FLOAT32_BAR
from compare.peer import _generate, _left_padded, _reference
from compare.static_peer import StaticPeer
from compare.timing import MeasurementError
from compare.workload import Variant, Workload
from tests.recorders import TracingBackend

PROMPTS = [[5, 42, 79, 116], [1, 2], [200, 3, 77, 9, 100, 31, 8]]
GRAPH = Variant("transformers", "cuda_graph")


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def peer(request, strong):
    workload = Workload(str(strong(request.param)), batch=len(PROMPTS), new_tokens=9, max_seq_len=24)
    model = open_transformers(workload.model, "float32")
    tokens, logits = _reference(model, PROMPTS, workload.new_tokens)
    backend = TracingBackend()
    return StaticPeer(GRAPH, model, workload, PROMPTS, tokens, backend), logits, backend


def test_replays_give_the_logits_of_whole_passes(peer):
    arm, logits, backend = peer
    for _ in range(2):  # a restart leaves nothing of the run before
        found = arm.logits()
        assert found.shape == logits.shape and np.abs(found - logits).max() < FLOAT32_BAR
    assert backend.reached.count("capture") == 1 and backend.reached.count("replay") == 2 * (len(logits) - 1)


def test_what_lies_in_padded_slots_changes_nothing(peer):
    """The control of the masks: with one that lets queries see the padding, logits move."""
    arm, logits, _ = peer
    arm.restart()
    pads = arm._pads.clone()
    arm._pads.zero_()
    arm._step()
    seen = arm._logits.numpy().copy()
    arm._pads.copy_(pads)
    assert np.abs(seen[1] - logits[1, 1]).max() > 100 * FLOAT32_BAR  # a padded row
    assert np.abs(seen[2] - logits[1, 2]).max() < FLOAT32_BAR  # the longest one has no padding


def test_its_graph_is_accounted_for(peer):
    account = peer[0].graph_account()
    assert account["kernels_per_step"] > 10 and account["capture_s"] > 0 and account["instantiate_s"] >= 0


def test_generate_itself_is_forced_as_well(strong):
    workload = Workload(str(strong("qwen3")), batch=len(PROMPTS), new_tokens=6, max_seq_len=24)
    model = open_transformers(workload.model, "float32")
    tokens, logits = _reference(model, PROMPTS, workload.new_tokens)
    stepped = np.stack(_generate(model, _left_padded(model, PROMPTS, "cpu"), tokens, keep_logits=True).logits)
    assert np.abs(stepped - logits).max() < FLOAT32_BAR


def test_windows_are_refused(strong):
    workload = Workload(str(strong("mistral", sliding_window=8)), new_tokens=6, max_seq_len=24)
    with pytest.raises(MeasurementError, match="sliding window"):
        StaticPeer(GRAPH, open_transformers(workload.model, "float32"), workload, [[1, 2]], np.zeros((1, 6), np.int64), TracingBackend())


def test_torch_compile_runs_the_same_step(strong):
    """On a CPU torch.compile makes no graph; what it computes must be right all the same."""
    torch._dynamo.reset()
    workload = Workload(str(strong("qwen3", num_hidden_layers=1)), batch=len(PROMPTS), new_tokens=6, max_seq_len=24)
    model = open_transformers(workload.model, "float32")
    tokens, logits = _reference(model, PROMPTS, workload.new_tokens)
    arm = StaticPeer(Variant("transformers", "cuda_graph", "compiled"), model, workload, PROMPTS, tokens)
    assert np.abs(arm.logits() - logits).max() < FLOAT32_BAR
    before = arm.compilations()
    arm.generate()
    assert arm.compilations() == before > 0 and arm.compile_s() > 0 and arm.graph_account() == {}
