"""Contract checks for extenders: one call tells whether a new part fits. Each failure is one clear line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.envs.base import Box, Discrete, Env, EnvSpec, Step, auto_reset
from jaxattr.types import Array, PRNGKey


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
