"""What a decoder would take of the device's memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_decoder.buckets import check_buckets
from torch_decoder.budget import GIB, plan_memory
from torch_decoder.cache import MemoryMap
from torch_decoder.checkpoint import DTYPES

from .models import model_config


def plan(model: str, dtype: str, max_batch: int, buckets: Sequence[int] | None, max_seq_len: int, budget: int | None) -> dict[str, Any]:
    """``memory`` (bytes of weights, state and work space; buckets that fit) and ``memory_map`` of the PyTorch decoder.

    Raises ConfigError, with the numbers, if the largest bucket does not fit ``budget`` bytes.
    """
    config, sizes = model_config(model), check_buckets(buckets, max_batch)
    memory = plan_memory(config, sizes, max_seq_len, DTYPES[dtype], budget)
    regions = MemoryMap.plan(config, sizes[-1], max_seq_len, DTYPES[dtype]).regions
    return {"model": model, "dtype": dtype, "max_seq_len": max_seq_len, "memory": memory.as_dict(), "memory_map": [region.as_dict() for region in regions]}


def lines(found: dict[str, Any]) -> list[str]:
    memory = found["memory"]
    out = [f"{found['model']}, {found['dtype']}, {found['max_seq_len']} tokens a row", f"weights            {memory['weights'] / GIB:9.3f} GiB"]
    for bucket, state in memory["state"].items():
        out.append(
            f"bucket {bucket:<4} state  {state / GIB:9.3f} GiB, work space at most {memory['work'][bucket] / GIB:.3f} GiB" + ("" if bucket in memory["fits"] else ": does not fit")
        )
    out += ["", f"{'region':<10} {'offset':>14} {'bytes':>14}  shape"]
    return out + [f"{r['name']:<10} {r['offset']:>14} {r['bytes']:>14}  {r['shape']}" for r in found["memory_map"]]
