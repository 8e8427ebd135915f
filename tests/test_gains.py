"""Intervals, what a change brings alone, and what differs between two runs."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from compare.cli import main
from compare.diff import changes, worse
from compare.gains import gains
from compare.results import ResultError
from compare.statistics import drift, median_interval, ratio_interval
from compare.timing import quantiles
from tests.results import entry, run, samples


def test_an_interval_holds_the_median_as_often_as_it_says():
    inside = 0
    for seed in range(200):
        found = median_interval(samples(1.0, 0.1, 30, seed))
        inside += found.low <= 1.0 <= found.high
    assert 180 <= inside <= 199  # 95 % of 200 is 190


def test_what_slows_both_arms_does_not_widen_the_ratio():
    """Arms are taken in turns: a slow spell of the machine hits a round of both."""
    spell = np.where(np.arange(40) % 2 == 0, 1.0, 1.5)
    one, two = np.array(samples(2.0, seed=1)) * spell, np.array(samples(1.0, seed=2)) * spell
    together, apart = ratio_interval(one, two, interleaved=True), ratio_interval(one, two, interleaved=False)
    assert together.low < 2.0 < together.high and together.high - together.low < 0.1 < apart.high - apart.low


def test_drift_tells_an_arm_that_was_not_warm():
    assert drift([3.0, 2.0, 1.0, 1.0, 1.0, 1.0]) < -0.3 and abs(drift(samples(1.0))) < 0.01


def test_launch_and_fusion_are_told_apart():
    found = gains(
        run(
            entry("transformers eager plain", 9.0),
            entry("torch eager plain", 4.0),
            entry("torch cuda_graph plain", 2.0),
            entry("torch eager fused", 3.0),
            entry("torch cuda_graph fused", 1.0),
            entry("torch device_loop plain", 1.9),
            entry("jax jit plain", 1.0),
            entry("jax command_buffer plain", 0.8, "fail"),
        )
    )
    shown = {(gain.cause, gain.before.label(), gain.after.label()): gain.ratio.value for gain in found}
    assert shown == {
        ("launch", "torch eager plain", "torch cuda_graph plain"): pytest.approx(2.0),
        ("launch", "torch eager fused", "torch cuda_graph fused"): pytest.approx(3.0),
        ("launch", "torch cuda_graph plain", "torch device_loop plain"): pytest.approx(2 / 1.9),
        ("launch", "jax jit plain", "jax command_buffer plain"): pytest.approx(1.25),
        ("fusion", "torch cuda_graph plain", "torch cuda_graph fused"): pytest.approx(2.0),
    }
    assert [gain.after.label() for gain in found if not gain.passed] == ["jax command_buffer plain"]
    assert all("PARITY" in gain.line() for gain in found if not gain.passed)


def test_a_run_against_itself_shows_no_change():
    one = run(entry("torch eager plain", 4.0))
    found, alone = changes(one, one)
    assert [change.verdict for change in found] == ["same"] and alone == [] and worse(found) == []


def test_slower_faster_broken_and_alone_are_named():
    before = run(*(entry(label, 4.0, seed=1) for label in ("torch eager plain", "torch cuda_graph plain", "jax jit plain", "jax op_by_op plain")))
    after = run(entry("torch eager plain", 4.3, seed=2), entry("torch cuda_graph plain", 3.0, seed=2), entry("jax jit plain", 4.0, "fail"), entry("jax command_buffer plain", 1.0))
    found, alone = changes(before, after)
    assert {c.variant.label(): c.verdict for c in found} == {"torch eager plain": "slower", "torch cuda_graph plain": "faster", "jax jit plain": "broken"}
    assert len(worse(found)) == 2 and len(alone) == 2 and "jax op_by_op plain" in alone[0] and "first" in alone[0] and "second" in alone[1]


def test_noise_is_no_change():
    """40 samples with 1 % of noise each, 30 pairs of runs of the same code."""
    verdicts = [changes(run(entry("jax jit plain", 4.0, seed=i)), run(entry("jax jit plain", 4.0, seed=100 + i)))[0][0].verdict for i in range(30)]
    assert set(verdicts) == {"same"}


def test_a_variant_that_stopped_working_is_broken(tmp_path, capsys):
    both = [entry("torch eager plain", 4.0), entry("torch cuda_graph plain", 2.0)]
    for name, entries in (("a", both), ("b", [both[0], gone(both[1])]), ("c", [entry("jax jit plain", 1.0)])):
        (tmp_path / f"{name}.json").write_text(json.dumps(run(*entries)))
    files = {name: str(tmp_path / f"{name}.json") for name in "abc"}
    assert main(["diff", files["a"], files["b"]]) == 1
    assert "broken  torch cuda_graph plain: worker ended" in capsys.readouterr().out
    assert main(["diff", files["b"], files["a"]]) == 0
    assert main(["diff", files["a"], files["c"]]) == 2 and "nothing can be compared" in capsys.readouterr().err


def gone(v: dict) -> dict:
    return {**{name: v[name] for name in ("framework", "launch", "kernels", "sampling", "batch", "bucket")}, "not_measured": "worker ended"}


def test_a_field_that_only_the_newer_run_has_is_compared():
    with pytest.raises(ResultError, match="prompt_tokens"):
        changes(run(entry("jax jit plain", 4.0)), run(entry("jax jit plain", 4.0), prompt_tokens=500))


def test_few_samples_give_no_interval():
    assert quantiles([1.0, 2.0])["p50_interval"] is None and quantiles([1.0] * 6)["p50_interval"] == [1.0, 1.0]
    assert ratio_interval([2.0, 2.0], [1.0, 1.0], interleaved=True)[1:] == (0.0, float("inf"))


@pytest.mark.parametrize(("change", "word"), [({"gpu": "B"}, "machines"), ({"batch": 2}, "batch")])
def test_runs_that_cannot_be_compared_are_refused(change, word):
    with pytest.raises(ResultError, match=word):
        changes(run(entry("jax jit plain", 4.0)), run(entry("jax jit plain", 4.0), **change))


def test_diff_exits_1_when_a_variant_became_slower(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ms in zip(files, (4.0, 5.0)):
        file.write_text(json.dumps(run(entry("torch eager plain", ms))))
    assert main(["diff", *map(str, files)]) == 1
    assert capsys.readouterr().out.startswith("slower  torch eager plain: 3.995 -> 4.994 ms")
    assert main(["diff", *map(str, files[::-1])]) == 0
    assert main(["diff", *map(str, files), "--tolerance", "0.5"]) == 0
    other = copy.deepcopy(json.loads(files[0].read_text()))
    other["schema_version"] = 99
    files[0].write_text(json.dumps(other))
    assert main(["diff", *map(str, files)]) == 2
