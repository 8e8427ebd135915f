"""The result file: one JSON object a run, checked when written and when read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .workload import Variant

SCHEMA_VERSION = 1
Results = Sequence[dict[str, Any]]
_TOP = ("schema_version", "created", "workload", "environment", "ceilings", "variants")
_VARIANT = ("framework", "launch", "kernels", "sampling", "batch", "bucket")


class ResultError(Exception):
    """A result file that is damaged, of another schema, or says less than it must."""


def make(workload: dict[str, Any], environment: dict[str, Any], ceilings: dict[str, Any], variants: list[dict[str, Any]]) -> dict[str, Any]:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    result = {"schema_version": SCHEMA_VERSION, "created": created, "workload": workload, "environment": environment, "ceilings": ceilings, "variants": variants}
    check(result, "this run")
    return result


def save(result: dict[str, Any], path: Path) -> None:
    """Check it and write it whole."""
    check(result, str(path))
    write_whole(path, as_text(result) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write next to the target and rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def as_text(value: Any) -> str:
    """JSON with a line for each field, and lists of numbers on one line."""
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: " ".join(found[0].split()), json.dumps(value, indent=1))


def variant_of(entry: dict[str, Any]) -> Variant:
    """Which variant an entry of ``variants`` is of."""
    return Variant(*(entry[name] for name in ("framework", "launch", "kernels", "sampling")))


def label(entry: dict[str, Any]) -> str:
    """A variant's name for readers: what is usual goes without saying."""
    special = [word for word, usual in ((entry["kernels"], "plain"), (entry["sampling"], "greedy")) if word != usual]
    return f"{entry['framework']} {entry['launch']}" + (f" ({', '.join(special)})" if special else "")


def measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of the variants that were timed."""
    return [v for v in result["variants"] if "step_ms" in v]


def name_of(result: dict[str, Any]) -> str:
    """The model of a run, and its batch where that is not 1."""
    w = result["workload"]
    return Path(w["model"]).name.removeprefix("shape:") + ("" if w["batch"] == 1 else f" batch {w['batch']}")


def load(path: str | Path) -> dict[str, Any]:
    """Read and check a result file; ResultError says found, expected, remedy."""
    path = Path(path).expanduser()
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ResultError(f"{path}: cannot be read ({error.strerror}), expected a result file of `compare run`") from None
    except ValueError as error:
        raise ResultError(f"{path}: {path.stat().st_size} bytes that are not JSON ({error}): probably cut off, measure again") from None
    check(result, str(path))
    return result


def check(result: Any, source: str) -> None:
    if not isinstance(result, dict) or result.get("schema_version") != SCHEMA_VERSION:
        found = result.get("schema_version") if isinstance(result, dict) else type(result).__name__
        raise ResultError(f"{source}: schema_version is {found!r}, expected {SCHEMA_VERSION}: measure again with this version")
    if missing := [name for name in _TOP if name not in result]:
        raise ResultError(f"{source}: {', '.join(missing)} missing: the file is not whole, measure again")
    for number, variant in enumerate(result["variants"]):
        if missing := [name for name in _VARIANT if name not in variant]:
            raise ResultError(f"{source}: variant {number} has no {', '.join(missing)}: measure again")
        if "step_ms" in variant and "verdict" not in (variant.get("parity") or {}):
            raise ResultError(f"{source}: variant {number} has a latency and no parity verdict: such a number is not shown, measure again")
        if "step_ms" not in variant and "not_measured" not in variant:
            raise ResultError(f"{source}: variant {number} has neither a latency nor a reason in not_measured: measure again")
