"""Launch modes: how a step reaches the device, in which bucket, and an account of it.

``op_by_op`` calls the step's functions without compiling them. ``jit`` compiles the step with
command buffers off, ``command_buffer`` with them on: XLA then runs it as one CUDA graph.
``device_loop`` compiles several steps into one such graph.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import thunks, xla_flags
from .buckets import bucket_for
from .cache import Region, memory_map
from .decode import DecodeState, cut, make_state
from .driver import free_bytes
from .errors import CaptureError, ConfigError, DeviceError
from .kernels.tiles import FUSED_ROWS, starts_early
from .model import Model
from .programs import Programs

log = logging.getLogger(__name__)

LAUNCHES = ("auto", "op_by_op", "jit", "command_buffer", "device_loop")
GRAPH_LAUNCHES = ("command_buffer", "device_loop")
PREFILL_CHUNK = {"cpu": 32, "gpu": 512}  # tokens a forward pass; fixed, so that prefill compiles once
COMPILE_AT_ONCE = 4  # steps
LOOP_STEPS = 4  # of device_loop in one executable: enough that the host is never what limits
# XLA runs an executable without a graph first and records at the second run; from the third on it
# only replays. These runs are timed one by one.
FIRST_RUNS = 3
# What compiling or running may raise and a decoder survives: JaxRuntimeError is a RuntimeError.
RECOVERABLE = (RuntimeError, MemoryError, CaptureError)

# Turns a lowered function into an executable; tests and measurements pass their own.
Compile = Callable[[jax.stages.Lowered, dict[str, str]], Callable]


class GraphKey(NamedTuple):
    """All that an executable depends on."""

    bucket: int
    kind: str
    steps: int
    dtype: str
    packing: str
    kernels: str
    max_seq_len: int


@dataclass
class StepAccount:
    """What one executable (bucket, sampling kind, steps in it) did so far."""

    launch: str
    bucket: int
    kind: str
    kernels: str  # those of this bucket: fused ones take few rows
    compile_s: float = 0.0
    compilations: int = 0
    steps: int = 0
    padded_rows: int = 0  # idle or finished rows that steps computed all the same, summed
    replays: int = 0
    nodes: int | None = None
    capture_s: float | None = None  # first recording run, less a run that only replays
    graph_bytes: int | None = None
    first_runs_s: list[float] = field(default_factory=list)


class StepFailed(Exception):
    """A step that did not run, and will run another way next time.

    ``done`` steps of those asked for ran before it and led to ``state``, which is None if the
    failed step used it up.
    """

    def __init__(self, reason: str, state: DecodeState | None):
        super().__init__(reason)
        self.state, self.done = state, 0


def check_launch(launch: str, platform: str) -> str:
    """Resolve "auto"; ConfigError for a name that does not exist, DeviceError for a missing GPU."""
    if launch not in LAUNCHES:
        raise ConfigError(f"launch is {launch!r}, expected one of {', '.join(LAUNCHES)}")
    if launch in GRAPH_LAUNCHES and platform != "gpu":
        raise DeviceError(f"launch is {launch!r}, but the device is a {platform}: command buffers need a CUDA device, use launch='jit'")
    return ("command_buffer" if platform == "gpu" else "jit") if launch == "auto" else launch


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, str]) -> Callable:
    return lowered.compile(compiler_options=options)


class StepRunner:
    """Owns the states, one a bucket, and the executables, and runs steps.

    ``strict`` raises CaptureError where a graph fails, in place of running that bucket without one.
    """

    def __init__(
        self,
        model: Model,
        parameters: Mapping[str, jax.Array],
        launch: str,
        buckets: tuple[int, ...],
        dtype: jnp.dtype,
        device: jax.Device,
        compile: Compile = compile_lowered,
        strict: bool = False,
        compiled_by: Programs | None = None,
    ):
        self.config, self.max_seq_len, self.packing, self.kernels = model.config, model.max_seq_len, model.packing, model.kernels
        self.launch, self.buckets, self.dtype, self.device, self.strict = launch, buckets, dtype, device, strict
        chunk = min(PREFILL_CHUNK["gpu" if device.platform == "gpu" else "cpu"], model.max_seq_len)
        self.programs = Programs(model, parameters, chunk, compiled_by)
        self.fallbacks: dict[GraphKey, str] = {}
        self._compile = compile
        self._states: dict[int, DecodeState] = {}
        self._steps: dict[GraphKey, Callable] = {}
        self._accounts: dict[GraphKey, StepAccount] = {}

    # ---- states --------------------------------------------------------------------------------

    def bucket_for(self, rows: int) -> int:
        """The smallest bucket that holds ``rows``, or the largest there is."""
        return bucket_for(self.buckets, rows)

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
        self._states[state.batch] = state

    def copy_state(self, state: DecodeState) -> DecodeState:
        return jax.tree.map(jnp.copy, state)

    def admit(self, state: DecodeState, row: int, tokens: Sequence[int], settings: dict[str, Any]) -> DecodeState:
        """See Programs.admit."""
        return self.programs.admit(state, row, tokens, settings)

    def force(self, state: DecodeState, row: int, first: int, tokens: Sequence[int]) -> DecodeState:
        """See Programs.force."""
        return self.programs.force(state, row, first, tokens)

    def release(self, state: DecodeState, row: int) -> DecodeState:
        return self.programs.release(state, row)

    def score(self, row: Sequence[int]) -> jax.Array:
        """Teacher-forced float32 logits [T, V] of one row."""
        return self.programs.score(self.new_state(1).cache, row)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, state: DecodeState, kind: str, live_rows: int, steps: int = 1) -> DecodeState:
        """One execution; the state given is used up. ``live_rows`` is only counted.

        Raises StepFailed, CaptureError, DeviceError.
        """
        key = self._key(state, kind, steps)
        account = self._account(key)
        try:
            executable = self._executable(key, state)
            if self._records(key) and len(account.first_runs_s) < FIRST_RUNS:
                state = self._first_run(key, executable, state)
            else:
                state = executable(self.programs.weights, state)
        except RECOVERABLE as error:
            raise self._failure(key, error, state) from error
        account.replays += 1
        account.steps += steps
        account.padded_rows += (key.bucket - live_rows) * steps
        return state

    def advance(self, state: DecodeState, kind: str, live_rows: int, steps: int, exact: bool = False) -> DecodeState:
        """``steps`` steps in as few launches as the mode can, or a few more steps unless ``exact``.

        Rows that have ended stand still, so more steps than a row needs do it no harm.
        """
        done = 0
        while done < steps:
            size = self._steps_at_once(state, kind, steps - done, exact)
            try:
                state = self.step(state, kind, live_rows, size)
            except StepFailed as failure:
                failure.done = done
                raise
            done += size
        return state

    def _steps_at_once(self, state: DecodeState, kind: str, left: int, exact: bool) -> int:
        looped = self.launch == "device_loop" and left > 1 and (left >= LOOP_STEPS or not exact)
        return LOOP_STEPS if looped and self._key(state, kind, LOOP_STEPS) not in self.fallbacks else 1

    def read(self, state: DecodeState) -> dict[str, np.ndarray]:
        """Host copies of what decides how rows go on: waits for the device."""
        try:
            words = _host_copy(state.words)
        except RECOVERABLE as error:
            raise self._lost(error) from error
        return {name: cut(words, state.regions[name]) for name in ("status", "positions", "ring", "logprobs")}

    # ---- executables ---------------------------------------------------------------------------

    def prepare(self, kinds: Sequence[str], progress: Callable[[str], None] = log.info) -> None:
        """Compile and record every step now: a compilation evicts the graphs that exist already."""
        if not (wanted := self.compile(kinds, progress)):
            return
        states = {bucket: self.take_state(bucket) for bucket in self.buckets}
        for done, (bucket, kind, steps) in enumerate(wanted):
            progress(f"recording step {done + 1} of {len(wanted)}: {_words(bucket, kind, steps)}")
            states[bucket] = self._prepare(states[bucket], kind, steps, FIRST_RUNS)
        for state in states.values():
            self.keep_state(state)

    def compile(self, kinds: Sequence[str], progress: Callable[[str], None] = log.info) -> list[tuple[int, str, int]]:
        """Compile every step without running it, several at a time; bucket, kind and steps of each."""
        if self.launch == "op_by_op":
            return []
        sizes = (1, LOOP_STEPS) if self.launch == "device_loop" else (1,)
        wanted = [(bucket, kind, steps) for bucket in reversed(self.buckets) for kind in kinds for steps in sizes]
        states = {bucket: self.take_state(bucket) for bucket in self.buckets}

        def compile_one(number: int) -> None:
            bucket, kind, steps = wanted[number]
            progress(f"compiling step {number + 1} of {len(wanted)}: {_words(bucket, kind, steps)}")
            self._prepare(states[bucket], kind, steps, 0)

        # The first one alone: what XLA chooses for its library products is kept, and serves the others.
        compile_one(0)
        with ThreadPoolExecutor(COMPILE_AT_ONCE) as pool:
            list(pool.map(compile_one, range(1, len(wanted))))
        for state in states.values():
            self.keep_state(state)
        return wanted

    def _prepare(self, state: DecodeState, kind: str, steps: int, runs: int) -> DecodeState:
        bucket, key = state.batch, self._key(state, kind, steps)
        try:
            self._executable(key, state)
            for _ in range(runs):
                state = self.step(state, kind, bucket, steps)
        except StepFailed as failure:
            return self.new_state(bucket) if failure.state is None else failure.state
        except RECOVERABLE as error:
            self._fall_back(key, error)
        return state

    def _key(self, state: DecodeState, kind: str, steps: int = 1) -> GraphKey:
        return GraphKey(state.batch, kind, steps, self.dtype.name, self.packing, self.kernels, self.max_seq_len)

    def _records(self, key: GraphKey) -> bool:
        return self.launch in GRAPH_LAUNCHES and key not in self.fallbacks

    def _executable(self, key: GraphKey, state: DecodeState) -> Callable:
        if key not in self._steps:
            account, started = self._account(key), time.perf_counter()
            if self.launch == "op_by_op":
                self._steps[key] = self.programs.step(key.kind, key.steps)
            else:
                self._steps[key], account.nodes = self._compiled(key, state)
                account.compilations += 1
            account.compile_s += time.perf_counter() - started
        return self._steps[key]

    def _compiled(self, key: GraphKey, state: DecodeState) -> tuple[Callable, int | None]:
        """The executable, and how many commands its command buffers hold."""
        lowered = self.programs.lower_step(state, key.kind, key.steps)
        options = xla_flags.step_options(self._records(key), self.device.platform, self._starts_early(key))
        # A dump that the user asked for is theirs to read.
        if not self._records(key) or self.device.platform != "gpu" or thunks.DUMP in os.environ.get("XLA_FLAGS", ""):
            return self._compile(lowered, options), None
        with TemporaryDirectory() as folder:
            executable = self._compile(lowered, {thunks.DUMP: folder, **options})
            found = thunks.from_dump(folder)
        return executable, None if found is None else found.nodes

    def _starts_early(self, key: GraphKey) -> bool:
        return key.kernels == "fused" and key.bucket <= FUSED_ROWS and starts_early(self.config.hidden_size)

    def _first_run(self, key: GraphKey, executable: Callable, state: DecodeState) -> DecodeState:
        """A run that may record: timed, its memory counted, and its buffers watched."""
        state = jax.block_until_ready(state)  # what is still being written may not be donated
        account, before, free = self._account(key), _addresses(state), free_bytes(self.device)
        started = time.perf_counter()
        state = jax.block_until_ready(executable(self.programs.weights, state))
        account.first_runs_s.append(time.perf_counter() - started)
        left = free_bytes(self.device)
        if free is not None and left is not None:
            account.graph_bytes = max(account.graph_bytes or 0, free - left)
        if len(account.first_runs_s) == FIRST_RUNS:
            account.capture_s = max(0.0, account.first_runs_s[1] - account.first_runs_s[2])
        if moved := sum(old != new for old, new in zip(before, _addresses(state))):
            self._fall_back(key, CaptureError(f"{moved} buffers of the state moved in one step: the graph would have to be patched at every step"))
        return state

    def _failure(self, key: GraphKey, error: BaseException, state: DecodeState) -> Exception:
        """What to raise after a failed step; its bucket has another way to run from now on."""
        if not self._alive():
            return self._lost(error)
        if not self._records(key):
            return DeviceError(f"bucket {key.bucket}, {key.kind}: the step fails without command buffers too ({_first_line(error)})")
        self._fall_back(key, error)
        used_up = any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        return StepFailed(_first_line(error), None if used_up else state)

    def _fall_back(self, key: GraphKey, error: BaseException) -> None:
        """Drop the executable, say why once, and serve its bucket without command buffers.

        Raises CaptureError when strict.
        """
        self._steps.pop(key, None)
        if self.strict:
            raise CaptureError(f"bucket {key.bucket}, {key.kind}: {_first_line(error)}") from error
        self.fallbacks[key] = _first_line(error)
        log.warning("%s, bucket %d, %s: %s; this bucket runs as jit from now on", self.launch, key.bucket, key.kind, _first_line(error))

    def _lost(self, error: BaseException) -> DeviceError:
        return DeviceError(f"the device is lost ({_first_line(error)}): end this process and start a new one")

    def _alive(self) -> bool:
        try:
            jax.device_put(np.int32(0), self.device).block_until_ready()
        except RuntimeError:
            return False
        return True

    def release_graphs(self) -> None:
        """Drop every executable, and its graph with it; the next step of each kind is compiled anew."""
        self._steps.clear()
        for account in self._accounts.values():
            account.first_runs_s.clear()

    # ---- accounts ------------------------------------------------------------------------------

    def _account(self, key: GraphKey) -> StepAccount:
        launch = "command_buffer" if self.launch == "device_loop" and key.steps == 1 else self.launch
        kernels = "plain" if key.kernels == "fused" and key.bucket > FUSED_ROWS else key.kernels
        return self._accounts.setdefault(key, StepAccount(launch, key.bucket, key.kind, kernels))

    def accounts(self) -> list[dict[str, Any]]:
        return [asdict(account) for account in self._accounts.values()]

    def fallback_reports(self) -> list[dict[str, Any]]:
        return [{"bucket": k.bucket, "kind": k.kind, "launch": self._accounts[k].launch, "reason": r} for k, r in self.fallbacks.items()]

    def close(self) -> None:
        """Drop states, executables and weights."""
        self._states.clear()
        self._steps.clear()
        self.programs.weights = ()

    abandon = close  # nothing here touches the device


def _host_copy(leaf: jax.Array) -> np.ndarray:
    """A copy on the host; waits for the device.

    An array keeps the host view that is asked of it, and on a CPU that view is the buffer itself,
    which could then not be donated to the next step: another object is asked, and copied.
    """
    return np.array(leaf.addressable_data(0))


def _addresses(state: DecodeState) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


def _words(bucket: int, kind: str, steps: int) -> str:
    return f"bucket {bucket}, {kind}{f', {steps} steps' if steps > 1 else ''}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
