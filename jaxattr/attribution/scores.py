"""Influence scores: how much a gradient step on each record raises a target. Usable without the trainer.

    score_i = < grad L_i(theta), grad f(theta) >,   L_i = A^_i log pi(a_i|s_i) + c_i H(pi(.|s_i))

at one theta, the collecting policy's, where the probability ratio of PPO's objective is 1. A positive score means
that learning from record i raises f. Whatever couples records (the standardised advantage A^) is a constant here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxattr.attribution.estimators import ESTIMATORS, Objective, map_records
from jaxattr.attribution.targets import LogProbFn, return_target
from jaxattr.ops.statistics import standardize, standardize_chunks
from jaxattr.types import Array, Params, Records

Normalize = Literal["chunk", "buffer", "none"]
EntropyScale = Literal["record", "published"]


def loss_advantage(
    advantage: Array,
    valid: Array,
    normalize: Normalize,
    norm_chunk: int = 64,
    ddof: int = 1,
    order: Array | None = None,
) -> Array:
    """The loss-side advantage A^ (N,): standardised per chunk of the visiting order, over the buffer, or raw.

    Args:
      advantage: (N,) raw.
      valid: (N,) bool; other rows take no part and come out as 0.
      normalize: `chunk` (as published), `buffer` or `none`.
      norm_chunk, ddof: see `jaxattr.ops.statistics`.
      order: (N,) int32, the shuffle in which chunks are cut; None = as given.
    """
    if normalize == "none":
        return jnp.where(valid, advantage, 0.0)
    if normalize == "buffer":
        return standardize(advantage, valid, ddof)
    if order is None:
        return standardize_chunks(advantage, norm_chunk, ddof, valid)
    chunked = standardize_chunks(advantage[order], norm_chunk, ddof, valid[order])
    return jnp.zeros_like(chunked).at[order].set(chunked)


def record_objective(
    log_prob_fn: LogProbFn,
    entropy_fn: Callable[[Params, Array, Array], Array] | None = None,
    entropy_weight: Array | float = 0.0,
) -> Objective:
    """L_i(theta) = A^_i log pi(a_i|s_i) + c H_i of ONE record `(obs, action, A^)`: what a step on it climbs.

    Args:
      log_prob_fn: (params, obs_i, action_i) -> ().
      entropy_fn: (params, obs_i, action_i) -> (), or None.
      entropy_weight: c.
    """

    def objective(params: Params, record: tuple[Array, Array, Array]) -> Array:
        obs, action, advantage = record
        value = advantage * log_prob_fn(params, obs, action)
        return value if entropy_fn is None else value + entropy_weight * entropy_fn(params, obs, action)

    return objective


def influence_scores(
    log_prob_fn: LogProbFn,
    params: Params,
    obs: Any,
    action: Any,
    advantage: Any,
    *,
    target: Callable[[Params], Array] | None = None,
    estimator: Literal["jvp", "per_sample"] = "jvp",
    normalize: Normalize = "chunk",
    norm_chunk: int = 64,
    ddof: int = 1,
    target_normalize: bool = False,
    ent_coef: float = 0.0,
    entropy_fn: Callable[[Params, Array], Array] | None = None,
    entropy_scale: EntropyScale = "record",
    chunk_size: int | None = None,
) -> Array:
    """Score every record of a buffer: does a gradient step on it help (> 0) or harm (< 0) the target?

        score_i = < A^_i grad log pi(a_i|s_i) + c grad H_i, grad f >,   c = ent_coef, or ent_coef / N if "published"

    Args:
      log_prob_fn: (params, obs_i, action_i) -> () log-probability in nats, written for ONE record.
      params: pytree of floats, the collecting policy.
      obs: (N, ...) observations.
      action: (N, ...) actions.
      advantage: (N,) raw advantages; constants under differentiation.
      target: (params) -> (), the scalar that should rise. None = f_ret of these records, mean of A_j log pi_j.
      estimator: `jvp` (one forward-mode product) or `per_sample` (a gradient per record); same numbers.
      normalize: the loss side's advantage: `chunk` (standardised per `norm_chunk` records in the order given, as
        published; the trainer shuffles first), `buffer`, or `none`. A last short chunk is standardised by itself; if
        it has one record it joins the chunk before.
      norm_chunk: 2 or more.
      ddof: 0 or 1, for the standard deviation; 1e-8 is added to it.
      target_normalize: standardise the advantages in f_ret over the buffer (default: raw, as published).
      ent_coef: weight of the entropy bonus; needs `entropy_fn`.
      entropy_fn: (params, obs_i) -> () entropy in nats, for ONE record (an entropy that is estimated from the action
        taken, as a squashed Gaussian's, only exists in the trainer).
      entropy_scale: `record`, or `published`: the authors' code adds the *mean* entropy to a *sum* of policy terms.
      chunk_size: records at a time; bounds memory, never changes a number. None: all (jvp), 256 (per_sample).

    Returns:
      (N,) scores, in the order of the records. A record of advantage 0 scores exactly 0 where A^ = A.

    Raises:
      ValueError: sizes disagree, an option is unknown, a normalisation has one record, or (outside jit) an input or
        a score is not finite; the message names the first such record.

    Source: Hu et al. 2025 (arXiv 2505.19281), section 4 and Algorithm 1.
    """
    obs, action, advantage = jax.tree.map(jnp.asarray, (obs, action, advantage))
    n = advantage.shape[0] if advantage.ndim == 1 else -1
    _check_options(n, obs, action, estimator, normalize, norm_chunk, ddof, ent_coef, entropy_fn, entropy_scale)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: must be 1 or more")
    _check_finite("advantage", advantage)
    valid = jnp.ones(n, bool)
    if target is None:
        wanted = standardize(advantage, ddof=ddof) if target_normalize else advantage
        batch = _bare_records(obs, action, wanted, valid)
        direction = jax.grad(lambda p: return_target(log_prob_fn, p, batch))(params)
    else:
        shape = jax.eval_shape(target, params)
        if getattr(shape, "shape", None) != ():
            raise ValueError(f"target returns {shape}: must return one scalar")
        direction = jax.grad(target)(params)
    objective = record_objective(
        log_prob_fn,
        None if entropy_fn is None or ent_coef == 0 else (lambda p, o, a: entropy_fn(p, o)),
        ent_coef / n if entropy_scale == "published" else ent_coef,
    )
    data = (obs, action, loss_advantage(advantage, valid, normalize, norm_chunk, ddof))
    scores = ESTIMATORS[estimator](objective, params, data, direction, chunk_size)
    _check_finite("score", scores)
    return scores


def per_sample_gradients(
    loss_fn: Callable[[Params, Any], Array], params: Params, records: Any, *, chunk_size: int | None = None
) -> Params:
    """The gradient of each record's own loss, as a pytree like `params` with a leading N axis.

    Args:
      loss_fn: (params, record) -> (), for ONE record.
      params: pytree of floats.
      records: pytree with a leading N axis.
      chunk_size: records differentiated at a time: bounds the working memory (the result itself is N times the
        parameter count); never changes a number.
    """
    return map_records(lambda record: jax.grad(loss_fn)(params, record), records, chunk_size)


def _bare_records(obs: Array, action: Array, advantage: Array, valid: Array) -> Records:
    """Records of which only what a target may read exists."""
    nothing = jnp.zeros_like(advantage)
    return Records(
        obs=obs,
        action=action,
        log_prob=nothing,
        value=nothing,
        reward=nothing,
        advantage=advantage,
        return_=nothing,
        td_error=nothing,
        mc_advantage=nothing,
        segment=jnp.zeros(valid.shape, jnp.int32),
        terminated=~valid,
        truncated=~valid,
        valid=valid,
    )


def _check_options(n, obs, action, estimator, normalize, norm_chunk, ddof, ent_coef, entropy_fn, entropy_scale) -> None:
    if n < 1:
        raise ValueError("advantage must have shape (N,) with N >= 1")
    for name, tree in (("obs", obs), ("action", action)):
        sizes = {x.shape[:1] for x in jax.tree.leaves(tree)}
        if sizes != {(n,)}:
            raise ValueError(f"{name} must have a leading axis of {n}, the number of advantages; got {sorted(sizes)}")
    for name, value, known in (
        ("estimator", estimator, tuple(ESTIMATORS)),
        ("normalize", normalize, ("chunk", "buffer", "none")),
        ("entropy_scale", entropy_scale, ("record", "published")),
        ("ddof", ddof, (0, 1)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: must be one of {', '.join(map(str, known))}")
    if normalize != "none" and (n == 1 or (normalize == "chunk" and norm_chunk < 2)):
        raise ValueError("advantages cannot be standardised over one record: use normalize='none' or larger sizes")
    if isinstance(ent_coef, (int, float)) and ent_coef != 0 and entropy_fn is None:
        raise ValueError("ent_coef is not 0: entropy_fn is needed")


def _check_finite(name: str, x: Array) -> None:
    if isinstance(x, jax.core.Tracer):
        return
    bad = np.flatnonzero(~np.isfinite(np.asarray(x)))
    if bad.size:
        raise ValueError(
            f"{name} of record {bad[0]} is {np.asarray(x)[bad[0]]} ({bad.size} of {x.shape[0]} not finite)"
        )
