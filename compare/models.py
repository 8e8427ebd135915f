"""What a model argument names, opened by each framework: a directory, or a published shape."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from . import shapes, synthetic
from .workload import PROMPTS, Workload


def directory_of(model: str | Path) -> Path:
    return Path(model).expanduser().resolve()


def model_config(model: str | Path, framework: str = "torch") -> Any:
    """The ModelConfig of that framework's decoder. Raises ConfigError, CheckpointError."""
    config = _module(framework, "config").ModelConfig
    if shapes.is_shape(str(model)):
        return config.from_dict(shapes.config_dict(str(model)))
    return config.from_directory(_module(framework, "files").resolve_directory(directory_of(model)))


def open_decoder(model: str | Path, framework: str, **options: Any) -> Any:
    """A Decoder of that framework; ``options`` as in ``Decoder.from_pretrained``."""
    decoder = _module(framework, "generate").Decoder
    if not shapes.is_shape(str(model)):
        return decoder.from_pretrained(directory_of(model), **options)
    config = model_config(model, framework)
    return decoder.from_tensors(config, _weights(config, framework, _module(framework, "options").Options(**options)), **options)


def _weights(config: Any, framework: str, options: Any) -> Any:
    if framework == "torch":
        return synthetic.torch_tensors(config, options.torch_dtype, options.place)
    return synthetic.jax_arrays(config, options.jax_dtype, options.place)


def open_transformers(model: str | Path, dtype: str, device: str = "cpu") -> Any:
    """transformers' model, ready to run on ``device``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not shapes.is_shape(str(model)):
        return AutoModelForCausalLM.from_pretrained(directory_of(model), dtype=getattr(torch, dtype)).to(device).eval()
    fields = shapes.config_dict(str(model))
    config = AutoConfig.for_model(**fields)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            law = synthetic.law_of(name, tuple(parameter.shape), fields["tie_word_embeddings"])
            parameter.copy_(synthetic.torch_tensor(law, tuple(parameter.shape), parameter.dtype, parameter.device))
    return made


def encode_prompts(workload: Workload) -> list[list[int]]:
    """Token ids of the workload's prompts; models without a tokenizer get ids made by a rule."""
    if (lengths := workload.prompt_lengths()) is not None:
        return _ruled(workload, lengths.__getitem__)
    tokenizer = _module("torch", "text").Tokenizer(None if shapes.is_shape(workload.model) else directory_of(workload.model))
    if tokenizer.present:
        return [tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(workload.batch)]
    return _ruled(workload, lambda row: 5 + row % 4)


def _ruled(workload: Workload, length: Callable[[int], int]) -> list[list[int]]:
    vocab = model_config(workload.model).vocab_size
    return [[(37 * t + 11 * row + 5) % vocab for t in range(length(row))] for row in range(workload.batch)]


def weight_bytes(config: Any, dtype: str) -> int:
    """Bytes of weights that a step must read once; the embedding row of a token is negligible."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * heads + config.num_heads * config.head_dim * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    return (config.num_layers * layer + config.vocab_size * config.hidden_size) * (4 if dtype == "float32" else 2)


def _module(framework: str, name: str) -> Any:
    """A module of that framework's decoder; the other framework is not imported."""
    return import_module(f"{framework}_decoder.{name}")
