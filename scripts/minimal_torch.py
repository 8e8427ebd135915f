#!/usr/bin/env python3
"""CUDA graphs in PyTorch, smallest form: a step of many small kernels, run plainly, then captured."""

import time

import torch

LAYERS, WIDTH, STEPS = 50, 256, 200
device = "cuda" if torch.cuda.is_available() else "cpu"
weights = [torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5 for _ in range(LAYERS)]
x = torch.randn(1, WIDTH, device=device)  # input and output of the step, at one address for ever


def step() -> None:
    """Everything a step does, feedback included: it reads ``x`` and writes ``x``."""
    y = x
    for weight in weights:
        y = torch.tanh(y @ weight)
    x.copy_(y)


def timed(run) -> float:
    """Microseconds a step; the wait at the end is part of it."""
    wait = getattr(torch, device).synchronize  # the CPU has one too: it does nothing
    for _ in range(3):
        run()
    wait()
    started = time.perf_counter()
    for _ in range(STEPS):
        run()
    wait()
    return (time.perf_counter() - started) / STEPS * 1e6


def launches() -> int:
    """Kernel launches (on a CPU: operator calls) of one step, counted by the profiler."""
    with torch.profiler.profile() as profile:
        step()
        getattr(torch, device).synchronize()
    wanted = ("cudaLaunchKernel", "cuLaunchKernel") if device == "cuda" else ("aten::mm", "aten::tanh", "aten::copy_")
    return sum(event.count for event in profile.key_averages() if event.key.startswith(wanted))


with torch.no_grad():
    print(f"eager: {launches()} launches a step, {timed(step):.0f} us a step on {device}")
    if device == "cuda":
        side = torch.cuda.Stream()  # warm up aside: lazy set-up of libraries must not be recorded
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()  # recorded, not run
        print(f"graph: 1 launch a step, {timed(graph.replay):.0f} us a step")
    else:
        print("graph: not shown, no CUDA device; there all of these would become 1 launch, and the host cost of the others would be gone")
