"""The three action distributions, written for ONE observation.

A distribution is a small frozen object that interprets the policy network's raw output `head`. What is stored as a
record's `action` is always what `log_prob` was computed from: the unclipped, pre-squash value. `to_env` turns it
into what the environment receives, so the two can never disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxattr.types import Array, Box, Discrete, PRNGKey

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Categorical:
    """Softmax over `n` actions; `head` = logits (n,); actions are () int32."""

    n: int
    action_shape = ()
    action_dtype = jnp.int32

    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Array:
        """Gumbel noise (*shape, n) for `sample`. Uses up `key`."""
        return jax.random.gumbel(key, (*shape, self.n))

    def sample(self, head: Array, noise: Array) -> Array:
        """argmax of logits + Gumbel noise: an exact draw from the softmax."""
        return jnp.argmax(head + noise, axis=-1).astype(jnp.int32)

    def mode(self, head: Array) -> Array:
        """The most likely action (lowest index among ties)."""
        return jnp.argmax(head, axis=-1).astype(jnp.int32)

    def log_prob(self, head: Array, action: Array) -> Array:
        """log softmax(head)[action], nats; finite for every finite head."""
        # A one-hot product instead of an index: its derivative is a product too, which XLA fuses on every device.
        shifted = head - jax.lax.stop_gradient(jnp.max(head, axis=-1))
        chosen = jnp.sum(jnp.where(jnp.arange(self.n) == action, shifted, 0.0), axis=-1)
        return chosen - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))

    def entropy(self, head: Array, action: Array) -> Array:
        """-sum p log p, nats, in [0, log n]."""
        del action
        log_p = jax.nn.log_softmax(head)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def to_env(self, action: Array) -> Array:
        """The environment receives the index itself."""
        return action


@dataclass(frozen=True)
class Gaussian:
    """Diagonal Gaussian, clipped into the environment's bounds only on the way out.

    `head` = (mean (A,), log_std (A,)); actions are (A,) float32 and unclipped.
    """

    box: Box
    action_dtype = jnp.float32

    @property
    def action_shape(self) -> tuple[int, ...]:
        """(A,)"""
        return (self.box.size,)

    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Array:
        """Standard normal (*shape, A). Uses up `key`."""
        return jax.random.normal(key, (*shape, self.box.size))

    def sample(self, head: tuple[Array, Array], noise: Array) -> Array:
        """mean + std * noise."""
        mean, log_std = head
        return mean + jnp.exp(log_std) * noise

    def mode(self, head: tuple[Array, Array]) -> Array:
        """The mean."""
        return head[0]

    def log_prob(self, head: tuple[Array, Array], action: Array) -> Array:
        """Sum over dimensions of log N(action; mean, std), nats."""
        mean, log_std = head
        z = (action - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * _LOG_2PI, axis=-1)

    def entropy(self, head: tuple[Array, Array], action: Array) -> Array:
        """Sum over dimensions of log std + (1 + log 2 pi) / 2, nats (of the unclipped Gaussian)."""
        del action
        return jnp.sum(head[1] + 0.5 * (1.0 + _LOG_2PI), axis=-1)

    def to_env(self, action: Array) -> Array:
        """Clip into the bounds."""
        return jnp.clip(action, jnp.asarray(self.box.low), jnp.asarray(self.box.high))


@dataclass(frozen=True)
class TanhGaussian(Gaussian):
    """Diagonal Gaussian squashed by tanh and scaled onto finite bounds.

    The stored action is the pre-squash value u, so nothing ever has to invert tanh: with half-width w,
    log pi(u) = log N(u; mean, std) - sum log(w (1 - tanh(u)^2)), computed as 2 (log 2 - u - softplus(-2u)).
    """

    def mode(self, head: tuple[Array, Array]) -> Array:
        """The mean of the pre-squash Gaussian (the median of the action)."""
        return head[0]

    def log_prob(self, head: tuple[Array, Array], action: Array) -> Array:
        """Log density of the *squashed* action, from its pre-squash value, nats."""
        return super().log_prob(head, action) - self._log_det(action)

    def entropy(self, head: tuple[Array, Array], action: Array) -> Array:
        """One-sample estimate H(N) + log|det|, differentiable through u = mean + std * eps.

        There is no closed form. eps is recovered from the stored action and held fixed, so a record needs no random
        number of its own; the estimate is unbiased under the collecting policy.
        """
        mean, log_std = head
        eps = jax.lax.stop_gradient((action - mean) * jnp.exp(-log_std))
        return super().entropy(head, action) + self._log_det(mean + jnp.exp(log_std) * eps)

    def to_env(self, action: Array) -> Array:
        """low + (tanh(u) + 1) (high - low) / 2."""
        low, high = jnp.asarray(self.box.low), jnp.asarray(self.box.high)
        return low + 0.5 * (jnp.tanh(action) + 1.0) * (high - low)

    def _log_det(self, action: Array) -> Array:
        half = 0.5 * (jnp.asarray(self.box.high) - jnp.asarray(self.box.low))
        slope = 2.0 * (math.log(2.0) - action - jax.nn.softplus(-2.0 * action))
        return jnp.sum(slope + jnp.log(half), axis=-1)


Distribution = Categorical | Gaussian | TanhGaussian


def make_distribution(action: Discrete | Box, squash: bool) -> Distribution:
    """The distribution for an action space.

    Raises:
      ValueError: squash asked for discrete or unbounded actions.
    """
    if isinstance(action, Discrete):
        if squash:
            raise ValueError("squash is for continuous actions; this environment's are discrete")
        return Categorical(action.n)
    if squash and not action.bounded:
        raise ValueError("squash needs finite action bounds; this environment has none")
    return TanhGaussian(action) if squash else Gaussian(action)
