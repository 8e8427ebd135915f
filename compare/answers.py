"""The questions that bring people here, answered from the data: each with the run that the answer is of."""

from __future__ import annotations

from .evidence import pairs, passing
from .results import Results, label, measured, name_of
from .series import break_even, prefill_pay_back, recaptures
from .statistics import ratio_interval
from .workload import NEEDS_CUDA

NOT_HERE = "Not measured in these runs"


def answers(found: Results) -> list[tuple[str, list[str]]]:
    """(question, sentences) in the order in which a reader asks."""
    return [
        ("How much of a step is launch overhead?", _overhead(found)),
        ("What does a graph save?", _saved(found)),
        ("Is the answer the same?", _same(found)),
        ("When does capturing not pay?", _not_pay(found)),
        ("Which mode should I use?", _best(found)),
    ]


def _overhead(found: Results) -> list[str]:
    said = []
    for name, before, after in pairs(found):
        step, inside = before["step_ms"]["p50"], after["step_ms"]["p50"]
        if inside >= step:
            said.append(f"{name}: none that a graph removes; the step takes {step:.2f} ms without one and {inside:.2f} ms in it.")
            continue
        idle = f"; a trace shows the device idle for {before['idle_share']:.0%} of it" if "idle_share" in before else ""
        said.append(f"{name}: {1 - inside / step:.0%} of {step:.2f} ms, as the same kernels take {inside:.2f} ms in a graph{idle}.")
    return said or [f"{NOT_HERE}: that takes a GPU, and the same step with and without a graph."]


def _saved(found: Results) -> list[str]:
    said = []
    for name, before, after in pairs(found):
        times = ratio_interval(before["step_ms"]["samples"], after["step_ms"]["samples"], interleaved=True)
        cpu = [v.get("cpu_use", {}).get("dozing_ms") for v in (before, after)]
        work = f", CPU time a token {cpu[0]:.2f} ms and {cpu[1]:.2f} in a graph" if all(cpu) else ""
        said.append(f"{name}: steps {times.value:.2f} times as fast ({times.low:.2f} to {times.high:.2f}){work}.")
    return said or [f"{NOT_HERE}: no framework ran the same step with and without a graph."]


def _same(found: Results) -> list[str]:
    said = []
    for result in (r for r in found if "sweep" not in r and measured(r)):
        arms = measured(result)
        failed = [label(v) for v in arms if v["parity"]["verdict"] != "pass"]
        compared = [v["parity"].get("differing_bits") for v in arms if v["launch"] in NEEDS_CUDA and v["parity"].get("differing_bits") is not None]
        bits = f" {compared.count(0)} of {len(compared)} graph variants differ in no bit from the same step without a graph." if compared else ""
        verdict = f"not by {', '.join(failed)}" if failed else f"yes, all {len(arms)} variants pass against transformers in float32"
        said.append(f"{name_of(result)}: {verdict}.{bits}")
    return said or [f"{NOT_HERE}."]


def _not_pay(found: Results) -> list[str]:
    never = [(sentence, length) for sentence, length, calls in prefill_pay_back(found) if calls is None]
    said = [f"{sentence}." for sentence, _ in (*break_even(found), *recaptures(found))] + [f"{sentence}." for sentence, _ in never]
    return said or [f"{NOT_HERE}: compare run --sweep capture-costs measures it on a GPU."]


def _best(found: Results) -> list[str]:
    said = []
    for result in (r for r in found if "sweep" not in r):
        timed = list(passing(result).values())
        if not timed:
            continue
        best = min(timed, key=lambda v: v["step_ms"]["p50"])
        peers = [v for v in timed if v["framework"] == "transformers"]
        peer = min(peers, key=lambda v: v["step_ms"]["p50"]) if peers and best["framework"] != "transformers" else None
        against = f", {peer['step_ms']['p50'] / best['step_ms']['p50']:.2f} times as fast as {label(peer)}" if peer else ""
        cost = best.get("capture_s")
        capture = f"; capturing takes {cost * 1e3:.0f} ms" if cost is not None else ""
        said.append(f"{name_of(result)}, batch {result['workload']['batch']}: {label(best)}, {best['step_ms']['p50']:.2f} ms a step{against}{capture}.")
    return said or [f"{NOT_HERE}."]
