"""The end of a step in two kernels (Triton): selection, log-probability, feedback, ring and status."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tiles import launch_options

CHUNK = 4096  # logits of one program of the first kernel


@triton.jit
def _summarise(logits, summary, V, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    """Of each chunk of a row: its largest logit, that one's lowest id, and the sum of exponentials below it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row.to(tl.int64) * V + ids, mask=ids < V, other=float("-inf"))
    highest = tl.max(value, 0)
    first = tl.min(tl.where(value == highest, ids, V - 1), 0)
    # A chunk of nothing but minus infinity adds nothing; its difference to itself would be NaN.
    total = tl.sum(tl.exp(value - tl.where(highest == float("-inf"), 0.0, highest)), 0)
    place = summary + (row * CHUNKS + chunk) * 3
    tl.store(place, highest)
    tl.store(place + 1, total)
    tl.store(place + 2, first.to(tl.float32, bitcast=True))


@triton.jit
def _advance(
    logits,
    summary,
    chosen,
    status,
    ring,
    logprobs,
    forced,
    tokens,
    positions,
    limits,
    stop_ids,
    V,
    S1,
    STOPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    GREEDY: tl.constexpr,
    IDLE_TO_FAILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: what ``decode._advance`` does, in the same order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    RUNNING: tl.constexpr = IDLE_TO_FAILED[1]
    STOPPED: tl.constexpr = IDLE_TO_FAILED[2]
    LENGTH: tl.constexpr = IDLE_TO_FAILED[3]
    FAILED: tl.constexpr = IDLE_TO_FAILED[4]
    row = tl.program_id(0)
    chunk = tl.arange(0, CP)
    place = summary + (row * CHUNKS + chunk) * 3
    high = tl.load(place, mask=chunk < CHUNKS, other=float("-inf"))
    total = tl.load(place + 1, mask=chunk < CHUNKS, other=0.0)
    first = tl.load(place + 2, mask=chunk < CHUNKS, other=0.0).to(tl.int32, bitcast=True)
    highest = tl.max(high, 0)
    normaliser = highest + tl.log(tl.sum(total * tl.exp(high - highest), 0))
    failed = (normaliser != normaliser) | (tl.abs(normaliser) == float("inf"))
    if GREEDY:
        token = tl.min(tl.where(high == highest, first, V - 1), 0)
    else:
        token = tl.load(chosen + row)
    position = tl.load(positions + row)
    following = position + 1
    history = row.to(tl.int64) * S1 + following
    wanted = tl.load(forced + history)
    token = tl.where(wanted >= 0, wanted, token)
    logprob = tl.load(logits + row.to(tl.int64) * V + token) - normaliser
    stops = tl.load(stop_ids + row * STOPS + tl.arange(0, STOPS))
    ended = tl.where(following >= tl.load(limits + row), LENGTH, RUNNING)
    ended = tl.where(tl.max((stops == token).to(tl.int32), 0) > 0, STOPPED, ended)
    ended = tl.where(failed, FAILED, ended)
    if tl.load(status + row) == RUNNING:
        if not failed:
            tl.store(ring + history, token)
            tl.store(logprobs + history, logprob)
        if ended == RUNNING:
            tl.store(tokens + row, token)
            tl.store(positions + row, following)
        tl.store(status + row, ended)


def advance(state, chosen: Int[Tensor, " B"] | None, statuses: tuple[int, ...], early: int = 0) -> None:
    """Move every row of a DecodeState on, in place, from its ``logits``; without ``chosen`` greedily.

    ``statuses`` are the values of IDLE, RUNNING, STOPPED, LENGTH and FAILED; ``early`` as in ``launch_options``.
    """
    logits: Float[Tensor, "B V"] = state.logits
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    summary = torch.empty(rows * chunks * 3, dtype=torch.float32, device=logits.device)
    _summarise[(rows, chunks)](logits, summary, vocabulary, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8, **launch_options(early))
    _advance[(rows,)](
        logits,
        summary,
        state.tokens if chosen is None else chosen,
        state.status,
        state.ring,
        state.logprobs,
        state.forced,
        state.tokens,
        state.positions,
        state.limits,
        state.stop_ids,
        vocabulary,
        state.ring.shape[1],
        STOPS=state.stop_ids.shape[1],
        CHUNKS=chunks,
        CP=triton.next_power_of_2(chunks),
        GREEDY=chosen is None,
        IDLE_TO_FAILED=statuses,
        num_warps=1,
        **launch_options(early),
    )
