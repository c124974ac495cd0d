"""Evaluation: fresh episodes with frozen networks and statistics. Reads a training state, never changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxattr.envs.base import Env, tree_select
from jaxattr.lanes import over_lanes
from jaxattr.networks import Networks
from jaxattr.ops.statistics import normalize
from jaxattr.types import Array, Params, PRNGKey, RunningStats

STOCHASTIC, DETERMINISTIC = 0, 1
BOTH = (STOCHASTIC, DETERMINISTIC)
MODES = {"both": BOTH, "stochastic": (STOCHASTIC,), "deterministic": (DETERMINISTIC,)}
"""Names of `Config.eval_policy` -> the kinds of episodes that are played."""


class Evaluation(NamedTuple):
    """One episode per evaluation environment; index 0 = actions sampled, 1 = the policy's mode."""

    episode_return: Array  # (2, E) float32, undiscounted; NaN = this kind was not played
    length: Array  # (2, E) int32, environment steps
    finished: Array  # (2, E) bool, False = cut off before its end (its return is a partial sum), or not played


def evaluate(
    nets: Networks,
    env: Env,
    params: Params,
    obs_stats: RunningStats,
    key: PRNGKey,
    episodes: int,
    max_steps: int | None = None,
    modes: tuple[int, ...] = BOTH,
) -> Evaluation:
    """Run `episodes` episodes with sampled actions and as many with the policy's mode, for ONE lane.

    Both kinds start from the same E states, which depend on `key` alone. An environment stops counting at the first
    end of its episode.

    Args:
      nets, env: the agent's networks and the environment.
      params, obs_stats: frozen.
      key: used up; give every training seed the same one.
      episodes: E.
      max_steps: cut-off in environment steps; None = the environment's own time limit.
      modes: kinds of episodes to play.
    """
    limit = env.spec.max_steps if max_steps is None else max_steps
    key_reset, key_run = jax.random.split(key)
    state, obs = jax.vmap(env.reset)(jax.random.split(key_reset, episodes))
    kinds = len(modes)
    each = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * kinds), tree)
    sampled = (jnp.array(modes) == STOCHASTIC)[:, None] & jnp.ones((kinds, episodes), bool)

    def one(state: Any, obs: Array, sample: Array, noise: Array, key: PRNGKey):
        head = nets.policy(params, normalize(obs_stats, obs))
        action = jnp.where(sample, nets.distribution.sample(head, noise), nets.distribution.mode(head))
        return env.step(key, state, nets.distribution.to_env(action))

    def running(carry: Any) -> Array:
        t, _, _, _, _, finished = carry
        return (t < limit) & ~jnp.all(finished)

    def body(carry: Any) -> Any:
        t, state, obs, total, length, finished = carry
        key_noise, key_step = jax.random.split(jax.random.fold_in(key_run, t))
        noise = nets.distribution.noise(key_noise, (kinds, episodes))
        keys = jax.random.split(key_step, (kinds, episodes))
        new_state, step = jax.vmap(jax.vmap(one))(state, obs, sampled, noise, keys)
        live = ~finished
        new_state, new_obs = jax.vmap(jax.vmap(tree_select))(live, (new_state, step.obs), (state, obs))
        total = total + jnp.where(live, step.reward, 0.0)
        return t + 1, new_state, new_obs, total, length + live, finished | step.terminated | step.truncated

    start = (
        jnp.int32(0),
        each(state),
        each(obs),
        jnp.zeros((kinds, episodes), jnp.float32),
        jnp.zeros((kinds, episodes), jnp.int32),
        jnp.zeros((kinds, episodes), bool),
    )
    _, _, _, total, length, finished = jax.lax.while_loop(running, body, start)
    if modes == BOTH:
        return Evaluation(total, length, finished)
    rows = jnp.array(modes)
    place = lambda empty, x: jnp.full((2, episodes), empty, x.dtype).at[rows].set(x)
    return Evaluation(place(jnp.nan, total), place(0, length), place(False, finished))


def evaluate_lanes(
    nets: Networks, env: Env, episodes: int, modes: tuple[int, ...] = BOTH
) -> Callable[[Params, RunningStats, PRNGKey], Evaluation]:
    """`evaluate` for parameters and statistics with a leading lane axis; every lane gets the same key."""

    def lanes(params: Params, obs_stats: RunningStats, key: PRNGKey) -> Evaluation:
        def lane(params: Params, obs_stats: RunningStats) -> Evaluation:
            return evaluate(nets, env, params, obs_stats, key, episodes, modes=modes)

        return over_lanes(lane)(params, obs_stats)

    return lanes
