"""Influence scores: both estimators against the definition, and the invariances a score must have."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import scores as oracle
from oracles import statistics as statistics_oracle

from jaxattr import influence_scores, keep_mask, per_sample_gradients
from jaxattr.attribution.estimators import ESTIMATORS, jvp_scores, per_sample_scores
from jaxattr.attribution.scores import loss_advantage, record_objective
from jaxattr.attribution.targets import TARGETS, register_target
from jaxattr.config import Config, ConfigError
from jaxattr.networks import make_networks
from jaxattr.ops import trees
from jaxattr.testing import _tiny_problem, check_estimator
from jaxattr.types import Box, Discrete, EnvSpec, Records
from jaxattr.update import UpdateStep

REACH = Box(2, (-1.0, 0.0), (1.0, 3.0))
KINDS = {  # name: (observation shape, actions, settings)
    "softmax": ((3,), Discrete(4), {}),
    "shared trunk": ((3,), Discrete(4), {"shared_trunk": True}),
    "cnn": ((4, 3, 2), Discrete(4), {}),
    "gaussian": ((3,), REACH, {}),
    "tanh": ((3,), REACH, {"squash": True, "activation": "swish"}),
}
SWITCHES = (
    "log_prob_fn", "target", "estimator", "normalize", "norm_chunk", "ddof", "target_normalize", "ent_coef",
    "entropy_fn", "entropy_scale", "chunk_size",
)  # fmt: skip
jitted_scores = jax.jit(influence_scores, static_argnames=SWITCHES)


@functools.cache
def network(kind):
    shape, action, options = KINDS[kind]
    return make_networks(EnvSpec(kind, shape, action, 10), Config(hidden=(5, 4), **options))


def problem(kind="softmax", n=12, seed=0):
    """(nets, params, obs, action, advantage) in NumPy's float64; weights of order one, so that nothing is near 0."""
    rng = np.random.default_rng(seed)
    nets = network(kind)
    shape, action_space, _ = KINDS[kind]
    shapes = jax.eval_shape(nets.init, jax.random.key(0))
    params = jax.tree.map(lambda x: 0.7 * rng.normal(size=x.shape), shapes)
    action = rng.integers(4, size=n) if isinstance(action_space, Discrete) else rng.normal(size=(n, 2))
    return nets, params, rng.normal(size=(n, *shape)), action, rng.normal(size=n)


def single(tree):
    """float64 -> float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else None), tree)


def close(got, want, relative):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.max(np.abs(got - want)) <= relative * np.max(np.abs(want))


# -- agreement with the definition ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_estimators_equal_the_definition_and_finite_differences(kind):
    """In float64, with an entropy term."""
    nets, params, obs, action, advantage = problem(kind)
    c, step = 0.3, 1e-6
    with jax.enable_x64(True):
        want, direction = oracle.scores(nets.log_prob, params, obs, action, advantage, advantage, nets.entropy, c)
        direction = trees.unflattener(params)(jnp.asarray(direction))
        for estimator in ESTIMATORS:
            got = jax.jit(
                lambda d, name=estimator: ESTIMATORS[name](
                    record_objective(nets.log_prob, nets.entropy, c), params, (obs, action, advantage), d, None
                )
            )(direction)
            close(got, want, 1e-11)

        @jax.jit
        def objectives(p):
            def each(o, a, adv):
                value = adv * nets.log_prob(p, o, a)
                if kind == "tanh":  # its entropy holds the noise fixed, so the action moves with the policy
                    mean, log_std = nets.policy(params, o)
                    a = nets.distribution.sample(nets.policy(p, o), (a - mean) / jnp.exp(log_std))
                return value + c * nets.entropy(p, o, a)

            return jax.vmap(each)(obs, action, advantage)

        move = lambda h: jax.tree.map(lambda p, d: p + h * d, params, direction)
        slope = (objectives(move(step)) - objectives(move(-step))) / (2 * step)
        close(slope, want, 1e-7)


@pytest.mark.parametrize("kind", ["cnn", "gaussian"])
def test_both_estimators_agree_in_float32(kind):
    nets, *inputs = problem(kind)
    params, obs, action, advantage = single(inputs)
    got = [
        jitted_scores(nets.log_prob, params, obs, action, advantage, estimator=e, normalize="buffer")
        for e in ("jvp", "per_sample")
    ]
    close(got[0], got[1], 1e-5)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_shipped_estimators_keep_the_contract(estimator):
    check_estimator(ESTIMATORS[estimator])
    check_estimator(ESTIMATORS[estimator], seed=1)


BROKEN = {
    "shape": (lambda f, p, r, d, c: jvp_scores(f, p, r, d, c)[:-1], "scores are float32(10,)"),
    "sign": (lambda f, p, r, d, c: -jvp_scores(f, p, r, d, c), "differ from per_sample's"),
    "jit": (lambda f, p, r, d, c: np.asarray(jvp_scores(f, p, r, d, c)), "fails under jit"),
    "chunk": (lambda f, p, r, d, c: jvp_scores(f, p, r, d, c) * (1.0 if c is None else 1.01), "chunk_size 1 changes"),
    # Right on the first call, wrong once another record leads or has changed.
    "order": (
        lambda f, p, r, d, c: jvp_scores(f, p, r, d, c) * jnp.where(r[2][0] == TINY[0], 1.0, 1.5),
        "depend on the order",
    ),
    "coupled": (
        lambda f, p, r, d, c: jvp_scores(f, p, r, d, c) * jnp.where(jnp.abs(r[2].sum() - TINY.sum()) < 1e-3, 1.0, 1.5),
        "a record's score depends on another record",
    ),
}
TINY = np.asarray(_tiny_problem(11, 0)[2][2])  # the advantages in check_estimator's problem


@pytest.mark.parametrize("what", list(BROKEN))
def test_broken_estimators_are_found(what):
    estimator, message = BROKEN[what]
    with pytest.raises(AssertionError) as error:
        check_estimator(estimator)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# -- identities -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_mean_score_is_the_squared_norm_of_the_target_gradient(seed):
    """Where loss and target use the same advantages: both raw, or both standardised over the buffer."""
    nets, params, obs, action, advantage = problem(seed=seed)
    with jax.enable_x64(True):
        for options, used in (
            ({"normalize": "none"}, advantage),
            ({"normalize": "buffer", "target_normalize": True}, statistics_oracle.standardize(advantage)),
        ):
            scores = jitted_scores(nets.log_prob, params, obs, action, advantage, **options)
            direction = _target_gradient(params, obs, action, used)
            assert np.allclose(np.mean(scores), np.sum(trees.flatten(direction) ** 2), rtol=1e-9)


@jax.jit
def _target_gradient(params, obs, action, advantage):
    log_prob = lambda p: jax.vmap(network("softmax").log_prob, (None, 0, 0))(p, obs, action)
    return jax.grad(lambda p: jnp.mean(advantage * log_prob(p)))(params)


@pytest.mark.parametrize("kind", ["softmax", "cnn"])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_the_mean_of_the_gradients_is_the_gradient_of_the_mean(kind, chunk_size):
    """For every leaf, of a loss with policy and value parts."""
    nets, params, obs, action, advantage = problem(kind)

    def loss(p, record):
        o, a, adv = record
        return -adv * nets.log_prob(p, o, a) + (nets.value(p, o) - adv) ** 2

    records = (obs, action, advantage)
    with jax.enable_x64(True):
        each = jax.jit(lambda p: per_sample_gradients(loss, p, records, chunk_size=chunk_size))(params)
        mean = jax.jit(jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, records))))(params)
        assert jax.tree.structure(each) == jax.tree.structure(params)
        for name, x, y in zip(trees.paths(each), jax.tree.leaves(each), jax.tree.leaves(mean), strict=True):
            assert x.shape == (12, *y.shape), name
            assert np.allclose(jnp.mean(x, axis=0), y, rtol=1e-10, atol=1e-14), name
            assert np.any(y != 0), name


@pytest.mark.parametrize("normalize", ["chunk", "buffer", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_normalisation_is_applied_to_the_loss_side_before_scoring(normalize, ddof):
    nets, params, obs, action, advantage = problem(n=21)
    used = {
        "chunk": statistics_oracle.standardize_chunks(advantage, 5, ddof),  # the lone 21st joins the 4th chunk
        "buffer": statistics_oracle.standardize(advantage, ddof),
        "none": advantage,
    }[normalize]
    with jax.enable_x64(True):
        want, _ = oracle.scores(nets.log_prob, params, obs, action, used, advantage)
        got = jitted_scores(nets.log_prob, params, obs, action, advantage, normalize=normalize, norm_chunk=5, ddof=ddof)
    close(got, want, 1e-9)


def test_chunks_are_cut_in_the_visiting_order():
    rng = np.random.default_rng(0)
    advantage, valid, order = rng.normal(size=30), rng.random(30) < 0.8, rng.permutation(30)
    with jax.enable_x64(True):
        got = loss_advantage(jnp.asarray(advantage), jnp.asarray(valid), "chunk", 8, 1, jnp.asarray(order))
    want = np.zeros(30)
    want[order] = statistics_oracle.standardize_chunks(advantage[order], 8, 1, valid[order])
    assert np.allclose(got, want, rtol=1e-9, atol=1e-12)
    assert not np.any(np.asarray(got)[~valid])


# -- invariances ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(order=st.permutations(range(12)), seed=st.integers(0, 1000))
def test_scores_follow_the_records_in_any_order(order, seed):
    nets, params, obs, action, advantage = problem(seed=seed)
    order = np.array(order)
    with jax.enable_x64(True):
        for normalize in ("buffer", "none"):
            run = functools.partial(jitted_scores, nets.log_prob, params, normalize=normalize)
            scores = np.asarray(run(obs, action, advantage))
            close(run(obs[order], action[order], advantage[order]), scores[order], 1e-10)


def test_published_normalisation_depends_on_the_order():
    """Why the order is part of the call: chunk-wise scores change with the shuffle."""
    nets, params, obs, action, advantage = problem(seed=3)
    run = functools.partial(jitted_scores, nets.log_prob, params, normalize="chunk", norm_chunk=4)
    with jax.enable_x64(True):
        scores = np.asarray(run(obs, action, advantage))
        order = np.argsort(advantage)
        sorted_scores = np.asarray(run(obs[order], action[order], advantage[order]))
    assert np.max(np.abs(sorted_scores - scores[order])) > 0.1 * np.max(np.abs(scores))


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_chunk_sizes_never_change_a_score(estimator):
    """T36: N = 100 in chunks of 32 (the last one is short), of 1, of more than N."""
    nets, *inputs = problem(n=100)
    params, obs, action, advantage = single(inputs)
    run = functools.partial(jitted_scores, nets.log_prob, params, estimator=estimator, normalize="buffer")
    scores = np.asarray(run(obs, action, advantage, chunk_size=100))
    for chunk_size in (32, 1, 99, 1000, None):
        got = run(obs, action, advantage, chunk_size=chunk_size)
        assert got.shape == (100,)
        close(got, scores, 1e-6)
    order = np.random.default_rng(0).permutation(100)
    close(run(obs[order], action[order], advantage[order], chunk_size=32), scores[order], 1e-5)


def test_lanes_equal_single_calls():
    nets, *first = problem(seed=0)
    _, *second = problem(seed=1)
    lanes = jax.tree.map(lambda *x: np.stack(x), first, second)
    with jax.enable_x64(True):
        score = lambda p, o, a, adv: influence_scores(nets.log_prob, p, o, a, adv)
        together = jax.jit(jax.vmap(score))(*lanes)
        for got, inputs in zip(together, (first, second), strict=True):
            close(got, jitted_scores(nets.log_prob, *inputs), 1e-10)


def test_records_are_told_apart_by_index():
    """T39: equal (s, a) with different advantages get their own scores; equal records get equal ones."""
    nets, *inputs = problem()
    params, obs, action, _ = single(inputs)
    obs, action = jnp.repeat(obs[:2], 6, axis=0), jnp.repeat(action[:2], 6)
    advantage = jnp.asarray([3, -1, 0.5, 0.5, -2, 0, 1, 1, 1, 1, 1, 1], jnp.float32)
    scores = np.asarray(jitted_scores(nets.log_prob, params, obs, action, advantage, normalize="none"))
    unit = scores[2] / 0.5
    assert np.allclose(scores[:6], unit * advantage[:6], rtol=1e-5)
    assert len(np.unique(scores[:6])) == 5
    assert len(np.unique(scores[6:])) == 1
    # ... and are not dropped together: half of the equal negatives go, the first ones.
    equal = -np.ones(8, np.float32)
    assert keep_mask(equal, p=0.5).tolist() == [False] * 4 + [True] * 4


# -- degenerate inputs (T38) ----------------------------------------------------------------------------------


def test_a_record_of_no_advantage_scores_exactly_zero():
    nets, *inputs = problem()
    params, obs, action, advantage = single(inputs)
    advantage = advantage.at[jnp.array([0, 5])].set(0.0)
    for estimator in ESTIMATORS:
        run = functools.partial(jitted_scores, nets.log_prob, params, estimator=estimator, normalize="none")
        scores = np.asarray(run(obs, action, advantage))
        assert np.flatnonzero(scores == 0).tolist() == [0, 5]


@pytest.mark.parametrize("normalize", ["chunk", "buffer", "none"])
def test_no_advantage_at_all_gives_zeros_and_drops_nothing(normalize):
    nets, *inputs = problem()
    params, obs, action, _ = single(inputs)
    scores = jitted_scores(nets.log_prob, params, obs, action, jnp.zeros(12), normalize=normalize)
    assert np.array_equal(scores, np.zeros(12))
    for rule in ("iif", "zero"):
        assert np.all(keep_mask(scores, rule=rule, p=1.0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_non_finite_advantage_is_named(value):
    nets, *inputs = problem()
    params, obs, action, advantage = single(inputs)
    with pytest.raises(ValueError, match=rf"^advantage of record 7 is {value} \(1 of 12 not finite\)$"):
        influence_scores(nets.log_prob, params, obs, action, advantage.at[7].set(value))


def test_a_non_finite_score_is_named():
    log_prob = lambda w, o, a: jnp.log(jnp.sum(w * o))
    obs = jnp.ones((4, 2)).at[2].set(0.0)  # log 0 and its slope
    with pytest.raises(ValueError, match="of record"):
        influence_scores(log_prob, jnp.ones(2), obs, jnp.zeros(4), jnp.arange(4.0), normalize="none")


@pytest.mark.parametrize("scale", [1e3, 1e6])
@pytest.mark.parametrize("kind", ["softmax", "tanh"])
def test_an_underflowing_policy_has_finite_scores(kind, scale):
    """Log-probabilities of minus thousands, probabilities of exactly 0."""
    nets, *inputs = problem(kind)
    params, obs, action, advantage = single(inputs)
    head = params["policy"]["head"]["out"]
    params["policy"]["head"]["out"] = jax.tree.map(lambda x: scale * x, head)
    log_prob = jax.vmap(nets.log_prob, (None, 0, 0))(params, obs, action)
    assert np.any(np.exp(log_prob) == 0)
    for estimator in ESTIMATORS:
        scores = jitted_scores(nets.log_prob, params, obs, action, advantage, estimator=estimator)
        assert np.all(np.isfinite(scores))
        assert np.any(scores != 0)


# -- targets and entropy --------------------------------------------------------------------------------------


def test_a_target_of_ones_own():
    """f_act: the log-probability of one chosen action in one chosen state."""
    nets, params, obs, action, advantage = problem()
    act = lambda p: nets.log_prob(p, np.ones(3), 2)
    with jax.enable_x64(True):
        direction = oracle.flat(jax.grad(act)(params))
        grad = jax.jit(jax.grad(nets.log_prob))
        want = [advantage[i] * oracle.flat(grad(params, obs[i], action[i])) @ direction for i in range(12)]
        got = jitted_scores(nets.log_prob, params, obs, action, advantage, target=act, normalize="none")
        close(got, want, 1e-10)
        mean = lambda p: jnp.mean(advantage * jax.vmap(nets.log_prob, (None, 0, 0))(p, obs, action))
        same = jitted_scores(nets.log_prob, params, obs, action, advantage, target=mean)
        close(same, jitted_scores(nets.log_prob, params, obs, action, advantage), 1e-10)


@pytest.mark.parametrize("target", [lambda p: jnp.ones(1), lambda p: (jnp.float32(1), jnp.float32(2)), lambda p: p])
def test_a_target_must_be_one_scalar(target):
    nets, *inputs = problem()
    with pytest.raises(ValueError, match="must return one scalar"):
        influence_scores(nets.log_prob, *single(inputs), target=target)


def test_a_registered_target_can_be_used_by_name():
    def first(log_prob_fn, params, records):
        return log_prob_fn(params, records.obs[0], records.action[0])

    try:
        register_target("first", first)
        nets, params, obs, action, advantage = problem()
        with jax.enable_x64(True):
            scores, norm = trainer_scores(nets, params, obs, action, advantage, target="first", score_normalize="none")
            direction = oracle.flat(jax.grad(nets.log_prob)(params, obs[0], action[0]))
            assert np.allclose(norm, np.linalg.norm(direction), rtol=1e-10)
            assert np.allclose(scores[0], advantage[0] * direction @ direction, rtol=1e-10)
        for name, target in (("first", first), ("second", "no function")):
            with pytest.raises(ValueError, match=f"target '{name}'"):
                register_target(name, target)
    finally:
        TARGETS.pop("first", None)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_the_entropy_term_per_record_and_as_published(estimator):
    nets, params, obs, action, advantage = problem(n=12)
    entropy = lambda p, o: nets.entropy(p, o, 0)
    run = functools.partial(
        jitted_scores, nets.log_prob, params, obs, action, advantage,
        estimator=estimator, normalize="none", entropy_fn=entropy,
    )  # fmt: skip
    with jax.enable_x64(True):
        without = np.asarray(run())
        want, direction = oracle.scores(nets.log_prob, params, obs, action, advantage, advantage)
        grad = jax.jit(jax.grad(entropy))
        term = np.array([oracle.flat(grad(params, obs[i])) @ direction for i in range(12)])
        close(without, want, 1e-10)
        close(run(ent_coef=0.5, entropy_scale="record"), want + 0.5 * term, 1e-10)
        close(run(ent_coef=0.5, entropy_scale="published"), want + 0.5 / 12 * term, 1e-10)
    assert np.max(np.abs(term)) > 0.01 * np.max(np.abs(want))


# -- which parameters count -----------------------------------------------------------------------------------


def trainer_scores(nets, params, obs, action, advantage, **options):
    """(scores, |direction|) from the learner's own scoring step, op by op."""
    nothing, no = jnp.zeros_like(advantage), jnp.zeros(len(advantage), bool)
    records = Records(
        obs=jnp.asarray(obs), action=jnp.asarray(action), advantage=jnp.asarray(advantage),
        log_prob=nothing, value=nothing, reward=nothing, return_=nothing, td_error=nothing,
        mc_advantage=nothing, segment=jnp.arange(len(advantage)), terminated=no, truncated=no, valid=~no,
    )  # fmt: skip
    config = Config(filter="iif", **options)
    step = UpdateStep(config, nets, collector=None)
    run = jax.jit(lambda p, r: step.score(SimpleNamespace(params=p), r, jax.random.key(0), config.settings()))
    return run(params, records)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@pytest.mark.parametrize(
    ("kind", "pattern", "parts"),
    [
        ("softmax", "policy", ("policy/",)),
        ("softmax", "policy/head", ("policy/head/",)),
        ("softmax", ".*kernel", ("policy/body/dense_0/kernel", "policy/body/dense_1/kernel", "policy/head/out/kernel")),
        ("softmax", "value", ()),
        ("shared trunk", "policy", ("trunk/", "policy/")),  # the option's own word: all that the policy depends on
        ("shared trunk", "policy/", ("policy/",)),
        ("shared trunk", "trunk/dense_1", ("trunk/dense_1/",)),
    ],
)
def test_scores_over_part_of_the_parameters(kind, pattern, parts, estimator):
    nets, params, obs, action, advantage = problem(kind)
    flags = jax.tree.map(lambda x: np.zeros(x.shape, bool), params)
    leaves = [
        np.full(x.shape, any(path.startswith(part) for part in parts))
        for path, x in zip(trees.paths(params), jax.tree.leaves(flags), strict=True)
    ]
    count = np.concatenate([x.ravel() for x in leaves])
    with jax.enable_x64(True):
        want, direction = oracle.scores(nets.log_prob, params, obs, action, advantage, advantage, count=count)
        options = {"score_params": pattern, "score_normalize": "none", "estimator": estimator}
        got, norm = trainer_scores(nets, params, obs, action, advantage, **options)
    assert np.allclose(got, want, rtol=1e-9, atol=1e-12)
    assert np.allclose(norm, np.linalg.norm(direction), rtol=1e-9)


# -- batch coupling (T35) -------------------------------------------------------------------------------------


class WithBatchNorm(nn.Module):
    track: bool = True

    @nn.compact
    def __call__(self, obs):
        x = nn.Dense(4)(obs)
        x = nn.BatchNorm(use_running_average=self.track)(x)
        return nn.Dense(4)(x), nn.Dense(1)(x)[0]


class WithLayerNorm(nn.Module):
    @nn.compact
    def __call__(self, obs):
        x = nn.LayerNorm()(nn.Dense(4)(obs))
        return nn.Dense(4)(x), nn.Dense(1)(x)[0]


@pytest.mark.parametrize("track", [True, False])
def test_a_network_that_couples_records_is_refused(track):
    spec = EnvSpec("four", (3,), Discrete(4), 10)
    with pytest.raises(ConfigError) as error:
        make_networks(spec, Config(), WithBatchNorm(track))
    for part in ("network WithBatchNorm", "batch_stats", "depends on others", "use LayerNorm or GroupNorm"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    make_networks(spec, Config(), WithLayerNorm())


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"normalize": "none"}, (0.5, -0.25)),
        # Loss side (1, -1), target raw: what T35 calls normalised. ddof 0 turns (2, 1) into (1, -1).
        ({"normalize": "buffer", "ddof": 0}, (0.25, 0.25)),
        ({"normalize": "chunk", "ddof": 0}, (0.25, 0.25)),
        # The default, ddof 1, turns (2, 1) into (1, -1) / sqrt 2.
        ({}, (0.25 / 2**0.5, 0.25 / 2**0.5)),
        ({"normalize": "buffer"}, (0.25 / 2**0.5, 0.25 / 2**0.5)),
        # Both sides.
        ({"normalize": "buffer", "ddof": 0, "target_normalize": True}, (0.5, 0.5)),
        ({"normalize": "buffer", "target_normalize": True}, (0.25, 0.25)),
        ({"normalize": "none", "ddof": 0, "target_normalize": True}, (1.0, -0.5)),
    ],
)
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_the_two_record_example(options, want, estimator):
    """T35: one state [1, 0], actions 0 and 1, zero weights, advantages (2, 1).

    grad log pi(0) = g = (1/2, -1/2) in the first row, grad log pi(1) = -g, <g, g> = 1/2. Raw target direction:
    (2 g - g) / 2 = g / 2, so raw scores are 2 * 1/4 and 1 * -1/4.
    """
    log_prob = lambda w, s, a: jax.nn.log_softmax(s @ w)[a]
    obs, action, advantage = jnp.array([[1.0, 0.0]] * 2), jnp.array([0, 1]), jnp.array([2.0, 1.0])
    scores = influence_scores(log_prob, jnp.zeros((2, 2)), obs, action, advantage, estimator=estimator, **options)
    assert np.allclose(scores, want, rtol=1e-6)


# -- memory (T34) ---------------------------------------------------------------------------------------------

LARGE = {
    "2x256 MLP": (EnvSpec("mlp", (8,), Discrete(4), 10), Config(hidden=(256, 256))),
    "small CNN": (EnvSpec("cnn", (6, 6, 3), Discrete(4), 10), Config(hidden=(32,))),
}


@pytest.mark.parametrize("name", list(LARGE))
def test_memory_of_the_estimators(name):
    """2,048 records, compiled and not run: working memory grows with the chunk for per_sample, and jvp needs little."""
    n = 2048
    spec, config = LARGE[name]
    nets = make_networks(spec, config)
    params = jax.eval_shape(nets.init, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(params))
    kind = jax.ShapeDtypeStruct
    records = kind((n, *spec.obs_shape), jnp.float32), kind((n,), jnp.int32), kind((n,), jnp.float32)
    objective = lambda p, r: r[2] * nets.log_prob(p, r[0], r[1])

    def memory(estimator, chunk_size):
        f = jax.jit(lambda p, r, d: estimator(objective, p, r, d, chunk_size))
        return f.lower(params, records, params).compile().memory_analysis().temp_size_in_bytes

    small, medium, large = (memory(per_sample_scores, c) for c in (32, 256, 2048))
    assert 5 < medium / small < 11
    assert 5 < large / medium < 11
    every_gradient = n * size * 4
    assert memory(jvp_scores, None) < every_gradient / 10
    assert memory(jvp_scores, 32) < every_gradient / 500

    largest = max(sizes(jax.make_jaxpr(lambda p, r, d: jvp_scores(objective, p, r, d))(params, records, params).jaxpr))
    widest = max(256, 6 * 6 * 16, 6 * 6 * 3)
    assert largest <= n * widest * 3 * 3  # activations (at most: patches of a convolution), never (N, P)
    assert largest < n * size / 5


def sizes(jaxpr):
    """Number of entries of every value in a jaxpr and those inside it."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from sizes(inner.jaxpr)


# -- what is refused, in one line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "jpv"}, "estimator is 'jpv': must be one of jvp, per_sample"),
        ({"normalize": "batch"}, "normalize is 'batch': must be one of chunk, buffer, none"),
        ({"entropy_scale": "mean"}, "entropy_scale is 'mean': must be one of record, published"),
        ({"ddof": 2}, "ddof is 2: must be one of 0, 1"),
        ({"norm_chunk": 1}, "advantages cannot be standardised over one record"),
        ({"chunk_size": 0}, "chunk_size is 0: must be 1 or more"),
        ({"ent_coef": 0.1}, "ent_coef is not 0: entropy_fn is needed"),
        ({"obs": jnp.ones((5, 3))}, "obs must have a leading axis of 12, the number of advantages; got [(5,)]"),
        ({"action": jnp.int32(1)}, "action must have a leading axis of 12, the number of advantages; got [()]"),
        ({"advantage": jnp.ones((12, 1))}, "advantage must have shape (N,) with N >= 1"),
        ({"advantage": jnp.ones(0)}, "advantage must have shape (N,) with N >= 1"),
    ],
)
def test_bad_calls_are_refused(changes, message):
    nets, *inputs = problem()
    arguments = dict(zip(("params", "obs", "action", "advantage"), single(inputs), strict=True)) | changes
    with pytest.raises(ValueError) as error:
        influence_scores(nets.log_prob, **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_one_record_has_a_raw_score_only():
    log_prob = lambda w, s, a: jax.nn.log_softmax(s @ w)[a]
    inputs = jnp.zeros((2, 2)), jnp.array([[1.0, 0.0]]), jnp.array([0]), jnp.array([2.0])
    assert np.allclose(influence_scores(log_prob, *inputs, normalize="none"), [2.0])
    for normalize in ("chunk", "buffer"):
        with pytest.raises(ValueError, match="over one record"):
            influence_scores(log_prob, *inputs, normalize=normalize)


def test_observations_may_be_a_tree():
    log_prob = lambda w, s, a: jax.nn.log_softmax(s["left"] @ w + s["right"])[a]
    obs = {"left": np.array([[1.0, 0.0]] * 2), "right": np.zeros((2, 2))}
    scores = influence_scores(log_prob, jnp.zeros((2, 2)), obs, np.array([0, 1]), np.array([2, 1]), normalize="none")
    assert np.allclose(scores, (0.5, -0.25))
