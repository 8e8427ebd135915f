"""Faults that the tests must notice: each a small change of runner, decode, cache or kernels.

``scripts/mutate`` plants them one at a time and runs the tests named beside them; a fault that
survives is a hole in the tests.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """``old`` occurs once in ``file`` and becomes ``new``; ``tests`` are pytest arguments that must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


GRAPHS, STEPS, JAX, JAX_STEP = "tests/test_graphs.py", "tests/test_steps.py", "tests/test_jax_graphs.py", "tests/test_jax_step.py"
FUSED, JAX_FUSED = "tests/test_fused.py", "tests/test_jax_fused.py"
TOKENS = "tests/test_parity_tiny.py -k greedy"  # against transformers: comparisons of ours with ours would share the fault

FAULTS = (
    # ---- torch: runner and graphs
    Fault("stale address", "torch_decoder/runner.py", "or recorded.addresses != self._addresses()", "", f"{GRAPHS} -k moved_buffer"),
    Fault("addresses checked once only", "torch_decoder/runner.py", "            recorded.checked = False\n", "            pass\n", f"{GRAPHS} -k moved_buffer"),
    Fault("bucket not in the key", "torch_decoder/runner.py", "GraphKey(state.tokens.shape[0], kind", "GraphKey(4, kind", f"{GRAPHS} -k part_of_the_key"),
    Fault("sampling kind not in the key", "torch_decoder/runner.py", "GraphKey(state.tokens.shape[0], kind", 'GraphKey(state.tokens.shape[0], "greedy"', f"{GRAPHS} -k graph_each"),
    Fault("loop not in the key", "torch_decoder/runner.py", "kind, loop, self.dtype", "kind, False, self.dtype", f"{GRAPHS} -k one_launch"),
    Fault("kernels not in the key", "torch_decoder/runner.py", "self.dtype, self.model.kernels", 'self.dtype, "plain"', f"{GRAPHS} -k part_of_the_key"),
    Fault("state not put back after warm-up", "torch_decoder/runner.py", "            leaf.copy_(value)\n", "            pass\n", f"{GRAPHS} -k as_it_was"),
    Fault("cache not put back after warm-up", "torch_decoder/runner.py", "            cache[rows, :, slots] = value\n", "            pass\n", f"{GRAPHS} -k as_it_was"),
    Fault("rows run during warm-up", "torch_decoder/runner.py", "    state.status.zero_()\n", "", f"{GRAPHS} -k as_it_was"),
    Fault("failed graph kept", "torch_decoder/runner.py", "self._release_graphs([k for k in self._graphs if k == key or not intact])", "pass", f"{GRAPHS} -k any_point"),
    Fault(
        "memory of a failed graph kept",
        "torch_decoder/runner.py",
        "        self.backend.return_memory()\n        if self.strict:",
        "        if self.strict:",
        f"{GRAPHS} -k any_point",
    ),
    Fault(
        "released graphs replayed on",
        "torch_decoder/runner.py",
        "            self._graphs.pop(key).graph.close()",
        "            self._graphs[key].graph.close()",
        f"{GRAPHS} -k released",
    ),
    Fault(
        "graphs not released on closing",
        "torch_decoder/runner.py",
        "        self._release_graphs(list(self._graphs))\n        self.abandon()",
        "        self.abandon()",
        f"{GRAPHS} -k closing",
    ),
    Fault("evicted state not copied", "torch_decoder/runner.py", "            held.state = self.copy(held).state\n", "            pass\n", f"{GRAPHS} -k callers_state"),
    Fault(
        "padded rows not counted",
        "torch_decoder/runner.py",
        "        account.padded_rows += key.bucket - live_rows\n        return state",
        "        return state",
        f"{GRAPHS} -k padding_is_counted",
    ),
    Fault(
        "smallest bucket recorded first",
        "torch_decoder/runner.py",
        "for bucket in reversed(self.buckets) for kind",
        "for bucket in self.buckets for kind",
        f"{GRAPHS} -k largest_bucket_first",
    ),
    Fault("garbage collected while recording", "torch_decoder/graphs.py", "    gc.disable()\n", "", f"{GRAPHS} -k garbage"),
    Fault("missing event", "torch_decoder/feed.py", "        self._events[slot].synchronize()\n", "", "tests/test_memory.py -k staging"),
    Fault(
        "event before the copy",
        "torch_decoder/feed.py",
        "        target.copy_(host, non_blocking=True)\n        self._events[slot].record()\n",
        "        self._events[slot].record()\n        target.copy_(host, non_blocking=True)\n",
        "tests/test_memory.py -k staging",
    ),
    # ---- torch: decode and cache
    Fault("skipped feedback", "torch_decoder/decode.py", "    state.tokens.copy_(torch.where(moves, token, state.tokens))\n", "", TOKENS),
    Fault("position off by one", "torch_decoder/decode.py", "    following = state.positions + 1\n", "    following = state.positions + 2\n", f"{STEPS} -k last_slot"),
    Fault("ended rows go on", "torch_decoder/decode.py", "    moves = running & (ended == RUNNING)\n", "    moves = running\n", f"{GRAPHS} -k 'refilled or stop_ids'"),
    Fault("cache row not cleared on admission", "torch_decoder/decode.py", "        layer[:, row].zero_()\n", "        pass\n", f"{GRAPHS} -k poison"),
    Fault(
        "forced tokens of the last row kept", "torch_decoder/decode.py", '(("ring", -1), ("forced", -1), ("logprobs", 0))', '(("ring", -1), ("logprobs", 0))', f"{GRAPHS} -k poison"
    ),
    Fault("loop ends one step late", "torch_decoder/decode.py", "(control[0] > 0)", "(control[0] >= 0)", f"{GRAPHS} -k 'one_launch or single_steps'"),
    Fault("loop ignores ended rows", "torch_decoder/decode.py", "(control[0] > 0) & (running > control[1])", "(control[0] > 0) & (running >= 0)", f"{GRAPHS} -k stops_at"),
    Fault(
        "padded row in a live slot",
        "torch_decoder/kernels/plain.py",
        "heads * slots + positions[:, None]",
        "(heads % (2 * kv_heads)) * slots + positions[:, None]",
        f"{STEPS} -k 'unequal_length or spare_row'",
    ),
    Fault(
        "rows one slot late in the cache", "torch_decoder/kernels/plain.py", "heads * slots + positions[:, None]", "heads * slots + positions[:, None] + 1", f"{STEPS} -k last_slot"
    ),
    Fault(
        "regions overlap",
        "torch_decoder/cache.py",
        "            offset += -(-region.nbytes // ALIGNMENT) * ALIGNMENT\n",
        "            offset += region.nbytes // ALIGNMENT * ALIGNMENT\n",
        "tests/test_torch_step.py -k overlap",
    ),
    # ---- jax
    Fault(
        "jax: state not donated",
        "jax_decoder/programs.py",
        "jax.jit(self.step(kind, steps), donate_argnums=1, keep_unused=True)",
        "jax.jit(self.step(kind, steps), keep_unused=True)",
        f"{JAX_STEP} -k aliased",
    ),
    Fault(
        "jax: unread leaves pruned",
        "jax_decoder/programs.py",
        "jax.jit(self.step(kind, steps), donate_argnums=1, keep_unused=True)",
        "jax.jit(self.step(kind, steps), donate_argnums=1)",
        f"{JAX_STEP} -k aliased",
    ),
    Fault(
        "jax: a moved state is not noticed",
        "jax_decoder/runner.py",
        "if moved := sum(old != new for old, new in zip(before, _addresses(state))):",
        "if moved := 0:",
        f"{JAX} -k state_that_moves",
    ),
    Fault(
        "jax: steps not in the key",
        "jax_decoder/runner.py",
        "GraphKey(state.batch, kind, steps, self.dtype.name",
        "GraphKey(state.batch, kind, 1, self.dtype.name",
        f"{JAX} -k 'counted or part_of_the_key'",
    ),
    Fault(
        "jax: slots past the end are clamped",
        "jax_decoder/cache.py",
        'slice(None), slots)].set(new, mode="drop")',
        "slice(None), jnp.minimum(slots, array.shape[-2] - 1))].set(new)",
        f"{STEPS} -k spoils_no_slot",
    ),
    Fault(
        "jax: cache row not cleared on admission",
        "jax_decoder/decode.py",
        "jax.tree.map(jnp.zeros_like, jax.eval_shape(state.cache.row, row))",
        "state.cache.row(row)",
        f"{STEPS} -k poisoned",
    ),
    Fault(
        "jax: a token past the end is clamped",
        "jax_decoder/cache.py",
        "jnp.where(slot < array.shape[-2], piece, kept)",
        "piece",
        f"{JAX_STEP} -k past_the_end",
    ),
    Fault("jax: skipped feedback", "jax_decoder/decode.py", '            ("tokens", 0, moves, token),\n', "", TOKENS),
    Fault("jax: rows of another row are written", "jax_decoder/decode.py", "rows * math.prod(region.shape[1:]) + index", "rows + index", f"{STEPS} -k 'row or rows'"),
    Fault("jax: position off by one", "jax_decoder/decode.py", "    following = state.positions + 1\n", "    following = state.positions + 2\n", f"{STEPS} -k last_slot"),
    Fault("jax: failed executable kept", "jax_decoder/runner.py", "        self._steps.pop(key, None)\n", "", f"{JAX} -k failed_run"),
    # ---- fused kernels
    Fault("fused: every other block skipped", "torch_decoder/kernels/attention.py", "slots += BLOCK", "slots += 2 * BLOCK", f"{FUSED} -k poisoned"),
    Fault("fused: counter left behind", "torch_decoder/kernels/attention.py", "            tl.store(counter, 0)\n", "", f"{FUSED} -k poisoned"),
    Fault("fused: a failed row moves on", "torch_decoder/kernels/advance.py", "    ended = tl.where(failed, FAILED, ended)\n", "", f"{FUSED} -k end_of_a_step"),
    Fault(
        "jax fused: one block a split",
        "jax_decoder/kernels/attention.py",
        "jax.lax.fori_loop(begin, end, look",
        "jax.lax.fori_loop(begin, begin + 1, look",
        f"{JAX_FUSED} -k poisoned",
    ),
    Fault("jax fused: no residual", "jax_decoder/kernels/products.py", "+ residual.astype(jnp.float32)", "", f"{JAX_FUSED} -k products"),
)
