"""The paper's Figure 6 from saved arms: its table with nulls and intervals beside it, its curves, and what p costs.

Statistics of one environment are `jaxattr.analysis.compare.comparison_table`'s and `efficiency`'s; this module adds
the published numbers, the probability of improvement, seeds that fail, and an aggregate over environments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from jaxattr.analysis import stats
from jaxattr.analysis.compare import BASELINE, NULL, ArmResult, cell, comparison_table, rounded
from jaxattr.analysis.efficiency import METRICS, reductions
from jaxattr.analysis.plots import band_words, draw_curves, draw_legend, draw_title, save_figure
from jaxattr.analysis.tables import aligned, percent

REPLICATIONS = 2_000
AT_P = "iif at the published p"
RANDOM_AT_P = "random, as many as that"


@dataclass(frozen=True)
class Panel:
    """One environment in one setting: its arms, and what they are held against."""

    env: str
    arms: Mapping[str, ArmResult]
    """Name -> arm; holds `none`."""
    p: float
    """Published best p; the arms `iif:P` and `random:P` are the headline."""
    failed: float
    """A seed has failed if its final return is at most this, or it stopped."""
    roles: Mapping[str, str]
    """Arm -> what it is in every environment (`iif-norm:0.5` is `iif-norm`); for the aggregate over environments."""
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """se_ave, se_peak, rt_peak -> (percent, +-); empty where nothing is published."""
    seconds_per_round: Mapping[str, float] = field(default_factory=dict)
    """Arm -> seconds of one round of all its seeds, measured alternately; others have their own run's."""

    @property
    def headline(self) -> str:
        """Name of the arm that the published numbers belong to."""
        return f"iif:{self.p:g}"

    def timed(self) -> dict[str, ArmResult]:
        """The arms, cumulative seconds = round x measured seconds per round where those were measured."""
        import dataclasses

        pace = self.seconds_per_round
        return {
            name: dataclasses.replace(arm, seconds=arm.rounds * pace[name]) if name in pace else arm
            for name, arm in self.arms.items()
        }


def improvement(
    x: ArrayLike, y: ArrayLike, confidence: float = 0.95, replications: int = REPLICATIONS, seed: int = 0
) -> stats.Estimate:
    """Probability that a random run of X is better than a random run of Y, with a bootstrap interval.

        P(X > Y) = 1 / (n_x n_y) sum_ij W_ij,   W_ij = [x_i > y_j] + 1/2 [x_i = y_j]

    Each arm is resampled on its own. A run without a value (NaN) is worse than every run with one.

    Args:
      x: (n_x,) scores of one task.
      y: (n_y,) scores.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Returns:
      (probability, low, high, n), n = the smaller number of runs; the bounds are NaN for n < 2.

    Source: Agarwal et al. 2021, section 4.3.
    """
    a, b = (np.where(np.isnan(v), -np.inf, v) for v in (np.asarray(x, np.float64), np.asarray(y, np.float64)))
    value = stats.probability_of_improvement(a, b)
    n = min(a.size, b.size)
    if n < 2:
        return stats.Estimate(value, math.nan, math.nan, n)
    rng = np.random.default_rng(seed)
    wins = (a[:, None] > b).astype(np.float64) + 0.5 * (a[:, None] == b)
    mine = stats.resample_counts(a.size, replications, rng)
    theirs = stats.resample_counts(b.size, replications, rng)
    draws = ((mine @ wins) * theirs).sum(axis=1) / (a.size * b.size)
    return stats.Estimate(value, *stats.interval_of(draws, confidence), n)


def arm_rows(panel: Panel, *, replications: int = REPLICATIONS, seed: int = 0) -> list[dict[str, Any]]:
    """One row per arm: the columns of `comparison_table`, and

    | column | meaning |
    | --- | --- |
    | `env`, `role`, `published_p` | of the arm |
    | `improvement_final`, `_low`, `_high`, `improvement_auc`, ... | `improvement` over the baseline; None for it |
    | `failed_share` | seeds whose final return is at most `failed_at`, or that stopped |
    | `dropped_share`, `rounds`, `seconds_per_round` | of records collected; of the run; of all its seeds together |
    | `seconds_measured` | `alternately` or `own run` |
    | `published_se_ave_percent`, `published_se_ave_pm`, ... | the paper's, in the row they belong to |
    """
    arms, base = panel.timed(), panel.arms[BASELINE]
    rows = comparison_table(arms, replications=replications, seed=seed)
    out = []
    for row, arm in zip(rows, arms.values(), strict=True):
        more: dict[str, Any] = {"env": panel.env, "role": panel.roles[arm.name], "published_p": panel.p}
        for column, get in (("final", "final_return"), ("auc", "auc")):
            found = improvement(getattr(arm, get), getattr(base, get), replications=replications, seed=seed)
            values = (None,) * 3 if arm.name == BASELINE else found[:3]
            more |= {f"improvement_{column}{e}": v for e, v in zip(("", "_low", "_high"), values, strict=True)}
        more["failed_at"] = panel.failed
        more["failed_share"] = float(np.mean(~(arm.final_return > panel.failed)))
        more["dropped_share"] = 1 - arm.kept_share
        more["rounds"] = int(arm.rounds[-1])
        more["seconds_per_round"] = float(arm.seconds[-1] / arm.rounds[-1])
        more["seconds_measured"] = "alternately" if arm.name in panel.seconds_per_round else "own run"
        for metric in METRICS:
            value, spread = panel.published.get(metric, (None, None)) if arm.name == panel.headline else (None, None)
            more |= {f"published_{metric}_percent": value, f"published_{metric}_pm": spread}
        out.append({**{k: more[k] for k in ("env", "role")}, **row, **more})
    return out


def auc_gain(panel: Panel, arm: str, positions: Sequence[int]) -> float:
    """Mean difference of AUC to the baseline over the seeds at these positions; NaN if none has a value."""
    gap = (panel.arms[arm].auc - panel.arms[BASELINE].auc)[list(positions)]
    return float(gap[np.isfinite(gap)].mean()) if np.isfinite(gap).any() else math.nan


def se_ave_percent(panel: Panel, arm: str, positions: Sequence[int]) -> float:
    """SE_ave of an arm in percent on the seeds at these positions (an upper bound if levels are not reached)."""
    base = panel.arms[BASELINE]
    mean = lambda one: stats.mean_curve(one.test_return[list(positions)])
    found = reductions(mean(base), mean(panel.arms[arm]), base.rounds).rounds
    return 100 * float(found.mean()) if found.size else math.nan


def across_environments(
    panels: Sequence[Panel], *, replications: int = REPLICATIONS, seed: int = 0
) -> list[dict[str, Any]]:
    """IQM of normalised final returns over environments and seeds, per role, with a stratified bootstrap interval.

        normalised = (final return - failed) / (mean final return of the baseline - failed)

    So 0 is the level at which a seed has failed and 1 the baseline's mean, both taken as given (not resampled); a seed
    that stopped counts as 0. An environment whose baseline does not get above the level has no such scale: left out.

    Returns:
      Rows role, environments (names), seeds, iqm, low, high; bounds are NaN with one seed, empty for fewer than two
      environments.
    """
    scale = {}
    for panel in panels:
        final = panel.arms[BASELINE].final_return
        mean = float(final[np.isfinite(final)].mean()) if np.isfinite(final).any() else math.nan
        if mean > panel.failed:
            scale[panel.env] = mean - panel.failed
    used = [panel for panel in panels if panel.env in scale]
    roles: dict[str, list[tuple[str, np.ndarray]]] = {}
    for panel in used:
        named = {role: name for name, role in panel.roles.items()}
        named |= {AT_P: panel.headline, RANDOM_AT_P: f"random:{panel.p:g}"}
        for role, name in named.items():
            if name in panel.arms and role != "random":
                final = panel.arms[name].final_return
                score = np.where(np.isfinite(final), (final - panel.failed) / scale[panel.env], 0.0)
                roles.setdefault(role, []).append((panel.env, score))
    rows = []
    for role, scores in roles.items():
        twin = role.startswith("iif:") and all(role == panel.headline for panel in used)  # has a row as that
        if len(scores) < max(2, len(used)) or twin:
            continue
        matrix, names = np.stack([x for _, x in scores], axis=1), [env for env, _ in scores]
        low, high = math.nan, math.nan
        if len(matrix) >= 2:
            low, high = stats.stratified_bootstrap_interval(
                matrix, runs_axis=0, tasks=names, replications=replications, seed=seed
            )
        row = {"role": role, "environments": names, "seeds": len(matrix)}
        rows.append({**row, "iqm": float(stats.iqm(matrix)), "low": low, "high": high})
    return rows


# -- text ------------------------------------------------------------------------------------------------------------
def headline_table(panels: Sequence[Panel], rows: Sequence[Mapping[str, Any]], skipped: Mapping[str, str]) -> str:
    """Like Figure 6(b): per environment SE_ave, SE_peak, RT_peak of IIF at the published p: paper, ours, our null."""
    heads = {"se_ave": "SE_ave %", "se_peak": "SE_peak %", "rt_peak": "RT_peak %"}
    lines = [["environment", "p", *(f"{heads[m]} {who}" for m in METRICS for who in ("paper", "ours", "null"))]]
    for panel in panels:
        own = {row["arm"]: row for row in rows if row["env"] == panel.env}
        row, null = own.get(panel.headline), own.get(NULL)
        line = [panel.env, percent(panel.p)]
        for metric in METRICS:
            told = panel.published.get(metric)
            line.append("-" if told is None else f"{told[0]:g} +- {told[1]:g}")
            line += [_efficiency_cell(row, metric), _efficiency_cell(null, metric)]
        lines.append(line)
    lines += [[env, "not run", *[""] * 9] for env in skipped]
    return aligned(lines)


def detail_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All arms of one environment."""
    lines = [
        ["arm", "seeds", "final return", "difference of final", "difference of AUC", "P(better)", "failed", "dropped",
         "SE_ave %", "SE_peak %", "RT_peak %", "rounds", "s / round"]
    ]  # fmt: skip
    for row in rows:
        kind = " *" if row["diff_kind"] == "independent" else ""
        lines.append(
            [
                str(row["arm"]),
                str(row["seeds"]),
                cell(row, "final_test_return"),
                cell(row, "diff_final_test_return", sign=True) + kind,
                cell(row, "diff_auc_test_return", sign=True) + kind,
                cell(row, "improvement_final", mean="", digits=2),
                percent(row["failed_share"]),
                percent(row["dropped_share"]),
                *(_efficiency_cell(row, metric) for metric in METRICS),
                str(row["rounds"]),
                rounded(row["seconds_per_round"]) + ("" if row["seconds_measured"] == "alternately" else " ~"),
            ]
        )
    return aligned(lines)


def choice_table(choices: Sequence[Mapping[str, Any]]) -> str:
    """p chosen on one half of the seeds, reported on the other, and what choosing on the same seeds gains."""
    lines = [["environment", "by", "p, other half", "its value", "p, same seeds", "its value", "gained by that"]]
    for row in choices:
        value, best, gain = (rounded(row[k], sign=True) for k in ("value", "best_value", "gain"))
        lines.append([row["env"], row["metric"], f"{row['p']:g}", value, f"{row['best_p']:g}", best, gain])
    return aligned(lines)


def across_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The aggregate over environments."""
    lines = [["arm", "IQM of normalised final returns", "environments"]]
    for row in rows:
        shown = f"{row['iqm']:.3f}" + (f" [{row['low']:.3f}, {row['high']:.3f}]" if math.isfinite(row["low"]) else "")
        lines.append([row["role"], shown, str(len(row["environments"]))])
    return aligned(lines)


def notes(panels: Sequence[Panel], seeds: int, failed_means: Mapping[str, str], choices: bool) -> list[str]:
    """What the numbers are, in plain English."""
    few = " (read intervals of so few seeds as too narrow)" if 1 < seeds < 8 else ""
    lines = [
        f"[low, high]: 95 % bootstrap interval over {seeds} seeds{few}" if seeds > 1 else "one seed: no intervals",
        "SE_ave, SE_peak: how much earlier, in rounds, an arm reaches the returns, or the peak, of 'none'; RT_peak: "
        "the peak in seconds. paper: as published, with its best p chosen on the seeds that are reported",
        f"null: 'none' on other seeds, {NULL!r}: what these numbers say when nothing differs. They are biased "
        "downwards, so hold an arm against the null and not against 0; -: no such arm here",
        "<=: at most; the arm never got to a return that 'none' got to, the true value can only be lower",
        "differences: arm - 'none' on the same seeds (*: other seeds, not paired); AUC: mean test return over the "
        "evaluated rounds; P(better): chance that a random seed of the arm ends higher than one of 'none', a tie is "
        "1/2",
        "s / round: all seeds together, arms measured alternately in short bursts (~: taken from the arm's own run, "
        "which other work on the machine may have slowed; so is its RT_peak)",
    ]
    for panel in panels:
        lines.append(
            f"failed, {panel.env}: final return {panel.failed:g} or less: {failed_means[panel.env]}; or stopped"
        )
    if choices:
        lines.append(
            "p, other half: best on the seeds at even positions, value on the odd ones; p, same seeds: best on the odd "
            "ones and reported on them, as papers do; the difference is no effect of the method"
        )
    elif any(sum(name.startswith("iif:") for name in panel.arms) > 1 for panel in panels):
        lines.append(f"choosing p on one half of the seeds needs 4 seeds or more, here are {seeds}")
    return lines


def _efficiency_cell(row: Mapping[str, Any] | None, metric: str) -> str:
    if row is None or row[f"{metric}_percent"] is None:
        return "-"
    bound = row["unreached_levels_count"] if metric == "se_ave" else row["peak_reached"] is False
    return ("<= " if bound else "") + cell(row, f"{metric}_percent", mean="", digits=0)


# -- picture ---------------------------------------------------------------------------------------------------------
def reproduction_figure(path: str | os.PathLike[str], panels: Sequence[Panel], setting: str) -> Path:
    """Like Figure 6(a): per environment the mean test return over rounds with its bootstrap band over seeds.

    Shown are `none`, its null, and `iif` and `random` at the published best p, where they were run.

    Args:
      path: file to write; the ending chooses the format.
      panels: one per environment, at least one.
      setting: for the title.

    Returns:
      The path.
    """
    columns = len(panels) if len(panels) <= 3 else math.ceil(len(panels) / 2) if len(panels) <= 8 else 4
    across = math.ceil(len(panels) / columns)
    fig = Figure(figsize=(max(4.3 * columns, 7.0), 3.4 * across + 1.0), layout="constrained")
    grid = np.atleast_1d(fig.subplots(across, columns)).reshape(-1)
    options: dict[str, Any] = {"confidence": 0.95, "replications": REPLICATIONS, "seed": 0}
    counts, fullest = [], grid[0]
    for ax, panel in zip(grid, panels, strict=False):
        shown = {"none": "none", NULL: NULL, panel.headline: AT_P, f"random:{panel.p:g}": RANDOM_AT_P}
        curves = {
            label: (panel.arms[name].rounds, panel.arms[name].test_return)
            for name, label in shown.items()
            if name in panel.arms
        }
        counts += draw_curves(ax, curves, BASELINE, NULL, False, options)
        ax.set_title(f"{panel.env}, p = {percent(panel.p)}", fontsize=10, loc="left")
        ax.set_xlabel("round", fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if len(ax.get_legend_handles_labels()[1]) > len(fullest.get_legend_handles_labels()[1]):
            fullest = ax
    for ax in grid[:: columns or 1]:
        ax.set_ylabel("test return", fontsize=9)
    for ax in grid[len(panels) :]:
        ax.set_visible(False)
    draw_title(fig, f"Setting {setting!r}: test return, {band_words(0.95, counts)}")
    draw_legend(fig, fullest, columns=4)
    return save_figure(fig, path)
