"""brax environments: rigid-body physics, bare, with a time limit of our own.

brax's `create` wraps an environment in an episode counter and an auto-reset that drops the last observation of an
episode and always restarts at the same state. We take the bare environment instead.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxattr.config import ConfigError, near
from jaxattr.envs.base import (
    Box,
    EnvSpec,
    Step,
    carry_avals,
    cast_like,
    check_limit,
    check_option_value,
    check_options,
)
from jaxattr.types import Array, PRNGKey

BACKENDS = ("generalized", "mjx", "positional", "spring")
DEFAULT_LIMIT = 1000
"""Environment steps, brax's usual episode length."""

# A stub for brax's own tests: it counts calls on the Python side, so it is not pure.
_HIDDEN = ("fast",)


class BraxState(NamedTuple):
    """brax's state and our step counter."""

    env: Any  # brax.envs.State
    time: Array  # () int32, steps since reset


@dataclass(frozen=True, eq=False)
class BraxEnv:
    """One brax environment behind the `Env` protocol. Constructed by `make`; `env` is brax's own object."""

    env: Any
    spec: EnvSpec
    state_avals: Any  # shapes and dtypes of brax's state, stable under step

    def reset(self, key: PRNGKey) -> tuple[BraxState, Array]:
        """Draw a start state. Uses up `key`. Returns (state, obs (O,) float32)."""
        state = cast_like(self.env.reset(key), self.state_avals)
        return BraxState(state, jnp.zeros((), jnp.int32)), state.obs.astype(jnp.float32)

    def step(self, key: PRNGKey, state: BraxState, action: Array) -> tuple[BraxState, Step]:
        """Advance by one action (A,) in [-1, 1]. The physics is deterministic: `key` is not used."""
        del key
        after = cast_like(self.env.step(state.env, action.astype(jnp.float32)), self.state_avals)
        time = state.time + 1
        terminated = after.done > 0.5
        truncated = (time >= self.spec.max_steps) & ~terminated
        step = Step(after.obs.astype(jnp.float32), after.reward.astype(jnp.float32), terminated, truncated)
        return BraxState(after, time), step


def load() -> Any:
    """The module `brax.envs` (imported on first use: it takes seconds).

    Raises:
      ConfigError: not installed.
    """
    said = io.StringIO()
    try:
        # MuJoCo prints two lines about an optional GPU package to stdout; everything else is passed on.
        with contextlib.redirect_stdout(said):
            from brax import envs
    except ImportError as error:
        raise ConfigError(f"brax cannot be imported ({error}): pip install brax") from error
    finally:
        for line in said.getvalue().splitlines():
            if not line.startswith(("Failed to import warp", "Failed to import mujoco_warp")):
                print(line, file=sys.stderr)
    return envs


def ids() -> list[str]:
    """All brax ids, with the prefix `brax/`."""
    return [f"brax/{name}" for name in load()._envs if name not in _HIDDEN]


def make(env_id: str, options: Mapping[str, Any] = MappingProxyType({})) -> BraxEnv:
    """Build `brax/<name>` with `options`.

    Args:
      env_id: with the prefix.
      options: `backend` (default: spring where the environment has it, else the environment's own default),
        `max_steps_in_episode` (default 1000), and keyword arguments of the environment's class.

    Raises:
      ConfigError: an unknown option or backend, or the environment does not run with the installed jax.
    """
    envs = load()
    if env_id not in ids():
        raise ConfigError(f"unknown environment {env_id!r}{near(env_id, ids())}")
    factory = envs._envs[env_id.removeprefix("brax/")]
    arguments = {p.name: p.default for p in inspect.signature(factory).parameters.values() if p.kind != p.VAR_KEYWORD}
    # Every environment hands its other keywords on to PipelineEnv, where these two can be set.
    arguments |= {"n_frames": 1, "debug": False}
    check_options(env_id, options, [*arguments, "backend", "max_steps_in_episode"])
    limit = check_limit(env_id, options.get("max_steps_in_episode", DEFAULT_LIMIT))
    given = {
        k: check_option_value(env_id, k, v, arguments.get(k))
        for k, v in options.items()
        if k not in ("max_steps_in_episode", "backend")
    }
    env = _construct(env_id, factory, given, options.get("backend"))

    size = int(env.action_size)
    action = jax.ShapeDtypeStruct((size,), jnp.float32)
    try:
        with _quiet():
            avals = carry_avals(env_id, env.reset, lambda k, s, a: env.step(s, a), action)
    except ConfigError:
        raise
    except Exception as error:  # brax is no longer maintained: swimmer, for one, calls what jax has removed since
        versions = f"brax {metadata.version('brax')} and jax {jax.__version__}"
        raise ConfigError(f"{env_id} does not run with {versions}: {type(error).__name__}: {error}") from error
    if not hasattr(avals.obs, "shape"):
        raise ConfigError(f"{env_id}: observations that are a mapping are not supported; supported is one array")
    spec = EnvSpec(
        name=env_id,
        obs_shape=tuple(avals.obs.shape),
        action=Box(size, (-1.0,) * size, (1.0,) * size),
        max_steps=limit,
        notes=(f"brax backend {env.backend}",),
    )
    return BraxEnv(env, spec, avals)


def describe(env_id: str) -> str:
    """A few words. Sizes are left out: they would need the physics model, which takes seconds to load."""
    return f"rigid-body physics, continuous actions, limit {DEFAULT_LIMIT}"


def _construct(env_id: str, factory: Any, given: dict[str, Any], backend: Any) -> Any:
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"{env_id}: backend is {backend!r}: must be one of {', '.join(BACKENDS)}")
    try:
        with _quiet():
            if backend is not None:
                return factory(backend=backend, **given)
            try:
                return factory(backend="spring", **given)
            except ValueError as error:
                if "backend" not in str(error):
                    raise
                return factory(**given)
    except (TypeError, ValueError, AssertionError) as error:
        wish = given if backend is None else given | {"backend": backend}
        raise ConfigError(f"{env_id} does not accept the options {wish}: {error}") from error


@contextlib.contextmanager
def _quiet():
    """Without brax's notice that it is no longer maintained, which it gives for every environment."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Brax System", category=UserWarning)
        yield
