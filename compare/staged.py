"""Parity of models whose reference does not fit the device: stage by stage, one layer of transformers at a time.

The reference is transformers in float32, a layer built, run and dropped; what it fed each stage is
fed to the decoder's own stages, in decode steps of one token. For ``shape:`` models, whose weights
can be made layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_decoder.errors import ConfigError

from . import shapes, synthetic
from .arms import DecoderArm
from .bench import with_bits
from .ladder import Rung, relative
from .models import model_config
from .parity import Verdict
from .stages import Stages, TorchRecorder, stage_names, step_stages
from .workload import Workload

TOKENS = 24  # of the one row that is judged
REFERENCE = "transformers float32, stage by stage"


def tokens_of(vocab_size: int) -> list[int]:
    """Ids by a rule, the same for everyone."""
    return [(37 * i + 5) % vocab_size for i in range(TOKENS)]


def reference_stages(model: str, dtype: str, device: str) -> tuple[Stages, Stages]:
    """Stages of transformers in float32, with their inputs, and in ``dtype`` fed the same inputs; float32 arrays on the host.

    At most one layer is on the device at a time, so make them before the decoder is loaded.
    """
    pieces = _Pieces(model, device)
    tokens = tokens_of(pieces.config.vocab_size)
    wanted = pieces.stages(tokens, "float32", {})
    inputs = {name: value for name, value in wanted.items() if name.endswith(".input")}
    theirs = pieces.stages(tokens, dtype, inputs)
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()  # the decoder, maybe another framework's, needs all that there is
    return wanted, theirs


def judge_stages(decoder: Any, framework: str, wanted: Stages, theirs: Stages) -> Verdict:
    """A verdict on a decoder of plain kernels: each stage of its step within the bar that transformers' own sets."""
    tokens = tokens_of(decoder.config.vocab_size)
    inputs = {name: value for name, value in wanted.items() if name.endswith(".input")}
    found = step_stages(decoder, framework, tokens, inputs)
    rungs = [relative(framework, name, found, theirs, wanted) for name in stage_names(decoder.config.num_layers)]
    return _verdict(rungs, found["lm_head"], wanted["lm_head"])


def _verdict(rungs: Sequence[Rung], ours: np.ndarray, reference: np.ndarray) -> Verdict:
    failed = [rung for rung in rungs if not rung.passed]
    closest = max(rungs, key=lambda rung: rung.error / rung.allowed)
    said = f"{len(rungs) - len(failed)} of {len(rungs)} stages within their bars; closest is {closest.stage}: {closest.error:.2e} of {closest.allowed:.2e}"
    largest = float(np.abs(ours - reference).max())  # of the head alone, fed the reference's input
    return Verdict("fail" if failed else "pass", REFERENCE, largest, None, len(ours), None, said if not failed else f"{said}; first to fail: {failed[0].stage}")


class _Pieces:
    """transformers' model without weights, whose parts are filled one by one."""

    def __init__(self, model: str, device: str):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        fields, windows = shapes.config_dict(model), model_config(model).sliding_windows
        if shortest := [window for window in windows if window is not None and window < TOKENS]:
            raise ConfigError(f"{model}: a sliding window of {shortest[0]} tokens, expected at least {TOKENS}: stages are judged without one")
        self.config, self._tied, self._device = AutoConfig.for_model(**fields), fields["tie_word_embeddings"], device
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        self._rotary = type(self._model.model.rotary_emb)(config=self.config).to(device)

    def stages(self, tokens: Sequence[int], dtype: str, inputs: Mapping[str, np.ndarray]) -> Stages:
        """All stages of one row in ``dtype``; ``inputs`` replaces what they are fed."""
        import torch

        recorder, found = TorchRecorder(inputs), {}
        with torch.no_grad():
            x = self._run("embed_tokens", "model.embed_tokens", dtype, recorder, lambda part: part(torch.tensor([tokens], device=self._device)))
            positions = torch.arange(len(tokens), device=self._device)[None]
            ahead = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=self._device).triu(1)
            mask = torch.zeros(ahead.shape, dtype=x.dtype, device=self._device).masked_fill(ahead, torch.finfo(x.dtype).min)[None, None]
            rest = {"attention_mask": mask, "position_ids": positions, "position_embeddings": self._rotary(x, positions)}
            for i in range(self.config.num_hidden_layers):
                out = self._run(f"layers.{i}", f"model.layers.{i}", dtype, recorder, lambda part, x=x: part(x, **rest))
                x = out[0] if isinstance(out, tuple) else out
                found |= recorder.take()
            x = self._run("norm", "model.norm", dtype, recorder, lambda part, x=x: part(x))
            head = "model.embed_tokens" if self._tied else "lm_head"
            self._run("lm_head", head, dtype, recorder, lambda part, x=x: part(x))
        return found | recorder.take()

    def _run(self, stage: str, name: str, dtype: str, recorder: TorchRecorder, call: Any) -> Any:
        """Fill the part of that name, attach the recorder, call it, and empty it again.

        A layer whose parts are fed is run once more fed as a whole, as the decoder's is: what its
        attention errs by then passes through its MLP.
        """
        import torch

        part = self._model.get_submodule(name)
        if stage == "lm_head" and self._tied:
            part = torch.nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False, device="meta")
        part.to(getattr(torch, dtype)).to_empty(device=self._device)
        for suffix, parameter in part.named_parameters():
            law = synthetic.law_of(f"{name}.{suffix}", tuple(parameter.shape), self._tied)
            parameter.copy_(synthetic.torch_tensor(law, tuple(parameter.shape), parameter.dtype, parameter.device))
        inner = tuple((f"{stage}.{child}", getattr(part, child)) for child in ("self_attn", "mlp") if hasattr(part, child))
        with recorder.attached(((stage, part), *inner)):
            out = call(part)
        if inner and recorder.inputs:
            with recorder.attached(((stage, part),)):
                out = call(part)
        part.to(torch.float32).to("meta")
        return out


def too_large(model: str, weight_bytes: float, free_bytes: int) -> bool:
    """Must a model be judged by stages? ``weight_bytes`` are those of the reference in float32."""
    return shapes.is_shape(model) and weight_bytes > 0.9 * free_bytes


def forced_tokens(workload: Workload, vocab_size: int) -> list[list[int]]:
    """For each row the tokens that its steps take: there is no reference to follow."""
    return [[(37 * t + 11 * row + 7) % vocab_size for t in range(workload.new_tokens)] for row in range(workload.batch)]


def judge_by_stages(arms: Sequence[DecoderArm], wanted: Stages, theirs: Stages) -> list[Verdict]:
    """Each arm's verdict: that of the stages, as all run the same plain step; graphs bit by bit against the step without one, besides."""
    verdict = judge_stages(arms[0].decoder, arms[0].variant.framework, wanted, theirs)
    logits = {arm.variant: arm.logits() for arm in arms}
    return [with_bits(variant, logits, verdict) for variant in logits]
