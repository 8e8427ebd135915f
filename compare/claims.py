"""The article's claims, each against what was measured: ``compare claims`` prints them from result files.

A claim looks at every result that holds what it needs and says what was seen there, model by
model; its verdict is computed from the same figures. Without such a result it is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .launch_model import evaluate, median_errors, quickest, terms
from .results import ResultError, measured, name_of, variant_of
from .series import break_even
from .workload import WITH_GRAPH, WITHOUT_GRAPH, Variant

Results = Sequence[dict[str, Any]]
Finding = tuple[list[str], str]  # what was seen, and the verdict
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
RUN = "python -m compare run --model shape:qwen3-0.6b --dtype bfloat16 --max-seq-len 1024 --new-tokens 128"


@dataclass(frozen=True)
class Claim:
    """``says`` in our words; ``look`` gives what was seen and the verdict; ``command`` reproduces it."""

    topic: str
    says: str
    look: Callable[[Results], Finding]
    command: str = RUN

    def row(self, found: Results) -> dict[str, str]:
        seen, verdict = self.look(found)
        return {"topic": self.topic, "claim": self.says, "measured": "; ".join(seen) or "nothing", "verdict": verdict if seen else UNKNOWN, "command": self.command}


def _pairs(found: Results, kernels: str = "plain") -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, the entry without a graph and the entry in one, of each model and framework that has both and passes."""
    for result in found:
        timed = {variant_of(v): v for v in measured(result) if v["parity"]["verdict"] == "pass"}
        for framework, graph in WITH_GRAPH.items():
            before, after = (timed.get(Variant(framework, launch, kernels)) for launch in (WITHOUT_GRAPH[framework], graph))
            if before is not None and after is not None:
                yield f"{framework}, {name_of(result)}", before, after


def _judge(seen: list[str], good: list[bool]) -> Finding:
    verdict = HOLDS if all(good) else FAILS if not any(good) else f"holds when: {'; '.join(s for s, g in zip(seen, good) if g)}"
    return seen, verdict


def _measure(found: Results, figure: Callable[[dict[str, Any], dict[str, Any]], float | None], text: str, good: Callable[[float], bool]) -> Finding:
    """One figure a pair; pairs without it are passed over."""
    figures = [(name, figure(before, after)) for name, before, after in _pairs(found)]
    figures = [(name, value) for name, value in figures if value is not None]
    return _judge([f"{name}: {text.format(value)}" for name, value in figures], [good(value) for _, value in figures])


def _launches(found: Results) -> Finding:
    seen, good = [], []
    for name, before, after in _pairs(found):
        if "other_launches_per_step" in before and "other_launches_per_step" in after:
            many, one, rest = before["other_launches_per_step"], after["graph_launches_per_step"], after["other_launches_per_step"]
            seen.append(f"{name}: {many:.0f} launches become {one + rest:.2g}")
            good.append(many >= 100 and one + rest <= 1)
    return _judge(seen, good)


def _kernels_a_layer(found: Results) -> Finding:
    seen, good = [], []
    for result in found:
        layers = {variant_of(v): v["num_layers"] for v in result["variants"] if "num_layers" in v}
        for variant, t in terms(result).items():
            if variant.launch in WITHOUT_GRAPH.values() and variant in layers:
                seen.append(f"{variant.framework} {variant.kernels}, {name_of(result)}: {t.kernels / layers[variant]:.1f}")
                good.append(7 <= t.kernels / layers[variant] <= 13)
    return _judge(seen, good)


def _graph_launch(found: Results) -> Finding:
    costs = {name_of(r): r["ceilings"]["graph_launch"]["100"]["host_us"] for r in found if "graph_launch" in r["ceilings"]}
    return _judge([f"{us:.1f} µs of host time for 100 nodes" for us in costs.values()][:1], [us < 1 for us in costs.values()][:1])


def _formula(found: Results) -> Finding:
    """The article's sum against the overlapped form, on models that were not fitted."""
    usable = [r for r in found if terms(r) and "empty_step_us" in r["ceilings"] and "sweep" not in r]
    gpus = {r["environment"]["gpu"]["name"] for r in usable}
    if len({name_of(r) for r in usable}) < 2 or len(gpus) > 1:
        return [], UNKNOWN
    errors = median_errors(evaluate(usable, quickest(usable))[1])
    if "sum" not in errors:
        return [], UNKNOWN
    return _judge([f"median error of the sum {errors['sum']:.0%}, of the overlapped form {errors.get('overlap', float('nan')):.0%}"], [errors["sum"] <= 0.1])


def _idle(which: int, good: Callable[[float], bool]) -> Callable[[Results], Finding]:
    def share(before: dict[str, Any], after: dict[str, Any]) -> float | None:
        return (before, after)[which].get("idle_share")

    return lambda found: _measure(found, share, "{:.0%} idle", good)


def _ratio(field: Callable[[dict[str, Any]], float]) -> Callable[[dict[str, Any], dict[str, Any]], float]:
    return lambda before, after: field(after) / field(before)


def _captures(found: Results) -> Finding:
    return _measure(found, lambda before, after: None if after.get("capture_s") is None else after["capture_s"] * 1e3, "{:.0f} ms", lambda ms: 50 <= ms <= 200)


def _lengths(found: Results) -> Finding:
    said = break_even(found)
    return _judge([sentence for sentence, _ in said], [start is None or start >= 256 for _, start in said])


CLAIMS = (
    Claim("launches", "hundreds of kernel launches a step become one", _launches),
    Claim("launches", "about 10 kernels a layer", _kernels_a_layer),
    Claim("launches", "a kernel launch costs microseconds of host time", lambda found: _measure(found, lambda before, _: before["host_dispatch_us"] / before["other_launches_per_step"] if before.get("other_launches_per_step") else None, "{:.1f} µs", lambda us: 1 <= us < 1000)),
    Claim("launches", "a graph launch costs nanoseconds", _graph_launch),
    Claim("time", "a step takes launches + compute + synchronisation, one after the other", _formula, "python -m compare model QWEN.json LLAMA-1B.json LLAMA-8B.json"),
    Claim("time", "the GPU is idle 65 % of a step without a graph", _idle(0, lambda share: 0.55 <= share <= 0.75)),
    Claim("time", "in a graph it works without gaps", _idle(1, lambda share: share <= 0.1)),
    Claim("gain", "throughput grows by 2.3 to 4.1 times", lambda found: _measure(found, _ratio(lambda v: v["tokens_per_s"]), "{:.2f} times", lambda x: 2.3 <= x <= 4.1)),
    Claim("gain", "the CPU has 60 to 80 % less to do", lambda found: _measure(found, lambda b, a: 1 - _ratio(lambda v: v["cpu_ms_per_step"])(b, a), "{:.0%} less, waits spinning", lambda x: 0.6 <= x <= 0.8)),
    Claim("gain", "the latency of a generation falls by 55 to 75 %", lambda found: _measure(found, lambda b, a: 1 - b["tokens_per_s"] / a["tokens_per_s"], "{:.0%} less", lambda x: 0.55 <= x <= 0.75)),
    Claim("capture", "capturing takes 50 to 200 ms", _captures),
    Claim("capture", "it does not pay for generations below 256 tokens", _lengths, "python -m compare run --sweep new-tokens --model shape:qwen3-0.6b --dtype bfloat16"),
)  # fmt: skip


def table(found: Results) -> list[dict[str, str]]:
    """A row for each claim. ResultError without any result."""
    if not found:
        raise ResultError("no result files, expected those of `compare run`: name them, or a folder that holds them")
    return [claim.row(found) for claim in CLAIMS]


def lines(rows: Sequence[dict[str, str]]) -> list[str]:
    return [text for row in rows for text in (f"{row['claim']}: {row['verdict']}", f"    measured: {row['measured']}", f"    reproduce: {row['command']}")]
