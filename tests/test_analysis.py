"""Statistics, efficiency, comparison and pictures: hand-worked numbers, oracles, properties, missing data, writers."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, trim_mean

from jaxattr.analysis import compare, plots, stats
from jaxattr.analysis.compare import ArmResult, comparison_table, render_table, write_comparison
from jaxattr.analysis.efficiency import efficiency, reductions, rounds_to_reach
from jaxattr.analysis.plots import comparison_figure, learning_curve_figure, save_figure, score_figure

NAN = math.nan
FEW = {"replications": 200}


def make_arm(name="none", seeds=(0, 1, 2, 3), speed=1.0, rounds=20, noise=0.02, **changes) -> ArmResult:
    """A sigmoid learning curve; seed s always has the same noise, so arms with the same seeds are really paired."""
    k = np.arange(1, rounds + 1)
    draws = [np.random.default_rng(s) for s in seeds]
    mid = np.array([[7 + 1.5 * d.normal()] for d in draws]) / speed
    curve = 1 / (1 + np.exp(-(k - mid) / 2)) + noise * np.array([d.normal(size=rounds) for d in draws])
    count = np.ones((len(seeds), rounds))
    fields = {"seeds": seeds, "rounds": k, "env_steps": 256 * k, "test_return": curve, "train_return": curve}
    fields |= {"kept": 192 * count, "records_per_round": 256, "optimizer_steps": 30 * count, "seconds": 0.5 * k}
    return ArmResult(name, **(fields | {"compile_s": 3.0} | changes))


def is_png(path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# -- stats: aggregates -----------------------------------------------------------------------------------------------
def test_T40_iqm_is_the_trimmed_mean() -> None:
    assert stats.iqm([1, 2, 3, 4, 5, 6, 7, 100]) == 4.5
    assert stats.iqm([100, 3, 7, 1, 6, 2, 5, 4]) == 4.5
    assert stats.iqm([2.0]) == 2.0
    x = np.random.default_rng(0).normal(size=(5, 3))
    for n in range(1, 16):
        assert stats.iqm(x.ravel()[:n]) == pytest.approx(trim_mean(x.ravel()[:n], 0.25))
    assert stats.iqm(x) == pytest.approx(trim_mean(x, 0.25, axis=None))  # pooled, not a mean of per-task IQMs
    np.testing.assert_allclose(stats.iqm(x, axis=0), trim_mean(x, 0.25, axis=0))
    np.testing.assert_allclose(stats.iqm(np.stack([x, x + 1]), axis=(-2, -1)), [stats.iqm(x), stats.iqm(x) + 1])
    with pytest.raises(ValueError, match="at least one score"):
        stats.iqm([])


def test_iqm_does_not_trim_a_nan_away() -> None:
    assert math.isnan(stats.iqm([1, 2, 3, 4, NAN]))


def test_probability_of_improvement() -> None:
    assert stats.probability_of_improvement([1, 2], [1, 2]) == 0.5
    assert stats.probability_of_improvement([3, 4], [1, 2]) == 1.0
    assert stats.probability_of_improvement([1, 3], [2, 3]) == (0 + 0 + 1 + 0.5) / 4
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=7), rng.integers(5, size=9)
    assert stats.probability_of_improvement(x, y) == pytest.approx(mannwhitneyu(x, y).statistic / 63)
    assert stats.probability_of_improvement(x, y) == pytest.approx(1 - stats.probability_of_improvement(y, x))
    assert math.isnan(stats.probability_of_improvement([NAN, 1], [0]))
    with pytest.raises(ValueError, match="non-empty"):
        stats.probability_of_improvement([], [1])


# -- stats: intervals ------------------------------------------------------------------------------------------------
def test_T40_interval_of_five_seeds_is_not_a_point() -> None:
    scores = np.array([0.0, 0, 1, 1, 1])
    low, high = stats.bootstrap_interval(scores)
    assert (low, high) == pytest.approx((0.2, 1.0))  # exact: Binomial(5, .6) quantiles at 2.5 % and 97.5 %, over 5
    column = stats.stratified_bootstrap_interval(scores[:, None], runs_axis=0, tasks=["lake"], statistic=np.mean)
    assert column == pytest.approx((0.2, 1.0))


def test_T40_one_run_of_five_tasks_is_refused_not_collapsed() -> None:
    row = np.array([[0.0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="1 run"):
        stats.stratified_bootstrap_interval(row, runs_axis=0, tasks=list("abcde"))
    with pytest.raises(ValueError, match="transposed"):
        stats.stratified_bootstrap_interval(row, runs_axis=0, tasks=["lake"])
    with pytest.raises(ValueError, match="must be a matrix"):
        stats.stratified_bootstrap_interval(row[0], runs_axis=0, tasks=["lake"])


def test_T40_matrix_and_transpose_agree_and_the_wrong_axis_is_refused() -> None:
    tasks = ["lake", "lander", "acrobot"]
    x = np.random.default_rng(0).normal(size=(5, 3)) + np.array([0, 10, 20])
    upright = stats.stratified_bootstrap_interval(x, runs_axis=0, tasks=tasks, **FEW)
    assert upright == stats.stratified_bootstrap_interval(x.T, runs_axis=1, tasks=tasks, **FEW)
    assert upright[1] - upright[0] > 0.1
    for matrix, axis in ((x, 1), (x.T, 0)):
        with pytest.raises(ValueError, match="transposed") as error:
            stats.stratified_bootstrap_interval(matrix, runs_axis=axis, tasks=tasks)
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="runs_axis"):
        stats.stratified_bootstrap_interval(x, tasks=tasks)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="NaN"):
        stats.stratified_bootstrap_interval(np.where(x > 20, NAN, x), runs_axis=0, tasks=tasks)
    with pytest.raises(ValueError, match="runs_axis must be"):
        stats.stratified_bootstrap_interval(x, runs_axis=2, tasks=tasks)


def test_T40_strata_are_tasks() -> None:
    """Equal runs within each task: no spread at all, however far the tasks are apart."""
    x = np.tile([0.0, 5, 10], (4, 1))
    interval = stats.stratified_bootstrap_interval(x, runs_axis=0, tasks=list("abc"), statistic=np.mean, **FEW)
    assert interval == pytest.approx((5, 5))


def test_bootstrap_against_a_slow_loop_and_the_normal_limit() -> None:
    x = np.random.default_rng(0).normal(3, 2, size=400)
    low, high = stats.bootstrap_interval(x)
    half = 1.96 * x.std() / 20
    assert (low, high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.02)
    fast = stats.bootstrap_interval(x[:9], np.median, replications=300, seed=4)
    assert fast == stats.bootstrap_interval(x[:9], lambda v: float(np.median(v)), replications=300, seed=4)
    rng = np.random.default_rng(4)
    slow = [np.median(x[:9][rng.integers(9, size=9)]) for _ in range(300)]
    assert fast == pytest.approx(tuple(np.percentile(slow, [2.5, 97.5])))
    narrow = stats.bootstrap_interval(x, confidence=0.5)
    assert low < narrow[0] < x.mean() < narrow[1] < high


@pytest.mark.parametrize("values", [[], [3.0], [3.0, NAN]])
def test_one_seed_has_no_interval(values) -> None:
    assert all(map(math.isnan, stats.bootstrap_interval(values)))
    estimate = stats.mean_estimate(values)
    assert estimate.n == np.isfinite(values).sum()
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.mean) == (estimate.n == 0)


def test_bad_input_is_one_line() -> None:
    for call in (
        lambda: stats.bootstrap_interval(np.zeros((5, 3))),
        lambda: stats.bootstrap_interval([1, 2], confidence=95),
        lambda: stats.bootstrap_interval([1, 2], replications=0),
        lambda: stats.paired_difference([1, 2], [1, 2, 3]),
        lambda: stats.bootstrap_curve([1, 2, 3]),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            call()


def test_paired_difference() -> None:
    a, b = np.array([1.0, 11, 21, 31]), np.array([0.0, 10, 20, 30])
    assert stats.paired_difference(a, b) == (1, 1, 1, 4)  # pairing removes the spread between seeds
    wide = stats.independent_difference(a, b)
    assert wide.mean == 1
    assert wide.low < -8
    assert wide.high > 10
    assert stats.paired_difference([1, NAN, 3], [0, 0, NAN])[0::3] == (1, 1)
    assert stats.paired_difference(b, a).low == -1
    assert stats.independent_difference([1.0], [3.0, 5.0])[0] == -3
    assert math.isnan(stats.independent_difference([1.0], [3.0, 5.0]).low)


def test_bootstrap_curve_matches_columns_and_skips_missing() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4))
    x[:, 1] = NAN  # a round without evaluation
    x[1:, 2] = NAN  # one seed left
    x[4:, 3] = NAN  # two seeds have stopped
    band = stats.bootstrap_curve(x, replications=4_000)
    assert band.mean[0] == pytest.approx(x[:, 0].mean())
    assert (band.low[0], band.high[0]) == pytest.approx(stats.bootstrap_interval(x[:, 0]), abs=0.06)
    assert np.isnan([band.mean[1], band.low[1], band.low[2], band.high[2]]).all()
    assert band.mean[2] == x[0, 2]
    assert band.mean[3] == pytest.approx(x[:4, 3].mean())
    assert x[:4, 3].min() <= band.low[3] < band.mean[3] < band.high[3] <= x[:4, 3].max()


def test_bootstrap_curve_resamples_whole_seeds() -> None:
    """Constant curves: the band is the same at every round (rounds are not resampled), for any block size."""
    x = np.repeat([[0.0], [1], [5]], 7, axis=1)
    band = stats.bootstrap_curve(x, replications=500)
    assert np.unique(band.low).size == np.unique(band.high).size == 1
    block, stats._BLOCK = stats._BLOCK, 1_000
    try:
        again = stats.bootstrap_curve(x, replications=500)
    finally:
        stats._BLOCK = block
    np.testing.assert_array_equal(band.high, again.high)


# -- efficiency ------------------------------------------------------------------------------------------------------
def test_rounds_to_reach() -> None:
    assert rounds_to_reach([0, 1, 3, 2], 1) == 2
    assert rounds_to_reach([0, 1, 3, 2], 2) == 3
    assert rounds_to_reach([NAN, NAN, 3], 0) == 3
    assert rounds_to_reach([0, 1], 2) == math.inf
    with pytest.raises(ValueError, match="nan"):
        rounds_to_reach([0, 1], NAN)


def test_reductions_by_hand() -> None:
    """Records 0, 2, 5 at rounds 1, 2, 4 (the dip is no level); the arm reaches them at rounds 1, 1, 3."""
    found = reductions([0, 2, 1, 5], [2, 1, 6, 0], std_seconds=[1, 2, 3, 4], arm_seconds=[0.5, 1, 1.5, 2])
    np.testing.assert_array_equal(found.levels, [0, 2, 5])
    np.testing.assert_allclose(found.rounds, [0, 1 / 2, 1 / 4])
    np.testing.assert_allclose(found.seconds, [1 - 0.5 / 1, 1 - 0.5 / 2, 1 - 1.5 / 4])
    assert found.reached.all()
    out = efficiency([[0, 2, 1, 5]], [[2, 1, 6, 0]], std_seconds=[1, 2, 3, 4], arm_seconds=[0.5, 1, 1.5, 2])
    assert (out["se_ave"], out["se_peak"], out["rt_peak"]) == pytest.approx((1 / 4, 1 / 4, 1 - 1.5 / 4))
    assert math.isnan(out["se_ave_low"])  # one seed each


def test_unreached_levels_are_counted_and_use_one_round_more() -> None:
    found = reductions([0, 1, 2, 3], [0, 1, 1, 1], std_seconds=[2, 4, 6, 8], arm_seconds=[1, 2, 3, 4])
    np.testing.assert_allclose(found.rounds, [0, 0, 1 - 5 / 3, 1 - 5 / 4])
    np.testing.assert_allclose(found.seconds, [1 / 2, 1 / 2, 1 - 5 / 6, 1 - 5 / 8])
    np.testing.assert_array_equal(found.reached, [True, True, False, False])
    out = efficiency([[0, 1, 2, 3]], [[0, 1, 1, 1]])
    assert (out["levels"], out["unreached_levels"], out["peak_reached"]) == (4, 2, False)
    assert math.isnan(out["rt_peak"])  # no seconds given


def test_equal_curves_give_zero() -> None:
    x = np.random.default_rng(0).normal(size=(5, 30)).cumsum(axis=1)
    t = np.arange(1.0, 31)
    out = efficiency(x, x, std_seconds=t, arm_seconds=t, paired=True, **FEW)
    assert [out[m + part] for m in ("se_ave", "se_peak", "rt_peak") for part in ("", "_low", "_high")] == [0] * 9
    assert efficiency(x, x, std_seconds=t, arm_seconds=t / 2, **FEW)["rt_peak"] == 0.5


def test_shifted_curve_gives_the_exact_shift() -> None:
    """An arm that learns twice as fast halves every round; one d rounds late costs d / m at round m."""
    k = np.arange(1, 41)
    std = k / 2.0
    twice = reductions(std, k.astype(float))
    np.testing.assert_allclose(twice.rounds, 1 - np.ceil(k / 2) / k)
    late = reductions(std[:20], np.where(k > 5, (k - 5) / 2, -1)[:20])
    np.testing.assert_allclose(late.rounds[:15], -5 / k[:15])
    assert late.reached.sum() == 15


def test_only_evaluated_rounds_count_and_monotone_rescaling_does_not() -> None:
    std, arm = np.full(12, NAN), np.full(12, NAN)
    std[[3, 7, 11]], arm[[3, 7, 11]] = [1, 2, 3], [1, 3, 3]
    found = reductions(std, arm)
    np.testing.assert_allclose(found.rounds, [0, 0, 1 - 8 / 12])
    np.testing.assert_allclose(reductions(np.exp(std), np.exp(arm)).rounds, found.rounds)
    short = reductions([1, 2, 3], [1, 3, 3], rounds=[4, 8, 12])
    np.testing.assert_allclose(short.rounds, found.rounds)


def test_null_has_a_negative_bias_for_noisy_curves() -> None:
    """Two halves of ONE distribution: the reductions should be 0 on average if there were no bias; they are below."""
    rng = np.random.default_rng(0)
    k = np.arange(1, 51)
    ave, peak = [], []
    for _ in range(200):
        a, b = ((1 - np.exp(-k / 15) + 0.2 * rng.normal(size=(5, 50))).mean(axis=0) for _ in range(2))
        found = reductions(a, b)
        ave.append(found.rounds.mean())
        peak.append(found.rounds[-1])
    for values in (ave, peak):
        assert np.mean(values) + 3 * np.std(values) / math.sqrt(200) < 0


def test_null_is_reported_beside() -> None:
    std, arm, null = (make_arm(seeds=s, speed=v).test_return for s, v in (((0, 1), 1), ((0, 1), 2), ((7, 8, 9), 1)))
    alone = efficiency(std, arm, **FEW)
    both = efficiency(std, arm, null_curves=null, **FEW)
    assert {k: v for k, v in both.items() if not k.startswith("null_")}.keys() == alone.keys()
    assert both["se_ave"] == alone["se_ave"]
    assert both["null_se_ave"] == efficiency(std, null, **FEW)["se_ave"]
    assert both["se_ave"] > both["null_se_ave"]


def test_efficiency_without_enough_evaluations_or_fitting_shapes() -> None:
    last = np.where(np.arange(5) == 4, 1.0, NAN)[None]
    assert math.isnan(efficiency(last, last)["se_ave"])
    assert math.isnan(efficiency(np.full((2, 5), NAN), last)["se_peak"])
    for call in (
        lambda: efficiency(np.zeros((2, 5)), np.zeros((2, 6))),
        lambda: efficiency(np.zeros((2, 5)), np.zeros((3, 5)), paired=True),
        lambda: efficiency(np.zeros(5), np.zeros(5)),
        lambda: efficiency(last, last, std_seconds=[1, 2, 3], arm_seconds=[1, 2, 3]),
        lambda: reductions([1, 2], [1, 2], rounds=[0, 1]),
        lambda: efficiency(last, last, null_curves=np.zeros((2, 4))),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            call()


# -- comparison ------------------------------------------------------------------------------------------------------
@pytest.fixture
def arms() -> dict[str, ArmResult]:
    other = make_arm(seeds=(10, 11, 12))
    fast = make_arm(speed=1.5, kept=np.full((4, 20), 128), optimizer_steps=np.full((4, 20), 20))
    low = make_arm()
    return {
        "none": make_arm(),
        "none (other seeds)": other,
        "iif": fast,
        "low": make_arm(test_return=low.test_return / 2),
    }


def test_table_by_hand() -> None:
    x = np.array([[0.0, 2, 4], [2, 4, 6]])
    base = {"seeds": (0, 1), "rounds": 3, "kept": np.full((2, 3), 256), "optimizer_steps": np.full((2, 3), 30)}
    swapped = make_arm(**(base | {"seeds": (1, 0), "test_return": (x + np.array([[1], [3]]))[::-1]}))
    rows = comparison_table({"none": make_arm(**base, test_return=x), "iif": swapped}, **FEW)
    first, second = rows
    assert (first["final_test_return_mean"], first["final_test_return_min"], first["auc_test_return_mean"]) == (5, 4, 3)
    assert (first["kept_share"], first["optimizer_steps_per_seed"], first["env_steps_per_seed"]) == (1, 90, 768)
    assert (first["train_seconds"], first["compile_seconds"]) == (1.5, 3)
    assert first["diff_auc_test_return_mean"] is first["se_ave_percent"] is first["null_se_ave_percent"] is None
    assert second["diff_kind"] == "paired"  # by seed value, not by position
    assert (second["diff_auc_test_return_mean"], second["diff_auc_test_return_low"]) == (2, 1)
    assert second["diff_auc_test_return_high"] == 3
    assert second["se_ave_percent"] == pytest.approx(100 * (0 + 1 / 2 + 1 / 3) / 3)  # means 1, 3, 5 against 3, 5, 7
    assert second["null_se_ave_percent"] is None


def test_table_has_the_null_beside_and_marks_bounds(arms) -> None:
    rows = {row["arm"]: row for row in comparison_table(arms, **FEW)}
    assert list(rows) == list(arms)
    assert len({tuple(row) for row in rows.values()}) == 1  # every row has the same columns
    null = rows["none (other seeds)"]
    assert null["diff_kind"] == "independent"
    assert null["null_se_ave_percent"] is None
    assert rows["iif"]["null_se_ave_percent"] == null["se_ave_percent"] is not None
    assert rows["iif"]["diff_auc_test_return_low"] > 0
    assert rows["iif"]["se_ave_percent"] > null["se_ave_percent"]
    assert rows["iif"]["kept_share"] == 0.5
    assert rows["low"]["unreached_levels_count"] > 0
    assert rows["low"]["peak_reached"] is False
    text = render_table(list(rows.values()))
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1
    assert "<= " in text
    assert "not paired" in text
    assert "nan" not in text.lower()


def test_one_seed_comparison_works() -> None:
    rows = comparison_table({"none": make_arm(seeds=(3,)), "iif": make_arm(seeds=(3,), speed=2)}, **FEW)
    assert rows[1]["interval"].startswith("none")
    assert rows[1]["diff_auc_test_return_mean"] > 0
    assert rows[1]["diff_kind"] == "paired"
    assert rows[1]["se_ave_percent"] > 0
    assert rows[1]["final_test_return_low"] is rows[1]["se_ave_percent_low"] is None
    assert "[" not in render_table(rows)


def test_missing_values() -> None:
    stopped = make_arm().test_return.copy()
    stopped[2, 10:] = NAN  # seed 2 stopped: its later rounds are missing, others have them
    sparse = np.where(np.arange(1, 21) % 5 == 0, make_arm().test_return, NAN)
    never = np.full((4, 20), NAN)
    arms = {"none": make_arm(), "stopped": make_arm(test_return=stopped), "sparse": make_arm(test_return=sparse)}
    arms |= {"never": make_arm(test_return=never, seconds=np.full(20, NAN)), "short": make_arm(rounds=10)}
    rows = {row["arm"]: row for row in comparison_table(arms, **FEW)}
    assert (rows["stopped"]["seeds"], rows["stopped"]["seeds_complete"], rows["stopped"]["diff_seeds"]) == (4, 3, 3)
    assert rows["stopped"]["diff_auc_test_return_mean"] == 0
    assert rows["sparse"]["evaluations"] == 4
    for name in ("sparse", "never", "short"):  # other rounds: nothing that could be compared
        assert rows[name]["diff_auc_test_return_mean"] is rows[name]["se_ave_percent"] is None
        assert rows[name]["diff_kind"].startswith("none")
    assert rows["never"]["auc_test_return_mean"] is rows["never"]["se_ave_percent"] is None
    assert rows["never"]["train_seconds"] is None
    text = render_table(list(rows.values()))
    assert "3 of 4" in text
    assert not re.search(r"<= -\s", text)
    assert "nan" not in text.lower()


def test_wrong_arms_are_refused(arms) -> None:
    with pytest.raises(ValueError, match="no arm named 'nope'"):
        comparison_table(arms, baseline="nope")
    with pytest.raises(ValueError, match="other seeds"):
        comparison_table({"none": make_arm(), "none (other seeds)": make_arm()})
    for changes, words in (
        ({"kept": np.zeros((20, 4))}, "kept must have shape"),
        ({"seeds": (0, 0, 1, 2)}, "seeds must differ"),
        ({"seconds": np.ones(20)[::-1] * np.arange(20, 0, -1)}, "cumulative"),
    ):
        with pytest.raises(ValueError, match=words):
            make_arm(**changes)


# -- writers and pictures --------------------------------------------------------------------------------------------
def test_write_comparison(arms, tmp_path) -> None:
    folder = tmp_path / "new" / "run"
    rows = write_comparison(folder, arms, title="lake", extra={"device": "cpu"}, **FEW)
    assert sorted(p.name for p in folder.iterdir()) == ["comparison.csv", "comparison.json", "comparison.png"]
    assert is_png(folder / "comparison.png")
    document = json.loads((folder / "comparison.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert document["rows"] == rows
    assert document["extra"] == {"device": "cpu"}
    assert len(document["per_seed"]) == 4 + 3 + 4 + 4
    with (folder / "comparison.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["arm"] for row in table] == list(arms)
    assert float(table[2]["auc_test_return_mean"]) == rows[2]["auc_test_return_mean"]
    assert table[0]["diff_auc_test_return_mean"] == ""
    before = (folder / "comparison.csv").read_bytes()
    assert write_comparison(folder, arms, title="lake", **FEW) == rows  # again over it, same numbers
    assert (folder / "comparison.csv").read_bytes() == before


def test_a_failed_write_leaves_the_old_file(arms, tmp_path, monkeypatch) -> None:
    write_comparison(tmp_path, arms, **FEW)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def broken(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        compare.write_text_atomic(tmp_path / "comparison.csv", "half")
    with pytest.raises(OSError, match="disk full"):
        save_figure(plots.Figure(), tmp_path / "comparison.png")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_pictures_of_awkward_data(tmp_path) -> None:
    one = make_arm(seeds=(0,), test_return=np.where(np.arange(20) == 19, 1.0, NAN)[None])
    empty = make_arm(test_return=np.full((4, 20), NAN))
    awful = make_arm(test_return=np.concatenate([np.full((4, 19), -9.0), np.ones((4, 1))], axis=1))
    for number, arms in enumerate(({"none": one}, {"none": one, "x": empty}, {"none": make_arm(), "x": awful})):
        rows = comparison_table(arms, **FEW)
        assert is_png(comparison_figure(tmp_path / f"{number}.png", arms, rows, "awkward", **FEW))
    curves = {"a": (np.arange(5), np.random.default_rng(0).normal(size=(3, 5))), "b": make_arm()}
    assert is_png(learning_curve_figure(tmp_path / "curves.png", curves, "t", per_seed=True, **FEW))
    spread = np.array([-1, 0, 1.0]) * np.ones((3, 6, 1))
    spread[0, 2:] = NAN
    shares = np.full((3, 6), 0.9)
    assert is_png(score_figure(tmp_path / "score.png", np.arange(6), shares, (0.05, 0.5, 0.95), spread, "t"))
    assert is_png(score_figure(tmp_path / "s.png", np.arange(6), shares[0], (0.1, 0.9), spread[1, :, ::2] * 0, "t"))
    with pytest.raises(ValueError, match="do not fit"):
        score_figure(tmp_path / "no.png", np.arange(5), shares, (0.05, 0.5, 0.95), spread, "t")


def test_analysis_imports_only_the_standard_library_numpy_and_matplotlib() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "matplotlib", "jaxattr.analysis"}
    for module in (compare, plots, stats, sys.modules["jaxattr.analysis.efficiency"]):
        source = Path(module.__file__).read_text()
        assert "pyplot" not in re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
        for node in ast.walk(ast.parse(source)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in allowed or ".".join(name.split(".")[:2]) in allowed, name
