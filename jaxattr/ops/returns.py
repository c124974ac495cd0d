"""Generalised advantage estimation on one trajectory."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxattr.types import Array


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    gamma: Array | float,
    gae_lambda: Array | float,
) -> tuple[Array, Array]:
    """Advantages and one-step TD errors of ONE environment's stretch of time.

        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - terminated_t) * (1 - truncated_t) * A_{t+1},   A_T = 0

    Termination zeroes the bootstrap; truncation keeps it but cuts the sum. V(s'_t) is the value of the *true* next
    observation, so nothing here ever reads the first observation of the next episode.

    Args:
      reward, value, next_value: (T,) float.
      terminated, truncated: (T,) bool.
      gamma, gae_lambda: scalars in [0, 1].

    Returns:
      (advantage, td_error), both (T,).

    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16; the split of the two flags follows Pardo et al. 2018.
    """
    chex.assert_rank([reward, value, next_value, terminated, truncated], 1)
    chex.assert_equal_shape([reward, value, next_value, terminated, truncated])
    td_error = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * jnp.where(terminated | truncated, 0.0, 1.0)

    def backward(following, step):
        delta, keep = step
        # A cut keeps out whatever follows, also a NaN that 0 * NaN would let through.
        advantage = delta + jnp.where(keep > 0, keep * following, 0.0)
        return advantage, advantage

    _, advantage = jax.lax.scan(backward, jnp.zeros_like(td_error[0]), (td_error, decay), reverse=True)
    return advantage, td_error
