"""The decoder that callers import: text in, text out; and the step-by-step interface beneath."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .budget import MemoryPlan, available_bytes, plan_memory
from .checkpoint import abstract_model, build_parameters, pack, read_tensors
from .config import ModelConfig
from .decode import FAILED, RUNNING, STATE_FIELDS, STOPPED, DecodeState
from .errors import CacheOverflowError, ConfigError, DecoderError, DeviceError
from .files import resolve_directory
from .model import Model, check_fused
from .options import Options, changed_options
from .programs import Programs
from .requests import Completion, Request, as_id_rows, check_room, encode_prompts, integer, make_requests
from .rope import rope_table
from .runner import LOOP_STEPS, StepFailed, StepRunner
from .settings import KINDS, Sampling
from .text import StreamText, Tokenizer

# Steps between two looks at the results. Rows that end in between stand still on the device, so a
# longer interval wastes their steps but never gives a token too many.
STEPS_PER_LOOK = {"cpu": 1, "gpu": 8}


class DecodeHandle:
    """A decode state in a caller's hands, valid until it is stepped; fork it to branch.

    ``logits`` float32 [B, V] of the newest step, ``tokens`` int32 [B] and ``positions`` int32 [B]
    (the newest tokens and the cache slots they will fill) are fields of the state.
    """

    def __init__(self, state: DecodeState, rows: int, kind: str, steps_left: int):
        self._state: DecodeState | None = state
        self.rows, self.kind, self.steps_left = rows, kind, steps_left

    def __getattr__(self, name: str) -> Any:
        if name not in STATE_FIELDS:
            raise AttributeError(name)
        value = getattr(self.peek(), name)
        return value if name == "cache" or value.shape[0] == self.rows else value[: self.rows]

    def peek(self) -> DecodeState:
        if self._state is None:
            raise DecoderError("cache already used: this state was given to decode_step, which returned its successor; use that one, or fork() before stepping")
        return self._state

    def give_up(self) -> DecodeState:
        state = self.peek()
        self._state = None
        return state


class Decoder:
    """A language model that decodes with JAX. Use ``from_pretrained``; close after use."""

    def __init__(self, runner: StepRunner, tokenizer: Tokenizer, options: Options | None = None, memory: MemoryPlan | None = None):
        self.config, self.max_seq_len, self.max_batch = runner.config, runner.max_seq_len, runner.buckets[-1]
        self._runner, self._tokenizer, self._options, self._memory = runner, tokenizer, options, memory
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        max_batch: int = 8,
        max_seq_len: int = 2048,
        launch: str = "auto",
        kernels: str = "auto",
        buckets: Sequence[int] | None = None,
        capture: str = "lazy",
        memory_budget: int | None = None,
        strict: bool = False,
        batch_invariant: bool = False,
        logits_hook: Any = None,
        eager: Sequence[str] = (),
        tensor_parallel: int = 1,
    ) -> Decoder:
        """Load a Hugging Face model directory, or an Orbax one that this project made.

        ``max_seq_len`` is the cache's length in tokens, ``max_batch`` the rows that run at once.
        ``capture`` "ahead" compiles and records every step now, "lazy" at its first use.
        ``memory_budget`` in bytes is what weights, cache and work space may take (default: what
        the GPU has free). ``strict`` raises CaptureError where a graph fails; otherwise its bucket
        runs without one. XLA options of your own: xla_flags.set_options. Raises ConfigError for
        settings, CheckpointError for files, DeviceError for the device.
        """
        options = Options(
            dtype,
            device,
            max_batch,
            max_seq_len,
            launch,
            kernels,
            buckets,
            capture,
            memory_budget,
            strict,
            batch_invariant,
            logits_hook,
            tuple(eager),
            tensor_parallel,
        )
        directory = resolve_directory(path)
        config = ModelConfig.from_directory(directory)
        return cls._build(config, read_tensors(directory, config), Tokenizer(directory), options)

    @classmethod
    def from_tensors(cls, config: ModelConfig, tensors: Iterable[tuple[str, jax.Array]], *, tokenizer: Tokenizer | None = None, **options: Any) -> Decoder:
        """A decoder of weights that come from elsewhere: (Hugging Face name, array) in any order.

        ``options`` as in ``from_pretrained``. Without a tokenizer prompts are token ids.
        """
        return cls._build(config, iter(tensors), tokenizer or Tokenizer(None), Options(**options))

    def with_options(self, **changes: Any) -> Decoder:
        """Another decoder of the same weights, with other options; nothing is loaded or copied.

        ``changes`` as in ``from_pretrained``, except dtype and device, which the weights fix
        (ConfigError). ``load_weights`` changes the decoder it is called on alone; each is closed
        by itself.
        """
        if self._options is None:
            raise DecoderError("this decoder was put together by hand: with_options needs one of from_pretrained or from_tensors")
        with self._exclusive():
            options, parameters = changed_options(self._options, changes), self._runner.programs.parameters()
            memory = self._plan(self.config, options, held=sum(array.nbytes for array in parameters.values()))
            model = abstract_model(self.config, options.max_seq_len, options.packing, options.jax_dtype, options.kernels)
            compiled_by = self._runner.programs
            if options.max_seq_len != self.max_seq_len:  # which is part of the model that prefill was compiled for
                compiled_by = None
                parameters["rope"] = jax.device_put(rope_table(self.config, options.max_seq_len), options.place)
            return self._start(model, parameters, self._tokenizer, options, memory, compiled_by)

    @classmethod
    def _build(cls, config: ModelConfig, tensors: Iterator[tuple[str, Any]], tokenizer: Tokenizer, options: Options) -> Decoder:
        memory = cls._plan(config, options)
        place = jax.sharding.SingleDeviceSharding(options.place)
        model, parameters = build_parameters(config, tensors, options.jax_dtype, place, options.max_seq_len, options.packing, options.kernels)
        return cls._start(model, parameters, tokenizer, options, memory)

    @staticmethod
    def _plan(config: ModelConfig, options: Options, held: int = 0) -> MemoryPlan:
        """``held``: bytes of weights that are on the device already. Raises ConfigError."""
        if options.kernels == "fused":
            check_fused(config)
        limit, free = options.memory_budget, available_bytes(options.place)
        if limit is None and free is not None:
            limit = free + held
        return plan_memory(config, options.buckets, options.max_seq_len, options.jax_dtype, options.packing, limit)

    @classmethod
    def _start(cls, model: Model, parameters: Mapping[str, jax.Array], tokenizer: Tokenizer, options: Options, memory: MemoryPlan, compiled_by: Programs | None = None) -> Decoder:
        runner = StepRunner(model, parameters, options.launch, options.buckets, options.jax_dtype, options.place, strict=options.strict, compiled_by=compiled_by)
        decoder = cls(runner, tokenizer, options, memory)
        if options.capture == "ahead":
            decoder.capture()
        return decoder

    def compile(self, kinds: Sequence[str] = KINDS) -> None:
        """Compile the steps of every bucket now, several at a time; they are recorded when they run. Raises CaptureError if ``strict``."""
        with self._exclusive():
            self._runner.compile(kinds)

    def capture(self, kinds: Sequence[str] = KINDS) -> None:
        """Compile and record the steps of every bucket now. Raises CaptureError if ``strict``."""
        with self._exclusive():
            self._runner.prepare(kinds)

    # ---- text ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        row_ids: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Complete any number of prompts: text, chat messages or token ids, one or a list.

        Rows are refilled as they finish. Greedy unless ``sampling`` says otherwise. Raises before
        any work: DecoderError for ids, CacheOverflowError for lengths, ConfigError for settings.
        """
        with self._exclusive():
            requests = self._requests(prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, stop_token_ids=stop_token_ids, row_ids=row_ids)
            done: dict[int, Completion] = {}
            for request, _, completion in self._run(requests):
                if completion is not None:
                    done[request.index] = completion
            return [done[i] for i in range(len(requests))]

    def stream(self, prompt: Any, **settings: Any) -> Iterator[str]:
        """Yield the text of one prompt in pieces of whole characters; settings as in ``generate``.

        A character that the last token leaves unfinished is not yielded. Raises DecoderError if
        the row ends with an error.
        """
        settings.setdefault("max_new_tokens", 128)
        with self._exclusive():
            requests = self._requests(prompt, **settings)
            if len(requests) != 1:
                raise DecoderError(f"stream takes one prompt, got {len(requests)}: use generate for several")
            requests[0].stream = requests[0].stream or StreamText(self._tokenizer.decode)
            for request, piece, completion in self._run(requests, steps_per_look=1):
                if completion is not None:
                    if completion.error:
                        raise DecoderError(completion.error)
                    piece += "" if request.stream is None or request.stream.stopped else request.stream.finish()
                if piece:
                    yield piece

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of one prompt, as ``generate`` would see them."""
        return encode_prompts(prompt, self._tokenizer, self.config.vocab_size)[0]

    def _requests(self, prompts: Any, **settings: Any) -> list[Request]:
        rows = encode_prompts(prompts, self._tokenizer, self.config.vocab_size)
        return make_requests(rows, self.config, self.max_seq_len, self._tokenizer, **settings)

    def _run(self, requests: list[Request], steps_per_look: int | None = None) -> Iterator[tuple[Request, str, Completion | None]]:
        """Decode all requests; yield (request, new text, completion when finished) at every look."""
        if not requests:
            return
        interval = steps_per_look or self._interval(requests)
        kind = "sampled" if any(r.sampling.kind == "sampled" for r in requests) else "greedy"
        bucket = self._runner.bucket_for(len(requests))
        state, queue, rows = self._runner.take_state(bucket), deque(requests), {}
        while queue or rows:
            for row in range(bucket):
                if row not in rows and queue:
                    rows[row] = request = queue.popleft()
                    state = self._admit(state, row, request)
            try:
                state = self._runner.advance(state, kind, len(rows), interval)
            except StepFailed:
                # Whatever the step left behind, the host knows what each row had come to.
                state = self._runner.take_state(bucket)
                for row, request in rows.items():
                    state = self._admit(state, row, request)
                continue
            look = self._runner.read(state)
            for row, request in list(rows.items()):
                piece, completion = self._collect(request, row, look)
                if completion is not None:
                    del rows[row]
                    state = self._runner.release(state, row)
                yield request, piece, completion
        self._runner.keep_state(state)

    def _interval(self, requests: list[Request]) -> int:
        """Steps until the host looks."""
        interval = STEPS_PER_LOOK[self._runner.device.platform]
        looped = self._runner.launch == "device_loop" and all(r.stream is None for r in requests)
        return max(interval, LOOP_STEPS) if looped else interval

    def _admit(self, state: DecodeState, row: int, request: Request) -> DecodeState:
        return self._runner.admit(state, row, request.history, request.row_settings(RUNNING))

    def _collect(self, request: Request, row: int, look: dict[str, Any]) -> tuple[str, Completion | None]:
        """Take a row's new tokens from the host copies and say whether it has ended."""
        status, position = int(look["status"][row]), int(look["positions"][row])
        end = position + 1 + (status not in (RUNNING, FAILED))  # an ended row has one token past its position
        start = len(request.prompt) + len(request.tokens)
        piece, stopped = request.take(look["ring"][row, start:end].tolist(), look["logprobs"][row, start:end].tolist())
        if stopped:
            return piece, request.complete("stop", self._tokenizer)
        if status == RUNNING:
            return piece, None
        if status == FAILED:
            error = f"prompt {request.index}: the logits at position {position} are not finite (NaN or infinity): check the weights and the dtype"
            return piece, request.complete("error", self._tokenizer, error)
        return piece, request.complete("stop" if status == STOPPED else "length", self._tokenizer)

    # ---- steps ---------------------------------------------------------------------------------

    def prefill(
        self,
        token_ids: Any,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        forced: Sequence[Sequence[int]] | None = None,
        row_ids: Sequence[int] | None = None,
    ) -> DecodeHandle:
        """Start rows from token ids and choose each one's first new token.

        The handle's ``logits`` are those after the prompt's last token, ``tokens`` the choice.
        ``forced`` gives for each row the tokens to take instead of its choices. Stop ids play no
        part here. Raises DecoderError, CacheOverflowError, ConfigError.
        """
        with self._exclusive():
            prompts = as_id_rows(token_ids, self.config.vocab_size)
            if len(prompts) > self.max_batch:
                raise DecoderError(f"{len(prompts)} rows, the decoder holds max_batch {self.max_batch}: prefill fewer, or use generate")
            requests = make_requests(prompts, self.config, self.max_seq_len, self._tokenizer, max_new_tokens=1, sampling=sampling, row_ids=row_ids)
            steps_left = self.max_seq_len - max(map(len, prompts))
            state = self._runner.new_state(self._runner.bucket_for(len(prompts)))
            for row, request in enumerate(requests):
                settings = {**request.row_settings(RUNNING), "limits": self.max_seq_len, "stop_ids": []}
                state = self._runner.admit(state, row, request.prompt, settings)
                if forced is not None and len(forced[row]):
                    tokens = as_id_rows(forced[row], self.config.vocab_size)[0]
                    check_room(len(request.prompt), len(tokens), self.max_seq_len, f"row {row}")
                    state = self._runner.force(state, row, len(request.prompt), tokens)
            kind = "sampled" if any(r.sampling.kind == "sampled" for r in requests) else "greedy"
            return self._step(state, len(prompts), kind, steps_left + 1, 1)

    def decode_step(self, state: DecodeHandle) -> DecodeHandle:
        """Feed every row's newest token, choose the next; the state given is used up.

        Raises CacheOverflowError when a row's newest token has no cache slot left.
        """
        return self.decode_steps(state, 1)

    def decode_steps(self, state: DecodeHandle, count: int) -> DecodeHandle:
        """``count`` steps; with ``launch="device_loop"`` several a launch. Otherwise as ``decode_step``."""
        with self._exclusive():
            state.peek()
            if state.steps_left < integer(count, "count", 1):
                raise CacheOverflowError(
                    f"a row's cache is full after {state.steps_left} more steps, {count} asked for (it holds {self.max_seq_len} tokens): raise max_seq_len, or stop here"
                )
            return self._step(state.give_up(), state.rows, state.kind, state.steps_left, count)

    def _step(self, state: DecodeState, rows: int, kind: str, steps_left: int, count: int) -> DecodeHandle:
        left = count
        while left:
            try:
                state = self._runner.advance(state, kind, rows, left, exact=True)
                left = 0
            except StepFailed as failure:  # the next try runs without the graph that failed
                if failure.state is None:
                    raise DecoderError(f"this state is lost ({failure}): prefill again") from failure
                state, left = failure.state, left - failure.done
        return DecodeHandle(state, rows, kind, steps_left - count)

    def fork(self, state: DecodeHandle) -> DecodeHandle:
        """A copy in memory of its own: both can go on, each by itself."""
        with self._exclusive():
            source = state.peek()
            return DecodeHandle(self._runner.copy_state(source), state.rows, state.kind, state.steps_left)

    def score(self, token_ids: Any) -> jax.Array:
        """Teacher-forced logits, float32 [B, T, V], of rows of equal length, on the device."""
        with self._exclusive():
            rows = as_id_rows(token_ids, self.config.vocab_size)
            if len({len(row) for row in rows}) > 1:
                raise DecoderError(f"rows of {sorted({len(r) for r in rows})} tokens, expected equal lengths: score them one by one")
            check_room(len(rows[0]), 1, self.max_seq_len, "a row")
            return jnp.stack([self._runner.score(row) for row in rows])

    # ---- upkeep --------------------------------------------------------------------------------

    def load_weights(self, path: str | Path) -> None:
        """Replace the weights by those of a model directory with the same config.

        Executables take weights as arguments, so nothing is compiled again. After an error the old
        weights are still in use.
        """
        with self._exclusive():
            directory = resolve_directory(path)
            config = ModelConfig.from_directory(directory)
            differing = [n for n in ModelConfig.__dataclass_fields__ if getattr(config, n) != getattr(self.config, n) and n not in ("dtype", "eos_token_ids")]
            if differing:
                raise ConfigError(f"{directory}: {', '.join(differing)} differ from the loaded model's: make a new decoder for it")
            model = abstract_model(config, self.max_seq_len, self._runner.packing, self._runner.dtype)
            sharding = jax.sharding.SingleDeviceSharding(self._runner.device)
            self._runner.programs.set_weights(pack(read_tensors(directory, config), config, model, self._runner.dtype, sharding))

    def release_graphs(self) -> None:
        """Give the graphs and their memory back, weights and state stay; the next step is compiled anew."""
        with self._exclusive():
            self._runner.release_graphs()

    def launch_report(self) -> dict[str, Any]:
        """Launch mode, kernels, what each bucket and sampling kind did, and the memory map."""
        plan = self._runner.plan(self.max_batch)
        return {
            "launch": self._runner.launch,
            "kernels": self._runner.kernels,
            "packing": self._runner.packing,
            "buckets": list(self._runner.buckets),
            "graphs": self._runner.accounts(),
            "fallbacks": self._runner.fallback_reports(),
            "memory": None if self._memory is None else self._memory.as_dict(),
            "memory_map": [region.as_dict() for region in plan],
        }

    def close(self) -> None:
        """Release states and weights; any later call is an error."""
        self._closed = True
        self._runner.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            raise DecoderError("the decoder is closed: make a new one with from_pretrained")
        if not self._lock.acquire(blocking=False):
            raise DecoderError("another thread, or an unfinished stream, is using this decoder: one at a time; make a decoder for each thread")
        try:
            yield
        except DeviceError:  # nothing runs after this
            self._closed = True
            self._runner.abandon()
            raise
        finally:
            self._lock.release()
