"""What is scored together: records, segments (a stretch of one environment's rows), episodes.

A unit's score is the sum of its records' scores, because its gradient is the sum of theirs. Units are given as one id
per record, the index of the unit's first record, so that ids are < N whatever the cuts; -1 = belongs to no unit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxattr.types import Array

UNITS = ("record", "segment", "episode")


def segment_ids(done: Array) -> Array:
    """(T, B) bool ends of episodes -> (T * B,) int32 segment ids: rows t * B + b, cut after every end and at T."""
    steps, envs = done.shape
    starts = jnp.concatenate([jnp.ones((1, envs), bool), done[:-1]])
    first = jax.lax.cummax(jnp.where(starts, jnp.arange(steps)[:, None], 0), axis=0)
    return (first * envs + jnp.arange(envs)).reshape(-1).astype(jnp.int32)


def unit_sums(x: Array, ids: Array) -> Array:
    """(N, ...) values -> (N, ...) sums, that of a unit in the row of its id (other rows: 0)."""
    return jax.ops.segment_sum(x, ids, num_segments=ids.shape[0])


def unit_ids(kind: str, segment: Array, done: Array, started: Array, valid: Array) -> Array:
    """One unit id per record.

    Args:
      kind: `record`, `segment`, or `episode`: segments that hold a whole episode, from its first step to its last.
      segment: (N,) from `segment_ids`.
      done: (N,) bool, the record ends its episode.
      started: (B,) bool, environment b was at the start of an episode when the round began.
      valid: (N,) bool; other rows belong to no unit.

    Raises:
      ValueError: no such kind.
    """
    if kind not in UNITS:
        raise ValueError(f"unit is {kind!r}: must be one of {', '.join(UNITS)}")
    n, envs = segment.shape[0], started.shape[0]
    ids = jnp.arange(n, dtype=jnp.int32) if kind == "record" else segment
    if kind == "episode":
        ended = unit_sums(done.astype(jnp.int32), segment)[segment] > 0
        from_start = (segment >= envs) | started[segment % envs]  # a later segment began after an end
        ids = jnp.where(ended & from_start, ids, -1)
    return jnp.where(valid, ids, -1)
