"""What the attribution studies find, on tasks and seeds stated beforehand.

    python benchmarks/studies.py lds --out benchmarks/results            # does a score predict retraining?
    python benchmarks/studies.py diagnosis --out benchmarks/results      # are low-scored records' advantages wrong?
    python benchmarks/studies.py behaviour --out benchmarks/results      # three phases of roughness?
    python benchmarks/studies.py intervention --out benchmarks/results   # does a round end better on filtered records?

Claims and tests, stated before the runs:
  lds           a score predicts where the 95 % interval of its LDS over subsets lies above 0 and above the range of its
                own shuffles; per task, optimiser and round.
  diagnosis     (a) sign mismatches are more frequent in the bottom fifth than in the top fifth: interval over seeds of
                the difference above 0; (b) Spearman of the score's rank from the top with A_bar * A is below -0.5 on
                average over seeds.
  behaviour     three phases are found (permutation p <= 0.05) in more than half of the seeds, the second lower than the
                first.
  intervention  the mean difference of test return over all rounds has an interval over seeds above 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxattr.host.xla import use_all_cores

ADAM = {"optimizer": "adam", "learning_rate": 1e-3, "max_grad_norm": 0.5}
TASKS = ("FrozenLake-misc", "CartPole-v1", "Acrobot-v1")


def record(env: str, rounds: list[int], seeds: int, folder: Path, **changes: Any) -> Any:
    """Train the `paper` preset without a filter, with scores, and keep some rounds whole."""
    import jaxattr

    config = jaxattr.preset("paper", env).replace(filter="none", score_always=True, eval_every=0, **changes)
    config = config.replace(total_steps=max(rounds) * config.records_per_round)
    run = jaxattr.train(env, config, seeds=seeds, out=folder, record_rounds=rounds)
    print(f"{env}: trained {seeds} seeds x {max(rounds)} rounds in {run.summary['train_s']:.0f} s", flush=True)
    return run


def lds(subsets: int) -> list[dict[str, Any]]:
    """LDS of every score: three tasks, SGD and Adam, early / middle / late rounds of one seed."""
    from jaxattr.host.counterfactual import counterfactual
    from jaxattr.host.xla import shared_programs

    episodes = {"FrozenLake-misc": 200, "CartPole-v1": 20, "Acrobot-v1": 0}
    rows = []
    for env in TASKS:
        for name, changes in (("sgd", {}), ("adam", ADAM)):
            with tempfile.TemporaryDirectory() as folder, shared_programs():
                run = record(env, [2, 10, 40], 1, Path(folder) / "run", **changes)
                for number in run.rounds:
                    result = counterfactual(run.round(number), subsets=subsets, episodes=episodes[env])
                    where = {"env": env, "optimizer": name, "round": number}
                    rows += [{**where, **row} for row in result["rows"]]
                    alone = result["leave_one_out"]["return"]
                    row = {"effect": "return", "score": "as configured, units left out one by one"}
                    rows.append(
                        {
                            **where,
                            **row,
                            "lds": alone["spearman"],
                            **{k: alone[k] for k in ("low", "high")},
                            "subsets": 64,
                        }
                    )
                    print(result["text"].split("\n\nleft out")[0], flush=True)
    return rows


def diagnosis(seeds: int) -> list[dict[str, Any]]:
    """Mismatch shares in the bottom and top fifth and rank correlation, per seed and round."""
    from jaxattr.host.diagnose import diagnose

    # rounds, seeds, rollouts, horizon: what two cores can do in a few minutes
    plan = {
        "FrozenLake-misc": ([5, 20, 40], seeds, 512, None),
        "CartPole-v1": ([5, 20], max(1, seeds // 2), 64, None),
        "Acrobot-v1": ([5, 20], max(1, seeds // 2), 32, None),
    }
    rows = []
    for env, (rounds, count, rollouts, horizon) in plan.items():
        with tempfile.TemporaryDirectory() as folder:
            run = record(env, rounds, count, Path(folder) / "run")
            for number in rounds:
                for index in range(count):
                    found = diagnose(run.round(number), rollouts=rollouts, horizon=horizon, seed_index=index)
                    rows.append(
                        {"env": env, "round": number, "seed_index": index, **found.summary, "fifths": found.fifths}
                    )
                print(env, number, rows[-1]["seconds"], "s", flush=True)
    return rows


def behaviour(seeds: int) -> list[dict[str, Any]]:
    """Phases of roughness over the rounds in which an action became likely, FrozenLake, per seed."""
    from jaxattr.host.behaviour import behaviour as study

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        record("FrozenLake-misc", list(range(3, 52, 3)), seeds, path)
        for index in range(seeds):
            found = study(path, seed_index=index, out=Path(folder) / "out")
            rows.append(
                {
                    "seed_index": index,
                    "roughness": [r["roughness"] for r in found["rows"]],
                    "relative_roughness": [r["relative_roughness"] for r in found["rows"]],
                    "prob_before": [r["prob_before"] for r in found["rows"]],
                    "rounds": [r["round"] for r in found["rows"]],
                    "phases": {k: v._asdict() for k, v in found["phases"].items()},
                }
            )
            print(index, {k: (v.found, round(v.p_value, 3), v.means) for k, v in found["phases"].items()}, flush=True)
    return rows


def intervention(seeds: int, folder: Path) -> list[dict[str, Any]]:
    """Every fifth round of FrozenLake and Acrobot, retrained on filtered records: differences of test return."""
    from jaxattr.host.intervene import intervene

    arms = ("iif:0.125", "iif:0.5", "iif:1", "iif:0.5+matched", "random:0.5")
    rows = []
    for env, rounds in (("FrozenLake-misc", list(range(5, 51, 5))), ("Acrobot-v1", list(range(5, 26, 5)))):
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "run"
            record(env, rounds, seeds, path)
            found = intervene(path, arms=arms, episodes=100, out=folder / f"intervention_{env}")
            print(found["table"], flush=True)
            rows += [{"env": env, **row} for row in found["rows"]]
    return rows


def main() -> None:
    """One study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("lds", "diagnosis", "behaviour", "intervention"))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--subsets", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    use_all_cores()
    import jax

    from jaxattr.analysis.tables import plain
    from jaxattr.host.checkpoint import write_text
    from jaxattr.host.runner import versions

    args.out.mkdir(parents=True, exist_ok=True)
    rows = {
        "lds": lambda: lds(args.subsets),
        "diagnosis": lambda: diagnosis(args.seeds or 16),
        "behaviour": lambda: behaviour(args.seeds or 20),
        "intervention": lambda: intervention(args.seeds or 32, args.out),
    }[args.study]()
    document = {
        "study": args.study,
        "rows": rows,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind} x {len(jax.devices())}",
        "versions": versions(),
    }
    write_text(args.out / f"study_{args.study}.json", json.dumps(plain(document), indent=None, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
