"""Every stage of every layer, from both decoders and from transformers, under common names.

A stage is ``embed_tokens``, ``layers.i.self_attn``, ``layers.i.mlp``, ``layers.i``, ``norm`` or
``lm_head``; ``NAME.input`` is what it is fed. Giving inputs feeds each stage the reference's
own input, so that an error does not travel from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class TorchRecorder:
    """Forward hooks that record a module's input and output, and replace its input."""

    def __init__(self, inputs: Mapping[str, np.ndarray]):
        self.inputs, self.seen, self._residuals = inputs, {}, {}

    @contextmanager
    def attached(self, modules: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Record these modules, by their stages' names, until the end of the block."""
        handles = [
            handle
            for name, module in modules
            for handle in (module.register_forward_pre_hook(self._before(name), with_kwargs=True), module.register_forward_hook(self._after(name)))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str) -> Callable:
        def hook(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            key = f"{name}.input"
            value = args[0] if args else kwargs["hidden_states"]
            if key in self.inputs:
                import torch

                value = torch.from_numpy(self.inputs[key])[None].to(value)
                args, kwargs = ((value, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": value})
            self.seen[key] = value.clone()  # a step adds to it in place
            if kwargs.get("residual") is not None:  # its own sum would hide the stage: it is made in the hook after it
                self._residuals[name], kwargs = kwargs["residual"], {**kwargs, "residual": None}
            return args, kwargs

        return hook

    def _after(self, name: str) -> Callable:
        def hook(_: Any, __: tuple, output: Any) -> Any:
            self.seen[name] = (output[0] if isinstance(output, tuple) else output).clone()
            return output + self._residuals.pop(name) if name in self._residuals else None

        return hook

    def take(self) -> Stages:
        """What was recorded since the last call, of one row, as float32 on the host; no input of the embedding."""
        taken, self.seen = self.seen, {}
        return {name: value[0].detach().float().cpu().numpy() for name, value in taken.items() if name != "embed_tokens.input"}


def _modules(model: Any, parts: bool = True) -> Iterator[tuple[str, Any]]:
    """Stages that are modules, in a model of either make; ``parts`` of layers, too."""
    yield "embed_tokens", model.embed_tokens
    for i, layer in enumerate(model.layers):
        yield f"layers.{i}", layer
        if parts:
            yield from ((f"layers.{i}.self_attn", layer.self_attn), (f"layers.{i}.mlp", layer.mlp))
    yield "norm", model.norm


def _transformers(model_name: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
    import torch

    model = open_transformers(model_name, dtype)
    recorder = TorchRecorder(inputs)
    with torch.no_grad(), recorder.attached((*_modules(model.model), ("lm_head", model.lm_head))):
        model(torch.tensor([tokens]), use_cache=False)
    return recorder.take()


def _torch(model_name: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
    with open_decoder(model_name, "torch", dtype=dtype, max_batch=1, max_seq_len=len(tokens)) as decoder:
        return _torch_pass(decoder.model, decoder._runner.new_state(1).cache, tokens, 0, inputs)


def _torch_pass(model: Any, cache: Any, tokens: Sequence[int], first: int, inputs: Mapping[str, np.ndarray], parts: bool = True) -> Stages:
    """Stages of one pass of tokens that begin at position ``first``. Looking at ``parts`` takes a step's sums out of its products."""
    import torch

    from torch_decoder.decode import prefill_chunk

    recorder = TorchRecorder(inputs)
    with torch.no_grad(), recorder.attached(_modules(model, parts)):
        hidden = prefill_chunk(model, cache, torch.tensor([tokens], dtype=torch.int32, device=model.embed_tokens.weight.device), first)
        recorder.seen["lm_head"] = model.logits(hidden)
        if "lm_head.input" in inputs:  # the head is no module: feed it by standing in for the norm
            fed = torch.from_numpy(inputs["lm_head.input"])[None].to(hidden)
            recorder.seen["lm_head"] = model.head(fed)
    return recorder.take()


def step_stages(decoder: Any, framework: str, tokens: Sequence[int], inputs: Mapping[str, np.ndarray]) -> Stages:
    """All stages of one row from steps of one token each, through a decoder of plain kernels that is open already."""
    runner = decoder._runner
    held = [runner.new_state(1).cache]

    def torch_step(t: int, fed: Mapping[str, np.ndarray]) -> Stages:
        # Layers once more as they are, with their sums inside of products.
        return _torch_pass(decoder.model, held[0], tokens[t : t + 1], t, fed) | _torch_pass(decoder.model, held[0], tokens[t : t + 1], t, fed, parts=False)

    def jax_step(t: int, fed: Mapping[str, np.ndarray]) -> Stages:
        model = runner.programs.merge(runner.programs.weights)
        found, held[0] = _jax_pass(model, held[0], tokens[t : t + 1], t, fed)
        return found

    step = {"torch": torch_step, "jax": jax_step}[framework]
    steps = [step(t, {name: value[t : t + 1] for name, value in inputs.items()}) for t in range(len(tokens))]
    return {name: np.concatenate([one[name] for one in steps]) for name in steps[0]}


def _jax(model_name: str | Path, tokens: list[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
    with open_decoder(model_name, "jax", dtype=dtype, max_batch=1, max_seq_len=len(tokens)) as decoder:
        runner = decoder._runner
        return _jax_pass(runner.programs.merge(runner.programs.weights), runner.new_state(1).cache, tokens, 0, inputs)[0]


def _jax_pass(model: Any, cache: Any, tokens: Sequence[int], first: int, inputs: Mapping[str, np.ndarray]) -> tuple[Stages, Any]:
    """Stages of one pass of tokens that begin at position ``first``, and the cache that it left."""
    import jax.numpy as jnp

    seen: dict[str, Any] = {}

    def tap(name: str, value: Any) -> Any:
        if name in inputs:
            value = jnp.asarray(inputs[name], value.dtype)[None]
        # ``layers.0`` taps its input before its parts: keep names as transformers' modules have them.
        seen[name] = value
        return value

    positions = first + jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden, cache = model(jnp.asarray([tokens], jnp.int32), positions, cache, tap)
    model.logits(hidden, tap)
    return {name: np.asarray(value[0], np.float32) for name, value in seen.items()}, cache
