"""Which records are learned from. A rule maps scores to weights of a fixed shape: 0 = dropped, 1 = kept.

To add a rule, write `(scores, records, key, round, p, min_keep) -> (N,) weights >= 0` and register it; `train
--filter` and `compare --filters` then take its name. Rules obey three conventions: an invalid row always gets 0, a
score of 0 is not negative, and at least `min_keep` records (one minibatch) stay. `jaxattr.testing.check_filter`
tests them.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.core
import jax.numpy as jnp

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


FILTERS: dict[str, Rule] = {"none": keep_all, "iif": iif, "zero": zero, "random": random}
UNWEIGHTED = {"none", "iif", "zero", "random"}
"""Rules whose weights are only 0 and 1: their losses need no weighting."""


def register_filter(name: str, rule: Rule, *, weighted: bool = True) -> None:
    """Make `rule` available as `Config(filter=name)` and on the command line.

    Args:
      name: not yet taken.
      rule: see the module's docstring.
      weighted: False if the weights are only 0 and 1 (saves a product in the loss).

    Raises:
      ValueError: the name is taken or `rule` cannot be called.
    """
    if name in FILTERS or not callable(rule):
        raise ValueError(
            f"filter {name!r} is already registered" if name in FILTERS else f"filter {name!r}: no callable"
        )
    FILTERS[name] = rule
    if not weighted:
        UNWEIGHTED.add(name)


def keep_mask(scores: Any, *, rule: str = "iif", p: float = 0.125, key: PRNGKey | None = None) -> Array:
    """Which records a rule keeps, without the trainer.

    Args:
      scores: (N,) finite.
      rule: a rule that needs scores only: none, iif, zero, random.
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
