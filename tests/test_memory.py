"""Host values on their way to the device, and device memory planned before it is allocated."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from compare.cli import main
from compare.models import model_config
from tests.helpers import DECODERS
from torch_decoder.budget import plan_memory
from torch_decoder.feed import SLOTS, Feed, float_bits

CPU = torch.device("cpu")


class LateCopies:
    """Stands in for a stream: a copy from staging memory happens when its event is waited for."""

    def __init__(self):
        self.pending, self.finished = [], 0

    def event(self):
        stream = self

        class Event:
            def record(self):
                self.mark = stream.finished + len(stream.pending)

            def synchronize(self):
                stream.run(max(0, getattr(self, "mark", 0) - stream.finished))

        return Event()

    def run(self, count):
        for target, source in self.pending[:count]:
            target.copy_(source)
        done, self.pending = self.pending[:count], self.pending[count:]
        self.finished += len(done)


@pytest.fixture
def late(monkeypatch):
    """Copies that ask not to block run late, as from pinned memory."""
    stream, real = LateCopies(), torch.Tensor.copy_

    def copy(self, source, non_blocking=False):
        if non_blocking:
            stream.pending.append((self, source))
            return self
        return real(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return stream


def arrivals(feed, stream, count):
    """The values that copies carry when the host runs as far ahead of them as the feed lets it."""
    arrived, run = [], stream.run
    stream.run = lambda n: (arrived.extend(int(source[0]) for _, source in stream.pending[:n]), run(n))
    for i in range(count):
        feed.upload([i] * 3)
    stream.run(len(stream.pending))
    return arrived


def test_a_staging_buffer_is_not_overwritten_before_its_copy(late):
    assert arrivals(Feed(CPU, 3, late.event), late, 3 * SLOTS) == list(range(3 * SLOTS))


def test_without_the_guard_it_would_be(late):
    class NoGuard:
        def record(self): ...

        def synchronize(self): ...

    assert arrivals(Feed(CPU, 3, NoGuard), late, 3 * SLOTS) != list(range(3 * SLOTS))


def test_long_values_come_in_pieces_and_floats_as_their_bits():
    feed = Feed(CPU, 4)
    assert feed.pieces(list(range(9))) == [(0, [0, 1, 2, 3]), (4, [4, 5, 6, 7]), (8, [8])]
    assert feed.pieces([]) == []
    words = feed.upload(float_bits([0.1, -2.5]))
    assert words.view(torch.float32).tolist() == np.float32([0.1, -2.5]).tolist()


# ---- budgets -----------------------------------------------------------------------------------

LLAMA = "shape:llama-3.1-8b"


def test_a_plan_allocates_nothing_and_names_what_fits():
    """8B in bfloat16 on a card of 24 GiB: the weights fit, and a few rows of 8,192 tokens."""
    plan = plan_memory(model_config(LLAMA), (1, 2, 4), 8192, torch.bfloat16, 24 * 2**30)
    assert plan.weights == pytest.approx(16.06e9, rel=0.01)
    assert plan.state[4] == pytest.approx(4 * 8192 * 2 * 32 * 8 * 128 * 2, rel=0.01)
    assert plan.fits == (1, 2, 4)


@pytest.mark.parametrize("which", DECODERS)
def test_more_rows_than_fit_are_refused_with_the_numbers(which, strong):
    with pytest.raises(
        DECODERS[which].ConfigError, match=r"max_batch 4096 .* needs .* GiB \(weights .*, but 1\.00 GiB may be used: buckets that fit are \[1, 2, 4.*lower max_batch"
    ) as caught:
        DECODERS[which].Decoder.from_pretrained(strong("llama"), device="cpu", max_batch=4096, max_seq_len=512, memory_budget=2**30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("which", DECODERS)
def test_a_budget_that_is_enough_is_no_obstacle(which, strong):
    with DECODERS[which].Decoder.from_pretrained(strong("llama"), device="cpu", max_batch=2, max_seq_len=32, memory_budget=4 * 2**30) as made:
        assert made.launch_report()["memory"]["fits"] == [1, 2]


def test_plan_on_the_command_line(capsys):
    assert main(["plan", "--model", LLAMA, "--max-batch", "4", "--max-seq-len", "8192", "--memory-gib", "24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    regions = found["memory_map"]
    assert [r["offset"] for r in regions] == sorted(r["offset"] for r in regions) and regions[0]["name"] == "KV_0"
    assert all(a["offset"] + a["bytes"] <= b["offset"] for a, b in pairwise(regions))
    assert found["memory"]["fits"] == [1, 2, 4]
    assert main(["plan", "--model", LLAMA, "--max-batch", "64", "--max-seq-len", "8192", "--memory-gib", "24"]) == 2
    assert "buckets that fit are [1, 2, 4" in capsys.readouterr().err


def test_the_plan_is_readable(capsys):
    assert main(["plan", "--model", "shape:qwen3-0.6b", "--max-batch", "2", "--max-seq-len", "1024"]) == 0
    out = capsys.readouterr().out
    assert "KV_0" in out and "KV_27" in out and "weights" in out and "GiB" in out
