"""Rounds retrained on filtered records: identities of the arms, numbers of the table, the command."""

from __future__ import annotations

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattr
from jaxattr.analysis.intervention import (
    differences,
    intervention_figure,
    intervention_table,
    render_table,
    sign_test,
)
from jaxattr.analysis.tables import aligned, csv_text, plain
from jaxattr.config import Config, ConfigError
from jaxattr.evaluate import STOCHASTIC, evaluate_lanes
from jaxattr.host.cli import main
from jaxattr.host.rounds import load_rounds
from jaxattr.studies.intervention import Arm, make_intervention, parse_arm, parse_arms

EPISODES = 6
CONFIG = Config(  # round 1 is learned from everything, round 3 as iif says
    total_steps=3 * 64, num_envs=4, num_steps=16, minibatch_size=16, num_epochs=2, hidden=(8,), learning_rate=3e-2,
    filter="iif", p=0.5, warmup_rounds=1, score_normalize="none", eval_episodes=EPISODES, normalize_obs=True,
    env_args=(("max_steps_in_episode", 40),),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "plain"
    jaxattr.train("CartPole-v1", CONFIG, seeds=2, out=out, record_rounds=(1, 3))
    return out


@pytest.fixture(scope="module")
def rounds(folder):
    return load_rounds(folder)


@pytest.fixture(scope="module")
def outcomes(rounds):
    """All arms of both rounds, from one compiled study."""
    arms = parse_arms(["iif:0", "random:0", "iif", "iif:1", "dtv", "reweight", "iif:1+matched"])
    study = make_intervention(rounds[0].step, rounds[0].env, arms, episodes=EPISODES, lanes=2)
    return [jax.tree.map(np.asarray, study(r.data)) for r in rounds]


# -- the study ------------------------------------------------------------------------------------------------------
def test_arms_repeat_what_the_run_did(rounds, outcomes):
    """`none` a round that was learned from everything, the run's own rule and p one that was filtered."""
    evaluation = jax.jit(evaluate_lanes(rounds[0].step.nets, rounds[0].env, EPISODES))
    for r, got, arm in zip(rounds, outcomes, ("none", "iif"), strict=True):
        want = evaluation(r.data.after.params, r.data.after.obs_stats, jax.random.key(CONFIG.eval_seed))
        assert np.array_equal(got[arm].returns, want.episode_return[:, STOCHASTIC])
        assert np.allclose(got[arm].kept, np.mean(r.data.weights > 0, axis=1))
        assert np.all(got["none"].kept == 1)


def test_keeping_everything_changes_nothing_at_all(outcomes):
    for got in outcomes:
        for name in ("iif:0", "random:0"):
            assert np.array_equal(got[name].returns, got["none"].returns)
            assert np.all(got[name].kept == 1)


def test_rules_drop_what_they_say(rounds, outcomes):
    for r, got in zip(rounds, outcomes, strict=True):
        share = np.mean(np.asarray(r.data.scores) >= 0, axis=1)
        assert np.allclose(got["iif:1"].kept, np.maximum(share, 16 / 64))
        assert np.array_equal(got["iif:1+matched"].kept, got["iif:1"].kept)
        for name in ("dtv", "reweight"):  # dtv's scores are about another target
            assert np.all((got[name].kept > 0) & (got[name].kept < 1)), name
    assert any(np.any(got["iif:1"].returns != got["none"].returns) for got in outcomes)
    assert any(np.any(got["iif:1+matched"].returns != got["iif:1"].returns) for got in outcomes)


def test_scores_are_the_recorded_ones_where_they_fit(rounds):
    data = rounds[1].data
    made_up = np.ones((2, 64), np.float32)
    made_up[:, :10] = -1
    marked = data.replace(scores=jnp.asarray(made_up))
    step = rounds[1].step
    for config, want in (
        (CONFIG, [54 / 64, 54 / 64]),
        (CONFIG.replace(filter="none"), np.mean(np.asarray(data.scores) >= 0, axis=1)),  # it recorded none: score now
    ):
        same = dataclasses.replace(step, config=config)
        study = make_intervention(same, rounds[1].env, [Arm("iif", 1.0)], episodes=1, lanes=2)
        assert np.allclose(study(marked)["iif:1"].kept, want)


def test_monte_carlo_advantages_are_made_from_the_rollout(rounds):
    """The run did not keep any. Rewards of both signs, so that the two advantages disagree somewhere."""
    data = rounds[0].data
    reward = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
    data = data.replace(rollout=data.rollout.replace(reward=jnp.asarray(reward)))
    study = make_intervention(rounds[0].step, rounds[0].env, [Arm("advantage_sign", 1.0)], episodes=1, lanes=2)
    r, kept = jax.tree.map(np.asarray, data.rollout), np.zeros(2)
    for lane in range(2):
        total = {0.95: np.zeros(4), 1.0: np.zeros(4)}
        agree = []
        for t in reversed(range(16)):
            go_on = 1.0 - r.terminated[lane, t]
            delta = reward[lane, t] + 0.99 * r.next_value[lane, t] * go_on - r.value[lane, t]
            end = 1.0 - (r.terminated[lane, t] | r.truncated[lane, t])
            total = {lam: delta + 0.99 * lam * end * x for lam, x in total.items()}
            agree.append(total[0.95] * total[1.0] >= 0)
        kept[lane] = np.mean(agree)
    assert np.all(kept < 1)
    assert np.allclose(study(data)["advantage_sign:1"].kept, kept)


def test_a_stopped_seed_has_no_value(rounds):
    data = rounds[0].data
    data = data.replace(before=data.before.replace(alive=jnp.array([True, False])))
    study = make_intervention(rounds[0].step, rounds[0].env, [Arm("none")], episodes=2, lanes=2)
    returns = np.asarray(study(data)["none"].returns)
    assert np.all(np.isfinite(returns[0]))
    assert np.all(np.isnan(returns[1]))


def test_notation_of_arms():
    assert parse_arm("iif:0.5+matched") == Arm("iif", 0.5, "step_matched")
    assert parse_arm("zero") == Arm("zero")
    assert parse_arm("iif:0.50").name == "iif:0.5"
    assert [a.name for a in parse_arms(["iif:1", "none"])] == ["none", "iif:1"]
    bad = {
        "iff:0.5": "unknown rule 'iff'; did you mean 'iif'",
        "iif:1.5": r"p is '1.5': must be a number in \[0, 1\]",
        "iif:x": "p is 'x'",
        "iif:nan": "p is 'nan'",
    }
    for text, message in bad.items():
        with pytest.raises(ConfigError, match=message):
            parse_arm(text)
    with pytest.raises(ConfigError, match="each once"):
        parse_arms(["iif:0.5", "iif:0.50"])


# -- the table ------------------------------------------------------------------------------------------------------
def test_sign_test_by_hand():
    assert sign_test([1, 2, 3, 4, 5]) == 2 / 32
    assert sign_test([1, 2, 3, -4, 0, np.nan]) == 2 * (1 + 4) / 16
    assert sign_test([1, -1]) == 1
    assert np.isnan(sign_test([0, 0]))
    for n in range(1, 12):
        from scipy.stats import binomtest

        for better in range(n + 1):
            x = [1] * better + [-1] * (n - better)
            assert sign_test(x) == pytest.approx(binomtest(better, n).pvalue)


def made_returns():
    """2 rounds, 3 seeds, 2 episodes."""
    base = np.array([[[1, 3], [4, 4], [0, 2]], [[2, 2], [5, 7], [1, 1]]], float)
    gap = np.array([[1, 0, -1], [3, 0, np.nan]], float)
    return {"none": base, "iif:1": base + gap[..., None]}, gap


def test_table_by_hand():
    returns, gap = made_returns()
    kept = {"none": np.ones((2, 3)), "iif:1": np.array([[0.5, 0.7, 0.9], [0.1, 0.3, np.nan]])}
    assert np.array_equal(differences(returns)["iif:1"], gap, equal_nan=True)
    rows = intervention_table([4, 9], returns, kept, replications=200)
    assert [r["round"] for r in rows] == ["all", 4, 9]
    whole, first, second = rows
    assert whole["diff_mean"] == pytest.approx((2 + 0 - 1) / 3)  # the seeds' means 2, 0, -1
    assert (whole["pairs"], whole["better"], whole["equal"], whole["worse"]) == (5, 2 / 5, 2 / 5, 1 / 5)
    assert whole["sign_test_p"] == 1
    assert whole["kept_share"] == pytest.approx(0.5)
    assert whole["baseline_test_return"] == pytest.approx(np.mean([2, 4, 1, 2, 6]))
    assert whole["test_return"] == pytest.approx(np.mean([3, 4, 0, 5, 6]))
    assert (first["diff_mean"], first["seeds"], first["better"]) == (0, 3, 1 / 3)
    assert (second["diff_mean"], second["seeds"], second["worse"]) == (1.5, 2, 0)
    for row in rows:
        assert row["diff_low"] <= row["diff_mean"] <= row["diff_high"]
        assert row["better"] + row["equal"] + row["worse"] == pytest.approx(1)
    from jaxattr.analysis.stats import bootstrap_interval

    assert (whole["diff_low"], whole["diff_high"]) == bootstrap_interval([2, 0, -1], replications=200)


def test_one_seed_has_no_interval():
    returns, _ = made_returns()
    one = {name: x[:, :1] for name, x in returns.items()}
    rows = intervention_table([1, 2], one, {name: np.ones((2, 1)) for name in one})
    assert np.isnan(rows[0]["diff_low"])
    assert "no interval: one seed" in render_table(rows)


def test_wrong_shapes():
    returns, _ = made_returns()
    with pytest.raises(ValueError, match="no arm 'none'"):
        differences({"iif:1": returns["iif:1"]})
    with pytest.raises(ValueError, match=r"same \(K, S, E\)"):
        differences({**returns, "zero": returns["none"][:1]})
    with pytest.raises(ValueError, match=r"must be \(S,\)"):
        sign_test(np.zeros((2, 2)))


def test_text_helpers():
    assert aligned([["a", "b"], ["long", "c"]]).splitlines()[1] == "| ---- | - |"
    assert csv_text([{"a": float("nan"), "b": 1}]) == "a,b\n,1\n"
    assert plain({"a": np.array([1.0, np.nan]), "b": (np.int32(3), "x")}) == {"a": [1.0, None], "b": [3, "x"]}


def test_many_rounds_and_no_arms_can_be_drawn(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.normal(size=(40, 3, 2))
    returns = {"none": base, "iif:1": base + rng.normal(size=(40, 3, 1))}
    rows = intervention_table(list(range(1, 41)), returns, {n: np.ones((40, 3)) for n in returns}, replications=50)
    for gaps in (differences(returns), {}):
        file = intervention_figure(tmp_path / "a.png", list(range(1, 41)), gaps, rows if gaps else [], "made up")
        assert file.stat().st_size > 5_000


# -- the command ----------------------------------------------------------------------------------------------------
def test_command(folder, capsys):
    assert main(["intervene", str(folder), "--arms", "iif:0.5", "random:0.5", "--episodes", "4"]) == 0
    said = capsys.readouterr().out
    assert "| random:0.5 | 2 " in said
    out = folder / "intervention"
    assert sorted(p.name for p in out.iterdir()) == ["intervention.csv", "intervention.json", "intervention.png"]
    with (out / "intervention.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["arm"], r["round"]) for r in rows[:4]] == [
        ("iif:0.5", "all"), ("random:0.5", "all"), ("iif:0.5", "1"), ("random:0.5", "1"),
    ]  # fmt: skip
    saved = json.loads((out / "intervention.json").read_text())
    assert saved["rounds"] == [1, 3]
    gaps = np.array(saved["difference"]["iif:0.5"])
    means = {name: np.array(x) for name, x in saved["mean_test_return"].items()}
    assert np.allclose(gaps, means["iif:0.5"] - means["none"])
    assert float(rows[0]["diff_mean"]) == pytest.approx(gaps.mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "best:0.5"], "unknown rule 'best'"),
        (["--arms", "iif:2"], "p is '2': must be a number in [0, 1]"),
        (["--arms", "iif:1", "iif:1.0"], "name one or more, each once"),
        (["--episodes", "0"], "--episodes is 0: must be 1 or more"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, options, message):
    assert main(["intervene", str(folder), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_no_recorded_rounds(tmp_path, capsys):
    assert main(["intervene", str(tmp_path)]) == 2
    assert "holds no recorded round; train with --record-rounds" in capsys.readouterr().err
