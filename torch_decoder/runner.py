"""Launch modes: how a step reaches the device, in which bucket, and an account of it.

``eager`` calls the step. ``cuda_graph`` replays a recording of it, one launch a step.
``device_loop`` replays it on the device until rows end, one launch for many steps. Graphs hold
addresses, so they run on one state at fixed addresses; a bucket is its first rows.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .buckets import bucket_for
from .cache import MemoryMap
from .decode import DecodeState, admit, copy_into, count_down, decode_step, first_rows, leaves, make_state, prefill_chunk, release, settings_words
from .errors import CaptureError, ConfigError, DeviceError
from .feed import Feed
from .graphs import Backend, CudaBackend, Recorded, record, recoverable
from .model import Model

log = logging.getLogger(__name__)

LAUNCHES = ("auto", "eager", "cuda_graph", "device_loop")
PREFILL_CHUNK = 512  # tokens a forward pass; bounds the memory of scores and activations


class GraphKey(NamedTuple):
    """All that a graph depends on, besides the addresses that it was recorded with."""

    bucket: int
    kind: str
    loop: bool
    dtype: torch.dtype
    kernels: str
    max_seq_len: int


@dataclass
class StepAccount:
    """What one executable (bucket, sampling kind, loop or single step) did so far."""

    launch: str
    bucket: int
    kind: str
    kernels: str  # those of this bucket: fused ones take few rows
    steps: int = 0
    padded_rows: int = 0  # idle or finished rows that steps computed all the same, summed
    replays: int = 0
    captures: int = 0
    nodes: int | None = None
    warm_up_s: float | None = None
    capture_s: float | None = None
    instantiate_s: float | None = None
    warm_up_bytes: int | None = None
    graph_bytes: int | None = None


class StepFailed(Exception):
    """A step that did not run, and will run another way next time.

    ``done`` steps of those asked for ran before it. ``intact``: they left the state as it should be.
    """

    def __init__(self, reason: str, intact: bool):
        super().__init__(reason)
        self.intact, self.done = intact, 0


class Held:
    """A caller's state: in the runner's fixed memory while it is stepped, else in its own."""

    def __init__(self, state: DecodeState):
        self.state = state


def check_launch(launch: str, device: torch.device) -> str:
    """Resolve "auto"; ConfigError for a name that does not exist, DeviceError for a missing GPU."""
    if launch not in LAUNCHES:
        raise ConfigError(f"launch is {launch!r}, expected one of {', '.join(LAUNCHES)}")
    if launch in ("cuda_graph", "device_loop") and device.type != "cuda":
        raise DeviceError(f"launch is {launch!r}, but the device is {device.type}: graphs need a CUDA device, use launch='eager'")
    return ("cuda_graph" if device.type == "cuda" else "eager") if launch == "auto" else launch


class StepRunner:
    """Owns the fixed state and the graphs, and runs steps.

    ``backend`` records and replays; without one it is the CUDA device's. ``strict`` raises
    CaptureError where a graph fails, in place of running that bucket without one.
    """

    def __init__(self, model: Model, launch: str, buckets: tuple[int, ...], dtype: torch.dtype, device: torch.device, backend: Backend | None = None, strict: bool = False):
        self.model, self.launch, self.buckets = model, launch, buckets
        self.dtype, self.device, self.strict = dtype, device, strict
        self.backend = CudaBackend(device) if backend is None and launch != "eager" else backend
        self.fallbacks: dict[GraphKey, str] = {}
        self._fixed: DecodeState | None = None
        self._views: dict[int, DecodeState] = {}
        self._resident: Callable[[], Held | None] = lambda: None
        self._graphs: dict[GraphKey, Recorded] = {}
        self._accounts: dict[GraphKey, StepAccount] = {}
        self._feed = Feed(device, PREFILL_CHUNK)
        self._control = torch.zeros(3, dtype=torch.int32, device=device)
        self._asked: tuple[StepAccount, int, int] | None = None  # of the loop whose steps are not counted yet

    # ---- states --------------------------------------------------------------------------------

    def bucket_for(self, rows: int) -> int:
        """The smallest bucket that holds ``rows``, or the largest there is."""
        return bucket_for(self.buckets, rows)

    def plan(self, bucket: int) -> MemoryMap:
        return MemoryMap.plan(self.model.config, bucket, self.model.max_seq_len, self.dtype)

    def _bucket_state(self, bucket: int) -> DecodeState:
        """The first rows of the fixed state."""
        if self._fixed is None:
            self._fixed = make_state(self.plan(self.buckets[-1]), self.device)
        if bucket not in self._views:
            self._views[bucket] = first_rows(self._fixed, bucket)
        return self._views[bucket]

    def state(self, bucket: int) -> DecodeState:
        """The fixed state of a bucket with every row idle; whoever had it keeps a copy."""
        self._evict()
        state = self._bucket_state(bucket)
        for row in range(bucket):
            release(state, row)
        self._uncheck()
        return state

    def new_state(self, bucket: int) -> DecodeState:
        """A state in memory of its own, all rows idle."""
        return make_state(self.plan(bucket), self.device)

    def hold(self, bucket: int) -> Held:
        """A state for a caller to keep, all rows idle."""
        if self.launch == "eager":
            return Held(self.new_state(bucket))
        held = Held(self.state(bucket))
        self._resident = weakref.ref(held)
        return held

    def copy(self, held: Held) -> Held:
        """The same state again, in memory of its own."""
        return Held(copy_into(self.new_state(held.state.tokens.shape[0]), held.state))

    def settle(self, held: Held) -> DecodeState:
        """The state where it can be stepped: graphs know the fixed memory only."""
        if self.launch != "eager" and self._resident() is not held:
            self._evict()
            held.state = copy_into(self._bucket_state(held.state.tokens.shape[0]), held.state)
            self._resident = weakref.ref(held)
        return held.state

    def _evict(self) -> None:
        """Give a caller whose state lies in the fixed memory a copy of it."""
        if (held := self._resident()) is not None:
            held.state = self.copy(held).state
        self._resident = lambda: None

    # ---- rows ----------------------------------------------------------------------------------

    def admit(self, state: DecodeState, row: int, tokens: Sequence[int], settings: dict[str, Any]) -> DecodeState:
        """Clear a row, prefill all of ``tokens`` but the last, and let the row run.

        The last token is the next step's input, so the first new token comes from the same
        step as all others.
        """
        with self._on_device():
            admit(state, row, self._feed.upload(settings_words(settings)))
            cache = state.cache.rows(row, 1)
            for start, chunk in self._feed.pieces(tokens[:-1]):
                prefill_chunk(self.model, cache, self._feed.upload(chunk)[None], start)
        return state

    def force(self, state: DecodeState, row: int, first: int, tokens: Sequence[int]) -> DecodeState:
        """Have the row take ``tokens`` at positions from ``first`` on instead of its own choice."""
        for start, piece in self._feed.pieces(tokens):
            state.forced[row, first + start : first + start + len(piece)].copy_(self._feed.upload(piece))
        return state

    def release(self, state: DecodeState, row: int) -> DecodeState:
        release(state, row)
        return state

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, state: DecodeState, kind: str, live_rows: int) -> DecodeState:
        """One decode step; ``live_rows`` is only counted. Raises StepFailed, CaptureError, DeviceError."""
        key = self._key(state, kind, loop=False)
        account = self._account(key)
        if self.launch == "eager" or key in self.fallbacks:
            with self._on_device():
                decode_step(self.model, state, kind)
        else:
            self._replay(key, state)
        account.steps += 1
        account.padded_rows += key.bucket - live_rows
        return state

    def _on_device(self) -> AbstractContextManager[None]:
        """Triton launches on the current device, wherever its arguments lie."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def advance(self, state: DecodeState, kind: str, live_rows: int, steps: int, until_a_row_ends: bool = False) -> DecodeState:
        """At most ``steps`` steps, as few launches as the mode can; all of them unless it can stop early.

        A loop on the device stops when no row runs, or with ``until_a_row_ends`` when one ends.
        """
        key = self._key(state, kind, loop=True)
        if self.launch != "device_loop" or steps == 1 or key in self.fallbacks:
            for done in range(steps):
                try:
                    self.step(state, kind, live_rows)
                except StepFailed as failure:
                    failure.done = done
                    raise
            return state
        self._control.copy_(self._feed.upload([steps, live_rows - 1 if until_a_row_ends else 0, 1]))
        self._replay(key, state)
        self._asked = (self._account(key), steps, key.bucket - live_rows)
        return state

    def read(self, state: DecodeState) -> dict[str, np.ndarray]:
        """Host copies of what decides how rows go on: waits for the device."""
        look = {name: getattr(state, name).cpu().numpy() for name in ("status", "positions", "ring", "logprobs")}
        if self._asked is not None:
            (account, steps, padded), self._asked = self._asked, None
            done = steps - int(self._control[0])
            account.steps += done
            account.padded_rows += done * padded
        return look

    # ---- graphs --------------------------------------------------------------------------------

    def prepare(self, kinds: Sequence[str], progress: Callable[[str], None] = log.info) -> None:
        """Record every graph now, the largest bucket first: its pool then holds the smaller ones'."""
        if self.launch == "eager":
            return
        wanted = [(bucket, kind, loop) for bucket in reversed(self.buckets) for kind in kinds for loop in self._loops()]
        for done, (bucket, kind, loop) in enumerate(wanted):
            progress(f"recording graph {done + 1} of {len(wanted)}: bucket {bucket}, {kind}{', loop' if loop else ''}")
            state = self.state(bucket)
            key = self._key(state, kind, loop)
            try:
                self._recorded(key, state)
            except recoverable() as error:
                self._give_up(key, error, intact=True, quietly=True)

    def _loops(self) -> tuple[bool, ...]:
        return (False, True) if self.launch == "device_loop" else (False,)

    def _key(self, state: DecodeState, kind: str, loop: bool) -> GraphKey:
        return GraphKey(state.tokens.shape[0], kind, loop, self.dtype, self.model.kernels, self.model.max_seq_len)

    def _recorded(self, key: GraphKey, state: DecodeState) -> Recorded:
        if key not in self._graphs:
            step = partial(_looped_step, self.model, state, key.kind, self._control) if key.loop else partial(decode_step, self.model, state, key.kind)
            recorded = record(step, self.backend, self._addresses, partial(_kept, state, self._control), self._control[2] if key.loop else None)
            self._graphs[key] = recorded
            account = self._account(key)
            account.captures += 1
            account.nodes, account.warm_up_bytes, account.graph_bytes = recorded.graph.nodes, recorded.warm_up_bytes, recorded.graph_bytes
            account.warm_up_s, account.capture_s, account.instantiate_s = recorded.warm_up_s, recorded.capture_s, recorded.instantiate_s
        return self._graphs[key]

    def _replay(self, key: GraphKey, state: DecodeState) -> None:
        moved = False
        try:
            recorded = self._recorded(key, state)
            if not recorded.checked:
                moved = state is not self._views.get(key.bucket) or recorded.addresses != self._addresses()
                if moved:
                    raise CaptureError("a buffer moved since the graph was recorded: it would read and write old memory")
                recorded.checked = True
            recorded.graph.replay()
            self._account(key).replays += 1
        except recoverable() as error:
            self._give_up(key, error, intact=not moved)

    def _give_up(self, key: GraphKey, error: BaseException, intact: bool, quietly: bool = False) -> None:
        """Release the graph, say why once, and serve its bucket without it from now on.

        Raises StepFailed unless ``quietly``; CaptureError when strict; DeviceError when the
        device itself is lost.
        """
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not self.backend.alive():
            raise DeviceError(f"the CUDA context is lost ({reason}): end this process and start a new one") from error
        self._release_graphs([k for k in self._graphs if k == key or not intact])
        if not intact:
            self._fixed, self._views = None, {}
        self.backend.return_memory()
        if self.strict:
            raise CaptureError(f"bucket {key.bucket}, {key.kind}: {reason}") from error
        instead = "cuda_graph" if key.loop else "eager"
        self.fallbacks[key] = reason
        log.warning("%s, bucket %d, %s: %s; this bucket runs %s from now on", "device_loop" if key.loop else "cuda_graph", key.bucket, key.kind, reason, instead)
        if not quietly:
            raise StepFailed(reason, intact) from error

    def release_graphs(self) -> None:
        """Give every graph and its memory back; the next step of each kind records its own anew."""
        if self.backend is None:
            return
        if not self.backend.alive():  # waits, too: a graph that runs must not lose its memory
            raise DeviceError("the CUDA context is lost: end this process and start a new one")
        self._release_graphs(list(self._graphs))
        self.backend.return_memory()

    def _release_graphs(self, keys: Sequence[GraphKey]) -> None:
        for key in keys:
            self._graphs.pop(key).graph.close()

    def _addresses(self) -> tuple[int, ...]:
        """Where everything lies that a graph reads or writes."""
        model = (*self.model.parameters(), *self.model.buffers())
        return tuple(x.data_ptr() for x in (*leaves(self._fixed), self._control, *model))

    def _uncheck(self) -> None:
        """Someone may have moved something: check addresses at the next replay."""
        for recorded in self._graphs.values():
            recorded.checked = False

    # ---- accounts ------------------------------------------------------------------------------

    def _account(self, key: GraphKey) -> StepAccount:
        launch = self.launch if key.loop or self.launch != "device_loop" else "cuda_graph"
        kernels = "plain" if key.kernels == "fused" and not self.model.fused(key.bucket) else key.kernels
        return self._accounts.setdefault(key, StepAccount(launch, key.bucket, key.kind, kernels))

    def accounts(self) -> list[dict[str, Any]]:
        return [asdict(account) for account in self._accounts.values()]

    def fallback_reports(self) -> list[dict[str, Any]]:
        return [{"bucket": k.bucket, "kind": k.kind, "launch": "device_loop" if k.loop else "cuda_graph", "reason": r} for k, r in self.fallbacks.items()]

    def close(self) -> None:
        """Release every graph and state."""
        self._release_graphs(list(self._graphs))
        self.abandon()

    def abandon(self) -> None:
        """Forget everything without touching the device, which may be lost."""
        self._graphs.clear()
        self._fixed, self._views, self._resident = None, {}, lambda: None
        self.model = None


def _looped_step(model: Model, state: DecodeState, kind: str, control: torch.Tensor) -> None:
    decode_step(model, state, kind)
    count_down(state, control)


@contextmanager
def _kept(state: DecodeState, control: torch.Tensor) -> Iterator[None]:
    """Put the state back afterwards, to the bit: warm-up runs it several steps on.

    Rows stand still meanwhile, so each writes one slot of the cache; the other leaves are small.
    """
    rows = torch.arange(state.tokens.shape[0], device=state.tokens.device)
    slots = state.positions.long()
    small = [(leaf, leaf.clone()) for leaf in (*state[1:], control)]
    written = [cache[rows, :, slots].clone() for cache in (*state.cache.k, *state.cache.v)]
    state.status.zero_()
    try:
        yield
    finally:
        for leaf, value in small:
            leaf.copy_(value)
        for cache, value in zip((*state.cache.k, *state.cache.v), written):
            cache[rows, :, slots] = value
