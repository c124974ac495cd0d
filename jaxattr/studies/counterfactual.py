"""How far can a score be believed? Retrain the round on many subsets of its records and see what really happens.

For subsets S_1 .. S_M of a round's units, drawn at random, and a target f:

    predicted_m = sum over i in S_m of score_i          measured_m = f(theta after the round trained on S_m)

Their Spearman correlation is the linear datamodeling score (LDS; Park et al. 2023, arXiv 2303.14186). Everything else
of the round stays: start parameters, optimiser state, and the order in which what is left is visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.attribution.targets import TARGETS, action_target
from jaxattr.attribution.units import unit_sums
from jaxattr.config import ConfigError
from jaxattr.envs.base import Env
from jaxattr.evaluate import STOCHASTIC, evaluate
from jaxattr.lanes import spread_lanes
from jaxattr.studies.replay import RoundData, retrain, score, subset_step, units
from jaxattr.types import Array, Params, PRNGKey
from jaxattr.update import UpdateStep

TRAININGS = ("compact", "step_matched", "masked")
"""How a subset is trained on: minibatches of what stays, fewer of them; as many as without a filter; or every record in
its old minibatch, the dropped ones' losses multiplied by 0 (nothing else changes, not even the normalisation)."""

CHUNK = 16
"""Subsets retrained at a time on one device."""

Effect = Callable[[Params, RoundData], Array]


class Subsets(NamedTuple):
    """Which records each retraining learns from."""

    weights: Array  # (M, N) float32, 0 or 1
    kept: int | None  # records in each, where all have the same number


def draw_subsets(key: PRNGKey, ids: Array, valid: Array, count: int, share: float) -> Subsets:
    """`count` random subsets that keep round(share * units) units each. Valid rows of no unit are always kept.

    Args:
      key: used up.
      ids: (N,) unit ids, -1 = no unit.
      valid: (N,) bool.
      count: M.
      share: of the units to keep, in (0, 1).

    Raises:
      ConfigError: share out of range, or fewer than 2 units.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share is {share:g}: must be between 0 and 1")
    host = np.asarray(ids)
    names, index = np.unique(host, return_inverse=True)
    first = int(names[0] == -1)  # position 0 stands for "no unit", if there is such a row
    number = len(names) - first
    if number < 2:
        raise ConfigError(f"this round has {number} such units: subsets need 2 or more")
    keep = min(max(round(share * number), 1), number - 1)

    def draw(key: PRNGKey) -> Array:
        chosen = jax.random.permutation(key, number) < keep
        chosen = jnp.concatenate([jnp.ones(first, bool), chosen])
        return (chosen[jnp.asarray(index)] & valid).astype(jnp.float32)

    weights = jax.jit(jax.vmap(draw))(jax.random.split(key, count))
    sizes = np.unique(host[np.asarray(valid)], return_counts=True)[1][first:]
    same = first == 0 and len(set(sizes.tolist())) == 1
    return Subsets(weights, int(sizes[0]) * keep if same else None)


def make_effects(
    step: UpdateStep, data: RoundData, env: Env, actions: dict[str, int], episodes: int
) -> dict[str, Effect]:
    """What is measured after a retraining: name -> ((params, data) -> ()).

    `return`: f_ret over the whole round, with its raw advantages. One per entry of `actions`: log pi of that record's
    action. `true_return`, if `episodes` > 0: the mean return of that many fresh episodes, the same ones each time.

    Args:
      step, data, env: of the round's lane.
      actions: name -> record index.
      episodes: 0 = do not evaluate.

    Raises:
      ConfigError: there is no such record.
    """
    r, log_prob = data.records, step.nets.log_prob
    for name, i in actions.items():
        if not 0 <= i < r.valid.shape[0] or not bool(r.valid[i]):
            raise ConfigError(f"{name}: this round has no record {i} (0 to {r.valid.shape[0] - 1})")
    # The data comes as an argument, so that other rounds of the same run find the same compiled program.
    effects: dict[str, Effect] = {"return": lambda p, d: TARGETS["return"](log_prob, p, d.records)}
    for name, i in actions.items():
        effects[name] = lambda p, d, i=i: log_prob(p, d.records.obs[i], d.records.action[i])
    if episodes:

        def true_return(params: Params, data: RoundData) -> Array:
            key = jax.random.key(step.config.eval_seed)
            played = evaluate(step.nets, env, params, data.after.obs_stats, key, episodes)
            return jnp.mean(played.episode_return[STOCHASTIC])

        effects["true_return"] = true_return
    return effects


def make_retrainer(
    step: UpdateStep, effects: dict[str, Effect], training: str, kept: int | None, chunk: int = CHUNK
) -> Callable[[RoundData, Array], dict[str, Array]]:
    """One compiled program: (data, weights (M, N)) -> name -> (M,) effects; M must divide among the host devices.

    Memory follows `chunk`, the number of subsets in work at a time; the numbers do not depend on it.

    Raises:
      ConfigError: unknown training.
    """
    if training not in TRAININGS:
        raise ConfigError(f"training is {training!r}: must be one of {', '.join(TRAININGS)}")
    masked = training == "masked"
    whole = step.config.records_per_round if step.collector.all_valid else None
    visited = whole if masked else kept
    learner = subset_step(step, "compact" if masked else training, weighted=masked)

    def one(data: RoundData, weights: Array) -> dict[str, Array]:
        keep = data.records.valid if masked else None  # all of them are visited, whatever the subset
        params, _ = retrain(learner, data, weights, keep=keep, kept=visited)
        return {name: f(params, data) for name, f in effects.items()}

    def many(data: RoundData, weights: Array) -> dict[str, Array]:
        return jax.lax.map(lambda w: one(data, w), weights, batch_size=min(chunk, weights.shape[0]))

    def run(data: RoundData, weights: Array) -> dict[str, Array]:
        return spread_lanes(many, weights.shape[0], (False, True), {name: 0 for name in effects})(data, weights)

    return jax.jit(run)


def run_blocks(
    run: Callable[[RoundData, Array], dict[str, Array]], data: RoundData, weights: Array, block: int
) -> Iterator[dict[str, Array]]:
    """Effects of (M, N) weights, `block` subsets per call (the last call repeats some, so that all have one shape)."""
    devices = len(jax.devices())
    block = -(-min(block, weights.shape[0]) // devices) * devices
    for begin in range(0, weights.shape[0], block):
        part = weights[begin : begin + block]
        whole = part[jnp.arange(block) % part.shape[0]]
        yield {name: values[: part.shape[0]] for name, values in run(data, whole).items()}


def predictions(scores: Array, subsets: Array) -> Array:
    """(N,) or (K, N) scores, (M, N) subsets -> (M,) or (K, M) summed scores of what each subset keeps."""
    return jnp.nan_to_num(scores) @ subsets.T


def ranked_units(scores: np.ndarray | Array, ids: Array) -> tuple[np.ndarray, np.ndarray]:
    """(U,) unit ids, lowest summed score first, and (U,) those sums."""
    names = np.unique(np.asarray(ids)[np.asarray(ids) >= 0])
    sums = np.asarray(unit_sums(jnp.asarray(scores), ids))[names]
    order = np.argsort(sums, kind="stable")
    return names[order], sums[order]


def without_each(ids: Array, valid: Array, chosen: np.ndarray) -> Array:
    """(K, N) weights: everything but one unit, for K unit ids."""
    return ((ids[None] != jnp.asarray(chosen)[:, None]) & valid).astype(jnp.float32)


def without_share(
    scores: np.ndarray, ids: Array, valid: Array, share: float, draws: int, seed: int
) -> dict[str, Array]:
    """Weights that drop a share of the units: the highest scored, the lowest scored, or random ones (`draws` times).

    Args:
      scores: (N,), summed per unit.
      ids, valid: (N,).
      share: of the units, rounded down, at least one.
      draws: how many random drops.
      seed: of those.

    Returns:
      `top` (1, N), `bottom` (1, N), `random` (draws, N).
    """
    host, (order, _) = np.asarray(ids), ranked_units(scores, ids)
    count = max(1, int(share * len(order)))
    rng = np.random.default_rng(seed)
    drops = {
        "top": [order[-count:]],
        "bottom": [order[:count]],
        "random": [rng.choice(order, count, replace=False) for _ in range(draws)],
    }
    keep = lambda dropped: (~np.isin(host, dropped) & np.asarray(valid)).astype(np.float32)
    return {name: jnp.asarray(np.stack([keep(d) for d in sets])) for name, sets in drops.items()}


def score_all(
    step: UpdateStep, data: RoundData, variants: Mapping[str, Mapping[str, Any]], unit: str, record: int | None = None
) -> dict[str, Array]:
    """Scores of one lane in many ways, name -> (N,): about the action of `record`, or (None) about the return.

    Args:
      step, data: of the round.
      variants: name -> options of `replay.score`; one that sets a target is left out where `record` is given.
      unit: see `attribution.units`.
      record: index of a record.
    """
    if record is not None:
        variants = {name: options for name, options in variants.items() if "target" not in options}
    same: dict[str, dict[str, Any]] = {}  # ways that come to the same are computed once
    alias = {}
    for name, options in variants.items():
        full = {"checkpoint": "start", "metric": step.config.score_metric, "normalize": step.config.score_normalize}
        full = {**full, **options}
        if full["checkpoint"] != "start":
            full["normalize"] = None
        alias[name] = repr(sorted(full.items(), key=str))
        same[alias[name]] = full

    def compute(data: RoundData, obs: Array, action: Array) -> dict[str, Array]:
        target = "return" if record is None else action_target(obs, action)
        return {k: score(step, data, **{"target": target, "unit": unit, **options}) for k, options in same.items()}

    i = record or 0
    scores = jax.jit(compute)(data, data.records.obs[i], data.records.action[i])
    return {name: scores[alias[name]] for name in variants}


def unit_table(step: UpdateStep, data: RoundData, kind: str) -> tuple[Array, int]:
    """(N,) unit ids of one lane and how many units there are."""
    ids = units(step, data, kind)
    return ids, len(np.unique(np.asarray(ids)[np.asarray(ids) >= 0]))
