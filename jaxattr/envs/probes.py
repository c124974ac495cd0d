"""Probe environments: tiny tasks whose correct answer is known in closed form.

Each isolates one part of the learner, in the spirit of rejax's `tests/environments.py`: if `probe/constant` fails,
the value loss is wrong; if only `probe/discount` fails, it is the discounting; and so on down the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxattr.config import ConfigError
from jaxattr.envs.base import Box, Discrete, EnvSpec, Step, check_limit
from jaxattr.types import Array, PRNGKey


class ProbeState(NamedTuple):
    """All that a probe remembers."""

    time: Array  # () int32, steps since reset
    obs: Array  # () float32, the observation that was handed out last


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe: how it starts, what an action earns, and when it ends by itself.

    Attributes:
      spec: static description; observations have shape (1,).
      start: key -> first observation () float32.
      move: (key, state with the new time, action) -> (next observation (), reward ()).
      lasts: number of steps after which the episode terminates; None = never (only the time limit cuts it).
    """

    spec: EnvSpec
    start: Callable[[PRNGKey], Any]
    move: Callable[[PRNGKey, ProbeState, Array], tuple[Any, Any]]
    lasts: int | None

    def reset(self, key: PRNGKey) -> tuple[ProbeState, Array]:
        """Draw a start state. Returns (state, obs (1,) float32)."""
        obs = _float(self.start(key))
        return ProbeState(jnp.zeros((), jnp.int32), obs), obs[None]

    def step(self, key: PRNGKey, state: ProbeState, action: Array) -> tuple[ProbeState, Step]:
        """Advance by one action."""
        time = state.time + 1
        obs, reward = map(_float, self.move(key, ProbeState(time, state.obs), action))
        terminated = jnp.zeros((), bool) if self.lasts is None else time >= self.lasts
        truncated = (time >= self.spec.max_steps) & ~terminated
        return ProbeState(time, obs), Step(obs[None], reward, terminated, truncated)


def _float(x: Any) -> Array:
    return jax.lax.convert_element_type(jnp.asarray(x), jnp.float32)


def _sign(key: PRNGKey) -> Array:
    return 2.0 * jax.random.bernoulli(key) - 1.0


def _zero(key: PRNGKey) -> float:
    return 0.0


def constant() -> Probe:
    """One step, observation 0, reward 1. Known answer: V(0) = 1."""
    return Probe(EnvSpec("probe/constant", (1,), Discrete(2), 1), _zero, lambda k, s, a: (0.0, 1.0), lasts=1)


def obs() -> Probe:
    """One step, observation -1 or 1 at random, reward = observation. Known answer: V(o) = o."""
    return Probe(EnvSpec("probe/obs", (1,), Discrete(2), 1), _sign, lambda k, s, a: (s.obs, s.obs), lasts=1)


def discount() -> Probe:
    """Two steps with observations 0 and 1, reward 1 at the end. Known answer: V(0) = gamma, V(1) = 1."""
    spec = EnvSpec("probe/discount", (1,), Discrete(2), 2)
    return Probe(spec, _zero, lambda k, s, a: (s.time, s.time == 2), lasts=2)


def policy() -> Probe:
    """One step, observation 0, action 1 earns 1 and action 0 earns -1. Known answer: action 1, return 1."""
    spec = EnvSpec("probe/policy", (1,), Discrete(2), 1)
    return Probe(spec, _zero, lambda k, s, a: (0.0, 2.0 * a - 1.0), lasts=1)


def obs_policy() -> Probe:
    """One step, observation o = -1 or 1; earns 1 if the action is (o > 0), else -1.

    Known answer: action 0 at -1, action 1 at 1, return 1.
    """
    spec = EnvSpec("probe/obs_policy", (1,), Discrete(2), 1)
    return Probe(spec, _sign, lambda k, s, a: (s.obs, s.obs * (2.0 * a - 1.0)), lasts=1)


def continuous() -> Probe:
    """One step, observation 0, action a in [-1, 1] earns -(a - 0.5)^2. Known answer: a = 0.5, return 0."""
    spec = EnvSpec("probe/continuous", (1,), Box(1, (-1.0,), (1.0,)), 1)
    return Probe(spec, _zero, lambda k, s, a: (0.0, -jnp.square(jnp.reshape(a, ()) - 0.5)), lasts=1)


def never_ends(max_steps_in_episode: int = 1000) -> Probe:
    """Observation 0 and reward 1 for ever, cut by the time limit only.

    Known answer: V = 1 / (1 - gamma), whatever the limit; a learner that takes the time limit for a terminal state
    finds less. Every episode's return equals the limit.
    """
    limit = check_limit("probe/never_ends", max_steps_in_episode)
    return Probe(EnvSpec("probe/never_ends", (1,), Discrete(2), limit), _zero, lambda k, s, a: (0.0, 1.0), lasts=None)


def ends_at_3(max_steps_in_episode: int = 1000) -> Probe:
    """Reward 1 a step, observation t / 3, terminates at step 3.

    Known answer: return 3, length 3; V(t / 3) = 1 + gamma + ... over the 3 - t steps left.
    """
    limit = check_limit("probe/ends_at_3", max_steps_in_episode)
    return Probe(EnvSpec("probe/ends_at_3", (1,), Discrete(2), limit), _zero, lambda k, s, a: (s.time / 3, 1.0), 3)


def tie() -> Probe:
    """Reward 1 a step, observation t / 5, terminates at step 5, which is also the time limit.

    Known answer: step 5 is terminated and not truncated, so V(4 / 5) = 1: nothing is bootstrapped.
    """
    return Probe(EnvSpec("probe/tie", (1,), Discrete(2), 5), _zero, lambda k, s, a: (s.time / 5, 1.0), lasts=5)


def nan(nan_step: int = 17, nan_prob: float = 1.0, max_steps_in_episode: int = 1000) -> Probe:
    """As `never_ends`, but step `nan_step` of an episode observes NaN, with probability `nan_prob`.

    Known answer: the learner notices a non-finite observation in that step, and in no other.
    """
    limit = check_limit("probe/nan", max_steps_in_episode)
    if not 0 <= nan_prob <= 1:
        raise ConfigError(f"probe/nan: option nan_prob is {nan_prob!r}: must be in [0, 1]")

    def move(key, state, action):
        hit = (state.time == nan_step) & jax.random.bernoulli(key, nan_prob)
        return jnp.where(hit, jnp.nan, 0.0), 1.0

    return Probe(EnvSpec("probe/nan", (1,), Discrete(2), limit), _zero, move, lasts=None)


PROBES: dict[str, Callable[..., Probe]] = {
    f"probe/{factory.__name__}": factory
    for factory in (constant, obs, discount, policy, obs_policy, continuous, never_ends, ends_at_3, tie, nan)
}
"""Id -> factory."""
