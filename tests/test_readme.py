"""Every code block of the README runs; what needs minutes or the network is named here with its reason."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers import ROOT, has_gpu_compiler

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.strip().splitlines()]
RESULTS = ROOT / "compare/results/h200"
ELSEWHERE = {"scripts/quickstart": "installs and measures for minutes", "scripts/test": "runs this very test"}


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path, **environment})


@pytest.mark.demo
@pytest.mark.parametrize("code", [block for kind, block in BLOCKS if kind == "python"])
def test_python_blocks_run(code):
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.demo
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_commands_run(command, tmp_path):
    if "compare program" in command and not has_gpu_compiler():
        pytest.skip("JAX's CUDA plugin is not installed: scripts/test puts it into .venv/gpu-compiler")
    done = run(shlex.split(command.replace("/tmp/", f"{tmp_path.parent}/")))
    assert done.returncode == 0, done.stderr


def test_the_flags_shown_are_the_ones_in_use():
    from jax_decoder import xla_flags

    ((_, block),) = [b for b in BLOCKS if b[0] == "bash"]
    (shown,) = re.findall(r'XLA_FLAGS="(.*)"', block)
    options = xla_flags.step_options(True, "gpu")
    assert shown == xla_flags.as_environment({name: options[name] for name in xla_flags.names(shown)})
    assert xla_flags.unknown(shown) == ()


def test_tables_are_made_from_the_committed_results():
    from compare.tables import updated

    assert updated(README, RESULTS) == README, "run scripts/update_readme"


def test_pictures_show_the_committed_results():
    """By the digest of their figures: versions of the drawing library differ in pixels."""
    from compare.pictures import digest_of, draw
    from compare.tables import loaded

    drawn = draw(loaded(RESULTS))
    assert {file.name for file in RESULTS.glob("*.png")} == set(drawn)
    for name, picture in drawn.items():
        assert digest_of((RESULTS / name).read_bytes()) == digest_of(picture), f"{name}: run scripts/update_readme"
        assert f"compare/results/h200/{name}" in README


@pytest.mark.parametrize("script", [*ELSEWHERE, "scripts/environment.sh", ".ci/run"])
def test_scripts_are_whole(script):
    """A shell reads a sourced file only when it gets there, so each is checked by itself."""
    done = run(["bash", "-n", script])
    assert done.returncode == 0, done.stderr
    assert script.endswith(".sh") or os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(("driver", "extra"), [("580.65.06", "cuda13"), ("595.10", "cuda13"), ("550.54.15", "cuda12"), (None, "")])
def test_the_driver_decides_the_cuda_extra(driver, extra, tmp_path):
    """A driver older than 580 cannot load CUDA 13; a machine without one gets no extra."""
    if driver:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
    else:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = run(["bash", "-c", f"PATH={tmp_path}:$PATH; set -euo pipefail; source scripts/environment.sh; cuda_extra"])
    assert done.returncode == 0 and done.stdout.strip() == extra


@pytest.mark.parametrize("script", ["minimal_torch.py", "minimal_jax.py"])
def test_minimal_scripts_run_and_stay_small(script):
    assert len((ROOT / "scripts" / script).read_text().splitlines()) <= 60
    done = run([sys.executable, f"scripts/{script}"])
    assert done.returncode == 0, done.stderr
    assert "a step" in done.stdout
