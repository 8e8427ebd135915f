#!/usr/bin/env python3
"""Command buffers (CUDA graphs) in JAX, smallest form: one lowering, compiled with them and without."""

import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

LAYERS, WIDTH, STEPS = 50, 256, 200
weights = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5


def step(weights, state):
    """The whole state goes in and comes out, so that it can be donated and written in place."""
    y, count = state
    for layer in range(LAYERS):
        y = jnp.tanh(y @ weights[layer])
    return y, count + 1


def timed(run) -> float:
    """Microseconds a step; the first three runs compile nothing, but record the graph."""
    state = (jnp.ones((1, WIDTH)), jnp.int32(0))
    for _ in range(3):
        state = run(weights, state)
    jax.block_until_ready(state)
    started = time.perf_counter()
    for _ in range(STEPS):
        state = run(weights, state)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / STEPS * 1e6


lowered = jax.jit(step, donate_argnums=1).lower(weights, (jnp.ones((1, WIDTH)), jnp.int32(0)))
platform = jax.default_backend()
off = lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""} if platform == "gpu" else {})
# Each fusion or library product is one launch on a GPU. HLO text never shows command buffers.
fusions = len(re.findall(r" (?:fusion|dot|custom-call)\(", off.as_text().partition("ENTRY ")[2]))
print(f"jit: {fusions} fusions and products a step, {timed(off):.0f} us a step on {platform}")
if platform == "gpu":
    with tempfile.TemporaryDirectory() as folder:
        on = lowered.compile(compiler_options={"xla_dump_to": folder})
        dump = next(Path(folder).glob("*thunk_sequence_after_thunk_passes*")).read_text()
    print(f"command buffer: {dump.count('kCommandBuffer')} graph launch a step, {timed(on):.0f} us a step")
else:
    print("command buffer: not shown, no CUDA device; there all of these would become 1 graph launch")
