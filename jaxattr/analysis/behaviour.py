"""Do similar records have similar scores, and does that change over training? Roughness, its null, and phases.

    R = sum over i != j of w_ij (I~_i - I~_j)^2 / sum over i != j of w_ij,     I~ = I / max |I|
    w_ij = exp(-d_ij^2 / (2 h^2)),  d_ij = Euclidean distance of the features of records i and j,  h = median of d

R is high where neighbours have unlike scores, low where scores are smooth over the features. Its size also depends on
how heavy the scores' tails are, because of max |I|; so it stands beside the same number with the scores shuffled among
the records (the null), and relative roughness R / (mean of the null) is free of that: 1 = no relation between features
and scores.

Source: Hu et al. 2025 (arXiv 2505.19281), who see R high, then falling, then low and noisy; kernel, null, and the rule
for phases are ours.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from jaxattr.analysis.plots import BASELINE_COLOR, NULL_COLOR, PALETTE, save_figure
from jaxattr.analysis.stats import Floats
from jaxattr.analysis.tables import aligned, number

MAX_RECORDS = 2048
"""Records on a graph; of more, a random sample of this size is taken."""
MIN_SEGMENT = 2
"""Rounds in a phase, at least."""
SIGNIFICANT = 0.05


class Roughness(NamedTuple):
    """Roughness of one round's scores on its similarity graph."""

    value: float  # R, 0 to 4; NaN if all scores are 0 or fewer than 3 records are usable
    null_mean: float  # of R with shuffled scores
    null_low: float  # 2.5 % quantile
    null_high: float  # 97.5 %
    bandwidth: float  # h, in units of the features
    records: int  # on the graph

    @property
    def relative(self) -> float:
        """R / mean of the null."""
        return self.value / self.null_mean if self.null_mean else math.nan


class Phases(NamedTuple):
    """Best fit of a curve by three constants."""

    found: bool  # p_value <= 0.05
    starts: tuple[int, ...]  # positions at which the second and third phase begin; () if the curve is too short
    means: tuple[float, ...]  # of the phases
    explained: float  # 1 - SSE(three constants) / SSE(one constant)
    p_value: float  # share of time-shuffled curves that three constants explain as well


def weights_of(features: ArrayLike) -> tuple[Floats, float]:
    """Similarities w (N, N), with zeros on the diagonal, and the bandwidth h.

    h is the median distance over pairs; if more than half of the pairs coincide, the mean of the others' distances; if
    all do, every w is 1 and h is 0.

    Args:
      features: (N, H), N >= 2.
    """
    x = np.asarray(features, np.float64)
    x = x - x.mean(axis=0)
    square = np.sum(x**2, axis=1)
    apart = np.maximum(square[:, None] + square[None] - 2 * x @ x.T, 0.0)
    apart[apart < 1e-12 * max(square.max(), np.finfo(float).tiny)] = 0.0  # rounding of records that coincide
    pairs = np.sqrt(apart[np.triu_indices(len(x), 1)])
    bandwidth = float(np.median(pairs))
    if bandwidth == 0 and pairs.any():
        bandwidth = float(pairs[pairs > 0].mean())
    weights = np.exp(-apart / (2 * bandwidth**2)) if bandwidth > 0 else np.ones_like(apart)
    np.fill_diagonal(weights, 0.0)
    return weights, bandwidth


def quadratic_form(weights: Floats, scores: Floats) -> Floats:
    """R of each row of `scores` (K, N), as defined above: (K,).

    With symmetric w, sum_ij w_ij (x_i - x_j)^2 = 2 (sum_i x_i^2 sum_j w_ij - x' w x): one product for all rows.
    """
    x = scores / np.max(np.abs(scores), axis=1, keepdims=True)
    x = x - x.mean(axis=1, keepdims=True)  # R does not see a constant; less cancels without it
    degree = weights.sum(axis=1)
    total = 2 * (x**2 @ degree - np.sum((x @ weights) * x, axis=1))
    return np.maximum(total, 0.0) / degree.sum()


def roughness(scores: ArrayLike, features: ArrayLike, *, shuffles: int = 20, seed: int = 0) -> Roughness:
    """Roughness of a round's scores, and of the same scores shuffled among its records.

    Args:
      scores: (N,); entries that are not finite are left out.
      features: (N, H); rows that are not finite are left out.
      shuffles: of the null, 2 or more. (Of 20, the 95 % range is nearly the smallest to the largest.)
      seed: of the shuffles, and of the sample where N > `MAX_RECORDS`.

    Raises:
      ValueError: shapes do not fit, or too few shuffles.
    """
    x, f = np.asarray(scores, np.float64), np.asarray(features, np.float64)
    if x.ndim != 1 or f.ndim != 2 or len(f) != len(x):
        raise ValueError(f"scores {x.shape} and features {f.shape} do not fit: must be (N,) and (N, H)")
    if shuffles < 2:
        raise ValueError(f"shuffles is {shuffles}: must be 2 or more")
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(np.isfinite(x) & np.isfinite(f).all(axis=1))
    if rows.size > MAX_RECORDS:
        rows = np.sort(rng.choice(rows, MAX_RECORDS, replace=False))
    x, f = x[rows], f[rows]
    if rows.size < 3 or not x.any():
        return Roughness(math.nan, math.nan, math.nan, math.nan, math.nan, int(rows.size))
    weights, bandwidth = weights_of(f)
    both = quadratic_form(weights, np.stack([x, *(rng.permutation(x) for _ in range(shuffles))]))
    low, high = np.percentile(both[1:], [2.5, 97.5])
    return Roughness(float(both[0]), float(both[1:].mean()), float(low), float(high), bandwidth, int(rows.size))


def phases(curve: ArrayLike, *, permutations: int = 999, seed: int = 0) -> Phases:
    """Best least-squares fit of a curve by three constants, and whether its order in time has anything to do with it.

    All pairs of change points are tried, phases of at least `MIN_SEGMENT` rounds. Stated beforehand: three phases are
    *found* if at most 5 % of the curves made of the same values in random order are explained as well as this one; else
    there are none. (What this rejects is "the order does not matter": a steady slope is rejected, too. Whether there
    are steps, the picture must show.)

    Args:
      curve: (K,), one value per round; NaN = no value, left out.
      permutations: random orders.
      seed: of those.

    Returns:
      See `Phases`; `starts` index `curve`. With fewer than 3 * MIN_SEGMENT values, or without any spread, nothing is
      found and numbers are NaN.
    """
    x = np.asarray(curve, np.float64)
    there = np.flatnonzero(np.isfinite(x))
    y = x[there]
    if y.size < 3 * MIN_SEGMENT or np.ptp(y) == 0:
        return Phases(False, (), (), math.nan, math.nan)
    y = y - y.mean()
    explained, first, second = (v[0] for v in _best_split(y[None]))
    rng = np.random.default_rng(seed)
    null = np.concatenate(
        [_best_split(rng.permuted(np.tile(y, (min(50, permutations - i), 1)), axis=1))[0]
         for i in range(0, permutations, 50)]
    )  # fmt: skip
    p_value = float((1 + np.sum(null >= explained - 1e-12)) / (1 + permutations))
    edges = (0, int(first), int(second), y.size)
    means = tuple(float(x[there][a:b].mean()) for a, b in itertools.pairwise(edges))
    starts = (int(there[first]), int(there[second]))
    return Phases(p_value <= SIGNIFICANT, starts, means, float(explained), p_value)


def _best_split(curves: Floats) -> tuple[Floats, Floats, Floats]:
    """Of (P, K) centred curves: share explained (P,), starts of the second and the third segment (P,)."""
    size = curves.shape[1]
    sums = np.concatenate([np.zeros((len(curves), 1)), np.cumsum(curves, axis=1)], axis=1)
    cuts = np.array([(a, b) for a in range(MIN_SEGMENT, size) for b in range(a + MIN_SEGMENT, size - MIN_SEGMENT + 1)])
    a, b = cuts.T
    left, right = sums[:, a], sums[:, -1:] - sums[:, b]
    middle = sums[:, b] - sums[:, a]
    # SSE falls by the sum over segments of (sum of the segment)^2 / length, as the curve's mean is 0.
    gain = left**2 / a + middle**2 / (b - a) + right**2 / (size - b)
    best = np.argmax(gain, axis=1)
    explained = gain[np.arange(len(curves)), best] / np.sum(curves**2, axis=1)
    return explained, a[best], b[best]


def phase_words(found: Phases, rounds: Sequence[int]) -> str:
    """One line for people."""
    if not found.starts:
        return f"no phases found: needs {3 * MIN_SEGMENT} rounds with different values"
    if not found.found:
        return f"no phases found: as good in random order (p = {found.p_value:.3g})"
    first, second = (rounds[i] for i in found.starts)
    means = ", ".join(number(m) for m in found.means)
    return f"phases begin at rounds {rounds[0]}, {first}, {second} (means {means}; p = {found.p_value:.3g})"


def render_table(rows: Sequence[Mapping[str, Any]], density: bool = False) -> str:
    """The rounds as aligned text."""
    kind = "log pi" if density else "pi"
    columns = ("log_prob_before", "log_prob_after") if density else ("prob_before", "prob_after")
    head = ["round", f"{kind} before", f"{kind} after", "score min", "score max", "top record"]
    lines = [[*head, "roughness", "shuffled", "relative"]]
    for row in rows:
        values = [number(row[name]) for name in (*columns, "score_min", "score_max")]
        null = f"{number(row['null_mean'])} [{number(row['null_low'])}, {number(row['null_high'])}]"
        top = "-" if row["top_record"] is None else str(row["top_record"])
        lines.append(
            [str(row["round"]), *values, top, number(row["roughness"]), null, number(row["relative_roughness"])]
        )
    return aligned(lines)


def behaviour_figure(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    extremes: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]],
    found: Mapping[str, Phases],
    title: str,
    *,
    density: bool = False,
) -> Path:
    """Four panels over rounds: the action's probability, top and bottom scores, roughness with its null, and relative.

    Args:
      path: file to write; the ending chooses the format.
      rows: per round, as in behaviour.csv.
      extremes: per round `top` and `bottom` records with their `score`.
      found: `roughness` and `relative_roughness` -> `Phases`.
      title: first words of the title.
      density: actions are continuous, pi is a density.

    Returns:
      The path written.
    """
    at = np.array([row["round"] for row in rows], float)
    column = lambda name: np.array([row[name] for row in rows], float)
    fig = Figure(figsize=(8.4, 10.4), layout="constrained")
    prob, marks, rough, relative = fig.subplots(4, 1, sharex=True, height_ratios=[1, 1.1, 1.2, 1.2])
    names = ("log_prob_before", "log_prob_after") if density else ("prob_before", "prob_after")
    prob.plot(at, column(names[0]), "o--", ms=4, color=PALETTE[0], label="before the round")
    prob.plot(at, column(names[1]), "s-", ms=4, color=PALETTE[1], label="after the round")
    prob.set_ylabel("log density of a given s\n(nats)" if density else "probability\nof a given s")
    if not density:
        prob.set_ylim(-0.03, 1.03)
    for name, mark, color, words in (
        ("top", "^", PALETTE[2], "highest scores"),
        ("bottom", "v", PALETTE[3], "lowest scores"),
    ):
        points = [(x, r["score"]) for x, one in zip(at, extremes, strict=True) for r in one[name]]
        if points:
            marks.plot(*np.array(points).T, mark, ms=4.5, color=color, alpha=0.7, label=words)
    marks.axhline(0, color=BASELINE_COLOR, lw=0.9)
    marks.set_ylabel("influence on\nlog pi(a given s)")
    rough.fill_between(at, column("null_low"), column("null_high"), color=NULL_COLOR, alpha=0.25, lw=0)
    rough.plot(at, column("null_mean"), ":", color=NULL_COLOR, lw=1.6, label="scores shuffled:\nmean and 95 % range")
    rough.plot(at, column("roughness"), "o-", ms=4, color=PALETTE[0], label="roughness R")
    rough.set_ylabel("roughness R\nof the scores")
    rough.set_ylim(bottom=0)
    relative.axhline(1, color=NULL_COLOR, ls=":", lw=1.6, label="1 = no relation\nto the features")
    relative.plot(at, column("relative_roughness"), "o-", ms=4, color=PALETTE[0], label="R / mean of shuffled")
    relative.set_ylabel("relative roughness")
    _phases(rough, at, found["roughness"])
    _phases(relative, at, found["relative_roughness"])
    numbers = [int(x) for x in at]
    rough.set_title(phase_words(found["roughness"], numbers), fontsize=9, loc="left")
    relative.set_title(phase_words(found["relative_roughness"], numbers), fontsize=9, loc="left")
    relative.set_xlabel("round", fontsize=10)
    relative.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for ax in (prob, marks, rough, relative):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#DDDDDD", lw=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=9)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8.5)
    fig.suptitle(title, fontsize=10.5, x=0.012, ha="left")
    return save_figure(fig, path)


def _phases(ax: Axes, at: Floats, found: Phases) -> None:
    """Vertical lines where a phase begins and its mean as a bar, if there are phases."""
    if not found.found:
        return
    edges = [0, *found.starts, len(at)]
    for k, (a, b) in enumerate(itertools.pairwise(edges)):
        if k:
            ax.axvline(
                (at[a - 1] + at[a]) / 2, color=PALETTE[1], lw=1.2, ls="--", label="a phase begins" if k == 1 else None
            )
        ax.hlines(found.means[k], at[a], at[b - 1], color=PALETTE[1], lw=1.6, alpha=0.8)
