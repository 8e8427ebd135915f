"""Compiles the fused kernels for an H200, which needs no GPU: prints registers and spills as JSON.

A process of its own, as Triton decides when it is imported whether kernels are interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compare.models import model_config
from torch_decoder.kernels import advance, attention, products
from torch_decoder.kernels.tiles import span_for, tile_for

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {"eps": "fp32", "scale": "fp32", **dict.fromkeys(("N", "V", "S", "S1", "count", "window"), "i32")}
FLOATS = ("heads", "rope", "partial", "logits", "summary", "logprobs")
INTEGERS = ("positions", "finished", "chosen", "status", "ring", "forced", "tokens", "limits", "stop_ids")


def resources(kernel, constants: dict, warps: int, overlap: bool, float32: tuple[str, ...] = (), half: str = "*bf16", **options: int) -> dict[str, int]:
    """Registers a thread, bytes of shared memory, and of stack and local memory, which are spills."""
    names = kernel.arg_names
    kinds = {n: TYPES.get(n) or ("*i32" if n in INTEGERS else "*fp32" if n in (*FLOATS, *float32) else half) for n in names}
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants and kinds[n].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": overlap, **options})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {"shared": compiled.metadata.shared, **{name.lower(): int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}}


def main() -> None:
    found = {}
    for model in ("shape:qwen3-0.6b", "shape:llama-3.1-8b"):
        config = model_config(model)
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        width, inner = config.hidden_size, config.intermediate_size
        shapes = {
            "qkv": (heads, width, {"NORM": True}),
            "out": (width, config.num_heads * config.head_dim, {"ADD": True}),
            "gate_up": (inner, width, {"NORM": True, "GATED": True}),
            "down": (width, inner, {"ADD": True}),
            "head": (config.vocab_size, width, {"NORM": True}),
        }
        for batch in (1, 8):
            for name, (rows, columns, flags) in shapes.items():
                tile = tile_for(rows, columns, batch, "GATED" in flags)
                constants = {"K": columns, "BN": tile.rows, "BK": tile.inner, "BB": 1 if batch == 1 else 16, "HEADROOM": 2.0**-6, "OVERLAP": 2 * (batch == 1)}
                constants |= {flag: flags.get(flag, False) for flag in ("NORM", "BIAS", "GATED", "ADD")}
                found[f"{model} {name} {batch}"] = resources(products._product, constants, tile.warps, batch == 1, ("out",) * (name in ("qkv", "head")))
        span = span_for(config.head_dim)
        sizes = {"N": config.num_heads, "KV": config.num_kv_heads, "H": config.head_dim, "NORM": config.qk_norm, "SPLITS": 8, "GP": 16, "HP": config.head_dim // 2}
        found[f"{model} attend"] = resources(attention._attend, {**sizes, "SPLIT": span.split, "BLOCK": span.block, "OVERLAP": 1}, span.warps, True)
    for width, itemsize in product((64, 128, 256), (2, 4)):
        span = span_for(width, itemsize)
        sizes = {"N": 16, "KV": 8, "H": width, "NORM": True, "SPLITS": 8, "GP": 16, "HP": width // 2, "SPLIT": span.split, "BLOCK": span.block, "OVERLAP": 0}
        found[f"attend {width} of {itemsize} bytes"] = resources(attention._attend, sizes, span.warps, False, half="*bf16" if itemsize == 2 else "*fp32")
    found["summarise"] = resources(advance._summarise, {"CHUNKS": 38, "CHUNK": advance.CHUNK, "OVERLAP": 0}, 8, False)
    for greedy in (True, False):
        constants = {"STOPS": 16, "CHUNKS": 38, "CP": 64, "GREEDY": greedy, "IDLE_TO_FAILED": (0, 1, 2, 3, 4), "OVERLAP": 0}
        found[f"advance {'greedy' if greedy else 'sampled'}"] = resources(advance._advance, constants, 1, False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
