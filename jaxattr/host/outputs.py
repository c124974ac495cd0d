"""The files of a run: `config.json`, `metrics.csv`, `records.csv`, `summary.json`, TensorBoard events, W&B."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxattr.config import ConfigError
from jaxattr.host.checkpoint import write_text
from jaxattr.types import NONFINITE_FIELDS

COLUMNS: tuple[str, ...] = (
    "seed",
    "lane",
    "update",
    "env_steps",
    "episodes",
    "return_mean",
    "length_mean",
    "test_return",
    "test_return_deterministic",
    "kept",
    "dropped",
    "negative",
    "leftover",
    "optimizer_steps",
    "approx_kl",
    "clip_fraction",
    "entropy",
    "policy_loss",
    "value_loss",
    "explained_variance",
    "grad_norm",
    "target_grad_norm",
    "learning_rate",
    "score_mean",
    "score_min",
    "score_q25",
    "score_median",
    "score_q75",
    "score_max",
    "nonfinite",
)
"""Columns of metrics.csv: one row per lane and update; `lane` is the position in the run (a sweep has several lanes
per seed). An empty cell is a value that does not exist."""

TENSORBOARD = ("return_mean", "test_return", "kept", "approx_kl", "entropy", "value_loss", "explained_variance")


def metric_rows(
    history: Mapping[str, np.ndarray], seeds: Sequence[int], first: int, last: int, records_per_round: int
) -> list[dict[str, Any]]:
    """Rows for rounds `first` .. `last` (1-based, inclusive), from arrays of shape (updates, S)."""
    rows = []
    for update in range(first, last + 1):
        for lane, seed in enumerate(seeds):
            if history["stopped"][update - 1, lane]:
                continue
            row: dict[str, Any] = {
                "seed": seed,
                "lane": lane,
                "update": update,
                "env_steps": update * records_per_round,
            }
            for name in COLUMNS[4:]:
                value = history[name][update - 1, lane]
                if name == "nonfinite":
                    row[name] = NONFINITE_FIELDS[int(value) - 1] if value else ""
                elif np.issubdtype(type(value), np.integer):
                    row[name] = int(value)
                else:
                    row[name] = "" if np.isnan(value) else f"{float(value):.7g}"
            rows.append(row)
    return rows


class RunFolder:
    """Writes a run's files. Everything is appended or replaced atomically; nothing is ever half there."""

    def __init__(self, path: Path, wandb: bool = False):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._events: dict[int, Any] = {}
        self._wandb_on, self._wandb = wandb, None

    @staticmethod
    def refuse_foreign(path: Path) -> None:
        """Raise ConfigError if `path` holds anything already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "a run" if (path / "config.json").exists() else "other files"
            raise ConfigError(f"{path} already holds {what}: choose another --out, or continue it with --resume")

    def write_json(self, name: str, content: Any) -> None:
        """Replace a JSON file."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / name, json.dumps(content, indent=1, default=_plain) + "\n")

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to metrics.csv (one write call), to TensorBoard and to W&B."""
        target = self.path / "metrics.csv"
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        if not target.exists():
            writer.writeheader()
        writer.writerows(rows)
        with target.open("a") as f:
            f.write(buffer.getvalue())
            f.flush()
            os.fsync(f.fileno())
        for row in rows:
            self._tensorboard(row)
        if self._wandb is not None:
            for row in rows:
                prefix = f"lane_{row['lane']}_seed_{row['seed']}"
                values = {f"{prefix}/{k}": float(v) for k, v in row.items() if k not in ("nonfinite",) and v != ""}
                self._wandb.log({"env_steps": row["env_steps"], **values})

    def trim_metrics(self, update: int) -> list[dict[str, str]]:
        """Drop rows after round `update` (written by a run that was then killed); returns what stays."""
        target = self.path / "metrics.csv"
        if not target.exists():
            return []
        with target.open(newline="") as f:
            rows = [r for r in csv.DictReader(f) if _whole(r) and int(r["update"]) <= update]
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(target, buffer.getvalue())
        return rows

    def write_timing(self, seconds: Sequence[float]) -> None:
        """Training seconds per round. Not in metrics.csv, which is the same bit for bit in every repetition."""
        rows = [f"{i + 1},{x:.6g}\n" for i, x in enumerate(seconds)]
        write_text(self.path / "timing.csv", "update,train_seconds\n" + "".join(rows))

    def read_timing(self, update: int) -> list[float]:
        """What `write_timing` wrote, for the first `update` rounds."""
        lines = (self.path / "timing.csv").read_text().splitlines()[1:] if update else []
        return [float(line.split(",")[1]) for line in lines[:update]]

    def write_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Replace a CSV file."""
        self.path.mkdir(parents=True, exist_ok=True)
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path / name, buffer.getvalue())

    def start_wandb(self, config: dict[str, Any]) -> None:
        """Begin a W&B run if asked for (WANDB_MODE=offline works).

        Raises:
          ConfigError: wandb is not installed.
        """
        if not self._wandb_on:
            return
        try:
            import wandb
        except ImportError:
            raise ConfigError("--wandb needs the wandb package: pip install 'jaxattr[wandb]'") from None
        self.path.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb.init(project="jaxattr", config=config, dir=str(self.path))

    def close(self) -> None:
        """Flush event files."""
        for writer in self._events.values():
            writer.close()
        self._events.clear()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def _tensorboard(self, row: dict[str, Any]) -> None:
        lane = row["lane"]
        if lane not in self._events:
            from tensorboardX import SummaryWriter

            name = f"lane_{lane}_seed_{row['seed']}"
            self._events[lane] = SummaryWriter(str(self.path / "tensorboard" / name))
        for name in TENSORBOARD:
            if row[name] != "":
                self._events[lane].add_scalar(name, float(row[name]), row["env_steps"])


def record_rows(judged: Any, lane: int, seed: int, round_: int, num_envs: int, top: int) -> list[dict[str, Any]]:
    """The `top` highest and lowest scored records of a round, one dict each, best first.

    `record` is the index t * num_envs + b; `kept` the filter's verdict; advantage and reward are as the learner used
    them (raw GAE, scaled reward), the observation as the network saw it.
    """
    records, scores, weights = judged.records, np.asarray(judged.scores[lane]), np.asarray(judged.weights[lane])
    if np.all(np.isnan(scores)):
        raise ConfigError("no scores in this round: train with a filter or --score-always (or this seed had stopped)")
    valid = np.asarray(records.valid[lane])
    ranked = [i for i in np.argsort(-scores, kind="stable") if valid[i]]
    chosen = ranked if len(ranked) <= 2 * top else ranked[:top] + ranked[-top:]
    place = {int(i): k + 1 for k, i in enumerate(ranked)}
    field = {n: np.asarray(getattr(records, n)[lane]) for n in ("obs", "action", "advantage", "reward", "value")}
    ends = np.asarray(records.terminated[lane]), np.asarray(records.truncated[lane])
    return [
        {
            "seed": seed,
            "lane": lane,
            "round": round_,
            "rank": place[int(i)],
            "record": int(i),
            "step": int(i) // num_envs,
            "env": int(i) % num_envs,
            "score": float(scores[i]),
            "kept": bool(weights[i] > 0),
            "action": np.round(field["action"][i], 6).tolist(),
            "reward": float(field["reward"][i]),
            "advantage": float(field["advantage"][i]),
            "value": float(field["value"][i]),
            "terminated": bool(ends[0][i]),
            "truncated": bool(ends[1][i]),
            "obs": _short(field["obs"][i]),
        }
        for i in chosen
    ]


def _short(obs: np.ndarray) -> str:
    flat = obs.reshape(-1)
    if flat.size > 4 and np.all((flat == 0) | (flat == 1)) and flat.sum() == 1:
        return f"one-hot {int(flat.argmax())} of {flat.size}"
    if flat.size > 64:
        return f"{'x'.join(map(str, obs.shape))} array, {int((flat != 0).sum())} entries not 0"
    return " ".join(f"{x:.5g}" for x in flat)


def _whole(row: dict[str, Any]) -> bool:
    return None not in row.values() and None not in row and str(row.get("update", "")).isdigit()


def _plain(x: Any) -> Any:
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray):
        return x.tolist()
    raise TypeError(f"{type(x).__name__} is not JSON")
