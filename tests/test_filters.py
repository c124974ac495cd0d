"""Filter rules: every shipped one keeps the contract, and `iif` drops exactly the records it should."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import filters as oracle

from jaxattr import keep_mask, register_filter
from jaxattr.attribution.filters import FILTERS, drop_count
from jaxattr.config import Config, ConfigError
from jaxattr.envs import registry
from jaxattr.testing import check_filter
from jaxattr.train import make_update_step

N = 32
PERCENTS = [0.0, 0.01, 0.0625, 0.07, 0.1, 0.125, 0.2, 0.25, 0.29, 0.3, 0.5, 0.57, 0.58, 0.7, 0.9, 0.99, 1.0]


class Rows:
    """Records of which a rule reads only the validity."""

    def __init__(self, valid):
        self.valid = valid


def weights(rule, scores, p, valid=None, min_keep=0, key=0):
    valid = jnp.ones(len(scores), bool) if valid is None else jnp.asarray(valid)
    return np.asarray(_weights(rule, jnp.asarray(scores, jnp.float32), valid, jax.random.key(key), p, min_keep))


@jax.jit(static_argnames=("rule", "min_keep"))
def _weights(rule, scores, valid, key, p, min_keep):
    return FILTERS[rule](scores, Rows(valid), key, jnp.int32(0), p, min_keep)


# -- the contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(FILTERS))
@pytest.mark.parametrize("min_keep", [1, 8])
def test_every_shipped_rule_keeps_the_contract(rule, min_keep):
    check_filter(FILTERS[rule], min_keep=min_keep, drops_zero=rule == "reweight")


def good(scores, records, key, round, p, min_keep):
    """A weighted rule: sigmoid of the score in units of its spread."""
    scores = jnp.where(records.valid & jnp.isfinite(scores), scores, 0.0)
    spread = jnp.sqrt(jnp.mean(scores**2)) + 1e-8
    return jnp.where(records.valid, 2 * jax.nn.sigmoid(scores / spread), 0.0)


def test_a_weighted_rule_passes():
    check_filter(good)


BROKEN = {
    "min_keep": (lambda s, r, k, n, p, m: (r.valid & (s >= 0)).astype(jnp.float32), "records stay, must be"),
    "invalid rows": (lambda s, r, k, n, p, m: jnp.ones_like(s), "an invalid row has a weight"),
    "negative": (lambda s, r, k, n, p, m: good(s, r, k, n, p, m) - 1.0, "a weight is negative"),
    "NaN": (lambda s, r, k, n, p, m: jnp.where(r.valid, jax.nn.sigmoid(s / jnp.mean(s**2)), 0.0), "not finite"),
    "shape": (lambda s, r, k, n, p, m: jnp.float32(1.0), "must be float32(40,)"),
    "dtype": (lambda s, r, k, n, p, m: r.valid, "must be float32(40,)"),
    "jit": (lambda s, r, k, n, p, m: s[s >= 0], "fails under jit"),
    "value": (lambda s, r, k, n, p, m: s if s[0] > 0 else -s, "fails under jit"),
    "not an array": (lambda s, r, k, n, p, m: None, "must be an array"),
    "zero": (
        lambda s, r, k, n, p, m: FILTERS["zero"](jnp.where(s == 0, -1e-9, s), r, k, n, p, m),
        "score of 0 is treated",
    ),
    "order": (lambda s, r, k, n, p, m: r.valid * (1.0 + jnp.arange(40)), "depend on the order"),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_broken_rules_are_found(what):
    rule, message = BROKEN[what]
    with pytest.raises(AssertionError) as error:
        check_filter(rule)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_min_keep_the_check_has_no_rows_for():
    with pytest.raises(AssertionError, match="min_keep is 41"):
        check_filter(FILTERS["iif"], min_keep=41)


# -- iif ------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.sampled_from([-2.0, -1.0, -0.5, -1e-30, -0.0, 0.0, 1e-30, 0.5, 1.0]), min_size=N, max_size=N),
    valid=st.lists(st.booleans(), min_size=N, max_size=N),
    p=st.sampled_from(PERCENTS),
    min_keep=st.sampled_from([0, 8]),
)
def test_iif_equals_sorting_with_exact_fractions(scores, valid, p, min_keep):
    """With ties, zeros of both signs, the smallest negatives, and invalid rows."""
    got = weights("iif", scores, p, valid, min_keep)
    assert set(got) <= {0.0, 1.0}
    assert (got > 0).tolist() == oracle.iif_mask(scores, p, valid, min_keep)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), p=st.sampled_from(PERCENTS))
def test_iif_on_scores_without_ties(seed, p):
    scores = np.random.default_rng(seed).normal(size=N).astype(np.float32)
    assert (weights("iif", scores, p) > 0).tolist() == oracle.iif_mask(scores, p)


@pytest.mark.parametrize("n", [1, 2, 3, 100, 2048])
def test_iif_at_other_sizes(n):
    scores = np.random.default_rng(n).normal(size=n).astype(np.float32)
    for p in (0.125, 0.3, 1.0):
        assert (weights("iif", scores, p) > 0).tolist() == oracle.iif_mask(scores, p)


def test_the_number_dropped_is_exactly_the_floor():
    """Every whole percentage and every sixteenth of up to 2,048 negatives; 0.84 * 75 is 62.999996 in float32."""
    size = 2048
    negatives = np.r_[0:65, 75, 100, 120, 150, 97:400:17, 511:514, 1000, 1023:1026, 2047, 2048]
    shares = [k / 100 for k in range(101)] + [k / 16 for k in range(17)]

    @jax.jit
    def count(n, ps):
        scores = jnp.where(jnp.arange(size) < n, -1.0, 1.0)
        return jax.vmap(lambda p: drop_count(scores, jnp.ones(size, bool), p))(ps)

    for n in negatives.tolist():
        got = count(n, jnp.asarray(shares, jnp.float32))
        assert got.tolist() == [oracle.drop_count(n, p, size) for p in shares]


def test_zero_is_not_negative():
    assert weights("iif", [0.0, -0.0, 1.0, -1.0], 1.0).tolist() == [1, 1, 1, 0]
    assert weights("zero", [0.0, -0.0, 1.0, -1.0], 0.0).tolist() == [1, 1, 1, 0]
    for rule in ("none", "iif", "zero", "random"):  # the others read more than scores, or drop a score of 0
        assert np.all(weights(rule, np.zeros(N), 1.0) == 1), rule


def test_ties_go_by_record_index():
    """T39: each of many equal records has an index of its own, so they are not dropped together."""
    assert weights("iif", [-1.0] * 8, 0.5).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert weights("iif", [-1.0, -2.0, 3.0, -1.0, -2.0, -1.0], 0.6).tolist() == [0, 0, 1, 1, 0, 1]


def test_the_most_negative_go_first():
    assert weights("iif", [-1.0, 5.0, -4.0, -3.0, 0.0, -2.0], 0.5).tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("rule", ["iif", "zero", "random"])
def test_min_keep_records_stay(rule):
    got = weights(rule, -np.arange(1.0, N + 1), 1.0, min_keep=10)
    assert got.sum() == 10
    if rule != "random":
        assert got.tolist() == [1] * 10 + [0] * (N - 10)  # the least negative ones
    few = np.arange(N) < 6
    assert weights(rule, -np.ones(N), 1.0, few, min_keep=10).tolist() == few.tolist()


def test_none_and_zero():
    scores = np.random.default_rng(0).normal(size=N)
    valid = np.arange(N) % 5 > 0
    assert np.array_equal(weights("none", scores, 1.0, valid) > 0, valid)
    assert np.array_equal(weights("zero", scores, 0.0, valid) > 0, valid & (scores >= 0))


# -- random ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.125, 0.3, 1.0])
def test_random_drops_as_many_as_iif(p):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores, valid = rng.normal(size=N), rng.random(N) < 0.8
        drawn = weights("random", scores, p, valid, 8, key=seed)
        assert drawn.sum() == weights("iif", scores, p, valid, 8).sum()
        assert not np.any(drawn[~valid])


def test_random_draws_evenly_from_all_valid_records():
    scores, valid = np.where(np.arange(N) < 16, -1.0, 1.0), np.arange(N) != 3
    draw = jax.jit(jax.vmap(lambda k: FILTERS["random"](jnp.asarray(scores), Rows(jnp.asarray(valid)), k, 0, 0.5, 0)))
    kept = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    share = 1 - kept[:, valid].mean(axis=0)
    assert np.all(kept[:, valid].sum(axis=1) == 31 - 7)  # floor(15 / 2), whatever the sign of what goes
    assert np.max(np.abs(share - 7 / 31)) < 5 * np.sqrt(7 / 31 * 24 / 31 / 4000)


# -- the public functions -------------------------------------------------------------------------------------


def test_keep_mask_is_the_rule():
    scores = np.random.default_rng(1).normal(size=50).astype(np.float32)
    mask = keep_mask(scores, rule="iif", p=0.3)
    assert mask.dtype == bool
    assert mask.tolist() == oracle.iif_mask(scores, 0.3)
    assert keep_mask(scores).tolist() == oracle.iif_mask(scores, 0.125)
    assert keep_mask(scores, rule="zero").tolist() == (scores >= 0).tolist()
    drawn = keep_mask(scores, rule="random", p=0.3, key=jax.random.key(0))
    assert drawn.sum() == mask.sum()
    inside = jax.jit(lambda s, p: keep_mask(s, p=p))(scores, 0.3)
    assert inside.tolist() == mask.tolist()


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ([1.0, np.nan, np.inf], {}, "score of record 1 is nan (2 of 3 not finite)"),
        ([[1.0]], {}, "scores have shape (1, 1)"),
        (1.0, {}, "scores have shape ()"),
        ([1.0], {"rule": "iff"}, "rule is 'iff': must be one of none, iif, zero, random"),
        ([1.0], {"rule": "gated"}, "needs the target's gradients"),
        ([1.0], {"p": 1.5}, "p is 1.5: must be in [0, 1]"),
        ([1.0], {"p": -0.1}, "p is -0.1: must be in [0, 1]"),
        ([1.0], {"p": float("nan")}, "p is nan: must be in [0, 1]"),
        ([1.0], {"p": np.float32(2.0)}, "p is 2.0: must be in [0, 1]"),
        ([1.0], {"p": jnp.float32(-1.0)}, "p is -1.0: must be in [0, 1]"),
        ([1.0], {"rule": "random"}, "rule 'random' needs a key"),
    ],
)
def test_keep_mask_refuses(scores, options, message):
    with pytest.raises(ValueError) as error:
        keep_mask(np.array(scores), **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def clean_registry():
    before = dict(FILTERS)
    yield
    FILTERS.clear()
    FILTERS.update(before)


@pytest.mark.usefixtures("clean_registry")
def test_a_registered_rule_can_be_used_by_name():
    register_filter("sigmoid", good)
    assert FILTERS["sigmoid"].rule is good
    assert FILTERS["sigmoid"].weighted
    register_filter("positive_only", good, weighted=False)
    assert not FILTERS["positive_only"].weighted
    env = registry.make(next(iter(registry.PROBES)))
    step = make_update_step(env, Config(filter="sigmoid", num_envs=2, num_steps=4, minibatch_size=4))
    assert step.config.filter == "sigmoid"
    assert np.all(keep_mask(np.array([-1.0, 1.0]), rule="sigmoid"))


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [("iif", good, "filter 'iif' is already registered"), ("new", 3, "filter 'new': no callable")],
)
def test_register_filter_refuses(name, rule, message):
    before = dict(FILTERS)
    with pytest.raises(ValueError) as error:
        register_filter(name, rule)
    assert str(error.value) == message
    assert before == FILTERS


def test_the_trainer_names_an_unknown_rule():
    env = registry.make(next(iter(registry.PROBES)))
    with pytest.raises(ConfigError, match="unknown filter 'iff'; did you mean 'iif'"):
        make_update_step(env, Config(filter="iff"))


# -- rules that read more than a score ------------------------------------------------------------------------


def more_rows(segment=None, **fields):
    n = len(segment) if segment is not None else len(next(iter(fields.values())))
    segment = jnp.arange(n) if segment is None else jnp.asarray(segment, jnp.int32)
    fields = {k: jnp.asarray(v, jnp.float32) for k, v in fields.items()}
    return types.SimpleNamespace(valid=jnp.ones(n, bool), segment=segment, **fields)


def apply(rule, scores, rows, p=1.0, min_keep=1):
    scores = jnp.asarray(scores, jnp.float32)
    return np.asarray(FILTERS[rule](scores, rows, jax.random.key(0), jnp.int32(0), jnp.float32(p), min_keep))


def test_dtv_drops_whole_segments():
    #  segment 0: 1 - 2 < 0, segment 2: 1 + 1, segment 4: -1 + 1 = 0 is not negative, segment 6: -3
    scores, segment = [1, -2, 1, 1, -1, 1, -3], [0, 0, 2, 2, 4, 4, 6]
    assert apply("dtv", scores, more_rows(segment)).tolist() == [0, 0, 1, 1, 1, 1, 0]
    # one record more has to stay than segments allow: it comes from the least negative segment
    assert apply("dtv", scores, more_rows(segment), min_keep=5).sum() == 5
    assert apply("dtv", scores, more_rows(segment), min_keep=5)[6] == 0
    assert FILTERS["dtv"].target == "gradient"
    assert FILTERS["dtv_loo"].target == "gradient_loo"


def test_reweight_is_score_over_mean():
    assert apply("reweight", [3, -1, 1, 0], more_rows(a=[0] * 4)).tolist() == [1.5, 0, 0.5, 0]
    # too few positive ones for a minibatch: the best three, unweighted
    assert apply("reweight", [3, -1, -2, 0], more_rows(a=[0] * 4), min_keep=3).tolist() == [1, 1, 0, 1]


def test_advantage_sign_drops_the_worst_mismatches_first():
    rows = more_rows(advantage=[1, -1, 2, 1, -3], mc_advantage=[1, 2, -2, -0.5, -1])  # products 1, -2, -4, -.5, 3
    assert apply("advantage_sign", [np.nan] * 5, rows, p=1.0).tolist() == [1, 0, 0, 0, 1]
    assert apply("advantage_sign", [np.nan] * 5, rows, p=0.67).tolist() == [1, 0, 0, 1, 1]


def test_td_error_drops_as_many_as_iif_the_best_predicted():
    rows = more_rows(td_error=[0.1, -3, 0.2, -0.3, 5])
    assert apply("td_error", [-1, -1, -1, 1, 1], rows, p=0.67).tolist() == [0, 1, 0, 1, 1]
