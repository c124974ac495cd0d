"""A sweep's results: ranking with intervals, failed settings apart with their reasons, and two pictures.

A trial here is a mapping: `number`, `state` (complete, pruned, fail, running, waiting), `settings` (name -> value) and,
where it has run, `per_seed` (S metrics, None = none), `failed` (S flags), `value`, `low`, `high` (aggregate and its
interval), `reason`, `rounds`, `seconds`, `steps` (K) and `curve` (S rows of K), None = no value.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from jaxattr.analysis.plots import PALETTE, STYLES, save_figure
from jaxattr.analysis.stats import bootstrap_curve
from jaxattr.analysis.tables import aligned, interval, number

Trial = Mapping[str, Any]

SHOWN = 30
"""Most lines of the ranking in a terminal; trials.csv has all of them."""
FAILED_COLOR, EARLY_COLOR = "#C0392B", "#A9A9A9"
COLORS = LinearSegmentedColormap.from_list("sweep", ["#C6DBEF", "#6BAED6", "#2171B5", "#08306B"])
"""Light to dark: the better, the darker."""


def ranked(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """The completed trials, best first; equal ones in the order of their numbers."""
    sign = -1 if direction == "maximize" else 1
    done = [t for t in trials if t["state"] == "complete"]
    return sorted(done, key=lambda t: (sign * t["value"], t["number"]))


def trial_table(trials: Sequence[Trial], seeds: Sequence[int], direction: str) -> list[dict[str, Any]]:
    """One row per trial for a CSV: ranked ones first, then those stopped early, failed, running and waiting.

    Args:
      trials: of one sweep.
      seeds: S values, which name the columns of single seeds.
      direction: maximize or minimize.

    Returns:
      Rows with the same keys: rank (None = not ranked), trial, state, every setting, aggregate, low, high, seeds,
      failed_seeds, rounds, seconds, metric_seed_<seed> per seed, reason.
    """
    best = ranked(trials, direction)
    order = {"pruned": 0, "fail": 1, "running": 2, "waiting": 3}
    rest = sorted((t for t in trials if t["state"] != "complete"), key=lambda t: (order[t["state"]], t["number"]))
    rows = []
    for rank, t in enumerate([*best, *rest]):
        ran = "per_seed" in t
        rows.append(
            {
                "rank": rank + 1 if t["state"] == "complete" else None,
                "trial": t["number"],
                "state": STATES[t["state"]],
                **{name: text(value) for name, value in t["settings"].items()},
                **{name: t.get(key) for name, key in (("aggregate", "value"), ("low", "low"), ("high", "high"))},
                "seeds": len(seeds),
                "failed_seeds": sum(t["failed"]) if ran else None,
                "rounds": t.get("rounds"),
                "seconds": round(t["seconds"], 3) if ran else None,
                **{f"metric_seed_{s}": t["per_seed"][i] if ran else None for i, s in enumerate(seeds)},
                "reason": t.get("reason", "") if t["state"] in ("pruned", "fail", "complete") else "",
            }
        )
    return rows


STATES = {"complete": "complete", "pruned": "stopped early", "fail": "failed", "running": "running", "waiting": "open"}
"""What the states are called in tables."""


def render_ranking(trials: Sequence[Trial], seeds: Sequence[int], metric: str, aggregate: str, direction: str) -> str:
    """The ranking for a terminal: aggregate with interval, what is stopped early, and the failed ones with reasons.

    Args:
      trials: of one sweep.
      seeds: S values.
      metric: what a seed was judged by.
      aggregate: over seeds; named in the head of the table.
      direction: maximize or minimize.
    """
    best = ranked(trials, direction)
    early = [t for t in trials if t["state"] == "pruned"]
    failed = [t for t in trials if t["state"] == "fail"]
    lines = []
    if best:
        names = list(best[0]["settings"])
        head = ["rank", *names, f"{aggregate} of {metric} [95 %]", "seeds", "failed seeds"]
        cells = [
            [
                str(rank),
                *(text(t["settings"][n]) for n in names),
                f"{number(t['value'])} {bounds(t)}",
                str(len(seeds)),
                str(sum(t["failed"])),
            ]
            for rank, t in enumerate(best[:SHOWN], start=1)
        ]
        lines.append(aligned([head, *cells]))
        if len(best) > SHOWN:
            lines.append(f"and {len(best) - SHOWN} more")
        lines += ["", overlap_note(best, len(seeds), direction)]
    else:
        lines.append("no setting has a result")
    lines += ["", f"stopped early, because they were behind: {len(early)}"] if early else []
    lines += [f"  {sentence(t)}: {t['reason']}" for t in early[:SHOWN]]
    if failed:
        lines += ["", f"failed, not ranked: {len(failed)}"]
        lines += [f"  {sentence(t)}{_how_many(t)}: {t.get('reason') or 'no value'}" for t in failed]
    open_ = sum(t["state"] in ("running", "waiting") for t in trials)
    lines += ["", f"not finished yet: {open_}"] if open_ else []
    return "\n".join(lines)


def overlap_note(best: Sequence[Trial], seeds: int, direction: str) -> str:
    """Whether the seeds settle which setting is best.

    Args:
      best: completed trials, best first; at least one.
      seeds: S.
      direction: maximize or minimize.
    """
    if len(best) == 1:
        return "one setting: nothing to compare"
    if seeds < 2:
        return "one seed per setting: no intervals, so the order says little"
    if direction == "maximize":
        near = [t for t in best[1:] if t["high"] >= best[0]["low"]]
    else:
        near = [t for t in best[1:] if t["low"] <= best[0]["high"]]
    if not near:
        return f"the best setting's interval (95 % bootstrap over {seeds} seeds) overlaps with no other one's"
    many = f"those of {len(near)} other settings" if len(near) > 1 else "that of one other setting"
    return f"the best setting's interval overlaps with {many}: {seeds} seeds do not settle which is best"


def parallel_figure(
    path: str | os.PathLike[str], trials: Sequence[Trial], title: str, words: str, direction: str
) -> Path:
    """Parallel coordinates: one line per trial through its settings, coloured by its aggregate.

    Args:
      path: file to write; the ending chooses the format.
      trials: of one sweep; those that have not run are left out.
      title: first words of the title.
      words: what the aggregate is, for the last axis.
      direction: maximize or minimize; the better a line, the darker.

    Returns:
      The path written.
    """
    shown = [t for t in trials if t["state"] in ("complete", "pruned", "fail")]
    names = list(shown[0]["settings"]) if shown else []
    axes = [_Axis([t["settings"][n] for t in trials]) for n in names]
    values = [t["value"] for t in shown if t["state"] == "complete"]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    norm, colors = Normalize(low, high), COLORS if direction == "maximize" else COLORS.reversed()
    sign = 1 if direction == "maximize" else -1
    fig = Figure(figsize=(min(16.0, 3.4 + 1.9 * (len(names) + 1)), 5.6), layout="constrained")
    ax = fig.add_subplot()
    # Better ones above; equal lines beside each other rather than on each other.
    order = {"fail": 0, "pruned": 1, "complete": 2}
    for place, t in enumerate(sorted(shown, key=lambda t: (order[t["state"]], sign * (t.get("value") or 0.0)))):
        shift = (place / max(len(shown) - 1, 1) - 0.5) * min(0.1, 0.006 * len(shown))
        ys = [axis.place(t["settings"][n]) + (shift if axis.ticked else 0) for n, axis in zip(names, axes, strict=True)]
        if t["state"] == "complete":
            color = colors(norm(t["value"]))
            ax.plot(range(len(ys) + 1), [*ys, norm(t["value"])], color=color, lw=1.7, alpha=0.85, zorder=3)
            ax.plot(len(ys), norm(t["value"]), "o", ms=5, color=color, zorder=4)
        elif t["state"] == "pruned":
            ax.plot(range(len(ys)), ys, color=EARLY_COLOR, lw=1.0, ls=(0, (1.5, 1.5)), zorder=1)
        else:
            ax.plot(range(len(ys)), ys, color=FAILED_COLOR, lw=1.3, ls=(0, (4, 2)), alpha=0.8, zorder=2)
            ax.plot(len(ys) - 1, ys[-1], "X", ms=9, color=FAILED_COLOR, mec="white", mew=0.8, zorder=5)
    _draw_axes(ax, names, axes, low, high, words)
    kinds = {t["state"] for t in shown}
    marks = {
        "fail": Line2D([], [], color=FAILED_COLOR, ls=(0, (4, 2)), marker="X", ms=8, mec="white", label="failed"),
        "pruned": Line2D([], [], color=EARLY_COLOR, ls=(0, (1.5, 1.5)), label="stopped early"),
    }
    handles = [line for kind, line in marks.items() if kind in kinds]
    if handles:
        fig.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    if values:
        bar = fig.colorbar(ScalarMappable(norm, colors), ax=ax, pad=0.02, aspect=30)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(labelsize=9)
    counts = ", ".join(f"{sum(t['state'] == k for t in shown)} {STATES[k]}" for k in order if k in kinds)
    fig.suptitle(f"{title}: settings and {words} ({counts or 'nothing has run'})", fontsize=11, x=0.012, ha="left")
    return save_figure(fig, path)


def curves_figure(
    path: str | os.PathLike[str], trials: Sequence[Trial], title: str, direction: str, *, top: int = 5
) -> Path:
    """Learning curves of the best few settings: mean over seeds with a 95 % bootstrap band; the other ones thin grey.

    Args:
      path: file to write; the ending chooses the format.
      trials: of one sweep.
      title: first words of the title.
      direction: maximize or minimize.
      top: how many are named.

    Returns:
      The path written.
    """
    best = ranked(trials, direction)
    fig = Figure(figsize=(8.4, 5.2 + 0.19 * min(top, len(best))), layout="constrained")
    ax = fig.add_subplot()
    for t in [*best[top:], *(t for t in trials if t["state"] == "pruned")]:
        x, y = _curve(t)
        ax.plot(x, bootstrap_curve(y, replications=1).mean, color="#BBBBBB", lw=0.8, zorder=1)
    for i in reversed(range(min(top, len(best)))):  # the best one on top
        x, y = _curve(best[i])
        band, color = bootstrap_curve(y), PALETTE[i % len(PALETTE)]
        if np.isfinite(band.low).any():
            ax.fill_between(x, band.low, band.high, color=color, alpha=0.16, lw=0, zorder=2 + top - i)
        name = f"{i + 1}: {words(best[i]['settings'])} ({number(best[i]['value'])} {bounds(best[i])})"
        style = STYLES[i % len(STYLES)]
        ax.plot(x, band.mean, color=color, ls=style, lw=1.9, label=name, zorder=20 + top - i)
    ax.set_xlabel("environment steps per seed", fontsize=10)
    ax.set_ylabel(best[0]["curve_of"] if best else "return", fontsize=10)
    ax.xaxis.set_major_formatter(FuncFormatter(_steps))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", lw=0.7)
    ax.margins(x=0.01)
    ax.tick_params(labelsize=9)
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        fig.legend(handles[::-1], labels[::-1], loc="outside lower left", frameon=False, fontsize=9)
    grey = "; grey: the other settings" if len(best) > top or any(t["state"] == "pruned" for t in trials) else ""
    what = f"the best {min(top, len(best))} of {len(best)} settings" if best else "no setting has a result"
    bands = "\nmean and 95 % bootstrap band over seeds" if best and len(best[0]["per_seed"]) > 1 else "\none seed"
    fig.suptitle(f"{title}: {what}{bands if best else ''}{grey}", fontsize=11, x=0.012, ha="left")
    return save_figure(fig, path)


def text(value: Any) -> str:
    """A setting's value in a table."""
    if isinstance(value, (list, tuple)):
        pairs = value and isinstance(value[0], (list, tuple))
        return json.dumps(dict(value)) if pairs else "-".join(map(text, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def words(settings: Mapping[str, Any]) -> str:
    """`learning_rate = 0.001, hidden = 64-64`."""
    return ", ".join(f"{name} = {text(value)}" for name, value in settings.items())


def bounds(t: Trial) -> str:
    """`[low, high]` of a trial's aggregate."""
    return interval(*(math.nan if t[k] is None else t[k] for k in ("low", "high"))).replace("+", "")


def sentence(t: Trial) -> str:
    """A trial by number and settings."""
    return f"trial {t['number']}, {words(t['settings'])}"


def _how_many(t: Trial) -> str:
    return f" ({sum(t['failed'])} of {len(t['failed'])} seeds)" if "failed" in t else ""


def _steps(value: float, _: int) -> str:
    """Tick text of a number of steps: 50,000 is `50k`."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _curve(t: Trial) -> tuple[np.ndarray, np.ndarray]:
    """Steps (K,) and returns (S, K), NaN = no value."""
    return np.array(t["steps"], np.float64), np.array(
        [[math.nan if v is None else v for v in row] for row in t["curve"]], np.float64
    )


class _Axis:
    """One setting's axis: places from 0 to 1. Few or non-numeric values stand side by side, others keep distances."""

    def __init__(self, values: Sequence[Any]):
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
        numeric = len(numbers) == len(values)
        # Words keep the order in which the sweep names them.
        known: list[Any] = sorted(set(numbers)) if numeric else list(dict.fromkeys(values))
        self.known = [text(v) for v in known]
        self.ticked = not numeric or len(known) <= 8
        self.log = not self.ticked and known[0] > 0 and known[-1] / known[0] >= 20
        self.scale = math.log10 if self.log else float
        self.ends = (0.0, 1.0) if self.ticked else (self.scale(known[0]), self.scale(known[-1]))

    def place(self, value: Any) -> float:
        """From 0 to 1."""
        if self.ticked:
            return self._slot(self.known.index(text(value)))
        low, high = self.ends
        return (self.scale(value) - low) / (high - low)

    def _slot(self, i: int) -> float:
        return i / (len(self.known) - 1) if len(self.known) > 1 else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """(place, text)."""
        if self.ticked:
            return [(self._slot(i), word) for i, word in enumerate(self.known)]
        low, high = self.ends
        if self.log:  # the ends, and the powers of ten that are not too near to them
            decades = range(math.ceil(low), math.floor(high) + 1)
            inner = [float(d) for d in decades if 0.06 < (d - low) / (high - low) < 0.94]
        else:
            inner = [low + p * (high - low) for p in (0.25, 0.5, 0.75)]
        return [((x - low) / (high - low), f"{10**x if self.log else x:.3g}") for x in (low, *inner, high)]


def _draw_axes(ax: Axes, names: Sequence[str], axes: Sequence[_Axis], low: float, high: float, words: str) -> None:
    """A vertical line with ticks per setting, and one for the result."""
    halo = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
    for i, axis in enumerate(axes):
        ax.axvline(i, color="#444444", lw=1.0, zorder=2)
        for place, word in axis.ticks():
            ax.plot([i - 0.015, i + 0.015], [place, place], color="#444444", lw=1.0, zorder=6)
            ax.text(i - 0.03, place, word, ha="right", va="center", fontsize=9, zorder=7, bbox=halo)
    ax.axvline(len(axes), color="#444444", lw=1.0, zorder=2)
    heads = [f"{n}\n(log scale)" if a.log and not a.ticked else n for n, a in zip(names, axes, strict=True)]
    ax.set_xticks(range(len(axes) + 1), [*heads, words.replace(" of ", "\nof ")], fontsize=10)
    ax.set_yticks([])
    ax.set_ylim(-0.06, 1.06)
    ax.set_xlim(-0.45, len(axes) + 0.08)
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="x", length=0, pad=8)
