"""Prefill and the decode step: pure functions of fixed shape over a documented state.

The whole state is donated wherever one of these is compiled, so every leaf is written in place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .cache import MAX_STOP_IDS, KVCache, Region, cache_shapes, row_regions
from .config import ModelConfig
from .model import Model
from .sampling import select_sampled

IDLE, RUNNING, STOPPED, LENGTH, FAILED = range(5)  # a row's status


def _field(name: str) -> property:
    return property(lambda state: state.field(name))


class DecodeState(NamedTuple):
    """All that changes between steps. Shapes never change; the caller gives the old state up.

    What belongs to the rows lies in ``words``, one array, and is read by the names below (float32
    fields as their bits). A row that is not RUNNING changes nothing: it computes its newest token
    again, in its own slot.
    """

    cache: KVCache
    logits: Float[Array, "B V"]  # float32, of the newest step; a fresh output would make XLA patch the graph
    words: Int[Array, " W"]

    status = _field("status")  # [B]: IDLE, RUNNING, or why the row ended
    ring = _field("ring")  # [B, S + 1]: the chosen token of each position, -1 where none
    logprobs = _field("logprobs")  # [B, S + 1] float32: its log-probability under the raw logits
    forced = _field("forced")  # [B, S + 1]: where >= 0, taken in place of the chosen token of that position
    tokens = _field("tokens")  # [B]: newest token of each row, the next step's input
    positions = _field("positions")  # [B]: the cache slot that token will fill
    limits = _field("limits")  # [B]: the position at which the row's last allowed token lies
    stop_ids = _field("stop_ids")  # [B, 16]: -1 where unused
    filters = _field("filters")  # [B, 3] float32: temperature, top_p, min_p
    draws = _field("draws")  # [B, 3]: top_k, seed, row id (uint32 bit patterns)

    @property
    def batch(self) -> int:
        return self.logits.shape[0]

    @property
    def regions(self) -> dict[str, Region]:
        """Where the fields lie in ``words``."""
        return row_regions(self.batch, self.cache.length)

    def field(self, name: str) -> Array:
        """A field of the rows, in its own shape and dtype."""
        return _cut_on_device(self.words, self.regions[name])

    def with_fields(self, **values: Array) -> DecodeState:
        """This state with whole fields replaced."""
        words = self.words
        for name, value in values.items():
            words = jax.lax.dynamic_update_slice(words, _bits(value).ravel(), (self.regions[name].offset // 4,))
        return self._replace(words=words)

    def with_row(self, row: Int[Array, ""], **values: Array | int | float) -> DecodeState:
        """This state with fields of one row replaced; a number fills the row's part of its field."""
        words = self.words
        for name, value in values.items():
            region = self.regions[name]
            size = math.prod(region.shape[1:])
            new = jnp.broadcast_to(jnp.asarray(value, region.dtype), region.shape[1:])
            words = jax.lax.dynamic_update_slice(words, _bits(new).ravel(), (region.offset // 4 + row * size,))
        return self._replace(words=words)


def cut(words: Array | np.ndarray, region: Region) -> Array | np.ndarray:
    """A field out of the words, on the device or in a copy on the host."""
    start = region.offset // 4
    return words[start : start + region.nbytes // 4].view(region.dtype).reshape(region.shape)


# One call in place of three operations when the host asks; within a traced step the operations themselves.
_cut_on_device = jax.jit(cut, static_argnums=1, inline=True)


def _bits(value: Array) -> Int[Array, "..."]:
    return value if value.dtype == jnp.int32 else jax.lax.bitcast_convert_type(value, jnp.int32)


STATE_FIELDS = ("cache", "logits", *row_regions(1, 1))  # every name under which a state can be read


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
    words = jnp.zeros(sum(r.nbytes for r in row_regions(batch, max_seq_len).values()) // 4, jnp.int32)
    state = DecodeState(cache, jnp.zeros((batch, config.vocab_size), jnp.float32), words)
    return state.with_fields(**{name: jnp.full_like(state.field(name), -1) for name in ("ring", "forced", "stop_ids")})


def admit(state: DecodeState, row: Int[Array, ""], settings: RowSettings) -> DecodeState:
    """Give a row to a new sequence: set its fields and clear everything the last one left.

    The cache row is cleared because a masked score still multiplies its value, and 0 times a
    leftover NaN is NaN.
    """
    cache = state.cache.with_row(row, jax.tree.map(jnp.zeros_like, jax.eval_shape(state.cache.row, row)))
    state = state._replace(cache=cache, logits=state.logits.at[row].set(0))
    return state.with_row(row, ring=-1, forced=-1, logprobs=0, **settings._asdict())


def release(state: DecodeState, row: Int[Array, ""]) -> DecodeState:
    """Make a row idle; its fields keep defined values."""
    return state.with_row(row, status=IDLE, tokens=0, positions=0)


def force(state: DecodeState, row: Int[Array, ""], tokens: Int[Array, " S1"]) -> DecodeState:
    """Have a row take ``tokens[p]`` at position p, where it is not negative, instead of its choice."""
    return state.with_row(row, forced=tokens)


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
    state = state._replace(cache=cache, logits=model.logits(hidden)[:, 0])
    return _advance(state, kind, *model.greedy_and_normaliser(state.logits))


def _advance(state: DecodeState, kind: str, greedy: Int[Array, " B"], normaliser: Float[Array, " B"]) -> DecodeState:
    """Select, feed back, append to the ring, move on; rows end here.

    ``greedy`` are the ids of the largest logits, ``normaliser`` the logarithms of the sums of their exponentials.
    """
    running = state.status == RUNNING
    following = state.positions + 1
    rows = jnp.arange(following.shape[0], dtype=jnp.int32)
    if kind == "greedy":
        chosen = greedy
    else:
        chosen = select_sampled(state.logits, following, state.filters, state.draws)
    forced = state.forced[rows, following]
    token = jnp.where(forced >= 0, forced, chosen)
    logprob = state.logits[rows, token] - normaliser
    # NaN or infinity anywhere in a row's logits makes its normaliser so.
    failed = ~jnp.isfinite(normaliser)
    ended = jnp.where(following >= state.limits, LENGTH, RUNNING)
    ended = jnp.where((token[:, None] == state.stop_ids).any(1), STOPPED, ended)
    ended = jnp.where(failed, FAILED, ended).astype(jnp.int32)
    appends = running & ~failed
    moves = running & (ended == RUNNING)
    return state._replace(
        words=_scatter(
            state,
            # name, which of the row's numbers, where it changes, its new value
            ("ring", following, appends, token),
            ("logprobs", following, appends, logprob),
            ("tokens", 0, moves, token),
            ("positions", 0, moves, following),
            ("status", 0, running, ended),
        )
    )


def _scatter(state: DecodeState, *changes: tuple[str, Int[Array, " B"] | int, Bool[Array, " B"], Array]) -> Int[Array, " W"]:
    """The words with one number a row changed in each of some fields, all in one scatter: one kernel."""
    rows = jnp.arange(state.batch, dtype=jnp.int32)
    where, new, changed = [], [], []
    for name, index, mask, value in changes:
        region = state.regions[name]
        where.append(region.offset // 4 + rows * math.prod(region.shape[1:]) + index)
        new.append(_bits(value))
        changed.append(mask)
    places = jnp.concatenate(where)
    values = jnp.where(jnp.concatenate(changed), jnp.concatenate(new), state.words[places])
    return state.words.at[places].set(values, unique_indices=True)


def settings_arrays(values: dict) -> RowSettings:
    """Host values of a row to arrays of fixed shape and dtype, so that admission compiles once."""
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(values["stop_ids"])] = values["stop_ids"]
    scalars = {name: np.int32(values[name]) for name in ("status", "tokens", "positions", "limits")}
    return RowSettings(**scalars, stop_ids=stop_ids, filters=np.array(values["filters"], np.float32), draws=np.array(values["draws"], np.int32))
