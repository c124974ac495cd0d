"""Targets, units, metrics and checkpoints of a round's scores, against loops over records with jax.grad alone."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxattr.attribution.influence import without_own_unit
from jaxattr.attribution.targets import action_target
from jaxattr.attribution.tracin import TracIn
from jaxattr.attribution.units import segment_ids, unit_ids, unit_sums
from jaxattr.config import Config, ConfigError
from jaxattr.envs import registry
from jaxattr.ops.permutation import orders
from jaxattr.train import init_state, lane_settings, make_update_step

# -- units ----------------------------------------------------------------------------------------------------


def test_segments_are_cut_at_episode_and_rollout_end():
    done = np.zeros((4, 2), bool)
    done[1, 0] = done[3, 1] = done[0, 1] = True
    #            env 0: rows 0 2 | 4 6        env 1: row 1 | 3 5 7
    assert segment_ids(jnp.asarray(done)).tolist() == [0, 1, 0, 3, 4, 3, 4, 3]


def test_an_episode_is_whole():
    done = np.zeros((4, 2), bool)
    done[1, 0] = done[3, 1] = done[0, 1] = True
    segment, flat = segment_ids(jnp.asarray(done)), jnp.asarray(done.reshape(-1))

    def ids(kind, started, valid=(True,) * 8):
        return unit_ids(kind, segment, flat, jnp.asarray(started), jnp.asarray(valid)).tolist()

    # env 0's second segment never ends; env 1 was in the middle of an episode when the round began
    assert ids("episode", [True, False]) == [0, -1, 0, 3, -1, 3, -1, 3]
    assert ids("episode", [False, True]) == [-1, 1, -1, 3, -1, 3, -1, 3]
    assert ids("record", [True, True]) == list(range(8))
    assert ids("segment", [True, True], np.arange(8) != 3) == [0, 1, 0, -1, 4, 3, 4, 3]
    with pytest.raises(ValueError, match="unit is 'row': must be one of record, segment, episode"):
        ids("row", [True, True])


def test_rows_of_no_unit_are_in_no_sum():
    assert unit_sums(jnp.arange(1.0, 5.0), jnp.array([0, -1, 0, 3])).tolist() == [4, 0, 0, 4]


# -- one round of a small problem -----------------------------------------------------------------------------

CONFIG = Config(
    filter="dtv", num_envs=2, num_steps=12, minibatch_size=8, num_epochs=2, hidden=(5,), ent_coef=0.1,
    score_normalize="buffer", learning_rate=0.05, total_steps=24 * 4,
)  # fmt: skip
ENV = "CartPole-v1"


class Problem:
    """A round in float64: state, rollout, records, per-record gradients of the round's objectives."""

    def __init__(self, config):
        config = config.replace(env_args=(("max_steps_in_episode", 7),))  # so that there are several segments
        self.step = make_update_step(registry.make(ENV, config.env_args), config)
        state, settings = init_state(self.step, [0]), lane_settings(config, 1)
        state, _ = jax.jit(self.step.update)(state, settings)  # an optimiser that has seen a round
        keys = jax.vmap(lambda k: jax.random.split(k, 4))(state.key)
        _, rollout, _ = jax.jit(lambda s, k: self.step.collector.collect(self.step.nets, s, k))(state, keys[:, 1])
        wide = lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x
        one = lambda tree: jax.tree.map(lambda x: wide(x[0]), tree)
        self.settings = one(settings)
        self.state, self.rollout = one(state.replace(env_state=None)), one(rollout)
        self.records, *_ = self.step.advantages(self.state, self.rollout, self.settings)
        self.n = config.records_per_round
        self.params = self.state.params

    def objective(self, params, i, advantage):
        """By hand: advantage * log pi + c * entropy, ratio 1."""
        head = self.step.nets.apply(params, self.records.obs[i])[0]
        log_p = jax.nn.log_softmax(head)
        return advantage[i] * log_p[self.records.action[i]] - self.settings.ent_coef * jnp.sum(jnp.exp(log_p) * log_p)

    def gradients(self):
        a = self.records.advantage
        a = (a - a.mean()) / (a.std(ddof=1) + 1e-8)
        return np.stack([flat(jax.grad(self.objective)(self.params, i, a)) for i in range(self.n)])

    def score(self, **options):
        return np.asarray(self.step.score(self.state, self.records, jax.random.key(0), self.settings, **options)[0])


def flat(tree):
    return np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(tree)])


@pytest.fixture(scope="module")
def problem():
    with jax.enable_x64(True):
        made = Problem(CONFIG)
        made.by_hand = made.gradients()
        assert made.records.advantage.dtype == jnp.float64
        assert len(set(made.records.segment.tolist())) >= 4
    return made


def test_the_mean_gradient_as_target(problem):
    with jax.enable_x64(True):
        g = problem.by_hand
        assert np.allclose(problem.score(target="gradient"), g @ g.mean(0), rtol=1e-10, atol=1e-14)
        assert np.allclose(problem.score(), problem.score(target="gradient"), rtol=1e-12)  # what dtv brings along


@pytest.mark.parametrize("unit", ["record", "segment"])
def test_leave_one_out_by_definition(problem, unit):
    with jax.enable_x64(True):
        g, n = problem.by_hand, problem.n
        ids = problem.records.segment if unit == "segment" else jnp.arange(n)
        got = problem.score(target="gradient_loo", unit_ids=ids)
        for u in set(ids.tolist()):
            own = np.asarray(ids) == u
            want = (g[own].sum(0) * g[~own].mean(0)).sum()
            assert got[own].sum() == pytest.approx(want, rel=1e-9, abs=1e-14)


def test_leave_one_out_with_rows_of_no_unit_and_in_a_metric(problem):
    with jax.enable_x64(True):
        g = problem.by_hand
        ids = jnp.where(problem.records.segment == 0, -1, problem.records.segment)
        metric = jax.tree.map(lambda x: 0.5 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), problem.params)
        m, inside = flat(metric), np.asarray(ids) >= 0
        mean = g[inside].mean(0)
        objective, data = problem.step.objective(problem.records, jax.random.key(0), problem.settings)
        scores = jnp.asarray(g @ (m * mean))
        got = np.asarray(without_own_unit(scores, objective, problem.params, data, ids, CONFIG.num_envs, metric))
        assert np.all(got[~inside] == 0)
        for u in set(np.asarray(ids)[inside].tolist()):
            own = np.asarray(ids) == u
            want = (g[own].sum(0) * m * g[inside & ~own].mean(0)).sum()
            assert got[own].sum() == pytest.approx(want, rel=1e-9)


def test_agreement_of_two_halves(problem):
    """The cosine of grad f_ret on two random halves, by hand; then what `gated` makes of it."""
    with jax.enable_x64(True):
        key, n = jax.random.key(5), problem.n
        step = dataclasses.replace(problem.step, config=CONFIG.replace(filter="gated", p=0.9))
        rank = np.asarray(orders(jax.random.split(key)[0], n, 1)[0])
        assert sorted(rank) == list(range(n))
        a = problem.records.advantage
        log_p = lambda params, i: (
            problem.objective(params, i, jnp.ones(n)) + problem.settings.ent_coef * entropy(params, i)
        )

        def entropy(params, i):
            head = step.nets.apply(params, problem.records.obs[i])[0]
            return jnp.sum(jnp.exp(jax.nn.log_softmax(head)) * jax.nn.log_softmax(head))

        g = np.stack([float(a[i]) * flat(jax.grad(log_p)(problem.params, i)) for i in range(n)])
        x, y = g[rank[: n // 2]].sum(0), g[rank[n // 2 :]].sum(0)
        want = max(0.0, x @ y / np.linalg.norm(x) / np.linalg.norm(y))
        got = float(step.agreement(problem.params, problem.records, key, problem.settings))
        assert got == pytest.approx(want, rel=1e-9)
        # All records alike: the halves agree wholly; opposite advantages in the halves: not at all.
        alike = jax.tree.map(lambda v: jnp.broadcast_to(v[:1], v.shape), problem.records)
        alike = alike.replace(advantage=jnp.ones(n))
        assert float(step.agreement(problem.params, alike, key, problem.settings)) == pytest.approx(1.0)
        sign = jnp.full(n, -1.0).at[rank[: n // 2]].set(1.0)
        opposite = alike.replace(advantage=sign)
        assert float(step.agreement(problem.params, opposite, key, problem.settings)) == 0.0

        scores = jnp.asarray(problem.score(target="return"))
        for records, share in ((alike, 1.0), (opposite, 0.0)):
            settings = problem.settings._replace(p=jnp.float64(0.9))
            # the halves are drawn anew here, so only records that agree wholly, or cancel in every half, tell
            records = records if share else records.replace(advantage=jnp.zeros(n))
            kept = step.filter(problem.state, records, scores, key, settings)
            dropped = int(0.9 * share * int((scores < 0).sum()) + 1e-6)
            assert int((kept == 0).sum()) == min(dropped, n - CONFIG.minibatch_size)


def test_an_action_as_target(problem):
    with jax.enable_x64(True):
        obs, action = problem.records.obs[3], problem.records.action[3]
        log_prob = lambda p: jax.nn.log_softmax(problem.step.nets.apply(p, obs)[0])[action]
        want = problem.by_hand @ flat(jax.grad(log_prob)(problem.params))
        assert np.allclose(problem.score(target=action_target(obs, action)), want, rtol=1e-10, atol=1e-14)


def test_a_target_must_be_a_scalar(problem):
    r = problem.records
    with (
        jax.enable_x64(True),
        pytest.raises(ConfigError, match=r"the target returns ShapeDtypeStruct\(shape=\(24,\).*must return one scalar"),
    ):
        problem.score(target=lambda log_prob, params, records: r.advantage * log_prob(params, r.obs[0], r.action[0]))


def test_adams_view(problem):
    with jax.enable_x64(True):
        moments = problem.state.opt_state[1]
        scale = 1 / (np.sqrt(np.asarray(moments.nu) / (1 - 0.999 ** int(moments.count))) + 1e-5)
        g = problem.by_hand
        got = problem.score(target="gradient", metric="adam")
        assert int(moments.count) > 0
        assert np.allclose(got, g @ (scale * g.mean(0)), rtol=1e-9)


def test_adams_view_of_two_parameters_by_hand(problem):
    # v = (4e-3, 1e-3) after 1 step, bias-corrected (4, 1): diagonal 1/2 and 1.
    adam = problem.state.opt_state[1]._replace(count=jnp.int32(1), nu=jnp.array([4e-3, 1e-3]), mu=jnp.zeros(2))
    state = lambda adam: types.SimpleNamespace(params={"policy": jnp.zeros(2)}, opt_state=(optax.EmptyState(), adam))
    settings = problem.settings._replace(adam_eps=jnp.float32(0.0))
    diagonal = problem.step.metric(state(adam), "adam", settings)["policy"]
    assert diagonal.tolist() == pytest.approx([0.5, 1.0], rel=1e-5)
    fresh = problem.step.metric(state(adam._replace(count=jnp.int32(0))), "adam", settings)
    assert fresh["policy"].tolist() == [1, 1]


def test_adams_view_needs_adam():
    with pytest.raises(ConfigError, match="score_metric is 'adam', but optimizer is 'sgd'"):
        Config(score_metric="adam", optimizer="sgd")


# -- TracIn over all steps ------------------------------------------------------------------------------------


def record_loss(problem, params, i, advantage):
    """PPO's clipped objective of record i, by hand."""
    r = problem.records
    log_p = jax.nn.log_softmax(problem.step.nets.apply(params, r.obs[i])[0])
    ratio = jnp.exp(log_p[r.action[i]] - r.log_prob[i])
    eps = problem.settings.clip_range
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - eps, 1 + eps) * advantage)
    return surrogate - problem.settings.ent_coef * jnp.sum(jnp.exp(log_p) * log_p)


@pytest.mark.parametrize("refresh", ["step", "epoch"])
@pytest.mark.parametrize("target", ["action", "return"])
def test_tracin_equals_a_loop_over_steps_and_records(problem, refresh, target):
    step, r = problem.step, problem.records
    with jax.enable_x64(True):
        if target == "action":
            f = lambda p: jax.nn.log_softmax(step.nets.apply(p, r.obs[5])[0])[r.action[5]]
        else:
            f = lambda p: jnp.mean(r.advantage * jax.vmap(lambda o, a: step.nets.log_prob(p, o, a))(r.obs, r.action))
        weights = jnp.where(jnp.arange(problem.n) < 20, 1.0, 0.0)
        key = jax.random.key(3)
        watch = TracIn(step.gain(problem.settings), jax.grad(f), refresh)
        params, _, training = jax.jit(
            lambda s: step.optimize(s, r, weights, key, problem.settings, watch=watch)
        )(problem.state)  # fmt: skip
        sums = np.asarray(training.watched[0])

        # The loop: the same minibatches, one after another; parameters move by the product's own single steps.
        order = np.asarray(step.shuffle(key, problem.n, CONFIG.num_epochs, weights > 0))
        want, state = np.zeros(problem.n), problem.state
        one = CONFIG.replace(num_epochs=1)
        for epoch in range(CONFIG.num_epochs):
            for k in range(20 // 8):
                rows = order[epoch, 8 * k : 8 * k + 8]
                if refresh == "step" or k == 0:
                    v = flat(jax.grad(f)(state.params))
                a = np.asarray(r.advantage)[rows]
                a = (a - a.mean()) / (a.std(ddof=1) + 1e-8)
                for i, advantage in zip(rows, a, strict=True):
                    g = jax.grad(lambda p, i=i, adv=advantage: record_loss(problem, p, i, adv))(state.params)
                    want[i] += flat(g) @ v
                visit = lambda key, n, epochs, keep, rows=rows: jnp.asarray(np.pad(rows, (0, n - 8)))[None]
                single = dataclasses.replace(step, config=one, shuffle=visit)
                only = jnp.zeros(problem.n).at[rows].set(1.0)
                params_, opt_state, _ = single.optimize(state, r, only, key, problem.settings)
                state = state.replace(params=params_, opt_state=opt_state)
        assert np.allclose(flat(params), flat(state.params), rtol=1e-10)
        assert np.allclose(sums, want, rtol=1e-8, atol=1e-13)
        assert np.all(sums[20:] == 0)
        assert np.abs(sums).max() > 1e-4


def test_watching_changes_no_parameter(problem):
    step = problem.step
    with jax.enable_x64(True):
        weights, key = jnp.ones(problem.n), jax.random.key(3)
        watch = TracIn(step.gain(problem.settings), lambda p: p, "step")
        run = lambda w: jax.jit(lambda s: step.optimize(s, problem.records, weights, key, problem.settings, watch=w))(
            problem.state
        )
        assert np.allclose(flat(run(watch)[0]), flat(run(None)[0]), rtol=1e-12)
