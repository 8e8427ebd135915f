"""Between text and token ids: the checkpoint's tokenizer, whole characters, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import CheckpointError, DecoderError

_REPLACEMENT = "\ufffd"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """The tokenizer of a model directory (transformers' AutoTokenizer), loaded on first use."""

    def __init__(self, directory: Path | None):
        self.directory = directory
        self._loaded: Any = None

    @property
    def present(self) -> bool:
        return self.directory is not None and any((self.directory / name).is_file() for name in _TOKENIZER_FILES)

    def _get(self) -> Any:
        if self._loaded is None:
            if not self.present:
                raise CheckpointError(f"{self.directory or 'weights without a directory'}: no tokenizer.json found, needed for text: pass token ids, or add the file")
            # Slow to import, and not needed by those who pass ids.
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
            except Exception as error:  # transformers raises many kinds here
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CheckpointError(f"{self.directory}: the tokenizer files cannot be read ({reason}): fetch them again") from error
        return self._loaded

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer adds by itself."""
        return list(self._get()(text)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, in the checkpoint's own chat template."""
        tokenizer = self._get()
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError(f"{self.directory}: the tokenizer has no chat template: pass text or token ids")
        try:
            return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))
        except Exception as error:  # jinja2 and transformers raise many kinds here
            raise DecoderError(f"the chat template refused the messages ({error}): expected a list of {{'role': ..., 'content': ...}}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._get().decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StreamText:
    """Turns tokens into text as they come: whole characters only, nothing past a stop string.

    A window of recent tokens is decoded, never one token alone: byte-level tokens split
    characters, and other tokenizers drop a leading space at the start of what they decode.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._start = self._shown = 0  # the window, and the tokens whose text has been taken
        self._pending = ""  # whole characters that may be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is now certain; empty while a character or a stop string may be unfinished."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._shown])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """What was held back for a stop string that did not come. Half a character stays out."""
        piece, self._pending = self._pending, ""
        return piece

    def _release(self, text: str) -> str:
        text = self._pending + text
        cuts = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if cuts:
            self.stopped, self._pending = True, ""
            return text[: min(cuts)]
        held = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Text before the first stop string."""
    cuts = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(cuts)] if cuts else text
