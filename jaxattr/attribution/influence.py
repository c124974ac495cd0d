"""Scores of one round's records: about which target, in which metric, with or without the unit itself.

    score_i = < M grad L_i(theta), grad f(theta) >

M is a diagonal metric: ones, zeros where parameters do not count, or an optimiser's preconditioner. It stands on either
side of the product alike, so it is applied once, to the target's gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxattr.attribution.estimators import ESTIMATORS, Objective
from jaxattr.attribution.units import unit_sums
from jaxattr.ops import trees
from jaxattr.types import Array, Params


def mean_gradient(objective: Objective, params: Params, data: Any, valid: Array) -> Params:
    """Gradient of the mean objective over valid records: the targets `gradient` and `gradient_loo`."""

    def mean(p: Params) -> Array:
        each = jax.vmap(objective, (None, 0))(p, data)
        return jnp.sum(jnp.where(valid, each, 0.0)) / jnp.maximum(jnp.sum(valid), 1)

    return jax.grad(mean)(params)


def in_metric(gradient: Params, metric: Params | None) -> Params:
    """M grad f, the direction that records' gradients are multiplied with."""
    return gradient if metric is None else jax.tree.map(jnp.multiply, metric, gradient)


def influence(
    objective: Objective,
    params: Params,
    data: Any,
    gradient: Params,
    metric: Params | None = None,
    *,
    estimator: str = "jvp",
    chunk_size: int | None = None,
) -> tuple[Array, Array]:
    """Scores (N,) and the length of the direction they are measured along, ().

    Args:
      objective, data: see `record_objective`.
      gradient: of the target.
      metric: like params, >= 0; None = ones.
      estimator, chunk_size: see `estimators`.
    """
    direction = in_metric(gradient, metric)
    return ESTIMATORS[estimator](objective, params, data, direction, chunk_size), trees.norm(direction)


def without_own_unit(
    scores: Array,
    objective: Objective,
    params: Params,
    data: Any,
    ids: Array,
    num_envs: int,
    metric: Params | None = None,
) -> Array:
    """Turn scores against the mean gradient into scores against the mean of the OTHER units' records.

    With G = mean of n gradients, u = the sum of the m gradients of unit U, s_i = <g_i, G>:

        sum_{i in U} < g_i, (n G - u) / (n - m) >  =  ( n sum s_i - |u|^2 ) / (n - m)

    Each record of U carries an equal part of |u|^2, so the unit's sum is exact.

    Args:
      scores: (N,) s_i.
      ids: (N,) unit ids (`attribution.units`), -1 = no unit.
      num_envs: B; record t * B + b follows record (t - 1) * B + b.
    """
    counted = ids >= 0
    size = jnp.where(counted, unit_sums(counted.astype(scores.dtype), ids)[ids], 0.0)
    square = unit_square_norms(objective, params, data, ids, num_envs, metric)[ids]
    n = jnp.sum(counted)
    own = square / jnp.maximum(size, 1.0)
    return jnp.where(counted & (n > size), (n * scores - own) / jnp.maximum(n - size, 1.0), 0.0)


def unit_square_norms(
    objective: Objective, params: Params, data: Any, ids: Array, num_envs: int, metric: Params | None = None
) -> Array:
    """|sum of a unit's gradients|^2 in the row of its id, (N,); other rows are 0.

    A unit's rows follow each other in one environment, so B running sums are all the memory it takes (B * P floats).
    """
    n = ids.shape[0]
    by_time = lambda x: x.reshape(n // num_envs, num_envs, *x.shape[1:])
    weight = None if metric is None else trees.flatten(metric)

    def step(total: Array, row: tuple[Any, Array, Array]) -> tuple[Array, Array]:
        records, unit, index = row
        gradients = jax.vmap(lambda r: trees.flatten(jax.grad(objective)(params, r)))(records)
        total = jnp.where((unit == index)[:, None], 0.0, total) + jnp.where((unit >= 0)[:, None], gradients, 0.0)
        return total, jnp.sum(total**2 if weight is None else weight * total**2, axis=1)

    start = jnp.zeros((num_envs, trees.flatten(params).shape[0]))
    index = jnp.arange(n, dtype=ids.dtype)
    _, running = jax.lax.scan(step, start, (jax.tree.map(by_time, data), by_time(ids), by_time(index)))
    last = jax.ops.segment_max(index, ids, num_segments=n)  # the row in which a unit's sum is complete
    return jnp.where(last >= 0, running.reshape(-1)[jnp.maximum(last, 0)], 0.0)
