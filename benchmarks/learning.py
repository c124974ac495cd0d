"""Does it learn? Every task with and without filtering, many seeds, against a stated floor.

    python benchmarks/learning.py --task CartPole-v1 --out benchmarks/results     # one task
    python benchmarks/learning.py --task all --out benchmarks/results

One JSON file per task: final test return per seed (stochastic policy) for filter none and iif (p = 0.125), mean and
95 % bootstrap interval over seeds, the floor that was stated beforehand, seconds, versions, device, command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxattr.host.xla import use_all_cores


@dataclass(frozen=True)
class Task:
    """What is trained, with how many seeds, and what it must reach."""

    env: str
    seeds: int
    floor: float | None  # None: the floor is a share of a peer's result, see README.md
    statistic: str  # of the per-seed final test returns: "min", "median", "mean" or "low" (lower 95 % bound)
    preset: str = "tuned"
    changes: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "CartPole-v1": Task("CartPole-v1", 8, 475.0, "min"),
    "Acrobot-v1": Task("Acrobot-v1", 8, -100.0, "mean"),
    "Pendulum-v1": Task("Pendulum-v1", 8, -250.0, "mean"),
    "FrozenLake-misc": Task("FrozenLake-misc", 8, 0.95, "median", preset="paper"),
    "Breakout-MinAtar": Task("Breakout-MinAtar", 4, None, "low"),
    "brax/inverted_pendulum": Task("brax/inverted_pendulum", 4, 900.0, "mean"),
    "brax/ant": Task("brax/ant", 3, None, "low"),
}


def run_task(name: str, filters: list[str]) -> dict[str, Any]:
    """Train both arms; everything a reader needs in one dict."""
    import numpy as np

    import jaxattr
    from jaxattr.analysis.stats import bootstrap_interval

    task = TASKS[name]
    arms = {}
    for rule in filters:
        config = jaxattr.preset(task.preset, task.env).replace(filter=rule, p=0.125, **task.changes)
        run = jaxattr.train(task.env, config, seeds=task.seeds, quiet=False)
        returns = np.array(run.summary["final_test_return"])
        low, high = bootstrap_interval(returns)
        value = {"min": returns.min(), "median": np.median(returns), "mean": returns.mean(), "low": low}[task.statistic]
        arms[rule] = {
            "final_test_return": returns.round(3).tolist(),
            "deterministic": np.round(run.summary["final_test_return_deterministic"], 3).tolist(),
            "mean": round(float(returns.mean()), 3),
            "interval_95": [round(float(low), 3), round(float(high), 3)],
            task.statistic: round(float(value), 3),
            "passed": None if task.floor is None else bool(value >= task.floor),
            **{k: run.summary[k] for k in ("env_steps", "train_s", "compile_s", "eval_s", "env_steps_per_s")},
            "eval_episodes": config.eval_episodes,
        }
    return {
        "task": name,
        "statistic": task.statistic,
        "floor": task.floor,
        "seeds": list(range(task.seeds)),
        "arms": arms,
        "config": config.to_dict(),
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": run.summary["device"],
        "versions": run.summary["versions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=[*TASKS, "all"])
    parser.add_argument("--filters", nargs="+", default=["none", "iif"])
    parser.add_argument("--out", type=Path, help="folder for learning_<task>.json")
    args = parser.parse_args()
    use_all_cores()
    for name in TASKS if args.task == "all" else [args.task]:
        result = run_task(name, args.filters)
        for rule, arm in result["arms"].items():
            print(name, rule, json.dumps({k: v for k, v in arm.items() if k != "deterministic"}), flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"learning_{name.replace('/', '_')}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
