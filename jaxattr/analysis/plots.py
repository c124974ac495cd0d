"""Pictures of saved results: learning curves, a comparison with its differences, and scores over rounds.

Every figure says what it shows in its title, labels axes with units, uses a colour-blind-safe palette with line styles
as a second cue, keeps its legend outside the data, and is written whole or not at all. No global matplotlib state is
touched (no pyplot), so figures can be drawn on a machine without a display and beside a user's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike

from jaxattr.analysis.stats import bootstrap_curve

if TYPE_CHECKING:
    from jaxattr.analysis.compare import ArmResult

    Curves = ArmResult | tuple[ArrayLike, ArrayLike]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
"""Okabe and Ito's colour-blind-safe colours without yellow and black, then two more."""
BASELINE_COLOR, NULL_COLOR = "#222222", "#8A8A8A"
STYLES = ("-", (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1.5, 1.2)))
DPI = 150
SE_FLOOR = -150.0
"""Left end of the efficiency panels in percent; an arm below it is drawn as an arrow with its number."""
_TEXT = {"title": 11.0, "label": 10.0, "tick": 9.0, "legend": 9.0}


def learning_curve_figure(
    path: str | os.PathLike[str],
    arms: Mapping[str, Curves],
    title: str,
    xlabel: str = "environment steps per seed",
    ylabel: str = "test return",
    *,
    per_seed: bool = False,
    baseline: str = "none",
    null: str = "none (other seeds)",
    confidence: float = 0.95,
    replications: int = 2_000,
    seed: int = 0,
) -> Path:
    """Mean learning curve per arm with its bootstrap band over seeds.

    Args:
      path: file to write; the ending chooses the format (png, pdf, svg).
      arms: name -> `ArmResult` (its test return over environment steps) or a pair (x (K,), curves (S, K)), NaN = no
        value.
      title: first words of the title ("FrozenLake-misc"); what is shown and the number of seeds are appended.
      xlabel: with units.
      ylabel: with units; also the words of the title.
      per_seed: draw each seed as a thin line as well.
      baseline: name drawn in black.
      null: name drawn in grey.
      confidence: of the band.
      replications: of the bootstrap.
      seed: of the bootstrap.

    Returns:
      The path written.
    """
    fig = Figure(figsize=(7.8, 4.8), layout="constrained")
    ax = fig.add_subplot()
    options: dict[str, Any] = {"confidence": confidence, "replications": replications, "seed": seed}
    counts = draw_curves(ax, arms, baseline, null, per_seed, options)
    ax.set_xlabel(xlabel, fontsize=_TEXT["label"])
    ax.set_ylabel(ylabel, fontsize=_TEXT["label"])
    lines = "\nthin lines: single seeds" if per_seed and max(counts, default=0) > 1 else ""
    draw_title(fig, f"{title}: {ylabel}, {band_words(confidence, counts)}{lines}")
    draw_legend(fig, ax, columns=4)
    return save_figure(fig, path)


def comparison_figure(
    path: str | os.PathLike[str],
    arms: Mapping[str, ArmResult],
    rows: Sequence[Mapping[str, Any]],
    title: str,
    *,
    baseline: str = "none",
    null: str = "none (other seeds)",
    confidence: float = 0.95,
    replications: int = 2_000,
    seed: int = 0,
) -> Path:
    """Left: learning curves with bands. Right: differences to the baseline, and sample efficiency beside the null's.

    Args:
      path: file to write; the ending chooses the format.
      arms: name -> `ArmResult`.
      rows: of `jaxattr.analysis.compare.comparison_table` for these arms.
      title: first words of the title, for example the environment.
      baseline: name of the arm that the others are compared with.
      null: name of the arm with other seeds.
      confidence: of the bands.
      replications: of the bands' bootstrap.
      seed: of the bands' bootstrap.

    Returns:
      The path written.
    """
    others = [row for row in rows if row["arm"] != baseline]
    options: dict[str, Any] = {"confidence": confidence, "replications": replications, "seed": seed}
    if not others:  # nothing to compare: the curves alone
        return learning_curve_figure(path, arms, title, baseline=baseline, null=null, **options)
    fig = Figure(figsize=(14.0, max(5.4, 3.1 + 0.44 * len(others))), layout="constrained")
    left, right = np.asarray(fig.subfigures(1, 2, width_ratios=[1, 1.12], wspace=0.03))
    curves = left.add_subplot()
    counts = draw_curves(curves, arms, baseline, null, False, options)
    curves.set_xlabel("environment steps per seed", fontsize=_TEXT["label"])
    curves.set_ylabel("test return", fontsize=_TEXT["label"])
    looks = _looks(arms, baseline, null)
    panels = (
        ("diff_auc_test_return", "_mean", "mean test return over rounds,\ndifference"),
        ("diff_final_test_return", "_mean", "final test return,\ndifference"),
        ("se_ave_percent", "", "SE_ave: fewer rounds to the\nsame return, mean (%)"),
        ("se_peak_percent", "", f"SE_peak: fewer rounds to the\npeak of {baseline!r} (%)"),
    )
    for i, (ax, (column, mean, heading)) in enumerate(zip(right.subplots(2, 2).flat, panels, strict=True)):
        _draw_intervals(ax, others, column, mean, looks, show_names=i % 2 == 0)
        ax.set_title(heading, fontsize=_TEXT["label"], loc="left")
        if column.startswith("se_"):
            _draw_null(ax, rows, column, null)
            low, high = ax.get_xlim()
            ax.set_xlim(max(min(low, -10), SE_FLOOR), max(high, 10))
    bounds = any(row["unreached_levels_count"] and row["se_ave_percent"] is not None for row in others)
    foot = [f"bars: {100 * confidence:g} % bootstrap intervals over seeds"] if max(counts, default=0) > 1 else []
    if any(row["arm"] == null for row in others):
        foot.append("grey dotted line and band: the null, equal training with other seeds")
    if bounds:
        foot.append("open circle with <: at most, the arm never got there")
    if foot:
        text = "; ".join(foot[:2]) + ("\n" + foot[2] if len(foot) > 2 else "")
        right.supxlabel(text, fontsize=_TEXT["tick"], x=0.012, ha="left", color="#444444")
    draw_title(left, f"{title}: test return, {band_words(confidence, counts)}")
    draw_title(right, f"Against {baseline!r}: right of zero is better")
    draw_legend(left, curves, columns=3)
    return save_figure(fig, path)


def score_figure(
    path: str | os.PathLike[str],
    x: ArrayLike,
    kept_share: ArrayLike,
    quantile_levels: Sequence[float],
    score_quantiles: ArrayLike,
    title: str,
    xlabel: str = "round",
) -> Path:
    """A training run's filter: share of records kept (top) and spread of the influence scores (bottom) over rounds.

    Args:
      path: file to write; the ending chooses the format.
      x: (K,) rounds (or environment steps, then say so in `xlabel`).
      kept_share: (K,) or (S, K), records learned from / records collected, 0 to 1.
      quantile_levels: Q increasing levels, 0 to 1; pairs that sum to 1 make a band, 0.5 the line.
      score_quantiles: (K, Q) or (S, K, Q) quantiles of the scores of a round's records; seeds are averaged.
      title: first words of the title.
      xlabel: of both panels.

    Returns:
      The path written.

    Raises:
      ValueError: shapes do not fit.
    """
    at = np.asarray(x, np.float64)
    shares = np.atleast_2d(np.asarray(kept_share, np.float64))
    fan = np.asarray(score_quantiles, np.float64)
    fan = fan[None] if fan.ndim == 2 else fan
    levels = np.asarray(quantile_levels, np.float64)
    if shares.shape[1:] != at.shape or fan.shape[1:] != (at.size, levels.size):
        raise ValueError(
            f"x {at.shape}, kept_share {shares.shape}, score_quantiles {fan.shape} and {levels.size} levels do not fit"
        )
    fan = _present_mean(fan)
    fig = Figure(figsize=(7.6, 6.0), layout="constrained")
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=[1, 1.6])
    for row in shares if len(shares) > 1 else ():
        top.plot(at, 100 * row, color=PALETTE[0], lw=0.6, alpha=0.35)
    top.plot(
        at, 100 * _present_mean(shares), color=PALETTE[0], lw=2, label="mean over seeds" if len(shares) > 1 else None
    )
    top.set_ylabel("records kept (%)", fontsize=_TEXT["label"])
    lowest = float(np.nanmin(shares)) if np.isfinite(shares).any() else 0.0
    span = 1.0 if lowest < 0.5 else max(1 - lowest, 0.02)
    top.set_ylim(100 * (1 - 1.15 * span) if lowest >= 0.5 else 0, 100 * (1 + 0.06 * span))
    middle = int(np.argmin(abs(levels - 0.5))) if levels.size else 0
    below = [i for i in range(levels.size) if levels[i] < 0.5 and np.isclose(levels, 1 - levels[i]).any()]
    for depth, i in enumerate(below):
        j = int(np.flatnonzero(np.isclose(levels, 1 - levels[i]))[0])
        shade = 0.22 + 0.45 * depth / max(1, len(below) - 1)
        words = f"{100 * levels[i]:g} to {100 * levels[j]:g} %"
        bottom.fill_between(at, fan[:, i], fan[:, j], color=_tint(PALETTE[1], shade), lw=0, label=words)
    if levels.size and math.isclose(levels[middle], 0.5):
        bottom.plot(at, fan[:, middle], color="#7A2E00", lw=1.6, label="median")
    bottom.axhline(0, color="#222222", lw=0.9)
    inner = fan[:, below[-1]] if below else fan[:, 0]
    scale = float(np.nanmedian(abs(inner))) if np.isfinite(inner).any() else 0.0
    if scale > 0 and np.nanmax(abs(fan)) > 30 * scale:
        bottom.set_yscale("symlog", linthresh=scale, linscale=0.7)
        bottom.set_ylabel("influence score\n(log scale away from 0)", fontsize=_TEXT["label"])
    else:
        bottom.set_ylabel("influence score", fontsize=_TEXT["label"])
    bottom.set_xlabel(xlabel, fontsize=_TEXT["label"])
    _plain_axis(top)
    _plain_axis(bottom)
    if xlabel == "round":
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    count = f", {len(shares)} seeds" if len(shares) > 1 else ""
    draw_title(fig, f"{title}: records kept, and quantiles of a round's scores{count}")
    draw_legend(fig, bottom, columns=5)
    return save_figure(fig, path)


def save_figure(fig: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure whole or not at all (a temporary file beside it, then a rename), at 150 dots per inch.

    Args:
      fig: any matplotlib figure.
      path: file to write; the ending chooses the format. Missing folders are made.

    Returns:
      The path.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.tmp{target.suffix}")
    FigureCanvasAgg(fig)
    try:
        fig.savefig(temporary, dpi=DPI, facecolor="white")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


# -- pieces ----------------------------------------------------------------------------------------------------------
def _looks(names: Mapping[str, Any], baseline: str, null: str) -> dict[str, tuple[str, Any]]:
    """Colour and line style of each arm: the baseline black, the null dashed grey, the others from the palette."""
    looks: dict[str, tuple[str, Any]] = {}
    position = 0
    for name in names:
        if name == baseline:
            looks[name] = (BASELINE_COLOR, "-")
        elif name == null:
            looks[name] = (NULL_COLOR, (0, (4, 2)))
        else:
            looks[name] = (PALETTE[position % len(PALETTE)], STYLES[position % len(STYLES)])
            position += 1
    return looks


def _xy(arm: Any) -> tuple[np.ndarray, np.ndarray]:
    x, curves = arm if isinstance(arm, tuple) else (arm.env_steps, arm.test_return)
    return np.asarray(x, np.float64), np.atleast_2d(np.asarray(curves, np.float64))


def draw_curves(
    ax: Axes, arms: Mapping[str, Any], baseline: str, null: str, per_seed: bool, options: dict[str, Any]
) -> list[int]:
    """Mean, band and optionally seeds of each arm, baseline on top; returns the arms' numbers of seeds."""
    looks = _looks(arms, baseline, null)
    counts = []
    for name, arm in arms.items():
        x, curves = _xy(arm)
        shown = np.isfinite(curves).any(axis=0)
        x, curves = x[shown], curves[:, shown]
        counts.append(len(curves))
        color, style = looks[name]
        band = bootstrap_curve(curves, **options)
        order = 3 if name in (baseline, null) else 4
        marker = "o" if x.size <= 12 else None
        ax.fill_between(x, band.low, band.high, color=color, alpha=0.12 if len(arms) < 5 else 0.08, lw=0, zorder=2)
        for edge in (band.low, band.high):
            ax.plot(x, edge, color=color, lw=0.5, alpha=0.45, zorder=2)
        for row in curves if per_seed and len(curves) > 1 else ():
            ok = np.isfinite(row)
            ax.plot(x[ok], row[ok], color=color, lw=0.6, alpha=0.35, zorder=order - 0.5)
        ax.plot(x, band.mean, color=color, ls=style, lw=1.9, marker=marker, ms=3.5, label=name, zorder=order)
    _plain_axis(ax)
    ax.xaxis.set_major_formatter(FuncFormatter(_steps))
    ax.margins(x=0.01)
    return counts


def _draw_intervals(
    ax: Axes,
    rows: Sequence[Mapping[str, Any]],
    column: str,
    mean: str,
    looks: Mapping[str, tuple[str, Any]],
    show_names: bool,
) -> None:
    """One horizontal interval per arm with a zero line; an open circle for an upper bound."""
    ax.axvline(0, color="#222222", lw=0.9, zorder=1)
    for y, row in enumerate(rows):
        value, low, high = row[column + mean], row[f"{column}_low"], row[f"{column}_high"]
        if value is None:
            ax.annotate("no value", (0, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        color = looks[row["arm"]][0]
        bound = row["unreached_levels_count"] if column == "se_ave_percent" else row["peak_reached"] is False
        bound = bool(bound) and column.startswith("se_")
        if column.startswith("se_") and value < SE_FLOOR:
            ax.plot(SE_FLOOR, y, "<", ms=8, color=color, zorder=4, clip_on=False)
            ax.annotate(
                f"{value:,.0f}", (SE_FLOOR, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8
            )
            continue
        if low is not None:
            ax.plot([low, high], [y, y], color=color, lw=2.2, solid_capstyle="butt", zorder=3)
        ax.plot(value, y, "o", ms=7, mew=1.6, mec=color, mfc="white" if bound else color, zorder=4)
        if bound:
            ax.annotate(
                "<", (value, y), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=9, color=color
            )
    ax.set_yticks(range(len(rows)), [str(row["arm"]) if show_names else "" for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0, pad=7)
    _plain_axis(ax, grid="x")
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def _draw_null(ax: Axes, rows: Sequence[Mapping[str, Any]], column: str, null: str) -> None:
    """The null's value as a dotted line and its interval as a grey band."""
    for row in rows:
        if row["arm"] == null and row[column] is not None:
            ax.axvline(row[column], color=NULL_COLOR, ls=":", lw=1.6, zorder=1)
            if row[f"{column}_low"] is not None:
                ax.axvspan(row[f"{column}_low"], row[f"{column}_high"], color=NULL_COLOR, alpha=0.13, lw=0, zorder=0)


def _plain_axis(ax: Axes, grid: str = "y") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="#DDDDDD", lw=0.7)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=_TEXT["tick"])


def _steps(value: float, _: int) -> str:
    """Tick text of a number of steps: 50,000 is `50k`, 1,500,000 is `1.5M`."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def band_words(confidence: float, counts: Sequence[int]) -> str:
    """What line and band are, for the title."""
    if not counts:
        return "no arms"
    lowest, highest = min(counts), max(counts)
    if highest == 1:
        return "one seed per arm, so no interval"
    seeds = f"{highest} seeds" if lowest == highest else f"{lowest} to {highest} seeds per arm"
    return f"mean and {100 * confidence:g} % bootstrap interval over {seeds}"


def _present_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is not NaN; NaN where nothing is."""
    present = np.isfinite(values)
    count = present.sum(axis=0)
    return np.where(count > 0, np.where(present, values, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)


def _tint(color: str, strength: float) -> tuple[float, float, float]:
    """A solid mix of a colour with white; overlapping transparent bands would not match their legend."""
    red, green, blue = (1 - strength * (1 - channel) for channel in to_rgb(color))
    return red, green, blue


def draw_title(fig: FigureBase, text: str) -> None:
    """The title of a whole figure, at its left."""
    fig.suptitle(text, fontsize=_TEXT["title"], x=0.012, ha="left", wrap=True)


def draw_legend(fig: FigureBase, ax: Axes, columns: int) -> None:
    """Legend below the axes, outside the data."""
    handles, labels = ax.get_legend_handles_labels()
    if labels:
        columns = min(columns, len(labels))
        fig.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=_TEXT["legend"])
