"""What XLA made of a compiled step: its command buffers, and what is launched outside of them.

Command buffers are made after all passes over the HLO, so no HLO text shows them; the list of
thunks that XLA dumps does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DUMP = "xla_dump_to"  # the compiler option that names the folder
# The second is what there is when no pass changed the list, as without command buffers.
_FILES = ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")
_THUNK = re.compile(r"( *)\d+: k(\w+)")


@dataclass(frozen=True)
class Thunks:
    """``buffers``: the kinds of the commands in each command buffer; ``outside``: of what is not in one."""

    buffers: tuple[tuple[str, ...], ...]
    outside: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """Commands in all buffers together."""
        return sum(map(len, self.buffers))


def parse(text: str) -> Thunks:
    """Read a dumped list of thunks; what is indented lies within the thunk above it."""
    buffers: list[list[str]] = []
    outside: list[str] = []
    within = False
    for indent, kind in (found.groups() for found in map(_THUNK.match, text.splitlines()) if found):
        if not indent:
            within = kind == "CommandBuffer"
            if within:
                buffers.append([])
            else:
                outside.append(kind)
        elif within:
            buffers[-1].append(kind)
    return Thunks(tuple(map(tuple, buffers)), tuple(outside))


def from_dump(folder: str | Path) -> Thunks | None:
    """The thunks of the largest program dumped there; None if there is none, as after a cached compilation."""
    for pattern in _FILES:
        if texts := [path.read_text() for path in Path(folder).glob(pattern)]:
            return parse(max(texts, key=len))
    return None
