"""Agreement with the authors' code on two recorded LunarLander rounds, through the code that training runs."""

import jax
import numpy as np
import pytest
from golden_round import GoldenRound, params_from

from jaxattr import influence_scores, keep_mask


@pytest.fixture(scope="module", params=["round0", "round5"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def rounds(name):
    """Per estimator: the round, its records, their scores and weights."""
    out = {}
    for estimator in ("jvp", "per_sample"):
        g = GoldenRound(name, estimator=estimator)
        records, *_ = jax.jit(g.step.advantages)(g.state, g.rollout, g.settings)
        out[estimator] = g, records, *score_and_filter(g, records)
    return out


def score_and_filter(g, records):
    """(scores, weights) by the learner's own two steps."""

    @jax.jit
    def both(state, records, key, settings):
        scores, _ = g.step.score(state, records, key, settings)
        return scores, g.step.filter(state, records, scores, key, settings)

    return both(g.state, records, jax.random.key(0), g.settings)


def close(got, want, relative):
    """Largest absolute error over the largest absolute reference value."""
    error = np.max(np.abs(np.asarray(got) - want)) / np.max(np.abs(want))
    assert error < relative, error


def test_networks_advantages_and_returns(rounds):
    g, records, *_ = rounds["jvp"]
    d = g.data
    log_prob = jax.vmap(g.nets.log_prob, (None, 0, 0))(g.state.params, d["obs"], d["action"])
    value = jax.vmap(g.nets.value, (None, 0))(g.state.params, d["obs"])
    close(log_prob, d["old_logp"], 1e-6)
    close(value, d["value"], 2e-6)
    close(g.record_order(records.advantage), d["adv"], 1e-6)
    close(g.record_order(records.return_), d["ret"], 1e-6)


@pytest.mark.parametrize("estimator", ["jvp", "per_sample"])
def test_scores_and_mask(rounds, estimator):
    g, _, scores, weights = rounds[estimator]
    close(g.record_order(scores), g.data["ip"], 1e-5)
    assert np.array_equal(g.record_order(weights) > 0, g.data["keep"] > 0)
    assert np.sum(g.record_order(scores) < 0) == g.data["n_neg"]
    assert np.sum(g.record_order(weights) == 0) == g.data["n_drop"]


@pytest.mark.parametrize("estimator", ["jvp", "per_sample"])
def test_entropy_term_in_the_published_scaling(name, estimator):
    g = GoldenRound(name, estimator=estimator, ent_coef=1000.0)
    assert g.data["ent_coef_alt"] == 1000.0
    records, *_ = g.step.advantages(g.state, g.rollout, g.settings)
    scores, _ = score_and_filter(g, records)
    close(g.record_order(scores), g.data["ip_ent"], 1e-5)
    assert not np.allclose(g.data["ip_ent"], g.data["ip"], rtol=1e-3)  # the term is not negligible here


@pytest.mark.parametrize("estimator", ["jvp", "per_sample"])
def test_the_public_function(rounds, estimator):
    g, *_ = rounds["jvp"]
    d = g.data
    scores = influence_scores(g.nets.log_prob, g.state.params, d["obs"], d["action"], d["adv"], estimator=estimator)
    close(scores, d["ip"], 1e-5)
    assert np.array_equal(keep_mask(scores, rule="iif", p=0.125), d["keep"] > 0)
    with_entropy = influence_scores(
        g.nets.log_prob,
        g.state.params,
        d["obs"],
        d["action"],
        d["adv"],
        estimator=estimator,
        ent_coef=1000.0,
        entropy_fn=lambda p, o: g.nets.entropy(p, o, 0),
        entropy_scale="published",
    )
    close(with_entropy, d["ip_ent"], 1e-5)


def test_the_whole_filtered_update(rounds):
    g, *_ = rounds["jvp"]
    state, metrics, _ = jax.jit(g.step.learn)(g.state, g.rollout, g.episodes, jax.random.key(0), g.settings)
    want = params_from(g.data, "after")
    for got, reference in zip(jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(got - reference)) < 1e-4
    moves = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), state.params, g.state.params)
    moved = max(jax.tree.leaves(moves))
    assert moved > 0.3
    epochs, minibatches, _ = g.data["batch_index"].shape
    assert metrics.optimizer_steps == epochs * minibatches
    assert state.opt_state[1].count == g.data["adam_step"] + epochs * minibatches
    assert metrics.kept == g.data["keep"].sum()
    assert metrics.dropped == g.data["n_drop"]
    assert metrics.leftover == g.data["keep"].sum() % 64
