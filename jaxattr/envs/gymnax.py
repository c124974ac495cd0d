"""gymnax environments (1.x): one environment, its own time limit, no auto-reset.

We call `reset_env`, `step_env` and `is_truncated` directly. gymnax's own `step` would reset at once and pay for a
reset on every step, and releases before 1.0 hide truncation behind a single `done`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import ConfigError
from jaxattr.envs.base import (
    Box,
    Discrete,
    EnvSpec,
    Step,
    carry_avals,
    cast_like,
    check_limit,
    check_option_value,
    check_options,
)
from jaxattr.types import Array, PRNGKey

NEEDED = "1.0"

UNAVAILABLE = {"MNISTBandit-bsuite": "it needs the MNIST images, which have to be downloaded"}
"""Registered ids that we refuse, and why."""

# Fields of EnvParams that gymnax 1.0 declares and never reads. Accepting them would ignore the user's wish silently.
_INERT = {
    "Acrobot-v1": ("link_length_2",),
    "Asterix-MinAtar": ("shot_cool_down",),
    "Seaquest-MinAtar": ("ramp_interval", "enemy_move_interval"),
}


@dataclass(frozen=True, eq=False)
class GymnaxEnv:
    """One gymnax environment behind the `Env` protocol.

    `env` and `params` are gymnax's own objects, for rendering. Constructed by `make`.
    """

    env: Any
    params: Any
    spec: EnvSpec
    state_avals: Any  # shapes and dtypes of the state, stable under step
    action_shape: tuple[int, ...]  # what the gymnax env expects; ours is flat
    action_dtype: Any
    num_states: int | None  # size of a discrete observation space (one-hot), else None

    def reset(self, key: PRNGKey) -> tuple[Any, Array]:
        """Draw a start state.

        Args:
          key: used up.

        Returns:
          (state, observation (*obs_shape,) float32).
        """
        obs, state = self.env.reset_env(key, self.params)
        return cast_like(state, self.state_avals), self._obs(obs)

    def step(self, key: PRNGKey, state: Any, action: Array) -> tuple[Any, Step]:
        """Advance by one action, without resetting.

        Args:
          key: used up.
          state: from `reset` or `step`.
          action: () int, or (A,) float.

        Returns:
          (state, Step with the true next observation).
        """
        action = jnp.reshape(action, self.action_shape).astype(self.action_dtype)
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        # gymnax leaves a tie of goal and time limit as both; ours is terminated only, so nothing is bootstrapped.
        terminated = jnp.reshape(terminated, ()).astype(bool)
        truncated = jnp.reshape(self.env.is_truncated(state, self.params), ()).astype(bool) & ~terminated
        reward = cast_like(jnp.reshape(reward, ()), jax.ShapeDtypeStruct((), jnp.float32))
        return cast_like(state, self.state_avals), Step(self._obs(obs), reward, terminated, truncated)

    def _obs(self, obs: Any) -> Array:
        if self.num_states is not None:
            return jax.nn.one_hot(obs, self.num_states, dtype=jnp.float32)
        return jnp.reshape(jnp.asarray(obs), self.spec.obs_shape).astype(jnp.float32)


def check_version(version: str) -> None:
    """Raise ConfigError unless gymnax `version` keeps termination and truncation apart (1.0 and later)."""
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < 1:
        raise ConfigError(
            f"gymnax {version} is installed, but jaxattr needs gymnax >= {NEEDED} (earlier releases report one `done` "
            f"for termination and truncation): pip install 'gymnax>={NEEDED}'"
        )


def load() -> Any:
    """The gymnax module (imported on first use: it takes seconds).

    Raises:
      ConfigError: not installed, or too old.
    """
    try:
        version = metadata.version("gymnax")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"gymnax is not installed: pip install 'gymnax>={NEEDED}'") from None
    check_version(version)
    import gymnax

    return gymnax


def ids() -> list[str]:
    """All ids that gymnax knows, those in `UNAVAILABLE` included."""
    return list(load().registered_envs)


def make(env_id: str, options: Mapping[str, Any] = MappingProxyType({})) -> GymnaxEnv:
    """Build the environment `env_id` with `options`.

    Args:
      env_id: as in `gymnax.registered_envs`.
      options: keyword arguments of the environment's constructor, or fields of its parameters.

    Raises:
      ConfigError: the id needs data, an option or its value is unknown, or a space is not supported.
    """
    if env_id in UNAVAILABLE:
        raise ConfigError(f"{env_id} is not available: {UNAVAILABLE[env_id]}")
    env, params = _construct(env_id, options)
    try:
        max_steps = check_limit(env_id, params.max_steps_in_episode)
    except AttributeError:
        raise ConfigError(f"{env_id} has no max_steps_in_episode in its parameters, so no time limit") from None

    action, action_space = _action(env_id, env.action_space(params))
    observed = _observation_space(env_id, env.observation_space(params))
    shape = tuple(action_space.shape)
    dtype = jnp.dtype(action_space.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    obs, _ = jax.eval_shape(lambda k: env.reset_env(k, params), key)
    num_states = int(observed.n) if _kind(observed) == "Discrete" else None
    obs_shape = (num_states,) if num_states is not None else tuple(obs.shape) or (1,)
    state_avals = carry_avals(
        env_id,
        lambda k: env.reset_env(k, params)[1],
        lambda k, s, a: env.step_env(k, s, a, params)[1],
        jax.ShapeDtypeStruct(shape, dtype),
    )
    spec = EnvSpec(env_id, obs_shape, action, max_steps)
    return GymnaxEnv(env, params, spec, state_avals, shape, dtype, num_states)


def describe(env_id: str) -> str:
    """Spaces and time limit in a few words, or why the id is unavailable."""
    if env_id in UNAVAILABLE:
        return f"unavailable: {UNAVAILABLE[env_id]}"
    env, params = _construct(env_id, {})
    try:
        action, _ = _action(env_id, env.action_space(params))
        observed = _observation_space(env_id, env.observation_space(params))
    except ConfigError as error:
        return f"unavailable: {error}"
    obs = f"{observed.n} states" if _kind(observed) == "Discrete" else f"obs {tuple(observed.shape)}"
    act = f"{action.n} actions" if isinstance(action, Discrete) else f"{action.size} continuous actions"
    return f"{obs}, {act}, limit {params.max_steps_in_episode:g}"


# -- options --------------------------------------------------------------------------------------------------


def _construct(env_id: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """(gymnax env, params) with `options` sorted into constructor arguments and parameter fields."""
    gymnax = load()
    # The registry itself is private, but only it tells a factory's keyword arguments without calling the factory.
    factory = gymnax.registration._registry.get(env_id, None)
    if factory is None:
        raise ConfigError(f"{env_id} is no gymnax environment")
    arguments = {
        p.name: p.default
        for p in inspect.signature(factory).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    given = {k: check_option_value(env_id, k, v, arguments[k]) for k, v in options.items() if k in arguments}
    try:
        env = factory(**given)
        params = env.default_params  # after construction: FrozenLake's limit depends on its map, DeepSea's on size
    except (TypeError, ValueError, AssertionError, KeyError, IndexError) as error:
        raise ConfigError(f"{env_id} does not accept the options {given}: {error}") from error

    defaults = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    inert = _INERT.get(env_id, ())
    for name in options:
        if name in inert:
            raise ConfigError(f"{env_id}: gymnax declares the option {name!r} but never reads it")
    check_options(env_id, options, (set(arguments) | set(defaults)) - set(inert))
    changes = {k: check_option_value(env_id, k, v, defaults[k]) for k, v in options.items() if k in defaults}
    if "max_steps_in_episode" in changes:
        check_limit(env_id, options["max_steps_in_episode"])
    if env_id == "CartPole-v1":
        changes = _cartpole(params, changes)
    return env, params.replace(**changes)


def _cartpole(params: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` with the masses' sum and product kept in step.

    gymnax stores `total_mass` and `polemass_length` next to what they are made of and never recomputes them, so
    that a new `masscart` alone would change nothing.
    """
    new = params.replace(**changes)
    derived = {}
    if changes.keys() & {"masscart", "masspole"}:
        derived["total_mass"] = new.masscart + new.masspole
    if changes.keys() & {"masspole", "length"}:
        derived["polemass_length"] = new.masspole * new.length
    return derived | changes


# -- spaces ---------------------------------------------------------------------------------------------------


def _kind(space: Any) -> str:
    return type(space).__name__


def _action(env_id: str, space: Any) -> tuple[Discrete | Box, Any]:
    """Our action spec of a gymnax space, and the space."""
    if _kind(space) == "Discrete":
        return Discrete(int(space.n)), space
    if _kind(space) == "Box" and jnp.issubdtype(space.dtype, jnp.floating):
        size = math.prod(space.shape)
        low, high = (tuple(np.broadcast_to(b, space.shape).ravel().tolist()) for b in (space.low, space.high))
        return Box(size, low, high), space
    raise ConfigError(
        f"{env_id}: action space {space!r} is not supported; supported are Discrete (one choice) and real-valued Box"
    )


def _observation_space(env_id: str, space: Any) -> Any:
    if _kind(space) in ("Box", "Discrete"):
        return space
    raise ConfigError(f"{env_id}: observation space {_kind(space)} is not supported; supported are Box and Discrete")
