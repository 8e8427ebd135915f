"""XLA flags: which ones this project uses, what they do, and which the installed version knows.

XLA ends the whole process, without a Python exception, when XLA_FLAGS holds a name that it does
not know, and names come and go between releases. So names are tried in a child process first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import lru_cache

import numpy as np

from .errors import ConfigError

COMMAND_TYPES = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "CONDITIONAL")
_TYPES, _SMALLEST = "xla_gpu_enable_command_buffer", "xla_gpu_graph_min_graph_size"
EARLY = ("xla_gpu_enable_pdl", "xla_gpu_enable_pdl_launch")  # some versions have the first one only
TEMPORARIES = "xla_gpu_temp_buffer_use_separate_color"

# Every flag that this project sets or documents, and what it does.
FLAGS = {
    _TYPES: "kinds of operation that are recorded into CUDA graphs; an empty list switches command buffers off. +WHILE and +COLLECTIVES, both off by default, are accepted in XLA_FLAGS only",
    _SMALLEST: "fewest operations that become a graph; smaller runs are launched one by one",
    "xla_gpu_command_buffer_update_mode": "when nodes are patched with new addresses; its values differ between versions, so this project leaves it alone and needs no patching",
    "xla_gpu_command_buffer_scheduling_mode": "order of the nodes: SERIALIZE, CONCURRENT or LHS",
    "xla_gpu_command_buffer_unroll_loops": "record a loop of known length as its unrolled steps",
    "xla_gpu_graph_enable_concurrent_region": "let independent nodes of a graph run side by side",
    TEMPORARIES: "keep temporaries apart from a program's arrays, so that these do not take their place and no node needs a new address; read when JAX starts, so in XLA_FLAGS only",
    **dict.fromkeys(EARLY, "kernels start while the one before them ends, and wait for it inside (programmatic dependent launch, Hopper and newer)"),
    "xla_gpu_autotune_level": "0 pins library kernels, so that compared executables use the same ones",
    "xla_disable_hlo_passes": "passes to leave out; slice-sinker may move a conversion in front of the slices of a stacked weight, which would then be converted as a whole at every step",
    "xla_enable_command_buffers_during_profiling": "keeps graphs on while a profiler runs; off, a profile shows another program than the one that is used",
}


Options = dict[str, str | bool]


def step_options(graph: bool, platform: str, early: bool = False) -> Options:
    """Compiler options of a step with command buffers on or off; from one lowering, in one process.

    ``early``: kernels start while the one before them ends, where the installed version can.
    """
    if platform != "gpu":
        return dict(_user_options)
    common: Options = {"xla_disable_hlo_passes": "slice-sinker"}
    if early:
        common |= {name: True for name in EARLY if accepts(name)}
    if not graph:
        return {**common, **_user_options, _TYPES: ""}
    if _TYPES in os.environ.get("XLA_FLAGS", ""):  # the user's choice of types is not ours to override
        return {**common, **_user_options}
    # A single operation is worth a graph here: what stays outside is launched at every step.
    graphs: Options = {_TYPES: ",".join(COMMAND_TYPES), _SMALLEST: "1", "xla_enable_command_buffers_during_profiling": True}
    return {**common, **graphs, **_user_options}


def as_environment(options: Options, process: bool = False) -> str:
    """The same options as the text of XLA_FLAGS; ``process`` adds what has no effect elsewhere: loops are recorded, temporaries kept apart."""
    words = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    return " ".join(words + [f"--{_TYPES}=+WHILE", f"--{TEMPORARIES}=true"] * process)


_user_options: Options = {}


@lru_cache
def accepts(name: str, value: str | bool = True) -> bool:
    """Does the installed version compile with that option?"""
    try:
        check({name: value})
    except ConfigError:
        return False
    return True


def check(options: Options) -> None:
    """Raise ConfigError naming an option or a value that the installed version refuses."""
    import jax

    lowered = jax.jit(lambda x: x + 1).lower(np.float32(1))
    for name, value in options.items():
        try:
            lowered.compile(compiler_options={name: value})
        except Exception as error:  # JAX raises several kinds
            raise ConfigError(f"XLA option {name}={value}: the installed jaxlib {jax.lib.__version__} refuses it ({str(error).splitlines()[0]}): see known()") from error


def set_options(options: Options) -> None:
    """Compiler options of your own for every step compiled from now on in this process.

    Like XLA_FLAGS they hold for the whole process; unlike there, an unknown name does not end it.
    Raises ConfigError naming an option or a value that the installed version refuses.
    """
    check(options)
    _user_options.clear()
    _user_options.update(options)


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


_PROBE = """
import json, sys, jax
lowered = jax.jit(lambda x: x + 1).lower(1.0)
found = {}
for name in sys.argv[1:]:
    try:
        lowered.compile(compiler_options={name: "?"})
        found[name] = True
    except Exception as error:
        found[name] = "No such compile option" not in str(error)
print(json.dumps(found))
"""


@lru_cache
def known() -> dict[str, bool]:
    """For each flag of FLAGS, whether the installed version knows it; asked in a child process."""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    child = subprocess.run([sys.executable, "-c", _PROBE, *FLAGS], env=environment, capture_output=True, text=True)
    if child.returncode:
        raise ConfigError(f"asking the installed jaxlib for its flags failed: {child.stderr.strip().splitlines()[-1:]}")
    return json.loads(child.stdout)
