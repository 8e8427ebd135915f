"""The ledger: what the host asks of the CUDA driver during decode steps, counted call by call.

Counting slows every call down, so it begins when all that a process times has been timed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STEPS = 20

# Kinds of driver call, by the first pattern that fits the function's name.
_KINDS = (
    ("graph_updates", r"cuGraphExec(Update|.*Set(Params|Enabled|Attribute))"),
    ("graph_launches", r"cuGraphLaunch"),
    ("other_launches", r"cuLaunch(Kernel|Cooperative)"),
    ("host_functions", r"cuLaunchHostFunc"),  # XLA enqueues one a run, to hear when it has ended
    ("memory_operations", r"cuMem(cpy|set|Alloc|Free)|cuGraphMem"),
    ("synchronisations", r"cu(Ctx|Stream|Event)Synchronize"),
)


class LedgerError(Exception):
    """Driver calls cannot be counted here."""


def kind_of(name: str) -> str | None:
    """The kind of a driver call by its name, or None where it is of none that is counted."""
    return next((kind for kind, pattern in _KINDS if re.match(pattern, name)), None)


def tally(calls: Counter[str]) -> dict[str, int]:
    """Calls of each kind: graph_updates, graph_launches, other_launches (of kernels), host_functions, memory_operations, synchronisations."""
    found = dict.fromkeys((kind for kind, _ in _KINDS), 0)
    for name, count in calls.items():
        if (kind := kind_of(name)) is not None:
            found[kind] += count
    return found


def load_cupti() -> Any:
    """CUPTI's bindings; LedgerError if they are not installed."""
    try:
        from cupti import cupti
    except ImportError:
        raise LedgerError("cupti-python is not installed: pip install cupti-python, in the version that fits the driver") from None
    return cupti


class Ledger:
    """Counts calls of the CUDA driver by name, in the whole process, while ``counting``."""

    def __init__(self) -> None:
        """Raises LedgerError without cupti-python, or where another tool holds CUPTI."""
        cupti = load_cupti()
        self._cupti, self.calls = cupti, Counter[str]()
        try:
            self._subscriber = cupti.subscribe(self._called, None)
        except Exception as error:  # the bindings raise one class for every CUPTI status
            raise LedgerError(f"CUPTI cannot be subscribed to ({error}): another profiler may hold it") from error

    def _called(self, user: Any, domain: Any, function: Any, data: Any) -> None:
        if data.callback_site == self._cupti.ApiCallbackSite.API_ENTER:
            self.calls[data.function_name] += 1

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Count from here to the end of the block; gives the counter, emptied first."""
        self.calls.clear()
        domain = self._cupti.CallbackDomain.DRIVER_API
        self._cupti.enable_domain(1, self._subscriber, domain)
        try:
            yield self.calls
        finally:
            self._cupti.enable_domain(0, self._subscriber, domain)

    def close(self) -> None:
        self._cupti.unsubscribe(self._subscriber)


def count_arms(arms: Sequence[Any]) -> list[dict[str, Any]]:
    """``count_steps`` of each arm, or ``not_measured`` with the reason. Time nothing in this process afterwards."""
    try:
        ledger = Ledger()
    except LedgerError as error:
        return [{"not_measured": str(error)} for _ in arms]
    counted = [_counted(ledger, arm) for arm in arms]
    ledger.close()
    return counted


def _counted(ledger: Ledger, arm: Any) -> dict[str, Any]:
    try:
        return count_steps(ledger, arm, min(STEPS, len(arm.forced[0]) - 1))
    except Exception as error:  # the times that were measured before must not be lost with the counts
        return {"not_measured": f"{type(error).__name__}: {error}"}


def count_steps(ledger: Ledger, arm: Any, steps: int) -> dict[str, Any]:
    """Calls during ``steps`` steps of a warm arm, without the wait after them: steps, kinds, and calls by name."""
    for _ in range(2):  # the first time records or compiles what the second one finds ready
        arm.restart()
        arm.steps(steps)
    arm.restart()
    arm.wait()
    with ledger.counting() as calls:
        arm.steps(steps)
        counted = Counter(calls)
    arm.wait()
    return {"steps": steps, **tally(counted), "calls": dict(sorted(counted.items()))}


def with_counts(result: dict[str, Any], ledger: dict[str, Any]) -> dict[str, Any]:
    """A variant's result object with its ledger, and with calls a step where they were counted."""
    names = () if "not_measured" in ledger else ("graph_launches", "other_launches", "graph_updates")
    return {**result, "ledger": ledger, **{f"{name}_per_step": ledger[name] / ledger["steps"] for name in names}}
