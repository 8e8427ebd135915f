"""How often XLA patches the graph of a step that is disturbed: ``python -m tests.disturbance CHECKPOINT`` prints JSON.

A program of its own, as one of XLA's answers is a flag that is read when JAX starts. 100 times: a
row is admitted, the caller keeps one more array, and two executables take a step in turn.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import jax.numpy as jnp

import jax_decoder
from compare.ledger import Ledger, tally

ROUNDS = 100


def main(path: str) -> dict[str, int]:
    """steps; how many of them patched nodes; and nodes patched in 20 quiet steps afterwards."""
    ledger = Ledger()
    with jax_decoder.Decoder.from_pretrained(path, dtype="bfloat16", device="auto", launch="command_buffer", max_batch=4, buckets=[1, 4], max_seq_len=300) as d:
        d.capture(("greedy",))
        runner, patched, kept = d._runner, 0, []
        settings = {"status": 1, "tokens": 3, "positions": 2, "limits": 290, "stop_ids": [], "filters": [1.0, 1.0, 0.0], "draws": [0, 0, 0]}
        states = {bucket: runner.take_state(bucket) for bucket in (4, 1)}

        def step(bucket: int) -> None:
            states[bucket] = runner.step(states[bucket], "greedy", bucket)

        def updates(work) -> int:
            with ledger.counting() as calls:
                work()
                return tally(calls)["graph_updates"]

        for i in range(ROUNDS):
            states[4] = runner.admit(states[4], i % 4, [1, 2, 3], settings)
            kept.append(jnp.zeros(1000 + 64 * i) + 1)
            patched += sum(updates(partial(step, bucket)) > 0 for bucket in states)
        quiet = updates(lambda: [step(4) for _ in range(20)])
    return {"steps": ROUNDS * len(states), "patched": patched, "quiet": quiet}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
