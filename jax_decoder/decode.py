"""Prefill and the decode step: pure functions of fixed shape over a documented state.

The whole state is donated wherever one of these is compiled, so every leaf is written in place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .cache import MAX_STOP_IDS, KVCache, cache_shapes, state_leaves
from .config import ModelConfig
from .model import Model
from .sampling import select_greedy, select_sampled

IDLE, RUNNING, STOPPED, LENGTH, FAILED = range(5)  # a row's status


class DecodeState(NamedTuple):
    """All that changes between steps. Shapes never change; the caller gives the old state up.

    A row that is not RUNNING changes nothing: it computes its newest token again, in its own slot.
    """

    cache: KVCache
    logits: Float[Array, "B V"]  # float32, of the newest step; a fresh output would make XLA patch the graph
    status: Int[Array, " B"]  # IDLE, RUNNING, or why the row ended
    ring: Int[Array, "B S1"]  # the chosen token of each position, -1 where none; S1 is S + 1
    logprobs: Float[Array, "B S1"]  # its log-probability under the raw logits
    forced: Int[Array, "B S1"]  # where >= 0, taken in place of the chosen token of that position
    tokens: Int[Array, " B"]  # newest token of each row: the next step's input
    positions: Int[Array, " B"]  # the cache slot that token will fill
    limits: Int[Array, " B"]  # the position at which the row's last allowed token lies
    stop_ids: Int[Array, "B M"]  # -1 where unused
    filters: Float[Array, "B 3"]  # temperature, top_p, min_p
    draws: Int[Array, "B 3"]  # top_k, seed, row id (uint32 bit patterns)


class RowSettings(NamedTuple):
    """A row's fields at admission; numpy or device arrays of fixed shape and dtype."""

    status: Int[Array, ""]
    tokens: Int[Array, ""]
    positions: Int[Array, ""]
    limits: Int[Array, ""]
    stop_ids: Int[Array, " M"]
    filters: Float[Array, " 3"]
    draws: Int[Array, " 3"]


def make_state(config: ModelConfig, batch: int, max_seq_len: int, dtype: jnp.dtype, packing: str) -> DecodeState:
    """A state with all rows idle."""
    shapes = cache_shapes(config, batch, max_seq_len, packing)
    cache = KVCache(*(tuple(jnp.zeros(s, dtype) for s in shapes) for _ in range(2)))
    empty = {"ring": -1, "forced": -1, "stop_ids": -1}
    leaves = {n: jnp.full(s, empty.get(n, 0), d) for n, s, d in state_leaves(batch, max_seq_len, config.vocab_size)}
    return DecodeState(cache, **leaves)


def admit(state: DecodeState, row: Int[Array, ""], settings: RowSettings) -> DecodeState:
    """Give a row to a new sequence: set its fields and clear everything the last one left.

    The cache row is cleared because a masked score still multiplies its value, and 0 times a
    leftover NaN is NaN.
    """
    cache = state.cache.with_row(row, jax.tree.map(jnp.zeros_like, jax.eval_shape(state.cache.row, row)))
    cleared = {name: getattr(state, name).at[row].set(value) for name, value in (("logits", 0), ("ring", -1), ("forced", -1), ("logprobs", 0))}
    given = {name: getattr(state, name).at[row].set(value) for name, value in settings._asdict().items()}
    return state._replace(cache=cache, **cleared, **given)


def release(state: DecodeState, row: Int[Array, ""]) -> DecodeState:
    """Make a row idle; its fields keep defined values."""
    return state._replace(**{name: getattr(state, name).at[row].set(0) for name in ("status", "tokens", "positions")})


def force(state: DecodeState, row: Int[Array, ""], tokens: Int[Array, " S1"]) -> DecodeState:
    """Have a row take ``tokens[p]`` at position p, where it is not negative, instead of its choice."""
    return state._replace(forced=state.forced.at[row].set(tokens))


def chunk_positions(start: Int[Array, ""], valid: Int[Array, ""], length: int, slots: int) -> Int[Array, "1 T"]:
    """Positions of a chunk whose first ``valid`` tokens are real; the others lie past the cache."""
    offsets = jnp.arange(length, dtype=jnp.int32)
    return jnp.where(offsets < valid, start + offsets, slots)[None]


def prefill_chunk(model: Model, state: DecodeState, row: Int[Array, ""], tokens: Int[Array, " T"], start: Int[Array, ""], valid: Int[Array, ""]) -> DecodeState:
    """Run ``valid`` prompt tokens from position ``start`` through the model into a row's cache."""
    positions = chunk_positions(start, valid, tokens.shape[0], state.cache.length)
    _, cache = model(tokens[None], positions, state.cache.row(row))
    return state._replace(cache=state.cache.with_row(row, cache))


def score_chunk(model: Model, cache: KVCache, tokens: Int[Array, " T"], start: Int[Array, ""], valid: Int[Array, ""]) -> tuple[KVCache, Float[Array, "T V"]]:
    """Logits of every token of a chunk, with the cache (batch 1) that the next chunk needs."""
    positions = chunk_positions(start, valid, tokens.shape[0], cache.length)
    hidden, cache = model(tokens[None], positions, cache)
    return cache, model.logits(hidden)[0]


def decode_step(model: Model, state: DecodeState, kind: str) -> DecodeState:
    """One step of all rows, from input tokens to next tokens; ``kind`` is greedy or sampled."""
    hidden, cache = model(state.tokens[:, None], state.positions[:, None], state.cache)
    return _advance(state._replace(cache=cache, logits=model.logits(hidden)[:, 0]), kind)


def _advance(state: DecodeState, kind: str) -> DecodeState:
    """Select, feed back, append to the ring, move on; rows end here."""
    running = state.status == RUNNING
    following = state.positions + 1
    rows = jnp.arange(following.shape[0], dtype=jnp.int32)
    if kind == "greedy":
        chosen = select_greedy(state.logits)
    else:
        chosen = select_sampled(state.logits, following, state.filters, state.draws)
    forced = state.forced[rows, following]
    token = jnp.where(forced >= 0, forced, chosen)
    normaliser = jax.nn.logsumexp(state.logits, axis=1)
    logprob = state.logits[rows, token] - normaliser
    # NaN or infinity anywhere in a row's logits makes its normaliser so.
    failed = ~jnp.isfinite(normaliser)
    ended = jnp.where(following >= state.limits, LENGTH, RUNNING)
    ended = jnp.where((token[:, None] == state.stop_ids).any(1), STOPPED, ended)
    ended = jnp.where(failed, FAILED, ended).astype(jnp.int32)
    appends = running & ~failed

    def append(history: Array, value: Array) -> Array:
        return history.at[rows, following].set(jnp.where(appends, value, history[rows, following]))

    moves = running & (ended == RUNNING)
    return state._replace(
        ring=append(state.ring, token),
        logprobs=append(state.logprobs, logprob),
        tokens=jnp.where(moves, token, state.tokens),
        positions=jnp.where(moves, following, state.positions),
        status=jnp.where(running, ended, state.status),
    )


def settings_arrays(values: dict) -> RowSettings:
    """Host values of a row to arrays of fixed shape and dtype, so that admission compiles once."""
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(values["stop_ids"])] = values["stop_ids"]
    scalars = {name: np.int32(values[name]) for name in ("status", "tokens", "positions", "limits")}
    return RowSettings(**scalars, stop_ids=stop_ids, filters=np.array(values["filters"], np.float32), draws=np.array(values["draws"], np.int32))
