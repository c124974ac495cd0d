"""Counterfactual retraining: subsets, retrainings against single ones, LDS on a problem where the score is exact."""

from __future__ import annotations

import csv
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxattr
from jaxattr.analysis.ranks import ranks, spearman, spearman_interval
from jaxattr.config import Config, ConfigError
from jaxattr.host.cli import main
from jaxattr.host.counterfactual import counterfactual, write_result
from jaxattr.studies import counterfactual as study
from jaxattr.studies.replay import retrain, score, subset_step

# One SGD step on half of the records: what a record does to the target is its score, to first order.
ONE_STEP = Config(
    total_steps=2 * 128, num_envs=4, num_steps=32, minibatch_size=64, num_epochs=1, hidden=(4,), optimizer="sgd",
    learning_rate=0.05, max_grad_norm=None, normalize_advantage="none", score_normalize="none", score_always=True,
    eval_episodes=2, env_args=(("max_steps_in_episode", 9),),
)  # fmt: skip
USUAL = ONE_STEP.replace(
    optimizer="adam", learning_rate=0.01, minibatch_size=16, num_epochs=2, normalize_advantage="minibatch",
    score_normalize="buffer", filter="iif",
)  # fmt: skip


@pytest.fixture(scope="module")
def linear():
    return jaxattr.train("CartPole-v1", ONE_STEP, record_rounds=(2,)).round(2)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "usual"
    run = jaxattr.train("CartPole-v1", USUAL, seeds=2, record_rounds=(2,), out=out)
    return run.round(2), out


# -- numbers --------------------------------------------------------------------------------------------------


def scipys(x, y) -> float:
    result: Any = scipy.stats.spearmanr(x, y)
    return float(result.statistic)


def test_spearman_is_scipys():
    rng = np.random.default_rng(0)
    for make in (lambda: rng.normal(size=40), lambda: rng.integers(0, 5, size=40).astype(float)):
        x, y = make(), make()
        assert np.allclose(ranks(x), scipy.stats.rankdata(x))
        assert spearman(x, y) == pytest.approx(scipys(x, y), abs=1e-12)
    x, y = rng.normal(size=(3, 9)), rng.integers(0, 3, size=(3, 9))
    assert spearman(x, y).tolist() == pytest.approx([scipys(x[i], y[i]) for i in range(3)])
    assert np.isnan(spearman(np.ones(5), np.arange(5)))


def test_the_interval_covers():
    rng, hits = np.random.default_rng(1), 0
    truth = 6 / np.pi * np.arcsin(0.6 / 2)  # Spearman of a normal pair with correlation 0.6
    for i in range(60):
        x = rng.normal(size=100)
        y = 0.6 * x + 0.8 * rng.normal(size=100)
        _, low, high = spearman_interval(x, y, replications=300, seed=i)
        hits += low <= truth <= high
    assert 50 <= hits <= 60
    assert np.isnan(spearman_interval(np.arange(19), np.arange(19))[1])


def test_subsets_keep_whole_units():
    ids = jnp.array([0, 0, 2, 2, 2, -1, 6, 7])
    valid = jnp.arange(8) != 7
    ids = jnp.where(valid, ids, -1)
    drawn = study.draw_subsets(jax.random.key(0), ids, valid, 300, 2 / 3)
    w = np.asarray(drawn.weights)
    assert drawn.kept is None
    assert np.all(w[:, 7] == 0)
    assert np.all(w[:, 5] == 1)  # belongs to no unit
    assert np.all(w[:, 0] == w[:, 1])
    assert np.all((w[:, 2] == w[:, 3]) & (w[:, 3] == w[:, 4]))
    assert np.all(w[:, 0] + w[:, 2] + w[:, 6] == 2)
    assert 0.55 < w[:, 6].mean() < 0.78
    single = study.draw_subsets(jax.random.key(0), jnp.arange(8), jnp.ones(8, bool), 5, 0.5)
    assert single.kept == 4
    assert np.all(np.asarray(single.weights).sum(1) == 4)
    with pytest.raises(ConfigError, match="share is 1: must be between 0 and 1"):
        study.draw_subsets(jax.random.key(0), ids, valid, 3, 1.0)
    with pytest.raises(ConfigError, match="this round has 1 such units"):
        study.draw_subsets(jax.random.key(0), jnp.zeros(8, int), jnp.ones(8, bool), 3, 0.5)


# -- retraining -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", study.TRAININGS)
def test_many_retrainings_are_the_single_ones(usual, training):
    round_ = usual[0]
    step, data = round_.step, round_.lane(1)
    valid = data.records.valid
    drawn = study.draw_subsets(jax.random.key(1), jnp.arange(128), valid, 6, 0.5)
    effects = study.make_effects(step, data, round_.env, {"act": 3}, 0)
    got = [
        study.make_retrainer(step, effects, training, kept, chunk)(data, drawn.weights)
        for kept, chunk in (((drawn.kept, 2), (None, 6)) if training == "compact" else ((None, 4),))
    ]
    masked = training == "masked"
    learner = subset_step(step, "compact" if masked else training, weighted=masked)
    for m in range(6):
        params, _ = retrain(learner, data, drawn.weights[m], keep=valid if masked else None)
        for name, f in effects.items():
            want = float(f(params, data))
            for each in got:
                assert float(each[name][m]) == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert len(set(np.asarray(got[0]["act"]).tolist())) == 6


def test_the_whole_round_is_the_round(linear):
    step, data = linear.step, linear.lane(0)
    effects = study.make_effects(step, data, linear.env, {"act": 3}, 0)
    everything = jnp.ones((1, 128))
    want = {name: float(f(data.after.params, data)) for name, f in effects.items()}
    for training in ("compact", "masked"):
        got = study.make_retrainer(step, effects, training, None)(data, everything)
        for name in want:
            assert float(got[name][0]) == pytest.approx(want[name], rel=1e-5), (training, name)


def test_unknown_training(linear):
    with pytest.raises(ConfigError, match="training is 'all': must be one of compact, step_matched, masked"):
        study.make_retrainer(linear.step, {}, "all", None)


def test_leaving_out_and_dropping():
    ids, valid = jnp.array([0, 0, 2, 3]), jnp.ones(4, bool)
    assert study.without_each(ids, valid, np.array([0, 3])).tolist() == [[0, 0, 1, 1], [1, 1, 1, 0]]
    drops = study.without_share(np.array([1.0, 2.0, 5.0, -1.0]), ids, valid, 0.34, 5, 0)
    assert drops["top"].tolist() == [[1, 1, 0, 1]]
    assert drops["bottom"].tolist() == [[1, 1, 1, 0]]
    assert drops["random"].shape == (5, 4)


# -- does the score predict? ----------------------------------------------------------------------------------


def test_one_step_the_exact_score_predicts_and_a_shuffled_one_does_not(linear):
    options = {"exact": {}, "TracIn": {"checkpoint": "steps"}}
    result = counterfactual(linear, subsets=400, variants=options, records=(5,), extremes=20)
    lds = {(r["effect"], r["score"]): r for r in result["rows"]}
    for effect in ("return", "action of 5"):
        assert lds[effect, "exact"]["lds"] > 0.99
        assert lds[effect, "TracIn"]["lds"] > 0.99
        shuffled = lds[effect, "control: shuffled"]
        assert shuffled["low"] < 0 < shuffled["high"]
        assert result["leave_one_out"][effect]["spearman"] > 0.99
    best, worst = (float(np.mean(result["drops"]["return"][k])) for k in ("bottom", "top"))
    assert best > float(np.mean(result["drops"]["return"]["random"])) > worst


def test_tracin_of_one_step_is_the_score(linear):
    """At the round's start the ratio is 1 and nothing has moved yet."""
    step, data = linear.step, linear.lane(0)
    data = data.replace(weights=data.records.valid.astype(jnp.float32))
    start = np.asarray(score(step, data))
    steps = np.asarray(score(step, data, checkpoint="epochs"))
    seen = steps != 0
    assert 60 <= seen.sum() <= 128
    # two minibatches of 64 records: the second one starts from where the first one ended
    assert np.corrcoef(start[seen], steps[seen])[0, 1] > 0.999


# -- the command ----------------------------------------------------------------------------------------------


def test_command(usual, capsys):
    _, out = usual
    words = [
        "counterfactual",
        str(out),
        "--subsets",
        "20",
        "--unit",
        "segment",
        "--episodes",
        "2",
        "--record",
        "3",
        "7",
    ]
    assert main([*words, "--extremes", "3", "--seed-index", "1", "--quiet"]) == 0
    folder = out / "counterfactual" / "round_000002"
    text = capsys.readouterr().out
    assert "Adam's view" in text
    assert "control: shuffled" in text
    rows = list(csv.DictReader((folder / "counterfactual.csv").open()))
    assert {r["effect"] for r in rows} == {"return", "action of 3", "action of 7", "true_return"}
    saved = json.loads((folder / "counterfactual.json").read_text())
    assert saved["subsets"] == 20
    assert saved["unit"] == "segment"
    subsets = list(csv.DictReader((folder / "subsets.csv").open()))
    assert len(subsets) == 20
    assert (folder / "counterfactual.png").stat().st_size > 20_000
    x = [float(r["predicted return"]) for r in subsets]
    y = [float(r["measured return"]) for r in subsets]
    stated = next(float(r["lds"]) for r in rows if (r["effect"], r["score"]) == ("return", "as configured"))
    assert stated == pytest.approx(scipys(x, y), abs=1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--subsets", "19"], "--subsets is 19: an interval needs 20 or more"),
        (["--share", "0"], "share is 0: must be between 0 and 1"),
        (["--unit", "batch"], "unit is 'batch': must be one of record, segment, episode"),
        (["--training", "all"], "training is 'all': must be one of"),
        (["--record", "128"], "this round has no record 128 (0 to 127)"),
        (["--seed-index", "2"], "seed index 2: this round has 2"),
        (["--drop", "1"], "must be 0 or more, and between 0 and 1"),
    ],
)
def test_bad_input_is_one_line_and_nothing_written(usual, capsys, tmp_path, words, message):
    assert main(["counterfactual", str(usual[1]), "--out", str(tmp_path / "x"), "--quiet", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_score_that_is_not_finite_is_named(usual):
    broken = {
        "mine": {"target": lambda log_prob, params, records: jnp.sqrt(-1.0 - 0 * log_prob(params, records.obs[0], 0))}
    }
    with pytest.raises(ConfigError, match="score 'mine' about return: not finite for record 0"):
        counterfactual(usual[0], subsets=20, variants=broken)


def test_writing_is_whole(usual, tmp_path, monkeypatch):
    result = counterfactual(usual[0], subsets=20, variants={"raw": {"normalize": "none"}}, extremes=2)
    write_result(tmp_path, result)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "counterfactual.csv", "counterfactual.json", "counterfactual.png", "subsets.csv",
    ]  # fmt: skip
