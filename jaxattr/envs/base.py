"""What an environment is: a pure one (`Env`: a state in, a state out) or one that keeps its own state (`Pool`).

A pure backend writes `reset` and `step` for a single environment and never resets by itself; it never needs to think
about batches, seeds, episode statistics or auto-reset. `jaxattr.testing.check_env` tells whether it fits. Simulators
that cannot hand out their state are pools: `open` starts n copies that are stepped together and reset themselves;
`jaxattr.testing.check_pool` tells whether one fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxattr.config import ConfigError, near
from jaxattr.types import Array, Box, Discrete, EnvSpec, PRNGKey

__all__ = [
    "AnyEnv",
    "Box",
    "Discrete",
    "Env",
    "EnvSpec",
    "EnvState",
    "OpenPool",
    "Pool",
    "Step",
    "auto_reset",
    "pure",
    "tree_select",
]

EnvState = Any


class Step(NamedTuple):
    """Result of one transition, before any reset."""

    obs: Array  # (*obs_shape,) float32: the true next observation, also at an episode's end
    reward: Array  # () float32
    terminated: Array  # () bool
    truncated: Array  # () bool


@runtime_checkable
class Env(Protocol):
    """One pure environment: a value in, a value out, no auto-reset."""

    @property
    def spec(self) -> EnvSpec:
        """Static description."""
        ...

    def reset(self, key: PRNGKey) -> tuple[EnvState, Array]:
        """Draw a start state. Uses up `key`. Returns (state, obs)."""
        ...

    def step(self, key: PRNGKey, state: EnvState, action: Array) -> tuple[EnvState, Step]:
        """Advance by one action. Uses up `key`. A tie of failure and time limit counts as terminated only."""
        ...


class OpenPool(Protocol):
    """n running copies of an environment that keeps its own state, each with a seed of its own.

    A copy whose episode has ended ignores the next action and answers with the first observation of its next episode
    (reward 0, both flags False): that row is no record.
    """

    @property
    def obs(self) -> Any:
        """(n, *obs_shape) float32 numpy: the first observations."""
        ...

    @property
    def traced_step(self) -> Callable[[Array, Array], tuple[Array, Step]] | None:
        """(token, (n, ...) action) -> (token, Step), to be called inside a compiled program; None: only `step` works.

        The token, eight uint8 of any value, is handed from call to call, so that XLA keeps them in order.
        """
        ...

    def step(self, action: Any, which: Any = None) -> Step:
        """(n, ...) numpy actions -> a `Step` of numpy arrays with a leading n.

        `which` (k,): only these copies are of interest, the rows of others mean nothing; a pool may let those rest.
        """
        ...

    def close(self) -> None:
        """Free what the copies hold."""
        ...


@runtime_checkable
class Pool(Protocol):
    """Environments that keep their own state, outside JAX: no copying, no branching, no exact resume."""

    @property
    def spec(self) -> EnvSpec:
        """Static description."""
        ...

    @property
    def in_jit(self) -> bool:
        """Whether open pools have a `traced_step`."""
        ...

    def open(self, seeds: Sequence[int], threads: int = 0) -> OpenPool:
        """Start one copy per seed (0 to 2**31 - 1), stepped by `threads` threads (0: as many as there are cores)."""
        ...


AnyEnv = Env | Pool


def pure(env: AnyEnv, what: str) -> Env:
    """`env`, if it is one whose state is a value.

    Raises:
      ConfigError: it is a pool; `what` says what cannot be done with one.
    """
    if isinstance(env, Env):
        return env
    raise ConfigError(f"{env.spec.name} keeps its state outside JAX: it cannot {what}")


def tree_select(pred: Array, on_true: Any, on_false: Any) -> Any:
    """`on_true` where the scalar `pred` holds, else `on_false`, leaf by leaf (typed keys included)."""

    def select(x, y):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.where(pred, jax.random.key_data(x), jax.random.key_data(y))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jnp.where(pred, x, y)

    return jax.tree.map(select, on_true, on_false)


def auto_reset(env: Env, key: PRNGKey, state: EnvState, action: Array, reset: tuple[EnvState, Array]):
    """Step, and move to `reset = (state, obs)` if the episode ended.

    Returns:
      (state, obs to act on next, Step with the true final observation).
    """
    state, step = env.step(key, state, action)
    done = step.terminated | step.truncated
    state, obs = tree_select(done, reset, (state, step.obs))
    return state, obs, step


# -- what backends share --------------------------------------------------------------------------------------


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` with the dtypes of `like`, leaf by leaf, and no weak types; typed PRNG keys pass through.

    A scan demands that the state going out has exactly the type of the state coming in, but environments often
    start a counter as the Python int 0 and go on with int32.
    """

    def cast(x, ref):
        if jnp.issubdtype(ref.dtype, jax.dtypes.extended):
            return x
        return jax.lax.convert_element_type(jnp.asarray(x), ref.dtype)

    return jax.tree.map(cast, tree, like)


def carry_avals(name: str, reset: Any, step: Any, action: jax.ShapeDtypeStruct) -> Any:
    """Shapes and dtypes that hold a state from `reset` and after any number of steps; nothing is computed.

    Args:
      name: environment id, for the message.
      reset: key -> state.
      step: (key, state, action) -> state.
      action: shape and dtype of one action.

    Raises:
      ConfigError: the state changes structure or shape from step to step.
    """

    def join(a, b):
        if a.shape != b.shape:
            raise ConfigError(f"{name}: a state leaf changes its shape in a step, {a.shape} -> {b.shape}")
        same = a.dtype == b.dtype
        return jax.ShapeDtypeStruct(a.shape, a.dtype if same else jnp.promote_types(a.dtype, b.dtype))

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(reset, key)
    state = jax.tree.map(join, state, state)  # rebuilt, so that no leaf is weak
    for _ in range(3):  # a leaf may widen (int -> float) once something wider has flowed into it
        after = jax.eval_shape(step, key, state, action)
        if jax.tree.structure(after) != jax.tree.structure(state):
            raise ConfigError(f"{name}: the state changes its structure in a step")
        joined = jax.tree.map(join, state, after)
        if joined == state:
            return state
        state = joined
    raise ConfigError(f"{name}: the dtypes of the state do not settle")


def check_options(env_id: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ConfigError for an option that `env_id` does not have, listing those it has."""
    known = sorted(known)
    for name in options:
        if name not in known:
            listing = ", ".join(known) if known else "none"
            hint = near(name, known).split("; known")[0] if known else ""
            raise ConfigError(f"{env_id} has no option {name!r}{hint} (options: {listing})")


def check_option_value(env_id: str, name: str, value: Any, default: Any) -> Any:
    """`value` in the type of `default`, so that `is_slippery=no` is an error and not a truthy string.

    Raises:
      ConfigError: the types cannot be reconciled. A default of None (or anything unusual) accepts every value.
    """
    wanted = None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        wanted = None if isinstance(value, bool) else "true or false"
    elif isinstance(default, int):
        if number and float(value).is_integer():
            return int(value)
        wanted = "a whole number"
    elif isinstance(default, float):
        if number:
            return float(value)
        wanted = "a number"
    elif isinstance(default, str):
        wanted = None if isinstance(value, str) else "a text"
    elif isinstance(default, jax.Array):
        try:
            array = jnp.asarray(value, default.dtype)
        except (TypeError, ValueError):
            array = None
        if array is not None and array.shape == default.shape:
            return array
        wanted = f"a list of shape {default.shape}"
    if wanted:
        raise ConfigError(f"{env_id}: option {name} is {value!r}: must be {wanted}")
    return value


def check_limit(env_id: str, value: Any) -> int:
    """`value` as a time limit in environment steps.

    Raises:
      ConfigError: it is no whole number of 1 or more.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not float(value).is_integer() or value < 1:
        raise ConfigError(f"{env_id}: option max_steps_in_episode is {value!r}: must be a whole number, 1 or more")
    return int(value)
