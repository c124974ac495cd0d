"""Influence scores from their definition: one gradient per record, one record at a time. Knows no `jaxattr`."""

import jax
import numpy as np


def flat(tree):
    """All leaves as one float64 vector."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def scores(
    log_prob_fn, params, obs, action, loss_advantage, target_advantage, entropy_fn=None, entropy_weight=0.0, count=None
):
    """score_i = <grad (A^_i log pi_i + c H_i), v> with v = mean_j A_j grad log pi_j; returns (scores, v).

    `count` cuts the gradient vectors to those entries (a bool vector), for scores over part of the parameters.
    """
    n = len(loss_advantage)
    grad_log_prob = jax.jit(jax.grad(log_prob_fn))  # jit for speed only: each call sees one record
    grad_entropy = None if entropy_fn is None else jax.jit(jax.grad(entropy_fn))
    gradients = [flat(grad_log_prob(params, obs[i], action[i])) for i in range(n)]
    direction = np.zeros_like(gradients[0])
    for i in range(n):
        direction += float(target_advantage[i]) * gradients[i] / n
    if count is not None:
        direction = np.where(count, direction, 0.0)
    out = []
    for i in range(n):
        objective = float(loss_advantage[i]) * gradients[i]
        if grad_entropy is not None:
            objective = objective + entropy_weight * flat(grad_entropy(params, obs[i], action[i]))
        out.append(float(objective @ direction))
    return np.array(out), direction
