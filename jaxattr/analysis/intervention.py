"""Are rounds better on filtered records? Differences per round and over all rounds, with intervals over seeds.

With J_arm[k, s] the mean test return of seed s after round k, retrained as the arm says:

    d[k, s]        = J_arm[k, s] - J_none[k, s]              in units of the environment's return
    row of round k = mean over s of d[k, s], bootstrap interval over seeds
    row of all     = mean over s of mean over k of d[k, s], the same interval: whole seeds are resampled, never rounds

Stated beforehand: the test is the exact two-sided sign test over seeds (ties left out), in the `all` row on the seeds'
mean differences. Rounds of one seed are stages of one training, so (seed, round) pairs are no independent trials: their
shares better / equal / worse are given as they are, without a test. No correction for the number of arms or rounds.

Source: Hu et al. 2025 (arXiv 2505.19281), the intervention experiment; conventions: `jaxattr.analysis.stats`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from jaxattr.analysis.plots import BASELINE_COLOR, PALETTE, save_figure
from jaxattr.analysis.stats import Floats, mean_estimate
from jaxattr.analysis.tables import aligned, interval, number, percent

BASELINE, ALL = "none", "all"


def sign_test(differences: ArrayLike) -> float:
    """Exact two-sided sign test of "better as often as worse".

        p = min(1, 2 * P(X <= min(b, w))),  X ~ Binomial(b + w, 1/2),  b, w = numbers of positive and negative entries

    Args:
      differences: (S,), one per seed; zeros and NaN are left out.

    Returns:
      A probability; NaN if nothing is left. It cannot fall below 2^(1 - S): 6 seeds are the fewest that can reach 0.05.

    Raises:
      ValueError: not one-dimensional.
    """
    x = np.asarray(differences, np.float64)
    if x.ndim != 1:
        raise ValueError(f"differences have shape {x.shape}: must be (S,), one per seed")
    better, worse = int(np.sum(x > 0)), int(np.sum(x < 0))
    n = better + worse
    if n == 0:
        return math.nan
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def differences(returns: Mapping[str, ArrayLike], baseline: str = BASELINE) -> dict[str, Floats]:
    """Mean test returns minus the baseline's, per round and seed.

    Args:
      returns: arm -> (K, S, E) test returns, the baseline among them; NaN = no value.
      baseline: its name.

    Returns:
      arm -> (K, S) in units of the return, without the baseline.

    Raises:
      ValueError: no baseline, or the shapes differ.
    """
    if baseline not in returns:
        raise ValueError(f"no arm {baseline!r} among {', '.join(returns)}")
    arrays = {name: np.asarray(values, np.float64) for name, values in returns.items()}
    shapes = {x.shape for x in arrays.values()}
    if len(shapes) > 1 or arrays[baseline].ndim != 3:
        raise ValueError(f"returns have shapes {sorted(shapes)}: must be the same (K, S, E) in every arm")
    # Episodes are paired (same start states): averaging the differences makes equal episodes cancel exactly.
    return {name: (x - arrays[baseline]).mean(axis=2) for name, x in arrays.items() if name != baseline}


def intervention_table(
    rounds: Sequence[int],
    returns: Mapping[str, ArrayLike],
    kept: Mapping[str, ArrayLike],
    *,
    confidence: float = 0.95,
    replications: int = 10_000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per arm over all rounds, then one per arm and round.

    Args:
      rounds: K round numbers.
      returns: see `differences`.
      kept: arm -> (K, S) share of the records learned from, 0 to 1.
      confidence, replications, seed: of the bootstrap.

    Returns:
      Rows with arm, round (`all` or a number), seeds (with a value), test_return and baseline_test_return (means),
      diff_mean, diff_low, diff_high, kept_share, pairs, better, equal, worse (shares of the (seed, round) pairs,
      summing to 1), sign_test_p. A number that does not exist is NaN.
    """
    options: dict[str, Any] = {"confidence": confidence, "replications": replications, "seed": seed}
    base = np.asarray(returns[BASELINE], np.float64).mean(axis=2)
    rows = []
    gaps = differences(returns)
    for pick in (ALL, *range(len(rounds))):
        for arm, gap in gaps.items():
            chosen = slice(None) if pick == ALL else slice(int(pick), int(pick) + 1)
            mean_return = np.asarray(returns[arm], np.float64).mean(axis=2)[chosen]
            rows.append(
                {
                    "arm": arm,
                    "round": ALL if pick == ALL else rounds[int(pick)],
                    **_row(gap[chosen], mean_return, base[chosen], np.asarray(kept[arm])[chosen], options),
                }
            )
    return rows


def _row(gap: Floats, arm: Floats, base: Floats, kept: Floats, options: dict[str, Any]) -> dict[str, Any]:
    """Numbers of some rounds: all arrays (rounds, S)."""
    per_seed = _mean(gap, axis=0)
    estimate = mean_estimate(per_seed, **options)
    there = np.isfinite(gap)
    pairs = int(there.sum())
    share = lambda hit: float((hit & there).sum() / pairs) if pairs else math.nan
    return {
        "seeds": estimate.n,
        "test_return": float(_mean(arm[there])),
        "baseline_test_return": float(_mean(base[there])),
        "diff_mean": estimate.mean,
        "diff_low": estimate.low,
        "diff_high": estimate.high,
        "kept_share": float(_mean(kept[there])),
        "pairs": pairs,
        "better": share(gap > 0),
        "equal": share(gap == 0),
        "worse": share(gap < 0),
        "sign_test_p": sign_test(per_seed),
    }


def render_table(rows: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> str:
    """The rows over all rounds as aligned text."""
    head = ["arm", "seeds", "records kept", "difference of test return", "better", "equal", "worse", "sign test p"]
    lines = [head]
    for row in rows:
        if row["round"] == ALL:
            shares = [percent(row[name]) for name in ("better", "equal", "worse")]
            gap = f"{number(row['diff_mean'], sign=True)} {interval(row['diff_low'], row['diff_high'])}"
            p = number(row["sign_test_p"])
            lines.append([row["arm"], str(row["seeds"]), percent(row["kept_share"]), gap, *shares, p])
    notes = [
        f"difference: against {BASELINE!r}, mean over seeds and rounds [{100 * confidence:g} % bootstrap over seeds]",
        "better, equal, worse: share of (seed, round) pairs; sign test: over seeds, on their mean differences",
    ]
    return "\n".join([aligned(lines), "", *notes])


def intervention_figure(
    path: str | os.PathLike[str],
    rounds: Sequence[int],
    gaps: Mapping[str, Floats],
    rows: Sequence[Mapping[str, Any]],
    title: str,
    *,
    confidence: float = 0.95,
) -> Path:
    """One panel per arm: a box over seeds for every round, and the rounds' mean with its interval in the heading.

    Args:
      path: file to write; the ending chooses the format.
      rounds: K numbers.
      gaps: of `differences`.
      rows: of `intervention_table`.
      title: first words of the title.
      confidence: of the rows' intervals.

    Returns:
      The path written.
    """
    over_all = {row["arm"]: row for row in rows if row["round"] == ALL}
    seeds = next(iter(gaps.values())).shape[1] if gaps else 0
    height = 1.9 + 1.9 * max(len(gaps), 1)
    fig = Figure(figsize=(min(max(8.4, 2.5 + 0.3 * len(rounds)), 16.0), height), layout="constrained")
    axes = np.atleast_1d(fig.subplots(max(len(gaps), 1), 1, sharex=True, sharey=True))
    if not gaps:
        axes[0].annotate("no arm beside the baseline", (0.5, 0.5), xycoords="axes fraction", ha="center")
    for i, (ax, (arm, gap)) in enumerate(zip(axes, gaps.items(), strict=False)):
        _boxes(ax, gap, PALETTE[i % len(PALETTE)], points=seeds <= 12)
        row = over_all[arm]
        shares = " / ".join(f"{100 * row[name]:.0f}" for name in ("better", "equal", "worse"))
        words = f"{arm}: {number(row['diff_mean'], sign=True)} {interval(row['diff_low'], row['diff_high'])}"
        words += f"; better / equal / worse {shares} %; kept {100 * row['kept_share']:.0f} %"
        ax.set_title(words, fontsize=9.5, loc="left")
    every = max(1, math.ceil(len(rounds) / 25))
    places = range(0, len(rounds), every)
    axes[-1].set_xticks(list(places), [str(rounds[k]) for k in places])
    axes[-1].set_xlabel("round", fontsize=10)
    fig.supylabel("difference of test return\n(filtered - all records)", fontsize=10)
    count = f"{seeds} seeds" if seeds != 1 else "one seed: no boxes, no intervals"
    dots = ", dot: a seed" if 1 < seeds <= 12 else ""
    boxes = f"box: middle half of the seeds, line: median, whiskers: all seeds{dots}\n" if seeds > 1 else ""
    foot = f"{boxes}above zero: fewer records were better; headings: over all rounds, mean"
    foot += f" [{100 * confidence:g} % bootstrap interval over seeds]," if seeds > 1 else ","
    foot += "\nshares of the (seed, round) pairs, share of the records kept"
    fig.suptitle(f"{title}: each round retrained on filtered records, {count}\n{foot}", fontsize=10, x=0.012, ha="left")
    return save_figure(fig, path)


def _boxes(ax: Axes, gap: Floats, color: str, points: bool) -> None:
    """Boxes (K) over the second axis of (K, S)."""
    ax.axhline(0, color=BASELINE_COLOR, lw=0.9, zorder=1)
    columns = [row[np.isfinite(row)] for row in gap]
    if gap.shape[1] > 1:
        ax.boxplot(
            columns, positions=range(len(columns)), widths=0.6, whis=(0, 100), manage_ticks=False, patch_artist=True,
            boxprops={"facecolor": color, "alpha": 0.3, "edgecolor": color}, whiskerprops={"color": color},
            capprops={"color": color}, medianprops={"color": BASELINE_COLOR, "lw": 1.5},
        )  # fmt: skip
    for k, column in enumerate(columns if points else ()):
        spread = np.linspace(-0.18, 0.18, column.size) if column.size > 1 else np.zeros(column.size)
        ax.plot(k + spread, column, "o", ms=2.6, color=color, alpha=0.9, zorder=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", lw=0.7)
    ax.set_axisbelow(True)
    ax.set_xlim(-0.7, len(columns) - 0.3)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.tick_params(labelsize=9)


def _mean(values: Floats, axis: int | None = None) -> Any:
    """Mean of what is not NaN; NaN where nothing is."""
    there = np.isfinite(values)
    total = np.where(there, values, 0.0).sum(axis=axis)
    count = there.sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
