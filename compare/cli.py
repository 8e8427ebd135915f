"""``python -m compare run|parity|report|timeline|model|claims|diff|plan|program|doctor``. Exit 0 good, 1 a parity check failed or a variant became slower, 2 bad input."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_decoder import DecoderError as JaxError
from torch_decoder import DecoderError as TorchError

from . import results
from .arguments import DEFAULT_RESULT, parser
from .timing import MeasurementError
from .workload import VARIANTS, Variant, Workload

COMMITTED = Path(__file__).parent / "results" / "h200"


def _run(args: argparse.Namespace) -> int:
    from .models import model_config
    from .run import Plan, compare
    from .table import print_table

    workload = Workload(args.model[0], args.dtype, args.batch, args.new_tokens, args.max_seq_len, args.prompt_tokens, args.uneven)
    if args.sweep != "models":
        for model in args.model:  # bad input is found before any worker starts
            model_config(model)
    variants = chosen(args.only, args.without)
    for name in ("at_once", "processes", "rounds", "repeats"):
        if getattr(args, name) < 1:
            raise results.ResultError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    if args.at_once > 1 and args.processes > 1:
        raise results.ResultError("--at-once and --processes are both above 1: points prepared side by side are timed in one set of processes, leave one of them out")
    plan = Plan(args.rounds, args.repeats, not args.no_ledger, *xla_settings(args.xla_flag, args.xla_flags), args.prepare_limit, processes=args.processes)
    if len(args.model) > 1:
        return _several(args, workload, variants, plan)
    if args.sweep:
        return _sweep(args, workload, variants, plan)
    result = compare(workload, variants, plan)
    results.save(result, Path(args.out))
    if args.report:
        from .report import write

        write(_with_committed([result]), Path(args.report))
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
    if result.get("interrupted"):
        print(f"compare: interrupted; {args.out} holds what was measured until then", file=sys.stderr)
        return 2
    return 0 if _good(result) else 1


def _several(args: argparse.Namespace, workload: Workload, variants: Sequence[Variant], plan: Plan) -> int:
    from .sweep import run_models
    from .table import print_table

    if args.sweep or args.processes > 1:
        raise results.ResultError("--model names several models: leave out --sweep and --processes, or name one model")
    folder = Path(args.out) if args.out != DEFAULT_RESULT else Path(DEFAULT_RESULT).parent
    names = [Path(model).name for model in args.model]
    if len(set(names)) < len(names):
        raise results.ResultError(f"--model names {', '.join(names)}, of which two are alike, so their files would be: measure them one at a time")
    if folder.suffix == ".json":
        raise results.ResultError(f"--out is {args.out}, expected a folder: several models write a file each")
    found = run_models(args.model, workload, variants, plan, folder)
    if args.report:
        from .report import write

        write(_with_committed(found), Path(args.report))
    if args.json:
        print(json.dumps(found))
    else:
        for result in found:
            print_table(result)
    return 0 if all(map(_good, found)) else 1


def _sweep(args: argparse.Namespace, workload: Workload, variants: Sequence[Variant], plan: Plan) -> int:
    from .series import lines
    from .sweep import run_sweep

    asked = "" if args.sweep == "models" else f"-{Path(args.model[0]).name}"
    folder = Path(args.out) if args.out != DEFAULT_RESULT else Path(DEFAULT_RESULT).with_name(f"sweep-{args.sweep}{asked}-{args.dtype}")
    if folder.suffix == ".json":
        raise results.ResultError(f"--out is {args.out}, expected a folder: a sweep writes a file a point")
    found = run_sweep(args.sweep, workload, variants, plan, folder, args.at_once)
    print(json.dumps(found) if args.json else "\n".join([*lines(args.sweep, found), str(folder)]))
    return 0 if all(map(_good, found)) else 1


def _good(result: dict[str, Any]) -> bool:
    """Every verdict there is says pass, there is one, and no worker crashed."""
    verdicts = [v["parity"]["verdict"] for v in result["variants"] if "parity" in v]
    crashed = [v for v in result["variants"] if "worker ended" in v.get("not_measured", "")]
    return bool(verdicts) and set(verdicts) == {"pass"} and not crashed


def chosen(only: Sequence[str] | None, without: Sequence[str]) -> list[Variant]:
    """The variants whose labels hold a word of ``only``, if there are any, and none of ``without``. ResultError if none is left."""
    words = {v: v.label().split() for v in VARIANTS}
    known = {word for label in words.values() for word in label}
    if odd := [word for word in (*(only or ()), *without) if word not in known]:
        raise results.ResultError(f"{', '.join(odd)}: no variant's label holds that, expected words of: {', '.join(v.label() for v in VARIANTS)}")
    found = [v for v in VARIANTS if (not only or set(only) & set(words[v])) and not set(without) & set(words[v])]
    if not found:
        asked = " ".join([*(["--only", *only] if only else []), *(["--without", *without] if without else [])])
        raise results.ResultError(f"{asked} leaves no variant, expected words of: {', '.join(v.label() for v in VARIANTS)}")
    return found


def xla_settings(words: Sequence[str], in_environment: bool) -> tuple[str, dict[str, str]]:
    """XLA_FLAGS and compiler options from the command line. ConfigError for a name that XLA does not know."""
    from jax_decoder import ConfigError, xla_flags

    options = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not name or not equals:
            raise ConfigError(f"--xla-flag is {word!r}, expected NAME=VALUE")
        options[name] = value
    flags = xla_flags.as_environment(options)
    if flags and (refused := xla_flags.unknown(flags)):
        raise ConfigError(f"--xla-flag names {', '.join(refused)}, which the installed jaxlib does not accept: see `compare doctor` for those it knows")
    if not in_environment:
        return "", options
    return xla_flags.as_environment({**xla_flags.step_options(True, "gpu"), **options}, process=True), {}


def _parity(args: argparse.Namespace) -> int:
    from .ladder import climb

    failed = False
    for framework in (args.framework,) if args.framework else ("torch", "jax"):
        rungs = climb(args.model, framework, args.dtype, args.reference)
        worst = max(rungs, key=lambda r: r.error / r.allowed)
        first = next((r for r in rungs if not r.passed), None)
        if first is None:
            print(f"{framework}: pass, {len(rungs)} stages; closest to its bar is {worst.stage}: {worst.error:.2e} of {worst.allowed:.2e}")
            continue
        failed = True
        print(
            f"{framework}: FAIL at {first.stage}, index {list(first.index)}: {first.ours:.6g}, reference {first.reference:.6g} (error {first.error:.2e}, allowed {first.allowed:.2e})"
        )
        print(f"  look at: {first.suspect}")
    return 1 if failed else 0


def _report(args: argparse.Namespace) -> int:
    from .report import write

    write(_with_committed(_loaded(args.results)), Path(args.out), _outcomes(args.results))
    print(args.out)
    return 0


def _timeline(args: argparse.Namespace) -> int:
    from .timeline import chrome_trace, lines

    result = results.load(args.result)
    Path(args.out).write_text(json.dumps(chrome_trace(result)))
    print("\n".join([*lines(result), args.out]))
    return 0


def _model(args: argparse.Namespace) -> int:
    from .launch_model import evaluate, lines, with_predictions

    files = _files(args.results)
    found = [results.load(file) for file in files]
    constants, predictions = evaluate(found)
    if args.write:
        for file, result in zip(files, found):
            results.save(with_predictions(result, constants, predictions), file)
    print("\n".join(lines(constants, predictions)))
    return 0


def _claims(args: argparse.Namespace) -> int:
    from .claims import lines, table

    print("\n".join(lines(table(_loaded(args.results), _outcomes(args.results)))))
    return 0


def _with_committed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of machines without a GPU with the committed ones of an H200 behind them: what such a machine cannot show."""
    if any(result["environment"]["gpu"] for result in found):
        return found
    return found + [results.load(file) for file in sorted(COMMITTED.rglob("*.json"))]


def _loaded(words: Sequence[str]) -> list[dict[str, Any]]:
    """The results of files and of folders of files, in order."""
    return [results.load(file) for file in _files(words)]


def _files(words: Sequence[str]) -> list[Path]:
    """Result files, and those in folders and the folders in them. ResultError if there is none."""
    files = [file for word in map(Path, words) for file in (sorted(word.rglob("*.json")) if word.is_dir() else [word])]
    if not files:
        raise results.ResultError(f"{', '.join(words)}: no result files, expected those of `compare run`: name them, or a folder that holds them")
    return files


def _outcomes(words: Sequence[str]) -> dict[str, str]:
    """What the tests came to of GPU lanes whose folders are named."""
    from .claims import lane_outcomes

    return {name: outcome for folder in map(Path, words) if folder.is_dir() for name, outcome in lane_outcomes(folder).items()}


def _diff(args: argparse.Namespace) -> int:
    from .diff import changes, stopped, worse

    before, after = results.load(args.before), results.load(args.after)
    found, alone = changes(before, after, args.tolerance)
    broken = stopped(before, after)
    print("\n".join([*(change.line() for change in found), *broken, *alone]))
    return 1 if worse(found) or broken else 0


def _plan(args: argparse.Namespace) -> int:
    from .planner import lines, plan

    budget = None if args.memory_gib is None else int(args.memory_gib * 2**30)
    found = plan(args.model, args.dtype, args.max_batch, args.buckets, args.max_seq_len, budget)
    print(json.dumps(found) if args.json else "\n".join(lines(found)))
    return 0


def _program(args: argparse.Namespace) -> int:
    from .models import model_config
    from .program import describe, lines

    model_config(args.model)
    for name in ("batch", "max_seq_len"):
        if getattr(args, name) < 1:
            raise results.ResultError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    found = describe(args.model, args.dtype, args.batch, args.kind, args.max_seq_len, xla_settings(args.xla_flag, False)[1], args.dump, args.kernels)
    print(json.dumps(found) if args.json else "\n".join(lines(found)))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import diagnose, lines

    found: dict[str, Any] = diagnose()
    print(json.dumps(found) if args.json else "\n".join(lines(found)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("compare").setLevel(logging.INFO)
    try:
        return {
            "run": _run,
            "parity": _parity,
            "report": _report,
            "timeline": _timeline,
            "model": _model,
            "claims": _claims,
            "diff": _diff,
            "plan": _plan,
            "program": _program,
            "doctor": _doctor,
        }[args.command](args)
    except (JaxError, TorchError, results.ResultError, MeasurementError, OSError) as error:
        print(f"compare: {error}".replace("\n", "; "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
