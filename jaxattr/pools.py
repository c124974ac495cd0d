"""Collection and testing with environments that keep their own state (`envs.base.Pool`): the lanes of one pool.

A row in which a copy only resets itself is no record: it carries `valid = False` and reaches no loss, no score and no
count. Everything after collection is the same as for pure environments.
"""

from __future__ import annotations

from multiprocessing import cpu_count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxattr.envs.base import OpenPool, Pool, Step
from jaxattr.evaluate import BOTH, Evaluation
from jaxattr.lanes import LANES, lane_devices, over_lanes, padded_lanes
from jaxattr.networks import Networks
from jaxattr.ops.statistics import normalize
from jaxattr.rollout import finish_rollout
from jaxattr.types import Array, EnvSpec, EpisodeStats, Params, PRNGKey, Rollout, RunningStats, TrainState

TEST_COPIES = 2048
"""Most copies that a test runs at once; more episodes are played one block after another."""


class PoolState(struct.PyTreeNode):
    """What is known about a pool's copies between two rounds."""

    obs: Array  # (S, B, *obs_shape) to act on next
    ended: Array  # (S, B) bool, the last step ended an episode: the next one only resets
    episode_return: Array  # (S, B) float32, so far
    episode_length: Array  # (S, B) int32, so far


class Played(NamedTuple):
    """What T steps of all lanes left behind."""

    action: Array  # (S, T, B, ...) as drawn
    result: Step  # leaves (S, T, B, ...)


class PoolCollector:
    """Copies of one environment as lanes x environments; a `Collector`.

    Where lanes are spread over several devices, each device has a pool of its own, so that they run side by side. The
    pools are opened once, by `init`; compiled programs hold pointers to them.
    """

    pure = False
    all_valid = False

    def __init__(self, env: Pool, num_envs: int, num_steps: int):
        self.env, self.num_envs, self.num_steps = env, num_envs, num_steps
        self.pools: list[OpenPool] = []

    @property
    def spec(self) -> EnvSpec:
        """Of the environment."""
        return self.env.spec

    @property
    def in_jit(self) -> bool:
        """Whether `collect` can be part of a compiled program; if not, `play` steps the pool from the host."""
        return self.env.in_jit

    def init(self, keys: PRNGKey) -> PoolState:
        """Open the pools, one seed per copy drawn from its lane's key (S,). Not to be traced.

        Raises:
          RuntimeError: they are open already.
        """
        if self.pools:
            raise RuntimeError(f"{self.spec.name}: the pool is already in use; make a new update step")
        lanes = keys.shape[0]
        seeds = np.asarray(jax.vmap(lambda k: jax.random.bits(k, (self.num_envs,), jnp.uint32))(keys)) >> 1
        count = len(lane_devices(lanes)) if self.in_jit else 1
        twins = seeds[: padded_lanes(lanes) - lanes] if self.in_jit else seeds[:0]  # of lanes computed twice
        shares = np.split(np.concatenate([seeds, twins]).reshape(-1), count)
        self.pools = [self.env.open(share.tolist(), threads=max(1, cpu_count() // count)) for share in shares]
        obs = np.concatenate([pool.obs for pool in self.pools])[: lanes * self.num_envs]
        shape = (lanes, self.num_envs)
        return PoolState(
            obs=jnp.asarray(obs.reshape(*shape, *self.spec.obs_shape)),
            ended=jnp.zeros(shape, bool),
            episode_return=jnp.zeros(shape, jnp.float32),
            episode_length=jnp.zeros(shape, jnp.int32),
        )

    # -- in a compiled program --------------------------------------------------------------------------------
    def collect(self, nets: Networks, state: TrainState, keys: PRNGKey) -> tuple[PoolState, Rollout, EpisodeStats]:
        """One round of T steps in every environment of every lane."""
        lanes = keys.shape[0]

        def step(carry: Any, noise: Array) -> Any:
            token, obs = carry
            action, sent = self.act(nets, state.params, state.obs_stats, obs, noise)
            token, result = self._traced_step(token, sent.reshape(-1, *sent.shape[2:]))
            result = jax.tree.map(lambda x: x.reshape(lanes, self.num_envs, *x.shape[1:]), result)
            return (token, result.obs), Played(action, result)

        start = (jnp.zeros(8, jnp.uint8), state.env_state.obs)
        _, played = jax.lax.scan(step, start, self.noise(nets, keys))
        return self.finish(nets, state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), played))

    def _traced_step(self, token: Array, action: Array) -> tuple[Array, Step]:
        """By the pool of the device that this runs on."""
        steps: list[Any] = [pool.traced_step for pool in self.pools]
        if not steps:
            raise RuntimeError(f"{self.spec.name}: the pool is not open; call init_state first")
        if len(steps) == 1:
            return steps[0](token, action)
        return jax.lax.switch(jax.lax.axis_index(LANES), steps, token, action)

    # -- parts of a round, also for a host that steps the pool itself -------------------------------------------
    def noise(self, nets: Networks, keys: PRNGKey) -> Array:
        """(S,) keys, used up -> what the actions of a round are drawn with, (T, S, B, ...)."""
        shape = (self.num_steps, self.num_envs)
        return jnp.moveaxis(jax.vmap(lambda k: nets.distribution.noise(k, shape))(keys), 0, 1)

    def act(
        self, nets: Networks, params: Params, obs_stats: RunningStats, obs: Array, noise: Array
    ) -> tuple[Array, Array]:
        """Actions (S, B, ...) as drawn, and as the environments take them."""

        def lane(params: Params, stats: RunningStats, obs: Array, noise: Array) -> tuple[Array, Array]:
            one = lambda o, z: nets.distribution.sample(nets.policy(params, normalize(stats, o)), z)
            action = jax.vmap(one)(obs, noise)
            return action, jax.vmap(nets.distribution.to_env)(action)

        return over_lanes(lane)(params, obs_stats, obs, noise)

    def play(self, act: Any, state: TrainState, noise: Array) -> Played:
        """One round, stepped from the host: `act(params, obs_stats, obs, noise, t)` is the compiled `act`."""
        obs, rows = state.env_state.obs, []
        for t in range(self.num_steps):
            action, sent = jax.device_get(act(state.params, state.obs_stats, obs, noise, t))
            result = self.pools[0].step(sent.reshape(-1, *sent.shape[2:]))
            result = jax.tree.map(lambda x: x.reshape(*sent.shape[:2], *x.shape[1:]), result)  # noqa: B023
            obs = result.obs
            rows.append(Played(action, result))
        return jax.tree.map(lambda *x: np.stack(x, axis=1), *rows)

    def finish(self, nets: Networks, state: TrainState, played: Played) -> tuple[PoolState, Rollout, EpisodeStats]:
        """From what was played to records, and what the next round starts from; all lanes."""

        def lane(params: Params, stats: RunningStats, envs: PoolState, played: Played):
            result = played.result
            done = result.terminated | result.truncated
            valid = ~jnp.concatenate([envs.ended[None], done[:-1]])
            obs = jnp.concatenate([envs.obs[None], result.obs[:-1]])

            def count(carry: Any, row: Any) -> Any:
                total, length = carry
                reward, done, valid = row
                total, length = total + jnp.where(valid, reward, 0.0), length + valid
                ended = (jnp.where(done, total, 0.0), jnp.where(done, length, 0))
                return (jnp.where(done, 0.0, total), jnp.where(done, 0, length)), ended

            start = (envs.episode_return, envs.episode_length)
            (total, length), (returns, lengths) = jax.lax.scan(count, start, (result.reward, done, valid))
            after = PoolState(result.obs[-1], done[-1], total, length)
            episodes = EpisodeStats(
                count=jnp.sum(done, dtype=jnp.int32),
                return_sum=jnp.sum(returns),
                length_sum=jnp.sum(lengths).astype(jnp.float32),
            )
            return after, finish_rollout(nets, params, stats, obs, played.action, result, valid), episodes

        return over_lanes(lane)(state.params, state.obs_stats, state.env_state, played)


class PoolTest:
    """Test episodes of all lanes with a pool, stepped from the host; what `evaluate_lanes` is for pure environments.

    Every call opens fresh copies with the same seeds, so start states depend on the key alone; lanes and policies share
    them. A copy rests from the first end of its episode on (where its pool can step a part of its copies).
    """

    def __init__(self, nets: Networks, env: Pool, episodes: int, modes: tuple[int, ...] = BOTH):
        self.nets, self.env, self.episodes, self.modes = nets, env, episodes, modes
        self._act = jax.jit(self._act_all)

    def _act_all(self, params: Params, obs_stats: RunningStats, obs: Array, key: PRNGKey, t: Array) -> Array:
        """(S, M, E, *obs_shape) -> environment actions (S, M, E, ...)."""
        distribution = self.nets.distribution
        noise = distribution.noise(jax.random.fold_in(key, t), obs.shape[1:3])
        sampled = (jnp.asarray(self.modes) == 0)[:, None] & jnp.ones(obs.shape[1:3], bool)

        def one(params: Params, stats: RunningStats, obs: Array, noise: Array, sampled: Array) -> Array:
            head = self.nets.policy(params, normalize(stats, obs))
            return distribution.to_env(jnp.where(sampled, distribution.sample(head, noise), distribution.mode(head)))

        over_test = jax.vmap(jax.vmap(one, (None, None, 0, 0, 0)), (None, None, 0, 0, 0))
        return over_lanes(lambda p, s, o: over_test(p, s, o, noise, sampled))(params, obs_stats, obs)

    def __call__(self, params: Params, obs_stats: RunningStats, key: PRNGKey) -> Evaluation:
        """Parameters and statistics with a leading lane axis -> an `Evaluation` of numpy arrays (S, 2, E)."""
        device = jax.devices()[0]  # one place for all lanes: what takes time here is the pool
        params, obs_stats, key = jax.device_put((params, obs_stats, key), device)
        lanes, modes = obs_stats.count.shape[0], len(self.modes)
        blocks = -(-self.episodes * lanes * modes // TEST_COPIES)
        key_reset, key_run = jax.random.split(key)
        seeds = np.array_split(np.asarray(jax.random.bits(key_reset, (self.episodes,), jnp.uint32)) >> 1, blocks)
        played = [
            self._block(params, obs_stats, jax.random.fold_in(key_run, i), (lanes, modes), block)
            for i, block in enumerate(seeds)
            if len(block)
        ]
        total, length, finished = (np.concatenate(parts, axis=-1) for parts in zip(*played, strict=True))
        shape = (lanes, 2, self.episodes)
        empty: Any = (np.nan, 0, False)
        fields: list[Any] = [np.full(shape, e, x.dtype) for e, x in zip(empty, (total, length, finished), strict=True)]
        for field, values in zip(fields, (total, length, finished), strict=True):
            field[:, self.modes] = values
        return Evaluation(*fields)

    def _block(self, params: Params, obs_stats: RunningStats, key: PRNGKey, lead: tuple[int, int], seeds: Any):
        shape = (*lead, len(seeds))
        pool = self.env.open(np.broadcast_to(seeds, shape).reshape(-1).tolist())
        total, length = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        finished = np.zeros(shape, bool)
        obs = pool.obs
        for t in range(self.env.spec.max_steps):
            sent = np.asarray(self._act(params, obs_stats, obs.reshape(*shape, *obs.shape[1:]), key, t))
            live = ~finished
            step = pool.step(sent.reshape(-1, *sent.shape[3:]), np.flatnonzero(live))
            obs = step.obs
            total += np.where(live, np.asarray(step.reward).reshape(shape), 0.0)
            length += live
            finished |= np.asarray(step.terminated | step.truncated).reshape(shape)
            if finished.all():
                break
        pool.close()
        return total, length, finished
