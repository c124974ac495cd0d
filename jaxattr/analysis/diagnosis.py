"""Do low scores point at wrong advantages? Sign mismatches and errors by fifth of the score; table and figure.

Per record: its score I, the advantage A it was learned with, and a Monte-Carlo advantage A_bar with standard error e.

    mismatch    A * A_bar < 0
    undecided   |A_bar| <= 2 e: too few rollouts to know the sign (A_bar = 0 included)
    wrong       a mismatch that is not undecided

Records of one round share states and episodes, so they carry less information than as many independent ones: all
intervals here take them as independent and are somewhat too narrow.

Source: Hu et al. 2025 (arXiv 2505.19281), section 4 (without the distinction of what is undecided).
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
from numpy.typing import ArrayLike, NDArray

from jaxattr.analysis.plots import PALETTE, save_figure
from jaxattr.analysis.ranks import spearman_interval

FIFTHS = ("bottom", "second", "middle", "fourth", "top")
"""Names of the fifths, lowest scores first."""
FEWEST = 10
"""Records below which there are no fifths."""
SURE = 2.0
"""Standard errors that a Monte-Carlo advantage must be away from 0 to have a sign."""
_COLORS = (PALETTE[1], "#EDB48A", "#9A9A9A", "#8FC3E3", PALETTE[0])


def fifths(scores: ArrayLike, valid: ArrayLike) -> NDArray[np.int64]:
    """(N,) 0 = bottom .. 4 = top fifth of the valid records by score, -1 = not valid or without a score.

    Sizes differ by one at most (the lower fifths get what is left over); ties are cut in record order.

    Raises:
      ValueError: fewer than 10 scored records.
    """
    s = np.asarray(scores, np.float64)
    use = np.flatnonzero(np.asarray(valid, bool) & np.isfinite(s))
    if use.size < FEWEST:
        raise ValueError(f"{use.size} scored records: fifths need {FEWEST} or more")
    out = np.full(s.shape, -1, np.int64)
    for k, part in enumerate(np.array_split(use[np.argsort(s[use], kind="stable")], 5)):
        out[part] = k
    return out


def verdicts(advantage: ArrayLike, mc_advantage: ArrayLike, mc_stderr: ArrayLike) -> NDArray[np.str_]:
    """(N,) `wrong sign`, `right sign` or `undecided`."""
    a, m, e = (np.asarray(x, np.float64) for x in (advantage, mc_advantage, mc_stderr))
    return np.where(abs(m) <= SURE * e, "undecided", np.where(a * m < 0, "wrong sign", "right sign"))


def wilson_interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share count / total; (nan, nan) for total = 0.

        centre = (p + z^2 / 2n) / (1 + z^2 / n),   half = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    Source: Wilson 1927. Unlike p +- z * stderr it stays in [0, 1] and has a width at p = 0.
    """
    if total == 0:
        return math.nan, math.nan
    p, scale = count / total, 1 + z**2 / total
    centre = (p + z**2 / (2 * total)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / total + z**2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def diagnosis_rows(
    scores: ArrayLike, advantage: ArrayLike, mc_advantage: ArrayLike, mc_stderr: ArrayLike, valid: ArrayLike
) -> list[dict[str, Any]]:
    """One row per fifth of the score, lowest first.

    Args:
      scores: (N,), advantage: (N,), mc_advantage: (N,), mc_stderr: (N,), valid: (N,) bool.

    Returns:
      Rows with `fifth`, `records`; `mismatch_share` of all records with 95 % Wilson interval `_low`, `_high`;
      `undecided_share` of all records; `wrong_share` of those that are decided, with interval; `mean_abs_error` =
      mean |A_bar - A| and `mean_stderr` of A_bar, the part of it that is noise, both in units of the advantage.

    Raises:
      ValueError: fewer than 10 scored records.
    """
    part, verdict = fifths(scores, valid), verdicts(advantage, mc_advantage, mc_stderr)
    a, m, e = (np.asarray(x, np.float64) for x in (advantage, mc_advantage, mc_stderr))
    rows = []
    for k, name in enumerate(FIFTHS):
        inside = part == k
        n, mismatch = int(inside.sum()), int((inside & (a * m < 0)).sum())
        undecided, wrong = (int((inside & (verdict == v)).sum()) for v in ("undecided", "wrong sign"))
        decided = n - undecided
        low, high = wilson_interval(mismatch, n)
        wrong_low, wrong_high = wilson_interval(wrong, decided)
        rows.append(
            {
                "fifth": name,
                "records": n,
                "mismatch_share": mismatch / n,
                "mismatch_low": low,
                "mismatch_high": high,
                "undecided_share": undecided / n,
                "decided": decided,
                "wrong_share": wrong / decided if decided else math.nan,
                "wrong_low": wrong_low,
                "wrong_high": wrong_high,
                "mean_abs_error": float(abs(m - a)[inside].mean()),
                "mean_stderr": float(e[inside].mean()),
            }
        )
    return rows


def agreement(scores: ArrayLike, advantage: ArrayLike, mc_advantage: ArrayLike, valid: ArrayLike) -> dict[str, float]:
    """Spearman's correlations with A_bar * A over all scored records, with 95 % bootstrap intervals over records.

    Returns:
      `rank_from_top`, `_low`, `_high`: of the score's rank from the top, 1 = highest (paper, FrozenLake: about -0.67);
      ranks of tied scores are averaged, so this is `score` with the sign turned. NaN where one side is constant.
    """
    s, a, m = (np.asarray(x, np.float64) for x in (scores, advantage, mc_advantage))
    use = np.asarray(valid, bool) & np.isfinite(s)
    value, low, high = spearman_interval(s[use], (a * m)[use])
    return {
        "rank_from_top": -value, "rank_from_top_low": -high, "rank_from_top_high": -low,
        "score": value, "score_low": low, "score_high": high,
    }  # fmt: skip


def diagnosis_figure(
    path: str | os.PathLike[str],
    scores: ArrayLike,
    advantage: ArrayLike,
    mc_advantage: ArrayLike,
    mc_stderr: ArrayLike,
    valid: ArrayLike,
    title: str,
    rollouts: int,
) -> Path:
    """Left: A against A_bar, one dot per record, coloured by fifth of the score. Right: wrong signs in each fifth.

    Args:
      path: file to write; the ending chooses the format.
      scores, advantage, mc_advantage, mc_stderr, valid: (N,) each.
      title: of the figure.
      rollouts: behind each mean, for the axis.

    Raises:
      ValueError: fewer than 10 scored records.
    """
    part = fifths(scores, valid)
    a, m = np.asarray(advantage, np.float64), np.asarray(mc_advantage, np.float64)
    rows = diagnosis_rows(scores, advantage, mc_advantage, mc_stderr, valid)
    fig = Figure(figsize=(13.0, 6.2), layout="constrained")
    halves = np.asarray(fig.subfigures(1, 2, width_ratios=[1.05, 1], wspace=0.03))  # each with a legend of its own
    left, right = (half.add_subplot() for half in halves)
    _draw_scatter(left, a, m, part)
    error = float(np.mean([r["mean_stderr"] for r in rows]))
    left.set_ylabel(
        f"Monte-Carlo advantage, {rollouts} + {rollouts} rollouts\n(mean standard error {error:.2g})", fontsize=10
    )
    _draw_shares(right, rows)
    fig.suptitle(title, x=0.012, ha="left", fontsize=12)
    return save_figure(fig, path)


def _draw_scatter(ax: Axes, a: NDArray[Any], m: NDArray[Any], part: NDArray[Any]) -> None:
    x, y = _limits(a[part >= 0]), _limits(m[part >= 0])
    for corner in ((x[0], 0, 0, y[1]), (0, x[1], y[0], 0)):  # where the signs disagree
        ax.fill_between(corner[:2], corner[2], corner[3], color="#F6E9E2", lw=0, zorder=0)
    for k in (2, 1, 3, 4, 0):  # the ends of the score last, so that they lie on top
        here = part == k
        strong = k in (0, 4)
        ax.plot(
            np.clip(a[here], *x), np.clip(m[here], *y), "o", ms=4.5 if strong else 3.5, mew=0, color=_COLORS[k],
            alpha=0.75 if strong else 0.5, label=FIFTHS[k], zorder=3 if strong else 2,
        )  # fmt: skip
    ax.axhline(0, color="#222222", lw=0.9, zorder=1)
    ax.axvline(0, color="#222222", lw=0.9, zorder=1)
    ax.plot([-1e9, 1e9], [-1e9, 1e9], color="#666666", lw=1, ls=(0, (4, 3)), zorder=1, label="equal")
    ax.set_xlim(*x)
    ax.set_ylim(*y)
    for (h, v), (across, up) in {("left", "top"): (0.015, 0.985), ("right", "bottom"): (0.985, 0.015)}.items():
        ax.text(across, up, "wrong sign", ha=h, va=v, transform=ax.transAxes, color="#A0522D", fontsize=10)
    ax.set_xlabel("advantage the records were learned with (raw GAE, return units)", fontsize=10)
    ax.set_title("each dot is a record, coloured by its influence score", loc="left", fontsize=11)
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: [*FIFTHS, "equal"].index(labels[i]))
    ax.figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside lower left", ncols=3, frameon=False,
        fontsize=9, markerscale=1.6, title="fifth of the influence score (dots on the frame lie outside of it)",
        alignment="left", title_fontsize=9,
    )  # fmt: skip
    _plain(ax)


def _draw_shares(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Stacked to 100 %: sign wrong, undecided, right; the paper's share of mismatches as a marker with interval."""
    at = np.arange(len(rows))
    undecided = np.array([100 * r["undecided_share"] for r in rows])
    wrong = np.array([100 * r["wrong_share"] * r["decided"] / r["records"] if r["decided"] else 0.0 for r in rows])
    kinds = (
        (wrong, PALETTE[1], "sign wrong"),
        (undecided, "#D5D5D5", f"undecided: within {SURE:g} standard errors of 0"),
        (100 - wrong - undecided, PALETTE[5], "sign right"),
    )
    base = np.zeros(len(rows))
    for height, color, label in kinds:
        ax.bar(at, height, 0.72, bottom=base, color=color, label=label, zorder=2)
        for x, h, b in zip(at, height, base, strict=True):
            if h >= 5:
                ax.text(x - 0.33, b + h / 2, f"{h:.0f} %", va="center", fontsize=9, color="#222222", zorder=3)
        base = base + height
    share = np.array([100 * r["mismatch_share"] for r in rows])
    low, high = (np.array([100 * r[f"mismatch_{end}"] for r in rows]) for end in ("low", "high"))
    ax.errorbar(
        at + 0.12, share, [share - low, high - share], fmt="D", ms=6, color="black", capsize=4, lw=1.5, zorder=4,
        label="signs differ, decided or not (95 %)",
    )  # fmt: skip
    ax.set_xticks(at, [f"{r['fifth']}\nerror {r['mean_abs_error']:.2g}" for r in rows])
    ax.set_xlabel("fifth of the influence score; error: mean |Monte-Carlo - learned|", fontsize=10)
    ax.set_ylabel("share of the fifth's records (%)", fontsize=10)
    ax.set_ylim(0, 100)
    ax.set_title("do learned and Monte-Carlo advantage have the same sign?", loc="left", fontsize=11)
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    _plain(ax)


def _limits(x: NDArray[Any]) -> tuple[float, float]:
    """A range that holds 0 and all but the outermost 0.25 % at each end; what lies outside is drawn at the edge."""
    low, high = min(0.0, float(np.quantile(x, 0.0025))), max(0.0, float(np.quantile(x, 0.9975)))
    pad = 0.06 * (high - low) or 1.0
    return low - pad, high + pad


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#E4E4E4", lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9)
