"""A training run in memory, and the pictures and closing lines made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.analysis import plots
from jaxattr.config import Config, ConfigError
from jaxattr.envs.base import AnyEnv
from jaxattr.host.agent import Agent
from jaxattr.host.outputs import record_rows
from jaxattr.host.progress import duration
from jaxattr.host.rounds import load_round
from jaxattr.studies.replay import Round
from jaxattr.types import TrainState
from jaxattr.update import UpdateStep


class Stopped(RuntimeError):
    """Every seed met a non-finite value; what was trained before is kept. `run` holds it."""

    def __init__(self, message: str, run: Run):
        super().__init__(message)
        self.run = run


@dataclass
class ChunkInfo:
    """What a callback sees after each chunk of updates."""

    update: int  # rounds finished
    total_updates: int
    metrics: dict[str, np.ndarray]  # rows of this chunk: (rounds, S) or (rounds, S, 5) arrays
    run: Run


@dataclass
class Run:
    """A training run in memory: metrics, agents, records.

    Attributes:
      env_id, config, seeds: what was run.
      metrics: name -> (updates, S) array, the columns of metrics.csv (NaN where there is no value).
      evaluations: update -> (S, 2, E) returns, [:, 0] stochastic and [:, 1] deterministic.
      seconds: (updates,) wall seconds of training per round, all lanes together.
      summary: what summary.json holds.
      state: the training state after the last round, with a leading lane axis.
      rounds: recorded rounds: number -> `Round`, or its file where the run has a folder; `round` opens either.
    """

    env_id: str
    config: Config
    seeds: tuple[int, ...]
    env: AnyEnv
    step: UpdateStep
    state: TrainState
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    evaluations: dict[int, np.ndarray] = field(default_factory=dict)
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    summary: dict[str, Any] = field(default_factory=dict)
    rounds: dict[int, Any] = field(default_factory=dict)
    _judged: dict[int, Any] = field(default_factory=dict)
    _replay: Callable[[int], Any] | None = None

    def agent(self, index: int) -> Agent:
        """The policy of lane `index` (a position, not a seed value), by itself.

        Raises:
          IndexError: there is no such lane.
        """
        if not 0 <= index < len(self.seeds):
            raise IndexError(f"seed index {index}: this run has {len(self.seeds)} (0 to {len(self.seeds) - 1})")
        take = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), tree)
        return Agent(
            self.env_id,
            self.seeds[index],
            self.config,
            self.step.nets,
            take(self.state.params),
            take(self.state.obs_stats),
        )

    def round(self, number: int) -> Round:
        """A recorded round, whole: see `record_rounds` of `jaxattr.train`.

        Raises:
          ConfigError: it was not recorded.
        """
        if number not in self.rounds:
            kept = ", ".join(map(str, sorted(self.rounds))) or "none"
            raise ConfigError(f"round {number} was not recorded whole (recorded: {kept}); train with record_rounds")
        kept = self.rounds[number]
        return kept if isinstance(kept, Round) else load_round(kept)

    def records(self, round: int | None = None, *, index: int = 0, top: int = 20) -> list[dict[str, Any]]:
        """The most helpful and most harmful records of a round: score, observation, action, advantage, reward.

        Args:
          round: 1-based; None = the last one. A round that was not kept is run again from the start state (the
            compiled update is deterministic), which takes as long as training up to there did.
          index: lane.
          top: how many from each end.

        Returns:
          One dict per record, highest score first.
        """
        last = max(self._judged) if self._judged else 0
        round = last if round is None else round
        if round not in self._judged:
            if self._replay is None or not 1 <= round <= self.config.total_updates:
                raise ValueError(f"round {round}: kept are {sorted(self._judged)}, and it cannot be run again")
            self._judged[round] = self._replay(round)
        return record_rows(self._judged[round], index, self.seeds[index], round, self.config.num_envs, top)


def draw_run(path: Path, run: Run) -> None:
    """learning_curve.png, and scores.png where there are scores."""
    m = run.metrics
    if not m or not len(m["kept"]):
        return
    x = np.arange(1, len(m["kept"]) + 1) * run.config.records_per_round
    tested = np.flatnonzero(np.any(np.isfinite(m["test_return"]), axis=1))
    curves = {"training episodes": (x, m["return_mean"].T)}
    if len(tested) > 1:
        curves["test, stochastic policy"] = (x[tested], m["test_return"][tested].T)
    plots.learning_curve_figure(
        path / "learning_curve.png",
        curves,
        title=f"{run.env_id}, filter {run.config.filter}",
        xlabel="environment steps per seed",
        ylabel="episode return",
        per_seed=True,
    )
    if run.config.needs_scores:
        names = ("score_min", "score_q25", "score_median", "score_q75", "score_max")
        plots.score_figure(
            path / "scores.png",
            x,
            (m["kept"] / np.maximum(m["kept"] + m["dropped"], 1)).T,
            (0, 0.25, 0.5, 0.75, 1),
            np.stack([m[n].T for n in names], axis=-1),
            title=f"{run.env_id}, filter {run.config.filter}",
            xlabel="environment steps per seed",
        )


def closing_lines(run: Run) -> list[str]:
    """What to say at the end: steps, times, final test returns."""
    s = run.summary
    rate = f"{s['env_steps_per_s']:,.0f} steps/s" if s["env_steps_per_s"] else "nothing to do"
    lines = [
        f"{s['env_steps']:,} env steps; training {duration(s['train_s'])} ({rate}), compiling {s['compile_s']:.1f} s, "
        f"evaluation {s['eval_s']:.1f} s, writing {s['write_s']:.1f} s"
    ]
    finals = {"stochastic": s["final_test_return"], "deterministic": s["final_test_return_deterministic"]}
    shown = [f"{np.nanmean(values):.4g} ({kind})" for kind, values in finals.items() if values is not None]
    if shown:
        lines.append(
            f"final test return {', '.join(shown)}, mean over {len(run.seeds)} seeds x {s['eval_episodes']} episodes"
        )
    return lines
