"""Blocks of the README and pictures, made from results."""

from __future__ import annotations

import json

import pytest

from compare.pictures import digest_of, draw
from compare.results import ResultError, save
from compare.tables import BEGIN, BLOCKS, END, launch_table, loaded, markdown, updated, with_block
from compare.tuning import update_tiles
from tests.results import entry, run

ENVIRONMENT = {"gpu": {"name": "A", "driver_version": "1.2"}, "versions": {"torch": "9.1", "jax": "0.9"}, "cpu": "C"}


def one(ms: float = 1.0, verdict: str = "pass", **more) -> dict:
    graph = {**entry("torch cuda_graph plain", ms, verdict), "graph_launches_per_step": 1.0, "other_launches_per_step": 57.0, "graph_updates_per_step": 0.0, "capture_s": 0.0123}
    graph["parity"] |= {"differing_bits": 0}
    return {**run(entry("torch eager plain", 3.0), graph, model="shape:qwen3-0.6b"), "environment": ENVIRONMENT, **more}


def readme() -> str:
    return "\n".join(f"BEFORE {name}\n{BEGIN.format(name)}\nold\n{END.format(name)}\nAFTER" for name in BLOCKS)


def test_the_launch_table_shows_what_was_counted():
    table = launch_table([one()], {})
    (row,) = [line for line in table.splitlines() if "| torch cuda_graph plain |" in line]
    assert "| pass | 0 | 1.00 | 57.00 | 0.00 | 0.999 |" in row and row.endswith("| 9 | – | 12.3 |")
    assert "A, driver 1.2; torch 9.1, jax 0.9; bfloat16" in table


def test_points_of_sweeps_are_no_rows_of_it():
    point = one(sweep={"name": "batch", "value": "1"})
    assert launch_table([one(), point], {}) == launch_table([one()], {})


def test_every_block_is_made_anew_and_nothing_else(tmp_path):
    save(one(), tmp_path / "one.json")
    save(one(sweep={"name": "batch", "value": "2"}), tmp_path / "sweep-batch" / "batch-2.json")
    assert len(loaded(tmp_path)) == 2
    made = updated(readme(), tmp_path)
    assert made.count("BEFORE") == made.count("AFTER") == len(BLOCKS) and "\nold\n" not in made
    assert "**How much of a step is launch overhead?**" in made and "- torch, qwen3-0.6b: 67% of 3.00 ms" in made
    assert "| capturing takes 50 to 200 ms | does not hold | torch, qwen3-0.6b: 12 ms |" in made
    assert updated(made, tmp_path) == made


def test_tests_of_the_lane_reach_the_claims(tmp_path):
    save(one(), tmp_path / "one.json")
    (tmp_path / "tests.txt").write_text("PASSED tests/test_gpu.py::test_a_hundred_decoders_leave_no_memory_behind[torch]\n")
    assert "| graphs leak memory unless they are released | holds |" in updated(readme(), tmp_path)


def test_a_readme_without_a_place_and_a_folder_without_results_are_errors(tmp_path):
    with pytest.raises(ResultError, match="no place"):
        with_block("no markers", "answers", "text")
    with pytest.raises(ResultError, match="holds no result file"):
        loaded(tmp_path)


def test_a_cell_cannot_end_itself():
    assert markdown(("a",), [("x | y",)])[-1] == "| x \\| y |"


def test_a_picture_carries_a_digest_of_what_it_shows():
    first, again, other = (draw([one(ms)])["steps.png"] for ms in (1.0, 1.0, 2.0))
    assert first[:4] == b"\x89PNG" and digest_of(first) == digest_of(again) != digest_of(other)


def test_what_fails_is_in_no_picture():
    assert digest_of(draw([one(verdict="fail")])["steps.png"]) == digest_of(draw([one(5.0, verdict="fail")])["steps.png"])


def test_timelines_are_drawn_where_both_steps_were_traced():
    result = one()
    assert set(draw([result])) == {"steps.png"}
    for v in result["variants"]:
        v["timeline"] = {"names": ["call", "kernel"], "spans": [[0, 0, 0, 1000], [1, 1, 2000, 3000]], "busy_us": 3.0, "span_us": 5.0, "idle_share": 0.4, "kernels": 1}
    assert set(draw([result])) == {"steps.png", "timeline-torch.png"}


def test_blocks_of_steps_are_named_for_a_profiler(monkeypatch):
    from compare import ranges, timing
    from tests.test_compare import FakeArm

    named = []

    class Annotate:
        def __init__(self, name):
            named.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(ranges, "nvtx", type("nvtx", (), {"annotate": Annotate}))
    timing.time_steps([FakeArm(0.0)], rounds=2, steps_available=64)
    assert len(named) == 2 and named[0].endswith(": 4 steps")
    monkeypatch.setattr(ranges, "nvtx", None)
    timing.time_steps([FakeArm(0.0)], rounds=2, steps_available=64)
    assert len(named) == 2


def test_measured_tiles_join_those_that_are_there(tmp_path):
    path = update_tiles(tmp_path, "torch", "A", {"attend 64": [64, 32, 2]})
    assert update_tiles(tmp_path, "torch", "A", {"early 1024": [1]}) == path == tmp_path / "torch_decoder/kernels/tiles.json"
    table = json.loads(path.read_text())
    assert table["A"] == {"attend 64": [64, 32, 2], "early 1024": [1]} and "NVIDIA H200" in table
    assert [file.name for file in path.parent.iterdir()] == ["tiles.json"]
