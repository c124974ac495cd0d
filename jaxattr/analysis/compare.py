"""Arms of one comparison side by side: a table with intervals and units, a CSV, a JSON, a picture.

An *arm* is a setting trained with S seeds. One arm is the baseline (no filter); the *null* arm is the baseline again
with other seeds, and shows what a difference between equal methods looks like. How each number is computed stands at
`comparison_table`; how intervals are in `jaxattr.analysis.stats`; SE and RT in `jaxattr.analysis.efficiency`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxattr.analysis import stats
from jaxattr.analysis.efficiency import METRICS, efficiency
from jaxattr.analysis.plots import comparison_figure

BASELINE = "none"
NULL = "none (other seeds)"


@dataclass(frozen=True)
class ArmResult:
    """What is kept of one arm. Lists are accepted and become arrays; shapes are checked.

    Raises:
      ValueError: a field's shape does not fit `seeds` and `rounds`, or a cumulative field decreases.
    """

    name: str
    seeds: NDArray[np.int64]
    """(S,) seed values, each once."""
    rounds: NDArray[np.int64]
    """(K,) round numbers, from 1, increasing."""
    env_steps: NDArray[np.int64]
    """(K,) environment steps of ONE seed by the end of each round."""
    test_return: NDArray[np.float64]
    """(S, K) mean return of the evaluation episodes after the round; NaN where not evaluated."""
    train_return: NDArray[np.float64]
    """(S, K) mean return of the training episodes that ended in the round; NaN where none did."""
    kept: NDArray[np.int64]
    """(S, K) records learned from, 0 to records_per_round."""
    records_per_round: int
    """N, records collected per seed and round."""
    optimizer_steps: NDArray[np.int64]
    """(S, K) optimiser steps taken in the round (not cumulative)."""
    seconds: NDArray[np.float64]
    """(K,) cumulative training seconds of the whole arm (all seeds), without compilation and evaluation."""
    compile_s: float = math.nan
    """Seconds spent compiling; NaN = not measured."""

    def __post_init__(self) -> None:
        for field, kind in (("seeds", np.int64), ("rounds", np.int64), ("env_steps", np.int64)):
            object.__setattr__(self, field, np.asarray(getattr(self, field), kind))
        for field in ("test_return", "train_return", "kept", "optimizer_steps", "seconds"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), np.float64))
        s, k = self.seeds.size, self.rounds.size
        shapes = dict.fromkeys(("test_return", "train_return", "kept", "optimizer_steps"), (s, k))
        shapes |= {"seeds": (s,), "rounds": (k,), "env_steps": (k,), "seconds": (k,)}
        for field, shape in shapes.items():
            if getattr(self, field).shape != shape:
                raise ValueError(
                    f"arm {self.name!r}: {field} must have shape {shape}, got {getattr(self, field).shape}"
                )
        if not s or not k:
            raise ValueError(f"arm {self.name!r}: needs at least one seed and one round, got {s} and {k}")
        if np.unique(self.seeds).size != s:
            raise ValueError(f"arm {self.name!r}: seeds must differ, got {self.seeds.tolist()}"[:200])
        if self.rounds[0] < 1 or (np.diff(self.rounds) <= 0).any():
            raise ValueError(f"arm {self.name!r}: rounds must count up from 1 or later")
        if (self.seconds <= 0).any() or (np.diff(self.seconds) < 0).any():
            raise ValueError(f"arm {self.name!r}: seconds must be positive and cumulative")

    @property
    def evaluated(self) -> NDArray[np.bool_]:
        """(K,) rounds at which at least one seed has a test return."""
        return np.asarray(np.isfinite(self.test_return).any(axis=0))

    @property
    def final_return(self) -> NDArray[np.float64]:
        """(S,) test return at the last evaluated round; NaN for a seed without one there, or if there is none."""
        at = np.flatnonzero(self.evaluated)
        return self.test_return[:, at[-1]] if at.size else np.full(self.seeds.size, np.nan)

    @property
    def auc(self) -> NDArray[np.float64]:
        """(S,) mean test return over the evaluated rounds (in units of return).

        NaN for a seed that misses one of them: its remaining rounds would not be comparable.
        """
        at = self.evaluated
        return self.test_return[:, at].mean(axis=1) if at.any() else np.full(self.seeds.size, np.nan)

    @property
    def kept_share(self) -> float:
        """Records learned from over records collected, all seeds and rounds that have a count."""
        return _mean(np.asarray(self.kept, np.float64)) / self.records_per_round


def comparison_table(
    arms: Mapping[str, ArmResult],
    baseline: str = BASELINE,
    null: str = NULL,
    *,
    confidence: float = 0.95,
    replications: int = 2_000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per arm, in the order of `arms`; None where a number does not exist.

    | column | meaning |
    | --- | --- |
    | `arm`, `seeds`, `seeds_complete` | name; S; seeds with a test return at every evaluated round (others left out) |
    | `evaluations` | evaluated rounds |
    | `interval` | kind of every `_low`/`_high` of the row, or why there is none |
    | `final_test_return_mean`, `_low`, `_high`, `_min`, `_max` | test return at the last evaluated round, over seeds |
    | `auc_test_return_mean`, `_low`, `_high` | mean test return over evaluated rounds, over seeds |
    | `diff_final_test_return_mean`, ... | difference to the baseline of the same |
    | `diff_auc_test_return_mean`, ... | difference to the baseline of the same |
    | `diff_kind`, `diff_seeds` | `paired` over the seeds both arms have, `independent` if fewer than 2, or why not |
    | `kept_share` | records learned from / records collected |
    | `optimizer_steps_per_seed` | mean over seeds of the total |
    | `env_steps_per_seed` | of the whole run |
    | `train_seconds`, `compile_seconds` | whole arm, all seeds together |
    | `se_ave_percent`, `se_peak_percent`, `rt_peak_percent`, `_low`, `_high` | 100 x the shares of `efficiency` |
    | `levels_count`, `unreached_levels_count`, `peak_reached` | if levels are unreached the values are upper bounds |
    | `null_se_ave_percent`, ... | the null arm's value: what an arm equal to the baseline would show |

    The baseline's row has no differences, SE or RT; the null's row holds its SE and RT as its own values and no `null_`
    columns. Without a null arm those columns are None. An arm evaluated at other rounds or environment steps than the
    baseline has neither differences nor SE and RT: they would compare different things. Intervals of
    SE and RT resample seeds in pairs if an arm has exactly the baseline's seeds.

    Args:
      arms: name -> `ArmResult`; must hold the baseline.
      baseline: name of the arm that the others are compared with.
      null: name of the arm of the same setting with other seeds, if there is one.
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.

    Raises:
      ValueError: there is no such baseline, or the null shares seeds with it.
    """
    if baseline not in arms:
        raise ValueError(f"no arm named {baseline!r} to compare with; arms: {', '.join(map(repr, arms))}")
    base = arms[baseline]
    other = arms.get(null) if null != baseline else None
    if other is not None and np.intersect1d(other.seeds, base.seeds).size:
        raise ValueError(f"arms {baseline!r} and {null!r} share seeds: the null needs other seeds than the baseline")
    options: dict[str, Any] = {"confidence": confidence, "replications": replications, "seed": seed}
    null_values = _efficiency(base, other, options) if other is not None else {}
    rows = []
    for name, arm in arms.items():
        row: dict[str, Any] = {
            "arm": name,
            "seeds": int(arm.seeds.size),
            "seeds_complete": int(np.isfinite(arm.auc).sum()),
            "evaluations": int(arm.evaluated.sum()),
        }
        enough = np.isfinite(arm.final_return).sum() >= 2
        row["interval"] = f"{100 * confidence:g}% bootstrap over seeds" if enough else "none: fewer than 2 seeds"
        for column, get in _RETURNS:
            values = get(arm)
            row |= _columns(column, stats.mean_estimate(values, **options))
            if column == "final_test_return":
                present = values[np.isfinite(values)]
                row[f"{column}_min"] = float(present.min()) if present.size else None
                row[f"{column}_max"] = float(present.max()) if present.size else None
        row |= _differences(arm, base, options) if name != baseline else dict.fromkeys(_DIFFERENCES)
        row["kept_share"] = arm.kept_share
        row["optimizer_steps_per_seed"] = float(np.nansum(arm.optimizer_steps) / arm.seeds.size)
        row["env_steps_per_seed"] = int(arm.env_steps[-1])
        row["train_seconds"] = float(arm.seconds[-1])
        row["compile_seconds"] = float(arm.compile_s)
        own = {} if name == baseline else null_values if arm is other else _efficiency(base, arm, options)
        row |= {column: own.get(column) for column in _EFFICIENCY}
        beside = null_values if name != baseline and arm is not other else {}
        row |= {f"null_{column}": beside.get(column) for column in _EFFICIENCY}
        rows.append({key: _plain(value) for key, value in row.items()})
    return rows


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as compact markdown text, columns aligned for a terminal.

    An entry is `mean [low, high]`; `SE` and `RT` are in percent, `<=` marks an upper bound (a level was never reached),
    and the value after the slash is the null's: what an arm that is merely equal would show.
    """
    head = ["arm", "seeds", "final return", "AUC (mean return)", "difference of final", "difference of AUC"]
    head += ["kept", "opt. steps", "seconds", "SE_ave % / null", "SE_peak % / null", "RT_peak % / null"]
    lines = [head]
    for row in rows:
        complete = row["seeds_complete"]
        kind = " *" if row["diff_kind"] == "independent" else ""
        cells = [str(row["arm"]), f"{row['seeds']}" if complete == row["seeds"] else f"{complete} of {row['seeds']}"]
        cells += [cell(row, "final_test_return"), cell(row, "auc_test_return")]
        cells += [cell(row, "diff_final_test_return", sign=True) + kind]
        cells += [cell(row, "diff_auc_test_return", sign=True) + kind]
        cells += ["-" if row["kept_share"] is None else f"{100 * row['kept_share']:.1f}%"]
        cells += [f"{row['optimizer_steps_per_seed']:,.0f}", rounded(row["train_seconds"])]
        for metric in METRICS:
            bound = row["unreached_levels_count"] if metric == "se_ave" else row["peak_reached"] is False
            bound = bound and row[f"{metric}_percent"] is not None
            text = ("<= " if bound else "") + cell(row, f"{metric}_percent", mean="", digits=0)
            null = row[f"null_{metric}_percent"]
            cells.append(text if null is None else f"{text} / {rounded(null, 0)}")
        lines.append([cell.strip() for cell in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    text = "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
    notes = []
    if any(row["diff_kind"] == "independent" for row in rows):
        notes.append("* other seeds than the baseline: difference of independent arms, not paired")
    if any(str(row["diff_kind"]).startswith("none") for row in rows):
        notes.append("- in place of a difference: evaluated at other rounds than the baseline, not comparable")
    if "<=" in text:
        notes.append("<= upper bound: the arm never reached a return that the baseline reached")
    if any(row["seeds_complete"] < row["seeds"] for row in rows):
        notes.append("m of n seeds: the others have a round without a test return (stopped) and are left out")
    return "\n".join([text, *([""] if notes else []), *notes]) + "\n"


def write_comparison(
    path_dir: str | os.PathLike[str],
    arms: Mapping[str, ArmResult],
    baseline: str = BASELINE,
    null: str = NULL,
    *,
    title: str = "comparison",
    confidence: float = 0.95,
    replications: int = 2_000,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Write `comparison.csv`, `comparison.json` and `comparison.png` into a directory (made if missing).

    The CSV is the table of `comparison_table`, an empty cell where a number does not exist. The JSON holds the rows,
    how they were computed, and each seed's final return and AUC (`per_seed`), `null` where a number does not exist:
    never NaN. Each file is written whole or not at all.

    Args:
      path_dir: directory.
      arms: name -> `ArmResult`.
      baseline: as in `comparison_table`.
      null: as in `comparison_table`.
      title: first words of the picture's title, for example "FrozenLake-misc".
      confidence: c in (0, 1).
      replications: R >= 1.
      seed: of the resampling.
      extra: what else belongs to the JSON (command, configuration, device, date); plain values.

    Returns:
      The rows.
    """
    folder = Path(path_dir)
    options: dict[str, Any] = {"confidence": confidence, "replications": replications, "seed": seed}
    rows = comparison_table(arms, baseline, null, **options)
    per_seed = [
        {"arm": name, "seed": int(s), "final_test_return": _plain(float(final)), "auc_test_return": _plain(float(auc))}
        for name, arm in arms.items()
        for s, final, auc in zip(arm.seeds, arm.final_return, arm.auc, strict=True)
    ]
    document = {
        "title": title,
        "baseline": baseline,
        "null": null if null in arms else None,
        "interval": {"kind": "percentile bootstrap over seeds", **options},
        "rows": rows,
        "per_seed": per_seed,
        "extra": dict(extra or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomic(folder / "comparison.csv", text.getvalue())
    write_text_atomic(folder / "comparison.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    comparison_figure(folder / "comparison.png", arms, rows, title, baseline=baseline, null=null, **options)
    return rows


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all: to a temporary name beside it, then rename over it."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


# -- pieces ----------------------------------------------------------------------------------------------------------
_RETURNS: tuple[tuple[str, Callable[[ArmResult], NDArray[np.float64]]], ...] = (
    ("final_test_return", lambda arm: arm.final_return),
    ("auc_test_return", lambda arm: arm.auc),
)
_DIFFERENCES = (
    *(f"diff_{column}_{part}" for column, _ in _RETURNS for part in ("mean", "low", "high")),
    "diff_kind",
    "diff_seeds",
)
_EFFICIENCY = (
    *(f"{metric}_percent{part}" for metric in METRICS for part in ("", "_low", "_high")),
    "levels_count",
    "unreached_levels_count",
    "peak_reached",
)


def _columns(column: str, estimate: stats.Estimate) -> dict[str, float]:
    return {f"{column}_mean": estimate.mean, f"{column}_low": estimate.low, f"{column}_high": estimate.high}


def _comparable(base: ArmResult, arm: ArmResult) -> bool:
    """Whether both were evaluated after the same rounds and steps; else neither AUC nor rounds mean the same."""
    same = np.array_equal(base.rounds[base.evaluated], arm.rounds[arm.evaluated])
    return same and np.array_equal(base.env_steps[base.evaluated], arm.env_steps[arm.evaluated])


def _differences(arm: ArmResult, base: ArmResult, options: dict[str, Any]) -> dict[str, Any]:
    if not _comparable(base, arm):
        return dict.fromkeys(_DIFFERENCES) | {"diff_kind": "none: evaluated at other rounds than the baseline"}
    shared, mine, theirs = np.intersect1d(arm.seeds, base.seeds, return_indices=True)
    paired = shared.size >= min(2, arm.seeds.size, base.seeds.size)
    row: dict[str, Any] = {}
    for column, get in _RETURNS:
        if paired:
            found = stats.paired_difference(get(arm)[mine], get(base)[theirs], **options)
        else:
            found = stats.independent_difference(get(arm), get(base), **options)
        row |= _columns(f"diff_{column}", found)
        row |= {"diff_kind": "paired" if paired else "independent", "diff_seeds": found.n}
    return {column: row[column] for column in _DIFFERENCES}


def _efficiency(base: ArmResult, arm: ArmResult, options: dict[str, Any]) -> dict[str, Any]:
    if not _comparable(base, arm) or not np.array_equal(base.rounds, arm.rounds):
        return {}
    timed = np.isfinite(base.seconds).all() and np.isfinite(arm.seconds).all()
    order = np.argsort(arm.seeds), np.argsort(base.seeds)
    found = efficiency(
        base.test_return[order[1]],
        arm.test_return[order[0]],
        rounds=base.rounds,
        std_seconds=base.seconds if timed else None,
        arm_seconds=arm.seconds if timed else None,
        paired=np.array_equal(np.sort(base.seeds), np.sort(arm.seeds)),
        **options,
    )
    row = {f"{m}_percent{part}": 100 * found[m + part] for m in METRICS for part in ("", "_low", "_high")}
    row |= {f"{key}_count": found[key] for key in ("levels", "unreached_levels")}
    return row | {"peak_reached": found["peak_reached"]}


def _mean(values: NDArray[np.float64]) -> float:
    present = values[np.isfinite(values)]
    return float(present.mean()) if present.size else math.nan


def _plain(value: Any) -> Any:
    """A value that JSON can hold: NaN and infinities become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: float | None, digits: int | None = None, sign: bool = False) -> str:
    """Three digits, but four places at most, or a fixed number of places; `-` where there is no value."""
    if value is None:
        return "-"
    places = digits if digits is not None else max(0, min(4, 2 - math.floor(math.log10(abs(value))))) if value else 2
    text = f"{value:{'+' if sign else ''},.{places}f}"
    return text.replace("-0", "0") if float(text.replace(",", "")) == 0 and text.startswith("-") else text


def cell(
    row: Mapping[str, Any], column: str, mean: str = "_mean", sign: bool = False, digits: int | None = None
) -> str:
    """`mean [low, high]`, all three with the places that three digits of the widest of them need."""
    values = [row[column + mean], row[f"{column}_low"], row[f"{column}_high"]]
    if values[0] is None:
        return "-"
    largest = max(abs(v) for v in values if v is not None)
    if digits is None:
        digits = max(0, min(4, 2 - math.floor(math.log10(largest)))) if largest else 2
    parts = [rounded(v, digits, sign) for v in values]
    return parts[0] if values[1] is None else f"{parts[0]} [{parts[1]}, {parts[2]}]"
