"""The functions that run on the device, as JAX sees them: pure, with the weights as one argument.

The module is split once: programs take the weights as a flat tuple of arrays and merge them back
into the module while they are traced, so the module's own call is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from . import decode
from .cache import KVCache
from .checkpoint import flatten_model
from .decode import DecodeState, settings_arrays
from .model import Model


class Structure:
    """A model without its weights, which a call puts in; free while tracing."""

    def __init__(self, model: Model):
        self._graphdef, self._template = nnx.split(model)
        self.names = tuple(flatten_model(model))

    def __call__(self, weights: tuple[jax.Array, ...]) -> Model:
        pure: dict[Any, Any] = {}
        for name, array in zip(self.names, weights):
            *path, last = (int(key) if key.isdigit() else key for key in name.split("."))
            node = pure
            for key in path:
                node = node.setdefault(key, {})
            node[last] = array
        state = jax.tree.map(lambda x: x, self._template)
        nnx.replace_by_pure_dict(state, pure)
        return nnx.merge(self._graphdef, state)


class Programs:
    """The model's weights, and every function of a state that the runner calls.

    All but the step compile themselves at their first call, once for each bucket. ``compiled_by``:
    programs of a model that differs in the kernels of its step at most, whose compilations serve here, too.
    """

    def __init__(self, model: Model, parameters: Mapping[str, jax.Array], chunk: int, compiled_by: Programs | None = None):
        self.merge = Structure(model)
        self._chunk = chunk
        self.weights = tuple(parameters[name] for name in self.merge.names)
        if compiled_by is not None:
            self._admit, self._force, self._release = compiled_by._admit, compiled_by._force, compiled_by._release
            self._prefill, self._score = compiled_by._prefill, compiled_by._score
            return
        self._admit = _in_place(decode.admit)
        self._force = _in_place(decode.force)
        self._release = _in_place(decode.release)
        self._prefill = self._of_model(decode.prefill_chunk)
        self._score = self._of_model(decode.score_chunk)

    def _of_model(self, function: Callable) -> Callable:
        """A compiled function of (weights, state, ...) from one of (model, state, ...)."""
        merge = self.merge  # not self: programs that others share must not keep these weights
        return jax.jit(lambda weights, state, *rest: function(merge(weights), state, *rest), donate_argnums=1, keep_unused=True)

    # ---- weights -------------------------------------------------------------------------------

    def parameters(self) -> dict[str, jax.Array]:
        return dict(zip(self.merge.names, self.weights))

    def set_weights(self, parameters: Mapping[str, jax.Array]) -> None:
        """Use other parameters of the same shapes; executables take them as arguments."""
        self.weights = tuple(parameters.get(name, old) for name, old in zip(self.merge.names, self.weights))

    # ---- the step ------------------------------------------------------------------------------

    def step(self, kind: str, steps: int = 1) -> Callable[[tuple[jax.Array, ...], DecodeState], DecodeState]:
        """``steps`` decode steps, one after the other, as one function."""

        def step(weights: tuple[jax.Array, ...], state: DecodeState) -> DecodeState:
            model = self.merge(weights)
            for _ in range(steps):
                state = decode.decode_step(model, state, kind)
            return state

        return step

    def lower_step(self, state: DecodeState, kind: str, steps: int = 1) -> jax.stages.Lowered:
        """The step for this state's shapes. keep_unused: jit would drop leaves that are written but
        not read, and with them the alias of the output to its own input."""
        return jax.jit(self.step(kind, steps), donate_argnums=1, keep_unused=True).lower(self.weights, state)

    # ---- rows ----------------------------------------------------------------------------------

    def admit(self, state: DecodeState, row: int, tokens: Sequence[int], settings: dict[str, Any]) -> DecodeState:
        """Clear a row, prefill all of ``tokens`` but the last, and let the row run.

        The last token is the next step's input, so the first new token comes from the same
        step as all others.
        """
        state = self._admit(state, np.int32(row), settings_arrays(settings))
        for chunk, start, valid in self._chunks(tokens[:-1]):
            state = self._prefill(self.weights, state, np.int32(row), chunk, start, valid)
        return state

    def force(self, state: DecodeState, row: int, first: int, tokens: Sequence[int]) -> DecodeState:
        """Have the row take ``tokens`` at positions from ``first`` on instead of its own choice."""
        values = np.full(state.regions["forced"].shape[1], -1, np.int32)
        values[first : first + len(tokens)] = tokens
        return self._force(state, np.int32(row), values)

    def release(self, state: DecodeState, row: int) -> DecodeState:
        return self._release(state, np.int32(row))

    def score(self, cache: KVCache, row: Sequence[int]) -> jax.Array:
        """Teacher-forced float32 logits [T, V] of one row; ``cache`` is used up."""
        pieces = []
        for chunk, start, valid in self._chunks(row):
            cache, logits = self._score(self.weights, cache, chunk, start, valid)
            pieces.append(logits[: int(valid)])
        return jax.numpy.concatenate(pieces)

    def _chunks(self, tokens: Sequence[int]) -> list[tuple[np.ndarray, np.int32, np.int32]]:
        """Pieces of one size, the last one padded, so that one program serves every length."""
        chunks = []
        for start in range(0, len(tokens), self._chunk):
            part = tokens[start : start + self._chunk]
            padded = np.zeros(self._chunk, np.int32)
            padded[: len(part)] = part
            chunks.append((padded, np.int32(start), np.int32(len(part))))
        return chunks


def _in_place(function: Callable) -> Callable:
    """Compiled, the state (its first argument) donated and written where it lies."""
    return jax.jit(lambda state, *rest: function(state, *rest), donate_argnums=0, keep_unused=True)
