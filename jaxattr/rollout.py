"""Collection behind one batch-level interface: lanes x environments in, a `Rollout` out.

Nothing above this file knows whether environments can be vmapped. `VmapCollector` serves one pure environment;
`pools.PoolCollector` those that keep their own state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxattr.envs.base import Env, auto_reset
from jaxattr.lanes import over_lanes
from jaxattr.networks import Networks
from jaxattr.ops.statistics import normalize
from jaxattr.types import Array, EnvSpec, EpisodeStats, PRNGKey, Rollout, RunningStats, TrainState

DRAW_AHEAD = 2**22
"""Bytes of start states that a round may draw in one batch; the numbers are the same either way."""


class Collector(Protocol):
    """Experience for all lanes at once (leading axis S everywhere)."""

    @property
    def spec(self) -> EnvSpec:
        """Static description of one environment."""
        ...

    @property
    def all_valid(self) -> bool:
        """True if every row of every rollout is a record."""
        ...

    @property
    def pure(self) -> bool:
        """True if its state is a value: `init` can be traced and called again, a saved state goes on exactly."""
        ...

    @property
    def in_jit(self) -> bool:
        """True if `collect` can be part of a compiled program."""
        ...

    def init(self, keys: PRNGKey) -> Any:
        """(S,) keys, used up -> the collector's own state with leading axis S."""
        ...

    def collect(self, nets: Networks, state: TrainState, keys: PRNGKey) -> tuple[Any, Rollout, EpisodeStats]:
        """One round with the policies in `state`. Uses up `keys` (S,). Returns (own state, rollout, episodes)."""
        ...


class VmapEnvState(struct.PyTreeNode):
    """B running environments of one lane."""

    state: Any  # (B, ...)
    obs: Array  # (B, *obs_shape)
    first: Any  # the start to return to where resets are cached, else None
    episode_return: Array  # (B,) float32, so far
    episode_length: Array  # (B,) int32, so far


@dataclass(frozen=True)
class VmapCollector:
    """One pure environment, vmapped over B environments and S lanes, with real auto-reset."""

    env: Env
    num_envs: int
    num_steps: int
    cached_reset: bool = False
    keeps_states: bool = False
    restarts: bool = False
    all_valid: bool = True
    pure: bool = True
    in_jit: bool = True

    @property
    def spec(self) -> EnvSpec:
        """Of the environment."""
        return self.env.spec

    def init(self, keys: PRNGKey) -> VmapEnvState:
        """Reset all environments of all lanes."""
        return jax.vmap(self.init_lane)(keys)

    def init_lane(self, key: PRNGKey) -> VmapEnvState:
        """Reset the B environments of one lane."""
        state, obs = jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))
        return VmapEnvState(
            state=state,
            obs=obs,
            first=(state, obs) if self.cached_reset else None,
            episode_return=jnp.zeros(self.num_envs, jnp.float32),
            episode_length=jnp.zeros(self.num_envs, jnp.int32),
        )

    def collect(self, nets: Networks, state: TrainState, keys: PRNGKey) -> tuple[Any, Rollout, EpisodeStats]:
        """One round of T steps in every environment of every lane."""

        def lane(params, obs_stats, env_state, key):
            return self.collect_lane(nets, params, obs_stats, env_state, key)

        return over_lanes(lane)(state.params, state.obs_stats, state.env_state, keys)

    def collect_lane(
        self, nets: Networks, params: Any, obs_stats: RunningStats, envs: VmapEnvState, key: PRNGKey
    ) -> tuple[VmapEnvState, Rollout, EpisodeStats]:
        """T steps of one lane: act, step, reset where an episode ended."""
        if self.restarts:
            key, key_start = jax.random.split(key)
            envs = self._restarted(envs, key_start)
        # All randomness of the round is drawn here, in a few large calls instead of many small ones in the scan.
        key_noise, key_step, key_reset = jax.random.split(key, 3)
        shape = (self.num_steps, self.num_envs)
        noise = nets.distribution.noise(key_noise, shape)
        step_keys, reset_keys = jax.random.split(key_step, shape), jax.random.split(key_reset, shape)

        def act(obs: Array, noise: Array) -> Array:
            return nets.distribution.sample(nets.policy(params, normalize(obs_stats, obs)), noise)

        def step(envs: VmapEnvState, inputs: Any):
            noise, step_key, reset = inputs
            action = jax.vmap(act)(envs.obs, noise)
            start = self._start(envs, reset)
            state, obs, result = jax.vmap(lambda k, s, a, r: auto_reset(self.env, k, s, a, r))(
                step_key, envs.state, jax.vmap(nets.distribution.to_env)(action), start
            )
            done = result.terminated | result.truncated
            total, length = envs.episode_return + result.reward, envs.episode_length + 1
            before = envs.state if self.keeps_states else None
            row = (envs.obs, action, result, before, jnp.where(done, total, 0.0), jnp.where(done, length, 0))
            envs = envs.replace(
                state=state,
                obs=obs,
                episode_return=jnp.where(done, 0.0, total),
                episode_length=jnp.where(done, 0, length),
            )
            return envs, row

        resets = self._resets(reset_keys)
        envs, (obs, action, result, before, returns, lengths) = jax.lax.scan(step, envs, (noise, step_keys, resets))
        done = result.terminated | result.truncated
        episodes = EpisodeStats(
            count=jnp.sum(done, dtype=jnp.int32),
            return_sum=jnp.sum(returns),
            length_sum=jnp.sum(lengths).astype(jnp.float32),
        )
        rollout = finish_rollout(nets, params, obs_stats, obs, action, result, jnp.ones(shape, bool))
        return envs, rollout.replace(env_state=before), episodes

    def _restarted(self, envs: VmapEnvState, key: PRNGKey) -> VmapEnvState:
        """All B environments at the start of an episode."""
        fresh = self.init_lane(key)
        return fresh if envs.first is None else fresh.replace(state=envs.first[0], obs=envs.first[1], first=envs.first)

    def _resets(self, keys: PRNGKey) -> Any:
        """Fresh starts for every step that could need one, drawn in one batch where they are small; else the keys."""
        if self.cached_reset:
            return None
        shapes = jax.tree.leaves(jax.eval_shape(self.env.reset, keys[0, 0]))
        size = self.num_steps * self.num_envs * sum(x.size * x.dtype.itemsize for x in shapes)
        return jax.vmap(jax.vmap(self.env.reset))(keys) if size <= DRAW_AHEAD else keys

    def _start(self, envs: VmapEnvState, reset: Any) -> Any:
        """(state, obs) of B environments, used by those whose episode just ended."""
        if self.cached_reset:
            return envs.first
        return reset if isinstance(reset, tuple) else jax.vmap(self.env.reset)(reset)


def finish_rollout(
    nets: Networks, params: Any, obs_stats: RunningStats, obs: Array, action: Array, result: Any, valid: Array
) -> Rollout:
    """Add what the collecting networks say about the rows: log-probabilities, V(obs), V(true next observation).

    Done once for the whole round, in one batch, with the same snapshot of parameters and statistics that acted.

    Args:
      obs: (T, B, *obs_shape), action: (T, B, ...), result: `Step` with leading (T, B), valid: (T, B) bool.
    """
    per_row = lambda f: jax.vmap(jax.vmap(f))
    seen = normalize(obs_stats, obs)
    values = jax.vmap(per_row(lambda o: nets.value(params, o)))(jnp.stack([seen, normalize(obs_stats, result.obs)]))
    return Rollout(
        obs=obs,
        action=action,
        log_prob=per_row(lambda o, a: nets.log_prob(params, o, a))(seen, action),
        value=values[0],
        next_value=values[1],
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        valid=valid,
    )
