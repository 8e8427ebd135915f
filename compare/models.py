"""What a model argument names, opened by each framework: a directory, or a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import shapes, synthetic


def directory_of(model: str | Path) -> Path:
    return Path(model).expanduser().resolve()


def model_config(model: str | Path, framework: str = "torch") -> Any:
    """The ModelConfig of that framework's decoder. Raises ConfigError, CheckpointError."""
    decoder = _package(framework)
    if shapes.is_shape(str(model)):
        return decoder.ModelConfig.from_dict(shapes.config_dict(str(model)))
    return decoder.ModelConfig.from_directory(decoder.files.resolve_directory(directory_of(model)))


def open_decoder(model: str | Path, framework: str, **options: Any) -> Any:
    """A Decoder of that framework; ``options`` as in ``Decoder.from_pretrained``."""
    decoder = _package(framework)
    if not shapes.is_shape(str(model)):
        return decoder.Decoder.from_pretrained(directory_of(model), **options)
    config = model_config(model, framework)
    return decoder.Decoder.from_tensors(config, _weights(config, framework, decoder.options.Options(**options)), **options)


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


def tokenizer_of(model: str | Path) -> Any:
    """The tokenizer of a directory; one that is not present for a shape."""
    from torch_decoder.text import Tokenizer

    return Tokenizer(None if shapes.is_shape(str(model)) else directory_of(model))


def _package(framework: str) -> Any:
    if framework == "torch":
        import torch_decoder as package
        import torch_decoder.files
        import torch_decoder.options
    else:
        import jax_decoder as package
        import jax_decoder.files
        import jax_decoder.options
    return package
