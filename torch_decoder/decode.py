"""Prefill and the decode step: functions of fixed shape over a documented state.

In PyTorch the state's tensors are views of one buffer and are written in place, so that a
captured step finds everything where it was. No function here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .cache import MAX_STOP_IDS, KVCache, MemoryMap
from .feed import float_bits
from .model import Model
from .sampling import select_greedy, select_sampled

IDLE, RUNNING, STOPPED, LENGTH, FAILED = range(5)  # a row's status


class DecodeState(NamedTuple):
    """All that changes between steps. Shapes never change; the caller gives the old state up.

    A row that is not RUNNING changes nothing: it computes its newest token again, in its own slot.
    """

    cache: KVCache
    logits: Float[Tensor, "B V"]  # float32, of the newest step
    status: Int[Tensor, " B"]  # IDLE, RUNNING, or why the row ended
    ring: Int[Tensor, "B S1"]  # the chosen token of each position, -1 where none; S1 is S + 1
    logprobs: Float[Tensor, "B S1"]  # its log-probability under the raw logits
    forced: Int[Tensor, "B S1"]  # where >= 0, taken in place of the chosen token of that position
    tokens: Int[Tensor, " B"]  # newest token of each row: the next step's input
    positions: Int[Tensor, " B"]  # the cache slot that token will fill
    limits: Int[Tensor, " B"]  # the position at which the row's last allowed token lies
    stop_ids: Int[Tensor, "B M"]  # -1 where unused
    filters: Float[Tensor, "B 3"]  # temperature, top_p, min_p
    draws: Int[Tensor, "B 3"]  # top_k, seed, row id (uint32 bit patterns)


STATE_FIELDS = DecodeState._fields  # every name under which a state can be read


def make_state(plan: MemoryMap, device: torch.device) -> DecodeState:
    """Allocate the map in one piece; all rows idle."""
    _, views = plan.allocate(device)
    layers = tuple(views.pop(name) for name in list(views) if name.startswith("KV_"))
    state = DecodeState(KVCache(layers), **views)
    for leaf in (state.ring, state.forced, state.stop_ids):
        leaf.fill_(-1)
    return state


def copy_into(target: DecodeState, source: DecodeState) -> DecodeState:
    """Overwrite a state with another of the same shapes; returns the target."""
    for new, old in zip(leaves(target), leaves(source)):
        new.copy_(old)
    return target


def leaves(state: DecodeState) -> list[Tensor]:
    """Every tensor of the state, in the order of the memory map."""
    return [x for pair in zip(state.cache.k, state.cache.v) for x in pair] + list(state[1:])


def first_rows(state: DecodeState, count: int) -> DecodeState:
    """The state of the first ``count`` rows, in the same memory."""
    return DecodeState(state.cache.rows(0, count), *(leaf[:count] for leaf in state[1:]))


def settings_words(values: dict[str, Any]) -> list[int]:
    """A row's fields at admission as int32 words, in the order of ``_SETTINGS``."""
    stop_ids = values["stop_ids"] + [-1] * (MAX_STOP_IDS - len(values["stop_ids"]))
    return [*(values[name] for name in ("status", "tokens", "positions", "limits")), *stop_ids, *float_bits(values["filters"]), *values["draws"]]


# Field of a row, first and last word (exclusive) of its settings.
_SETTINGS = (
    *((name, i, i + 1) for i, name in enumerate(("status", "tokens", "positions", "limits"))),
    ("stop_ids", 4, 4 + MAX_STOP_IDS),
    ("filters", 4 + MAX_STOP_IDS, 7 + MAX_STOP_IDS),
    ("draws", 7 + MAX_STOP_IDS, 10 + MAX_STOP_IDS),
)


@torch.no_grad()
def admit(state: DecodeState, row: int, words: Int[Tensor, " W"]) -> None:
    """Give a row to a new sequence: set its fields and clear everything the last one left.

    The cache row is cleared because a masked score still multiplies its value, and 0 times a
    leftover NaN is NaN. ``words`` are ``settings_words`` on the state's device.
    """
    for layer in state.cache.layers:
        layer[:, row].zero_()
    state.logits[row].zero_()
    for name, empty in (("ring", -1), ("forced", -1), ("logprobs", 0)):
        getattr(state, name)[row].fill_(empty)
    for name, start, stop in _SETTINGS:
        target = getattr(state, name)[row]
        target.copy_(words[start:stop].view(target.dtype).view(target.shape))


@torch.no_grad()
def release(state: DecodeState, row: int) -> None:
    """Make a row idle; its fields keep defined values."""
    state.status[row] = IDLE
    state.tokens[row] = 0
    state.positions[row] = 0


@torch.no_grad()
def prefill_chunk(model: Model, cache: KVCache, tokens: Int[Tensor, "1 T"], start: int) -> Float[Tensor, "1 T D"]:
    """Run prompt tokens from position ``start`` through the model into one row's cache."""
    positions = torch.arange(start, start + tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
    return model(tokens, positions, cache, start)


@torch.no_grad()
def decode_step(model: Model, state: DecodeState, kind: str) -> DecodeState:
    """One step of all rows, from input tokens to next tokens; ``kind`` is greedy or sampled."""
    hidden = model(state.tokens[:, None], state.positions[:, None], state.cache)
    model.logits_into(state.logits, hidden)
    if not model.fused(state.tokens.shape[0]):
        return _advance(state, kind)
    from .kernels.advance import advance

    advance(state, None if kind == "greedy" else _sample(state), (IDLE, RUNNING, STOPPED, LENGTH, FAILED), model.starts_early)
    return state


def _sample(state: DecodeState) -> Int[Tensor, " B"]:
    return select_sampled(state.logits, state.positions + 1, state.filters, state.draws)


def _advance(state: DecodeState, kind: str) -> DecodeState:
    """Select, feed back, append to the ring, move on; rows end here."""
    running = state.status == RUNNING
    following = state.positions + 1
    if kind == "greedy":
        chosen = select_greedy(state.logits)
    else:
        chosen = _sample(state)
    column = following[:, None].long()
    forced = state.forced.gather(1, column)[:, 0]
    token = torch.where(forced >= 0, forced, chosen)
    normaliser = torch.logsumexp(state.logits, dim=1)
    logprob = state.logits.gather(1, token[:, None].long())[:, 0] - normaliser
    # NaN or infinity anywhere in a row's logits makes its normaliser so.
    failed = ~torch.isfinite(normaliser)
    ended = torch.where(following >= state.limits, LENGTH, RUNNING)
    ended = torch.where((token[:, None] == state.stop_ids).any(1), STOPPED, ended)
    ended = torch.where(failed, FAILED, ended)
    appends = running & ~failed
    for leaf, value in ((state.ring, token), (state.logprobs, logprob)):
        leaf.scatter_(1, column, torch.where(appends, value, leaf.gather(1, column)[:, 0])[:, None])
    moves = running & (ended == RUNNING)
    state.tokens.copy_(torch.where(moves, token, state.tokens))
    state.positions.copy_(torch.where(moves, following, state.positions))
    state.status.copy_(torch.where(running, ended, state.status))
    return state


@torch.no_grad()
def count_down(state: DecodeState, control: Int[Tensor, " 3"]) -> None:
    """After a step of a loop on the device: is there another one?

    ``control`` holds the steps left, how many rows may be running when the loop ends, and the
    flag that this writes: 1 to go on.
    """
    control[0].sub_(1)
    running = (state.status == RUNNING).sum()
    control[2].copy_((control[0] > 0) & (running > control[1]))
