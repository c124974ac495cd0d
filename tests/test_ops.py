"""The pure maths: returns, distributions, statistics, losses and trees, against numbers worked by hand and oracles."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import losses as loss_oracle
from oracles import returns as return_oracle
from oracles import statistics as statistics_oracle

from jaxattr.ops import losses, statistics, trees
from jaxattr.ops.distributions import Categorical, Gaussian, TanhGaussian, make_distribution
from jaxattr.ops.returns import gae
from jaxattr.types import Box, Discrete


@pytest.fixture(autouse=True)
def strict_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def batch_axis():
    """Running moments subtract a mean from every row of a batch: broadcasting on purpose."""
    with jax.numpy_rank_promotion("allow"):
        yield


def arrays(*lists):
    return tuple(jnp.asarray(x, bool if isinstance(x[0], bool) else jnp.float32) for x in lists)


# -- generalised advantage estimation -------------------------------------------------------------------------

NO = [False, False, False]
LAST = [False, False, True]


def test_a_time_limit_is_not_a_terminal():
    """T01: delta_3 = 1 + 0.9 * 10 - 2 = 8; A_2 = 0.8 + 0.855 * 8; A_1 = 0.8 + 0.855 * 7.64."""
    advantage, _ = gae(*arrays([1, 1, 1], [2, 2, 2], [2, 2, 10], NO, LAST), 0.9, 0.95)
    assert np.allclose(advantage, [7.3322, 7.64, 8.0], rtol=1e-6)
    assert np.allclose(advantage + 2, [9.3322, 9.64, 10.0], rtol=1e-6)
    ended, _ = gae(*arrays([1, 1, 1], [2, 2, 2], [2, 2, 10], LAST, NO), 0.9, 0.95)
    assert np.allclose(ended, [0.752975, -0.055, -1.0], rtol=1e-5)


@pytest.mark.parametrize("value", [100.0, 0.0, -1e30])
def test_the_next_episode_changes_nothing_before_it(value):
    """T02: the first state of the next episode is worth `value`; earlier advantages never read it."""
    rows = arrays([1, 1, 1, 5], [2, 2, 2, value], [2, 2, 10, value], [*NO, False], [*LAST, False])
    advantage, _ = gae(*rows, 0.9, 0.95)
    assert np.allclose(advantage[:3], [7.3322, 7.64, 8.0], rtol=1e-6)


def test_a_tie_counts_as_termination():
    """T03: a failure on the last allowed step has no bootstrap, whatever the second flag says."""
    for truncated in (NO, LAST):
        advantage, td_error = gae(*arrays([1, 1, 1], [2, 2, 2], [2, 2, 10], LAST, truncated), 0.9, 0.95)
        assert td_error[2] == advantage[2] == 1.0 - 2.0


@st.composite
def trajectories(draw, steps=10):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = np.array(draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=steps, max_size=steps)))
    return (*rng.normal(size=(3, steps)), kinds % 2 == 1, kinds >= 2)


jitted_gae = jax.jit(gae)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=trajectories(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_its_definition(rows, gamma, lam):
    """In float64, with every mix of flags (both, neither, runs of one-step episodes)."""
    want_advantage, want_error = return_oracle.gae(*rows, gamma, lam)
    with jax.enable_x64(True):
        advantage, td_error = jitted_gae(*rows, gamma, lam)
    assert np.allclose(advantage, want_advantage, rtol=1e-12, atol=1e-13)
    assert np.allclose(td_error, want_error, rtol=1e-12, atol=1e-13)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=trajectories(), gamma=st.floats(0, 1))
def test_gae_at_lambda_one_is_return_minus_value(rows, gamma):
    reward, value, _, terminated, truncated = rows
    next_value = np.append(value[1:], 0.7)  # what the identity needs: V(s'_t) is the next row's value ...
    next_value = np.where(terminated | truncated, 5.0, next_value)  # ... except where an episode ends
    with jax.enable_x64(True):
        advantage, _ = jitted_gae(reward, value, next_value, terminated, truncated, gamma, 1.0)
    want = return_oracle.discounted_returns(reward, next_value, terminated, truncated, gamma) - value
    assert np.allclose(advantage, want, rtol=1e-11, atol=1e-12)


def test_gae_at_lambda_zero_is_the_td_error():
    rows = arrays([1, 2, 3], [0.5, 1, 2], [1, 2, 4], [False, True, False], NO)
    advantage, td_error = gae(*rows, 0.9, 0.0)
    assert np.array_equal(advantage, td_error)
    assert np.allclose(td_error, [1 + 0.9 - 0.5, 2 - 1, 3 + 3.6 - 2])


def test_gae_of_environments_does_not_mix_and_one_step_works():
    rng = np.random.default_rng(0)
    rows = [*rng.normal(size=(3, 6, 4)), rng.random((6, 4)) < 0.2, rng.random((6, 4)) < 0.2]
    rows = [jnp.asarray(x, bool if x.dtype == bool else jnp.float32) for x in rows]
    together = jax.vmap(gae, (1, 1, 1, 1, 1, None, None), 1)(*rows, 0.9, 0.8)
    for b in range(4):
        alone = gae(*[x[:, b] for x in rows], 0.9, 0.8)
        assert np.allclose(together[0][:, b], alone[0], rtol=1e-6)
    advantage, _ = gae(*arrays([1.0], [2.0], [3.0], [False], [False]), 0.5, 0.9)
    assert advantage.tolist() == [0.5]


def test_gae_refuses_a_batch_axis_and_unequal_lengths():
    with pytest.raises(AssertionError):
        gae(jnp.ones((3, 1)), jnp.ones(3), jnp.ones(3), jnp.zeros(3, bool), jnp.zeros(3, bool), 0.9, 0.9)
    with pytest.raises(AssertionError):
        gae(jnp.ones(3), jnp.ones(1), jnp.ones(3), jnp.zeros(3, bool), jnp.zeros(3, bool), 0.9, 0.9)


# -- distributions --------------------------------------------------------------------------------------------

UNIT = Box(2, (-1.0, -1.0), (1.0, 1.0))
WIDE = Box(2, (-2.0, 0.0), (2.0, 10.0))
MEAN, LOG_STD = np.array([0.3, -1.2]), np.array([-0.5, 0.2])
ACTIONS = np.random.default_rng(0).normal(size=(20, 2)) * 1.5


def test_the_stored_action_gives_ratio_one():
    """T22: mean 3, std 0.1, bounds [-1, 1]. The environment gets 1; the stored action is the unclipped one."""
    box = Box(1, (-1.0,), (1.0,))
    for distribution in (Gaussian(box), TanhGaussian(box)):
        head = jnp.array([3.0]), jnp.log(jnp.array([0.1]))
        action = distribution.sample(head, distribution.noise(jax.random.key(0), ()))
        old = distribution.log_prob(head, action)
        again = jax.jit(distribution.log_prob)(head, action)
        assert abs(np.exp(again - old) - 1) < 1e-6
        assert abs(action[0] - 3.0) < 0.6
        assert np.allclose(distribution.to_env(action), 1.0, atol=0.02)
    assert Gaussian(box).to_env(action)[0] == 1.0


@pytest.mark.parametrize("mean", [20.0, -20.0, 300.0, 1e4])
def test_a_saturated_tanh_stays_finite(mean):
    """T23: tanh(20) is 1 in float32, so inverting it would give infinity; nothing is inverted."""
    distribution = TanhGaussian(Box(1, (-1.0,), (1.0,)))
    head = jnp.array([mean]), jnp.zeros(1)
    action = distribution.sample(head, jnp.array([0.5]))
    assert action.item() == mean + 0.5
    assert abs(distribution.to_env(action).item()) == 1.0
    for f in (distribution.log_prob, distribution.entropy):
        value, slopes = jax.value_and_grad(f)(head, action)
        assert np.isfinite(value)
        assert all(np.all(np.isfinite(x)) for x in slopes)
    # log N - log(1 - tanh(u)^2), where the last term is 2 |u| - log 4 so far out
    want = -0.125 - 0.5 * np.log(2 * np.pi) + 2 * abs(mean + 0.5) - np.log(4)
    assert np.allclose(distribution.log_prob(head, action), want, rtol=1e-6)


def test_log_probs_equal_scipy():
    logits = np.array([0.5, -1.0, 2.0, 0.0])
    want = logits - np.log(np.sum(np.exp(logits)))
    with jax.enable_x64(True):
        got = [Categorical(4).log_prob(jnp.asarray(logits), a) for a in range(4)]
        assert np.allclose(got, want, rtol=1e-13)
        gaussian = jax.vmap(Gaussian(UNIT).log_prob, (None, 0))((MEAN, LOG_STD), ACTIONS)
        squashed = jax.vmap(TanhGaussian(WIDE).log_prob, (None, 0))((MEAN, LOG_STD), ACTIONS)
    normal = scipy.stats.norm.logpdf(ACTIONS, MEAN, np.exp(LOG_STD)).sum(axis=1)
    assert np.allclose(gaussian, normal, rtol=1e-12)
    slope = np.log(np.array([2.0, 5.0]) * (1 - np.tanh(ACTIONS) ** 2)).sum(axis=1)
    assert np.allclose(squashed, normal - slope, rtol=1e-9)


def test_densities_add_up_to_one():
    """The tanh-Gaussian's density over what the environment receives, by a sum over its bounds."""
    box = Box(1, (-1.0,), (3.0,))
    u = np.linspace(-8, 8, 20_001)
    with jax.enable_x64(True):
        distribution = TanhGaussian(box)
        log_p = jax.vmap(distribution.log_prob, (None, 0))((jnp.array([0.4]), jnp.array([-0.3])), u[:, None])
        action = np.asarray(jax.vmap(distribution.to_env)(u[:, None]))[:, 0]
    assert action.min() >= -1
    assert action.max() <= 3
    assert abs(np.trapezoid(np.exp(log_p), action) - 1) < 1e-6


def test_entropies():
    logits = np.array([0.5, -1.0, 2.0, 0.0])
    p = np.exp(logits) / np.exp(logits).sum()
    with jax.enable_x64(True):
        assert np.allclose(Categorical(4).entropy(jnp.asarray(logits), 0), -np.sum(p * np.log(p)), rtol=1e-13)
        assert np.allclose(Categorical(4).entropy(jnp.zeros(4), 0), np.log(4), rtol=1e-15)
        gaussian = Gaussian(UNIT).entropy((MEAN, LOG_STD), ACTIONS[0])
        assert np.allclose(gaussian, scipy.stats.norm.entropy(MEAN, np.exp(LOG_STD)).sum(), rtol=1e-13)


def test_the_tanh_entropy_is_unbiased():
    """Mean of the one-sample estimate over actions of the policy = -sum of p log p by quadrature; same slope."""
    distribution = TanhGaussian(Box(1, (-1.0,), (3.0,)))
    noise = scipy.stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)[:, None]
    head = np.array([0.4]), np.array([-0.3])
    u = np.linspace(-8, 8, 20_001)

    def exact(mean, log_std):
        log_n = scipy.stats.norm.logpdf(u, mean, np.exp(log_std))
        log_p = log_n - np.log(2 * (1 - np.tanh(u) ** 2))
        return np.trapezoid(-np.exp(log_n) * log_p, u)

    with jax.enable_x64(True):
        action = head[0] + np.exp(head[1]) * noise
        mean = lambda h: jnp.mean(jax.vmap(distribution.entropy, (None, 0))(h, action))
        value, slope = jax.device_get(jax.jit(jax.value_and_grad(mean))(head))
    assert abs(value - exact(*head)) < 1e-4
    for i in range(2):
        up, down = list(head), list(head)
        up[i], down[i] = head[i] + 1e-4, head[i] - 1e-4
        assert abs(slope[i][0] - (exact(*up) - exact(*down)) / 2e-4) < 1e-3


def test_sampling_frequencies():
    draws = 40_000
    head = jnp.array([0.5, -1.0, 2.0, 0.0])
    noise = Categorical(4).noise(jax.random.key(0), (draws,))
    actions = jax.vmap(Categorical(4).sample, (None, 0))(head, noise)
    p = np.asarray(jax.nn.softmax(head))
    assert actions.dtype == jnp.int32
    share = np.bincount(actions, minlength=4) / draws
    assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / draws))

    head = jnp.asarray(MEAN, jnp.float32), jnp.asarray(LOG_STD, jnp.float32)
    x = np.asarray(jax.vmap(Gaussian(UNIT).sample, (None, 0))(head, Gaussian(UNIT).noise(jax.random.key(1), (draws,))))
    for i in range(2):
        assert scipy.stats.kstest(x[:, i], "norm", (MEAN[i], np.exp(LOG_STD[i]))).pvalue > 1e-4
    assert abs(np.corrcoef(x.T)[0, 1]) < 0.03


def test_modes_and_bounds():
    assert Categorical(3).mode(jnp.array([1.0, 5.0, 5.0])) == 1
    head = jnp.array([0.5, 100.0]), jnp.zeros(2)
    assert Gaussian(WIDE).to_env(Gaussian(WIDE).mode(head)).tolist() == [0.5, 10.0]
    squashed = TanhGaussian(WIDE)
    assert np.allclose(squashed.to_env(jnp.zeros(2)), [0.0, 5.0])
    assert squashed.to_env(squashed.mode(head)).tolist()[1] == 10.0
    open_box = Gaussian(Box(1, (-np.inf,), (np.inf,)))
    assert open_box.to_env(jnp.array([1e6])).item() == 1e6


@pytest.mark.parametrize("scale", [0.0, 200.0, 1e20])
def test_a_sure_policy_has_finite_numbers(scale):
    """Probabilities that underflow: log-probability, entropy and their gradients stay finite."""
    head = jnp.array([0.0, scale, -scale])
    for a in range(3):
        for f in (Categorical(3).log_prob, Categorical(3).entropy):
            value, slope = jax.value_and_grad(f)(head, a)
            assert np.isfinite(value)
            assert np.all(np.isfinite(slope))
    assert Categorical(3).entropy(head, 0) >= 0


def test_choosing_a_distribution():
    assert make_distribution(Discrete(3), False) == Categorical(3)
    assert make_distribution(UNIT, False) == Gaussian(UNIT)
    assert make_distribution(UNIT, True) == TanhGaussian(UNIT)
    for action in (Discrete(3), Box(1, (-np.inf,), (1.0,))):
        with pytest.raises(ValueError, match="squash"):
            make_distribution(action, True)


# -- standardisation and running moments ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    x=st.lists(st.floats(-100, 100), min_size=13, max_size=13),
    mask=st.lists(st.booleans(), min_size=13, max_size=13),
    ddof=st.sampled_from([0, 1]),
    chunk=st.sampled_from([2, 4, 5, 13, 20]),
)
def test_standardize_equals_the_oracle(x, mask, ddof, chunk):
    """In float64; 13 = 3 * 4 + 1 has a lone last entry, which joins the chunk before."""
    x, mask = np.array(x), np.array(mask)
    with jax.enable_x64(True):
        whole, some = _standardize(x, None, ddof), _standardize(x, mask, ddof)
        chunks, masked = _chunks(x, chunk, ddof, None), _chunks(x, chunk, ddof, mask)
    for got, want in (
        (whole, statistics_oracle.standardize(x, ddof)),
        (some, statistics_oracle.standardize(x, ddof, mask)),
        (chunks, statistics_oracle.standardize_chunks(x, chunk, ddof)),
        (masked, statistics_oracle.standardize_chunks(x, chunk, ddof, mask)),
    ):
        # Where all entries are equal, the two means differ in the last bit, and that is divided by 1e-8.
        assert np.allclose(got, want, rtol=1e-9, atol=1e-4 if np.max(np.abs(want)) < 1e-3 else 1e-9)


_standardize = jax.jit(statistics.standardize, static_argnums=2)
_chunks = jax.jit(statistics.standardize_chunks, static_argnums=(1, 2))


def test_standardize_by_hand():
    assert np.allclose(statistics.standardize(jnp.array([2.0, 1.0]), ddof=0), [1, -1], rtol=1e-6)
    assert np.allclose(statistics.standardize(jnp.array([2.0, 1.0])), [0.5**0.5, -(0.5**0.5)], rtol=1e-6)
    assert np.array_equal(statistics.standardize(jnp.full(5, 3.0)), np.zeros(5))


@pytest.mark.parametrize("ddof", [0, 1])
def test_fewer_than_two_entries_have_no_spread(ddof):
    """T17: one record, or a minibatch of which a filter left one or none, gives 0 and never NaN."""
    for weights in (None, jnp.ones(1), jnp.zeros(1)):
        assert statistics.standardize(jnp.array([7.0]), weights, ddof).tolist() == [0.0]
    for kept in ([], [1], [0, 1, 2]):
        weights = jnp.zeros(3).at[jnp.array(kept, int)].set(1.0)
        out = statistics.standardize(jnp.array([1.0, 5.0, 7.0]), weights, ddof)
        assert np.all(np.isfinite(out))
        assert np.any(out != 0) == (len(kept) == 3)


def test_what_is_no_record_takes_no_part():
    """Whatever stands in a masked row, even NaN or inf."""
    x = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
    out = statistics.standardize(x, jnp.array([True, False, True, False]), 0)
    assert np.allclose(out, [-1, 0, 1, 0], rtol=1e-6)
    chunks = statistics.standardize_chunks(x, 2, 1, jnp.array([True, False, True, False]))
    assert np.array_equal(chunks, np.zeros(4))


def test_counting_past_float32_and_int32():
    """T14: 2**24 + 1 and 2**31 - 1 + 1024 are counted exactly; the variance stays close to float64's."""
    rng = np.random.default_rng(0)
    for start, batch in ((2**24, rng.normal(50, 3, 1)), (2**31 - 1, rng.normal(50, 3, 1024))):
        old = statistics.init_stats(()).replace(mean=jnp.float32(5.0), var=jnp.float32(4.0), count=jnp.uint32(start))
        new = statistics.update_stats(old, jnp.asarray(batch, jnp.float32), jnp.ones(len(batch), bool))
        assert int(new.count) == start + len(batch)
        n, total = len(batch), start + len(batch)
        mean = (5.0 * start + batch.sum()) / total
        var = (4.0 * start + n * batch.var()) / total + start / total * n / total * (batch.mean() - 5.0) ** 2
        assert new.var > 0
        assert abs(new.var / var - 1) < 1e-4
        assert abs(new.mean / mean - 1) < 1e-6
    assert [2**24 + 1, 2**31 - 1 + 1024] == [16_777_217, 2_147_484_671]


def test_the_counter_stops_at_its_end():
    old = statistics.init_stats(()).replace(count=jnp.uint32(2**32 - 10))
    new = statistics.update_stats(old, jnp.ones(64), jnp.ones(64, bool))
    assert int(new.count) == 2**32 - 1
    assert np.isfinite(new.var)


@pytest.mark.usefixtures("batch_axis")
@pytest.mark.parametrize("sizes", [(1, 1, 7, 64), (32, 32)])
def test_running_moments_equal_those_of_everything_seen(sizes):
    rng = np.random.default_rng(1)
    stats, seen = statistics.init_stats((3,)), []
    for size in sizes:
        batch, mask = rng.normal(3, 2, (size, 3)).astype(np.float32), rng.random(size) < 0.7
        bad = np.where(mask[:, None], batch, np.nan)  # rows that are no records may hold anything
        stats = statistics.update_stats(stats, jnp.asarray(bad), jnp.asarray(mask))
        seen.append(batch[mask])
    seen = np.concatenate(seen).astype(np.float64)
    assert int(stats.count) == len(seen)
    assert np.allclose(stats.mean, seen.mean(axis=0), rtol=1e-5)
    assert np.allclose(stats.var, seen.var(axis=0), rtol=1e-5)
    same = statistics.update_stats(stats, jnp.full((4, 3), jnp.nan), jnp.zeros(4, bool))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(stats), strict=True))


@pytest.mark.usefixtures("batch_axis")
def test_moments_have_the_shape_of_one_observation():
    """T16: a state saved with 8 environments loads with 32."""
    shapes = []
    for envs in (8, 32):
        stats = statistics.update_stats(statistics.init_stats((4, 2)), jnp.ones((envs, 4, 2)), jnp.ones(envs, bool))
        shapes.append([x.shape for x in jax.tree.leaves(stats)])
    assert shapes[0] == shapes[1] == [(4, 2), (4, 2), ()]


def test_normalising_by_hand():
    """T05: mean 5, std 2, a raw final observation of 9 -> (9 - 5) / 2."""
    stats = statistics.init_stats((1,)).replace(mean=jnp.array([5.0]), var=jnp.array([4.0]), count=jnp.uint32(10))
    assert np.allclose(statistics.normalize(stats, jnp.array([9.0])), 2.0, rtol=1e-6)
    assert statistics.normalize(stats, jnp.array([1e6])).item() == 10.0
    assert np.allclose(statistics.scale(stats, jnp.array([9.0])), 4.5, rtol=1e-6)
    unseen = statistics.init_stats((1,))
    assert statistics.normalize(unseen, jnp.array([1e6])).item() == 1e6
    assert statistics.scale(unseen, jnp.array([-77.0])).item() == -77.0


# -- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.4, 1),  # clipped at 1.2
        (1.5, -2.0, 3.0, 1),  # the pessimistic side: not clipped although the ratio is outside
        (0.5, 2.0, -1.0, 1),
        (0.5, -2.0, 1.6, 1),  # clipped at 0.8
        (1.1, -1.0, 1.1, 0),
        (1.5, 0.0, 0.0, 1),
    ],
)
def test_the_policy_loss_by_hand(ratio, advantage, loss, clipped):
    got = losses.clipped_policy_loss(jnp.log(jnp.float32(ratio)), jnp.float32(advantage), 0.2)
    assert np.allclose(got[0], loss, rtol=1e-6)
    assert np.allclose(got[1], ratio - 1 - np.log(ratio), rtol=1e-4, atol=1e-7)
    assert got[2] == clipped


def test_the_gradient_stops_where_the_ratio_is_clipped():
    slope = jax.grad(lambda r, a: losses.clipped_policy_loss(r, a, 0.2)[0])
    assert slope(jnp.log(1.5), 2.0) == 0
    assert slope(jnp.log(0.5), -2.0) == 0
    assert np.allclose(slope(jnp.log(1.5), -2.0), 3.0)
    assert np.allclose(slope(0.0, 2.0), -2.0)  # at ratio 1: -A


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (3.0, 0.0, 1.0, None, 4.0),
        (3.0, 0.0, 1.0, 0.5, 4.0),  # clipped value 0.5: error 0.25; the larger one counts
        (1.0, 0.0, 1.0, 0.5, 0.25),  # a good prediction too far from the old one still costs
        (0.2, 0.0, 1.0, 0.5, 0.64),
        (1.0, 0.0, 1.0, np.inf, 0.0),
    ],
)
def test_the_value_loss_by_hand(value, old, target, clip, loss):
    got = losses.value_loss(jnp.float32(value), jnp.float32(old), jnp.float32(target), clip)
    assert np.allclose(got, loss, rtol=1e-6)


def test_losses_equal_the_oracle():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for row in rng.normal(size=(200, 6)):
            log_prob, old, advantage, value, old_value, target = row.tolist()
            _, policy, near, _ = loss_oracle.ppo_record_loss(
                log_prob, old, advantage, value, old_value, target, 0.0, 0.2, value_clip=0.3
            )
            got = losses.clipped_policy_loss(np.float64(log_prob - old), advantage, 0.2)
            assert np.allclose(got[0], policy, rtol=1e-12)
            assert np.allclose(losses.value_loss(np.float64(value), old_value, target, 0.3), near, rtol=1e-12)


# -- trees ----------------------------------------------------------------------------------------------------

TREE = {"policy": {"dense_0": {"bias": jnp.array([1.0, 2.0]), "kernel": jnp.ones((2, 2))}}, "value": (jnp.array(3.0),)}


def test_flat_vectors_dots_and_norms():
    flat = trees.flatten(TREE)
    assert flat.tolist() == [1, 2, 1, 1, 1, 1, 3]
    back = trees.unflattener(TREE)(flat)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True))
    other = jax.tree.map(lambda x: 2 * x + 1, TREE)
    assert trees.dot(TREE, other) == np.dot(flat, trees.flatten(other))
    assert np.allclose(trees.norm(TREE), np.sqrt(18))
    with pytest.raises(ValueError):
        trees.dot(TREE, {"policy": jnp.ones(2)})


def test_paths_and_patterns():
    assert trees.paths(TREE) == ["policy/dense_0/bias", "policy/dense_0/kernel", "value/0"]
    sums = lambda pattern: [float(jnp.sum(x)) for x in jax.tree.leaves(trees.keep_matching(TREE, pattern))]
    assert sums("policy") == [3, 4, 0]
    assert sums(".*kernel") == [0, 4, 0]
    assert sums("kernel") == [0, 0, 0]  # matched from the start of the path
    assert sums("(policy/.*/bias|value)") == [3, 0, 3]
    assert trees.paths(SimpleNamespace) == [""]


def test_all_finite():
    assert trees.all_finite(TREE)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not trees.all_finite((TREE, jnp.array([1.0, bad])))
    assert trees.all_finite({"count": jnp.array([2**31 - 1]), "x": jnp.zeros(1)})
