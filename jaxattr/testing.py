"""Contract checks for extenders: one call tells whether a new part fits. Each failure is one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.attribution.estimators import Estimator, per_sample_scores
from jaxattr.attribution.filters import Rule
from jaxattr.envs.base import Box, Discrete, Env, EnvSpec, Pool, Step, auto_reset
from jaxattr.types import Array, Params, PRNGKey, Records


def check_env(env: Env, *, steps: int = 200, seed: int = 0, plain: bool = True) -> None:
    """Check that `env` keeps the contract of `jaxattr.envs.base.Env`, with random actions in three copies.

    Checked: the spec; shapes and dtypes of all results; a state type that a scan can carry; equal results for equal
    keys, and under jit and vmap; terminated and truncated never both; truncation exactly at `spec.max_steps`. Choose
    `steps` above the time limit (or set a short limit) or the last one is checked in one direction only.

    Args:
      env: the environment.
      steps: environment steps of each copy.
      seed: of start states and actions.
      plain: compare with execution op by op; False: with one copy under jit (physics takes long op by op).

    Raises:
      AssertionError: a point of the contract is broken.
    """
    spec = env.spec
    name = _check_spec(spec)
    _check_types(env, name)

    copies = 3
    key_reset, key_steps = jax.random.split(jax.random.key(seed))
    keys = jax.random.split(key_steps, (steps, copies))
    rollout = jax.jit(lambda k, ks: _rollout(env, k, ks))
    first, out = jax.device_get(rollout(jax.random.split(key_reset, copies), keys))
    again = jax.device_get(rollout(jax.random.split(key_reset, copies), keys))
    _assert_equal((first, out), again, f"{name}: two runs with equal keys differ", rtol=0.0)

    # One copy without vmap; a couple of steps, because op-by-op execution is slow.
    env_reset, env_step = (env.reset, env.step) if plain else (jax.jit(env.reset), jax.jit(env.step))
    state, obs = env_reset(jax.random.split(key_reset, copies)[0])
    _assert_equal(obs, first[0], f"{name}: reset differs under jit and vmap")
    for t in range(min(2, steps)):
        key_action, key_step = jax.random.split(keys[t, 0])
        state, step = env_step(key_step, state, _random_action(spec, key_action))
        expected = jax.tree.map(lambda x: x[t, 0], out)  # noqa: B023
        _assert_equal(step, expected, f"{name}: step {t + 1} differs under jit and vmap")
        if step.terminated or step.truncated:
            break

    _check_flags(spec, name, out)


def check_pool(env: Pool, *, steps: int = 200, seed: int = 0) -> None:
    """Check that `env` keeps the contract of `jaxattr.envs.base.Pool`, with random actions in four copies.

    Checked: the spec; shapes and dtypes; that a copy depends on its own seed only, stepped among all or in a part; that
    after an episode's end the next row is a reset (reward 0, no flag, the action ignored); terminated and truncated
    never both; truncation at `spec.max_steps` and never later; `traced_step`, where there is one, equal to `step`.
    Choose `steps` above the time limit, or set a short limit.

    Args:
      env: the pool.
      steps: of each copy.
      seed: of copies and actions.

    Raises:
      AssertionError: a point of the contract is broken.
    """
    name, copies = _check_spec(env.spec), 4
    seeds = [seed + 1, seed + 2, seed + 1, seed + 3]  # copies 0 and 2 are twins
    keys = jax.random.split(jax.random.key(seed), (steps, copies))
    keys = keys.at[:, 2].set(keys[:, 0])
    actions = np.asarray(jax.vmap(jax.vmap(lambda k: _random_action(env.spec, k)))(keys))
    obs, out = _play_pool(env, seeds, actions)
    _assert_pool_types(env, name, copies, obs, out)
    again = _play_pool(env, seeds[:2][::-1], actions[:, :2][:, ::-1])
    first = jax.tree.map(lambda x: x[:, :2][:, ::-1], out)
    _assert_equal((obs[:2][::-1], first), again, f"{name}: a copy depends on more than its seed", rtol=0.0)
    twins = [jax.tree.map(lambda x, i=i: x[:, i], out) for i in (0, 2)]
    _assert_equal(twins[0], twins[1], f"{name}: two copies with one seed differ", rtol=0.0)
    part = jax.tree.map(lambda x: x[:, 1:3], _play_pool(env, seeds, actions, np.array([2, 1]))[1])
    want = jax.tree.map(lambda x: x[:, 1:3], out)
    _assert_equal(part, want, f"{name}: a part of the copies, stepped alone, is not what it is among all", rtol=0.0)

    done = out.terminated | out.truncated
    assert done.any(), f"{name}: no episode ends within {steps} steps; nothing was checked of what follows"
    after = np.zeros_like(done)
    after[1:] = done[:-1]
    quiet = (out.reward == 0) & ~done
    assert quiet[after].all(), f"{name}: the row after an episode's end is no reset (reward not 0, or a flag is set)"
    other = actions.copy()
    other[after] = np.roll(actions, 1, axis=1)[after]
    _assert_equal(_play_pool(env, seeds, other)[1], out, f"{name}: the action of a reset row is not ignored", rtol=0.0)
    _check_pool_limit(env.spec, name, out, after)
    if env.in_jit:
        _check_traced(env, seeds, actions, out, name)


def _play_pool(env: Pool, seeds: list[int], actions: Any, which: Any = None) -> tuple[Any, Step]:
    """(first observations (n, ...), Step with leaves (T, n, ...)), stepped from the host."""
    pool = env.open(seeds)
    obs = np.array(pool.obs)
    rows = [jax.tree.map(np.array, pool.step(action, which)) for action in actions]
    pool.close()
    return obs, jax.tree.map(lambda *x: np.stack(x), *rows)


def _assert_pool_types(env: Pool, name: str, copies: int, obs: Any, out: Step) -> None:
    for what, x, shape, dtype in (
        ("first observation", obs, env.spec.obs_shape, np.float32),
        ("observation of step", out.obs[0], env.spec.obs_shape, np.float32),
        ("reward", out.reward[0], (), np.float32),
        ("terminated", out.terminated[0], (), np.bool_),
        ("truncated", out.truncated[0], (), np.bool_),
    ):
        want, got = f"{np.dtype(dtype).name}{(copies, *shape)}", f"{x.dtype.name}{x.shape}"
        assert want == got, f"{name}: {what} of {copies} copies is {got}, must be {want}"


def _check_pool_limit(spec: EnvSpec, name: str, out: Step, after: Any) -> None:
    """Flags never both; an episode is cut at the limit and not before."""
    assert not (out.terminated & out.truncated).any(), f"{name}: terminated and truncated in one step"
    elapsed = np.zeros(after.shape[1], int)
    for t in range(len(after)):
        elapsed = np.where(after[t], 0, elapsed + 1)
        late = elapsed[~(out.terminated[t] | out.truncated[t])]
        assert (late < spec.max_steps).all(), f"{name}: an episode goes on after {spec.max_steps} steps, its limit"
        early = elapsed[out.truncated[t]]
        assert (early == spec.max_steps).all(), f"{name}: truncated after {early} steps, the limit is {spec.max_steps}"


def _check_traced(env: Pool, seeds: list[int], actions: Any, out: Step, name: str) -> None:
    pool = env.open(seeds)
    step = pool.traced_step
    assert step is not None, f"{name}: in_jit, but an open pool has no traced_step"
    run = jax.jit(lambda token, actions: jax.lax.scan(step, token, actions))
    _, traced = run(jnp.zeros(8, jnp.uint8), jnp.asarray(actions))
    _assert_equal(jax.device_get(traced), out, f"{name}: traced_step and step differ")


def _check_spec(spec: Any) -> str:
    assert isinstance(spec, EnvSpec), f"spec is {type(spec).__name__}, not an EnvSpec"
    name = spec.name
    shape = spec.obs_shape
    sizes = isinstance(shape, tuple) and len(shape) > 0 and all(isinstance(n, int) and n > 0 for n in shape)
    assert sizes, f"{name}: obs_shape is {spec.obs_shape!r}, not a tuple of one or more sizes"
    limit = isinstance(spec.max_steps, int) and spec.max_steps >= 1
    assert limit, f"{name}: max_steps is {spec.max_steps!r}, not a whole number of 1 or more"
    assert isinstance(spec.action, (Discrete, Box)), f"{name}: action is {spec.action!r}, not Discrete or Box"
    if isinstance(spec.action, Box):
        lengths = {len(spec.action.low), len(spec.action.high), spec.action.size}
        assert len(lengths) == 1, f"{name}: action bounds need {spec.action.size} entries each"
    return name


def _check_types(env: Env, name: str) -> None:
    """Shapes and dtypes by abstract evaluation: nothing runs."""
    spec = env.spec
    key = jax.eval_shape(lambda: jax.random.key(0))
    action = jax.eval_shape(lambda k: _random_action(spec, k), key)
    state, obs = jax.eval_shape(env.reset, key)
    after, step = jax.eval_shape(env.step, key, state, action)
    assert isinstance(step, Step), f"{name}: step returns {type(step).__name__}, not a Step"
    for what, x, shape, dtype in (
        ("observation of reset", obs, spec.obs_shape, jnp.float32),
        ("observation of step", step.obs, spec.obs_shape, jnp.float32),
        ("reward", step.reward, (), jnp.float32),
        ("terminated", step.terminated, (), jnp.bool_),
        ("truncated", step.truncated, (), jnp.bool_),
    ):
        want, got = f"{jnp.dtype(dtype).name}{shape}", f"{x.dtype.name}{x.shape}"
        assert want == got, f"{name}: {what} is {got}, must be {want}"
    same = jax.tree.structure(state) == jax.tree.structure(after)
    assert same, f"{name}: the state has another structure after a step than after reset"
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
        kinds = [f"{x.dtype}{x.shape}{' (weakly typed)' if x.weak_type else ''}" for x in (a, b)]
        where = f"{name}: state{jax.tree_util.keystr(path)}"
        assert kinds[0] == kinds[1], f"{where} is {kinds[0]} after reset and {kinds[1]} after a step"


def _rollout(env: Env, reset_keys: PRNGKey, keys: PRNGKey) -> tuple[Array, Step]:
    """(first observations (B, *obs_shape), Step with leaves (T, B, ...))."""

    start = jax.vmap(env.reset)(reset_keys)

    def one(state, key, start):
        key_action, key_step = jax.random.split(key)
        # Episodes start over from the first start state: a second `reset` in the program would compile twice.
        state, _, step = auto_reset(env, key_step, state, _random_action(env.spec, key_action), start)
        return state, step

    state, obs = start
    _, steps = jax.lax.scan(lambda state, keys: jax.vmap(one)(state, keys, start), state, keys)
    return obs, steps


def _random_action(spec: EnvSpec, key: PRNGKey) -> Array:
    if isinstance(spec.action, Discrete):
        return jax.random.randint(key, (), 0, spec.action.n)
    low, high = (jnp.clip(jnp.asarray(b, jnp.float32), -10, 10) for b in (spec.action.low, spec.action.high))
    return jax.random.uniform(key, (spec.action.size,), jnp.float32, low, high)


def _check_flags(spec: EnvSpec, name: str, out: Step) -> None:
    both = out.terminated & out.truncated
    assert not both.any(), f"{name}: terminated and truncated at once; a tie must count as terminated only"
    length = np.zeros(out.reward.shape[1], int)  # (B,) steps since reset
    for t in range(out.reward.shape[0]):
        length += 1
        late = (length >= spec.max_steps) & ~out.terminated[t] & ~out.truncated[t]
        assert not late.any(), f"{name}: the episode goes on after max_steps = {spec.max_steps}"
        early = out.truncated[t] & (length < spec.max_steps)
        assert not early.any(), f"{name}: truncated at step {length[early]}, before max_steps = {spec.max_steps}"
        length[out.terminated[t] | out.truncated[t]] = 0


def _assert_equal(got: Any, want: Any, message: str, rtol: float = 1e-4) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if rtol == 0.0 or a.dtype == bool:
            equal = np.array_equal(a, b, equal_nan=a.dtype != bool)
        else:
            equal = np.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True)
        assert equal, message


# -- estimators -----------------------------------------------------------------------------------------------


def check_estimator(estimator: Estimator, *, seed: int = 0) -> None:
    """Check that `estimator` gives the numbers that define a score, on 11 records of a small softmax policy.

    Checked: shape, dtype and working under jit; agreement with `per_sample_scores` (1e-4 of the largest score) and
    with a central finite difference along the direction, in NumPy and float64; every chunk size; records in another
    order get the same scores in that order; a record's score does not depend on the other records.

    Args:
      estimator: `(objective, params, records, direction, chunk_size) -> (N,)`.
      seed: of the problem.

    Raises:
      AssertionError: a point of the contract is broken.
    """
    name = _name_of(estimator)
    n = 11
    params, direction, records = _tiny_problem(n, seed)

    def run(records: Any, chunk_size: int | None) -> np.ndarray:
        score = jax.jit(lambda p, r, d: estimator(_tiny_objective, p, r, d, chunk_size))
        out = _under_jit(name, score, params, records, direction)
        want, got = f"float32({n},)", f"{out.dtype.name}{out.shape}".replace(" ", "")
        assert got == want, f"{name}: scores are {got} at chunk_size {chunk_size}, must be {want}"
        return np.asarray(out)

    scores = run(records, None)
    exact = np.asarray(per_sample_scores(_tiny_objective, params, records, direction, None))
    _assert_close(scores, exact, f"{name}: the scores differ from per_sample's")
    _assert_close(
        scores, _tiny_slopes(params, records, direction), f"{name}: the scores differ from finite differences"
    )
    for chunk_size in (1, 4, n, n + 5):
        _assert_close(run(records, chunk_size), scores, f"{name}: chunk_size {chunk_size} changes the scores")
    order = np.random.default_rng(seed).permutation(n)
    moved = run(jax.tree.map(lambda x: x[order], records), None)
    _assert_close(moved, scores[order], f"{name}: the scores depend on the order of the records")
    obs, action, advantage = records
    other = run((obs.at[0].add(1.0), action, advantage.at[0].mul(-3.0)), None)
    _assert_close(other[1:], scores[1:], f"{name}: a record's score depends on another record")


def _tiny_problem(n: int, seed: int) -> tuple[Params, Params, Any]:
    """(params, direction, (obs, action, advantage)): a tanh layer and a softmax over four actions."""
    rng = np.random.default_rng(seed)

    def draw() -> Params:
        sizes = {"kernel": (3, 5), "bias": (5,), "out": (5, 4)}
        return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in sizes.items()}

    obs, advantage = rng.normal(size=(n, 3)), rng.normal(size=n)
    records = jnp.asarray(obs, jnp.float32), jnp.asarray(rng.integers(4, size=n)), jnp.asarray(advantage, jnp.float32)
    return draw(), draw(), records


def _tiny_objective(params: Params, record: tuple[Array, Array, Array]) -> Array:
    """A log pi(a|s) of one record."""
    obs, action, advantage = record
    logits = jnp.tanh(obs @ params["kernel"] + params["bias"]) @ params["out"]
    return advantage * jax.nn.log_softmax(logits)[action]


def _tiny_slopes(params: Params, records: Any, direction: Params, step: float = 1e-5) -> np.ndarray:
    """(objective(params + h d) - objective(params - h d)) / 2h of every record, without JAX and in float64."""
    obs, action, advantage = (np.asarray(x) for x in records)

    def values(h: float) -> np.ndarray:
        at = {k: np.asarray(v, np.float64) + h * np.asarray(direction[k], np.float64) for k, v in params.items()}
        logits = np.tanh(obs @ at["kernel"] + at["bias"]) @ at["out"]
        log_p = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
        return advantage * log_p[np.arange(len(action)), action]

    return (values(step) - values(-step)) / (2 * step)


# -- filter rules ---------------------------------------------------------------------------------------------


def check_filter(rule: Rule, *, min_keep: int = 8, seed: int = 0, drops_zero: bool = False) -> None:
    """Check that a filter rule keeps its contract, on 40 made-up records and a range of awkward scores.

    Checked for mixed, tied, equal, all negative, all positive, all zero and NaN scores, with all, some, fewer than
    `min_keep` and no valid rows, and p = 0, 0.3, 1: weights (N,), finite and >= 0; invalid rows 0; at least `min_keep`
    records (or all valid ones, if fewer) stay. Then: a score of 0 is not treated as negative; equal results without
    jit and under vmap; and, if the rule draws no random numbers, records in another order get the same weights.

    Args:
      rule: `(scores, records, key, round, p, min_keep) -> (N,)`.
      min_keep: 1 to 32.
      seed: of scores, records and key.
      drops_zero: the rule's weights fall to 0 continuously as a score does, so a score of 0 may be dropped.

    Raises:
      AssertionError: a point of the contract is broken.
    """
    name, n = _name_of(rule), 40
    assert 1 <= min_keep <= 32, f"min_keep is {min_keep}: this check needs 1 to 32"
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    records = _made_up_records(n, rng)
    plain = lambda s, r, k, round, p: rule(s, r, k, round, p, min_keep)
    jitted = jax.jit(plain)

    def run(scores: Any, valid: Any = None, p: float = 0.3, k: PRNGKey = key, r: Records = records) -> np.ndarray:
        r = r.replace(valid=jnp.ones(n, bool) if valid is None else jnp.asarray(valid))
        out = _under_jit(name, jitted, jnp.asarray(scores, jnp.float32), r, k, jnp.int32(1), jnp.float32(p))
        good = out.shape == (n,) and jnp.issubdtype(out.dtype, jnp.floating)
        assert good, f"{name}: weights are {out.dtype.name}{out.shape}, must be float32({n},)"
        return np.asarray(out)

    mixed = rng.normal(size=n)
    some = rng.permutation(n) < 34
    for label, scores in (
        ("mixed scores", mixed),
        ("tied scores", rng.integers(-2, 2, size=n)),
        ("equal negative scores", np.full(n, -1.0)),
        ("only negative scores", -np.abs(mixed) - 0.1),
        ("only positive scores", np.abs(mixed) + 0.1),
        ("only zero scores", np.zeros(n)),
        ("NaN scores", np.where(rng.permutation(n) < 5, np.nan, mixed)),
        ("nothing but NaN scores", np.full(n, np.nan)),
    ):
        for rows, valid in (
            ("all rows valid", np.ones(n, bool)),
            ("some rows invalid", some),
            ("fewer valid rows than min_keep", np.arange(n) == n // 2),
            ("no valid row", np.zeros(n, bool)),
        ):
            for p in (0.0, 0.3, 1.0):
                where = f"{name}, {label}, {rows}, p = {p:g}"
                weights = run(scores, valid, p)
                assert np.all(np.isfinite(weights)), f"{where}: a weight is not finite"
                assert np.all(weights >= 0), f"{where}: a weight is negative"
                assert np.all(weights[~valid] == 0), f"{where}: an invalid row has a weight other than 0"
                kept, least = np.sum(weights > 0), min(min_keep, valid.sum())
                assert kept >= least, f"{where}: {kept} records stay, must be {least} or more"

    for p in (0.3, 1.0):
        with_zero = np.where(mixed == np.min(mixed[mixed > 0]), 0.0, mixed)  # smallest positive -> 0: order unchanged
        same = np.array_equal(run(mixed, p=p) > 0, run(with_zero, p=p) > 0)
        assert same or drops_zero, f"{name}: a score of 0 is treated as negative (p = {p:g})"

    arguments = (jnp.asarray(mixed, jnp.float32), records, key, jnp.int32(1), jnp.float32(0.3))
    weights = run(mixed)
    _assert_close(plain(*arguments), weights, f"{name}: the weights differ without jit")
    lanes = jax.jit(jax.vmap(plain))(*jax.tree.map(lambda x: jnp.stack([x, x]), arguments))
    _assert_close(lanes, np.stack([weights, weights]), f"{name}: the weights differ under vmap")
    draws = any(not np.array_equal(run(mixed, k=jax.random.fold_in(key, i)), weights) for i in range(3))
    if not draws:
        order = rng.permutation(n)
        moved = run(mixed[order], r=jax.tree.map(lambda x: x[order], records))
        _assert_close(moved, weights[order], f"{name}: the weights depend on the order of the records")


def _made_up_records(n: int, rng: np.random.Generator) -> Records:
    number = lambda *shape: jnp.asarray(rng.normal(size=(n, *shape)), jnp.float32)
    value, advantage = number(), number()
    terminated = jnp.asarray(rng.random(n) < 0.1)
    return Records(
        obs=number(3),
        action=jnp.asarray(rng.integers(4, size=n), jnp.int32),
        log_prob=-jnp.abs(number()),
        value=value,
        reward=number(),
        advantage=advantage,
        return_=advantage + value,
        td_error=number(),
        mc_advantage=number(),
        segment=jnp.arange(n, dtype=jnp.int32),
        terminated=terminated,
        truncated=jnp.zeros(n, bool),
        valid=jnp.ones(n, bool),
    )


def _name_of(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


def _under_jit(name: str, f: Callable[..., Any], *args: Any) -> Array:
    try:
        out = f(*args)
    except Exception as error:  # whatever an extender's code raises becomes one line
        line = (str(error).strip().splitlines() or [""])[0]
        raise AssertionError(f"{name}: fails under jit: {type(error).__name__}: {line}") from error
    assert isinstance(out, jax.Array), f"{name}: returns {type(out).__name__}, must be an array"
    return out


def _assert_close(got: Any, want: Any, message: str) -> None:
    """Largest difference at most 1e-4 of the largest wanted number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{message}: shape {got.shape} instead of {want.shape}"
    error = np.max(np.abs(got - want), initial=0.0)
    allowed = 1e-4 * np.max(np.abs(want), initial=0.0)
    assert error <= allowed, f"{message}: by up to {error:.3g}, of {np.max(np.abs(want), initial=0.0):.3g}"
