"""Convert checkpoints: GGUF, Hugging Face or Orbax to Hugging Face or Orbax, verified.

The result is built in a temporary folder beside the destination and renamed when it is complete
and was read back equal; an interrupted or failed conversion leaves an older result as it was.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jax_decoder import checkpoint as jax_checkpoint
from jax_decoder import orbax_io
from jax_decoder.config import ModelConfig, read_json
from jax_decoder.errors import CheckpointError, ConfigError
from jax_decoder.files import read_header

log = logging.getLogger(__name__)
FORMATS = ("hf", "orbax")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
SHARD_BYTES = 4 * 1024**3
# Files that belong to a model besides its weights.
_COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template*", "LICENSE*")


def convert(source: str | Path, destination: str | Path, to: str, dtype: str | None = None) -> dict[str, Any]:
    """Convert ``source`` (a GGUF file, a Hugging Face or an Orbax directory) into ``destination``.

    ``dtype`` None keeps each tensor's own. Returns {"tensors", "bytes", "casts"}; casts maps
    "float32 -> bfloat16" to the number of tensors. Raises CheckpointError or ConfigError.
    """
    source, destination = Path(source).expanduser().resolve(), Path(destination).expanduser().resolve()
    if to not in FORMATS:
        raise ConfigError(f"--to is {to!r}, expected one of {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not source.exists():
        raise CheckpointError(f"{source}: not found, expected a GGUF file or a model directory")
    if source == destination or source in destination.parents:
        raise ConfigError(f"{destination}: lies in the source {source}: choose another place")
    with replacing(destination) as folder:
        if source.is_file():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{destination.name}.gguf.") as opened:
                _open_gguf(source, Path(opened))
                report = _write(Path(opened), folder, to, dtype)
        else:
            report = _write(source, folder, to, dtype)
    return report


@contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """A new folder that takes the destination's place if all goes well, and vanishes if not."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists() and not (destination.is_dir() and (not any(destination.iterdir()) or (destination / "config.json").exists())):
        raise CheckpointError(f"{destination}: exists and is no model directory: choose another place or remove it")
    folder = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.new."))
    old = folder.with_name(folder.name.replace(".new.", ".old."))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp and safetensors write for the owner alone
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)
        if destination.exists():
            os.rename(destination, old)
        os.rename(folder, destination)
    except BaseException:
        if old.exists() and not destination.exists():
            os.rename(old, destination)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write(source: Path, folder: Path, to: str, dtype: str | None) -> dict[str, Any]:
    config = ModelConfig.from_directory(source)
    raw = read_json(source / "config.json")
    casts: dict[str, int] = {}
    tree = {}
    for name, tensor in jax_checkpoint.read_tensors(source, config):
        array = np.asarray(tensor)
        _check_finite(name, array)
        target = array.dtype if dtype is None else DTYPES[dtype]
        if target != array.dtype:
            label = f"{array.dtype.name} -> {target.name}"
            casts[label] = casts.get(label, 0) + 1
            with np.errstate(over="ignore"):  # an overflow becomes infinity, and that is found below
                array = array.astype(target)
            _check_finite(f"{name} as {target.name}", array)
        tree[name] = array
    for label, count in casts.items():
        log.info("cast %d tensors %s", count, label)
    if dtype is not None:
        raw = {k: v for k, v in raw.items() if k != "torch_dtype"} | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, folder / file.name)
    if to == "hf":
        _save_safetensors(folder, tree)
    else:
        orbax_io.write(folder, tree)
    _verify(folder, tree)
    return {"tensors": len(tree), "bytes": sum(a.nbytes for a in tree.values()), "casts": casts}


def _check_finite(name: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise CheckpointError(f"{name}: holds NaN or infinity: the source is damaged, or the dtype too narrow")


def _save_safetensors(folder: Path, tree: Mapping[str, np.ndarray]) -> None:
    """One file, or shards of at most SHARD_BYTES with an index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tree.items():
        if shards[-1] and size + array.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = np.ascontiguousarray(array)
        size += array.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in tree.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _verify(folder: Path, tree: Mapping[str, np.ndarray]) -> None:
    """Read everything back and compare byte for byte."""
    config = ModelConfig.from_directory(folder)
    seen = set()
    for name, tensor in jax_checkpoint.read_tensors(folder, config):
        array, wanted = np.asarray(tensor), tree[name]
        if array.dtype != wanted.dtype or array.shape != wanted.shape or array.tobytes() != wanted.tobytes():
            raise CheckpointError(f"{folder}: {name} was read back differently from what was written: check the disk and try again")
        seen.add(name)
    if seen != set(tree):
        raise CheckpointError(f"{folder}: {sorted(set(tree) - seen)} were not read back: check the disk and try again")


def _open_gguf(file: Path, folder: Path) -> None:
    """Dequantise a GGUF file with transformers and write it as a Hugging Face directory."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes that do not begin with 'GGUF': expected a GGUF file or a model directory")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # transformers and gguf raise many kinds here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file}: {file.stat().st_size} bytes, transformers cannot read it as GGUF ({reason}): probably cut off or of an unsupported kind") from error
    raw = model.config.to_dict()
    # Where the numbers came from is no property of the dequantised model.
    raw = {k: v for k, v in raw.items() if v is not None and not k.startswith("_") and k not in ("quantization_config", "id2label", "label2id")}
    raw |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(raw, indent=2, default=str) + "\n")
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: t.contiguous().numpy() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read_header(folder / "model.safetensors")
    try:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except Exception as error:  # a GGUF without a usable tokenizer is still a model
        log.warning("%s: its tokenizer cannot be read (%s); the result takes token ids only", file, error)
