"""TracIn over a whole round: every record's influence summed over the optimiser steps it took part in.

    I_i = sum over steps j with record i in minibatch j of  < M grad L_i(theta_j), grad f(theta_j) >

computed inside the very loop that trains, with one forward-mode product per minibatch. L_i is PPO's clipped objective
of record i, with its entropy term, its advantage as the minibatch normalised it, and its weight; the learning rate and
the minibatch's 1 / m are the same for all records and left out.

Source: Pruthi et al. 2020 (arXiv 2002.08484); Hu et al. 2025 (arXiv 2505.19281), eq. 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxattr.attribution.influence import in_metric
from jaxattr.types import Array, Params, Records


@dataclass(frozen=True)
class TracIn:
    """Watches the epochs (`UpdateStep.optimize(..., watch=...)`) and sums influence per record.

    Attributes:
      objective: (params, record, weight) -> (), what the step on one record climbs.
      gradient: params -> grad f, for the target f.
      refresh: `step`: exact, grad f at every step; `epoch`: at the first step of each epoch, then kept.
      metric: see `influence`; None = ones.
    """

    objective: Callable[[Params, Records, Array], Array]
    gradient: Callable[[Params], Params]
    refresh: str = "step"
    metric: Params | None = None

    def init(self, params: Params, n: int) -> Any:
        """(sums (N,), direction)."""
        direction = None if self.refresh == "step" else jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros(n), direction

    def see(
        self, carried: Any, params: Params, rows: Array, batch: Records, weights: Array | None, first: Array
    ) -> Any:
        """Add this minibatch's scores to its records' sums."""
        sums, direction = carried
        if self.refresh == "step":
            along = self._direction(params)
        else:
            along = direction = jax.lax.cond(first, self._direction, lambda _: direction, params)
        weights = jnp.ones(rows.shape[0]) if weights is None else weights
        objectives = lambda p: jax.vmap(self.objective, (None, 0, 0))(p, batch, weights)
        scores = jax.jvp(objectives, (params,), (along,))[1]
        return sums.at[rows].add(scores), direction

    def _direction(self, params: Params) -> Params:
        return in_metric(self.gradient(params), self.metric)
