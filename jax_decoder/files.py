"""The safetensors files of a model directory, checked before any tensor is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .config import read_json
from .errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}  # bytes an element


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies; ``dtype`` as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def resolve_directory(path: str | Path) -> Path:
    """The directory as the shell would mean it; CheckpointError with the full path if absent."""
    directory = Path(path).expanduser().resolve()
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise CheckpointError(f"{directory}: found {found}, expected a model directory (config.json and *.safetensors)")
    return directory


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a model directory by name, from file headers alone.

    Raises CheckpointError, all problems together, for absent, damaged, duplicate or foreign files.
    """
    index_path = directory / _INDEX
    if index_path.exists() and not (directory / "model.safetensors").exists():
        index = _read_index(index_path)
        files = _files_of_index(index_path, index)
    else:
        index, files = None, _files_without_index(directory)
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for file in files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, tensor in header.items():
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    if index is not None and not problems:
        problems += [f"{_INDEX} says that {n} is in {f}, but it is not" for n, f in index.items() if n not in tensors or tensors[n].file.name != f]
    if problems:
        raise CheckpointError("\n".join([f"{directory}: {len(problems)} problems with the weight files", *problems]))
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map, expected tensor names and their files: fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{path}: {name} is said to be in {file!r}, expected a file name inside the model directory")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} is said to be in {file!r}; only safetensors files are read, pickle files can run code")
    return weight_map


def _files_of_index(index_path: Path, index: dict[str, str]) -> list[Path]:
    names = sorted(set(index.values()))
    missing = [name for name in names if not (index_path.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index_path}: names {', '.join(missing)}, which is not there: fetch the missing file into {index_path.parent}")
    return [index_path.parent / name for name in names]


def _files_without_index(directory: Path) -> list[Path]:
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in sorted(directory.iterdir()) if p.suffix in _PICKLES]
        hint = f"; {pickles[0]} is not read, since pickle files can run code: convert it to safetensors" if pickles else ""
        raise CheckpointError(f"{directory}: no weights found, looked for model.safetensors, {_INDEX} and *.safetensors{hint}")
    counted = [re.fullmatch(r".*-(\d+)-of-(\d+)\.safetensors", f.name) for f in files]
    totals = {int(m.group(2)) for m in counted if m}
    if totals and len(files) != max(totals):
        raise CheckpointError(f"{directory}: {len(files)} shards found, their names say {max(totals)}: fetch the missing ones")
    return files


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of one safetensors file; checks that every byte is there."""
    size = path.stat().st_size

    def damaged(cause: str) -> CheckpointError:
        return CheckpointError(f"{path}: {size} bytes, {cause}: fetch the file again")

    if size == 0:
        raise damaged("an empty file, the download or copy did not finish")
    with path.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise damaged("a Git LFS pointer and not the file itself (run `git lfs pull`)")
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            raise damaged("not a whole safetensors file (its header is longer than the file): probably cut off")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: StoredTensor(path, tuple(t["shape"]), t["dtype"]) for name, t in header.items()}
            ranges = {name: tuple(t["data_offsets"]) for name, t in header.items()}
            end = max((stop for _, stop in ranges.values()), default=0)
            contradictory = [name for name, tensor in tensors.items() if not _spans(tensor, *ranges[name])]
        except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise damaged(f"not a safetensors file (unreadable header: {error})") from None
    if 8 + length + end != size:
        raise damaged(f"expected {8 + length + end}: probably cut off")
    if contradictory:
        raise damaged(f"its header contradicts itself: shape, dtype and byte range of {', '.join(contradictory)} do not fit")
    return tensors


def _spans(tensor: StoredTensor, start: int, stop: int) -> bool:
    """Whether a byte range is as long as the tensor's shape and dtype say; other dtypes are refused later, by name."""
    if not all(isinstance(n, int) and n >= 0 for n in tensor.shape):
        return False
    return tensor.dtype not in _FLOATS or stop - start == math.prod(tensor.shape) * _FLOATS[tensor.dtype]


def check_against(expected: dict[str, tuple[int, ...]], found: dict[str, StoredTensor], ignored: set[str], source: Path) -> None:
    """Compare both ways and report all problems at once: absent, unknown, misshapen, not floating."""
    problems = list(_problems(expected, found, ignored))
    if problems:
        raise CheckpointError("\n".join([f"{source}: {len(problems)} problems", *problems]))


def _problems(expected: dict[str, tuple[int, ...]], found: dict[str, StoredTensor], ignored: set[str]) -> Iterator[str]:
    for name, shape in expected.items():
        if name in found:
            if found[name].shape != shape:
                yield f"{name}: shape {list(found[name].shape)}, config.json asks for {list(shape)}"
            if found[name].dtype not in _FLOATS:
                yield f"{name}: dtype {found[name].dtype}, expected one of {', '.join(_FLOATS)}: quantised weights are not supported"
        elif name == "lm_head.weight":
            yield "lm_head.weight: missing, and config.json has tie_word_embeddings false: fetch the file that holds it, or set tie_word_embeddings to true if the head is the embedding"
        else:
            yield f"{name}: missing, config.json asks for it with shape {list(shape)}"
    for name in found:
        if name not in expected and name not in ignored:
            yield f"{name}: in the file, but config.json describes no such tensor"
