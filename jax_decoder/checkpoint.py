"""Weights: the table from Hugging Face names to parameters, loading, saving, pack and unpack.

The checkpoint tree has one array a tensor under its Hugging Face name; it is what Orbax stores.
The model's parameters are packed: query, key and value rows lie in one matrix, gate and up in
another, and with packing "stacked" those of all layers in one array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from safetensors import safe_open

from . import orbax_io
from .config import ModelConfig
from .errors import CheckpointError
from .files import check_against, resolve_directory, stored_tensors
from .model import Model
from .rope import rope_table

IN_FLIGHT = 2  # tensors being placed while the next is read
DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
# Either a sharding for every parameter, or a function from its name and shape to one.
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding]


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint tensor lives: rows from ``start`` of a parameter, or of one layer of it."""

    parameter: str
    layer: int | None
    start: int
    shape: tuple[int, ...]


def table(config: ModelConfig, packing: str) -> dict[str, Slot]:
    """Every tensor that a checkpoint of this config must hold, and its place in the model."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * head, config.num_kv_heads * head
    slots = {"model.embed_tokens.weight": Slot("embed_tokens.weight", None, 0, (config.vocab_size, width))}
    for i in range(config.num_layers):
        prefix, layer = ("layers", i) if packing == "stacked" else (f"layers.{i}", None)

        def put(name: str, parameter: str, start: int, *shape: int, bias: bool = False, i: int = i, prefix: str = prefix, layer: int | None = layer) -> None:
            slots[f"model.layers.{i}.{name}.weight"] = Slot(f"{prefix}.{parameter}.weight", layer, start, shape)
            if bias:
                slots[f"model.layers.{i}.{name}.bias"] = Slot(f"{prefix}.{parameter}.bias", layer, start, shape[:1])

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
    slots["model.norm.weight"] = Slot("norm.weight", None, 0, (width,))
    if not config.tie_word_embeddings:
        slots["lm_head.weight"] = Slot("lm_head.weight", None, 0, (config.vocab_size, width))
    return slots


def ignored_tensors(config: ModelConfig, found: Iterable[str]) -> set[str]:
    """Names that checkpoints may hold and that no parameter needs: rotary buffers, a tied head."""
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    return ignored | ({"lm_head.weight"} if config.tie_word_embeddings else set())


def read_tensors(directory: Path, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) of a Hugging Face or Orbax directory, checked against the config first.

    Safetensors are memory-mapped and copied one tensor at a time. Raises CheckpointError with all
    problems at once.
    """
    expected = {name: slot.shape for name, slot in table(config, "separate").items()}
    if orbax_io.is_orbax(directory):
        yield from orbax_io.read(directory, expected)
        return
    found = stored_tensors(directory)
    check_against(expected, found, ignored_tensors(config, found), directory)
    by_file: dict[Path, list[str]] = {}
    for name, tensor in found.items():
        by_file.setdefault(tensor.file, []).append(name)
    with ExitStack() as stack:
        handles = {file: stack.enter_context(safe_open(file, framework="numpy")) for file in by_file}
        if config.tie_word_embeddings and "lm_head.weight" in found:
            _check_tied(directory, handles, found)
        for file, names in by_file.items():
            for name in names:
                if name in expected:
                    yield name, handles[file].get_tensor(name)


def _check_tied(directory: Path, handles: Mapping[Path, safe_open], found: Mapping) -> None:
    embedding, head = (handles[found[name].file].get_tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if not np.array_equal(embedding, head):
        raise CheckpointError(
            f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight: set tie_word_embeddings to false, or remove the tensor"
        )


@partial(jax.jit, donate_argnames="target")
def _place(target: jax.Array, part: jax.Array, start: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Write a tensor into its parameter, in place and cast on the device; and is it finite?"""
    part = part.astype(target.dtype)
    shaped = part.reshape((1,) * (target.ndim - part.ndim) + part.shape)
    return jax.lax.dynamic_update_slice(target, shaped, start), jnp.isfinite(part).all()


def pack(tensors: Iterable[tuple[str, Any]], config: ModelConfig, model: Model, dtype: jnp.dtype, placement: Placement) -> dict[str, jax.Array]:
    """Parameters by name from checkpoint tensors, one at a time, in ``dtype`` where ``placement`` says.

    Raises CheckpointError naming every non-finite tensor and every one left unfilled.
    """
    slots = table(config, model.packing)
    place = placement if callable(placement) else lambda name, shape: placement
    parameters: dict[str, jax.Array] = {}
    finite: dict[str, jax.Array] = {}
    for name, shape in parameter_shapes(model).items():
        parameters[name] = jnp.zeros(shape, dtype, device=place(name, shape))
    misfits, placed = [], deque()
    for name, tensor in tensors:
        if (slot := slots.get(name)) is None or tuple(tensor.shape) != slot.shape:
            misfits.append(f"{name}: shape {tuple(tensor.shape)}, expected {slot.shape if slot else 'no tensor of that name'}")
            continue
        target = parameters[slot.parameter]
        # Small tensors are replicated next to a sharded target; XLA cuts them.
        part = jax.device_put(tensor, _beside(target, tensor.ndim))
        start = (slot.start, *(0 for _ in slot.shape[1:]))
        start = start if slot.layer is None else (slot.layer, *start)
        parameters[slot.parameter], finite[name] = _place(target, part, tuple(map(np.int32, start)))
        # Reading runs ahead of placing: unbounded, the tensors that wait would be a second copy of the weights.
        if len(placed) == IN_FLIGHT:
            placed.popleft().block_until_ready()
        placed.append(finite[name])
    problems = misfits + [f"{n}: holds NaN or infinity as {jnp.dtype(dtype).name}" for n, ok in finite.items() if not ok]
    problems += [f"{name}: never filled" for name in slots if name not in finite]
    if problems:
        raise CheckpointError("\n".join([f"{len(problems)} problems with the weights (damaged file, or a dtype too narrow)", *problems]))
    return parameters


def _beside(target: jax.Array, ndim: int) -> Sharding:
    sharding = target.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*(None,) * ndim))
    return sharding


def unpack(config: ModelConfig, packing: str, parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The checkpoint tree of packed parameters: the inverse of ``pack``."""
    tree = {}
    for name, slot in table(config, packing).items():
        array = parameters[slot.parameter]
        array = array if slot.layer is None else array[slot.layer]
        tree[name] = array[slot.start : slot.start + slot.shape[0]]
    return tree


def abstract_model(config: ModelConfig, max_seq_len: int, packing: str, dtype: jnp.dtype, kernels: str = "plain") -> Model:
    """The module tree with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Model(config, max_seq_len, packing, dtype, kernels))


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name; the rotary table is none of them."""
    return {name: leaf.shape for name, leaf in flatten_model(model).items() if name != "rope"}


def flatten_model(model: Model) -> dict[str, Any]:
    """Every array of the module tree under its dotted path."""
    pure = nnx.to_pure_dict(nnx.state(model))
    return {".".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(pure)}


def load_parameters(directory: str | Path, dtype: jnp.dtype, placement: Placement, max_seq_len: int, packing: str, kernels: str = "plain") -> tuple[Model, dict[str, jax.Array]]:
    """The abstract model of a directory, and its parameters with the rotary table, by name."""
    directory = resolve_directory(directory)
    config = ModelConfig.from_directory(directory)
    return build_parameters(config, read_tensors(directory, config), dtype, placement, max_seq_len, packing, kernels)


def build_parameters(
    config: ModelConfig, tensors: Iterator[tuple[str, Any]], dtype: jnp.dtype, placement: Placement, max_seq_len: int, packing: str, kernels: str = "plain"
) -> tuple[Model, dict[str, jax.Array]]:
    """The abstract model of a config, and its parameters filled from (name, array) pairs."""
    first = next(tensors)  # checks a whole directory before anything is allocated
    model = abstract_model(config, max_seq_len, packing, dtype, kernels)
    parameters = pack(_chain(first, tensors), config, model, dtype, placement)
    table_place = placement("rope", ()) if callable(placement) else placement
    parameters["rope"] = jax.device_put(rope_table(config, max_seq_len), table_place)
    return model, parameters


def _chain(first: tuple[str, Any], rest: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    yield first
    yield from rest
