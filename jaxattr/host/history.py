"""Metrics of all rounds so far, on the host: collected chunk by chunk, or read back from metrics.csv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxattr.config import Config
from jaxattr.evaluate import STOCHASTIC
from jaxattr.types import NONFINITE_FIELDS


def nonfinite_line(config: Config, seed: int, update: int, code: int, index: int) -> str:
    """What met a non-finite value, when and where: `code` and `index` as in `Metrics.nonfinite`."""
    where = f", record {index} (step {index // config.num_envs}, environment {index % config.num_envs})"
    what = "stopped" if config.on_nonfinite == "stop" else "discarded this round"
    field = NONFINITE_FIELDS[code - 1]
    return f"seed {seed}: non-finite {field} in update {update}{where if index >= 0 else ''}: {what}"


class History:
    """Metrics of all rounds so far, on the host."""

    def __init__(self, lanes: int):
        self.lanes = lanes
        self.parts: dict[str, list[np.ndarray]] = {}
        self.tests: dict[int, np.ndarray] = {}  # update -> (2, S) mean test returns
        self.seconds: list[float] = []  # per round
        self.written = 0
        self.stop_lines: list[str] = []
        self._dead = np.zeros(lanes, bool)
        self._fresh: list[tuple[int, int, int, int]] = []

    def add(self, metrics: Any, seconds: float) -> None:
        """Append a chunk's metrics, leading axes (rounds, S), and how long the chunk took."""
        columns = {k: v for k, v in vars(metrics).items() if k != "score_quantiles"}
        for i, name in enumerate(("score_min", "score_q25", "score_median", "score_q75", "score_max")):
            columns[name] = metrics.score_quantiles[..., i]
        stopped = np.zeros(columns["kept"].shape, bool)
        start = sum(len(x) for x in self.parts.get("kept", []))
        for t in range(len(stopped)):
            stopped[t] = self._dead
            for lane in map(int, np.flatnonzero((columns["nonfinite"][t] != 0) & ~self._dead)):
                self._fresh.append(
                    (start + t + 1, lane, int(columns["nonfinite"][t, lane]), int(columns["nonfinite_index"][t, lane]))
                )
                self._dead[lane] = True
        columns["stopped"] = stopped
        self.seconds += [seconds / len(stopped)] * len(stopped)
        for name, values in columns.items():
            self.parts.setdefault(name, []).append(values)

    def new_stops(self, seeds: Sequence[int], config: Config) -> list[str]:
        """Lines about seeds that met a non-finite value since the last call."""
        lines = [nonfinite_line(config, seeds[lane], update, code, index) for update, lane, code, index in self._fresh]
        if config.on_nonfinite == "skip":
            self._dead[:] = False
        self._fresh = []
        self.stop_lines += lines
        return lines

    def add_evaluation(self, update: int, result: Any) -> None:
        """Keep the mean test returns after `update` rounds."""
        self.tests[update] = result.episode_return.mean(-1).T

    def arrays(self) -> dict[str, np.ndarray]:
        """name -> (updates, S)."""
        out = {k: np.concatenate(v) for k, v in self.parts.items()}
        rounds = len(out["kept"]) if out else 0
        for i, name in enumerate(("test_return", "test_return_deterministic")):
            out[name] = np.full((rounds, self.lanes), np.nan, np.float32)
            for update, values in self.tests.items():
                out[name][update - 1] = values[i]
        for values in out.values():
            if values.dtype.kind == "f":
                values[out["stopped"]] = np.nan
        return out

    def load(self, rows: list[dict[str, str]], seconds: list[float], done: int) -> None:
        """Take over the rounds that metrics.csv already holds."""
        self.written, self.seconds = done, seconds
        names = [n for n in (rows[0] if rows else {}) if n not in ("seed", "lane", "update", "env_steps")]
        whole = {"episodes", "kept", "dropped", "negative", "leftover", "optimizer_steps"}
        table = {
            n: np.full((done, self.lanes), 0 if n in whole else np.nan, np.int32 if n in whole else np.float32)
            for n in names
        }
        codes = np.zeros((done, self.lanes), np.int32)
        stopped = np.ones((done, self.lanes), bool)
        for row in rows:
            t, lane = int(row["update"]) - 1, int(row["lane"])
            stopped[t, lane] = False
            for n in names:
                if n == "nonfinite":
                    codes[t, lane] = NONFINITE_FIELDS.index(row[n]) + 1 if row[n] else 0
                elif row[n] != "":
                    table[n][t, lane] = int(row[n]) if n in whole else float(row[n])
        if not rows:
            return
        table["nonfinite"] = codes
        # Two fields that metrics.csv does not spell out.
        table["records"] = table["kept"] + table["dropped"]
        table["nonfinite_index"] = np.full((done, self.lanes), -1, np.int32)
        for i, n in enumerate(("test_return", "test_return_deterministic")):
            values = table.pop(n)
            for t in np.flatnonzero(~np.all(np.isnan(values), axis=1)):
                self.tests.setdefault(int(t) + 1, np.full((2, self.lanes), np.nan))[i] = values[t]
        self._dead = stopped[-1] | (codes[-1] != 0)
        table["stopped"] = stopped
        self.parts = {n: [v] for n, v in table.items()}

    def note(self, pace: float, steps_per_round: int) -> str:
        """Progress in figures: env steps/s, returns, kept share."""
        last = {k: v[-1][-1] for k, v in self.parts.items()}
        mean = lambda x: float(np.nanmean(x)) if np.any(np.isfinite(x)) else float("nan")
        recent = np.concatenate(self.parts["return_mean"][-1:])[-10:]
        text = f"{steps_per_round / max(pace, 1e-9):,.0f} steps/s, return {mean(recent):.4g}"
        if self.tests:
            text += f", test {mean(self.tests[max(self.tests)][STOCHASTIC]):.4g}"
        share = last["kept"].sum() / max((last["kept"] + last["dropped"]).sum(), 1)
        return f"{text}, kept {share:.1%}"
