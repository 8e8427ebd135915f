"""The article's claims, each against what was measured: ``compare claims`` prints them from result files.

A claim looks at every result that holds what it needs and says what was seen there, model by
model; its verdict is computed from the same figures. Without such a result it is not measured.
What the article only hopes for (stitched subgraphs, learned choice of graphs) is no claim.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import evidence as e
from .results import ResultError

RUN = "python -m compare run --model shape:qwen3-0.6b --dtype bfloat16 --max-seq-len 1024 --new-tokens 128"
COSTS = "python -m compare run --sweep capture-costs --model shape:qwen3-0.6b --dtype bfloat16"
LENGTHS = "python -m compare run --sweep lengths --model shape:qwen3-0.6b --dtype bfloat16"
GPU_TESTS = "python -m pytest tests/test_gpu.py"
TESTS_FILE = "tests.txt"  # of a folder of results: what the GPU lane's tests came to
FEW_CALLS = 100  # prompts of one length that a graph of a prefill may need before it pays


@dataclass(frozen=True)
class Claim:
    """``says`` in our words; ``look`` gives what was seen and the verdict; ``command`` reproduces it."""

    topic: str
    says: str
    look: e.Look
    command: str = RUN

    def row(self, found: e.Results, tests: e.Tests) -> dict[str, str]:
        seen, verdict = self.look(found, tests)
        return {"topic": self.topic, "claim": self.says, "measured": "; ".join(seen) or "nothing", "verdict": verdict if seen else e.UNKNOWN, "command": self.command}


CLAIMS = (
    Claim("launches", "hundreds of kernel launches a step become one", e.launches),
    Claim("launches", "about 10 kernels a layer", e.kernels_a_layer),
    Claim("launches", "a kernel launch costs microseconds of host time", e.figures(e.launch_us, "{:.1f} µs", lambda us: 1 <= us < 1000)),
    Claim("launches", "a graph launch costs nanoseconds", e.graph_launch),
    Claim("launches", "a whole generation can be one launch, with control flow on the device", e.whole_generation),
    Claim("time", "a step takes launches + compute + synchronisation, one after the other", e.formula, "python -m compare model QWEN.json LLAMA-1B.json LLAMA-8B.json"),
    Claim("time", "for one token launches take most of the step", e.launch_share),
    Claim("time", "the GPU is idle 65 % of a step without a graph", e.figures(e.idle(0), "{:.0%} idle", lambda share: 0.55 <= share <= 0.75)),
    Claim("time", "in a graph it works without gaps", e.figures(e.idle(1), "{:.0%} idle", lambda share: share <= 0.1)),
    Claim("parameters", "new prompts, lengths and settings need no new capture", e.no_recapture),
    Claim("parameters", "one preallocated pool holds cache, logits and state", e.one_pool),
    Claim("lengths", "rows of different lengths in one graph may as well be padded to one", e.one_graph_for_all_lengths, LENGTHS),
    Claim("lengths", "preallocating the maximum and masking costs time at every step", e.masks_cost, LENGTHS),
    Claim("prefill", "a graph of a prefill does not pay below 512 tokens", e.prefill_below(512, FEW_CALLS), COSTS),
    Claim("prefill", "the number of layers or kernels differs by sequence", e.same_kernels, "python -m compare run --sweep context --model shape:qwen3-0.6b --dtype bfloat16"),
    Claim("prefill", "rolling back is hard when a graph fails", e.rollback, COSTS),
    Claim("gain", "throughput grows by 2.3 to 4.1 times", e.figures(e.ratio(lambda v: v["tokens_per_s"]), "{:.2f} times", lambda x: 2.3 <= x <= 4.1)),
    Claim("gain", "the CPU has 60 to 80 % less to do", e.figures(e.less(lambda v: v.get("cpu_use", {}).get("dozing_ms")), "{:.0%} less a token, waits not spinning", lambda x: 0.6 <= x <= 0.8)),
    Claim("gain", "the latency of a generation falls by 55 to 75 %", e.figures(e.less(lambda v: 1 / v["tokens_per_s"]), "{:.0%} less", lambda x: 0.55 <= x <= 0.75)),
    Claim("capture", "capturing takes 50 to 200 ms", e.figures(e.capture_ms, "{:.0f} ms", lambda ms: 50 <= ms <= 200)),
    Claim("capture", "it does not pay for generations below 256 tokens", e.short_generations, COSTS),
    Claim("capture", "it pays for more than 1,024 new tokens", e.long_generations, COSTS),
    Claim("capture", "it does not pay if the graph is recorded anew at every step", e.frequent_recapture, COSTS),
    Claim("capture", "the largest models gain most", e.larger_gains_more, "python -m compare run --sweep models --dtype bfloat16"),
    Claim("pitfalls", "a missing synchronisation is a race (a guard prevents it)", e.tests("without_its_guard"), GPU_TESTS),
    Claim("pitfalls", "a static graph cannot follow what changes its key (another is recorded)", e.tests("each_part_of_the_key"), GPU_TESTS),
    Claim("pitfalls", "graphs leak memory unless they are released", e.tests("leave_no_memory"), GPU_TESTS),
)  # fmt: skip


def table(found: e.Results, tests: e.Tests | None = None) -> list[dict[str, str]]:
    """A row for each claim; ``tests`` as ``lane_outcomes`` reads them. ResultError without any result."""
    if not found:
        raise ResultError("no result files, expected those of `compare run`: name them, or a folder that holds them")
    return [claim.row(found, tests or {}) for claim in CLAIMS]


def lane_outcomes(folder: Path) -> dict[str, str]:
    """Outcome by test of the GPU lane whose results lie in ``folder``; empty if it has none."""
    file = folder / TESTS_FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    return {found[2]: found[1].lower() for line in lines if (found := re.match(r"(PASSED|FAILED|ERROR|SKIPPED) (\S.*)", line))}


def lines(rows: Sequence[dict[str, str]]) -> list[str]:
    return [text for row in rows for text in (f"{row['claim']}: {row['verdict']}", f"    measured: {row['measured']}", f"    reproduce: {row['command']}")]
