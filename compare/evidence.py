"""What result files say of a claim: each function looks at all results and gives what was seen, and a verdict.

Only figures with a passing verdict count. Nothing seen: not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from .launch_model import evaluate, median_errors, quickest, terms
from .results import Results, measured, name_of, variant_of
from .series import break_even, prefill_pay_back, recaptures
from .workload import NEEDS_CUDA, WITH_GRAPH, WITHOUT_GRAPH, Variant

Tests = Mapping[str, str]  # outcome by test, of a run on a GPU
Finding = tuple[list[str], str]  # what was seen, and the verdict
Look = Callable[[Results, Tests], Finding]
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
Figure = Callable[[dict[str, Any], dict[str, Any]], float | None]


def judge(seen: list[str], good: list[bool]) -> Finding:
    """Holds if all is good, does not hold if nothing is, else holds when: those that are."""
    verdict = HOLDS if all(good) else FAILS if not any(good) else f"holds when: {'; '.join(s for s, g in zip(seen, good) if g)}"
    return seen, verdict if seen else UNKNOWN


def passing(result: dict[str, Any]) -> dict[Variant, dict[str, Any]]:
    """The timed entries that pass, by variant."""
    return {variant_of(v): v for v in measured(result) if v["parity"]["verdict"] == "pass"}


def pairs(found: Results, kernels: str = "plain") -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, the entry without a graph and the entry in one, of each model and framework that has both; points of sweeps are left out."""
    for result in found:
        timed = passing(result) if "sweep" not in result else {}
        for framework, graph in WITH_GRAPH.items():
            before, after = (timed.get(Variant(framework, launch, kernels)) for launch in (WITHOUT_GRAPH[framework], graph))
            if before is not None and after is not None:
                yield f"{framework}, {name_of(result)}", before, after


def figures(figure: Figure, text: str, good: Callable[[float], bool]) -> Look:
    """One figure a pair of entries, without and with a graph; pairs that lack it are passed over."""

    def look(found: Results, _: Tests) -> Finding:
        each = [(name, figure(before, after)) for name, before, after in pairs(found)]
        each = [(name, value) for name, value in each if value is not None]
        return judge([f"{name}: {text.format(value)}" for name, value in each], [good(value) for _, value in each])

    return look


def tests(*names: str) -> Look:
    """Tests that ran on a GPU, by a part of their names: every one of them passed."""

    def look(_: Results, outcomes: Tests) -> Finding:
        each = {name: [outcome for test, outcome in outcomes.items() if name in test] for name in names}
        if not all(each.values()):
            return [], UNKNOWN
        return judge([f"{name}: {outcomes.count('passed')} of {len(outcomes)} tests passed" for name, outcomes in each.items()], [set(o) == {"passed"} for o in each.values()])

    return look


def launches(found: Results, _: Tests) -> Finding:
    seen, good = [], []
    for name, before, after in pairs(found):
        if "other_launches_per_step" in before and "other_launches_per_step" in after:
            many, one, rest = before["other_launches_per_step"], after["graph_launches_per_step"], after["other_launches_per_step"]
            seen.append(f"{name}: {many:.0f} launches become {one + rest:.2g}")
            good.append(many >= 100 and one + rest <= 1)
    return judge(seen, good)


def kernels_a_layer(found: Results, _: Tests) -> Finding:
    seen, good = [], []
    for result in found:
        layers = {variant: v["num_layers"] for variant, v in passing(result).items() if "num_layers" in v}
        for variant, t in terms(result).items():
            if variant.launch in WITHOUT_GRAPH.values() and variant in layers and "sweep" not in result:
                seen.append(f"{variant.framework} {variant.kernels}, {name_of(result)}: {t.kernels / layers[variant]:.1f}")
                good.append(7 <= t.kernels / layers[variant] <= 13)
    return judge(seen, good)


def launch_us(before: dict[str, Any], _: dict[str, Any]) -> float | None:
    """µs of host time a launch, without a graph."""
    return before["host_dispatch_us"] / before["other_launches_per_step"] if before.get("other_launches_per_step") else None


def graph_launch(found: Results, _: Tests) -> Finding:
    costs = {name_of(r): r["ceilings"]["graph_launch"]["100"]["host_us"] for r in found if "graph_launch" in r["ceilings"]}
    return judge([f"{us:.1f} µs of host time for 100 nodes" for us in costs.values()][:1], [us < 1 for us in costs.values()][:1])


def launch_share(found: Results, _: Tests) -> Finding:
    """What bare launches take of a step without a graph, and what a graph saves: launches and the framework's work around them."""
    seen, good = [], []
    for result in found:
        us, ours = result["ceilings"].get("null_kernel", {}).get("host_us"), passing(result)
        for variant, v in ours.items() if us is not None and "sweep" not in result else ():
            graph = ours.get(replace(variant, launch=WITH_GRAPH[variant.framework])) if variant.framework in WITH_GRAPH else None
            if graph is not None and variant.launch in WITHOUT_GRAPH.values() and variant.kernels == "plain" and v.get("other_launches_per_step"):
                bare = v["other_launches_per_step"] * us / (v["step_ms"]["p50"] * 1e3)
                saved = 1 - graph["step_ms"]["p50"] / v["step_ms"]["p50"]
                seen.append(f"{variant.framework}, {name_of(result)}: {bare:.0%} for launches alone, {saved:.0%} with the framework's work for each")
                good.append(saved >= 0.5)
    return judge(seen, good)


def formula(found: Results, _: Tests) -> Finding:
    """The article's sum against the overlapped form, on models that were not fitted."""
    usable = [r for r in found if terms(r) and "empty_step_us" in r["ceilings"] and "sweep" not in r]
    gpus = {r["environment"]["gpu"]["name"] for r in usable}
    if len({name_of(r) for r in usable}) < 2 or len(gpus) > 1:
        return [], UNKNOWN
    errors = median_errors(evaluate(usable, quickest(usable))[1])
    if "sum" not in errors:
        return [], UNKNOWN
    overlapped = f", of the overlapped form {errors['overlap']:.0%}" if "overlap" in errors else ""
    return judge([f"median error of the sum {errors['sum']:.0%}{overlapped}"], [errors["sum"] <= 0.1])


def idle(which: int) -> Figure:
    """Idle share of the step without (0) or with (1) a graph."""
    return lambda before, after: (before, after)[which].get("idle_share")


def ratio(field: Callable[[dict[str, Any]], float]) -> Figure:
    """A field with a graph over the same without."""
    return lambda before, after: field(after) / field(before)


def less(field: Callable[[dict[str, Any]], float | None]) -> Figure:
    """By what part a field is smaller with a graph."""

    def figure(before: dict[str, Any], after: dict[str, Any]) -> float | None:
        old, new = field(before), field(after)
        return None if old is None or new is None else 1 - new / old

    return figure


def capture_ms(_: dict[str, Any], after: dict[str, Any]) -> float | None:
    return None if after.get("capture_s") is None else after["capture_s"] * 1e3


def no_recapture(found: Results, _: Tests) -> Finding:
    """How many prompts one recording served, and whether anything in the graph was patched."""
    seen, good = [], []
    for name, _before, after in pairs(found):
        if "captures" in after and "graph_updates_per_step" in after:
            seen.append(f"{name}: {after['captures']} recording for {after['prompts_served']} prefills, {after['graph_updates_per_step']:.2g} nodes patched a step")
            good.append(after["captures"] == 1 < after["prompts_served"] and after["graph_updates_per_step"] == 0)
    return judge(seen, good)


def one_pool(found: Results, _: Tests) -> Finding:
    """Regions that lie end to end, but for their alignment."""
    seen, good = [], []
    for name, _before, after in pairs(found):
        if regions := after.get("memory_map"):
            ordered = sorted(regions.values())
            gaps = [later[0] - sum(earlier) for earlier, later in pairwise(ordered)]
            seen.append(f"{name}: {len(regions)} regions in {sum(ordered[-1]) / 2**20:.0f} MiB")
            good.append(all(0 <= gap < 4096 for gap in gaps))
    return judge(seen, good)


def one_graph_for_all_lengths(found: Results, _: Tests) -> Finding:
    """Points of the sweep ``lengths``: what one graph takes for rows of different lengths, and for rows padded to the longest."""
    return _by_point(found, "padded", "longest row", "{name}: {new:.3f} ms with their own lengths, {old:.3f} padded", lambda old, new: new >= old * 0.98)


def masks_cost(found: Results, _: Tests) -> Finding:
    """The same rows in a cache four times as long: masks pay for it, lengths read on the device do not."""
    return _by_point(found, "longest row", "maximum", "{name}: {old:.3f} ms become {new:.3f}", lambda old, new: new > old * 1.05)


def _by_point(found: Results, first: str, second: str, text: str, good: Callable[[float, float], bool]) -> Finding:
    points = {r["sweep"]["value"]: passing(r) for r in found if r.get("sweep", {}).get("name") == "lengths"}
    if first not in points or second not in points:
        return [], UNKNOWN
    both = [v for v in points[first] if v in points[second] and v.launch in WITH_GRAPH.values()]
    times = [(v.label(), points[first][v]["step_ms"]["p50"], points[second][v]["step_ms"]["p50"]) for v in both]
    return judge([text.format(name=name, old=old, new=new) for name, old, new in times], [good(old, new) for _, old, new in times])


def same_kernels(found: Results, _: Tests) -> Finding:
    """Kernels in the graphs of one model and batch over all lengths that were measured: does their number change?"""
    counts: dict[str, set[tuple[int, int]]] = {}
    for result in found:
        for variant, v in passing(result).items():
            if variant.launch in WITH_GRAPH.values() and variant.kernels == "plain" and v.get("kernels_per_step"):
                w = result["workload"]
                counts.setdefault(f"{variant.framework}, {name_of(result)}", set()).add((w["max_seq_len"], v["kernels_per_step"]))
    several = {name: seen for name, seen in counts.items() if len({length for length, _ in seen}) > 1}
    text = [f"{name}: {' or '.join(map(str, sorted({k for _, k in seen})))} kernels at {len({n for n, _ in seen})} lengths" for name, seen in several.items()]
    return judge(text, [len({k for _, k in seen}) > 1 for seen in several.values()])


def prefill_below(length: int, calls: int) -> Look:
    """Does a graph of a prefill shorter than ``length`` tokens pay within ``calls`` prompts of that length?"""

    def look(found: Results, _: Tests) -> Finding:
        said = [(sentence, pays) for sentence, n, pays in prefill_pay_back(found) if n < length]
        return judge([sentence for sentence, _ in said], [pays is None or pays > calls for _, pays in said])

    return look


def rollback(found: Results, _: Tests) -> Finding:
    """A recording that fails: do tokens get lost, and what does it cost?"""
    entries = [(f"{variant.framework}, {name_of(r)}", v["recovery"]) for r in found for variant, v in passing(r).items() if "recovery" in v and variant.launch in NEEDS_CUDA]
    seen = [
        f"{name}: {'the same' if one['tokens_equal'] else 'OTHER'} tokens, {one['seconds']:.2f} s from a cold start, {one['without_s']:.2f} s without graphs"
        for name, one in entries
    ]
    return judge(seen, [not one["tokens_equal"] for _, one in entries])


def short_generations(found: Results, _: Tests) -> Finding:
    said = break_even(found)
    return judge([sentence for sentence, _ in said], [start is None or start >= 256 for _, start in said])


def long_generations(found: Results, _: Tests) -> Finding:
    said = break_even(found)
    return judge([sentence for sentence, _ in said], [start is not None and start <= 1024 for _, start in said])


def frequent_recapture(found: Results, _: Tests) -> Finding:
    said = recaptures(found)
    return judge([sentence for sentence, _ in said], [start is None or start > 1 for _, start in said])


def larger_gains_more(found: Results, _: Tests) -> Finding:
    """The gain of a graph by the bytes of weights that a step reads: does the largest model gain most?"""
    gains: dict[str, list[tuple[float, str, float]]] = {}
    for result in found:
        for framework, graph in WITH_GRAPH.items():
            before, after = (passing(result).get(Variant(framework, launch)) for launch in (WITHOUT_GRAPH[framework], graph))
            if before is not None and after is not None and result["workload"]["batch"] == 1:
                moved = after["achieved_gb_per_s"] * after["step_ms"]["p50"]
                gains.setdefault(framework, []).append((moved, name_of(result), before["step_ms"]["p50"] / after["step_ms"]["p50"]))
    several = {framework: sorted(seen) for framework, seen in gains.items() if len({name for _, name, _ in seen}) > 1}
    text = [f"{framework}: " + ", ".join(f"{name} {gain:.2f} times" for _, name, gain in seen) for framework, seen in several.items()]
    return judge(text, [max(seen, key=lambda s: s[2]) == seen[-1] for seen in several.values()])


def whole_generation(found: Results, _: Tests) -> Finding:
    """Launches a step of a loop that runs on the device."""
    seen, good = [], []
    for result in found:
        for variant, v in passing(result).items():
            if variant.launch == "device_loop" and "graph_launches_per_step" in v and "sweep" not in result:
                launched = v["graph_launches_per_step"] + v["other_launches_per_step"]
                seen.append(f"{variant.framework}, {name_of(result)}: {launched * v['ledger']['steps']:.0f} launches for {v['ledger']['steps']} steps")
                good.append(launched * v["ledger"]["steps"] <= 1)
    return judge(seen, good)
