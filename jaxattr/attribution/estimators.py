"""Two ways to the same numbers: score_i = <grad of record i's objective, direction>, for all records.

An estimator is `(objective, params, records, direction, chunk_size) -> (N,)`, where `objective(params, record) -> ()`
is written for one record and `records` is a pytree with a leading N axis. It knows nothing about PPO.
`jaxattr.testing.check_estimator` compares a new one with `per_sample` on a small problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxattr.ops import trees
from jaxattr.types import Array, Params

Objective = Callable[[Params, Any], Array]
Estimator = Callable[[Objective, Params, Any, Params, int | None], Array]

PER_SAMPLE_CHUNK = 256
"""Gradients held at a time where the user sets no chunk size."""


def map_records(f: Callable[[Any], Any], records: Any, chunk_size: int | None) -> Any:
    """vmap `f` over the leading axis, at most `chunk_size` records at a time (None: all at once).

    A last short chunk is its own, smaller call, so every record is visited once whatever the sizes.
    """
    n = jax.tree.leaves(records)[0].shape[0]
    if chunk_size is None or chunk_size >= n:
        return jax.vmap(f)(records)
    return jax.lax.map(f, records, batch_size=chunk_size)


def jvp_scores(
    objective: Objective, params: Params, records: Any, direction: Params, chunk_size: int | None = None
) -> Array:
    """All scores as ONE forward-mode product: d/de objective_i(params + e * direction) at e = 0.

    No gradient per record exists at any time; memory is that of a forward pass over `chunk_size` records.
    """

    def score(record: Any) -> Array:
        return jax.jvp(lambda p: objective(p, record), (params,), (direction,))[1]

    return map_records(score, records, chunk_size)


def per_sample_scores(
    objective: Objective, params: Params, records: Any, direction: Params, chunk_size: int | None = None
) -> Array:
    """The definition: each record's own gradient, then its dot product with `direction`.

    Memory is `chunk_size` times the parameter count; None means 256 records at a time.
    """

    def score(record: Any) -> Array:
        return trees.dot(jax.grad(objective)(params, record), direction)

    return map_records(score, records, PER_SAMPLE_CHUNK if chunk_size is None else chunk_size)


ESTIMATORS: dict[str, Estimator] = {"jvp": jvp_scores, "per_sample": per_sample_scores}
