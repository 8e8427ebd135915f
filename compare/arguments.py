"""The command line's arguments; importing this imports nothing heavy, so that --help is quick."""

from __future__ import annotations

import argparse

DEMO_MODEL = "models/smollm2-135m-instruct"
DEFAULT_RESULT = "compare/results/local/run.json"
SWEEPS = ("batch", "context", "layers", "lengths", "models", "new-tokens", "recapture", "prefill", "capture-costs")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m compare", description="Compare decoders with and without graphs: parity and speed.")
    commands = p.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure every variant that this machine has")
    run.add_argument(
        "--model",
        nargs="+",
        default=[DEMO_MODEL],
        metavar="MODEL",
        help=f"model directory, or shape:NAME for random weights at a published shape (default: {DEMO_MODEL}); several are prepared side by side and timed one after the other, each in a file of its own in the folder --out",
    )
    run.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)")
    run.add_argument("--batch", type=int, default=1, help="rows (default: %(default)s)")
    run.add_argument("--new-tokens", type=int, default=64, help="new tokens a row (default: %(default)s)")
    run.add_argument("--max-seq-len", type=int, default=128, help="cache length in tokens (default: %(default)s)")
    run.add_argument("--prompt-tokens", type=int, help="length of every prompt, of ids made by a rule (default: short texts)")
    run.add_argument("--uneven", action="store_true", help="prompts of different lengths, from an eighth of --prompt-tokens up to it")
    run.add_argument("--sweep", choices=SWEEPS, help="measure at many points, each in a file of its own in the folder --out; run again to go on where it stopped")
    run.add_argument("--at-once", type=int, default=1, help="points of a sweep that are prepared side by side, and timed one after the other (default: %(default)s)")
    run.add_argument("--processes", type=int, default=1, help="time everything so often, in fresh processes each time, and say how far the runs agree (default: %(default)s)")
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
    run.add_argument("--out", default=DEFAULT_RESULT, help="result file, or folder of a sweep (default: %(default)s, or a folder beside it)")
    run.add_argument("--report", help="also write the HTML report here")
    run.add_argument("--json", action="store_true", help="print the result object in place of the table")
    parity = commands.add_parser("parity", help="climb layer by layer and name what differs first")
    parity.add_argument("--model", default=DEMO_MODEL, help="model directory (default: %(default)s)")
    parity.add_argument("--reference", default="transformers", help="transformers, or another model directory (default: %(default)s)")
    parity.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)")
    parity.add_argument("--framework", choices=("torch", "jax"), help="one decoder only (default: both)")
    report = commands.add_parser("report", help="make the HTML report of result files, without measuring")
    report.add_argument("results", nargs="+", help="result files of `compare run`, or folders of them: the first is shown at length, all of them side by side")
    report.add_argument("--out", default="report.html", help="the page to write (default: %(default)s)")
    timeline = commands.add_parser("timeline", help="idle time of each traced step, and the steps as a trace for Perfetto")
    timeline.add_argument("result", help="result file of `compare run` from a GPU")
    timeline.add_argument("--out", default="timeline.json", help="the Chrome trace to write (default: %(default)s)")
    model = commands.add_parser("model", help="step times predicted from launches and kernel times: fitted on the first run, tested on the others")
    model.add_argument("results", nargs="+", help="result files of `compare run` from one GPU; the first one is fitted")
    model.add_argument("--write", action="store_true", help="also write each prediction into its file, as predicted")
    claims = commands.add_parser("claims", help="each claim about CUDA graphs in decoding, what was measured, and a verdict")
    claims.add_argument("results", nargs="*", default=["compare/results/h200"], help="result files, or folders of them (default: the committed results of an H200)")
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
