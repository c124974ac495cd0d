"""Standardisation and running moments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxattr.types import Array, RunningStats

EPS = 1e-8


def standardize(x: Array, weights: Array | None = None, ddof: int = 1) -> Array:
    """(x - mean) / (std + 1e-8) over all entries of `x` (N,), or those with weight > 0.

    Args:
      x: (N,) float.
      weights: (N,) bool or None; entries with 0 take no part in the moments and come out as 0.
      ddof: 0 or 1; the standard deviation divides by (count - ddof).

    Returns:
      (N,). Fewer than two entries have no spread: they come out as 0, never as NaN.
    """
    mask = jnp.ones_like(x) if weights is None else weights.astype(x.dtype)
    x = x if weights is None else jnp.where(mask > 0, x, 0.0)  # what takes no part may be NaN
    count = jnp.sum(mask)
    mean = jnp.sum(x * mask) / jnp.maximum(count, 1)
    centred = (x - mean) * mask
    std = jnp.sqrt(jnp.sum(centred**2) / jnp.maximum(count - ddof, 1))
    return jnp.where(count >= 2, centred / (std + EPS), 0.0)


def standardize_chunks(x: Array, chunk: int, ddof: int = 1, weights: Array | None = None) -> Array:
    """`standardize` each run of `chunk` consecutive entries by itself.

    A last short chunk is standardised by itself; if it has one entry it joins the chunk before.

    Args:
      x: (N,) float, in the order in which it is to be cut.
      chunk: entries per chunk, 2 or more.
      ddof: see `standardize`.
      weights: see `standardize`.

    Returns:
      (N,).
    """
    n = x.shape[0]
    mask = jnp.ones(n, bool) if weights is None else weights.astype(bool)
    whole = n // chunk * chunk
    if n - whole == 1:
        whole -= chunk
    if whole <= 0:
        return standardize(x, mask, ddof)
    head = jax.vmap(lambda a, m: standardize(a, m, ddof))(x[:whole].reshape(-1, chunk), mask[:whole].reshape(-1, chunk))
    if whole == n:
        return head.reshape(-1)
    return jnp.concatenate([head.reshape(-1), standardize(x[whole:], mask[whole:], ddof)])


def init_stats(shape: tuple[int, ...]) -> RunningStats:
    """Mean 0, variance 1, nothing seen."""
    return RunningStats(
        mean=jnp.zeros(shape, jnp.float32), var=jnp.ones(shape, jnp.float32), count=jnp.zeros((), jnp.uint32)
    )


def update_stats(stats: RunningStats, batch: Array, mask: Array) -> RunningStats:
    """Merge a batch into running moments (Chan et al. 1979), with weights rather than sums.

        w = n / (count + n);  mean' = mean + w d;  var' = (1 - w) var + w var_n + w (1 - w) d^2,  d = mean_n - mean

    The counter is an integer, exact up to 2**32 - 1 where it stays (a float32 counter would stop at 2**24); the
    variance is stored itself, so no sum of squares grows without bound.

    Args:
      stats: moments of shape (*shape,).
      batch: (M, *shape) float32.
      mask: (M,) bool, rows to count.
    """
    n = jnp.sum(mask, dtype=jnp.uint32)
    rows = mask.reshape(mask.shape + (1,) * (batch.ndim - 1))
    size = jnp.maximum(n, 1).astype(jnp.float32)
    mean_n = jnp.sum(jnp.where(rows, batch, 0.0), axis=0) / size
    var_n = jnp.sum(jnp.where(rows, (batch - mean_n) ** 2, 0.0), axis=0) / size
    total = stats.count + n
    total = jnp.where(total < n, jnp.uint32(0xFFFFFFFF), total)  # saturate instead of wrapping around
    w = n.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
    d = mean_n - stats.mean
    mean = stats.mean + w * d
    var = (1.0 - w) * stats.var + w * var_n + w * (1.0 - w) * d**2
    return RunningStats(mean=mean, var=var, count=total)


def normalize(stats: RunningStats, x: Array, clip: float = 10.0) -> Array:
    """(x - mean) / sqrt(var + 1e-8), clipped to [-clip, clip]; the identity before anything was seen."""
    return jnp.where(stats.count > 0, jnp.clip((x - stats.mean) * jax.lax.rsqrt(stats.var + EPS), -clip, clip), x)


def scale(stats: RunningStats, x: Array, clip: float = 10.0) -> Array:
    """x / sqrt(var + 1e-8), clipped to [-clip, clip] (rewards: no centring); identity before anything was seen."""
    return jnp.where(stats.count > 0, jnp.clip(x * jax.lax.rsqrt(stats.var + EPS), -clip, clip), x)
