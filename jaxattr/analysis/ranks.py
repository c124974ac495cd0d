"""Rank correlation with an interval."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxattr.analysis.stats import Floats, interval_of

FEWEST = 20
"""Subsets (or units) below which no interval is given."""


def ranks(x: ArrayLike) -> Floats:
    """Ranks along the last axis, ties averaged, from 1."""
    x = np.asarray(x, np.float64)
    order = np.argsort(x, axis=-1, kind="stable")
    placed = np.take_along_axis(x, order, -1)
    n = x.shape[-1]
    position = np.broadcast_to(np.arange(n), x.shape)
    new = np.concatenate([np.ones((*x.shape[:-1], 1), bool), placed[..., 1:] != placed[..., :-1]], -1)
    last = np.concatenate([new[..., 1:], np.ones((*x.shape[:-1], 1), bool)], -1)
    first_of = np.maximum.accumulate(np.where(new, position, 0), -1)
    last_of = np.flip(np.minimum.accumulate(np.flip(np.where(last, position, n), -1), -1), -1)
    out = np.empty(x.shape)
    np.put_along_axis(out, order, (first_of + last_of) / 2 + 1, -1)
    return out


def spearman(x: ArrayLike, y: ArrayLike) -> Any:
    """Spearman's rank correlation along the last axis; NaN where one side is constant."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    size = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.where(size > 0, (a * b).sum(-1) / np.where(size > 0, size, 1.0), np.nan)[()]


def spearman_interval(
    x: ArrayLike, y: ArrayLike, confidence: float = 0.95, replications: int = 1_000, seed: int = 0
) -> tuple[float, float, float]:
    """Spearman's correlation and its percentile bootstrap interval over pairs.

    Returns:
      (value, low, high); low and high are NaN with fewer than `FEWEST` pairs.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    value = float(spearman(x, y)) if len(x) > 1 else np.nan
    if len(x) < FEWEST or np.isnan(value):
        return value, np.nan, np.nan
    rng = np.random.default_rng(seed)
    draws = []
    for size in [min(100, replications - i) for i in range(0, replications, 100)]:  # bounds memory
        index = rng.integers(len(x), size=(size, len(x)))
        draws.append(spearman(x[index], y[index]))
    values = np.concatenate(draws)
    low, high = interval_of(values[np.isfinite(values)], confidence)
    return value, low, high
