"""Are a round's advantages right? Branch the true environment from every record and see what really follows.

    Q_bar(s, a) = mean of R returns that start in s with action a      V_bar(s) = the same, first action from the policy
    A_bar       = Q_bar - V_bar

Rollouts follow the policy that collected the round. Their returns are discounted with the round's gamma and rewards
are scaled as the round's were, so A_bar is in the units of `Records.advantage`. A rollout stops where its episode ends;
there is no reset. What would follow a cut (time limit or horizon) is worth what the round's critic says, as in GAE:

    return = sum_{t < n} gamma^t r_t + gamma^n * (0 if terminated after n steps, else V(the true last observation))

Source: diagnosis in Hu et al. 2025 (arXiv 2505.19281), section 4; there for FrozenLake only.

A fixed number of slots work through the queue of all rollouts. Episodes have very different lengths: a slot whose
rollout ended takes the next one, so none waits for the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxattr.config import ConfigError
from jaxattr.envs.base import Env, tree_select
from jaxattr.lanes import lane_devices, place_lanes, spread_lanes
from jaxattr.ops.statistics import normalize, scale
from jaxattr.studies.replay import RoundData
from jaxattr.types import Array, Params, PRNGKey, RunningStats
from jaxattr.update import UpdateStep

SLOTS_CPU, SLOTS_ACCELERATOR = 1024, 16384
"""Rollouts in work at a time on one device; bounds memory, never changes which random numbers a rollout gets."""
TURNOVER = 8
"""Slots are filled again once one in so many is free: writing results and looking up states is then rare."""


class MonteCarlo(NamedTuple):
    """What branching says about the N records of one lane; errors are standard errors of the means."""

    advantage: Array  # (N,) float32, A_bar = q - v
    stderr: Array  # (N,) of A_bar, sqrt(var_Q / R + var_V / R)
    q: Array  # (N,) Q_bar(s, a)
    v: Array  # (N,) V_bar(s)
    env_steps: Array  # () float32, of all rollouts together
    bootstrapped: Array  # () float32, share of the rollouts whose end is the critic's opinion


class Source(struct.PyTreeNode):
    """What is branched, and by whom; the same on every device."""

    state: Any  # (N, ...) environments before each record's action
    obs: Array  # (N, *obs_shape), not normalised
    action: Array  # (N,) or (N, A), as the distribution gave it
    params: Params  # that collected the round
    obs_stats: RunningStats  # likewise
    reward_stats: RunningStats  # that scaled its rewards
    gamma: Array  # ()
    key: PRNGKey


class Slots(struct.PyTreeNode):
    """W rollouts in work."""

    id: Array  # (W,) int32 place in this device's queue, -1 = none
    key: PRNGKey  # (W,) of the rollout
    state: Any  # (W, ...)
    obs: Array  # (W, *obs_shape)
    action: Array  # (W, ...) of the record
    time: Array  # (W,) int32, steps since the branch
    total: Array  # (W,) float32, discounted rewards so far
    discount: Array  # (W,) float32, gamma^time
    running: Array  # (W,) bool
    terminated: Array  # (W,) bool


class Work(struct.PyTreeNode):
    """How far a device is; leading device axis D outside of it."""

    slots: Slots
    queue: Array  # (n,) int32, its records
    returns: Array  # (n * 2 * R,) float32, of the rollouts that ended
    next: Array  # () int32, first rollout that no slot has had yet
    ended: Array  # () int32, rollouts
    bootstrapped: Array  # () int32, rollouts
    env_steps: Array  # () float32, would overflow an int32


@dataclass(frozen=True)
class Brancher:
    """Monte-Carlo advantages of one lane; `start`, then `advance` until `progress` is 1, then `estimate`.

    Attributes:
      step, env: of the run.
      records: N.
      rollouts: R for Q_bar and as many for V_bar, 2 or more.
      horizon: env steps after which a rollout is cut and V bootstraps; None = the environment's own time limit.
      slots: W per device; None = `SLOTS_CPU` or `SLOTS_ACCELERATOR`.

    Raises:
      ConfigError: rollouts or horizon are out of range.
    """

    step: UpdateStep
    env: Env
    records: int
    rollouts: int = 32
    horizon: int | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.rollouts < 2:
            raise ConfigError(f"rollouts is {self.rollouts}: must be 2 or more (one has no standard error)")
        if self.horizon is not None and self.horizon < 1:
            raise ConfigError(f"horizon is {self.horizon}: must be 1 or more environment steps")
        if self.records * self.rollouts * 2 >= 2**31:
            raise ConfigError(f"rollouts is {self.rollouts}: too many for {self.records} records (2**31 in all)")

    # -- outside: all devices -----------------------------------------------------------------------------------
    @property
    def devices(self) -> int:
        """D, over which the records are spread."""
        return len(lane_devices(self._padded()))

    def start(self, source: Source) -> Work:
        """Nothing done yet; record i goes to device i mod D. Leading device axis."""
        devices, per = self.devices, self._padded() // self.devices
        queue = jnp.arange(devices * per, dtype=jnp.int32).reshape(per, devices).T % self.records
        return jax.vmap(lambda q: self._empty(source, q))(queue)

    def advance(self, source: Source, work: Work, steps: Array | int) -> Work:
        """At most `steps` more environment steps in every slot; `steps` may be traced."""

        def local(source: Source, work: Work, steps: Array) -> Work:
            own = self._run(source, jax.tree.map(lambda x: x[0], work), steps)
            return jax.tree.map(lambda x: x[None], own)

        axes = jax.tree.map(lambda _: 0, work)
        run = spread_lanes(local, self.devices, (False, True, False), axes)
        return run(source, work, jnp.asarray(steps, jnp.int32))

    def progress(self, work: Work) -> Array:
        """Share of all rollouts that have ended, 0 to 1."""
        return jnp.sum(work.ended) / work.returns.size

    def estimate(self, work: Work) -> MonteCarlo:
        """Means and standard errors of the finished work."""
        returns = work.returns.reshape(self.devices, -1, 2, self.rollouts).swapaxes(0, 1)
        returns = returns.reshape(-1, 2, self.rollouts)[: self.records]
        mean = jnp.mean(returns, axis=-1)
        error = jnp.var(returns, axis=-1, ddof=1) / self.rollouts
        return MonteCarlo(
            advantage=mean[:, 0] - mean[:, 1],
            stderr=jnp.sqrt(error[:, 0] + error[:, 1]),
            q=mean[:, 0],
            v=mean[:, 1],
            env_steps=jnp.sum(work.env_steps),
            bootstrapped=jnp.sum(work.bootstrapped) / jnp.sum(work.ended),
        )

    # -- inside: one device -------------------------------------------------------------------------------------
    def _padded(self) -> int:
        """D n: a few records are branched twice where the devices do not divide N."""
        return self.records + -self.records % len(jax.devices())

    def _empty(self, source: Source, queue: Array) -> Work:
        total = queue.shape[0] * 2 * self.rollouts
        limit = SLOTS_CPU if jax.default_backend() == "cpu" else SLOTS_ACCELERATOR
        w = min(self.slots or limit, total)
        take = lambda tree: jax.tree.map(lambda x: x[jnp.zeros(w, jnp.int32)], tree)
        slots = Slots(
            id=jnp.full(w, -1, jnp.int32),
            key=jax.vmap(lambda i: jax.random.fold_in(source.key, i))(jnp.zeros(w, jnp.uint32)),
            state=take(source.state),
            obs=take(source.obs),
            action=take(source.action),
            time=jnp.zeros(w, jnp.int32),
            total=jnp.zeros(w, jnp.float32),
            discount=jnp.ones(w, jnp.float32),
            running=jnp.zeros(w, bool),
            terminated=jnp.zeros(w, bool),
        )
        none = jnp.zeros((), jnp.int32)
        return Work(slots, queue, jnp.zeros(total, jnp.float32), none, none, none, jnp.zeros((), jnp.float32))

    def _run(self, source: Source, work: Work, steps: Array) -> Work:
        """Fill, step until enough have ended, and again."""
        w = work.slots.id.shape[0]

        def unfinished(carry: tuple[Work, Array]) -> Array:
            work, left = carry
            return (left > 0) & (work.ended < work.returns.shape[0])

        def turn(carry: tuple[Work, Array]) -> tuple[Work, Array]:
            work, left = carry
            work = self._refill(source, work)
            waiting = work.next < work.returns.shape[0]
            enough = jnp.where(waiting, w - w // TURNOVER, 1)  # running slots worth another step

            def busy(inner: tuple[Slots, Array, Array]) -> Array:
                slots, left, _ = inner
                return (left > 0) & (jnp.sum(slots.running, dtype=jnp.int32) >= enough)

            def one(inner: tuple[Slots, Array, Array]) -> tuple[Slots, Array, Array]:
                slots, left, count = inner
                return self._step(source, slots), left - 1, count + jnp.sum(slots.running, dtype=jnp.float32)

            slots, left, count = jax.lax.while_loop(busy, one, (work.slots, left, work.env_steps))
            return self._collect(source, work.replace(slots=slots, env_steps=count)), left

        return jax.lax.while_loop(unfinished, turn, (work, steps))[0]

    def _refill(self, source: Source, work: Work) -> Work:
        """Free slots take the next rollouts of the queue, as far as it goes."""
        s, total = work.slots, work.returns.shape[0]
        free = s.id < 0
        id_ = work.next + jnp.cumsum(free, dtype=jnp.int32) - 1
        taken = free & (id_ < total)
        row, within = id_ // (2 * self.rollouts), id_ % (2 * self.rollouts)
        record = work.queue[jnp.where(taken, row, 0)]
        # A rollout's own key: its numbers depend on nothing that is only there for speed (slots, devices, order).
        name = (record * (2 * self.rollouts) + within).astype(jnp.uint32)
        fresh = Slots(
            id=id_,
            key=jax.vmap(lambda i: jax.random.fold_in(source.key, i))(name),
            state=jax.tree.map(lambda x: x[record], source.state),
            obs=source.obs[record],
            action=source.action[record],
            time=jnp.zeros_like(s.time),
            total=jnp.zeros_like(s.total),
            discount=jnp.ones_like(s.discount),
            running=taken,
            terminated=jnp.zeros_like(s.terminated),
        )
        slots = jax.vmap(tree_select)(taken, fresh, s)
        return work.replace(slots=slots, next=work.next + jnp.sum(taken, dtype=jnp.int32))

    def _step(self, source: Source, s: Slots) -> Slots:
        """One environment step in every slot; those that ended keep what they have."""
        distribution = self.step.nets.distribution
        limit = self.env.spec.max_steps if self.horizon is None else self.horizon

        def one(s: Slots) -> Slots:
            # Two keys a step instead of a split: the second costs nothing where the environment draws no numbers.
            draw, move = (jax.random.fold_in(s.key, 2 * s.time + k) for k in (0, 1))
            head = self.step.nets.policy(source.params, normalize(source.obs_stats, s.obs))
            action = distribution.sample(head, distribution.noise(draw, ()))
            given = (s.time == 0) & (s.id % (2 * self.rollouts) < self.rollouts)  # the first R of 2 R are for Q
            action = jnp.where(given, s.action, action)
            state, result = self.env.step(move, s.state, distribution.to_env(action))
            reward = result.reward
            if self.step.config.normalize_reward:
                reward = scale(source.reward_stats, reward)
            time = s.time + 1
            after = s.replace(
                state=state,
                obs=result.obs,
                time=time,
                total=s.total + s.discount * reward,
                discount=s.discount * source.gamma,
                running=~(result.terminated | result.truncated | (time >= limit)),
                terminated=result.terminated,
            )
            return tree_select(s.running, after, s)

        return jax.vmap(one)(s)

    def _collect(self, source: Source, work: Work) -> Work:
        """Write down the returns of the slots that ended, and free them."""
        s = work.slots
        over = (s.id >= 0) & ~s.running
        cut = over & ~s.terminated

        def critic(obs: Array) -> Array:
            return jax.vmap(lambda o: self.step.nets.value(source.params, normalize(source.obs_stats, o)))(obs)

        # Most environments terminate most of the time: the critic is asked only where somebody was cut.
        value = jax.lax.cond(jnp.any(cut), critic, lambda obs: jnp.zeros_like(s.total), s.obs)
        found = s.total + jnp.where(s.terminated, 0.0, s.discount * value)
        returns = work.returns.at[jnp.where(over, s.id, work.returns.shape[0])].set(found, mode="drop")
        return work.replace(
            slots=s.replace(id=jnp.where(over, -1, s.id)),
            returns=returns,
            ended=work.ended + jnp.sum(over, dtype=jnp.int32),
            bootstrapped=work.bootstrapped + jnp.sum(cut, dtype=jnp.int32),
        )


def branch_source(data: RoundData, key: PRNGKey) -> Source:
    """What branching needs of one lane's round. Uses up `key`.

    Raises:
      ConfigError: the round holds no environment states, so nothing can be branched.
    """
    if data.rollout.env_state is None:
        raise ConfigError("this round holds no environment states: its environment cannot be branched")
    flat = lambda tree: jax.tree.map(lambda x: jnp.asarray(x).reshape((-1, *x.shape[2:])), tree)
    r = data.rollout
    return Source(
        state=flat(r.env_state),
        obs=flat(r.obs),
        action=flat(r.action),
        params=data.before.params,
        obs_stats=data.before.obs_stats,
        reward_stats=data.after.reward_stats,  # with this round included: what scaled the records' rewards
        gamma=data.settings.gamma,
        key=key,
    )


def monte_carlo(
    step: UpdateStep,
    env: Env,
    data: RoundData,
    key: PRNGKey,
    rollouts: int = 32,
    horizon: int | None = None,
    slots: int | None = None,
    watch: Callable[[float], None] | None = None,
) -> MonteCarlo:
    """Monte-Carlo advantages of all records of one lane; compiles once, spreads over the host's devices.

    Args:
      step, env: of the run.
      data: one lane of a round with environment states.
      key: used up. A rollout's random numbers depend on it, the record and the rollout's index only.
      rollouts: R from (s, a) and R more from s, per record.
      horizon: env steps after which V bootstraps; None = the environment's time limit.
      slots: in work at a time on one device; matters to speed and memory only.
      watch: is told the share of rollouts done, some dozens of times.

    Raises:
      ConfigError: no environment states, or rollouts or horizon out of range.
    """
    source = branch_source(data, key)
    brancher = Brancher(step, env, source.obs.shape[0], rollouts, horizon, slots)
    advance = jax.jit(brancher.advance, donate_argnums=1)
    # Placed where every later call will find it, else the second call would compile again.
    work = place_lanes(jax.jit(brancher.start)(source), brancher.devices)
    source = jax.device_put(source, NamedSharding(work.queue.sharding.mesh, PartitionSpec()))
    steps, done = 64, 0.0
    while done < 1.0:
        work = advance(source, work, steps)
        before, done = done, float(brancher.progress(work))
        if watch is not None:
            watch(done)
        steps = min(2 * steps, 2**30) if done - before < 0.02 else steps
    return jax.jit(brancher.estimate)(work)
