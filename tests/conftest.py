"""What every test shares. The checks of shapes and dtypes in signatures are switched on in pyproject.toml."""

from __future__ import annotations

import os
from contextlib import suppress

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Most tests compile the same tiny steps: kept between tests, processes and runs, they compile once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest
import torch

if not torch.cuda.is_available():  # kernels are interpreted; Triton decides when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("DECODE_PALLAS_INTERPRET", "1")

from tests.helpers import DEMO, checkpoint

if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError):  # Triton exists for Linux only
        from tests.interpreter import mend

        mend()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run that is cut short never comes to its summary."""
    # With xdist the controller hears of every report, too, and alone writes where someone reads.
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        print(f"\nFAILED {report.nodeid} ({report.when}): {crash.message.splitlines()[0] if crash and crash.message else str(report.longrepr)[-200:]}", flush=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("demo") and not (DEMO / "model.safetensors").exists():
        pytest.skip("needs the demo model: scripts/fetch_demo.py fetches it")


@pytest.fixture(scope="session")
def strong(tmp_path_factory: pytest.TempPathFactory):
    """``strong(family, **overrides)``: the path of a tiny strong checkpoint, made once a session."""
    root, made = tmp_path_factory.mktemp("strong"), {}

    def get(family: str, **overrides):
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = checkpoint(root / f"{family}-{len(made)}", family, **overrides)
        return made[key]

    return get
