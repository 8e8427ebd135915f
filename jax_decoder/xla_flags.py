"""XLA flags: which ones this project uses, what they do, and which the installed version knows.

XLA ends the whole process, without a Python exception, when XLA_FLAGS holds a name that it does
not know, and names come and go between releases. So names are tried in a child process first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import lru_cache

from .errors import ConfigError

# Every flag that this project sets or documents: a value that is valid where the name is, and what it does.
FLAGS: dict[str, tuple[str, str]] = {
    "xla_gpu_enable_command_buffer": ("FUSION", "command types recorded into CUDA graphs; empty switches command buffers off"),
    "xla_gpu_graph_min_graph_size": ("5", "fewest commands that become a graph"),
    "xla_gpu_autotune_level": ("0", "0 pins library kernels, so that compared executables use the same ones"),
    "xla_enable_command_buffers_during_profiling": ("true", "keeps graphs on while a profiler runs"),
}


def names(flags: str) -> list[str]:
    """Flag names in the text of an XLA_FLAGS variable."""
    return [token.lstrip("-").partition("=")[0] for token in flags.split() if token.startswith("-")]


@lru_cache
def unknown(flags: str) -> tuple[str, ...]:
    """Which of the flags the installed XLA refuses; the process that asks is not at risk."""
    refused: list[str] = []
    rest = flags.split()
    while rest:
        environment = {**os.environ, "XLA_FLAGS": " ".join(rest), "JAX_PLATFORMS": "cpu"}
        child = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True, text=True)
        if child.returncode == 0:
            break
        found = re.findall(r"--?([A-Za-z0-9_]+)", "".join(re.findall(r"Unknown flags? in XLA_FLAGS:(.*)", child.stderr + child.stdout)))
        bad = [name for name in names(" ".join(rest)) if name in found]
        if not bad:  # refused for another reason: name what is left
            return tuple(refused + names(" ".join(rest)))
        refused += bad
        rest = [token for token in rest if token.lstrip("-").partition("=")[0] not in bad]
    return tuple(refused)


def check_environment() -> str:
    """The user's XLA_FLAGS, unchanged. ConfigError names a flag that would end this process."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and (refused := unknown(flags)):
        raise ConfigError(f"XLA_FLAGS holds {', '.join(refused)}, which the installed jaxlib does not accept: remove it from XLA_FLAGS")
    return flags


def known() -> dict[str, bool]:
    """For each flag of FLAGS, whether XLA_FLAGS may hold it here."""
    refused = unknown(" ".join(f"--{name}={value}" for name, (value, _) in FLAGS.items()))
    return {name: name not in refused for name in FLAGS}
