"""Imports form a tree, and either decoder works with the other framework missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from tests.helpers import ROOT

MAY_IMPORT = {"jax_decoder": set(), "torch_decoder": set(), "compare": {"jax_decoder", "torch_decoder"}}
BLOCKED = {"jax_decoder": ["torch", "torch_decoder"], "torch_decoder": ["jax", "flax", "orbax", "jax_decoder"]}


def project_imports(package: str) -> set[str]:
    found = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.split(".")[0] for name in names}
    return found & set(MAY_IMPORT) - {package}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_down(package):
    assert project_imports(package) <= MAY_IMPORT[package], f"{package} reaches sideways or up"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_two_modules_import_each_other(package):
    """Imports within functions count: they hide a circle, they do not open it."""
    needs = {}
    for file in (ROOT / package).rglob("*.py"):
        inside = file.relative_to(ROOT / package).with_suffix("").parts
        if inside[-1] == "__init__":  # hands names on
            continue
        needs[".".join(inside)] = found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*inside[: len(inside) - node.level], *(node.module or "").split(".")]
                base = [part for part in base if part]
                found |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    order = list(TopologicalSorter({name: found & set(needs) for name, found in needs.items()}).static_order())  # CycleError names a circle
    assert len(order) == len(needs) > 10


@pytest.mark.parametrize("package", BLOCKED)
def test_decoder_works_without_the_other_framework(package, strong):
    path = strong("qwen3")
    code = f"""
import sys
for name in {BLOCKED[package]!r}:
    sys.modules[name] = None
from {package} import Decoder
with Decoder.from_pretrained({str(path)!r}, dtype="float32", device="cpu", max_seq_len=32) as decoder:
    print(decoder.generate([[1, 2, 3]], max_new_tokens=2)[0].token_ids)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
