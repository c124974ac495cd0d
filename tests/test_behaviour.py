"""One action through the rounds: probabilities, scores, features, roughness, phases, against slow oracles."""

from __future__ import annotations

import csv
import itertools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattr
from jaxattr.analysis.behaviour import (
    MAX_RECORDS,
    Phases,
    phase_words,
    phases,
    quadratic_form,
    roughness,
    weights_of,
)
from jaxattr.config import Config, ConfigError
from jaxattr.envs.registry import make
from jaxattr.host.cli import main
from jaxattr.host.rounds import load_rounds
from jaxattr.networks import make_networks
from jaxattr.studies.behaviour import choose, extremes, features, has_features, make_viewer, most_risen, parse_record

CONFIG = Config(
    total_steps=4 * 64, num_envs=4, num_steps=16, minibatch_size=16, num_epochs=4, hidden=(8, 6), learning_rate=1e-2,
    eval_episodes=2, normalize_obs=True, score_normalize="none", env_args=(("max_steps_in_episode", 30),),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "plain"
    jaxattr.train("CartPole-v1", CONFIG, seeds=2, out=out, record_rounds=(1, 2, 4))
    return out


@pytest.fixture(scope="module")
def rounds(folder):
    return load_rounds(folder)


@pytest.fixture(scope="module")
def viewer(rounds):
    return make_viewer(rounds[0].step)


def forward(params, obs):
    """(logits, last hidden layer) of the built-in tanh network, in numpy."""
    x = np.asarray(obs, np.float64).reshape(-1)
    body, out = params["policy"]["body"], params["policy"]["head"]["out"]
    for i in range(len(body)):
        layer = body[f"dense_{i}"]
        x = np.tanh(x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"]))
    return x @ np.asarray(out["kernel"], np.float64) + np.asarray(out["bias"]), x


def log_softmax(z):
    return z - z.max() - np.log(np.sum(np.exp(z - z.max())))


# -- the study ------------------------------------------------------------------------------------------------------
def test_probabilities_use_each_round_s_normalisation(rounds, viewer):
    chosen = choose(rounds, 1, 2, 21)
    raw = np.asarray(chosen.obs, np.float64)
    for r in rounds:
        data = r.lane(1)
        stats = data.before.obs_stats
        seen = (raw - np.asarray(stats.mean)) / np.sqrt(np.asarray(stats.var) + 1e-8) if int(stats.count) else raw
        got = viewer(data, chosen.obs, chosen.action)
        for params, value in ((data.before.params, got.log_prob_before), (data.after.params, got.log_prob_after)):
            want = log_softmax(forward(params, np.clip(seen, -10, 10))[0])[int(chosen.action)]
            assert float(value) == pytest.approx(want, abs=1e-5)
    data = rounds[1].lane(1)
    assert float(viewer(data, chosen.obs, chosen.action).log_prob_before) == pytest.approx(
        float(data.records.log_prob[21]), abs=1e-6
    )


def test_scores_are_products_of_gradients(rounds, viewer):
    """I_i = A_i < grad log pi(a_i | s_i), grad log pi(a | s) >, with raw advantages and no entropy bonus."""
    chosen = choose(rounds, 0, 4, 5)
    data, nets = rounds[2].lane(0), rounds[2].step.nets
    seen = viewer(data, chosen.obs, chosen.action)
    gradient = jax.jit(jax.grad(nets.log_prob))
    flat = lambda g: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(g["policy"])])
    r = data.records
    target = flat(gradient(data.before.params, r.obs[5], chosen.action))
    for i in (0, 5, 17, 40, 63):
        want = float(r.advantage[i]) * flat(gradient(data.before.params, r.obs[i], r.action[i])) @ target
        assert float(seen.scores[i]) == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_features_are_the_last_hidden_layer(rounds, viewer):
    chosen = choose(rounds, 0, 4, 5)
    data = rounds[2].lane(0)
    got = np.asarray(viewer(data, chosen.obs, chosen.action).features)
    assert got.shape == (64, 6)
    assert has_features(data.before.params)
    for i in (0, 31, 63):
        assert np.allclose(got[i], forward(data.before.params, data.records.obs[i])[1], atol=1e-5)


class Custom(nn.Module):
    """A network of a user's."""

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Dense(5)(x))
        return nn.Dense(2)(h), nn.Dense(1)(h)[0]


@pytest.mark.parametrize(("env", "changes", "width"), [
    ("CartPole-v1", {"shared_trunk": True, "hidden": (7,)}, 7), ("Pendulum-v1", {"hidden": (9, 3)}, 3),
])  # fmt: skip
def test_features_of_other_networks(env, changes, width):
    env = make(env, ())
    nets = make_networks(env.spec, CONFIG.replace(**changes))
    params = nets.init(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (5, *env.spec.obs_shape))
    got = features(nets, params, obs)
    assert got.shape == (5, width)
    out = params["policy"]["head"]["out"]
    heads = jax.vmap(nets.policy, (None, 0))(params, obs)
    assert np.allclose(got @ out["kernel"] + out["bias"], jax.tree.leaves(heads)[0], atol=1e-5)


def test_a_user_s_network_gives_the_observation():
    env = make("CartPole-v1", ())
    nets = make_networks(env.spec, CONFIG, Custom())
    params = nets.init(jax.random.key(0))
    obs = jnp.arange(8.0).reshape(2, 4)
    assert not has_features(params)
    assert np.array_equal(features(nets, params, obs), obs)


def test_default_record_rose_most(rounds):
    first, last = rounds[0].lane(1), rounds[-1].lane(1)
    raw, action = np.asarray(last.rollout.obs).reshape(64, 4), np.asarray(last.records.action)
    rise = []
    for i in range(64):
        before = log_softmax(forward(first.before.params, raw[i])[0])[action[i]]  # nothing was seen before round 1
        after = log_softmax(forward(last.after.params, last.records.obs[i])[0])[action[i]]
        rise.append(np.exp(after) - np.exp(before))
    assert most_risen(rounds[0], rounds[-1], 1) == int(np.argmax(rise))


def test_extremes_by_hand(rounds):
    scores = np.full(64, 0.5)
    scores[[3, 60, 7, 8]] = [9.0, np.nan, -2.0, -2.0]
    found = extremes(rounds[0].lane(0), scores, 2)
    assert [r["record"] for r in found["top"]] == [3, 0]
    assert [r["record"] for r in found["bottom"]] == [7, 8]
    assert (found["bottom"][1]["time_step"], found["bottom"][1]["environment"]) == (2, 0)
    assert np.allclose(found["top"][0]["obs"], rounds[0].lane(0).rollout.obs[0, 3])


def test_which_record(rounds):
    assert parse_record("12:345") == (12, 345)
    with pytest.raises(ConfigError, match="must be ROUND:RECORD"):
        parse_record("12")
    with pytest.raises(ConfigError, match=r"round 3 was not recorded \(recorded: 1, 2, 4\)"):
        choose(rounds, 0, 3, 0)
    with pytest.raises(ConfigError, match=r"no such record \(0 to 63\)"):
        choose(rounds, 0, 4, 64)


# -- roughness ------------------------------------------------------------------------------------------------------
def slow_roughness(scores, feats):
    n, x = len(scores), scores / np.abs(scores).max()
    distance = lambda i, j: np.sqrt(np.sum((feats[i] - feats[j]) ** 2))
    h = np.median([distance(i, j) for i in range(n) for j in range(i)])
    top = bottom = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                w = np.exp(-(distance(i, j) ** 2) / (2 * h**2))
                top, bottom = top + w * (x[i] - x[j]) ** 2, bottom + w
    return top / bottom, h


def test_roughness_is_the_double_sum():
    rng = np.random.default_rng(1)
    scores, feats = rng.standard_t(2, size=23), rng.normal(size=(23, 4)) + 100
    got = roughness(scores, feats, shuffles=3, seed=5)
    want, h = slow_roughness(scores, feats)
    assert got.value == pytest.approx(want, rel=1e-10)
    assert got.bandwidth == pytest.approx(h, rel=1e-10)
    draws = np.random.default_rng(5)
    null = [slow_roughness(draws.permutation(scores), feats)[0] for _ in range(3)]
    assert got.null_mean == pytest.approx(np.mean(null), rel=1e-10)
    assert (got.null_low, got.null_high) == pytest.approx(np.percentile(null, [2.5, 97.5]), rel=1e-10)
    assert got.relative == pytest.approx(want / np.mean(null))


def test_roughness_knows_smooth_from_random():
    rng = np.random.default_rng(0)
    feats = rng.normal(size=(200, 3))
    smooth = roughness(feats @ [1.0, 2.0, 0.5], feats)
    noise = roughness(rng.normal(size=200), feats)
    assert smooth.value < smooth.null_low
    assert smooth.relative < 0.75
    assert 0.95 < noise.relative < 1.05


def test_roughness_does_not_depend_on_order_or_scale():
    rng = np.random.default_rng(2)
    scores, feats, order = rng.normal(size=30), rng.normal(size=(30, 2)), rng.permutation(30)
    a, b = roughness(scores, feats).value, roughness(-7 * scores[order], 3 * feats[order] + 1).value
    assert a == pytest.approx(b, rel=1e-10)


def test_roughness_of_edge_cases():
    rng = np.random.default_rng(3)
    assert np.isnan(roughness(np.zeros(5), rng.normal(size=(5, 2))).value)
    assert np.isnan(roughness([1.0, 2.0], np.zeros((2, 1))).value)
    scores = rng.normal(size=10)
    holed, feats = np.append(scores, np.nan), rng.normal(size=(11, 2))
    assert roughness(holed, feats).value == roughness(scores, feats[:10]).value
    same, h = weights_of(np.full((4, 2), 3.0))
    assert h == 0
    assert same.sum() == 12
    few = np.zeros((6, 1))
    few[5] = 2.0  # most pairs coincide: the mean of the other distances
    assert weights_of(few)[1] == 2
    with pytest.raises(ValueError, match="do not fit"):
        roughness(np.zeros(3), np.zeros((4, 1)))
    with pytest.raises(ValueError, match="2 or more"):
        roughness(np.ones(3), np.ones((3, 1)), shuffles=1)


def test_more_records_than_fit_are_sampled():
    rng = np.random.default_rng(4)
    n = MAX_RECORDS + 100
    feats = rng.normal(size=(n, 1))
    got = roughness(feats[:, 0], feats, shuffles=2)
    assert got.records == MAX_RECORDS
    rows = np.sort(np.random.default_rng(0).choice(n, MAX_RECORDS, replace=False))
    weights, _ = weights_of(feats[rows])
    assert got.value == pytest.approx(quadratic_form(weights, feats[rows].T)[0])


# -- phases ---------------------------------------------------------------------------------------------------------
def brute_force(y):
    """(share explained, second start, third start) by trying everything."""
    sse = lambda v: float(np.sum((v - v.mean()) ** 2))
    best = min(
        (sse(y[:a]) + sse(y[a:b]) + sse(y[b:]), a, b)
        for a, b in itertools.combinations(range(len(y)), 2)
        if a >= 2 and b - a >= 2 and len(y) - b >= 2
    )
    return 1 - best[0] / sse(y), best[1], best[2]


def test_phases_are_the_best_of_all_splits():
    rng = np.random.default_rng(0)
    for size in (6, 7, 15):
        y = rng.normal(size=size)
        share, a, b = brute_force(y)
        got = phases(y, permutations=20, seed=3)
        assert got.explained == pytest.approx(share)
        assert got.starts == (a, b)
        assert got.means == pytest.approx((y[:a].mean(), y[a:b].mean(), y[b:].mean()))
        draws = np.random.default_rng(3)
        shuffled = draws.permuted(np.tile(y - y.mean(), (20, 1)), axis=1)
        want = (1 + sum(brute_force(s)[0] >= share - 1e-12 for s in shuffled)) / 21
        assert got.p_value == pytest.approx(want)


def test_phases_are_found_where_they_are():
    rng = np.random.default_rng(1)
    y = np.repeat([3.0, 2.0, 1.0], [8, 7, 10]) + 0.1 * rng.normal(size=25)
    got = phases(y)
    assert got.found
    assert got.starts == (8, 15)
    holed = np.insert(y, 3, np.nan)
    assert phases(holed).starts == (9, 16)
    assert phase_words(got, list(range(10, 260, 10))).startswith("phases begin at rounds 10, 90, 160 (means")


def test_noise_has_no_phases_more_often_than_stated():
    rng = np.random.default_rng(2)
    found = sum(phases(rng.normal(size=15), permutations=99, seed=k).found for k in range(100))
    assert found <= 12  # 5 expected; more than 12 of 100 has a chance below 0.2 %


def test_short_or_flat_curves_have_no_phases():
    nothing = Phases(False, (), (), np.nan, np.nan)
    for curve in (np.arange(5.0), np.ones(20), np.full(20, np.nan)):
        got = phases(curve)
        assert got[:3] == nothing[:3]
        assert np.isnan(got.p_value)
        assert phase_words(got, range(20)) == "no phases found: needs 6 rounds with different values"


# -- the command ----------------------------------------------------------------------------------------------------
def test_command(folder, rounds, capsys):
    assert main(["behaviour", str(folder), "--record", "4:5", "--top", "3", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "of record 5 of round 4" in said
    assert "no phases found: needs 6 rounds" in said
    out = folder / "behaviour"
    assert sorted(p.name for p in out.iterdir()) == ["behaviour.csv", "behaviour.json", "behaviour.png"]
    with (out / "behaviour.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["round"] for r in rows] == ["1", "2", "4"]
    probability = np.exp(float(rounds[2].lane(0).records.log_prob[5]))
    assert float(rows[2]["prob_before"]) == pytest.approx(probability, rel=1e-5)
    saved = json.loads((out / "behaviour.json").read_text())
    assert saved["chosen"]["round"] == 4
    assert np.allclose(saved["chosen"]["obs"], rounds[2].lane(0).rollout.obs[1, 1])
    assert saved["features"] == "output of the policy's last hidden layer"
    for row, one in zip(rows, saved["rounds"], strict=True):
        assert len(one["top"]) == len(one["bottom"]) == 3
        assert one["top"][0]["score"] == pytest.approx(float(row["score_max"]))
        assert str(one["bottom"][0]["record"]) == row["bottom_record"]


def test_continuous_actions_and_the_default_record(tmp_path):
    config = CONFIG.replace(env_args=(), total_steps=2 * 64)
    jaxattr.train("Pendulum-v1", config, seeds=1, out=tmp_path / "run", record_rounds=(1, 2))
    from jaxattr.host.behaviour import behaviour

    result = behaviour(tmp_path / "run", out=tmp_path / "out", permutations=9)
    assert result["chosen"].number == 2
    assert result["scores"].shape == (2, 64)
    assert "log pi before" in result["table"]
    assert (tmp_path / "out" / "behaviour.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--record", "3:0"], "round 3 was not recorded (recorded: 1, 2, 4)"),
        (["--record", "4:64"], "round 4 has no such record (0 to 63)"),
        (["--record", "last"], "must be ROUND:RECORD, such as 12:345"),
        (["--seed-index", "2"], "seed index 2: this round has 2 (0 to 1)"),
        (["--shuffles", "1"], "--shuffles is 1: must be 2 or more"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, options, message):
    assert main(["behaviour", str(folder), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_no_recorded_rounds(tmp_path, capsys):
    assert main(["behaviour", str(tmp_path)]) == 2
    assert "holds no recorded round; train with --record-rounds" in capsys.readouterr().err
