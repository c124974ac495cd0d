"""PPO's objective for ONE record. The mean over a minibatch is the caller's, and a visible line there."""

from __future__ import annotations

import jax.numpy as jnp

from jaxattr.types import Array


def clipped_policy_loss(log_ratio: Array, advantage: Array, clip_range: Array) -> tuple[Array, Array, Array]:
    """-min(r A, clip(r, 1 - c, 1 + c) A), with r = exp(log pi - log pi_old).

    `advantage` and the old log-probability are constants under differentiation.

    Returns:
      (loss, kl, clipped): kl = (r - 1) - log r (Schulman's low-variance estimate, nats), clipped = 1 outside the range.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7.
    """
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range)
    loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    return loss, (ratio - 1.0) - log_ratio, (ratio != clipped).astype(ratio.dtype)


def value_loss(value: Array, old_value: Array, return_: Array, clip_range: Array | None) -> Array:
    """(V - R)^2, or with clipping max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2).

    Source: the clipped form is OpenAI baselines' `ppo2`; off by default because it rarely helps (arXiv 2006.05990).
    """
    error = (value - return_) ** 2
    if clip_range is None:
        return error
    near = old_value + jnp.clip(value - old_value, -clip_range, clip_range)
    return jnp.maximum(error, (near - return_) ** 2)
