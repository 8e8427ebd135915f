"""Orbax checkpoints that stand alone: weights, config and tokenizer in one directory.

``weights/`` holds the checkpoint tree (one array a tensor, Hugging Face names) as Orbax writes
it; beside it lie config.json, generation_config.json, the tokenizer's files and
``manifest.json`` with the size of every file, so that damage is found before Orbax meets it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from .config import read_json
from .errors import CheckpointError

_WEIGHTS, _MANIFEST = "weights", "manifest.json"
GROUP_BYTES = 32 * 1024**2  # restored in one call; bounds what is held beside the parameters


def is_orbax(directory: Path) -> bool:
    return (directory / _WEIGHTS).is_dir() and ((directory / _MANIFEST).exists() or (directory / _WEIGHTS / "manifest.ocdbt").exists())


def write(directory: Path, tree: Mapping[str, Any]) -> None:
    """Write the weights of a checkpoint tree and the manifest; ``directory`` must exist and be absolute."""
    import orbax.checkpoint as ocp  # slow to import, and not needed for safetensors

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / _WEIGHTS, dict(tree))
    files = sorted(p for p in (directory / _WEIGHTS).rglob("*") if p.is_file())
    sizes = {str(p.relative_to(directory)): p.stat().st_size for p in files}
    (directory / _MANIFEST).write_text(json.dumps({"format": "orbax", "files": sizes}, indent=1))


def check_files(directory: Path) -> None:
    """Compare the files with the manifest; CheckpointError names each that is absent or of another size."""
    sizes = read_json(directory / _MANIFEST).get("files")
    if not isinstance(sizes, dict) or not sizes:
        raise CheckpointError(f"{directory / _MANIFEST}: lists no files: convert the model again")
    problems = []
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.stat().st_size != size:
            problems.append(f"{path}: {path.stat().st_size} bytes, expected {size}: probably cut off")
    if problems:
        raise CheckpointError("\n".join([f"{directory}: {len(problems)} damaged files: convert or copy the model again", *problems]))


def read(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, jax.Array]]:
    """Yield (name, array on the first device), restored GROUP_BYTES at a time, never the whole tree.

    Restores to this process's own device whatever sharding the checkpoint was saved with.
    """
    import orbax.checkpoint as ocp

    check_files(directory)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        stored = _metadata(checkpointer, directory)
        _check_tree(directory, expected, stored)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for group in _groups(stored, list(expected)):
            target = {n: jax.ShapeDtypeStruct(tuple(stored[n].shape), stored[n].dtype, sharding=place) for n in group}
            restore_args = {n: ocp.ArrayRestoreArgs(sharding=place, dtype=stored[n].dtype) for n in group}
            try:
                tree = checkpointer.restore(directory / _WEIGHTS, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True))
            except Exception as error:  # orbax and tensorstore raise many kinds here
                raise CheckpointError(f"{directory / _WEIGHTS}: Orbax cannot read it ({str(error).splitlines()[0]}): convert the model again") from error
            for name in group:
                yield name, tree.pop(name)


def _groups(stored: Mapping[str, Any], names: list[str]) -> Iterator[list[str]]:
    """Names in order, cut into groups of at most GROUP_BYTES (one tensor at least)."""
    group: list[str] = []
    size = 0
    for name in names:
        nbytes = math.prod(stored[name].shape) * stored[name].dtype.itemsize
        if group and size + nbytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    if group:
        yield group


def _metadata(checkpointer: Any, directory: Path) -> dict[str, Any]:
    try:
        found = checkpointer.metadata(directory / _WEIGHTS)
        return dict(found.item_metadata.tree)
    except Exception as error:  # orbax and tensorstore raise many kinds here
        raise CheckpointError(f"{directory / _WEIGHTS}: Orbax cannot read its metadata ({str(error).splitlines()[0]}): convert the model again") from error


def _check_tree(directory: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any]) -> None:
    problems = [f"{n}: missing" for n in expected if n not in stored]
    problems += [f"{n}: not described by config.json" for n in stored if n not in expected]
    problems += [f"{n}: shape {list(stored[n].shape)}, config.json asks for {list(s)}" for n, s in expected.items() if n in stored and tuple(stored[n].shape) != s]
    if problems:
        raise CheckpointError("\n".join([f"{directory}: {len(problems)} problems", *problems]))
