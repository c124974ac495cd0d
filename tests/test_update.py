"""The update step: known answers, counts, keys, traces, lanes, and experience from elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxattr.attribution import filters
from jaxattr.config import TRACED, Config
from jaxattr.envs import registry
from jaxattr.envs.base import Box, Discrete, EnvSpec, Step
from jaxattr.lanes import place_lanes
from jaxattr.networks import make_networks
from jaxattr.ops import permutation, trees
from jaxattr.train import init_state, lane_settings, make_chunk, make_collector, make_update_step
from jaxattr.types import EpisodeStats, Records, Rollout
from jaxattr.update import UpdateStep

N = 128  # records per round
BASE = Config(
    num_envs=4, num_steps=32, minibatch_size=32, num_epochs=2, hidden=(16,), total_steps=3 * N, learning_rate=3e-3
)


class WalkState(NamedTuple):
    x: Any
    time: Any


@dataclasses.dataclass(frozen=True)
class Walk:
    """A noisy walk on a line: reward -x^2, terminated beyond 2, cut at 80 steps; cheap to compile, all rows differ."""

    spec = EnvSpec("test/walk", (3,), Discrete(2), 80)

    def _obs(self, s):
        return jnp.stack([s.x, s.x**2, s.time / 80])

    def reset(self, key):
        s = WalkState(jax.random.uniform(key, minval=-1.0), jnp.int32(0))
        return s, self._obs(s)

    def step(self, key, state, action):
        move = 0.1 * (2.0 * action - 1.0) + 0.05 * jax.random.normal(key)
        s = WalkState(state.x + move, state.time + 1)
        terminated = jnp.abs(s.x) > 2
        return s, Step(self._obs(s), -(s.x**2), terminated, (s.time >= 80) & ~terminated)


class Lab:
    """A compiled chunk for `lanes` lanes; `shuffles` counts how often the step was traced."""

    def __init__(self, env: Any, config: Config, lanes: int, seeds: Any = None):
        self.config, self.lanes, self.shuffles = config, lanes, 0
        self.step = dataclasses.replace(make_update_step(env, config), shuffle=self._shuffle)
        self.chunk = make_chunk(self.step, lanes, 3)
        self.start = place_lanes(init_state(self.step, range(lanes) if seeds is None else seeds), lanes)

    def _shuffle(self, key, n, epochs, keep):
        self.shuffles += 1
        return permutation.orders(key, n, epochs, keep)

    def __call__(self, count=3, state=None, settings=None, **sweep):
        settings = lane_settings(self.config, self.lanes, sweep) if settings is None else settings
        state = self.start if state is None else state
        state, metrics, judged = self.chunk(state, place_lanes(settings, self.lanes), jnp.int32(count))
        return state, jax.tree.map(lambda x: np.asarray(x)[:count], metrics), judged


def plain(tree):
    """Leaves as numpy arrays, typed keys as their data."""

    def leaf(x):
        typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if typed else x)

    return jax.tree.map(leaf, tree)


def lane(tree, i):
    return jax.tree.map(lambda x: x[i], plain(tree))


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def gap(a, b):
    """Largest difference relative to the largest entry of each leaf."""
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return max(np.max(np.abs(x - y), initial=0) / max(np.max(np.abs(y), initial=0), 1e-3) for x, y in pairs)


@pytest.fixture(scope="module")
def iif():
    """Eight lanes with the iif filter and everything running that can run."""
    return Lab(Walk(), BASE.replace(filter="iif", p=0.5, normalize_obs=True, normalize_reward=True), 8)


@pytest.fixture(scope="module")
def solo(iif):
    """Seed 3 of `iif` by itself."""
    return Lab(Walk(), iif.config, 1, seeds=[3])


# -- probes: the exact answers --------------------------------------------------------------------------------


def learned(name, **changes):
    """(nets, params, last metrics) after training on a probe, one lane."""
    config = BASE.replace(
        num_envs=16, num_steps=8, learning_rate=0.02, lr_schedule="linear", total_steps=100 * N, gamma=0.9, **changes
    )
    step = make_update_step(registry.make(f"probe/{name}"), config)
    state, metrics, _ = make_chunk(step, 1, 100)(init_state(step, [0]), lane_settings(config, 1), jnp.int32(100))
    last = jax.tree.map(lambda x: np.asarray(x)[-1, 0], metrics)
    assert last.nonfinite == 0
    params = jax.tree.map(lambda x: x[0], state.params)
    value = lambda *obs: [float(step.nets.value(params, jnp.float32([o]))) for o in obs]
    head = lambda o: step.nets.policy(params, jnp.float32([o]))
    return value, head, last


def test_probe_constant():
    value, _, last = learned("constant")
    assert value(0) == pytest.approx([1.0], abs=0.01)
    assert (last.episodes, last.return_mean, last.length_mean) == (N, 1, 1)


def test_probe_obs():
    assert learned("obs")[0](-1, 1) == pytest.approx([-1.0, 1.0], abs=0.02)


def test_probe_discount():
    assert learned("discount")[0](0, 1) == pytest.approx([0.9, 1.0], abs=0.02)


def test_probe_policy():
    value, head, last = learned("policy", filter="iif", p=0.5)
    assert jax.nn.softmax(head(0))[1] > 0.99
    assert last.return_mean > 0.95
    assert value(0) == pytest.approx([last.return_mean], abs=0.05)


def test_probe_obs_policy():
    _, head, last = learned("obs_policy")
    assert jax.nn.softmax(head(-1))[0] > 0.99
    assert jax.nn.softmax(head(1))[1] > 0.99
    assert last.return_mean > 0.95


def test_probe_continuous():
    _, head, last = learned("continuous", log_std_init=-1.0, filter="iif")
    assert head(0)[0] == pytest.approx([0.5], abs=0.05)
    assert -0.1 < last.return_mean <= 0


def test_probe_never_ends_bootstraps_over_the_time_limit():
    # 1 / (1 - gamma); taking the limit of 4 steps for the end would give at most 1 + .9 + .81 + .729 = 3.44.
    config = {"env_args": {"max_steps_in_episode": 4}}
    env = registry.make("probe/never_ends", config["env_args"])
    step = make_update_step(
        env, BASE.replace(num_envs=16, num_steps=8, learning_rate=0.05, lr_schedule="linear", total_steps=200 * N)
    )
    chunk = make_chunk(step, 1, 200)
    state, metrics, _ = chunk(init_state(step, [0]), lane_settings(step.config.replace(gamma=0.9), 1), jnp.int32(200))
    value = step.nets.value(jax.tree.map(lambda x: x[0], state.params), jnp.zeros(1))
    assert value == pytest.approx(10.0, abs=0.2)
    assert np.asarray(metrics.length_mean)[-1, 0] == 4


# -- counts ---------------------------------------------------------------------------------------------------


def test_t07_no_finished_episode_is_nan_and_each_episode_counts_once():
    config = BASE.replace(env_args={"max_steps_in_episode": 50})
    lab = Lab(registry.make("probe/never_ends", config.env_args), config, 1)
    _, m, _ = lab(3)  # 96 steps: ends at step 50 (round 2), next at 100
    assert m.episodes[:, 0].tolist() == [0, 4, 0]
    assert np.isnan(m.return_mean[[0, 2], 0]).all()
    assert np.isnan(m.length_mean[[0, 2], 0]).all()
    assert (m.return_mean[1, 0], m.length_mean[1, 0]) == (50, 50)
    state, _, _ = lab(3)
    _, m, _ = lab(3, state)  # steps 97 .. 192: ends at 100 and 150
    assert m.episodes[:, 0].tolist() == [4, 4, 0]


def test_t39_kept_dropped_leftover_and_steps(iif):
    _, m, judged = iif(3)
    assert np.all(m.records == N)
    assert np.all(m.kept + m.dropped == N)
    assert np.all(m.dropped == np.floor(0.5 * m.negative))
    assert np.all(m.dropped > 0)
    assert np.all(m.optimizer_steps == 2 * (m.kept // 32))
    assert np.all(m.leftover == m.kept % 32)
    assert np.all(np.sum(judged.weights > 0, axis=1) == m.kept[-1])
    assert np.all(np.sum(judged.scores < 0, axis=1) == m.negative[-1])
    for scores, weights in zip(np.asarray(judged.scores), np.asarray(judged.weights), strict=True):
        assert scores[weights == 0].max() <= scores[(weights > 0) & (scores < 0)].min()


class Counting(UpdateStep):
    """Counts visits: the only parameter is a counter per record, and SGD adds 1 for each visit."""

    def _loss(self, params, batch, weights, settings):
        return -jnp.sum(params["visits"][batch.reward.astype(int)])


def visits(config, keep, key=0):
    spec = EnvSpec("test/none", (1,), Discrete(2), 1)
    n = config.records_per_round

    class Elsewhere:
        all_valid = True

    Elsewhere.spec = spec
    config = config.replace(optimizer="sgd", max_grad_norm=None, filter=config.filter)
    step = Counting(config, make_networks(spec, config), Elsewhere())
    lab = init_state_like(step, {"visits": jnp.zeros(n)})
    column = jnp.arange(n, dtype=jnp.float32)
    empty = Records(**{f.name: column for f in dataclasses.fields(Records)})
    settings = jax.tree.map(jnp.float32, config.settings())._replace(learning_rate=jnp.float32(1.0))
    run = jax.jit(lambda w, k: step.optimize(lab, empty, w, k, settings))
    params, _, training = run(jnp.asarray(keep, jnp.float32), jax.random.key(key))
    return np.asarray(params["visits"]).astype(int), training


def init_state_like(step, params):
    class State(NamedTuple):
        params: Any
        opt_state: Any
        update: Any

    from jaxattr.update import make_optimizer

    opt = make_optimizer(step.config, step.config.settings(), 0.0).init(trees.flatten(params))
    return State(params, opt, jnp.int32(0))


@pytest.mark.parametrize("kept", [N, 100, 65, 31, 0])
def test_t37_each_kept_record_at_most_once_per_epoch(kept):
    keep = np.zeros(N, bool)
    keep[np.random.default_rng(kept).permutation(N)[:kept]] = True
    counts, training = visits(BASE.replace(filter="iif", num_epochs=1), keep)
    assert counts[~keep].sum() == 0
    assert counts.max(initial=0) <= 1
    assert counts.sum() == kept // 32 * 32 == training.steps * 32
    assert training.leftover == kept - counts.sum()
    counts, _ = visits(BASE.replace(filter="iif", num_epochs=5), keep)
    assert counts[~keep].sum() == 0
    assert counts.max(initial=0) <= 5
    assert counts.sum() == 5 * (kept // 32) * 32


def test_t37_unfiltered_every_record_once_per_epoch_also_where_n_is_no_power_of_two():
    for shape in ((4, 32), (3, 32), (5, 20)):
        config = BASE.replace(num_envs=shape[0], num_steps=shape[1], minibatch_size=shape[1], num_epochs=3)
        counts, training = visits(config, np.ones(shape[0] * shape[1]))
        assert np.all(counts == 3)
        assert training.leftover == 0


@pytest.mark.parametrize(("kept", "most"), [(100, 2), (40, 4), (32, 4)])
def test_step_matched_goes_on_through_the_kept_records(kept, most):
    keep = np.zeros(N, bool)
    keep[np.random.default_rng(kept).permutation(N)[:kept]] = True
    counts, training = visits(BASE.replace(filter="iif", num_epochs=1, training="step_matched"), keep)
    assert training.steps == 4
    assert training.leftover == 0
    assert counts[~keep].sum() == 0
    assert counts.sum() == N
    assert counts.max() == most
    assert counts[keep].max() - counts[keep].min() <= 1


def test_step_matched_makes_no_step_from_less_than_a_minibatch():
    keep = np.arange(N) < 31
    counts, training = visits(BASE.replace(filter="iif", training="step_matched"), keep)
    assert training.steps == 0
    assert counts.sum() == 0
    assert training.leftover == 31


@pytest.fixture(scope="module")
def keep_p():
    """A rule that keeps round(p * N) records and no minimum: what rules of users may do."""

    def rule(scores, records, key, round, p, min_keep):
        return (jnp.arange(scores.shape[0]) < jnp.round(p * scores.shape[0])).astype(jnp.float32)

    filters.register_filter("test/keep_p", rule, weighted=False)
    yield "test/keep_p"
    del filters.FILTERS["test/keep_p"]


def test_t17b_a_rule_that_keeps_nothing_or_one(keep_p):
    lab = Lab(Walk(), BASE.replace(filter=keep_p), 2)
    for p, kept in ((0, 0), (1 / N, 1), (31 / N, 31)):
        state, m, _ = lab(2, p=[p, 0.25])
        assert same(lane(state.params, 0), lane(lab.start.params, 0))
        assert same(lane(state.opt_state, 0), lane(lab.start.opt_state, 0))
        assert m.kept[:, 0].tolist() == [kept] * 2
        assert m.dropped[:, 0].tolist() == [N - kept] * 2
        assert m.optimizer_steps.tolist() == [[0, 2]] * 2
        assert m.leftover[:, 0].tolist() == [kept] * 2
        assert np.all(m.nonfinite == 0)
        assert np.asarray(state.update).tolist() == [2, 2]
        assert not same(lane(state.params, 1), lane(lab.start.params, 1))


# -- statistics, schedule -------------------------------------------------------------------------------------


def test_t15_first_ratio_is_one_with_normalised_observations(iif):
    state, _, _ = iif(1)  # now there are statistics
    after, m, judged = iif(1, state, learning_rate=[0.0] * 8)
    assert same(plain(after.params), plain(state.params))
    log_prob = jax.jit(jax.vmap(jax.vmap(iif.step.nets.log_prob, (None, 0, 0))))
    ratio = jnp.exp(
        log_prob(jax.device_get(state.params), judged.records.obs, judged.records.action) - judged.records.log_prob
    )
    assert np.max(np.abs(ratio - 1)) < 1e-6
    assert np.max(np.abs(m.approx_kl)) < 1e-6
    assert np.all(m.clip_fraction == 0)
    assert np.all(m.dropped > 0)
    assert np.all(m.optimizer_steps > 0)
    assert not same(plain(after.obs_stats), plain(state.obs_stats))  # for the next round
    # Scored with the same frozen statistics: undone with those from before this round, step counts come out whole.
    stats = jax.device_get(state.obs_stats)
    steps = 80 * (judged.records.obs * np.sqrt(stats.var + 1e-8)[:, None] + stats.mean[:, None])[..., 2]
    assert np.max(np.abs(steps - np.round(steps))) < 1e-3
    assert stats.count.tolist() == [N] * 8


def test_t18_linear_schedule_is_constant_within_a_round_and_never_0():
    config = BASE.replace(
        optimizer="sgd", learning_rate=0.1, lr_schedule="linear", minibatch_size=64, filter="iif", p=1.0
    )
    assert config.total_updates == 3
    lab = Lab(Walk(), config, 1)
    state, m, _ = lab(3)
    assert m.learning_rate[:, 0] == pytest.approx([0.1, 0.2 / 3, 0.1 / 3], rel=1e-6)
    # The same program with the schedule switched off (infinite length) and the three values put in by hand.
    by_hand = lab.start
    for k in range(3):
        settings = lane_settings(config.replace(learning_rate=0.1 * (1 - k / 3)), 1)
        by_hand, m, _ = lab(1, by_hand, settings._replace(total_updates=jnp.full(1, jnp.inf)))
        assert m.learning_rate[0, 0] == pytest.approx(0.1 * (1 - k / 3), rel=1e-6)
    assert gap(plain(state.params), plain(by_hand.params)) < 1e-6
    assert np.all(m.dropped > 0)


# -- keys -----------------------------------------------------------------------------------------------------


def bits(key):
    """A key's 64 bits as four exact float32 numbers."""
    data = jax.random.key_data(key)
    return jnp.concatenate([data & 0xFFFF, data >> 16]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class KeyEnv:
    """Its observation is the key that made it; action 1 ends the episode."""

    spec = EnvSpec("test/keys", (4,), Discrete(2), 1000)

    def reset(self, key):
        return jnp.int32(0), bits(key)

    def step(self, key, state, action):
        return state + 1, Step(bits(key), jnp.float32(1), action == 1, jnp.bool_(False))


def test_t25_no_key_is_used_twice(monkeypatch):
    lanes, lists = 8, []
    config = BASE.replace(num_epochs=1, filter="random", on_nonfinite="skip", normalize_advantage="none")
    spied = []

    def spy(f, position=0):
        def call(*args, **kwargs):
            spied.append(args[position])
            return f(*args, **kwargs)

        return call

    monkeypatch.setitem(filters.FILTERS, "random", filters.Filter(spy(filters.random, 2), weighted=False))
    step = make_update_step(KeyEnv(), config)

    class Noise(type(step.nets.distribution)):
        noise = lambda self, key, shape: spy(super().noise)(key, shape)

    nets = dataclasses.replace(step.nets, distribution=Noise(2))
    step = dataclasses.replace(step, nets=nets, shuffle=spy(permutation.orders))
    state, settings = init_state(step, range(lanes)), lane_settings(config, lanes)

    @jax.jit
    @jax.vmap
    def used(state, settings):
        spied.clear()
        state, settings = jax.tree.map(lambda x: x[None], (state, settings))  # lane by lane: spied keys can get out
        new, _, judged = step.round(state, settings)
        fresh = step.collector.init(jax.random.split(state.key[0], 4)[3][None])  # what `skip` would reset with
        seen = [judged.records.obs[0], new.env_state.obs[0], fresh.obs[0]]
        one = jnp.stack([bits(k) for k in (*spied, new.key[0])])
        return jnp.concatenate([*(x.reshape(-1, 4) for x in seen), one])

    for action in (1, 0):  # 1: the observations are all reset keys, 0: all but the first are step keys
        state.params["policy"]["head"]["out"]["bias"] = 1e6 * jnp.tile(jnp.eye(2)[action], (lanes, 1))
        found = np.asarray(used(state, settings))
        assert len(spied) == 4  # noise, chunks of the scores, filter, epochs
        assert found.shape == (lanes, (32 + 1 + 1) * 4 + 5, 4)
        lists.append(found)
    starts = [x[:, :4] for x in lists]
    assert np.array_equal(*starts)  # common to both: the first resets, and at the end fresh ones and the rest
    everything = np.concatenate([lists[0], lists[1][:, 4:-9]], axis=1).reshape(-1, 4)
    assert len(np.unique(everything, axis=0)) == len(everything) == lanes * ((34 * 4 + 5) + 32 * 4)


# -- one trace ------------------------------------------------------------------------------------------------


def test_t30_t31_one_trace_for_every_number_and_count(iif):
    state, m, _ = iif(1)
    traces, compiled = iif.shuffles, []
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    numbers = {
        "learning_rate": 1e-4, "adam_eps": 1e-6, "max_grad_norm": 1.0, "clip_range": 0.1, "value_clip_range": 0.3,
        "ent_coef": 0.01, "vf_coef": 1.0, "gamma": 0.9, "gae_lambda": 0.5, "p": 0.9,
    }  # fmt: skip
    assert set(numbers) == set(TRACED)
    variants = [place_lanes(lane_settings(iif.config.replace(**{k: v}), 8), 8) for k, v in numbers.items()]
    variants.append(place_lanes(lane_settings(iif.config, 8, {"p": np.linspace(0, 1, 8).tolist()}), 8))
    counts = [jnp.int32(1 + i % 3) for i in range(len(variants))]
    dropped = set()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for settings, count in zip(variants, counts, strict=True):
            state, m, _ = iif.chunk(state, settings, count)
            dropped.add(np.asarray(m.dropped)[0].tobytes())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(dropped) > 5  # the number of dropped records did vary
    assert iif.shuffles == traces
    assert compiled == []


def test_t31_t33_one_trace_of_the_bare_update_also_with_nan_debugging():
    step = make_update_step(registry.make("probe/ends_at_3"), BASE.replace(filter="iif"))
    start = state = init_state(step, [0])
    update = jax.jit(chex.assert_max_traces(step.update, n=1))
    with jax.debug_nans(True):  # every metric exists here: no false alarm
        for p in (0.125, 0.5, 0.0):
            state, _ = update(state, lane_settings(step.config, 1, {"p": [p]}))
    assert update._cache_size() == 1
    assert jax.tree.structure(state) == jax.tree.structure(start)
    for x, y in zip(*map(jax.tree.leaves, (state, start)), strict=True):
        assert x.aval == y.aval  # shape, dtype, weak type


# -- lanes ----------------------------------------------------------------------------------------------------


def test_t32_lanes_without_a_filter_equal_the_unfiltered_run(iif):
    on = [0.5] * 4 + [0.0] * 4
    state, m, _ = iif(3, p=on)
    assert np.all(m.dropped[:, :4] > 0)
    assert np.all(m.dropped[:, 4:] == 0)
    assert np.all(m.optimizer_steps[:, 4:] == 8)
    assert np.any(m.optimizer_steps[:, :4] < 8)
    off, _, _ = iif(3, p=[0.0] * 8)  # the same program, nobody filters: bit for bit
    for i in range(4, 8):
        assert same(lane(state, i), lane(off, i))
    assert not same(lane(state.params, 0), lane(off.params, 0))
    # And the program that has no filter in it; another program may round differently in the last bit.
    none = Lab(Walk(), iif.config.replace(filter="none"), 8)
    bare, m, _ = none(3)
    assert np.isnan(m.score_mean).all()
    assert np.isnan(m.target_grad_norm).all()
    for i in range(4, 8):
        assert gap(lane(state.params, i), lane(bare.params, i)) < 1e-6
        assert same(lane(state.env_state, i), lane(bare.env_state, i))


def test_t32_dead_lanes_are_frozen_and_others_untouched(iif):
    rates = [3e-3] * 8
    good, _, _ = iif(3, learning_rate=rates)
    rates[0] = rates[5] = 1e38  # the parameters overflow in the first round
    state, m, _ = iif(3, learning_rate=rates)
    assert np.asarray(state.alive).tolist() == [i not in (0, 5) for i in range(8)]
    assert np.all(m.nonfinite[:, [0, 5]] > 0)
    assert np.all(np.delete(m.nonfinite, [0, 5], axis=1) == 0)
    for i in range(8):
        want = iif.start.replace(alive=jnp.zeros(8, bool)) if i in (0, 5) else good
        assert same(lane(state, i), lane(want, i))


def test_t42_lane_3_of_8_equals_a_solo_run(iif, solo):
    assert same(lane(iif.start, 3), lane(solo.start, 0))  # bit for bit
    many, m8, judged8 = iif(3)
    alone, m1, judged1 = solo(3)
    for part in ("params", "obs_stats", "reward_stats", "env_state"):
        assert gap(lane(getattr(many, part), 3), lane(getattr(alone, part), 0)) < 1e-5, part
    assert np.array_equal(m8.kept[:, 3], m1.kept[:, 0])
    assert np.array_equal(m8.episodes[:, 3], m1.episodes[:, 0])
    # Scores do not depend on the other seeds of the program.
    assert gap(np.asarray(judged8.scores)[3], np.asarray(judged1.scores)[0]) < 1e-5
    assert np.array_equal(np.asarray(judged8.weights)[3], np.asarray(judged1.weights)[0])


def test_scores_do_not_change_with_the_other_lanes(iif):
    _, _, a = iif(1)
    _, _, b = iif(1, p=[0.9, 0.0, 0.3, 0.5, 1.0, 0.1, 0.2, 0.7], gamma=[0.5] * 3 + [iif.config.gamma] + [0.9] * 4)
    assert np.array_equal(np.asarray(a.scores)[3], np.asarray(b.scores)[3])
    assert not np.array_equal(np.asarray(a.scores)[2], np.asarray(b.scores)[2])


def test_t33_a_state_can_be_used_again(solo):
    first, _, _ = solo(2)
    again, _, _ = solo(2)
    assert same(plain(first), plain(again))
    zeros = jnp.zeros_like(solo.start.opt_state[1].mu)
    adam = solo.start.opt_state[1]._replace(mu=zeros, nu=zeros)  # two leaves, one buffer
    aliased = solo.start.replace(opt_state=(solo.start.opt_state[0], adam, solo.start.opt_state[2]))
    third, _, _ = solo(2, aliased)
    assert same(plain(first), plain(third))
    assert same(plain(aliased), plain(solo.start))


# -- estimators, parameters that count ------------------------------------------------------------------------


def test_estimators_are_interchangeable_in_the_trainer(solo):
    other = Lab(Walk(), solo.config.replace(estimator="per_sample", score_chunk=48), 1, seeds=[3])
    a, ma, ja = solo(3)
    b, mb, jb = other(3)
    assert gap(plain(a.params), plain(b.params)) < 1e-5
    assert gap(np.asarray(ja.scores), np.asarray(jb.scores)) < 1e-5
    assert np.array_equal(ma.kept, mb.kept)
    assert np.array_equal(ja.weights, jb.weights)


def test_score_params_chooses_what_counts(solo):
    _, _, judged = solo(1)
    records, state = jax.tree.map(lambda x: x[0], (judged.records, solo.start))
    state.params["policy"]["head"]["out"]["kernel"] *= 100  # else the body hardly counts
    settings = jax.tree.map(lambda x: x[0], lane_settings(solo.config, 1))

    def scores(pattern):
        step = make_update_step(Walk(), solo.config.replace(score_params=pattern, score_normalize="buffer"))
        return np.asarray(jax.jit(step.score)(state, records, jax.random.key(0), settings)[0])

    whole = scores("policy")
    assert np.all(scores("value/.*") == 0)
    assert gap(scores("policy/head/.*") + scores("policy/body/.*"), whole) < 1e-5
    assert gap(scores(".*"), whole) < 1e-6
    assert gap(scores("policy/head/.*"), whole) > 1e-2


# -- experience from elsewhere --------------------------------------------------------------------------------


class Pool:
    """A stateful pool on the host, all lanes in one call. Resets in the step after an end: that row is no record."""

    def restart(self, lanes, envs):
        self.x, self.time, self.over = (
            np.zeros((lanes, envs)),
            np.zeros((lanes, envs), int),
            np.zeros((lanes, envs), bool),
        )
        self.calls = 0

    def step(self, action):
        self.calls += 1
        valid = ~self.over
        x = np.where(valid, self.x + 0.2 * (2 * np.asarray(action) - 1), 0.0)
        self.x, self.time = x, np.where(valid, self.time + 1, 0)
        terminated, truncated = valid & (np.abs(x) > 0.7), valid & (np.abs(x) <= 0.7) & (self.time >= 6)
        self.over = terminated | truncated
        return np.float32(x)[..., None], np.float32(np.where(valid, -np.abs(x), 0.0)), terminated, truncated, valid


@dataclasses.dataclass(frozen=True)
class PoolCollector:
    """Calls the pool from inside the jit, in order: nothing of this could be vmapped. Garbage fills masked rows."""

    pool: Any
    lanes: int
    num_envs: int = 4
    num_steps: int = 32
    all_valid: bool = False
    pure = in_jit = True  # its reset can be traced, and it is called from inside the program
    spec = EnvSpec("test/pool", (1,), Discrete(2), 6)

    def init(self, keys):
        return jnp.zeros((self.lanes, self.num_envs, 1), jnp.float32), jnp.zeros(self.lanes)

    def collect(self, nets, state, keys):
        shape = (self.lanes, self.num_envs)
        out = [jax.ShapeDtypeStruct((*shape, *s), d) for s, d in (((1,), jnp.float32), ((), jnp.float32))]
        out += [jax.ShapeDtypeStruct(shape, bool)] * 3
        per_env = lambda f: jax.vmap(jax.vmap(f, (None, 0)))
        noise = jax.vmap(lambda k: nets.distribution.noise(k, (self.num_steps, self.num_envs)))(keys)

        def step(obs, noise):
            head = per_env(nets.policy)(state.params, obs)
            action = jax.vmap(jax.vmap(nets.distribution.sample))(head, noise)
            log_prob = jax.vmap(jax.vmap(nets.distribution.log_prob))(head, action)
            new, reward, terminated, truncated, valid = io_callback(self.pool.step, tuple(out), action, ordered=True)
            values = per_env(nets.value)(state.params, obs), per_env(nets.value)(state.params, new)
            return new, (obs, action, log_prob, *values, reward, terminated, truncated, valid)

        obs, garbage = state.env_state
        obs, rows = jax.lax.scan(step, obs, jnp.swapaxes(noise, 0, 1))
        rows = Rollout(*jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows))

        def spoil(x):
            valid = rows.valid.reshape(rows.valid.shape + (1,) * (x.ndim - 3))
            return jnp.where(valid, x, garbage.reshape((-1,) + (1,) * (x.ndim - 1)))

        done = rows.terminated | rows.truncated
        count = jnp.sum(done, (1, 2), dtype=jnp.int32)
        episodes = EpisodeStats(count, jnp.sum(rows.reward, (1, 2)), jnp.sum(rows.valid, (1, 2)).astype(jnp.float32))
        rows = rows.replace(
            **{k: spoil(getattr(rows, k)) for k in ("obs", "log_prob", "value", "next_value", "reward")}
        )
        return (obs, garbage), rows, episodes


@pytest.fixture(scope="module")
def pooled():
    """Runs of two rounds over two lanes with different garbage in the masked rows."""
    config = BASE.replace(filter="iif", p=0.5, normalize_obs=True, normalize_reward=True, learning_rate=1e-2)
    config = config.replace(score_normalize="buffer", ent_coef=0.01)
    pool = Pool()
    step = UpdateStep(config, make_networks(PoolCollector.spec, config), PoolCollector(pool, 2))
    start, settings, round_ = init_state(step, [0, 1]), lane_settings(config, 2), jax.jit(step.round)

    def run(garbage):
        pool.restart(2, 4)
        state, seen = start.replace(env_state=(start.env_state[0], jnp.full(2, garbage))), []
        for _ in range(2):
            state, metrics, judged = jax.block_until_ready(round_(state, settings))
            seen.append(jax.device_get((metrics, judged)))
        assert pool.calls == 2 * 32
        return state.replace(env_state=state.env_state[0]), seen

    return {garbage: run(garbage) for garbage in (0.0, 1e6, float("nan"))}


def test_a_collector_that_cannot_be_vmapped(pooled):
    state, seen = pooled[0.0]
    for metrics, judged in seen:
        valid = judged.records.valid
        assert np.all(metrics.records == valid.sum(1))
        assert np.all(metrics.records < N)
        assert np.all(metrics.kept + metrics.dropped == metrics.records)
        assert np.all(metrics.episodes > 0)
        assert np.all(judged.weights[~valid] == 0)
        assert np.all(metrics.negative == ((judged.scores < 0) & valid).sum(1))
        assert np.all(metrics.optimizer_steps == 2 * (metrics.kept // 32))
        assert np.all(metrics.nonfinite == 0)
    total = sum(m.records for m, _ in seen)
    assert np.array_equal(np.asarray(state.obs_stats.count), total)
    assert np.array_equal(np.asarray(state.reward_stats.count), total)


@pytest.mark.parametrize("garbage", [1e6, "nan"])
def test_masked_rows_are_never_learned_from_nor_counted(pooled, garbage):
    state, seen = pooled[0.0]
    other, again = next(v for k, v in pooled.items() if str(k) == str(garbage))
    assert same(plain(state), plain(other))
    for (m1, j1), (m2, j2) in zip(seen, again, strict=True):
        assert same(m1, m2)
        assert np.array_equal(j1.scores[j1.records.valid], j2.scores[j2.records.valid])


def test_lanes_that_do_not_divide_over_the_devices():
    """Three lanes on two devices: nothing changes but the time."""
    assert len(jax.devices()) > 1
    even, odd = Lab(Walk(), BASE, 2, (0, 2)), Lab(Walk(), BASE, 3)
    state, metrics, judged = odd()
    assert metrics.kept.shape == (3, 3)
    assert judged.weights.shape == (3, N)
    again, _, _ = odd(2, state)  # what comes out goes in again, without another program
    assert odd.chunk._cache_size() == 1
    assert np.asarray(again.update).tolist() == [5, 5, 5]
    want, counts, _ = even()
    pick = lambda tree: jax.tree.map(lambda x: np.asarray(x)[[0, 2]], tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), pick(state.params), want.params)
    np.testing.assert_array_equal(metrics.episodes[:, [0, 2]], counts.episodes)


def test_rows_after_a_cut_do_not_leak_into_advantages():
    # Worked by hand, gamma 0.5, lambda 1: the second row is no record, so the first is bootstrapped from V(next) = 4.
    spec = EnvSpec("test/none", (1,), Box(1, (-1.0,), (1.0,)), 1)
    config = Config(num_envs=1, num_steps=3, minibatch_size=3, total_steps=3, gamma=0.5, gae_lambda=1.0)

    class Elsewhere:
        all_valid = False

    Elsewhere.spec = spec
    step = UpdateStep(config, make_networks(spec, config), Elsewhere())
    column = lambda *x: jnp.asarray(x)[:, None]
    rollout = Rollout(
        obs=jnp.zeros((3, 1, 1)), action=jnp.zeros((3, 1, 1)), log_prob=column(0.0, 0.0, 0.0),
        value=column(2.0, 7.0, 1.0), next_value=column(4.0, 7.0, 3.0), reward=column(1.0, 100.0, 5.0),
        terminated=column(False, False, True), truncated=column(False, False, False), valid=column(True, False, True),
    )  # fmt: skip
    state = jax.tree.map(lambda x: x[0], init_state(step_with_init(step), [0]))
    records, _, _ = step.advantages(state, rollout, jax.tree.map(jnp.float32, config.settings()))
    assert records.advantage[0] == 1 + 0.5 * 4 - 2
    assert records.advantage[2] == 5 - 1


def step_with_init(step):
    class WithInit(step.collector.__class__):
        pure = True
        init = lambda self, keys: jnp.zeros(len(keys))

    return dataclasses.replace(step, collector=WithInit())


@pytest.mark.parametrize("reset", ["fresh", "cached"])
def test_rounds_that_start_anew(reset):
    """Every round begins at time 0, episodes that were cut are bootstrapped from where they were and not counted."""
    short = BASE.replace(num_envs=32, num_steps=4)  # too short to end by itself
    config = short.replace(round_start="reset", reset=reset)
    step = make_update_step(Walk(), config)
    state, seen = init_state(step, [0, 1]), []
    collect = jax.jit(lambda state, keys: step.collector.collect(step.nets, state, keys))
    for r in range(3):
        keys = jax.random.split(jax.random.key(r), 2)
        env_state, rollout, episodes = collect(state, keys)
        state = state.replace(env_state=env_state)
        seen.append(np.asarray(rollout.obs[:, 0, :, 0]))  # x at the start, (S, B)
        np.testing.assert_array_equal(
            np.round(rollout.obs[..., 2] * 80), np.arange(4)[None, :, None] + np.zeros((2, 4, 32))
        )
        assert not np.any(episodes.count)  # the limit is 80 steps
        assert not np.any(rollout.terminated | rollout.truncated)
        # V of the observation after the last step: 4 / 80 and not that of a start
        value = jax.vmap(lambda p, o: jax.vmap(lambda x: step.nets.value(p, x))(o))(state.params, env_state.obs)
        np.testing.assert_allclose(env_state.obs[..., 2], 4 / 80)
        np.testing.assert_allclose(rollout.next_value[:, -1], value, rtol=1e-5)
    assert len(np.unique(seen)) == (192 if reset == "fresh" else 64)
    _, rollout, _ = make_collector(Walk(), short).collect(step.nets, state, keys)  # the default goes on
    np.testing.assert_allclose(rollout.obs[:, 0, :, 2], 4 / 80)
