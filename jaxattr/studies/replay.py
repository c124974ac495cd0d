"""A recorded round as data: scored again, branched, retrained, exactly as the run would have done it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxattr.attribution.targets import Target
from jaxattr.attribution.tracin import TracIn
from jaxattr.attribution.units import UNITS, unit_ids
from jaxattr.config import Config, ConfigError
from jaxattr.envs.base import Env
from jaxattr.types import Array, Judged, Params, PRNGKey, Records, Rollout, Settings, TrainState
from jaxattr.update import UpdateStep, Watch

CHECKPOINTS = ("start", "steps", "epochs")
"""Where a score's gradients are taken: the round's start; every optimiser step (TracIn); every step, but the target's
gradient refreshed once an epoch."""


class RoundData(struct.PyTreeNode):
    """One lane of one round (or many, with a leading axis): everything that retraining it needs."""

    settings: Settings
    before: TrainState
    after: TrainState
    records: Records
    scores: Array  # (N,) as the run computed them, NaN where it did not
    weights: Array  # (N,) as the run's filter gave them
    rollout: Rollout  # with env_state: the environments before each step


@dataclass(frozen=True)
class Round:
    """One recorded round of a run, all its lanes.

    Attributes:
      env_id, config, seeds: of the run.
      number: of the round, 1-based.
      env, step: the run's environment and update step.
      data: `RoundData` with a leading lane axis S.
    """

    env_id: str
    config: Config
    seeds: tuple[int, ...]
    number: int
    env: Env
    step: UpdateStep
    data: RoundData

    def lane(self, index: int = 0) -> RoundData:
        """The data of one lane, without the lane axis.

        Raises:
          ConfigError: there is no such lane.
        """
        if not 0 <= index < len(self.seeds):
            raise ConfigError(f"seed index {index}: this round has {len(self.seeds)} (0 to {len(self.seeds) - 1})")
        return jax.tree.map(lambda x: x[index], self.data)


def round_data(settings: Settings, before: TrainState, after: TrainState, judged: Judged) -> RoundData:
    """Put together what the runner has around a round (all with a leading lane axis)."""
    assert judged.rollout is not None, "the collector kept no states"
    return RoundData(settings, before, after, judged.records, judged.scores, judged.weights, judged.rollout)


def learning_keys(before: TrainState) -> tuple[PRNGKey, PRNGKey, PRNGKey]:
    """The keys that the round used up for scoring, filtering and the epochs (see `UpdateStep.round`, `learn`)."""
    score, filter_, epochs = jax.random.split(jax.random.split(before.key, 4)[2], 3)
    return score, filter_, epochs


def units(step: UpdateStep, data: RoundData, kind: str) -> Array:
    """(N,) unit ids of one lane's records; see `attribution.units`."""
    if kind not in UNITS:
        raise ConfigError(f"unit is {kind!r}: must be one of {', '.join(UNITS)}")
    r, envs = data.records, data.before.env_state
    if kind == "episode" and not hasattr(envs, "episode_length"):
        raise ConfigError("unit 'episode': this collector does not say where episodes began; use 'segment'")
    started = envs.episode_length == 0 if kind == "episode" else jnp.zeros(step.config.num_envs, bool)
    return unit_ids(kind, r.segment, r.terminated | r.truncated, started, r.valid)


def subset_step(step: UpdateStep, training: str = "compact", weighted: bool = False) -> UpdateStep:
    """The same update step, but for training on any subset of the records.

    Args:
      step: of the run.
      training: `compact` or `step_matched`.
      weighted: losses are multiplied by weights (else weights are only 0 and 1).
    """
    rule = "reweight" if weighted else "zero"  # stands for its kind only: the rule itself is not applied
    return dataclasses.replace(step, config=step.config.replace(filter=rule, training=training, warmup_rounds=0))


def retrain(
    step: UpdateStep,
    data: RoundData,
    weights: Array,
    *,
    key: PRNGKey | None = None,
    keep: Array | None = None,
    kept: Array | int | None = None,
    watch: Watch | None = None,
) -> tuple[Params, Any]:
    """Repeat one lane's optimisation from the round's start on some of its records.

    Args:
      step: the run's, or `subset_step` of it.
      data: one lane.
      weights: (N,).
      key: of the visiting orders; None = the run's own, so what stays is visited in the order it was.
      keep, kept, watch: see `UpdateStep.optimize`.

    Returns:
      (parameters after the round, what `watch` made of it).
    """
    key = learning_keys(data.before)[2] if key is None else key
    options = {"keep": keep, "kept": kept, "watch": watch}
    params, _, training = step.optimize(data.before, data.records, weights, key, data.settings, **options)
    return params, training.watched


def score(
    step: UpdateStep,
    data: RoundData,
    *,
    target: str | Target | None = None,
    checkpoint: str = "start",
    metric: str | None = None,
    unit: str = "record",
    normalize: str | None = None,
) -> Array:
    """Influence of one lane's records, (N,): the sum over a unit's records is the unit's score.

    Args:
      step: of the run.
      target: `return`, `gradient`, `gradient_loo` (leaves out the unit), a registered one, or a function
        (log_prob_fn, params, records) -> (); None = as the run's filter has it.
      checkpoint: see `CHECKPOINTS`; `steps` and `epochs` retrain on the records that the run kept.
      metric: `plain`, `adam` (second moments at the round's start); None = as configured.
      unit: see `attribution.units`; matters to `gradient_loo` only, elsewhere scores add up.
      normalize: loss-side advantages of checkpoint `start`: chunk, buffer, none; None = as configured. (Over the steps
        they are what the minibatches made them.)

    Raises:
      ConfigError: an option is unknown or does not go with another.
    """
    if checkpoint not in CHECKPOINTS:
        raise ConfigError(f"checkpoint is {checkpoint!r}: must be one of {', '.join(CHECKPOINTS)}")
    if normalize is not None:
        step = dataclasses.replace(step, config=step.config.replace(score_normalize=normalize))
    if metric == "adam" and step.config.optimizer != "adam":
        raise ConfigError("metric 'adam': this run's optimizer holds no second moments")
    key = learning_keys(data.before)[0]
    if checkpoint == "start":
        ids = units(step, data, unit) if unit != "record" or target == "gradient_loo" else None
        options = {"target": target, "metric": metric, "unit_ids": ids}
        return step.score(data.before, data.records, key, data.settings, **options)[0]
    if target == "gradient_loo":
        raise ConfigError("target 'gradient_loo' is defined at the round's start; use checkpoint 'start'")
    gradient = lambda params: step.target_gradient(target, params, data.records, key, data.settings)
    weight = step.metric(data.before, step.config.score_metric if metric is None else metric, data.settings)
    watch = TracIn(step.gain(data.settings), gradient, checkpoint.removesuffix("s"), weight)
    return retrain(step, data, data.weights, watch=watch)[1][0]
