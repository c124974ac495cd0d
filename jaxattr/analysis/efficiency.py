"""How much earlier does an arm reach what standard training reaches? SE_ave, SE_peak and RT_peak, with their null.

With m_std(v) and m_arm(v) the first round at which the mean test return (over seeds) of an arm is at least v:

    reduction(v) = 1 - m_arm(v) / m_std(v)          1 = at once, 0 = at the same round, below 0 = later
    SE_ave       = mean of reduction(v) over the levels v of standard training
    SE_peak      = reduction(v) at the highest of them
    RT_peak      = SE_peak with cumulative training seconds in place of rounds

The levels are the strictly increasing records (new running maxima) of standard training's mean curve, its first
evaluated round included. That first level counts too, although nothing can reach it earlier.

These numbers are biased downwards. Standard training's records are picked by their noise, so an arm that is merely
equal, such as other seeds of standard training, gets a negative value on average. Hence `efficiency` takes such a
*null arm* and reports its value beside the arm's: compare an arm with its null, not with 0.

Levels the arm never reaches (within its K rounds) are kept and counted. Its true m_arm is then unknown but at least K +
1, and K + 1 is what is used (seconds: those of one more average round). So such a reduction is an **upper bound**, the
arm's value can only be worse, and dropping the level instead would flatter it more. Whenever `unreached_levels > 0`
(`peak_reached` false for the peak metrics) a value must be shown as "at most".

Source: Hu et al., NeurIPS 2025 (arXiv 2505.19281), their efficiency metrics; null, intervals and the treatment of
unreached levels are ours.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxattr.analysis.stats import Floats, interval_of, mean_curve, resample_counts, resampled_means

METRICS = ("se_ave", "se_peak", "rt_peak")


class Reductions(NamedTuple):
    """Reductions of one mean curve against another, level by level; L levels, increasing."""

    levels: Floats  # (L,) mean test returns
    rounds: Floats  # (L,) reduction in rounds, at most 1
    seconds: Floats  # (L,) reduction in seconds; NaN if no seconds were given
    reached: np.ndarray  # (L,) bool; False: the arm never reached the level, the reduction is an upper bound


def rounds_to_reach(curve: ArrayLike, level: float) -> float:
    """First round, counted from 1, at which the curve is at least `level`.

    Args:
      curve: (K,) return after round 1, ..., K; NaN = not evaluated, never reaches anything.
      level: a return.

    Returns:
      A round in 1, ..., K as a float, or inf if no round reaches the level.

    Raises:
      ValueError: the curve is not one-dimensional or the level is NaN.
    """
    x = np.asarray(curve, np.float64)
    if x.ndim != 1:
        raise ValueError(f"curve must be (K,), the mean over seeds, got shape {x.shape}")
    if math.isnan(level):
        raise ValueError("level must be a number, got nan")
    hits = np.flatnonzero(x >= level)
    return float(hits[0] + 1) if hits.size else math.inf


def reductions(
    std_curve: ArrayLike,
    arm_curve: ArrayLike,
    rounds: ArrayLike | None = None,
    std_seconds: ArrayLike | None = None,
    arm_seconds: ArrayLike | None = None,
) -> Reductions:
    """The reduction in rounds and seconds at every level that standard training reaches.

    Args:
      std_curve: (K,) mean test return of standard training, NaN = not evaluated.
      arm_curve: (K,) that of the arm, evaluated at the same rounds.
      rounds: (K,) round number (from 1) of each entry; default 1, ..., K.
      std_seconds: (K,) cumulative training seconds of standard training.
      arm_seconds: (K,) those of the arm.

    Returns:
      `Reductions` with L <= K levels; L = 0 if standard training was never evaluated.
    """
    std, arm = np.asarray(std_curve, np.float64), np.asarray(arm_curve, np.float64)
    if std.ndim != 1 or std.shape != arm.shape:
        raise ValueError(f"both mean curves must be (K,) over the same rounds, got {std.shape} and {arm.shape}")
    size = std.size
    at = _costs(rounds, size, "rounds") if rounds is not None else np.arange(1.0, size + 1)
    best = np.maximum.accumulate(np.where(np.isnan(std), -np.inf, std))
    records = np.flatnonzero(best > np.concatenate([[-np.inf], best[:-1]]))
    levels = std[records]
    arm_best = np.maximum.accumulate(np.where(np.isnan(arm), -np.inf, arm))
    first = np.searchsorted(arm_best, levels, side="left")  # first entry with arm_best >= level, `size` if none
    in_rounds = 1 - np.append(at, at[-1:] + 1)[first] / at[records]
    if std_seconds is None or arm_seconds is None:
        in_seconds = np.full(levels.shape, np.nan)
    else:
        std_s, arm_s = _costs(std_seconds, size, "std_seconds"), _costs(arm_seconds, size, "arm_seconds")
        one_more = arm_s[-1:] * (at[-1:] + 1) / at[-1:]
        in_seconds = 1 - np.append(arm_s, one_more)[first] / std_s[records]
    return Reductions(levels, in_rounds, in_seconds, first < size)


def efficiency(
    std_curves: ArrayLike,
    arm_curves: ArrayLike,
    *,
    rounds: ArrayLike | None = None,
    std_seconds: ArrayLike | None = None,
    arm_seconds: ArrayLike | None = None,
    null_curves: ArrayLike | None = None,
    null_seconds: ArrayLike | None = None,
    paired: bool = False,
    confidence: float = 0.95,
    replications: int = 2_000,
    seed: int = 0,
) -> dict[str, Any]:
    """SE_ave, SE_peak and RT_peak of an arm against standard training, with intervals, and the null's beside them.

    Intervals are percentile bootstrap intervals over seeds: each replication resamples whole seeds, takes the mean
    curves and computes the metrics anew. Resampled mean curves are noisier than the real ones, so the replications have
    more downward bias than the value itself, which may lie near the upper end of its interval. The null's interval
    has the same bias: compare those two.

    Args:
      std_curves: (S, K) test returns of standard training, NaN = not evaluated.
      arm_curves: (S_arm, K) of the arm at the same rounds.
      rounds: (K,) round number (from 1) of each column; default 1, ..., K.
      std_seconds: (K,) cumulative training seconds of standard training; without seconds RT_peak is NaN.
      arm_seconds: (K,) of the arm.
      null_curves: (S_null, K) of standard training with *other* seeds.
      null_seconds: (K,) of the null arm.
      paired: True resamples the rows of `std_curves` and `arm_curves` together: row s of both is the same seed.
        False resamples each arm on its own (the wider interval if seeds agree, the only right one if not). The null is
        always resampled on its own.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      A dict of shares (0.34 = 34 % earlier), NaN where undefined (fewer than two evaluated rounds of standard training,
      no seconds; for bounds: an arm with fewer than two seeds):

      * `se_ave`, `se_peak`, `rt_peak` and each with `_low`, `_high`;
      * `levels`: number of levels; `unreached_levels`: how many of them the arm never reached;
      * `peak_reached`: whether it reached the highest one;
      * the same keys with the prefix `null_` when `null_curves` is given.

    Raises:
      ValueError: shapes do not fit, or rounds or seconds are not positive and cumulative.
    """
    std, arm = _matrix(std_curves, "std_curves"), _matrix(arm_curves, "arm_curves")
    if std.shape[1] != arm.shape[1]:
        raise ValueError(
            f"arms must have the same rounds, got {std.shape[1]} for standard and {arm.shape[1]} for the arm"
        )
    if paired and std.shape != arm.shape:
        raise ValueError(f"paired=True needs the same seeds in both arms, got {std.shape[0]} and {arm.shape[0]}")
    rng = np.random.default_rng(seed)

    def against(curves: Floats, seconds: ArrayLike | None, together: bool) -> dict[str, Any]:
        def values(std_mean: Floats, arm_mean: Floats) -> tuple[Reductions, list[float]]:
            found = reductions(std_mean, arm_mean, rounds, std_seconds, seconds)
            if np.isfinite(std_mean).sum() < 2 or not np.isfinite(arm_mean).any():
                return found, [math.nan] * 3
            return found, [found.rounds.mean(), found.rounds[-1], found.seconds[-1]]

        found, point = values(mean_curve(std), mean_curve(curves))
        if min(len(std), len(curves)) >= 2:
            drawn = resample_counts(len(std), replications, rng)
            arm_drawn = drawn if together else resample_counts(len(curves), replications, rng)
            pairs = zip(resampled_means(drawn, std), resampled_means(arm_drawn, curves), strict=True)
            draws = np.array([values(*pair)[1] for pair in pairs])
        else:
            draws = np.full((1, 3), np.nan)
        out: dict[str, Any] = {}
        for i, metric in enumerate(METRICS):
            low, high = interval_of(draws[:, i], confidence)
            out |= {metric: float(point[i]), f"{metric}_low": low, f"{metric}_high": high}
        out["levels"] = int(found.levels.size)
        out["unreached_levels"] = int((~found.reached).sum())
        out["peak_reached"] = bool(found.reached.all())
        return out

    result = against(arm, arm_seconds, paired)
    if null_curves is not None:
        null = _matrix(null_curves, "null_curves")
        if null.shape[1] != std.shape[1]:
            raise ValueError(f"null_curves must have {std.shape[1]} rounds as the others, got {null.shape[1]}")
        result |= {f"null_{key}": value for key, value in against(null, null_seconds, False).items()}
    return result


def _matrix(curves: ArrayLike, name: str) -> Floats:
    x = np.asarray(curves, np.float64)
    if x.ndim != 2 or not x.size:
        raise ValueError(f"{name} must be (S, K), one row per seed, got shape {x.shape}")
    return x


def _costs(values: ArrayLike, size: int, name: str) -> Floats:
    x = np.asarray(values, np.float64)
    if x.shape != (size,) or not (x[:1] > 0).all() or not (np.diff(x) >= 0).all():
        raise ValueError(f"{name} must be {size} positive numbers that never decrease (cumulative)")
    return x
