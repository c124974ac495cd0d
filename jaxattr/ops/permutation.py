"""Random visiting orders without a sort.

XLA's CPU sort dominates a PPO round if every epoch sorts random numbers. Instead each epoch applies a keyed
bijection of the index range (a Feistel network), which costs a few integer operations per index, and squeezes out
the indices that are not wanted. `tests/test_permutation.py` holds the plain oracle and the statistical checks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxattr.types import Array, PRNGKey

_ROUNDS = 6


def _mix(x: Array, key: Array) -> Array:
    """32-bit integer hash (the finaliser of MurmurHash3 with the round key mixed in)."""
    x = x ^ key
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bijection(index: Array, round_keys: Array, bits: int) -> Array:
    """A keyed bijection of {0 .. 2**bits - 1}.

    An unbalanced Feistel network: the two halves take turns in being exclusive-ored with a hash of the other, which
    can be undone whatever the hash, so no two indices ever collide.

    Args:
      index: uint32, any shape.
      round_keys: (6,) uint32.
      bits: 1 to 32.
    """
    low_bits = bits // 2
    high_bits = bits - low_bits
    low, high = index & jnp.uint32((1 << low_bits) - 1), index >> low_bits
    for r in range(_ROUNDS):
        if r % 2 == 0:
            high = high ^ (_mix(low, round_keys[r]) & jnp.uint32((1 << high_bits) - 1))
        else:
            low = low ^ (_mix(high, round_keys[r]) & jnp.uint32((1 << low_bits) - 1))
    return (high << low_bits) | low


def orders(key: PRNGKey, n: int, epochs: int, keep: Array | None = None) -> Array:
    """An independent random order of the kept indices for every epoch.

    Args:
      key: used up.
      n: number of records N.
      epochs: number of orders E.
      keep: (N,) bool, or None = all. The first `sum(keep)` entries of a row are the kept indices in random order;
        what follows them is unspecified (in range, never to be read as a record).

    Returns:
      (E, N) int32.
    """
    bits = max(2, (n - 1).bit_length())
    round_keys = jax.random.bits(key, (epochs, _ROUNDS), jnp.uint32)
    visit = jax.vmap(lambda k: bijection(jnp.arange(1 << bits, dtype=jnp.uint32), k, bits).astype(jnp.int32))(
        round_keys
    )
    if keep is None and n == 1 << bits:
        return visit
    wanted = visit < n
    if keep is not None:
        wanted &= keep[jnp.minimum(visit, n - 1)]
    place = jnp.where(wanted, jnp.cumsum(wanted, axis=1) - 1, n)  # n = out of range: dropped by the scatter
    return jax.vmap(lambda p, v: jnp.zeros(n, jnp.int32).at[p].set(v, mode="drop", unique_indices=False))(place, visit)
