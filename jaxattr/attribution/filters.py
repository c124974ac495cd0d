"""Which records are learned from. A rule maps scores to weights of a fixed shape: 0 = dropped, 1 = kept.

To add a rule, write `(scores, records, key, round, p, min_keep) -> (N,) weights >= 0` and register it; `train
--filter` and `compare --filters` then take its name. Rules obey three conventions: an invalid row always gets 0, a
score of 0 is not negative, and at least `min_keep` records (one minibatch) stay. `jaxattr.testing.check_filter`
tests them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.core
import jax.numpy as jnp

from jaxattr.attribution.units import unit_sums
from jaxattr.types import Array, PRNGKey, Records


class Rule(Protocol):
    """A filter rule."""

    def __call__(self, scores: Array, records: Records, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
        """(N,) scores -> (N,) weights. Uses up `key`."""
        ...


def drop_count(scores: Array, valid: Array, p: Array | float, min_keep: int = 0) -> Array:
    """floor(p * number of valid negatives), at most what leaves `min_keep` records; () int32.

    Products within 3e-7 (relative, a few float32 roundings) of a whole number count as that number: 0.3 * 10 is 3.
    """
    negative = jnp.sum((scores < 0) & valid)
    product = jnp.asarray(p, jnp.float32) * negative.astype(jnp.float32)
    count = jnp.floor(product * (1.0 + 3e-7)).astype(jnp.int32)
    return jnp.clip(count, 0, jnp.maximum(jnp.sum(valid) - min_keep, 0)).astype(jnp.int32)


def drop_lowest(priority: Array, valid: Array, count: Array) -> Array:
    """(N,) bool: valid, and not among the `count` valid records of lowest priority (ties: lowest index goes first)."""
    order = jnp.argsort(jnp.where(valid, priority, jnp.inf), stable=True)
    dropped = jnp.zeros(priority.shape, bool).at[order].set(jnp.arange(priority.shape[0]) < count)
    return valid & ~dropped


def keep_all(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`none`: learn from every record."""
    return records.valid.astype(jnp.float32)


def iif(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`iif`: drop exactly floor(p * number of negatives), most negative first, ties by record index.

    Source: Hu et al. 2025 (arXiv 2505.19281), Algorithm 1. Different from the authors' code, which averages the
    scores of equal records and keeps or drops them together: here each record has an index of its own.
    """
    return drop_lowest(scores, records.valid, drop_count(scores, records.valid, p, min_keep)).astype(jnp.float32)


def zero(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`zero`: drop every record with a negative score (p is not used)."""
    return drop_lowest(scores, records.valid, drop_count(scores, records.valid, 1.0, min_keep)).astype(jnp.float32)


def random(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`random`: drop as many as `iif` would, drawn uniformly: the control for learning from less."""
    priority = jax.random.uniform(key, scores.shape)
    return drop_lowest(priority, records.valid, drop_count(scores, records.valid, p, min_keep)).astype(jnp.float32)


def dtv(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`dtv`: drop whole segments whose scores sum to less than 0, the score being about the round's mean gradient.

    A segment is a stretch of one environment's rows, cut at episode and rollout end (p is not used). Where less than
    `min_keep` records would stay, the records of the least negative segments stay, too.

    Source: DTV / DTV-Loo (2026); `dtv_loo` leaves the segment itself out of the mean that it is scored against.
    """
    of_segment = unit_sums(jnp.where(records.valid, scores, 0.0), records.segment)[records.segment]
    return zero(of_segment, records, key, round, p, min_keep)


def reweight(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`reweight`: drop every record whose score is not positive, weight the rest by score / mean (p is not used).

    Fewer than `min_keep` positive ones: the `min_keep` best are kept, each with weight 1.

    Source: I-PPO (arXiv 2604.01597), where the unit is an episode and the target a validation set.
    """
    scores = jnp.where(records.valid & jnp.isfinite(scores), scores, 0.0)
    positive = jnp.maximum(scores, 0.0)
    count = jnp.sum(positive > 0)
    weights = positive / jnp.maximum(jnp.sum(positive) / jnp.maximum(count, 1), jnp.finfo(scores.dtype).tiny)
    spare = jnp.maximum(jnp.sum(records.valid) - min_keep, 0)
    best = drop_lowest(scores, records.valid, spare).astype(scores.dtype)
    return jnp.where(count >= min_keep, weights, best)


def advantage_sign(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`advantage_sign`: drop the share p of the records whose advantage has the wrong sign, the worst first.

    Wrong: the product of the GAE advantage and the Monte-Carlo one (same rollout, lambda = 1) is negative; the more so,
    the worse. Scores are not read. Source: a baseline of Hu et al. 2025.
    """
    return iif(records.advantage * records.mc_advantage, records, key, round, p, min_keep)


def td_error(scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
    """`td_error`: drop as many records as `iif` would, those of the smallest absolute TD error.

    The idea of prioritised replay: what was predicted well teaches little. Scores only say how many are dropped.
    """
    count = drop_count(scores, records.valid, p, min_keep)
    return drop_lowest(jnp.abs(records.td_error), records.valid, count).astype(jnp.float32)


@dataclass(frozen=True)
class Filter:
    """A rule and what it asks of the scores; callable like the rule itself."""

    rule: Rule
    weighted: bool = True  # False: weights are only 0 and 1, and the loss needs no product
    target: str | None = None  # the only target whose scores the rule can read; None: as configured
    monte_carlo: bool = False  # reads records.mc_advantage
    gated: bool = False  # p is multiplied by how far the targets of two halves of the buffer agree

    def __call__(self, scores: Array, records: Any, key: PRNGKey, round: Array, p: Array, min_keep: int) -> Array:
        """The rule's weights (N,)."""
        return self.rule(scores, records, key, round, p, min_keep)


FILTERS: dict[str, Filter] = {
    "none": Filter(keep_all, weighted=False),
    "iif": Filter(iif, weighted=False),
    "zero": Filter(zero, weighted=False),
    "random": Filter(random, weighted=False),
    "dtv": Filter(dtv, weighted=False, target="gradient"),
    "dtv_loo": Filter(dtv, weighted=False, target="gradient_loo"),
    "reweight": Filter(reweight),
    "advantage_sign": Filter(advantage_sign, weighted=False, monte_carlo=True),
    "td_error": Filter(td_error, weighted=False),
    "gated": Filter(iif, weighted=False, gated=True),
}


def register_filter(
    name: str,
    rule: Rule,
    *,
    weighted: bool = True,
    target: str | None = None,
    monte_carlo: bool = False,
    gated: bool = False,
) -> None:
    """Make `rule` available as `Config(filter=name)` and on the command line.

    Args:
      name: not yet taken.
      rule: see the module's docstring.
      weighted: False if the weights are only 0 and 1 (saves a product in the loss).
      target: the target that the rule's scores must be about, whatever the configuration says; None = as configured.
      monte_carlo: the rule reads `records.mc_advantage` (NaN otherwise: it costs a pass over the rollout).
      gated: p is multiplied by the agreement of the targets of two halves of the buffer (`UpdateStep.agreement`).

    Raises:
      ValueError: the name is taken or `rule` cannot be called.
    """
    if name in FILTERS or not callable(rule):
        raise ValueError(
            f"filter {name!r} is already registered" if name in FILTERS else f"filter {name!r}: no callable"
        )
    FILTERS[name] = Filter(rule, weighted, target, monte_carlo, gated)


def keep_mask(scores: Any, *, rule: str = "iif", p: float = 0.125, key: PRNGKey | None = None) -> Array:
    """Which records a rule keeps, without the trainer.

    Args:
      scores: (N,) finite.
      rule: a rule that needs scores only: none, iif, zero, random, reweight.
      p: share of the negatives to drop, in [0, 1].
      key: for `random`.

    Returns:
      (N,) bool.

    Raises:
      ValueError: unknown rule, p out of range, no key for `random`, or a score that is not finite.
    """
    from jaxattr.attribution.scores import _check_finite

    scores = jnp.asarray(scores)
    if scores.ndim != 1:
        raise ValueError(f"scores have shape {scores.shape}: must be (N,)")
    if rule not in FILTERS:
        raise ValueError(f"rule is {rule!r}: must be one of {', '.join(FILTERS)}")
    if FILTERS[rule].gated:
        raise ValueError(
            f"rule {rule!r} needs the target's gradients: keep_mask knows scores only, use it in the trainer"
        )
    if not isinstance(p, jax.core.Tracer) and not 0 <= p <= 1:
        raise ValueError(f"p is {p}: must be in [0, 1]")
    if rule == "random" and key is None:
        raise ValueError("rule 'random' needs a key")
    _check_finite("score", scores)
    key = jax.random.key(0) if key is None else key
    records: Any = _Only(jnp.ones(scores.shape, bool))
    weights = FILTERS[rule](scores, records, key, jnp.int32(0), jnp.float32(p), 0)
    return weights > 0


class _Only:
    """Stands in for records where nothing but their validity is known."""

    def __init__(self, valid: Array):
        self.valid = valid

    def __getattr__(self, name: str) -> Array:
        raise ValueError(f"this rule reads records.{name}: keep_mask knows scores only, use it in the trainer")
