"""``python -m compare run|parity|report|timeline|model|diff|plan|program|doctor``. Exit 0 good, 1 a parity check failed or a variant became slower, 2 bad input."""

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
from .timing import MeasurementError
from .workload import VARIANTS, Variant, Workload

DEMO_MODEL = "models/smollm2-135m-instruct"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m compare", description="Compare decoders with and without graphs: parity and speed.")
    commands = p.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure every variant that this machine has")
    run.add_argument("--model", default=DEMO_MODEL, help="model directory, or shape:NAME for random weights at a published shape (default: %(default)s)")
    run.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)")
    run.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    run.add_argument("--new-tokens", type=int, default=64, help="new tokens a row (default: %(default)s)")
    run.add_argument("--max-seq-len", type=int, default=128, help="cache length in tokens (default: %(default)s)")
    run.add_argument("--rounds", type=int, default=12, help="timed blocks of steps for each variant: 4 on a CPU, 32 on a GPU (default: %(default)s)")
    run.add_argument("--repeats", type=int, default=3, help="timed generations for each variant (default: %(default)s)")
    run.add_argument("--only", nargs="+", metavar="WORD", help="only variants whose label holds one of these words")
    run.add_argument("--without", nargs="+", metavar="WORD", default=[], help="no variant whose label holds one of these words")
    run.add_argument("--no-ledger", action="store_true", help="do not count driver calls (on a GPU they are counted after all else)")
    run.add_argument("--prepare-limit", type=float, default=float("inf"), metavar="SECONDS", help="begin no variant after so many seconds of preparing others of its framework")
    run.add_argument("--xla-flags", action="store_true", help="give this project's XLA flags to the JAX worker as XLA_FLAGS, not as compiler options alone")
    run.add_argument(
        "--xla-flag", action="append", default=[], metavar="NAME=VALUE", help="an XLA compiler option of your own for every step, or with --xla-flags a flag; repeatable"
    )
    run.add_argument("--out", default="compare/results/local/run.json", help="result file (default: %(default)s)")
    run.add_argument("--report", help="also write the HTML report here")
    run.add_argument("--json", action="store_true", help="print the result object in place of the table")
    parity = commands.add_parser("parity", help="climb layer by layer and name what differs first")
    parity.add_argument("--model", default=DEMO_MODEL, help="model directory (default: %(default)s)")
    parity.add_argument("--reference", default="transformers", help="transformers, or another model directory (default: %(default)s)")
    parity.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)")
    parity.add_argument("--framework", choices=("torch", "jax"), help="one decoder only (default: both)")
    report = commands.add_parser("report", help="make the HTML report of a result file, without measuring")
    report.add_argument("result", help="result file of `compare run`")
    report.add_argument("--out", default="report.html", help="the page to write (default: %(default)s)")
    timeline = commands.add_parser("timeline", help="idle time of each traced step, and the steps as a trace for Perfetto")
    timeline.add_argument("result", help="result file of `compare run` from a GPU")
    timeline.add_argument("--out", default="timeline.json", help="the Chrome trace to write (default: %(default)s)")
    model = commands.add_parser("model", help="step times predicted from launches and kernel times: fitted on the first run, tested on the others")
    model.add_argument("results", nargs="+", help="result files of `compare run` from one GPU; the first one is fitted")
    diff = commands.add_parser("diff", help="which variants became slower beyond the noise, or lost their parity: exit 1")
    diff.add_argument("before", help="result file of `compare run`")
    diff.add_argument("after", help="another one of the same workload, from the same machine")
    diff.add_argument("--tolerance", type=float, default=0.02, help="part of a step time by which two runs of the same code may differ (default: %(default)s)")
    plan = commands.add_parser("plan", help="memory of weights, cache and state, bucket by bucket, before anything is loaded")
    plan.add_argument("--model", default=DEMO_MODEL, help="model directory, or shape:NAME (default: %(default)s)")
    plan.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="default: %(default)s")
    plan.add_argument("--max-batch", type=int, default=8, help="rows at once (default: %(default)s)")
    plan.add_argument("--buckets", type=int, nargs="+", help="batch sizes with a graph each (default: powers of two up to --max-batch)")
    plan.add_argument("--max-seq-len", type=int, default=2048, help="cache length in tokens (default: %(default)s)")
    plan.add_argument("--memory-gib", type=float, help="what may be used, in GiB (default: no limit)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    program = commands.add_parser("program", help="the JAX step as compiled for an H200, on a machine without a GPU: command buffers, arrays, copies")
    program.add_argument("--model", default=DEMO_MODEL, help="model directory, or shape:NAME (default: %(default)s)")
    program.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="default: %(default)s")
    program.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    program.add_argument("--kind", default="greedy", choices=("greedy", "sampled"), help="default: %(default)s")
    program.add_argument("--kernels", default="plain", choices=("plain", "fused"), help="default: %(default)s")
    program.add_argument("--max-seq-len", type=int, default=1024, help="cache length in tokens (default: %(default)s)")
    program.add_argument("--xla-flag", action="append", default=[], metavar="NAME=VALUE", help="an XLA compiler option of your own; repeatable")
    program.add_argument("--dump", metavar="DIR", help="keep XLA's texts (HLO, buffers, thunks) in this folder")
    program.add_argument("--json", action="store_true", help="print one JSON object")
    doctor = commands.add_parser("doctor", help="what this machine has and which variants can run")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def _run(args: argparse.Namespace) -> int:
    from .models import model_config
    from .run import Plan, compare
    from .table import print_table

    workload = Workload(args.model, args.dtype, args.batch, args.new_tokens, args.max_seq_len)
    model_config(workload.model)  # bad input is found before any worker starts
    variants = chosen(args.only, args.without)
    result = compare(workload, variants, Plan(args.rounds, args.repeats, not args.no_ledger, *xla_settings(args.xla_flag, args.xla_flags), args.prepare_limit))
    results.save(result, Path(args.out))
    if args.report:
        from .report import write

        write(result, Path(args.report))
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
    verdicts = [v["parity"]["verdict"] for v in result["variants"] if "parity" in v]
    crashed = [v for v in result["variants"] if "worker ended" in v.get("not_measured", "")]
    return 0 if verdicts and set(verdicts) == {"pass"} and not crashed else 1


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

    write(results.load(args.result), Path(args.out))
    print(args.out)
    return 0


def _timeline(args: argparse.Namespace) -> int:
    from .timeline import chrome_trace, lines

    result = results.load(args.result)
    Path(args.out).write_text(json.dumps(chrome_trace(result)))
    print("\n".join([*lines(result), args.out]))
    return 0


def _model(args: argparse.Namespace) -> int:
    from .launch_model import evaluate, lines

    print("\n".join(lines(*evaluate([results.load(file) for file in args.results]))))
    return 0


def _diff(args: argparse.Namespace) -> int:
    from .diff import changes, worse

    found, alone = changes(results.load(args.before), results.load(args.after), args.tolerance)
    print("\n".join([*(change.line() for change in found), *alone]))
    return 1 if worse(found) else 0


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
        return {"run": _run, "parity": _parity, "report": _report, "timeline": _timeline, "model": _model, "diff": _diff, "plan": _plan, "program": _program, "doctor": _doctor}[
            args.command
        ](args)
    except (JaxError, TorchError, results.ResultError, MeasurementError, OSError) as error:
        print(f"compare: {error}".replace("\n", "; "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
