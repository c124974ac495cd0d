"""Sweeps without files or clocks: what a definition means, its points, the programs they fill, and their ranking.

A point is one choice of the swept settings. A point that differs from another in traced numbers only
(`jaxattr.config.TRACED`) runs in the same compiled program, as other lanes of it; every other setting shapes a program
of its own. Letters: `P` points, `S` seeds; a program of P points has P * S lanes, seeds fastest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxattr.analysis.stats import bootstrap_interval, iqm
from jaxattr.analysis.sweep import words
from jaxattr.config import TRACED, Config, ConfigError, diff

AGGREGATES: dict[str, Any] = {"iqm": iqm, "mean": np.mean, "median": np.median, "min": np.min}

Point = dict[str, Any]
"""Swept setting -> its value, in the order of the definition."""


@dataclass(frozen=True)
class Choices:
    """A setting that takes one of a list of values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Interval:
    """A setting drawn from [low, high], evenly or (`log`) evenly in its logarithm; `whole`: whole numbers only."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Halving:
    """Successive halving: after each share of the rounds in `rungs` the best ceil(P / eta) of P points go on."""

    rungs: tuple[float, ...] = (0.25, 0.5)
    eta: float = 2.0


@dataclass(frozen=True)
class Sweep:
    """A checked definition.

    Attributes:
      env, config, seeds: what every point has in common; config holds preset, length and fixed settings.
      space: (name, what it may be) per swept setting, in the order of the file.
      method: grid, random or optuna.
      trials: number of points.
      sampler_seed: of the random draws and of Optuna's sampler.
      metric: what a seed is judged by. `final_test_return`: mean return of the last evaluation's episodes, actions
        sampled (unless eval_policy is deterministic). `auc`: mean over all evaluations of the same.
      aggregate: of the seeds' metrics: iqm, mean, median or min.
      direction: maximize or minimize.
      halving: early stop of points that are behind, or None.
      batch: points asked from Optuna at a time.
      lanes_per_program: most lanes of one compiled program; None = as many as fit in memory.
    """

    env: str
    config: Config
    seeds: tuple[int, ...]
    space: tuple[tuple[str, Choices | Interval], ...]
    method: str
    trials: int
    sampler_seed: int
    metric: str
    aggregate: str
    direction: str
    halving: Halving | None
    batch: int
    lanes_per_program: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """The swept settings."""
        return tuple(name for name, _ in self.space)

    def describe(self) -> dict[str, Any]:
        """All that decides the results, as plain values (how many lanes share a program does not)."""
        plain = dataclasses.asdict(self)
        plain.pop("lanes_per_program")
        if self.method != "optuna":
            plain.pop("batch")
        plain["config"] = self.config.to_dict()
        plain["space"] = {name: dataclasses.asdict(what) for name, what in self.space}
        return json.loads(json.dumps(plain))

    def digest(self) -> str:
        """sha256 of `describe`: workers may share a storage if it is equal."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def config_of(self, point: Mapping[str, Any]) -> Config:
        """The whole configuration of a point.

        Raises:
          ConfigError: these values do not work together; the line ends with the point.
        """
        try:
            return self.config.replace(**point)
        except ConfigError as error:
            raise ConfigError(f"{error} (at {words(point)})") from None


# -- points and programs ---------------------------------------------------------------------------------------------
def points_of(sweep: Sweep) -> list[Point]:
    """All points of a grid (the last setting fastest) or of a random search; those of Optuna are asked for one by one.

    Raises:
      ConfigError: values that do not work together.
    """
    if sweep.method == "grid":
        lists = [what.values for _, what in sweep.space if isinstance(what, Choices)]
        points = [dict(zip(sweep.names, values, strict=True)) for values in itertools.product(*lists)]
    elif sweep.method == "random":
        rng = np.random.default_rng(sweep.sampler_seed)
        points = [{name: _draw(rng, what) for name, what in sweep.space} for _ in range(sweep.trials)]
    else:
        return []
    for point in points:
        sweep.config_of(point)
    return points


def shape_of(config: Config) -> str:
    """Equal for configurations that one compiled program can run: all settings that are not traced, as text."""
    plain = {k: v for k, v in config.to_dict().items() if k not in TRACED}
    plain["value_clip_range"] = config.value_clip_range is not None  # clipping at all is compiled in
    return json.dumps(plain, sort_keys=True)


def group_by_shape(sweep: Sweep, points: Sequence[Point]) -> list[list[int]]:
    """Positions of the points that share a program shape, in the order in which shapes first occur."""
    groups: dict[str, list[int]] = {}
    for i, point in enumerate(points):
        groups.setdefault(shape_of(sweep.config_of(point)), []).append(i)
    return list(groups.values())


def chunks_of(count: int, most: int) -> tuple[int, list[range]]:
    """`count` points in as few programs of at most `most` as possible, all of one width.

    Returns:
      (width, the positions in each): equal widths, since another width would be another compiled program; the last
      ones may hold a point less and are filled up by the runner.
    """
    programs = -(-count // max(1, most))
    width = -(-count // programs)
    return width, [range(i, min(i + width, count)) for i in range(0, count, width)]


def lane_values(config: Config, points: Sequence[Point], seeds: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
    """Seed and traced settings of every lane of a program.

    Args:
      config: of any point of the program: its traced numbers are used where a point has none.
      points: P points of one shape.
      seeds: S.

    Returns:
      seeds (P * S), and name -> (P * S) floats for every traced setting that some point has; off is infinity.
    """
    names = [n for n in TRACED if any(n in point for point in points)]
    number = lambda x: math.inf if x is None else float(x)
    per_lane = {
        n: [number(point.get(n, getattr(config, n))) for point in points for _ in seeds] for n in names
    }  # fmt: skip
    return [s for _ in points for s in seeds], per_lane


# -- judging ---------------------------------------------------------------------------------------------------------
def aggregate(sweep: Sweep, per_seed: Sequence[float | None]) -> tuple[float, float, float]:
    """The sweep's aggregate over a point's seeds, and its 95 % percentile bootstrap interval over seeds.

    Args:
      sweep: names the aggregate.
      per_seed: (S,) metrics, None or NaN = a seed without one.

    Returns:
      (value, low, high). The value is NaN if any seed has none: the rest would be a lucky choice of seeds. Bounds are
      NaN for one seed.
    """
    x = np.array([math.nan if v is None else v for v in per_seed], np.float64)
    if not x.size or not np.isfinite(x).all():
        return math.nan, math.nan, math.nan
    statistic = AGGREGATES[sweep.aggregate]
    return float(statistic(x)), *bootstrap_interval(x, statistic, replications=2_000)


def survivors(sweep: Sweep, values: Sequence[float], eta: float) -> list[int]:
    """Positions of the points that go on after a rung: the best ceil(P' / eta) of the P' that have a value, in order.

    Args:
      sweep: names the direction.
      values: (P,) aggregates at the rung; NaN = has failed, never goes on.
      eta: > 1.
    """
    there = [i for i, v in enumerate(values) if math.isfinite(v)]
    sign = -1 if sweep.direction == "maximize" else 1
    best = sorted(there, key=lambda i: (sign * values[i], i))
    return sorted(best[: math.ceil(len(there) / eta)])


def rung_rounds(halving: Halving | None, rounds: int) -> list[int]:
    """The rounds after which points are compared: 1 <= r < rounds, increasing."""
    return [] if halving is None else sorted({r for s in halving.rungs if 1 <= (r := round(s * rounds)) < rounds})


def encode(value: Any) -> Any:
    """A setting's value as an Optuna choice: numbers, words and none as they are, others as JSON."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)


def difference(stored: Mapping[str, Any], sweep: Sweep) -> str:
    """How a stored description and this sweep differ: up to three entries."""
    flat = lambda d: {**d, **{f"config.{k}": v for k, v in d["config"].items()}, "config": None}
    lines = diff(flat(dict(stored)), flat(sweep.describe()))
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def _draw(rng: np.random.Generator, what: Choices | Interval) -> Any:
    if isinstance(what, Choices):
        return what.values[int(rng.integers(len(what.values)))]
    low, high = (what.low - 0.5, what.high + 0.5) if what.whole else (what.low, what.high)
    x = math.exp(rng.uniform(math.log(low), math.log(high))) if what.log else rng.uniform(low, high)
    return int(min(max(round(x), what.low), what.high)) if what.whole else float(min(max(x, what.low), what.high))
