"""Which records made an action likely? One observation s and action a, followed through the recorded rounds of a run.

    f_act(theta) = log pi_theta(a given s)        I_i = influence of the round's record i on f_act

s is kept as the environment gave it. In every round it is normalised with the statistics that the round's own records
were normalised with, so target and records are seen through the same eyes; `before` and `after` differ in parameters
only. Records also come with the policy's view of them, the features of its last hidden layer at the round's start, for
asking whether similar records have similar scores (`jaxattr.analysis.behaviour`).

Source: Hu et al. 2025 (arXiv 2505.19281), the analysis of learning over time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.attribution.targets import action_target
from jaxattr.config import ConfigError
from jaxattr.networks import Networks
from jaxattr.ops import trees
from jaxattr.ops.statistics import normalize
from jaxattr.studies.replay import Round, RoundData, score
from jaxattr.types import Array, Params
from jaxattr.update import UpdateStep

_LAST_LAYER = re.compile(r"policy/(.*/)?out/kernel")
"""Path of the last layer's weights in the networks that jaxattr builds."""


class Chosen(NamedTuple):
    """The observation and action that are followed."""

    number: int  # of the round that it was taken from
    index: int  # of the record there
    obs: Array  # (*obs_shape) as the environment gave it, not normalised
    action: Array  # () int32 or (A,) float32


class Seen(NamedTuple):
    """One round in the light of the chosen observation and action. N records, H features."""

    log_prob_before: Array  # () nats; with continuous actions a log density
    log_prob_after: Array  # () nats, with the parameters after the round
    scores: Array  # (N,) influence on f_act
    features: Array  # (N, H) of the records' observations, at the parameters before the round


def parse_record(text: str) -> tuple[int, int]:
    """`12:345` -> (round 12, record 345).

    Raises:
      ConfigError: no such notation.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not match:
        raise ConfigError(f"--record {text}: must be ROUND:RECORD, such as 12:345")
    return int(match[1]), int(match[2])


def choose(rounds: Sequence[Round], seed_index: int, number: int, index: int) -> Chosen:
    """Record `index` (time step * environments + environment) of recorded round `number`.

    Raises:
      ConfigError: the round was not recorded, or it has no such record.
    """
    found = [r for r in rounds if r.number == number]
    if not found:
        known = ", ".join(str(r.number) for r in rounds)
        raise ConfigError(f"--record {number}:{index}: round {number} was not recorded (recorded: {known})")
    data = found[0].lane(seed_index)
    count = data.records.valid.shape[0]
    if not 0 <= index < count or not bool(data.records.valid[index]):
        raise ConfigError(f"--record {number}:{index}: round {number} has no such record (0 to {count - 1})")
    obs = data.rollout.obs.reshape((-1, *data.rollout.obs.shape[2:]))[index]
    return Chosen(number, index, obs, data.records.action[index])


def most_risen(first: Round, last: Round, seed_index: int) -> int:
    """The record of the last round whose action's probability rose most over the rounds: its index.

        pi(a | s) after the last round - pi(a | s) before the first round;   continuous actions: the same of log pi

    Raises:
      ConfigError: no record has a finite probability (this seed had stopped).
    """
    nets, start, end = last.step.nets, first.lane(seed_index).before, last.lane(seed_index)
    obs = end.rollout.obs.reshape((-1, *end.rollout.obs.shape[2:]))
    discrete = jnp.issubdtype(end.records.action.dtype, jnp.integer)

    def log_probs(params: Params, seen: Array) -> Array:
        return jax.vmap(nets.log_prob, (None, 0, 0))(params, seen, end.records.action)

    @jax.jit
    def rises(before: Params, after: Params) -> Array:
        low = log_probs(before, normalize(start.obs_stats, obs))
        high = log_probs(after, end.records.obs)
        return jnp.exp(high) - jnp.exp(low) if discrete else high - low

    rise = rises(start.params, end.after.params)
    known = end.records.valid & jnp.isfinite(rise)
    if not bool(jnp.any(known)):
        raise ConfigError(f"seed index {seed_index}: round {last.number} has no usable record (this seed had stopped)")
    return int(jnp.argmax(jnp.where(known, rise, -jnp.inf)))


def make_viewer(step: UpdateStep) -> Callable[[RoundData, Array, Array], Seen]:
    """One compiled function for all rounds: (one lane's data, raw obs, action) -> `Seen`.

    Scores are computed as the run is configured to (normalisation, metric, estimator), about f_act.
    """

    @jax.jit
    def view(data: RoundData, obs: Array, action: Array) -> Seen:
        seen = normalize(data.before.obs_stats, obs)
        return Seen(
            log_prob_before=step.nets.log_prob(data.before.params, seen, action),
            log_prob_after=step.nets.log_prob(data.after.params, seen, action),
            scores=score(step, data, target=action_target(seen, action)),
            features=features(step.nets, data.before.params, data.records.obs),
        )

    return view


def has_features(params: Params) -> bool:
    """Whether `features` are those of a hidden layer (else: the observations themselves)."""
    return _last_layer(params) is not None


def features(nets: Networks, params: Params, obs: Array) -> Array:
    """(N, H) outputs of the policy's last hidden layer; of networks that jaxattr did not build, the observations.

    With the first output z_0 = h . W[:, 0] + b_0 of the last layer, h = dz_0 / dW[:, 0]: exact, and read off any trunk
    without taking the network apart.

    Args:
      nets, params: the policy.
      obs: (N, *obs_shape), as the network sees it.
    """
    path = _last_layer(params)
    if path is None:
        return obs.reshape((obs.shape[0], -1))
    leaves, tree = jax.tree.flatten(params)
    at = trees.paths(params).index(path)

    def first_output(change: Array, one: Array) -> Array:
        changed = leaves[at].at[:, 0].add(change)
        head = nets.policy(jax.tree.unflatten(tree, [*leaves[:at], changed, *leaves[at + 1 :]]), one)
        return jax.tree.leaves(head)[0][0]

    return jax.vmap(jax.grad(first_output), (None, 0))(jnp.zeros(leaves[at].shape[0]), obs)


def _last_layer(params: Params) -> str | None:
    found = [name for name in trees.paths(params) if _LAST_LAYER.fullmatch(name)]
    return found[0] if len(found) == 1 else None


def extremes(data: RoundData, scores: np.ndarray, count: int) -> dict[str, list[dict[str, Any]]]:
    """The `count` records of highest and of lowest score: `top` (best first), `bottom` (worst first).

    Args:
      data: one lane.
      scores: (N,); NaN and rows that are no records are left out. Ties: lowest index first.
      count: how many of each.
    """
    r = data.records
    usable = np.flatnonzero(np.asarray(r.valid) & np.isfinite(scores))
    envs = data.rollout.obs.shape[1]
    action, reward, advantage, weight = (np.asarray(x) for x in (r.action, r.reward, r.advantage, data.weights))
    raw = np.asarray(data.rollout.obs).reshape((r.valid.shape[0], -1))

    def row(i: int) -> dict[str, Any]:
        return {
            "record": i,
            "time_step": i // envs,
            "environment": i % envs,
            "score": float(scores[i]),
            "action": action[i].tolist(),
            "reward": float(reward[i]),
            "advantage": float(advantage[i]),
            "kept": bool(weight[i] > 0),
            "obs": raw[i].tolist() if raw.shape[1] <= 64 else None,  # an image would only fill the file
        }

    order = {
        name: usable[np.argsort(sign * scores[usable], kind="stable")] for name, sign in (("top", -1), ("bottom", 1))
    }
    return {name: [row(int(i)) for i in indices[:count]] for name, indices in order.items()}
