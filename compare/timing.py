"""Clocks: interleaved arms, one process, everything compiled and warm before the first sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .ranges import span
from .statistics import FEWEST, drift, median_interval

STEPS_A_BLOCK = {"cpu": 4, "cuda": 32}  # on a GPU many, so that starting and waiting weigh little
STEPS_IN_FLIGHT = 8  # of which the host's time to enqueue is taken: a full queue would make it the device's
WARM_UP_STEPS = 3
CLOCKS_AGREE = 0.02  # part by which the device's clock may exceed the host's


class MeasurementError(Exception):
    """Clocks that contradict each other, or a measurement that was disturbed."""


class Arm(Protocol):
    """What timing needs of a variant; worker.py makes them."""

    def restart(self) -> None:
        """Go back to the end of the prompt."""

    def steps(self, count: int) -> None:
        """Enqueue that many decode steps."""

    def wait(self) -> None:
        """Return when the device has done everything."""

    def doze(self) -> None:
        """As ``wait``, but leave the processor to others meanwhile."""

    def mark(self) -> Any:
        """A CUDA event recorded now, with ``elapsed_time``; None where the framework gives none."""

    def compilations(self) -> int:
        """How often anything was compiled so far."""


def time_steps(arms: Sequence[Arm], rounds: int, steps_available: int, block: int = STEPS_A_BLOCK["cpu"], between: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Time decode steps of all arms, interleaved ABBA; one result an arm.

    Each sample is the wall time of ``block`` steps ended by a wait, divided by their number; ``event_ms``
    is the same by CUDA events, where there are any. ``steps_available`` is how many steps fit between
    restarts; ``between`` is called before each round. Raises MeasurementError if a step compiled
    something while it was timed, or if the device's clock shows more time than the host's.
    """
    block = min(block, steps_available - WARM_UP_STEPS)
    for arm in arms:
        arm.restart()
        for _ in range(WARM_UP_STEPS):
            arm.steps(1)
        arm.steps(block)
        arm.restart()
        arm.wait()
    before = [arm.compilations() for arm in arms]
    blocks: list[list[Block]] = [[] for _ in arms]
    left = [steps_available] * len(arms)
    for round_number in range(rounds):
        between()
        order = range(len(arms)) if round_number % 2 == 0 else range(len(arms) - 1, -1, -1)
        for i in order:
            if left[i] < block:
                arms[i].restart()
                left[i] = steps_available
            left[i] -= block
            with span(f"{arms[i]}: {block} steps"):
                blocks[i].append(_block(arms[i], block))
    for arm, count in zip(arms, before):
        if arm.compilations() != count:
            raise MeasurementError(f"{arm}: {arm.compilations() - count} compilations inside the measurement: its times mean nothing")
    return [_clocks(arm, of_arm) for arm, of_arm in zip(arms, blocks)]


class Block(NamedTuple):
    """Seconds a step: wall, to enqueue one of the first few, CPU time of the process, and by CUDA events."""

    wall_s: float
    dispatch_s: float
    cpu_s: float
    event_s: float | None


def _block(arm: Arm, steps: int) -> Block:
    arm.wait()
    first = min(steps, STEPS_IN_FLIGHT)
    started, cpu_started, begin = time.perf_counter(), time.process_time(), arm.mark()
    arm.steps(first)
    enqueued = time.perf_counter()
    if steps > first:
        arm.steps(steps - first)
    end = arm.mark()
    arm.wait()
    ended, cpu_ended = time.perf_counter(), time.process_time()
    event_s = None if begin is None else begin.elapsed_time(end) / 1e3 / steps
    return Block((ended - started) / steps, (enqueued - started) / first, (cpu_ended - cpu_started) / steps, event_s)


def _clocks(arm: Arm, blocks: Sequence[Block]) -> dict[str, Any]:
    """A result's clocks. Raises MeasurementError if they contradict each other."""
    step_ms = quantiles([block.wall_s * 1e3 for block in blocks])
    found = {"step_ms": step_ms, "host_dispatch_us": float(np.median([b.dispatch_s for b in blocks])) * 1e6, "cpu_ms_per_step": float(np.median([b.cpu_s for b in blocks])) * 1e3}
    events = [block.event_s * 1e3 for block in blocks if block.event_s is not None]
    if not events:
        return found
    event_ms = float(np.median(events))
    if event_ms > step_ms["p50"] * (1 + CLOCKS_AGREE):
        raise MeasurementError(f"{arm}: CUDA events say {event_ms:.4f} ms a step, the host's clock {step_ms['p50']:.4f}: one of them is wrong")
    return {**found, "event_ms": event_ms}


def harness_us(block: int, blocks: int = 50) -> float:
    """µs a step that the harness itself adds: the clock's reading of steps that do nothing."""
    return time_steps([_Nothing()], blocks, block * (blocks + 1), block)[0]["step_ms"]["p50"] * 1e3


class _Nothing:
    """An arm whose steps do nothing."""

    def restart(self) -> None: ...
    def steps(self, count: int) -> None: ...
    def wait(self) -> None: ...
    def doze(self) -> None: ...
    def mark(self) -> None: ...
    def compilations(self) -> int:
        return 0


def quantiles(samples: Sequence[float]) -> dict[str, Any]:
    """p10, p50 with its 95 % interval, p90, every sample in the order of time, and how they drift."""
    p10, p50, p90 = (float(np.quantile(samples, q)) for q in (0.1, 0.5, 0.9))
    _, low, high = median_interval(samples)
    return {"p10": p10, "p50": p50, "p90": p90, "p50_interval": [low, high] if len(samples) >= FEWEST else None, "drift": drift(samples), "samples": [float(s) for s in samples]}


def time_generations(generate: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Median seconds of whole generations, interleaved; run each once before."""
    seconds: list[list[float]] = [[] for _ in generate]
    for round_number in range(repeats):
        order = range(len(generate)) if round_number % 2 == 0 else range(len(generate) - 1, -1, -1)
        for i in order:
            started = time.perf_counter()
            with span("generation"):
                generate[i]()
            seconds[i].append(time.perf_counter() - started)
    return [float(np.median(s)) for s in seconds]


def cpu_use(arms: Sequence[Arm], steps: int) -> list[dict[str, float]]:
    """What each arm asks of the CPU when every step is waited for, as a server does that sends each token on.

    ``spinning_ms`` and ``dozing_ms`` are CPU time of the process a step, ``_share`` the same over
    the wall time (1: one core all the time). The usual wait of both frameworks spins, so it shows a
    busy core whatever the device does; a wait that dozes shows the work.
    """
    found = []
    for arm in arms:
        use: dict[str, float] = {}
        for name, wait in (("spinning", arm.wait), ("dozing", arm.doze)):
            arm.restart()
            arm.steps(WARM_UP_STEPS)
            wait()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                arm.steps(1)
                wait()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            use |= {f"{name}_ms": cpu / steps * 1e3, f"{name}_share": cpu / wall}
        found.append(use)
    return found
