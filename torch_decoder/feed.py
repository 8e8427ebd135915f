"""Host values on their way to the device: through pinned memory, guarded by events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

SLOTS = 8


class Event(Protocol):
    """The part of torch.cuda.Event that a feed needs."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _NoEvent:
    """For a device whose copies are done when they return."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Feed:
    """A ring of staging buffers of ``words`` int32 each.

    A copy from pinned memory returns before it has run, so the host may write a buffer again only
    after the event behind its last copy. On the device the stream's order is guard enough.
    """

    def __init__(self, device: torch.device, words: int, make_event: Callable[[], Event] | None = None):
        cuda = device.type == "cuda"
        self.words = words
        self._host = torch.zeros(SLOTS, words, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(SLOTS, words, dtype=torch.int32, device=device)
        make_event = make_event or (torch.cuda.Event if cuda else _NoEvent)
        self._events = [make_event() for _ in range(SLOTS)]
        self._next = 0

    def upload(self, values: Sequence[int]) -> Tensor:
        """The values as int32 on the device, valid for SLOTS uploads; does not wait for the device."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        self._events[slot].synchronize()
        host = self._host[slot, : len(values)]
        host.numpy()[:] = np.asarray(values, np.int32)
        target = self._device[slot, : len(values)]
        target.copy_(host, non_blocking=True)
        self._events[slot].record()
        return target

    def pieces(self, values: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """Cut what is longer than a buffer: (start, values) of each piece."""
        return [(i, values[i : i + self.words]) for i in range(0, len(values), self.words)]


def float_bits(values: Sequence[float]) -> list[int]:
    """float32 values as the int32 words that hold their bits."""
    return np.asarray(values, np.float32).view(np.int32).tolist()
