"""Sweeps: the same comparison at many points of one axis, each in a file of its own, so that a killed sweep goes on where it stopped."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import results
from .ceilings import ceilings
from .environment import environment, gpu
from .results import name_of, variant_of
from .run import Plan, bytes_needed, compare
from .shapes import SHAPES, is_shape
from .turns import Turns, together
from .workload import Variant, Workload

log = logging.getLogger(__name__)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192, 16384)
LAYERS = (2, 4, 8, 16, 32, 80)
UNEVEN_ROWS, UNEVEN_LONGEST, UNEVEN_MAXIMUM = 8, 1024, 4096
NEW_TOKENS = (16, 64, 256, 1024, 4096)
RECAPTURE = (1, 4, 16, 64, 256, 1024)
PREFILL = (16, 64, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class Sweep:
    """``points`` gives (value, workload, plan) of each point from the workload and plan that were asked for."""

    axis: str  # with its unit
    points: Callable[[Workload, Plan], list[tuple[str, Workload, Plan]]]


def _batches(workload: Workload, plan: Plan) -> list[tuple[str, Workload, Plan]]:
    return [(str(batch), replace(workload, batch=batch), plan) for batch in BATCHES]


def _contexts(workload: Workload, plan: Plan) -> list[tuple[str, Workload, Plan]]:
    """Prompts that fill the cache but for the new tokens."""
    lengths = [c for c in CONTEXTS if c > workload.new_tokens]
    return [(str(c), replace(workload, prompt_tokens=c - workload.new_tokens, max_seq_len=c), plan) for c in lengths]


def _layers(workload: Workload, plan: Plan) -> list[tuple[str, Workload, Plan]]:
    if not is_shape(workload.model):
        raise results.ResultError(f"--sweep layers changes the number of layers, and {workload.model} is a checkpoint: use --model shape:NAME")
    return [(str(n), replace(workload, model=f"{workload.model},num_hidden_layers={n}"), plan) for n in LAYERS]


def _lengths(workload: Workload, plan: Plan) -> list[tuple[str, Workload, Plan]]:
    """Rows of different lengths, three ways: padded to one, in a cache of the longest row, in one of the preallocated maximum.

    What reads masks pays for the whole cache, what reads lengths on the device for what is in it.
    """
    rows, longest = max(workload.batch, UNEVEN_ROWS), UNEVEN_LONGEST
    uneven = replace(workload, batch=rows, prompt_tokens=longest, uneven=True, max_seq_len=longest + workload.new_tokens)
    return [("padded", replace(uneven, uneven=False), plan), ("longest row", uneven, plan), ("maximum", replace(uneven, max_seq_len=UNEVEN_MAXIMUM), plan)]


def _models(workload: Workload, plan: Plan) -> list[tuple[str, Workload, Plan]]:
    return [(name, replace(workload, model=f"shape:{name}"), plan) for name in SHAPES]


def _costs(names: Sequence[str], workload: Workload, plan: Plan) -> list[tuple[str, Workload, Plan]]:
    """One point: all lengths are measured on one decoder of each variant, whose cache holds the longest."""
    lengths = {"cold": NEW_TOKENS, "recapture": RECAPTURE, "prefill": PREFILL}
    room = max(max(lengths[name]) for name in names) + workload.max_seq_len
    return [("all", replace(workload, max_seq_len=room), replace(plan, **{name: lengths[name] for name in names}))]


SWEEPS = {
    "batch": Sweep("rows", _batches),
    "context": Sweep("cache length in tokens, full", _contexts),
    "layers": Sweep("layers", _layers),
    "lengths": Sweep("rows of different lengths", _lengths),
    "models": Sweep("model", _models),
    "new-tokens": Sweep("new tokens", partial(_costs, ["cold"])),
    "recapture": Sweep("steps between two recordings of the graph", partial(_costs, ["recapture"])),
    "prefill": Sweep("prompt tokens", partial(_costs, ["prefill"])),
    "capture-costs": Sweep("tokens", partial(_costs, ["cold", "recapture", "prefill"])),
}


def run_sweep(name: str, workload: Workload, variants: Sequence[Variant], plan: Plan, folder: Path, at_once: int = 1) -> list[dict[str, Any]]:
    """Measure every point that has no finished file of the same question in ``folder``; the results of all points.

    ``at_once`` points are prepared together and timed one after the other. A point that cannot be
    measured ends in a file as well: its variants say why.
    """
    points = [Point(name, *point) for point in SWEEPS[name].points(workload, plan)]
    found = {point.value: _finished(folder / point.file, point.workload, variants, _how(point.plan)) for point in points}
    missing, seconds = [point for point in points if found[point.value] is None], []
    for first in range(0, len(missing), at_once):
        wave, started = missing[first : first + at_once], time.perf_counter()
        left = f", about {sum(seconds) / first * (len(missing) - first) / 60:.0f} min left" if first else ""
        log.info("%s %s (%d of %d%s)", name, ", ".join(point.value for point in wave), len(points) - len(missing) + first + 1, len(points), left)
        turns = Turns(len(wave), sum(bytes_needed(point.workload) for point in wave))
        for point, result in zip(wave, together([partial(point.measured, variants, folder, turns) for point in wave], turns)):
            found[point.value] = result
        seconds.append(time.perf_counter() - started)
    return [found[point.value] for point in points]


def run_models(models: Sequence[str], workload: Workload, variants: Sequence[Variant], plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """The same comparison of several models, prepared together and timed one after the other, each in a file of its own in ``folder``."""
    asked = [replace(workload, model=model) for model in models]
    turns = Turns(len(asked), sum(map(bytes_needed, asked)))

    def measured(one: Workload) -> dict[str, Any]:
        result = compare(one, variants, plan, turns)
        if turns.stopped:
            result = {**result, "interrupted": True}
            if not any("step_ms" in v for v in result["variants"]):
                return result
        results.save(result, folder / f"{name_of(result).replace(' ', '-')}.json")
        return result

    return together([partial(measured, one) for one in asked], turns)


@dataclass(frozen=True)
class Point:
    """One point of a sweep; its result goes into a file of its own."""

    sweep: str
    value: str
    workload: Workload
    plan: Plan

    @property
    def file(self) -> str:
        return f"{self.sweep}-{self.value.replace(' ', '-')}.json"

    def measured(self, variants: Sequence[Variant], folder: Path, turns: Turns) -> dict[str, Any]:
        """Measure it and save the result, as soon as it is there."""
        result = {**_measured(self.workload, variants, self.plan, turns), "sweep": {"name": self.sweep, "value": self.value, "how": _how(self.plan)}}
        results.save(result, folder / self.file)
        return result


def _measured(workload: Workload, variants: Sequence[Variant], plan: Plan, turns: Turns) -> dict[str, Any]:
    """The comparison, or a result whose variants say why there is none: later points must not fall with this one."""
    try:
        return compare(workload, variants, plan, turns)
    except results.ResultError as error:
        failed = [v.absent(workload.batch, str(error)) for v in variants]
        return results.make(asdict(workload), environment(), ceilings(False), failed)


def _how(plan: Plan) -> dict[str, Any]:
    """What besides the workload decides a figure, as a file holds it."""
    device = gpu()
    return json.loads(json.dumps({**{k: v for k, v in asdict(plan).items() if k != "prepare_limit"}, "gpu": device["name"] if device else None}))


def _finished(file: Path, workload: Workload, variants: Sequence[Variant], how: dict[str, Any]) -> dict[str, Any] | None:
    """The result in ``file`` if it answers this very question and no worker crashed; a damaged file is measured again."""
    if not file.exists():
        return None
    try:
        result = results.load(file)
    except results.ResultError as error:
        log.warning("%s; measuring it again", error)
        return None
    same = result["workload"] == asdict(workload) and {variant_of(v) for v in result["variants"]} == set(variants) and result.get("sweep", {}).get("how") == how
    return result if same and not any("worker ended" in v.get("not_measured", "") for v in result["variants"]) else None
