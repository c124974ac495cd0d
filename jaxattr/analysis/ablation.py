"""What each change of IIF does to its gain: a table of contrasts and a picture, from saved arms.

    gain(arm, base) = mean over seeds of [ AUC(arm, s) - AUC(base, s) ],  AUC = mean test return over evaluated rounds
    change          = mean over seeds of [ gain_s(arm, base) - gain_s(published) ]

Both with a percentile bootstrap interval over seeds (`jaxattr.analysis.stats`), all on the same seeds but the null.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxattr.analysis import stats
from jaxattr.analysis.compare import ArmResult, cell
from jaxattr.analysis.plots import draw_title, save_figure
from jaxattr.analysis.tables import aligned, percent

REPLICATIONS = 10_000
VERDICT_COLORS = {"better": "#0072B2", "worse": "#D55E00", "undecided": "#777777"}
FAR = 2.5
"""A gain beyond so many times the third quartile of all bounds is drawn as an arrow."""


def contrast_rows(
    env: str,
    arms: Mapping[str, ArmResult],
    contrasts: Sequence[tuple[str, str, str]],
    published: tuple[str, str],
    failed: float,
    *,
    replications: int = REPLICATIONS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per contrast whose two arms are there.

    | column | meaning |
    | --- | --- |
    | `env`, `contrast`, `arm`, `base`, `seeds` | of the contrast; seeds with a value in both arms |
    | `gain_auc_mean`, `_low`, `_high` | of AUC, in units of return |
    | `gain_final_mean`, `_low`, `_high` | of the final test return |
    | `change_auc_mean`, `_low`, `_high` | gain of AUC minus the published one's; None for it and for the null |
    | `seeds_better` | share of seeds with a higher AUC, a tie is 1/2; None where not paired |
    | `arm_failed`, `base_failed` | shares of seeds whose final return is at most `failed`, or that stopped |
    | `dropped_share` | records that the arm did not learn from, over those collected |
    | `paired`, `verdict` | same seeds; `better`, `worse` or `undecided`: where the interval of `gain_auc` lies |

    Args:
      env: name, for the rows.
      arms: rule -> arm.
      contrasts: (label, arm, base).
      published: (arm, base) that `change` is held against.
      failed: final return at or below which a seed has failed.
      replications: R >= 1.
      seed: of the resampling.
    """
    options = {"replications": replications, "seed": seed}
    rows = []
    for label, name, base_name in contrasts:
        if name not in arms or base_name not in arms:
            continue
        arm, base = arms[name], arms[base_name]
        paired = np.array_equal(arm.seeds, base.seeds)
        difference = stats.paired_difference if paired else stats.independent_difference
        row: dict[str, Any] = {"env": env, "contrast": label, "arm": name, "base": base_name}
        gain = difference(arm.auc, base.auc, **options)
        row |= {"seeds": gain.n, **_spread("gain_auc", gain)}
        row |= _spread("gain_final", difference(arm.final_return, base.final_return, **options))
        change = None
        if paired and (name, base_name) != published and all(rule in arms for rule in published):
            first, second = (arms[rule].auc for rule in published)
            change = stats.paired_difference(arm.auc - base.auc, first - second, **options)
        row |= _spread("change_auc", change)
        gaps = arm.auc - base.auc if paired else np.empty(0)
        gaps = gaps[np.isfinite(gaps)]
        row["seeds_better"] = float(np.mean(np.sign(gaps) / 2 + 0.5)) if gaps.size else None
        row["arm_failed"], row["base_failed"] = (float(np.mean(~(x.final_return > failed))) for x in (arm, base))
        row |= {"dropped_share": 1 - arm.kept_share, "paired": paired}
        row["verdict"] = "better" if gain.low > 0 else "worse" if gain.high < 0 else "undecided"
        rows.append(row)
    return rows


def _spread(column: str, found: stats.Estimate | None) -> dict[str, float | None]:
    values = (None,) * 3 if found is None else [None if math.isnan(v) else v for v in found[:3]]
    return dict(zip((f"{column}_mean", f"{column}_low", f"{column}_high"), values, strict=True))


def ablation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The contrasts of one environment."""
    lines = [["contrast", "arm - base", "seeds", "gain of AUC", "verdict", "change against published", "gain of final",
              "seeds better", "failed, arm / base", "dropped"]]  # fmt: skip
    for row in rows:
        better = "-" if row["seeds_better"] is None else percent(row["seeds_better"])
        failed = f"{percent(row['arm_failed'])} / {percent(row['base_failed'])}"
        lines.append(
            [
                row["contrast"],
                f"{row['arm']} - {row['base']}" + ("" if row["paired"] else " *"),
                str(row["seeds"]),
                cell(row, "gain_auc", sign=True),
                row["verdict"],
                cell(row, "change_auc", sign=True),
                cell(row, "gain_final", sign=True),
                better,
                failed,
                percent(row["dropped_share"]),
            ]
        )
    return aligned(lines)


def ablation_notes(seeds: int) -> list[str]:
    """What the numbers are, in plain English."""
    return [
        "gain of AUC: mean test return over the evaluated rounds, arm minus base; [low, high]: 95 % bootstrap interval "
        f"over {seeds} seeds, paired (*: other seeds, not paired)",
        "verdict: better or worse if that interval lies above or below 0, else undecided",
        "change against published: by how much a contrast's gain differs from that of IIF as published, on each seed",
        "the last three contrasts have no filter at all: what the change does to plain PPO",
    ]


def ablation_figure(path: str | os.PathLike[str], groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """One panel per environment: the gain of AUC of every contrast with its interval, and the zero line.

    Args:
      path: file to write; the ending chooses the format.
      groups: title of the panel -> rows of `contrast_rows`; at least one.

    Returns:
      The path.
    """
    labels = list(dict.fromkeys(row["contrast"] for rows in groups.values() for row in rows))
    fig = Figure(figsize=(3.4 + 2.7 * len(groups), 1.3 + 0.34 * len(labels)), layout="constrained")
    axes = np.atleast_1d(fig.subplots(1, len(groups), sharey=True))
    for ax, (title, rows) in zip(axes, groups.items(), strict=True):
        ax.axvline(0, color="#222222", lw=0.9)
        bounds = [row[f"gain_auc_{k}"] for row in rows for k in ("low", "mean", "high")]
        bounds = [bound for bound in bounds if bound is not None]
        far = FAR * float(np.quantile(np.abs(bounds), 0.75)) if bounds else math.inf
        for row in rows:
            y, color, mean = labels.index(row["contrast"]), VERDICT_COLORS[row["verdict"]], row["gain_auc_mean"]
            if mean is None:
                continue
            if abs(mean) > far:  # would squeeze all others together: an arrow at the edge, and its number
                side = math.copysign(1.0, mean)
                ax.plot(side * far, y, ">" if side > 0 else "<", ms=8, color=color)
                ax.annotate(f"{mean:,.3g}", (side * far, y), xytext=(-side * 8, 0), textcoords="offset points",
                            ha="right" if side > 0 else "left", va="center", fontsize=8)  # fmt: skip
                continue
            if row["gain_auc_low"] is not None:
                ax.plot(np.clip([row["gain_auc_low"], row["gain_auc_high"]], -far, far), [y, y], color=color, lw=2.2)
            ax.plot(mean, y, "o", ms=6, color=color)
        for y in set(range(len(labels))) - {labels.index(row["contrast"]) for row in rows}:
            ax.annotate("not run", (0, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel("gain of AUC (return)", fontsize=9)
        ax.grid(axis="x", color="#DDDDDD", lw=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.tick_params(labelsize=9)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    draw_title(fig, "Gain over the base, 95 % interval over seeds (blue: better, orange: worse, grey: undecided)")
    return save_figure(fig, path)
