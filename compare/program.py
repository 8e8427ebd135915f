"""The JAX step as XLA compiles it for a GPU, on a machine that needs to have none.

XLA's GPU compiler runs without a device when it is told which one to compile for. What comes out
is the program that would run there, but for library kernels, which only a device can choose
between: how many commands its command buffers hold, what is launched outside of them, which
arrays the host passes at each step, and whether the state is written in place.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax_decoder.kernels.tiles import FUSED_ROWS
from jax_decoder.model import check_fused

from .models import model_config
from .results import ResultError

ROOT = Path(__file__).resolve().parents[1]
COMPILER = ROOT / ".venv" / "gpu-compiler"  # where scripts/test puts JAX's CUDA plugin on a machine without a GPU
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# The H200 as XLA describes a device (xla/stream_executor/device_description.proto).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150754820096
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 20 }
runtime_version { major: 13 minor: 0 }
"""


def compiler_path() -> list[str]:
    """Folders to add to the module path for JAX's CUDA plugin; none if it is installed. ResultError without one."""
    if any(_installed(name) for name in PLUGINS):
        return []
    if any((COMPILER / name.replace(".", "/")).is_dir() for name in PLUGINS):
        return [str(COMPILER)]
    raise ResultError("JAX's CUDA plugin is not installed, and it holds the GPU compiler: pip install jax-cuda13-plugin and jax-cuda13-pjrt in the version of jaxlib")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def describe(
    model: str, dtype: str, batch: int, kind: str, max_seq_len: int, options: dict[str, str] | None = None, dump: str | None = None, kernels: str = "plain"
) -> dict[str, Any]:
    """Compile the step of ``batch`` rows, ``kind`` greedy or sampled, and describe the program.

    Gives ``arguments`` and ``state_arrays`` (numbers of arrays), ``commands`` in the command
    buffers, ``buffers``, ``outside`` (kinds of what is launched one by one), ``kinds`` of commands,
    ``in_place`` (is every array of the state written where it lies?), ``temporary_bytes`` and
    ``copied`` (elements of every copy in the program). ``dump`` keeps XLA's texts in a folder.
    Raises ResultError with XLA's message if it does not compile.
    """
    if kernels == "fused":
        if batch > FUSED_ROWS:
            raise ResultError(f"batch is {batch}, and fused kernels take at most {FUSED_ROWS} rows: use --kernels plain")
        check_fused(model_config(model, "jax"))
    job = {"model": model, "dtype": dtype, "batch": batch, "kind": kind, "max_seq_len": max_seq_len, "options": options or {}, "dump": dump, "kernels": kernels}
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "DECODE_PALLAS_INTERPRET": "0",
    }
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *compiler_path(), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-m", "compare.program", json.dumps(job)], env=environ, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
        raise ResultError(f"{model} does not compile for a GPU: {(errors or done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def lines(found: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    return [
        f"{found['model']}, batch {found['batch']}, {found['kind']}, {found['kernels']} kernels, for an {found['device']} (jaxlib {found['jaxlib']})",
        f"commands in {len(found['buffers'])} command buffer{'s' * (len(found['buffers']) != 1)}  {found['commands']} ({kinds})",
        f"launched outside of them       {', '.join(found['outside']) or 'nothing'}",
        f"arrays passed at each step     {found['arguments']}, of which {found['state_arrays']} are the state",
        f"state written in place         {'yes' if found['in_place'] else 'NO: the graph would be patched at every step'}",
        f"temporary memory               {found['temporary_bytes']} bytes",
        f"copies, in elements            {', '.join(map(str, found['copied'])) or 'none'}",
    ]


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    """In the child process: see ``describe``."""
    from tempfile import TemporaryDirectory

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_decoder import thunks, xla_flags
    from jax_decoder.checkpoint import abstract_model, flatten_model
    from jax_decoder.decode import make_state
    from jax_decoder.programs import Programs

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    place = NamedSharding(mesh, PartitionSpec())

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    config, dtype, length = model_config(job["model"], "jax"), jnp.dtype(job["dtype"]), job["max_seq_len"]
    model = abstract_model(config, length, "stacked", dtype, job["kernels"])
    programs = Programs(model, placed(flatten_model(model)), 512)
    state = placed(jax.eval_shape(lambda: make_state(config, job["batch"], length, dtype, "stacked")))
    with TemporaryDirectory() as folder:  # an empty one: a folder of the caller's may hold another program
        options = {**xla_flags.step_options(True, "gpu"), **job["options"], thunks.DUMP: folder}
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells Pallas which device it lowers for
            lowered = programs.lower_step(state, job["kind"])
        compiled = lowered.compile(compiler_options=options)
        found = thunks.from_dump(folder)
        if job["dump"]:
            shutil.copytree(folder, job["dump"], dirs_exist_ok=True)
    assert found is not None, "XLA wrote no list of thunks"
    memory = compiled.memory_analysis()
    arrays = jax.tree.leaves(state)
    return {
        **{name: job[name] for name in ("model", "dtype", "batch", "kind", "kernels", "max_seq_len")},
        "device": "NVIDIA H200",
        "jaxlib": jax.lib.__version__,
        "arguments": len(programs.weights) + len(arrays),
        "state_arrays": len(arrays),
        "commands": found.nodes,
        "buffers": [len(buffer) for buffer in found.buffers],
        "outside": list(found.outside),
        "kinds": dict(Counter(kind for buffer in found.buffers for kind in buffer).most_common()),
        "in_place": memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in arrays),
        "temporary_bytes": memory.temp_size_in_bytes,
        "copied": sorted(result_sizes(compiled.as_text(), "copy|copy-start|transpose"), reverse=True),
    }


def result_sizes(text: str, operation: str) -> list[int]:
    """Element counts of the results of all instructions of one kind in HLO text; ``operation`` is a pattern."""
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* (?:{operation})\(", text)
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.argv[1]))))
