"""A sweep's compiled programs: many settings and seeds as lanes of one, compiled once per shape and width."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config
from jaxattr.envs.base import pure
from jaxattr.envs.registry import make
from jaxattr.evaluate import DETERMINISTIC, STOCHASTIC
from jaxattr.host.history import nonfinite_line
from jaxattr.host.progress import rounds_per_call
from jaxattr.lanes import place_lanes
from jaxattr.studies.sweep import Point, Sweep, aggregate, lane_values, rung_rounds, shape_of, survivors
from jaxattr.train import compile_test, init_state, lane_settings, make_chunk, make_update_step
from jaxattr.types import Settings, TrainState

CHUNK = 64
"""Most rounds per call of the compiled chunk (rows of its metrics buffer)."""
CPU_BLOCK = 4
"""Lanes of one device that a program on a CPU trains at a time, block after block: more of them fall out of the cache
(CartPole, 32 lanes per device: all at once take a quarter longer than four at a time)."""
PROGRAMS = 8
"""Compiled shapes kept at a time."""
CURVE_NUMBERS = 4_000
"""Most numbers of one point's learning curves that are kept: they go into the storage beside the result."""

Watcher = Callable[[int, str], None]
"""Called after every call of a program with the rounds done so far and a few words."""


@dataclass
class Outcome:
    """What became of one point.

    Attributes:
      per_seed: (S,) metrics, None where a seed has none.
      reasons: one line per seed that met a non-finite value: seed, update, field.
      failed: (S,) whether that stopped the seed.
      behind: why the point was stopped early, else None.
      rounds: of training.
      steps, curve: (K,) environment steps, and (S rows of K) returns: test returns where there are three or more
        evaluations, else those of the training episodes. None = no value.
      curve_of: which of the two.
      seconds: of its program, shared out over the program's points.
    """

    per_seed: list[float | None]
    reasons: list[str]
    failed: list[bool]
    behind: str | None
    rounds: int
    steps: list[int]
    curve: list[list[float | None]]
    curve_of: str
    seconds: float


class Programs:
    """Runs points of a sweep; programs of shapes that were met before are not compiled again."""

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self._shapes: dict[str, Shape] = {}

    def shape(self, config: Config) -> Shape:
        """What runs configurations of this shape."""
        key = shape_of(config)
        if key not in self._shapes:
            if len(self._shapes) >= PROGRAMS:
                self._shapes.pop(next(iter(self._shapes)))
            self._shapes[key] = Shape(self.sweep, config)
        return self._shapes[key]

    def run(self, points: Sequence[Point], width: int | None = None, watch: Watcher | None = None) -> list[Outcome]:
        """Train points of one shape together.

        Args:
          points: P.
          width: points per program, P or more; None = the narrowest that is compiled already, else P.
          watch: sees progress.
        """
        return self.shape(self.sweep.config_of(points[0])).run(points, width, watch or (lambda done, note: None))


@dataclass
class Shape:
    """The programs of one shape, by their number of lanes."""

    sweep: Sweep
    config: Config
    compiled: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env = pure(make(self.sweep.env, self.config.env_args), "be swept in one program")
        self.step = make_update_step(self.env, self.config)
        self.rounds = self.config.total_updates

    @functools.cached_property
    def start(self) -> TrainState:
        """Every seed's state before the first round, (S,): a lane's start depends on its seed alone."""
        return init_state(self.step, self.sweep.seeds)

    def lane_bytes(self) -> int:
        """A simple estimate of the memory of one lane: states and records in and out, and the widest activations."""

        def one() -> Any:
            state, settings = init_state(self.step, (0,)), lane_settings(self.config, 1)
            return state, self.step.round(state, settings)

        size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        state, (_, _, judged) = jax.eval_shape(one)
        c = self.config
        scored = min(c.records_per_round, c.score_chunk or c.records_per_round) if c.needs_scores else 0
        widest = 4 * max(scored, c.minibatch_size) * sum(c.hidden)
        return 3 * size(state) + 4 * size(judged) + 4 * widest

    def run(self, points: Sequence[Point], width: int | None, watch: Watcher) -> list[Outcome]:
        """See `Programs.run`."""
        begin, seeds = time.perf_counter(), self.sweep.seeds
        if width is None:
            fits = [lanes // len(seeds) for lanes in self.compiled if lanes >= len(points) * len(seeds)]
            width = min(fits, default=len(points))
        run = _Lanes(self, list(points), width)
        pace, compiled = 0.0, time.perf_counter()
        watch(0, f"{len(points)} settings x {len(seeds)} seeds, compiled in {compiled - begin:.1f} s")
        while run.done < self.rounds and run.alive():
            before = time.perf_counter()
            count = run.advance(min(CHUNK, rounds_per_call(pace)))
            pace = (time.perf_counter() - before) / count
            rate = run.width * len(seeds) * self.config.records_per_round / pace
            watch(run.done, f"{len(run.going)} settings x {len(seeds)} seeds, {rate:,.0f} steps/s")
        share = (time.perf_counter() - begin) / len(points)
        return [run.outcome(i, share) for i in range(len(points))]

    def program(self, lanes: int, state: TrainState, settings: Settings) -> tuple[Any, Any, Any]:
        """The compiled chunk, evaluation, and evaluation after the last round of this many lanes."""
        if lanes not in self.compiled:
            c, count, key = self.config, jnp.int32(1), jax.random.key(self.config.eval_seed)
            block = CPU_BLOCK if jax.default_backend() == "cpu" else None
            chunk = make_chunk(self.step, lanes, min(CHUNK, self.rounds), block).lower(state, settings, count).compile()
            test = last = compile_test(self.step, self.env, state, key, c.eval_episodes)
            if c.final_eval_episodes not in (None, c.eval_episodes):
                last = compile_test(self.step, self.env, state, key, c.final_eval_episodes)
            self.compiled[lanes] = chunk, test, last
        return self.compiled[lanes]


class _Lanes:
    """Points on their way through one shape's program. Position = place in the list of points."""

    def __init__(self, shape: Shape, points: list[Point], width: int):
        self.shape, self.points, self.width = shape, points, width
        self.sweep, self.seeds = shape.sweep, shape.sweep.seeds
        self.done = 0
        self.going = list(range(len(points)))  # those still trained, one slot each
        self.rungs = rung_rounds(self.sweep.halving, shape.rounds)
        self.every = shape.config.eval_every or shape.rounds
        size = (len(points), len(self.seeds))
        self.train = np.full((shape.rounds, *size), np.nan)
        self.tests: dict[int, np.ndarray] = {}
        self.first: dict[tuple[int, int], str] = {}  # (point, seed's position) -> what went wrong first
        self.failed = np.zeros(size, bool)
        self.behind: dict[int, str] = {}
        self.ended = np.full(len(points), shape.rounds)
        lanes = width * len(self.seeds)
        places = np.tile(np.arange(len(self.seeds)), width)
        state = jax.tree.map(lambda x: x[places], shape.start)
        filled = [points[i] for i in self._slots(width)]
        _, per_lane = lane_values(shape.config, filled, self.seeds)
        settings = lane_settings(shape.config, lanes, per_lane)
        self.state, self.settings = place_lanes(state, lanes), place_lanes(settings, lanes)
        self.chunk, self.test, self.last_test = shape.program(lanes, self.state, self.settings)

    def _slots(self, width: int) -> list[int]:
        """Positions of the points in the program's slots; spare slots repeat the first, and are not looked at."""
        return self.going + [self.going[0]] * (width - len(self.going))

    def alive(self) -> bool:
        """Whether any lane can still learn."""
        return bool(np.asarray(self.state.alive).any()) and not self.failed[self.going].all()

    def advance(self, most: int) -> int:
        """Train up to the next evaluation or rung, `most` rounds at most. Returns the rounds trained."""
        stops = [*self.rungs, self.shape.rounds, (self.done // self.every + 1) * self.every]
        count = min(most, *(s - self.done for s in stops if s > self.done))
        self.state, metrics, _ = self.chunk(self.state, self.settings, jnp.int32(count))
        self._keep(metrics, count)
        self.done += count
        if self.done in stops:
            self._evaluate()
        if self.done in self.rungs and self.alive():
            self._halve()
        return count

    def _keep(self, metrics: Any, count: int) -> None:
        """Returns of the training episodes, and the first non-finite value of every lane."""
        folded = lambda x: np.asarray(x)[:count].reshape(count, self.width, -1)[:, : len(self.going)]
        returns = folded(metrics.return_mean).astype(np.float64)
        returns[:, self.failed[self.going]] = np.nan
        codes, where = folded(metrics.nonfinite), folded(metrics.nonfinite_index)
        stop = self.shape.config.on_nonfinite == "stop"
        for slot, point in enumerate(self.going):
            for s, seed in enumerate(self.seeds):
                bad = np.flatnonzero(codes[:, slot, s])
                if self.failed[point, s] or not bad.size:
                    continue
                if (point, s) not in self.first:
                    row = int(bad[0])
                    found = int(codes[row, slot, s]), int(where[row, slot, s])
                    self.first[point, s] = nonfinite_line(self.shape.config, seed, self.done + row + 1, *found)
                self.failed[point, s] = stop
                if stop:
                    returns[bad[0] :, slot, s] = np.nan
        self.train[self.done : self.done + count, self.going] = returns

    def _evaluate(self) -> None:
        key = jax.random.key(self.shape.config.eval_seed)
        play = self.last_test if self.done == self.shape.rounds else self.test
        result = play(self.state.params, self.state.obs_stats, key)
        kind = DETERMINISTIC if self.shape.config.eval_policy == "deterministic" else STOCHASTIC
        means = np.asarray(result.episode_return, np.float64)[:, kind].mean(-1).reshape(self.width, -1)
        tests = np.full(self.failed.shape, np.nan)
        tests[self.going] = means[: len(self.going)]
        tests[self.failed] = np.nan
        self.tests[self.done] = tests

    def metric(self, point: int) -> np.ndarray:
        """(S,) the sweep's metric as of now, NaN = none."""
        if not self.tests:
            return np.full(len(self.seeds), np.nan)
        if self.sweep.metric == "auc":
            values = np.stack([t[point] for k, t in sorted(self.tests.items()) if k <= self.ended[point]]).mean(0)
        else:
            values = self.tests[max(k for k in self.tests if k <= self.ended[point])][point]
        return np.where(self.failed[point], np.nan, values)

    def _halve(self) -> None:
        """Stop the points that are behind; the rest go on in a program that is narrower by eta."""
        assert self.sweep.halving is not None
        eta = self.sweep.halving.eta
        values = [aggregate(self.sweep, self.metric(i).tolist())[0] for i in self.going]
        keep = survivors(self.sweep, values, eta)
        for slot, point in enumerate(self.going):
            if slot in keep:
                continue
            self.ended[point] = self.done
            if np.isfinite(values[slot]):
                worst = min(keep, key=lambda k: abs(values[k] - values[slot]))
                self.behind[point] = (
                    f"behind after {self.done} of {self.shape.rounds} rounds: {self.sweep.aggregate} "
                    f"{values[slot]:.4g}, the last one kept has {values[worst]:.4g} "
                    f"({len(keep)} of {len(self.going)} go on)"
                )
        self.going = [self.going[slot] for slot in keep]
        if not keep:  # every point has a seed that stopped
            return
        self.width = math.ceil(self.width / eta)
        chosen = np.array(keep + [keep[0]] * (self.width - len(keep)))
        lanes = (chosen[:, None] * len(self.seeds) + np.arange(len(self.seeds))).ravel()
        take = lambda tree: place_lanes(jax.tree.map(lambda x: x[lanes], tree), len(lanes))
        self.state, self.settings = take(self.state), take(self.settings)
        self.chunk, self.test, self.last_test = self.shape.program(len(lanes), self.state, self.settings)

    def outcome(self, point: int, seconds: float) -> Outcome:
        """What became of a point, after the last round."""
        plain = lambda x: [float(v) if np.isfinite(v) else None for v in x]
        ended = min(int(self.ended[point]), self.done)
        tested = [k for k in sorted(self.tests) if k <= ended]
        if len(tested) >= 3:
            rounds, rows = np.array(tested), np.stack([self.tests[k][point] for k in tested], axis=1)
        else:
            rounds, rows = np.arange(1, ended + 1), self.train[:ended, point].T
        most = max(2, CURVE_NUMBERS // len(self.seeds))
        keep = np.unique(np.linspace(0, len(rounds) - 1, min(most, len(rounds))).round().astype(int))
        return Outcome(
            per_seed=plain(self.metric(point)),
            reasons=[self.first[point, s] for s in range(len(self.seeds)) if (point, s) in self.first],
            failed=self.failed[point].tolist(),
            behind=self.behind.get(point),
            rounds=ended,
            steps=(rounds[keep] * self.shape.config.records_per_round).tolist(),
            curve=[plain(row[keep]) for row in rows],
            curve_of="test return" if len(tested) >= 3 else "return of training episodes",
            seconds=seconds,
        )
