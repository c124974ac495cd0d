"""Does a score predict what retraining does? Linear datamodeling scores, leave-one-out, drops; table and figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from jaxattr.analysis.plots import NULL_COLOR, PALETTE, save_figure
from jaxattr.analysis.ranks import spearman, spearman_interval
from jaxattr.analysis.stats import interval_of

LABELS = {"return": "return target f_ret", "true_return": "true return (fresh episodes)"}


def prediction_rows(
    predicted: Mapping[str, Mapping[str, ArrayLike]], measured: Mapping[str, ArrayLike]
) -> list[dict[str, Any]]:
    """One row per effect and score: its LDS with interval over subsets.

    Args:
      predicted: effect -> score's name -> (M,) summed scores of what each subset kept; or (K, M) for K shuffles of a
        score, whose row holds the mean of the K correlations and the interval that 95 % of them lie in (what chance
        alone does: one shuffle of few records correlates with the truth by accident).
      measured: effect -> (M,).
    """
    rows = []
    for effect, scores in predicted.items():
        for name, sums in scores.items():
            sums, truth = np.asarray(sums), np.asarray(measured[effect])
            if sums.ndim == 2:
                each = spearman(sums, np.broadcast_to(truth, sums.shape))
                value, (low, high) = float(np.mean(each)), interval_of(each)
            else:
                value, low, high = spearman_interval(sums, truth)
            row = {"effect": effect, "score": name, "lds": value, "low": low, "high": high}
            rows.append({**row, "subsets": len(truth)})
    return rows


def verdict(row: Mapping[str, Any]) -> str:
    """`predicts`, `predicts the reverse` or `undecided`: does the interval of the LDS exclude 0?"""
    if np.isnan(row["low"]):
        return "no interval"
    return "predicts" if row["low"] > 0 else ("predicts the reverse" if row["high"] < 0 else "undecided")


def render_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The LDS table as text, best score first within each effect."""
    lines = [f"{'effect':14s} {'score':26s} {'LDS':>7s}  {'95 % interval':17s} verdict"]
    for effect in dict.fromkeys(r["effect"] for r in rows):
        chosen = [r for r in rows if r["effect"] == effect]
        for r in sorted(chosen, key=lambda r: -np.nan_to_num(r["lds"], nan=-2.0)):
            lines.append(
                f"{effect:14s} {r['score']:26s} {r['lds']:+7.3f}  [{r['low']:+.3f}, {r['high']:+.3f}]  {verdict(r)}"
            )
    return "\n".join(lines)


def counterfactual_figure(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, ArrayLike],
    measured: Mapping[str, ArrayLike],
    drops: Mapping[str, Mapping[str, ArrayLike]],
    title: str,
    shown: str,
) -> Path:
    """Left: LDS of every score with its interval. Middle: predicted against measured. Right: dropping by score.

    Args:
      path: file to write.
      rows: from `prediction_rows`.
      predicted: effect -> (M,) of the score called `shown`.
      measured: effect -> (M,).
      drops: effect -> `all`, `top`, `bottom`, `random` -> values of the effect.
      title: of the figure.
      shown: the score of the middle panels.
    """
    effects = list(measured)
    label = lambda effect: LABELS.get(effect, f"log-probability, {effect}")
    fig = Figure(figsize=(15.5, 1.2 + 3.6 * len(effects)), layout="constrained")
    axes = fig.subplots(len(effects), 3, squeeze=False, width_ratios=[1.5, 1, 1])
    for effect, (left, middle, right) in zip(effects, axes, strict=True):
        chosen = sorted((r for r in rows if r["effect"] == effect), key=lambda r: np.nan_to_num(r["lds"], nan=-2.0))
        for k, r in enumerate(chosen):
            color = PALETTE[0] if r["low"] > 0 else (PALETTE[1] if r["high"] < 0 else NULL_COLOR)
            left.plot([r["low"], r["high"]], [k, k], color=color, lw=2.5, solid_capstyle="butt")
            left.plot(r["lds"], k, "o", color=color, ms=6)
        left.set_yticks(range(len(chosen)), [r["score"] for r in chosen])
        left.axvline(0, color="black", lw=0.8)
        left.set_xlim(-1.05, 1.05)
        left.set_xlabel("Spearman of predicted and measured effect (LDS), 95 % interval")
        left.set_title(f"effect: {label(effect)}", loc="left", fontsize=11)
        middle.plot(predicted[effect], measured[effect], ".", color=PALETTE[0], ms=4, alpha=0.6)
        middle.set_xlabel(f"summed scores of the subset ({shown})")
        middle.set_ylabel(f"{label(effect)},\nafter retraining")
        middle.set_title(f"{len(np.asarray(measured[effect])):,} random subsets", loc="left", fontsize=11)
        names = [n for n in ("all", "top", "random", "bottom") if n in drops[effect]]
        for k, name in enumerate(names):
            values = np.atleast_1d(np.asarray(drops[effect][name], np.float64))
            right.plot(
                np.full(len(values), k), values, "o", color=PALETTE[k], ms=7 if len(values) == 1 else 4, alpha=0.8
            )
        labels = {"all": "nothing", "top": "highest\nscores", "random": "random", "bottom": "lowest\nscores"}
        right.set_xticks(range(len(names)), [labels[n] for n in names])
        right.set_xlim(-0.5, len(names) - 0.5)
        right.set_ylabel(f"{label(effect)},\nafter retraining")
        right.set_title("units dropped", loc="left", fontsize=11)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#E4E4E4", lw=0.6)
        ax.set_axisbelow(True)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    return save_figure(fig, path)
