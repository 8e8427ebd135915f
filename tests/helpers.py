"""Small tools of the tests: both decoders by name, references, and copies of checkpoints to damage."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import jax_decoder
import torch_decoder
from compare.program import compiler_path
from compare.results import ResultError
from tests.strong_init import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "smollm2-135m-instruct"
DECODERS = {"torch": torch_decoder, "jax": jax_decoder}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
P24 = [(37 * i + 5) % 256 for i in range(24)]
TOLERANCE = 1e-3  # float32 noise is below 2e-4, a forgotten tensor costs 0.8 or more


def checkpoint(path: Path, family: str, **overrides) -> Path:
    return make_checkpoint(path, family, **overrides)


def decoder(which: str, path: Path, **settings):
    """A float32 decoder on the CPU with a small cache."""
    return DECODERS[which].Decoder.from_pretrained(path, **{"dtype": "float32", "device": "cpu", "max_batch": 4, "max_seq_len": 64, **settings})


def numpy(array) -> np.ndarray:
    return array.detach().float().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, dtype=np.float32)


@lru_cache(maxsize=8)
def reference(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_logits(path: Path, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return reference(path)(torch.tensor([tokens])).logits[0].numpy()


def reference_greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = reference(path).generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def copy_of(source: Path, target: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(source, target))


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes) -> None:
    file = path / "config.json"
    raw = {k: v for k, v in json.loads(file.read_text()).items() if k not in remove}
    file.write_text(json.dumps(raw | changes))


def edit_tensors(path: Path, change) -> None:
    """Apply ``change(dict of tensors)`` to a checkpoint of one file."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def has_gpu_compiler() -> bool:
    """Can JAX programs be compiled for a GPU here, with or without one?"""
    try:
        compiler_path()
    except ResultError:
        return False
    return True


def forced_steps(which: str, path, kernels: str, prompts: list[list[int]], steps: int, dtype: str = "float32", sampling=None) -> tuple[np.ndarray, list[list[int]]]:
    """Logits [steps + 1, B, V] along forced tokens, and three tokens that the first prompt goes on with."""
    forced = [[(37 * i + 11 * row) % 256 for i in range(steps + 1)] for row in range(len(prompts))]
    with decoder(which, path, dtype=dtype, kernels=kernels, device="auto", max_batch=4, max_seq_len=40, buckets=[len(prompts)]) as d:
        handle = d.prefill(prompts, forced=forced)
        found = [numpy(handle.logits).copy()]
        for _ in range(steps):
            handle = d.decode_step(handle)
            found.append(numpy(handle.logits).copy())
        tokens = [c.token_ids for c in d.generate(prompts[:1], max_new_tokens=3, sampling=sampling)]
        assert d.launch_report()["kernels"] == kernels and d.launch_report()["fallbacks"] == []
    return np.stack(found), tokens
