"""Point estimates and bootstrap intervals over seeds: numpy only, saved results in, plain numbers out.

Axis letters: `S` seeds (runs), `K` rounds, `T` tasks, `R` bootstrap replications.

Conventions, the same in every function here:

* The unit that is resampled is a whole seed, with its whole curve. Rounds of one seed are never resampled.
* Intervals are percentile bootstrap intervals: the (1 - c) / 2 and (1 + c) / 2 quantiles of the replicated statistic.
* An interval needs two seeds. With fewer its bounds are `(nan, nan)`: NaN bounds are the flag "no interval", never
  "no spread", so a comparison of single runs still prints its means.
* Percentile intervals are too narrow for few seeds: of normal data a 95% interval covers about 83% of the time with 5
  seeds, 89% with 8, 92% with 20. The conventions of the field are kept; read intervals of few seeds accordingly.
* A NaN or infinity is a seed without a value (not evaluated, or stopped). Interval functions leave such seeds out and,
  where they return an `n`, it counts the seeds that were used. The pooled aggregates (`iqm`,
  `stratified_bootstrap_interval`, `probability_of_improvement`) do not: there a missing score must be decided on by the
  caller, not skipped.

Source: Agarwal et al., "Deep RL at the Edge of the Statistical Precipice", NeurIPS 2021 (arXiv 2108.13264), section 4.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[..., Any]

_BLOCK = 4_000_000  # numbers held at a time by one block of replications (32 MB)


class Estimate(NamedTuple):
    """A mean over seeds with its interval. `low` and `high` are NaN when `n < 2`."""

    mean: float
    low: float
    high: float
    n: int


class CurveBand(NamedTuple):
    """A mean curve with pointwise bounds, each (K,). NaN where too few seeds have a value."""

    mean: Floats
    low: Floats
    high: Floats


def iqm(scores: ArrayLike, axis: int | tuple[int, ...] | None = None) -> Any:
    """Interquartile mean: the mean of what is left after dropping the lowest and the highest quarter.

        n scores, g = floor(n / 4):  iqm = mean of the sorted scores g, ..., n - g - 1  (from 0)

    Equals `scipy.stats.trim_mean(scores, 0.25)`; IQM of 1, ..., 7, 100 is 4.5.

    Args:
      scores: any shape, any finite range; usually normalised scores, runs x tasks.
      axis: axes to pool. None pools all of them, which is the convention for runs x tasks (not a mean of per-task
        IQMs).

    Returns:
      A float for `axis=None`, else an array without the pooled axes. NaN if any pooled score is NaN.

    Raises:
      ValueError: there is nothing to average.

    Source: Agarwal et al. 2021, section 4.3.
    """
    x = np.asarray(scores, np.float64)
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(a % x.ndim for a in axes)
    kept = tuple(a for a in range(x.ndim) if a not in axes)
    flat = x.transpose(kept + axes).reshape(*(x.shape[a] for a in kept), -1)
    n = flat.shape[-1]
    if n == 0:
        raise ValueError("iqm needs at least one score, got none")
    cut = n // 4
    middle = np.sort(flat, axis=-1)[..., cut : n - cut].mean(axis=-1)
    middle = np.where(np.isnan(flat).any(axis=-1), np.nan, middle)  # a sort alone would trim the NaN away
    return float(middle) if axis is None else middle


def bootstrap_interval(
    values: ArrayLike,
    statistic: Statistic = np.mean,
    confidence: float = 0.95,
    replications: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic of one number per seed.

    Args:
      values: (S,), one number per seed; NaN = seed without a value, left out.
      statistic: of the values, (S,) -> float. If it takes `axis` (as `np.mean`, `np.median`, `iqm` do) all replications
        are computed at once, else one call each.
      confidence: c in (0, 1).
      replications: R >= 1, number of resamples.
      seed: of the resampling; equal seeds give equal bounds.

    Returns:
      (low, high); (nan, nan) for fewer than two values.

    Raises:
      ValueError: values are not one-dimensional, or confidence or replications are out of range.
    """
    x = _finite_seeds(values, "values")
    _check_bootstrap(confidence, replications)
    if x.size < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    draws = np.concatenate(
        [
            _apply(statistic, x[rng.integers(x.size, size=(block, x.size))], -1)
            for block in _blocks(replications, x.size)
        ]
    )
    return interval_of(draws, confidence)


def stratified_bootstrap_interval(
    scores: ArrayLike,
    *,
    runs_axis: int,
    tasks: Sequence[str],
    statistic: Statistic = iqm,
    confidence: float = 0.95,
    replications: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of an aggregate over tasks; strata = tasks, runs are resampled within each.

    A matrix does not say which of its axes holds the runs, and the wrong one gives a collapsed or a meaningless
    interval (google-research/rliable#20). So both axes are named by the caller: `runs_axis` has no default, and `tasks`
    must name the entries of the other axis. A matrix and its transpose with the other `runs_axis` give the same bounds;
    the wrong `runs_axis` is refused because the names do not fit (a square matrix rests on `runs_axis` alone). One run
    per task is refused as well: there would be nothing to resample, and the interval would be a point.

    Args:
      scores: (S, T) for `runs_axis=0`, (T, S) for `runs_axis=1`; normalised scores, all finite.
      runs_axis: 0 or 1, the axis along which runs (seeds) of one task lie.
      tasks: T task names, in the order of the other axis.
      statistic: of the matrix with runs first, (S, T) -> float. If it takes `axis` (as `iqm`, `np.mean` and `np.median`
        do) it is called once with axes (-2, -1), else once per replication.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      (low, high).

    Raises:
      ValueError: not a matrix, `tasks` does not fit the other axis, fewer than two runs, or a NaN score.

    Source: Agarwal et al. 2021, section 4.1.
    """
    x = np.asarray(scores, np.float64)
    _check_bootstrap(confidence, replications)
    if x.ndim != 2:
        raise ValueError(f"scores must be a matrix of runs and tasks, got shape {x.shape}; one task: use shape (S, 1)")
    if runs_axis not in (0, 1):
        raise ValueError(f"runs_axis must be 0 or 1, got {runs_axis!r}")
    x = x if runs_axis == 0 else x.T
    runs, num_tasks = x.shape
    if isinstance(tasks, str) or len(tasks) != num_tasks:
        raise ValueError(
            f"with runs_axis={runs_axis} scores have {runs} runs and {num_tasks} tasks, but tasks names "
            f"{1 if isinstance(tasks, str) else len(tasks)}: is the matrix transposed?"
        )
    if runs < 2:
        raise ValueError(
            f"scores have {runs} run(s) of {num_tasks} task(s): an interval needs 2 or more; is runs_axis right?"
        )
    if not np.isfinite(x).all():
        raise ValueError("scores hold a NaN or infinity: drop that run from every task or give it a value")
    rng = np.random.default_rng(seed)
    columns = np.arange(num_tasks)
    draws = np.concatenate(
        [
            _apply(statistic, x[rng.integers(runs, size=(block, runs, num_tasks)), columns], (-2, -1))
            for block in _blocks(replications, x.size)
        ]
    )
    return _percentiles(draws, confidence)


def mean_estimate(values: ArrayLike, confidence: float = 0.95, replications: int = 10_000, seed: int = 0) -> Estimate:
    """Mean over seeds with its bootstrap interval and the number of seeds used.

    Args:
      values: (S,), NaN = seed without a value, left out.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      (mean, low, high, n); the mean is NaN for n = 0, the bounds for n < 2.
    """
    x = _finite_seeds(values, "values")
    low, high = bootstrap_interval(x, np.mean, confidence, replications, seed)
    return Estimate(float(x.mean()) if x.size else math.nan, low, high, int(x.size))


def paired_difference(
    a: ArrayLike, b: ArrayLike, confidence: float = 0.95, replications: int = 10_000, seed: int = 0
) -> Estimate:
    """Mean of a_s - b_s over seeds s, with a bootstrap interval over the differences.

    Entry s of both must come from the same seed (same initial weights, same environment draws): pairing takes the
    spread between seeds out of the difference. A seed without a value in either is left out.

    Args:
      a: (S,) values of one arm.
      b: (S,) values of the other, same seeds in the same order.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      (mean, low, high, n), n = pairs used; bounds are NaN for n < 2.

    Raises:
      ValueError: the shapes differ or are not (S,).
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"a and b must be (S,) arrays over the same seeds, got shapes {x.shape} and {y.shape}")
    return mean_estimate(x - y, confidence, replications, seed)


def independent_difference(
    a: ArrayLike, b: ArrayLike, confidence: float = 0.95, replications: int = 10_000, seed: int = 0
) -> Estimate:
    """mean(a) - mean(b) for arms with different seeds; each arm is resampled on its own.

    Args:
      a: (S_a,) values, NaN = left out.
      b: (S_b,) values, NaN = left out.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      (mean, low, high, n), n = the smaller arm's number of seeds; bounds are NaN for n < 2.
    """
    x, y = _finite_seeds(a, "a"), _finite_seeds(b, "b")
    _check_bootstrap(confidence, replications)
    n = int(min(x.size, y.size))
    mean = float(x.mean() - y.mean()) if n else math.nan
    if n < 2:
        return Estimate(mean, math.nan, math.nan, n)
    rng = np.random.default_rng(seed)
    draws = resample_counts(x.size, replications, rng) @ x / x.size
    draws = draws - resample_counts(y.size, replications, rng) @ y / y.size
    return Estimate(mean, *_percentiles(draws, confidence), n)


def bootstrap_curve(curves: ArrayLike, confidence: float = 0.95, replications: int = 2_000, seed: int = 0) -> CurveBand:
    """Mean learning curve with a pointwise bootstrap band; whole curves are resampled.

    The band covers each round by itself with probability c, not the whole curve at once.

    Args:
      curves: (S, K), one row per seed; NaN where a seed was not evaluated or has stopped.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      (mean, low, high), each (K,). A round's mean is over the seeds that have a value there, and so is each
      replication's (replications that drew none of them are left out of the quantiles). The mean is NaN where no seed
      has a value, the band where fewer than two have.

    Raises:
      ValueError: curves are not a matrix.
    """
    x = np.asarray(curves, np.float64)
    _check_bootstrap(confidence, replications)
    if x.ndim != 2:
        raise ValueError(f"curves must be (S, K), one row per seed, got shape {x.shape}")
    seeds, rounds = x.shape
    present = np.isfinite(x)
    have = present.sum(axis=0)
    mean = mean_curve(x)
    low, high = np.full(rounds, np.nan), np.full(rounds, np.nan)
    tails = [50 * (1 - confidence), 50 * (1 + confidence)]
    counts = resample_counts(seeds, replications, np.random.default_rng(seed)) if seeds else np.zeros((replications, 0))
    banded = np.flatnonzero(have >= 2)
    width = max(1, _BLOCK // replications)
    for start in range(0, banded.size, width):
        columns = banded[start : start + width]
        means = resampled_means(counts, x[:, columns])
        full = have[columns] == seeds
        low[columns[full]], high[columns[full]] = np.percentile(means[:, full], tails, axis=0)
        for k, column in zip(columns[~full], means[:, ~full].T, strict=True):
            low[k], high[k] = np.nanpercentile(column, tails)
    return CurveBand(mean, low, high)


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """Chance that a random run of X scores higher than a random run of Y on one task; a tie counts one half.

        P(X > Y) = 1 / (n_x n_y) * sum_ij [x_i > y_j] + 1/2 [x_i = y_j]    (Mann-Whitney U over n_x n_y)

    Several tasks: average the per-task values.

    Args:
      x: (n_x,) scores.
      y: (n_y,) scores.

    Returns:
      A probability, 0.5 = no improvement. NaN if any score is NaN.

    Raises:
      ValueError: an array is empty or not one-dimensional.

    Source: Agarwal et al. 2021, section 4.3.
    """
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if a.ndim != 1 or b.ndim != 1 or not a.size or not b.size:
        raise ValueError(f"x and y must be non-empty (n,) arrays of one task's scores, got {a.shape} and {b.shape}")
    if np.isnan(a).any() or np.isnan(b).any():
        return math.nan
    ordered = np.sort(b)
    below = np.searchsorted(ordered, a, side="left")
    not_above = np.searchsorted(ordered, a, side="right")
    return float((below + not_above).sum() / (2 * a.size * b.size))


# -- pieces shared with the efficiency metrics -----------------------------------------------------------------------
def mean_curve(curves: ArrayLike) -> Floats:
    """Mean over the seeds that have a value, (S, K) -> (K,); NaN where none has."""
    x = np.asarray(curves, np.float64)
    return resampled_means(np.ones((1, x.shape[0])), x)[0]


def resample_counts(seeds: int, replications: int, rng: np.random.Generator) -> Floats:
    """How often each seed is drawn in each of R resamples of size S with replacement: (R, S), rows sum to S."""
    return rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=replications).astype(np.float64)


def resampled_means(counts: Floats, curves: Floats) -> Floats:
    """Mean curve of each resample over the seeds that have a value: (R, S), (S, K) -> (R, K); NaN where none has."""
    present = np.isfinite(curves)
    weight = counts @ present.astype(np.float64)
    return np.where(weight > 0, counts @ np.where(present, curves, 0.0) / np.maximum(weight, 1.0), np.nan)


def interval_of(draws: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of replicated statistics (R,); those without a value are left out, (nan, nan) if all are."""
    draws = draws[np.isfinite(draws)]
    return _percentiles(draws, confidence) if draws.size else (math.nan, math.nan)


def _percentiles(draws: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.percentile(draws, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)


def _finite_seeds(values: ArrayLike, name: str) -> Floats:
    x = np.asarray(values, np.float64)
    if x.ndim != 1:
        raise ValueError(f"{name} must be one number per seed, shape (S,), got shape {x.shape}")
    return x[np.isfinite(x)]


def _check_bootstrap(confidence: float, replications: int) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence!r}")
    if replications < 1:
        raise ValueError(f"replications must be at least 1, got {replications!r}")


def _blocks(replications: int, size: int) -> list[int]:
    """Split R replications of `size` numbers each into blocks that fit in memory."""
    block = max(1, _BLOCK // max(size, 1))
    return [min(block, replications - start) for start in range(0, replications, block)]


def _apply(statistic: Statistic, samples: Floats, axes: int | tuple[int, ...]) -> Floats:
    """The statistic of each of the R leading entries of `samples`, vectorised if it takes `axis`."""
    try:
        vectorised = "axis" in inspect.signature(statistic).parameters
    except (TypeError, ValueError):
        vectorised = False
    if vectorised:
        return np.asarray(statistic(samples, axis=axes), np.float64)
    return np.array([float(statistic(sample)) for sample in samples])
