"""What a score is about: scalar functions of the parameters that we want to see rise.

To add a target, write `(log_prob_fn, params, records) -> ()` and register it; the trainer then takes its name.
`log_prob_fn(params, obs, action)` is for ONE record; `records.valid` marks the rows that are records.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxattr.types import Array, Params, Records

LogProbFn = Callable[[Params, Array, Array], Array]
Target = Callable[[LogProbFn, Params, Records], Array]


def return_target(log_prob_fn: LogProbFn, params: Params, records: Records) -> Array:
    """f_ret(theta) = mean over valid records of A_j log pi_theta(a_j given s_j).

    The advantages are constants; the buffer itself is the validation set.

    Source: Hu et al. 2025 (arXiv 2505.19281), section 3.
    """
    log_prob = jax.vmap(log_prob_fn, (None, 0, 0))(params, records.obs, records.action)
    count = jnp.maximum(jnp.sum(records.valid), 1)
    return jnp.sum(jnp.where(records.valid, records.advantage * log_prob, 0.0)) / count


def action_target(obs: Array, action: Array) -> Target:
    """f_act(theta) = log pi_theta(action given obs) at one chosen pair (obs as the network sees it)."""

    def target(log_prob_fn: LogProbFn, params: Params, records: Records) -> Array:
        return log_prob_fn(params, obs, action)

    return target


TARGETS: dict[str, Target] = {"return": return_target}
"""Beside these, `gradient` (the mean of the records' own objectives) and `gradient_loo` (the same without the unit that
is scored) are known to `UpdateStep.score`: they are made of the objective, not of a function of the records."""

OF_OBJECTIVE = ("gradient", "gradient_loo")


def register_target(name: str, target: Target) -> None:
    """Make `target` available to the trainer as `Config(target=name)`.

    Raises:
      ValueError: the name is taken or `target` cannot be called.
    """
    if name in TARGETS or not callable(target):
        raise ValueError(
            f"target {name!r} is already registered" if name in TARGETS else f"target {name!r}: no callable"
        )
    TARGETS[name] = target
