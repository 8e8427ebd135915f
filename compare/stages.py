"""Every stage of every layer, from both decoders and from transformers, under common names.

A stage is ``embed_tokens``, ``layers.i.self_attn``, ``layers.i.mlp``, ``layers.i``, ``norm`` or
``lm_head``; ``NAME.input`` is what it is fed. Giving inputs feeds each stage the reference's
own input, so that an error does not travel from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_decoder.errors import ConfigError

from .models import open_decoder, open_transformers

Stages = dict[str, np.ndarray]


def stage_names(num_layers: int) -> list[str]:
    """Stages in the order in which a forward pass meets them."""
    layers = [f"layers.{i}{part}" for i in range(num_layers) for part in (".self_attn", ".mlp", "")]
    return ["embed_tokens", *layers, "norm", "lm_head"]


def suspects(stage: str) -> str:
    """The tensors and settings that a stage depends on, for a message."""
    prefix = f"model.{stage}"
    if stage.endswith(".self_attn"):
        return f"{prefix}.q_proj, k_proj, v_proj, o_proj (weights and biases), q_norm, k_norm, rope settings, sliding_window"
    if stage.endswith(".mlp"):
        return f"{prefix}.gate_proj, up_proj, down_proj (weights and biases), hidden_act"
    if stage.startswith("layers."):
        return f"{prefix}.input_layernorm.weight, post_attention_layernorm.weight, rms_norm_eps"
    if stage == "logits":
        return "what stages share: model positions, the mask, the order of layers"
    return {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight, rms_norm_eps", "lm_head": "lm_head.weight, tie_word_embeddings"}[stage]


def run_stages(framework: str, model: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray] | None = None) -> Stages:
    """All stages of one row, float32 [T, ...] each; ``inputs`` replaces what stages are fed."""
    runners: dict[str, Callable[..., Stages]] = {"transformers": _transformers, "torch": _torch, "jax": _jax}
    if framework not in runners:
        raise ConfigError(f"framework is {framework!r}, expected one of {', '.join(runners)}")
    return runners[framework](model, tokens, dtype, inputs or {})


class _TorchRecorder:
    """Forward hooks that record a module's input and output, and replace its input."""

    def __init__(self, inputs: Mapping[str, np.ndarray]):
        self.inputs, self.seen = inputs, {}

    def attach(self, name: str, module: Any) -> None:
        module.register_forward_pre_hook(self._before(name), with_kwargs=True)
        module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Callable:
        def hook(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            key = f"{name}.input"
            value = args[0] if args else kwargs["hidden_states"]
            if key in self.inputs:
                import torch

                value = torch.from_numpy(self.inputs[key])[None].to(value)
                args, kwargs = ((value, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": value})
            self.seen[key] = value
            return args, kwargs

        return hook

    def _after(self, name: str) -> Callable:
        def hook(_: Any, __: tuple, output: Any) -> None:
            self.seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def stages(self, names: list[str]) -> Stages:
        wanted = [*names, *(f"{n}.input" for n in names if n != "embed_tokens")]
        return {name: self.seen[name][0].detach().float().cpu().numpy() for name in wanted if name in self.seen}


def _attach_layers(recorder: _TorchRecorder, model: Any) -> None:
    recorder.attach("embed_tokens", model.embed_tokens)
    for i, layer in enumerate(model.layers):
        recorder.attach(f"layers.{i}", layer)
        recorder.attach(f"layers.{i}.self_attn", layer.self_attn)
        recorder.attach(f"layers.{i}.mlp", layer.mlp)
    recorder.attach("norm", model.norm)


def _transformers(model_name: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
    import torch

    model = open_transformers(model_name, dtype)
    recorder = _TorchRecorder(inputs)
    _attach_layers(recorder, model.model)
    recorder.attach("lm_head", model.lm_head)
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    return recorder.stages(stage_names(model.config.num_hidden_layers))


def _torch(model_name: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
    import torch

    from torch_decoder.decode import prefill_chunk

    with open_decoder(model_name, "torch", dtype=dtype, max_batch=1, max_seq_len=len(tokens)) as decoder:
        model, recorder = decoder.model, _TorchRecorder(inputs)
        _attach_layers(recorder, model)
        device = model.embed_tokens.weight.device
        with torch.no_grad():
            hidden = prefill_chunk(model, decoder._runner.new_state(1).cache, torch.tensor([tokens], dtype=torch.int32, device=device), 0)
            recorder.seen["lm_head"] = model.logits(hidden)
            if "lm_head.input" in inputs:  # the head is no module: feed it by standing in for the norm
                fed = torch.from_numpy(inputs["lm_head.input"])[None].to(hidden)
                recorder.seen["lm_head"] = model.head(fed)
        return recorder.stages(stage_names(decoder.config.num_layers))


def _jax(model_name: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
    import jax.numpy as jnp

    seen: dict[str, Any] = {}

    def tap(name: str, value: Any) -> Any:
        if name in inputs:
            value = jnp.asarray(inputs[name], value.dtype)[None]
        # ``layers.0`` taps its input before its parts: keep names as transformers' modules have them.
        seen[name] = value
        return value

    with open_decoder(model_name, "jax", dtype=dtype, max_batch=1, max_seq_len=len(tokens)) as decoder:
        runner = decoder._runner
        model = runner.programs.merge(runner.programs.weights)
        ids = jnp.asarray([tokens], jnp.int32)
        hidden, _ = model(ids, jnp.arange(len(tokens), dtype=jnp.int32)[None], runner.new_state(1).cache, tap)
        model.logits(hidden, tap)
        return {name: np.asarray(value[0], np.float32) for name, value in seen.items()}
