"""What a captured PyTorch step relies on: fixed addresses in one buffer, and kernels that agree."""

from __future__ import annotations

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import P24, TOLERANCE, decoder, numpy
from torch_decoder.cache import ALIGNMENT, MemoryMap
from torch_decoder.config import ModelConfig
from torch_decoder.decode import leaves, make_state
from torch_decoder.kernels import plain


@pytest.fixture(scope="module")
def made(strong):
    with decoder("torch", strong("qwen3"), max_batch=2) as one:
        yield one


def pointers(state) -> list[int]:
    return [leaf.data_ptr() for leaf in leaves(state)]


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_no_leaf_of_the_state_moves(made, kind):
    """A graph replays addresses: a leaf in new memory would be read where it no longer is."""
    runner = made._runner
    state = runner.new_state(2)
    before = pointers(state)
    settings = {"status": 1, "tokens": 9, "positions": 2, "limits": 40, "stop_ids": [5], "filters": [0.7, 0.9, 0.0], "draws": [5, 1, 0]}
    state = runner.admit(state, 1, [3, 4, 9], settings)
    state = runner.force(state, 1, 3, [8])
    for _ in range(4):
        state = runner.step(state, kind, 1)
    assert pointers(runner.release(state, 0)) == before
    assert int(state.positions[1]) == 6


def test_a_bucket_keeps_its_state_between_calls(made):
    made.generate([P24[:4]], max_new_tokens=3)
    before = pointers(made._runner.state(1))
    made.generate([P24[4:9]], max_new_tokens=5, sampling=None)
    assert pointers(made._runner.state(1)) == before


def test_new_weights_are_written_in_place(strong):
    with decoder("torch", strong("qwen3"), max_batch=1) as one:
        before = {name: p.data_ptr() for name, p in one.model.named_parameters()}
        one.load_weights(strong("qwen3", seed=1))
        assert {name: p.data_ptr() for name, p in one.model.named_parameters()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (3, 17), (4, 64)])
def test_regions_cover_the_buffer_without_overlap(strong, dtype, batch, slots):
    config = ModelConfig.from_directory(strong("qwen3"))
    plan = MemoryMap.plan(config, batch, slots, dtype)
    end = 0
    for region in plan.regions:
        assert region.offset % ALIGNMENT == 0
        assert 0 <= region.offset - end < ALIGNMENT, f"{region.name} overlaps, or leaves more than alignment needs"
        end = region.offset + region.nbytes
    assert 0 <= plan.nbytes - end < ALIGNMENT
    assert len({region.name for region in plan.regions}) == len(plan.regions)


def test_every_leaf_lies_in_the_one_buffer(made):
    plan = made._runner.plan(2)
    state = make_state(plan, torch.device("cpu"))
    storages = {leaf.untyped_storage().data_ptr() for leaf in leaves(state)}
    assert len(storages) == 1 and state.tokens.untyped_storage().nbytes() == plan.nbytes
    assert sum(leaf.nbytes for leaf in leaves(state)) == sum(region.nbytes for region in plan.regions)


def test_writing_one_leaf_changes_no_other(made):
    state = make_state(made._runner.plan(2), torch.device("cpu"))
    for index, leaf in enumerate(leaves(state)):
        leaf.fill_(index + 1)
    for index, leaf in enumerate(leaves(state)):
        assert bool((leaf == index + 1).all()), index


def test_a_copied_state_has_memory_of_its_own(made):
    first = made.prefill([P24[:4]])
    second = made.fork(first)
    assert not set(pointers(first.peek())) & set(pointers(second.peek()))
    for x, y in zip(leaves(first.peek()), leaves(second.peek())):
        assert torch.equal(x, y)


@pytest.fixture
def unchecked():
    """No checks of shapes and dtypes: torch.compile would trace into them and stop there."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def test_compiled_kernels_equal_plain_ones(unchecked, strong):
    """Compilation may change the order of sums and nothing else."""
    path, found = strong("qwen3", num_hidden_layers=2), {}
    for kernels in ("plain", "compiled"):
        with decoder("torch", path, max_batch=1, kernels=kernels) as one:
            assert one.launch_report()["kernels"] == kernels
            state = one.prefill([P24[:5]], forced=[P24[5:8]])
            rows = [numpy(state.logits).copy()]
            for _ in range(3):
                state = one.decode_step(state)
                rows.append(numpy(state.logits).copy())
            found[kernels] = np.stack(rows)
    assert np.abs(found["plain"] - found["compiled"]).max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "kv_heads", "group"), [(1, 2, 2), (3, 1, 4), (2, 4, 1)])
def test_one_query_as_two_products_equals_the_library(batch, kv_heads, group, dtype):
    """What a GPU runs in place of the library's attention, whose bits may differ from run to run there."""
    slots, width, generator = 40, 16, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, kv_heads, n, width, generator=generator).to(dtype) for n in (group, slots, slots))
    positions = torch.tensor([0, 17, 39])[:batch]
    mask = torch.where(torch.arange(slots) <= positions[:, None], 0.0, float("-inf"))[:, None, None]
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, scale=width**-0.5)
    ours = plain.attend_one(q, torch.stack([k, v]), plain.Seen(mask))
    assert ours.dtype == dtype and (ours.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
