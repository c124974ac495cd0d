"""Would this round have ended better on fewer records? Retrain it on all and on filtered ones, and test both.

    theta_all    = what round k makes of theta_k and all records of its buffer
    theta_arm    = the same, from the same theta_k and optimiser state, on the records that a rule keeps
    difference   = test return of theta_arm - test return of theta_all

Test episodes of all arms begin in the same states, use the same random numbers, and see observations normalised with
the statistics after the round (which no rule changes). What stays is visited in the order in which the run visited it.

Source: Hu et al. 2025 (arXiv 2505.19281), the intervention experiment; arms other than their filter are ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattr.attribution.filters import FILTERS
from jaxattr.config import ConfigError, near
from jaxattr.envs.base import Env
from jaxattr.evaluate import STOCHASTIC, evaluate
from jaxattr.lanes import over_lanes, spread_lanes
from jaxattr.studies.replay import RoundData, learning_keys, retrain, score, subset_step
from jaxattr.types import Array
from jaxattr.update import UpdateStep

BASELINE = "none"
MATCHED = "+matched"


@dataclass(frozen=True)
class Arm:
    """A way to choose records and to train on them.

    Attributes:
      rule: name in `attribution.filters.FILTERS`.
      p: share of the negatives to drop, in [0, 1]; None = the run's own (rules that do not read p: no matter).
      training: `compact`: as many minibatches as the kept records fill; `step_matched`: as many as without a filter.
    """

    rule: str
    p: float | None = None
    training: str = "compact"

    @property
    def name(self) -> str:
        """What `parse_arm` reads."""
        p = "" if self.p is None else f":{self.p:g}"
        return self.rule + p + (MATCHED if self.training == "step_matched" else "")


class Outcome(NamedTuple):
    """What one arm made of one round. S lanes, E test episodes."""

    returns: (
        Array  # (S, E) float32, undiscounted, sampled actions; NaN: this lane had stopped, or its training diverged
    )
    kept: Array  # (S,) float32, share of the round's records that were learned from


def parse_arm(text: str) -> Arm:
    """`iif:0.5`, `random:0.5+matched`, `zero` -> `Arm`.

    Raises:
      ConfigError: no such notation, no such rule, or p is out of range; one line.
    """
    rule, colon, number = text.removesuffix(MATCHED).partition(":")
    if rule not in FILTERS:
        raise ConfigError(f"--arms {text}: unknown rule {rule!r}{near(rule, FILTERS)}")
    p = None
    if colon:
        try:
            p = float(number)
        except ValueError:
            p = math.nan
        if not 0 <= p <= 1:
            raise ConfigError(f"--arms {text}: p is {number!r}: must be a number in [0, 1], as in {rule}:0.5")
    return Arm(rule, p, "step_matched" if text.endswith(MATCHED) else "compact")


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """All of them, the baseline first.

    Raises:
      ConfigError: see `parse_arm`; there is none, or one twice.
    """
    arms = [parse_arm(text) for text in texts]
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) < len(names):
        raise ConfigError(f"--arms {' '.join(texts)}: name one or more, each once")
    return (Arm(BASELINE), *(arm for arm in arms if arm.name != BASELINE))


def make_intervention(
    step: UpdateStep, env: Env, arms: Sequence[Arm], *, episodes: int, lanes: int, eval_seed: int | None = None
) -> Callable[[RoundData], dict[str, Outcome]]:
    """Everything that is done to a round, compiled once and used for all rounds of a run.

    Args:
      step, env: of the run.
      arms: see `Arm`. Arms that train in the same way share one program, so that two arms which keep the same records
        end in the very same parameters, bit for bit.
      episodes: E, test episodes per seed and arm.
      lanes: S, the lane axis of the data.
      eval_seed: of the test episodes; None = the run's own.

    Returns:
      (data with a leading lane axis) -> arm name -> `Outcome`.

    Raises:
      ConfigError: `episodes` is not positive.
    """
    if episodes < 1:
        raise ConfigError(f"--episodes is {episodes}: must be 1 or more")
    seed = step.config.eval_seed if eval_seed is None else eval_seed
    scorers = {arm.rule: _scorer(step, arm.rule) for arm in arms}
    targets = {rule: FILTERS[rule].target or step.config.target for rule in scorers}
    shared = {targets[rule]: scorer for rule, scorer in scorers.items()}
    choosers = {arm.name: _chooser(step, arm) for arm in arms}
    kinds = {arm: (arm.training, FILTERS[arm.rule].weighted) for arm in arms}
    players = {kind: _player(subset_step(step, *kind), env, episodes, lanes, seed) for kind in set(kinds.values())}

    def run(data: RoundData) -> dict[str, Outcome]:
        scores = {name: scorer(data) for name, scorer in shared.items() if _is_read(name, arms, targets)}
        nothing = jnp.full(data.records.valid.shape, jnp.nan)
        outcomes = {}
        for arm in arms:
            weights = choosers[arm.name](data, scores.get(targets[arm.rule], nothing))
            kept = jnp.sum(weights > 0, axis=1) / jnp.maximum(jnp.sum(data.records.valid, axis=1), 1)
            outcomes[arm.name] = Outcome(players[kinds[arm]](data, weights), kept)
        return outcomes

    return run


def _is_read(target: str, arms: Sequence[Arm], targets: dict[str, str]) -> bool:
    """Whether some arm's rule reads scores about this target: `none` reads no scores."""
    return any(targets[arm.rule] == target and arm.rule != BASELINE for arm in arms)


def _scorer(step: UpdateStep, rule: str) -> Callable[[RoundData], Array]:
    """(S, N) scores that the rule reads: the recorded ones where the run's own filter asked for the same."""
    c = step.config
    wanted, had = FILTERS[rule].target or c.target, FILTERS[c.filter].target or c.target
    if c.needs_scores and wanted == had:
        return lambda data: data.scores
    return jax.jit(over_lanes(lambda data: score(step, data, target=wanted)))


def _chooser(step: UpdateStep, arm: Arm) -> Callable[[RoundData, Array], Array]:
    """((S, N) data, scores) -> (S, N) weights, with the key that the run's own filter used up."""
    rule_step = dataclasses.replace(step, config=step.config.replace(filter=arm.rule, warmup_rounds=0))

    def lane(data: RoundData, scores: Array) -> Array:
        settings = data.settings if arm.p is None else data.settings._replace(p=jnp.float32(arm.p))
        records = data.records
        if FILTERS[arm.rule].monte_carlo:  # the run has them only where its own filter read them
            records = rule_step.advantages(data.before, data.rollout, data.settings)[0]
        return rule_step.filter(data.before, records, scores, learning_keys(data.before)[1], settings)

    return jax.jit(over_lanes(lane))


def _player(step: UpdateStep, env: Env, episodes: int, lanes: int, seed: int) -> Callable[[RoundData, Array], Array]:
    """(data, weights) -> (S, E) test returns after training on the records of positive weight."""

    def lane(data: RoundData, weights: Array) -> Array:
        params, _ = retrain(step, data, weights)
        played = evaluate(step.nets, env, params, data.after.obs_stats, jax.random.key(seed), episodes)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params)]))
        return jnp.where(data.before.alive & finite, played.episode_return[STOCHASTIC], jnp.nan)

    return jax.jit(spread_lanes(over_lanes(lane), lanes, (True, True), 0))
