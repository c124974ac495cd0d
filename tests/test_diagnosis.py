"""Monte-Carlo advantages by branching: exact answers, standard errors, the table of fifths, the command."""

from __future__ import annotations

import csv
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm, spearmanr

import jaxattr
from jaxattr.analysis import diagnosis as table
from jaxattr.config import Config, ConfigError
from jaxattr.envs.registry import make
from jaxattr.host.cli import main
from jaxattr.host.diagnose import diagnose
from jaxattr.lanes import place_lanes
from jaxattr.ops.statistics import normalize
from jaxattr.studies.diagnosis import Brancher, MonteCarlo, branch_source, monte_carlo
from jaxattr.studies.replay import Round, round_data
from jaxattr.train import init_state, lane_settings, make_update_step
from jaxattr.types import Judged

SMALL = Config(
    total_steps=64, num_envs=2, num_steps=16, minibatch_size=16, num_epochs=1, hidden=(8,), gamma=0.9,
    eval_episodes=1, score_always=True,
)  # fmt: skip
GAMMA = 0.9


def one_round(env_id: str, config: Config, policy: float = 1.0, value: float = 1.0) -> Round:
    """One collected round of an untrained agent (nothing is learned); its two heads multiplied by given factors."""
    env = make(env_id, config.env_args)
    step = make_update_step(env, config, keep_states=True)
    before, settings = init_state(step, [3]), lane_settings(config, 1)
    for name, factor in (("policy", policy), ("value", value)):
        before.params[name]["head"] = jax.tree.map(lambda x, f=factor: x * f, before.params[name]["head"])
    blank = before.obs_stats  # as if observations had been seen
    seen = blank.replace(mean=blank.mean + 0.3, var=jnp.full_like(blank.var, 2.0), count=jnp.full_like(blank.count, 50))
    before = before.replace(obs_stats=seen)

    @jax.jit
    def collect(before, settings):
        _, rollout, _ = step.collector.collect(step.nets, before, before.key)
        records, stats, _ = jax.vmap(step.advantages)(before, rollout, settings)
        return before.replace(reward_stats=stats), Judged(records, records.value, records.value, rollout)

    after, judged = collect(before, settings)
    return Round(env_id, config, (3,), 1, env, step, round_data(settings, before, after, judged))


def branch(round_: Round, rollouts: int, seed: int = 0, **options) -> MonteCarlo:
    mc = monte_carlo(round_.step, round_.env, round_.lane(), jax.random.key(seed), rollouts, **options)
    return jax.tree.map(np.asarray, mc)


def critic(round_: Round, obs: np.ndarray) -> np.ndarray:
    before = round_.lane().before
    value = jax.vmap(lambda o: round_.step.nets.value(before.params, normalize(before.obs_stats, o)))
    return np.asarray(value(jnp.asarray(obs)), np.float64)


# -- exact answers -----------------------------------------------------------------------------------------------------
def test_time_limit_and_horizon_bootstrap():
    """Reward 1 for ever: every rollout of a record is the same, n rewards and then the critic, all of them scaled."""
    config = SMALL.replace(normalize_reward=True, normalize_obs=True, env_args=(("max_steps_in_episode", 7),))
    round_ = one_round("probe/never_ends", config)
    reward = np.asarray(round_.lane().records.reward)
    assert np.allclose(reward, reward[0])
    assert abs(reward[0] - 1) > 0.05
    left = 7 - np.asarray(round_.lane().rollout.env_state.time).reshape(-1)
    assert set(left) == set(range(1, 8))
    v = critic(round_, np.zeros((1, 1), np.float32))[0]
    assert abs(v) > 0.01
    steps = np.minimum(left, 4)
    mc = branch(round_, 3, horizon=4)
    want = reward[0] * (1 - GAMMA**steps) / (1 - GAMMA) + GAMMA**steps * v
    assert np.allclose(mc.q, want, rtol=1e-5)
    assert np.allclose(mc.v, want, rtol=1e-5)
    assert np.allclose(mc.advantage, 0, atol=1e-5)
    assert np.allclose(mc.stderr, 0, atol=1e-5)
    assert mc.bootstrapped == 1
    assert mc.env_steps == 2 * 3 * steps.sum()


def test_a_terminal_state_is_worth_nothing_and_nothing_follows_it():
    round_ = one_round("probe/ends_at_3", SMALL, value=3.0)
    left = 3 - np.asarray(round_.lane().rollout.env_state.time).reshape(-1)
    assert set(left) == {1, 2, 3}
    mc = branch(round_, 2, horizon=2)
    v = critic(round_, np.array([[2 / 3]], np.float32))[0]  # only those at time 0 are cut, and at time 2
    assert abs(v) > 0.01
    assert np.allclose(mc.q, (1 - GAMMA ** np.minimum(left, 2)) / (1 - GAMMA) + (left == 3) * GAMMA**2 * v, rtol=1e-5)
    assert mc.bootstrapped == pytest.approx(np.mean(left == 3))


@functools.cache
def frozen_lake(slippery: bool, limit: int = 12) -> Round:
    options = (("is_slippery", slippery), ("max_steps_in_episode", limit), ("reward_schedule", (1.0, -1.0, 0.1)))
    return one_round("FrozenLake-misc", SMALL.replace(num_steps=32, env_args=options), policy=60.0, value=5.0)


def exact_advantages(round_: Round, slippery: bool, limit: int = 12) -> np.ndarray:
    """A(s, a) of every record by dynamic programming backwards from the time limit, in float64."""
    lake = "SFFFFHFHFFFHHFFG"
    eye = np.eye(16, dtype=np.float32)
    before = round_.lane().before
    logits = jax.vmap(lambda o: round_.step.nets.policy(before.params, normalize(before.obs_stats, o)))(eye)
    pi, critic_ = np.asarray(jax.nn.softmax(logits), np.float64), critic(round_, eye)
    moved = np.empty((16, 4), int)  # left, down, right, up
    for s in range(16):
        for a, (down, right) in enumerate(((0, -1), (1, 0), (0, 1), (-1, 0))):
            moved[s, a] = 4 * min(max(s // 4 + down, 0), 3) + min(max(s % 4 + right, 0), 3)
    reach = np.zeros((16, 4, 16))
    for s in range(16):
        for a in range(4):
            for b, p in ((a - 1, 1 / 3), (a, 1 / 3), (a + 1, 1 / 3)) if slippery else ((a, 1.0),):
                reach[s, a, moved[s, b % 4]] += p
    over, reward = np.array([c in "HG" for c in lake]), np.array([{"G": 1.0, "H": -1.0}.get(c, 0.1) for c in lake])
    q, following = np.empty((limit, 16, 4)), critic_
    for t in reversed(range(limit)):
        q[t] = reach @ (reward + GAMMA * np.where(over, 0.0, following))
        following = (pi * q[t]).sum(1)
    state = round_.lane().rollout.env_state
    s, t = (np.asarray(x).reshape(-1) for x in (state.position, state.time))
    a = np.asarray(round_.lane().records.action)
    return q[t, s, a] - (pi[s] * q[t, s]).sum(1)


@pytest.mark.parametrize("slippery", [False, True])
def test_frozen_lake_against_dynamic_programming(slippery):
    """Stochastic policy, with and without a stochastic environment, many rollouts cut by the time limit."""
    round_ = frozen_lake(slippery)
    want = exact_advantages(round_, slippery)
    mc = branch(round_, 512)
    assert 0.05 < mc.bootstrapped < 0.9
    assert np.mean((want / mc.stderr) ** 2) > 3  # else zeros would pass, too
    z = (mc.advantage - want) / np.maximum(mc.stderr, 1e-4)
    assert np.abs(z).max() < 4.5
    assert 0.7 < np.mean(z**2) < 1.4


def test_continuous_actions_are_forced_before_clipping():
    """One step, reward -(clip(u) - 0.5)^2: Q is known, V is an integral over the policy's Gaussian."""
    round_ = one_round("probe/continuous", SMALL)
    data = round_.lane()
    mc = branch(round_, 512)
    u = np.asarray(data.records.action).reshape(-1)
    assert np.any(np.abs(u) > 1)
    assert np.allclose(mc.q, -((np.clip(u, -1, 1) - 0.5) ** 2), atol=1e-6)
    (mean, log_std) = round_.step.nets.policy(data.before.params, data.records.obs[0])
    at = norm.ppf((np.arange(20_000) + 0.5) / 20_000, float(mean[0]), float(np.exp(log_std[0])))
    v = -np.mean((np.clip(at, -1, 1) - 0.5) ** 2)
    z = (mc.v - v) / mc.stderr
    assert np.abs(z).max() < 4.5
    assert 0.5 < np.mean(z**2) < 1.7


# -- errors and independence -------------------------------------------------------------------------------------------
def test_standard_errors_are_right():
    """Over many keys, the spread of A_bar is what a single key says of itself."""
    round_ = frozen_lake(True)
    source = branch_source(round_.lane(), jax.random.key(0))
    brancher = Brancher(round_.step, round_.env, source.obs.shape[0], 16)

    @jax.jit
    def run(source):
        return brancher.estimate(brancher.advance(source, brancher.start(source), 2**30))

    found = [jax.tree.map(np.asarray, run(source.replace(key=jax.random.key(k)))) for k in range(60)]
    spread = np.std([m.advantage for m in found], axis=0, ddof=1)
    said = np.sqrt(np.mean([m.stderr**2 for m in found], axis=0))
    assert np.abs(np.log(spread / said)).max() < 0.45
    assert np.mean(spread**2) == pytest.approx(np.mean(said**2), rel=0.06)


def test_what_is_there_for_speed_changes_no_number():
    """Slots, calls and devices: a rollout's random numbers are its own, and the key's."""
    round_ = frozen_lake(True)
    whole = branch(round_, 8)
    source = branch_source(round_.lane(), jax.random.key(0))
    few = jax.tree.map(lambda x: x[:33], (source.state, source.obs, source.action))  # does not divide among 2 devices
    source = source.replace(state=few[0], obs=few[1], action=few[2])
    brancher = Brancher(round_.step, round_.env, 33, 8, slots=7)
    advance = jax.jit(brancher.advance)
    work = place_lanes(brancher.start(source), brancher.devices)
    told = []
    while float(brancher.progress(work)) < 1:
        work = advance(source, work, 3)
        told.append(float(brancher.progress(work)))
    assert len(told) > 5
    assert told == sorted(told)
    part = brancher.estimate(work)
    assert part.q.shape == (33,)
    assert np.allclose(part.q, whole.q[:33], atol=1e-5)
    assert np.allclose(part.stderr, whole.stderr[:33], atol=1e-5)
    other = source.replace(key=jax.random.key(1))
    again = advance(other, place_lanes(brancher.start(other), brancher.devices), 2**30)
    assert not np.allclose(brancher.estimate(again).q, part.q, atol=1e-5)


# -- the table ---------------------------------------------------------------------------------------------------------
def made_up(n: int = 203):
    rng = np.random.default_rng(0)
    advantage, true = rng.normal(size=n), rng.normal(size=n)
    scores = np.round(advantage * true + rng.normal(size=n), 1)  # with ties
    stderr, valid = rng.uniform(0.05, 0.8, n), rng.random(n) < 0.95
    scores[7], true[11] = np.nan, 0.0
    return scores, advantage, true, stderr, valid


def test_the_table_against_a_plain_loop():
    scores, advantage, true, stderr, valid = made_up()
    use = [i for i in range(len(scores)) if valid[i] and not np.isnan(scores[i])]
    ranked = sorted(use, key=lambda i: (scores[i], i))
    rows = table.diagnosis_rows(scores, advantage, true, stderr, valid)
    assert [r["fifth"] for r in rows] == ["bottom", "second", "middle", "fourth", "top"]
    assert sum(r["records"] for r in rows) == len(use)
    first = 0
    for row in rows:
        inside = ranked[first : first + row["records"]]
        first += row["records"]
        assert abs(len(inside) - len(use) / 5) < 1
        differ = [np.sign(advantage[i]) == -np.sign(true[i]) and true[i] != 0 for i in inside]
        sure = [abs(true[i]) > 2 * stderr[i] for i in inside]
        assert row["mismatch_share"] == pytest.approx(np.mean(differ))
        assert row["undecided_share"] == pytest.approx(1 - np.mean(sure))
        assert row["wrong_share"] == pytest.approx(np.mean([d for d, s in zip(differ, sure, strict=True) if s]))
        assert row["mean_abs_error"] == pytest.approx(np.mean([abs(true[i] - advantage[i]) for i in inside]))
        assert row["mean_stderr"] == pytest.approx(np.mean(stderr[inside]))
        assert row["mismatch_low"] < row["mismatch_share"] < row["mismatch_high"]
    assert rows[0]["mismatch_share"] > rows[-1]["mismatch_share"]


def test_correlations_against_scipy():
    scores, advantage, true, _, valid = made_up()
    use = valid & np.isfinite(scores)
    found = table.agreement(scores, advantage, true, valid)
    want: Any = spearmanr(scores[use], (true * advantage)[use])[0]
    assert found["score"] == pytest.approx(want)
    assert found["rank_from_top"] == pytest.approx(-want)
    assert found["rank_from_top_low"] < -want < found["rank_from_top_high"]


def test_wilson_by_hand():
    low, high = table.wilson_interval(5, 10)
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))  # a textbook's numbers
    assert table.wilson_interval(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert np.isnan(table.wilson_interval(0, 0)[0])


def test_verdicts_and_edges(tmp_path):
    assert table.verdicts([1, 1, -1, 1], [-1, 1, 0.1, 0], [0.1, 0.1, 0.1, 0]).tolist() == [
        "wrong sign", "right sign", "undecided", "undecided",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="9 scored records: fifths need 10 or more"):
        table.fifths(np.arange(9.0), np.ones(9, bool))
    nothing = np.zeros(10)
    rows = table.diagnosis_rows(np.arange(10.0), nothing, nothing, nothing, np.ones(10, bool))
    assert all(r["undecided_share"] == 1 and np.isnan(r["wrong_share"]) for r in rows)
    file, scores, valid = tmp_path / "a" / "x.png", np.arange(10.0), np.ones(10, bool)
    path = table.diagnosis_figure(file, scores, nothing, nothing, nothing, valid, "t", 2)
    assert path.stat().st_size > 10_000


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "cp"
    config = SMALL.replace(num_steps=32, normalize_obs=True, total_steps=128, score_always=False)
    return jaxattr.train("CartPole-v1", config, seeds=2, out=out, record_rounds=(2,)), out


def test_the_command_end_to_end(run, capsys):
    assert main(["diagnose", str(run[1]), "--rollouts", "4", "--seed-index", "1", "--top", "3"]) == 0
    shown = capsys.readouterr().out
    for words in ("signs differ", "bottom", "top", "rank from the top", "lowest-scored", "target return"):
        assert words in shown
    folder = run[1] / "diagnosis" / "round_000002_seed_index_1"
    assert sorted(p.name for p in folder.iterdir()) == ["diagnosis.csv", "diagnosis.json", "diagnosis.png"]
    with (folder / "diagnosis.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 64
    assert sorted(int(r["record"]) for r in rows) == list(range(64))
    assert [float(r["score"]) for r in rows] == sorted((float(r["score"]) for r in rows), reverse=True)
    data = run[0].round(2).lane(1)
    worst = rows[-1]
    raw = np.asarray(data.rollout.obs).reshape(64, 4)[int(worst["record"])]
    assert np.allclose([float(x) for x in worst["obs"].split()], raw, rtol=1e-3)
    assert float(worst["advantage"]) == pytest.approx(float(data.records.advantage[int(worst["record"])]))
    assert worst["fifth"] == "bottom"
    summary = json.loads((folder / "diagnosis.json").read_text())
    assert summary["records"] == 64
    assert summary["seed"] == 1
    assert len(summary["fifths"]) == 5


def test_from_python(run, tmp_path, capsys):
    round_ = run[0].round(2)
    result = diagnose(round_, rollouts=3, horizon=5)
    assert result.summary["horizon"] == 5
    assert result.arrays["mc_advantage"].shape == (64,)
    assert {r["verdict"] for r in result.records} <= {"wrong sign", "right sign", "undecided"}
    assert capsys.readouterr() == ("", "")
    file = run[1] / "rounds" / "round_000002.npz"
    assert main(["diagnose", str(file), "--rollouts", "2", "--horizon", "2", "--out", str(tmp_path / "d")]) == 0
    assert (tmp_path / "d" / "diagnosis.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed-index", "2"], "seed index 2: this round has 2"),
        (["--rollouts", "1"], "rollouts is 1: must be 2 or more"),
        (["--horizon", "0"], "horizon is 0: must be 1 or more"),
        (["--top", "-1"], "--top is -1: must be 0 or more"),
    ],
)
def test_bad_options_are_one_line(run, capsys, options, message):
    assert main(["diagnose", str(run[1]), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_cannot_be_branched(run, tmp_path):
    assert main(["diagnose", str(tmp_path / "nothing.npz")]) == 2
    data = run[0].round(2).lane()
    with pytest.raises(ConfigError, match="holds no environment states"):
        branch_source(data.replace(rollout=data.rollout.replace(env_state=None)), jax.random.key(0))
