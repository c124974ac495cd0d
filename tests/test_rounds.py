"""Recorded rounds: on disk and back, replayed exactly, refused when damaged."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattr
from jaxattr.config import Config, ConfigError
from jaxattr.host import checkpoint
from jaxattr.host.rounds import load_rounds, parse_rounds, path_of, size_of
from jaxattr.studies.replay import learning_keys, retrain, score, subset_step, units

CONFIG = Config(
    total_steps=4 * 64, num_envs=4, num_steps=16, minibatch_size=16, num_epochs=2, hidden=(8,), filter="iif", p=0.5,
    eval_episodes=4, normalize_obs=True, env_args=(("max_steps_in_episode", 9),),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "recorded"
    return jaxattr.train("CartPole-v1", CONFIG, seeds=2, out=out, record_rounds=(2, 4)), out


@pytest.fixture(scope="module")
def round_(run):
    return jaxattr.load_round(path_of(run[1], 4))


def test_recording_changes_nothing(run):
    plain = jaxattr.train("CartPole-v1", CONFIG, seeds=2)
    assert checkpoint.digest(plain.state.params) == checkpoint.digest(run[0].state.params)
    assert not plain.rounds


def test_what_is_on_disk_is_what_happened(run, round_):
    whole, _ = run
    assert round_.number == 4
    assert round_.seeds == (0, 1)
    assert round_.config == CONFIG
    assert checkpoint.digest(round_.data.after) == checkpoint.digest(whole.state)
    assert [r.number for r in load_rounds(run[1])] == [2, 4]
    memory = jaxattr.train("CartPole-v1", CONFIG, seeds=2, record_rounds=(4,)).round(4)
    assert checkpoint.digest(memory.data) == checkpoint.digest(round_.data)
    assert np.array_equal(whole._judged[4].scores, round_.data.scores)


def test_a_round_says_how_large_it_is(run):
    arrays = np.load(path_of(run[1], 2), allow_pickle=False)
    total = sum(arrays[n].nbytes for n in arrays.files if n != "meta")
    step = jaxattr.load_round(path_of(run[1], 2))
    said = size_of(step.step, step.data.before, step.data.settings)
    assert said == pytest.approx(total, rel=0.01)
    assert "before/params/policy/body/dense_0/kernel" in arrays.files
    assert json.loads(str(arrays["meta"]))["seeds"] == [0, 1]


@pytest.mark.parametrize("lane", [0, 1])
def test_retraining_repeats_the_round(round_, lane):
    data = round_.lane(lane)
    params, _ = jax.jit(lambda d: retrain(subset_step(round_.step), d, d.weights))(data)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(data.after.params), strict=True):
        assert np.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scoring_repeats_the_scores(round_):
    data = round_.lane(1)
    again = jax.jit(lambda d: score(round_.step, d))(data)
    assert np.allclose(again, data.scores, rtol=1e-4, atol=1e-6 * np.abs(data.scores).max())


def test_states_are_those_before_each_step(round_):
    data = round_.lane(0)
    obs = jax.vmap(jax.vmap(lambda s: jnp.array([s.x, s.x_dot, s.theta, s.theta_dot])))(data.rollout.env_state)
    assert np.allclose(obs, data.rollout.obs)


def test_units_of_a_round(round_):
    data = round_.lane(0)
    episodes = np.asarray(units(round_.step, data, "episode"))
    ended = np.asarray(data.records.terminated | data.records.truncated)
    whole = set(episodes[episodes >= 0].tolist())
    assert whole
    for first in whole:
        rows = np.flatnonzero(episodes == first)
        assert ended[rows].sum() == 1
        assert ended[rows[-1]]
        assert np.all(np.diff(rows) == CONFIG.num_envs)


def test_every_score_option_runs(round_):
    data, step = round_.lane(0), round_.step
    n = CONFIG.records_per_round
    for options in (
        {"checkpoint": "steps"}, {"checkpoint": "epochs", "metric": "adam"}, {"target": "gradient", "unit": "segment"},
        {"target": "gradient_loo", "unit": "episode"}, {"target": "gradient_loo"}, {"normalize": "none"},
    ):  # fmt: skip
        scores = np.asarray(jax.jit(lambda d, o=options: score(step, d, **o))(data))
        assert scores.shape == (n,)
        assert np.all(np.isfinite(scores))
        assert np.any(scores != 0)


def test_bad_options_are_one_line(round_):
    data, step = round_.lane(0), round_.step
    with pytest.raises(ConfigError, match="checkpoint is 'end': must be one of start, steps, epochs"):
        score(step, data, checkpoint="end")
    with pytest.raises(ConfigError, match="defined at the round's start"):
        score(step, data, checkpoint="steps", target="gradient_loo")
    with pytest.raises(ConfigError, match="seed index 2: this round has 2"):
        round_.lane(2)


def test_keys_are_those_of_the_update(round_):
    keys = learning_keys(round_.lane(0).before)
    assert len({checkpoint.digest(k) for k in keys}) == 3


def test_damage_is_named(run, tmp_path):
    good = path_of(run[1], 2).read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good[: len(good) // 2])
    with pytest.raises(ConfigError, match=r"cut\.npz: not a readable round"):
        jaxattr.load_round(cut)
    flipped = tmp_path / "flipped.npz"
    middle = len(good) // 2
    flipped.write_bytes(good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :])
    with pytest.raises(ConfigError, match="not a readable round"):
        jaxattr.load_round(flipped)
    arrays = dict(np.load(path_of(run[1], 2)))
    meta = json.loads(str(arrays.pop("meta")))
    other = tmp_path / "other.npz"
    np.savez(other, meta=np.array(json.dumps({**meta, "format": 7, "version": "9.9"})), **arrays)
    with pytest.raises(ConfigError, match=r"format 7 of jaxattr 9\.9, this is jaxattr"):
        jaxattr.load_round(other)
    arrays.pop("after/update")
    np.savez(other, meta=np.array(json.dumps(meta)), **arrays)
    with pytest.raises(ConfigError, match="after/update is missing or unknown"):
        jaxattr.load_round(other)
    with pytest.raises(ConfigError, match="holds 2 recorded rounds; name one"):
        jaxattr.load_round(run[1])
    with pytest.raises(ConfigError, match="no such file"):
        jaxattr.load_round(tmp_path / "nothing.npz")
    with pytest.raises(ConfigError, match="holds no recorded round; train with --record-rounds"):
        load_rounds(tmp_path)


def test_which_rounds():
    assert parse_rounds(["1,5", "10"], 10) == (1, 5, 10)
    assert parse_rounds(["every:4"], 10) == (4, 8)
    assert parse_rounds([], 10) == ()
    for words, message in ((["0,5"], "record round 0: this run has rounds 1 to 10"), (["last"], "must be rounds such")):
        with pytest.raises(ConfigError, match=message):
            parse_rounds(words, 10)


def test_a_round_that_was_not_recorded(run):
    with pytest.raises(ConfigError, match=r"round 3 was not recorded whole \(recorded: 2, 4\)"):
        run[0].round(3)
