"""Weights: the table from Hugging Face names to parameters, loading, saving, pack and unpack.

The checkpoint tree has one array a tensor under its Hugging Face name. The model's parameters
are packed: query, key and value rows lie in one matrix, gate and up in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import ModelConfig
from .errors import CheckpointError
from .files import check_against, stored_tensors
from .model import Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONVERT_HINT = "python scripts/convert_checkpoint.py SRC DST --to hf"


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint tensor lives: rows ``start`` to ``start + rows`` of a model parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def table(config: ModelConfig) -> dict[str, Slot]:
    """Every tensor that a checkpoint of this config must hold, and its place in the model."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * head, config.num_kv_heads * head
    slots = {"model.embed_tokens.weight": Slot("embed_tokens.weight", 0, (config.vocab_size, width))}
    for i in range(config.num_layers):

        def put(name: str, parameter: str, start: int, *shape: int, bias: bool = False, layer: str = f"layers.{i}") -> None:
            slots[f"model.{layer}.{name}.weight"] = Slot(f"{layer}.{parameter}.weight", start, shape)
            if bias:
                slots[f"model.{layer}.{name}.bias"] = Slot(f"{layer}.{parameter}.bias", start, shape[:1])

        put("input_layernorm", "input_layernorm", 0, width)
        put("self_attn.q_proj", "self_attn.qkv_proj", 0, query, width, bias=config.qkv_bias)
        put("self_attn.k_proj", "self_attn.qkv_proj", query, kv, width, bias=config.qkv_bias)
        put("self_attn.v_proj", "self_attn.qkv_proj", query + kv, kv, width, bias=config.qkv_bias)
        put("self_attn.o_proj", "self_attn.o_proj", 0, width, query, bias=config.o_bias)
        if config.qk_norm:
            put("self_attn.q_norm", "self_attn.q_norm", 0, head)
            put("self_attn.k_norm", "self_attn.k_norm", 0, head)
        put("post_attention_layernorm", "post_attention_layernorm", 0, width)
        put("mlp.gate_proj", "mlp.gate_up_proj", 0, inner, width, bias=config.mlp_bias)
        put("mlp.up_proj", "mlp.gate_up_proj", inner, inner, width, bias=config.mlp_bias)
        put("mlp.down_proj", "mlp.down_proj", 0, width, inner, bias=config.mlp_bias)
    slots["model.norm.weight"] = Slot("norm.weight", 0, (width,))
    if not config.tie_word_embeddings:
        slots["lm_head.weight"] = Slot("lm_head.weight", 0, (config.vocab_size, width))
    return slots


def ignored_tensors(config: ModelConfig, found: Iterable[str]) -> set[str]:
    """Names that checkpoints may hold and that no parameter needs: rotary buffers, a tied head."""
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    return ignored | ({"lm_head.weight"} if config.tie_word_embeddings else set())


def read_tensors(directory: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, memory-mapped CPU tensor) after checking the whole directory against the config.

    Raises CheckpointError with all problems at once. Nothing but the mapped pages is held.
    """
    if (directory / "weights" / "manifest.ocdbt").exists():
        raise CheckpointError(f"{directory}: an Orbax checkpoint, which only the JAX decoder reads: convert it with `{CONVERT_HINT}`")
    found = stored_tensors(directory)
    slots = table(config)
    check_against({n: s.shape for n, s in slots.items()}, found, ignored_tensors(config, found), directory)
    by_file: dict[Path, list[str]] = {}
    for name, tensor in found.items():
        by_file.setdefault(tensor.file, []).append(name)
    with ExitStack() as stack:
        handles = {file: stack.enter_context(safe_open(file, framework="pt")) for file in by_file}
        if config.tie_word_embeddings and "lm_head.weight" in found:
            _check_tied(directory, handles, found)
        for file, names in by_file.items():
            for name in names:
                if name in slots:
                    yield name, handles[file].get_tensor(name)


def _check_tied(directory: Path, handles: Mapping[Path, safe_open], found: Mapping) -> None:
    embedding, head = (handles[found[name].file].get_tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if not torch.equal(embedding, head):
        raise CheckpointError(
            f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight: set tie_word_embeddings to false, or remove the tensor"
        )


def pack(tensors: Iterable[tuple[str, Tensor]], config: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
    """Copy checkpoint tensors into the model's parameters, one at a time, casting as they are read.

    Raises CheckpointError naming every non-finite tensor and every parameter left unfilled.
    """
    slots = table(config)
    unfilled, bad = set(slots), []
    with torch.no_grad():
        for name, tensor in tensors:
            if (slot := slots.get(name)) is None or tuple(tensor.shape) != slot.shape:
                bad.append(f"{name}: shape {tuple(tensor.shape)}, expected {slot.shape if slot else 'no tensor of that name'}")
                continue
            target = parameters[slot.parameter][slot.start : slot.start + slot.shape[0]]
            target.copy_(tensor)
            unfilled.discard(name)
            low, high = torch.aminmax(target)
            if not (torch.isfinite(low) & torch.isfinite(high)):  # a NaN anywhere makes both NaN
                bad.append(f"{name}: holds NaN or infinity as {str(target.dtype).removeprefix('torch.')}")
    _raise_bad(bad + [f"{name}: never filled" for name in sorted(unfilled)])


def verify(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Raise CheckpointError naming every tensor that is not finite as ``dtype``."""
    bad = []
    for name, tensor in tensors:
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low.to(dtype)) & torch.isfinite(high.to(dtype))):  # a NaN anywhere makes both NaN
            bad.append(f"{name}: holds NaN or infinity as {str(dtype).removeprefix('torch.')}")
    _raise_bad(bad)


def _raise_bad(problems: list[str]) -> None:
    if problems:
        raise CheckpointError("\n".join([f"{len(problems)} problems with the weights (damaged file, or a dtype too narrow)", *problems]))


def unpack(config: ModelConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint tree of packed parameters, as views: the inverse of ``pack``."""
    return {name: parameters[s.parameter][s.start : s.start + s.shape[0]] for name, s in table(config).items()}


def build_model(config: ModelConfig, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device, max_seq_len: int, kernels: str) -> Model:
    """Build the model on ``device`` and fill it from (name, tensor) pairs."""
    first = next(tensors)  # checks a whole directory before anything is allocated
    model = empty_model(config, dtype, device, max_seq_len, kernels)
    pack(_chain(first, tensors), config, dict(model.named_parameters()))
    return model


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_seq_len: int, kernels: str) -> Model:
    """A model whose parameters hold no values yet; its rotary table is filled."""
    with torch.device("meta"):
        model = Model(config, max_seq_len, kernels)
    model = model.to(dtype).to_empty(device=device).eval()
    model.rebuild_buffers()
    return model


def share_model(model: Model, max_seq_len: int, kernels: str) -> Model:
    """A second module over the same parameters, with buffers of its own."""
    weight = model.embed_tokens.weight
    with torch.device("meta"):
        other = Model(model.config, max_seq_len, kernels).to(weight.dtype)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    other.rebuild_buffers()
    return other.eval()


def _chain(first: tuple[str, Tensor], rest: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield first
    yield from rest


def save_tensors(directory: Path, config: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
    """Write the checkpoint tree as one safetensors file with Hugging Face names."""
    tree = {name: tensor.contiguous().cpu() for name, tensor in unpack(config, parameters).items()}
    save_file(tree, directory / "model.safetensors", metadata={"format": "pt"})
