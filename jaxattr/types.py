"""The data that flows through jaxattr, each kind defined once, with its shapes at the field.

Axis letters: `T` steps per rollout, `B` parallel environments, `N = T * B` records, `S` lanes (seeds or settings).
The shapes below are those of ONE lane; the trainer adds a leading `S` axis to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from flax import struct

Array = jax.Array
PRNGKey = jax.Array
Params = Any
"""Pytree of float arrays: the learnable parameters."""


@dataclass(frozen=True)
class Discrete:
    """Actions 0 .. n - 1, int32 scalars."""

    n: int


@dataclass(frozen=True)
class Box:
    """Real-valued actions of shape (size,); `low`, `high` hold `size` floats each (may be infinite)."""

    size: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def bounded(self) -> bool:
        """True if every bound is finite (what tanh squashing needs)."""
        return all(abs(x) < float("inf") for x in self.low + self.high)


@dataclass(frozen=True)
class EnvSpec:
    """What the learner must know about an environment before anything is compiled."""

    name: str
    obs_shape: tuple[int, ...]  # float32; discrete states are one-hot by then
    action: Discrete | Box
    max_steps: int  # time limit in environment steps; the episode is truncated there
    notes: tuple[str, ...] = field(default=())  # printed in the run's header (backend, unusual switches)


class Settings(NamedTuple):
    """Every *traced* number of an update: changing one never recompiles, and each lane may hold its own.

    All fields are float32 scalars. Meaning, range and default of each stand at the field of the same name in
    `jaxattr.config.Config`, except `total_updates`, which the trainer derives from `total_steps`.
    """

    learning_rate: Array
    adam_eps: Array
    max_grad_norm: Array  # inf = off
    clip_range: Array
    value_clip_range: Array
    ent_coef: Array
    vf_coef: Array
    gamma: Array
    gae_lambda: Array
    p: Array
    total_updates: Array  # length of the linear schedules


class RunningStats(struct.PyTreeNode):
    """Mean and variance of everything seen so far, one value per observation entry (no batch axis)."""

    mean: Array  # (*obs_shape,) float32
    var: Array  # (*obs_shape,) float32, population variance
    count: Array  # () uint32, saturates at 2**32 - 1


class Rollout(struct.PyTreeNode):
    """What one round of collection hands to the learner, in time order.

    A backend that cannot be vmapped (a stateful pool, a host loop) hands in the same thing; rows that are no
    records (for example the reset row of a next-step auto-reset) carry `valid = False`.
    """

    obs: Array  # (T, B, *obs_shape) float32, as the environment gave it (not normalised)
    action: Array  # (T, B) int32 or (T, B, A) float32: what log_prob was computed from (unclipped, pre-squash)
    log_prob: Array  # (T, B) float32, nats
    value: Array  # (T, B) float32, V(obs)
    next_value: Array  # (T, B) float32, V(true next observation, before any reset)
    reward: Array  # (T, B) float32, as the environment gave it
    terminated: Array  # (T, B) bool, the episode ended in the task's own sense: nothing follows
    truncated: Array  # (T, B) bool, cut by a time limit, never true where `terminated` is
    valid: Array  # (T, B) bool, False = this row is no record
    env_state: Any = None  # (T, B, ...) the environments before each step, where a collector keeps them


class EpisodeStats(struct.PyTreeNode):
    """Sums over the episodes that *finished* in a round (each counted once, in the round it ended)."""

    count: Array  # () int32
    return_sum: Array  # () float32
    length_sum: Array  # () float32


class Records(struct.PyTreeNode):
    """The buffer of a round as a flat list, record i = (t, b) with i = t * B + b."""

    obs: Array  # (N, *obs_shape) float32, as the network sees it (normalised with the round's frozen statistics)
    action: Array  # (N,) int32 or (N, A) float32
    log_prob: Array  # (N,) float32, under the collecting policy
    value: Array  # (N,) float32
    reward: Array  # (N,) float32, after reward scaling if that is on
    advantage: Array  # (N,) float32, raw GAE: neither centred nor scaled
    return_: Array  # (N,) float32, advantage + value: the critic's target
    td_error: Array  # (N,) float32, one-step temporal-difference error
    mc_advantage: Array  # (N,) float32, advantage at lambda = 1; NaN unless the filter asks for it
    segment: Array  # (N,) int32, index of the first record of its segment (one environment, no episode end inside)
    terminated: Array  # (N,) bool
    truncated: Array  # (N,) bool
    valid: Array  # (N,) bool


class Judged(NamedTuple):
    """A round's records and what influence filtering said about them."""

    records: Records
    scores: Array  # (N,) float32, NaN where not computed
    weights: Array  # (N,) float32, 0 = dropped
    rollout: Rollout | None = None  # what the records were made of, where the collector keeps states


class Terms(NamedTuple):
    """Parts of PPO's loss, of one record or averaged."""

    policy_loss: Array
    value_loss: Array
    entropy: Array
    kl: Array
    clipped: Array


class Training(NamedTuple):
    """What the optimisation epochs did."""

    leftover: Array  # () int32, kept records per epoch that fill no minibatch
    steps: Array  # () int32, optimiser steps
    grad_norm: Array  # () mean over minibatches, before clipping
    watched: Any = None  # what a watcher of the minibatches made of them


class TrainState(struct.PyTreeNode):
    """Everything a lane needs to go on exactly where it stopped."""

    params: Params
    opt_state: Any  # of the flattened parameter vector
    obs_stats: RunningStats
    reward_stats: RunningStats  # of the discounted return, shape ()
    discounted_return: Array  # (B,) float32, running, for reward_stats
    env_state: Any  # owned by the collector
    key: PRNGKey
    update: Array  # () int32, rounds finished
    alive: Array  # () bool, False once a non-finite value stopped this lane


class Metrics(struct.PyTreeNode):
    """What every update reports. Floats are NaN where there is nothing to report (never a false 0)."""

    episodes: Array  # () int32, episodes finished in this round
    return_mean: Array  # () mean undiscounted return of those episodes
    length_mean: Array  # () mean length of those episodes, environment steps
    records: Array  # () int32, valid records of the round
    kept: Array  # () int32, records with weight > 0
    dropped: Array  # () int32, valid records with weight 0
    negative: Array  # () int32, valid records with score < 0
    leftover: Array  # () int32, kept records per epoch that fill no minibatch
    optimizer_steps: Array  # () int32
    # The next five are measured once, after the round, over all its valid records with the new parameters. (Summing
    # them up in every minibatch would cost more than a tenth of the round.)
    policy_loss: Array  # with advantages standardised over the buffer
    value_loss: Array
    entropy: Array  # nats
    approx_kl: Array  # nats, mean of (ratio - 1) - log ratio
    clip_fraction: Array  # share of records whose ratio left [1 - clip, 1 + clip]
    explained_variance: Array  # 1 - Var(return - value) / Var(return), collecting critic
    grad_norm: Array  # mean over minibatches, before clipping
    score_mean: Array
    score_quantiles: Array  # (5,) at 0, 25, 50, 75, 100 %
    target_grad_norm: Array  # |grad f|, the direction every record is scored against
    learning_rate: Array
    nonfinite: Array  # () int32: 0 = all finite, else 1 + index into NONFINITE_FIELDS
    nonfinite_index: Array  # () int32: record (t * B + b) of the first non-finite entry, -1 if none


NONFINITE_FIELDS = ("observation", "reward", "log_prob", "value", "advantage", "score", "parameters")
"""Where a non-finite value can first show up, in the order in which they are checked."""

SCORE_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
