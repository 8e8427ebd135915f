"""What callers ask for and get back; every check that needs no device is made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cache import MAX_STOP_IDS
from .config import ModelConfig
from .errors import CacheOverflowError, ConfigError, DecoderError
from .settings import GREEDY, Sampling
from .text import StreamText, Tokenizer, cut_at_stop


@dataclass(frozen=True)
class Completion:
    """One finished row. ``token_ids`` ends with the stop id, if one was met; ``text`` does not hold it.

    ``finish_reason`` is "stop", "length" or "error" (then ``error`` says why). ``logprobs`` has one
    float for each token id: its log-probability under the raw logits. ``text`` is None without a
    tokenizer.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]
    prompt_token_ids: list[int]
    error: str | None = None


@dataclass
class Request:
    """One prompt on its way: checked settings, and what has been generated so far."""

    index: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    row_id: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stream: StreamText | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def history(self) -> list[int]:
        """Prompt and new tokens: all that a row is rebuilt from."""
        return self.prompt + self.tokens

    def row_settings(self, running: int) -> dict[str, Any]:
        """Leaf values of the state's row, history already prefilled up to its last token."""
        s, history = self.sampling, self.history
        return {
            "status": running,
            "tokens": history[-1],
            "positions": len(history) - 1,
            "limits": len(self.prompt) - 1 + self.max_new_tokens,
            "stop_ids": list(self.stop_ids),
            "filters": [s.temperature, s.top_p, s.min_p],
            "draws": [s.top_k, as_int32(s.seed), as_int32(self.row_id)],
        }

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[str, bool]:
        """Append new tokens; return their text and whether a stop string ended the row."""
        text = ""
        for token, logprob in zip(tokens, logprobs):
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            if self.stream is not None and token not in self.stop_ids:
                text += self.stream.push(int(token))
                if self.stream.stopped:
                    return text, True
        return text, False

    def complete(self, reason: str, tokenizer: Tokenizer, error: str | None = None) -> Completion:
        text = None
        if tokenizer.present:
            ends_in_stop_id = bool(self.tokens) and self.tokens[-1] in self.stop_ids
            text = cut_at_stop(tokenizer.decode(self.tokens[:-1] if ends_in_stop_id else self.tokens), self.stop)
        return Completion(text, self.tokens, reason, self.logprobs, self.prompt, error)


def as_int32(value: int) -> int:
    """The int32 with the same 32 bits as an unsigned value."""
    return value - 2**32 if value >= 2**31 else value


def integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """A Python int from an int, numpy integer or array of one; ConfigError naming ``name`` else."""
    try:
        array = np.asarray(value)
        number = int(array.reshape(())) if array.dtype.kind in "iu" and array.size == 1 else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = None
    if number is None or number < low or (high is not None and number > high):
        limit = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}, expected {limit}")
    return number


def check_ids(ids: Iterable[Any], vocab_size: int, what: str) -> list[int]:
    """Token ids as Python ints; DecoderError naming position, id and vocabulary size."""
    checked = []
    for position, value in enumerate(ids):
        kind = getattr(getattr(value, "dtype", None), "kind", None)
        whole = (isinstance(value, int) and not isinstance(value, bool)) or kind in ("i", "u")
        if not whole or not 0 <= int(value) < vocab_size:
            raise DecoderError(f"{what}: id {value!r} at position {position}, expected an integer from 0 to {vocab_size - 1} (vocabulary size {vocab_size})")
        checked.append(int(value))
    if not checked:
        raise DecoderError(f"{what} is empty, expected at least one token")
    return checked


def _is_ids(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and not isinstance(value[0], (str, dict, list, tuple)) and getattr(value[0], "ndim", 0) == 0
    return getattr(value, "ndim", None) == 1


def as_id_rows(token_ids: Any, vocab_size: int) -> list[list[int]]:
    """One row or several, as lists, arrays or tensors, to checked lists of ids."""
    rows = [token_ids] if _is_ids(token_ids) or len(token_ids) == 0 else list(token_ids)
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    return [check_ids(row, vocab_size, f"row {i}") for i, row in enumerate(rows)]


def encode_prompts(prompts: Any, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Text, chat messages or ids, one or a list of them, to token ids. Raises DecoderError."""
    single = isinstance(prompts, str) or _is_ids(prompts) or (isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], dict))
    rows = []
    for index, prompt in enumerate([prompts] if single else prompts):
        if isinstance(prompt, str):
            ids: Iterable[Any] = tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            ids = tokenizer.encode_chat(prompt)
        elif isinstance(prompt, (list, tuple)) or hasattr(prompt, "tolist"):
            ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        else:
            raise DecoderError(f"prompt {index} is a {type(prompt).__name__}, expected text, chat messages or token ids")
        rows.append(check_ids(ids, vocab_size, f"prompt {index}"))
    return rows


def check_room(prompt_tokens: int, max_new_tokens: int, max_seq_len: int, what: str) -> None:
    """The newest token needs no cache slot: prompt + new - 1 slots must be there."""
    if prompt_tokens + max_new_tokens - 1 > max_seq_len:
        raise CacheOverflowError(
            f"{what} has {prompt_tokens} tokens and {max_new_tokens} new ones are asked for, but the cache holds {max_seq_len} "
            f"(at most {max(max_seq_len + 1 - prompt_tokens, 0)} new): shorten the prompt, lower max_new_tokens or raise max_seq_len"
        )


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} entries, expected one for each of the {count} prompts")
    return values


def make_requests(
    prompts: list[list[int]],
    config: ModelConfig,
    max_seq_len: int,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: Any,
    sampling: Any = None,
    stop: Any = None,
    stop_token_ids: Any = None,
    row_ids: Any = None,
) -> list[Request]:
    """Check all settings before anything runs. ``sampling`` may be one for all or a list."""
    new_tokens = integer(max_new_tokens, "max_new_tokens", 1)
    settings = _one_each(sampling if sampling is not None else GREEDY, len(prompts), "sampling")
    for value in settings:
        if not isinstance(value, Sampling):
            raise ConfigError(f"sampling is {value!r}, expected a Sampling or a list of them")
    ids = range(len(prompts)) if row_ids is None else _one_each(row_ids, len(prompts), "row_ids")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(s, str) or not s for s in stops):
        raise ConfigError(f"stop is {stop!r}, expected non-empty strings")
    extra = [] if stop_token_ids is None else check_stop_ids(stop_token_ids, config.vocab_size)
    stop_ids = tuple(dict.fromkeys([*config.eos_token_ids, *extra]))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ConfigError(f"stop_token_ids: {len(stop_ids)} stop ids in all, at most {MAX_STOP_IDS} are supported")
    requests = []
    for index, prompt in enumerate(prompts):
        check_room(len(prompt), new_tokens, max_seq_len, f"prompt {index}")
        stream = StreamText(tokenizer.decode, stops) if stops else None
        row_id = integer(ids[index], "row_ids", 0, 2**32 - 1)
        requests.append(Request(index, prompt, new_tokens, settings[index], row_id, stops, stop_ids, stream))
    return requests


def check_stop_ids(value: Any, vocab_size: int) -> list[int]:
    """Stop ids from one id or a list; an empty list is allowed."""
    ids = [value] if np.ndim(value) == 0 else list(value)
    return check_ids(ids, vocab_size, "stop_token_ids") if ids else []
