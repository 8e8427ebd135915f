"""Launch modes: how a step reaches the device, in which bucket, and an account of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import decode
from .cache import KVCache, Region, memory_map
from .checkpoint import flatten_model
from .decode import DecodeState, make_state, settings_arrays
from .errors import ConfigError, DeviceError
from .model import Model

LAUNCHES = ("auto", "op_by_op", "jit", "command_buffer")
PREFILL_CHUNK = {"cpu": 32, "gpu": 512}  # tokens a forward pass; fixed, so that prefill compiles once
# The same lowering with command buffers off: an empty list of command types.
_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}

# Turns a lowered function into an executable; tests and measurements pass their own.
Compile = Callable[[jax.stages.Lowered, dict[str, str]], Callable]


@dataclass
class StepAccount:
    """What one executable (bucket and sampling kind) did so far."""

    launch: str
    bucket: int
    kind: str
    compile_s: float = 0.0
    compilations: int = 0
    steps: int = 0
    padded_rows: int = 0  # idle or finished rows that steps computed all the same, summed


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch``, then ``max_batch`` itself."""
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return (*powers, max_batch)


def check_buckets(buckets: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """Buckets in ascending order up to exactly max_batch; ConfigError else."""
    if buckets is None:
        return default_buckets(max_batch)
    whole = all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in buckets)
    if not buckets or not whole or list(buckets) != sorted(set(buckets)) or buckets[-1] > max_batch:
        raise ConfigError(f"buckets is {list(buckets)!r}, expected ascending batch sizes from 1 to max_batch {max_batch}")
    return tuple(buckets)


def check_launch(launch: str, platform: str) -> str:
    """Resolve "auto"; ConfigError for a name that does not exist, DeviceError for a missing GPU."""
    if launch not in LAUNCHES:
        raise ConfigError(f"launch is {launch!r}, expected one of {', '.join(LAUNCHES)}")
    if launch == "command_buffer" and platform != "gpu":
        raise DeviceError(f"launch is 'command_buffer', but the device is a {platform}: command buffers need a CUDA device, use launch='jit'")
    return ("command_buffer" if platform == "gpu" else "jit") if launch == "auto" else launch


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, str]) -> Callable:
    return lowered.compile(compiler_options=options)


class StepRunner:
    """Owns the weights, the states (one a bucket) and the executables, and runs steps.

    The module is split once: executables take the weights as a flat tuple of arrays and merge
    them back into the module while they are traced, so the module's own call is what runs.
    """

    def __init__(
        self, model: Model, parameters: Mapping[str, jax.Array], launch: str, buckets: tuple[int, ...], dtype: jnp.dtype, device: jax.Device, compile: Compile = compile_lowered
    ):
        self.config, self.max_seq_len, self.packing = model.config, model.max_seq_len, model.packing
        self.launch, self.buckets, self.dtype, self.device = launch, buckets, dtype, device
        self.chunk = min(PREFILL_CHUNK["gpu" if device.platform == "gpu" else "cpu"], model.max_seq_len)
        self._compile = compile
        self._graphdef, self._template = nnx.split(model)
        self._names = tuple(flatten_model(model))
        self.weights = tuple(parameters[name] for name in self._names)
        self._states: dict[int, DecodeState] = {}
        self._steps: dict[tuple[int, str], Callable] = {}
        self._functions: dict[tuple, Callable] = {}
        self._accounts: dict[tuple[int, str], StepAccount] = {}

    # ---- functions of the model ----------------------------------------------------------------

    def merge(self, weights: tuple[jax.Array, ...]) -> Model:
        """The module with these weights; free while tracing."""
        pure: dict[Any, Any] = {}
        for name, array in zip(self._names, weights):
            *path, last = (int(key) if key.isdigit() else key for key in name.split("."))
            node = pure
            for key in path:
                node = node.setdefault(key, {})
            node[last] = array
        state = jax.tree.map(lambda x: x, self._template)
        nnx.replace_by_pure_dict(state, pure)
        return nnx.merge(self._graphdef, state)

    def set_weights(self, parameters: Mapping[str, jax.Array]) -> None:
        """Use other parameters of the same shapes; executables take them as arguments."""
        self.weights = tuple(parameters.get(name, old) for name, old in zip(self._names, self.weights))

    def parameters(self) -> dict[str, jax.Array]:
        return dict(zip(self._names, self.weights))

    def _step_function(self, kind: str) -> Callable[[tuple[jax.Array, ...], DecodeState], DecodeState]:
        def step(weights: tuple[jax.Array, ...], state: DecodeState) -> DecodeState:
            return decode.decode_step(self.merge(weights), state, kind)

        return step

    def lower_step(self, state: DecodeState, kind: str) -> jax.stages.Lowered:
        """The step for this state's shapes. keep_unused: jit would drop leaves that are written but
        not read, and with them the alias of the output to its own input."""
        return jax.jit(self._step_function(kind), donate_argnums=1, keep_unused=True).lower(self.weights, state)

    def _executable(self, state: DecodeState, kind: str) -> Callable:
        key = (state.tokens.shape[0], kind)
        if key not in self._steps:
            account = self._account(key)
            started = time.perf_counter()
            if self.launch == "op_by_op":
                self._steps[key] = self._step_function(kind)
            else:
                options = _NO_COMMAND_BUFFERS if self.launch == "jit" and self.device.platform == "gpu" else {}
                self._steps[key] = self._compile(self.lower_step(state, kind), options)
                account.compilations += 1
            account.compile_s += time.perf_counter() - started
        return self._steps[key]

    def _jitted(self, name: str, function: Callable, *donated: int) -> Callable:
        if name not in self._functions:
            self._functions[name] = jax.jit(function, donate_argnums=donated, keep_unused=True)
        return self._functions[name]

    # ---- states --------------------------------------------------------------------------------

    def bucket_for(self, rows: int) -> int:
        """The smallest bucket that holds ``rows``, or the largest there is."""
        return next((b for b in self.buckets if b >= rows), self.buckets[-1])

    def plan(self, bucket: int) -> list[Region]:
        return memory_map(self.config, bucket, self.max_seq_len, self.dtype, self.packing)

    def new_state(self, bucket: int) -> DecodeState:
        """A state with all rows idle, for the caller to keep."""
        with jax.default_device(self.device):
            state = make_state(self.config, bucket, self.max_seq_len, self.dtype, self.packing)
        return jax.device_put(state, self.device)  # commits the leaves: one placement, one executable

    def take_state(self, bucket: int) -> DecodeState:
        """The bucket's own state with every row idle; give it back with ``keep_state``.

        It is taken out because every step donates it: after a failure nothing stale is left here.
        """
        state = self._states.pop(bucket, None)
        state = self.new_state(bucket) if state is None else state
        for row in range(bucket):
            state = self.release(state, row)
        return state

    def keep_state(self, state: DecodeState) -> None:
        self._states[state.tokens.shape[0]] = state

    def copy_state(self, state: DecodeState) -> DecodeState:
        return jax.tree.map(jnp.copy, state)

    def admit(self, state: DecodeState, row: int, prompt: list[int], settings: dict[str, Any]) -> DecodeState:
        """Clear a row, prefill all of the prompt but its last token, and let the row run.

        The last token is the next step's input, so the first new token comes from the same
        step as all others.
        """
        state = self._jitted("admit", decode.admit, 0)(state, np.int32(row), settings_arrays(settings))
        prefill = self._jitted("prefill", lambda weights, state, *chunk: decode.prefill_chunk(self.merge(weights), state, *chunk), 1)
        for tokens, start, valid in self._chunks(prompt[:-1]):
            state = prefill(self.weights, state, np.int32(row), tokens, start, valid)
        return state

    def _chunks(self, tokens: Sequence[int]) -> list[tuple[np.ndarray, np.int32, np.int32]]:
        chunks = []
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            padded = np.zeros(self.chunk, np.int32)
            padded[: len(part)] = part
            chunks.append((padded, np.int32(start), np.int32(len(part))))
        return chunks

    def force(self, state: DecodeState, row: int, first: int, tokens: Sequence[int]) -> DecodeState:
        """Have the row take ``tokens`` at positions from ``first`` on instead of its own choice."""
        values = np.full(state.forced.shape[1], -1, np.int32)
        values[first : first + len(tokens)] = tokens
        return self._jitted("force", decode.force, 0)(state, np.int32(row), values)

    def release(self, state: DecodeState, row: int) -> DecodeState:
        return self._jitted("release", decode.release, 0)(state, np.int32(row))

    def score(self, row: Sequence[int]) -> jax.Array:
        """Teacher-forced float32 logits [T, V] of one row."""
        score = self._jitted("score", lambda weights, cache, *chunk: decode.score_chunk(self.merge(weights), cache, *chunk), 1)
        cache: KVCache = self.new_state(1).cache
        pieces = []
        for tokens, start, valid in self._chunks(row):
            cache, logits = score(self.weights, cache, tokens, start, valid)
            pieces.append(logits[: int(valid)])
        return jnp.concatenate(pieces)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, state: DecodeState, kind: str, live_rows: int) -> DecodeState:
        """One decode step; the state given is used up. ``live_rows`` is only counted."""
        bucket = state.tokens.shape[0]
        executable = self._executable(state, kind)
        account = self._account((bucket, kind))
        account.steps += 1
        account.padded_rows += bucket - live_rows
        return executable(self.weights, state)

    def read(self, state: DecodeState) -> dict[str, np.ndarray]:
        """Host copies of what decides how rows go on: waits for the device."""
        wanted = ("status", "positions", "ring", "logprobs")
        return dict(zip(wanted, jax.device_get([getattr(state, name) for name in wanted])))

    def _account(self, key: tuple[int, str]) -> StepAccount:
        return self._accounts.setdefault(key, StepAccount(self.launch, *key))

    def accounts(self) -> list[dict[str, Any]]:
        return [asdict(account) for account in self._accounts.values()]

    def close(self) -> None:
        self._states.clear()
        self._steps.clear()
        self._functions.clear()
        self.weights = ()
