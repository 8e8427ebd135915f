"""The search for tiles, with steps whose times are made up."""

from __future__ import annotations

import math
import time

import pytest

from compare.tile_search import Round, rounds_of, search
from compare.tuning import candidates, products_of, read_tiles, tiles_in_force, update_tiles


class Made:
    """Steps whose time is a sum over the entries of a table; every look is counted."""

    def __init__(self, **cost: float):
        self.cost, self.looks = cost, 0

    def ms(self, table, count=None):
        self.looks += 1
        return [1.0 + sum(self.cost.get(f"{name}{value[0]}", 0.0) for name, value in table.items())] * (count or 2)


def round_of(name: str, *values: int, count: int | None = 1) -> Round:
    return Round(name, [[value] for value in values], count)


def test_the_quickest_of_every_round_is_kept():
    steps = Made(a1=0.5, a2=0.1, a3=0.3, b1=0.2, b2=0.4)
    rounds = [round_of("a", 1, 2, 3), round_of("b", 2, count=None)]
    assert search(steps, {"a": [1], "b": [1]}, rounds, time.monotonic() + 60) == {"a": [2]}


def test_a_gain_below_the_noise_changes_nothing():
    assert search(Made(a1=0.100, a2=0.0995), {"a": [1]}, [round_of("a", 2)], time.monotonic() + 60) == {}


def test_a_gain_has_to_come_again_in_turns():
    """One lucky look is not enough."""

    class Lucky(Made):
        def ms(self, table, count=None):
            self.looks += 1
            return [0.5 if self.looks == 2 else 1.0]

    assert search(Lucky(), {"a": [1]}, [round_of("a", 2)], time.monotonic() + 60) == {}


def test_what_does_not_compile_is_passed_over():
    class Failing(Made):
        def ms(self, table, count=None):
            if table["a"] == [2]:
                raise RuntimeError("out of registers")
            return super().ms(table, count)

    steps = Failing(a1=0.5, a3=0.1)
    assert search(steps, {"a": [1]}, [round_of("a", 2, 3)], time.monotonic() + 60) == {"a": [3]}


def test_nothing_is_tried_after_the_deadline():
    steps = Made(a1=0.5, a2=0.1)
    assert search(steps, {"a": [1]}, [round_of("a", 2)], time.monotonic() - 1) == {} and steps.looks == 1


def test_neighbours_lead_to_the_best_tile():
    """Times that fall towards [4, 2048, 8]: it is found by doubling and halving, without trying everything."""
    values = [list(tile) for tile in candidates(4096, 4096, 1)]
    away = lambda tile: sum(abs(math.log2(a / b)) for a, b in zip(tile, (4, 2048, 8)))  # noqa: E731
    looks: list[list[int]] = []

    class Hill(Made):
        def ms(self, table, count=None):
            looks.append(table["a"])
            return [1.0 + 0.1 * away(table["a"])]

    found = search(Hill(), {"a": [1, 512, 2]}, [Round("a", values, 1, near=True)], time.monotonic() + 60)
    assert found == {"a": [4, 2048, 8]} and len(set(map(tuple, looks))) < len(values)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_entry_of_a_model_is_searched(framework):
    found = {one.name for one in rounds_of("shape:qwen3-0.6b", framework)}
    assert found == {"attend 128", *(("4096x1024", "1024x2048", "3072x1024 gated", "1024x3072", "151936x1024") if framework == "torch" else ())}


def test_candidates_fit_their_weight():
    for _, rows, inner in products_of("shape:llama-3.1-8b"):
        for batch in (1, 8):
            found = candidates(rows, inner, batch)
            assert len(found) > 10 and all(inner % columns == 0 and r & (r - 1) == 0 for r, columns, _ in found)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_table_is_in_force_for_a_while(framework):
    tiles = pytest.importorskip(f"{framework}_decoder.kernels.tiles")
    before = tiles.span_for(128)
    with tiles_in_force(framework, {"attend 128": [32, 32, 2], "early 1024": [1]}):
        assert tiles.span_for(128) == (32, 32, 2) and tiles.starts_early(1024) and not tiles.starts_early(2048)
    assert tiles.span_for(128) == before


def test_what_is_read_is_what_was_written(tmp_path):
    update_tiles(tmp_path, "jax", "A", {"x": [1]})
    update_tiles(tmp_path, "jax", "A", {"y": [2]})
    assert read_tiles(tmp_path, "jax", "A") == {"x": [1], "y": [2]} and read_tiles(tmp_path, "jax", "B") == {}
    assert read_tiles(tmp_path / "none", "torch", "NVIDIA H200"), "the project's own"
