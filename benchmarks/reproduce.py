"""What the paper's whole comparison costs: seconds per round and lane, and where they go.

    python benchmarks/reproduce.py --out benchmarks/results/reproduce_speed.json

Per environment, in the setting `paper`, five lanes (LunarLander also with 15): seconds of a round without a filter,
with IIF at the published p and with random drops, of its collection alone, and of a round that computes scores without
using them. All programs are compiled first and run in turn, so that they see the same machine; medians over the turns.

    collection = the collecting program; scores = round with scores - round without; learning = the rest of an IIF round

Evaluation depends on how long episodes of trained policies are: its seconds are read from a finished `jaxattr reproduce
iif` (--runs), with the rounds it took. The projection is rounds x seconds per round of the three arms.
Targets: training of six environments x 5 seeds x 3 arms at most 20 minutes, evaluation too; LunarLander at most 0.06 s
per lane and round with 15 lanes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from jaxattr.host.xla import use_all_cores
from jaxattr.studies.reproduction import TASKS, arm_config, parse_arm

HERE = Path(__file__).parent
LANES, MORE_LANES = 5, {"envpool/LunarLander-v3": 15}
TARGET_MINUTES, TARGET_LANE_ROUND = 20.0, 0.06


def programs(env_id: str, lanes: int) -> dict[str, Any]:
    """Name -> function that runs the compiled program once and returns its seconds."""
    import jax
    import jax.numpy as jnp

    from jaxattr.envs.registry import make
    from jaxattr.lanes import place_lanes, spread_lanes
    from jaxattr.train import compile_chunk, init_state, lane_settings, make_update_step

    task = TASKS[env_id]
    config = {name: arm_config("paper", task, parse_arm(name, task), lanes) for name in ("none", "iif", "random")}
    config["scored"] = config["iif"].replace(filter="none", score_always=True)

    def timed(name: str) -> Any:
        only_collect = name == "collection"
        step = make_update_step(
            make(env_id, config["none" if only_collect else name].env_args), config.get(name, config["none"])
        )
        state = place_lanes(init_state(step, range(lanes)), lanes)
        settings = place_lanes(lane_settings(step.config, lanes), lanes)

        def collect(state: Any, settings: Any) -> Any:
            keys = step.split(state)
            env_state, rollout, _ = step.collector.collect(step.nets, state, keys[:, 1])
            sums = jax.tree.map(lambda x: x.astype(jnp.float32).reshape(x.shape[0], -1).sum(1), rollout)
            return state.replace(key=keys[:, 0], env_state=env_state), sums  # all of it is needed, little comes out

        if only_collect:
            program = jax.jit(spread_lanes(collect, lanes, (True, True), (0, 0))).lower(state, settings).compile()
            once = lambda state: program(state, settings)[0]
        else:
            chunk = compile_chunk(step, state, settings, 1)
            once = lambda state: chunk(state, settings, jnp.int32(1))[0]
        held = [jax.block_until_ready(once(state))]

        def run() -> float:
            begin = time.perf_counter()
            held[0] = jax.block_until_ready(once(held[0]))
            return time.perf_counter() - begin

        return run

    return {name: timed(name) for name in (*config, "collection")}


def measure(env_id: str, lanes: int, turns: int) -> dict[str, Any]:
    """One row: medians in seconds per round of all lanes."""
    runs = programs(env_id, lanes)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            seconds[name].append(run())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    whole, collection = median["iif"], median["collection"]
    scores = max(0.0, median["scored"] - median["none"])
    return {
        "env": env_id,
        "lanes": lanes,
        "seconds_per_round": {name: round(value, 4) for name, value in median.items()},
        "iif_seconds_per_lane_round": round(whole / lanes, 4),
        "share_collection": round(collection / whole, 3),
        "share_scores": round(scores / whole, 3),
        "share_learning": round(max(0.0, whole - collection - scores) / whole, 3),
        "all_turns": {name: [round(v, 4) for v in values] for name, values in seconds.items()},
    }


def project(rows: list[dict[str, Any]], runs: Path | None) -> dict[str, Any]:
    """Minutes of the whole comparison, against the targets."""
    done = json.loads(runs.read_text())["runs"] if runs else []
    minutes = {}
    for row in rows:
        if row["lanes"] != LANES:
            continue
        task = TASKS[row["env"]]
        rounds = arm_config("paper", task, parse_arm("none", task), LANES).total_updates
        row["rounds"] = rounds
        minutes[row["env"]] = rounds * sum(row["seconds_per_round"][a] for a in ("none", "iif", "random")) / 60
        row["training_minutes_of_three_arms"] = round(minutes[row["env"]], 2)
        spent = [run["eval_s"] for run in done if run["env"] == row["env"] and run["setting"] == "paper"]
        row["evaluation_minutes_of_three_arms"] = round(sum(spent) / 60, 2) if spent else None
    lander = [row for row in rows if row["lanes"] == MORE_LANES.get(row["env"])]
    evaluated = [row["evaluation_minutes_of_three_arms"] for row in rows if row["lanes"] == LANES]
    return {
        "training_minutes": round(sum(minutes.values()), 1),
        "training_target_minutes": TARGET_MINUTES,
        "evaluation_minutes": None if None in evaluated or not evaluated else round(sum(evaluated), 1),
        "evaluation_from": None if runs is None else runs.name,
        "lunarlander_seconds_per_lane_round": lander[0]["iif_seconds_per_lane_round"] if lander else None,
        "lunarlander_target": TARGET_LANE_ROUND,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=[t.env_id for t in TASKS.values() if t.published], choices=TASKS)
    parser.add_argument("--turns", type=int, default=5, help="how often every program runs")
    parser.add_argument("--runs", type=Path, default=HERE / "results" / "reproduction" / "six_paper_5.json")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    use_all_cores(max(LANES, *MORE_LANES.values()))
    import jax

    from jaxattr.host.runner import versions

    rows = []
    for env_id in args.envs:
        for lanes in (LANES, *([MORE_LANES[env_id]] if env_id in MORE_LANES else [])):
            rows.append(measure(env_id, lanes, args.turns))
            shares = ", ".join(f"{k} {rows[-1][f'share_{k}']:.0%}" for k in ("collection", "scores", "learning"))
            print(
                f"{env_id}, {lanes} lanes: {rows[-1]['iif_seconds_per_lane_round']:.3f} s per lane and round; {shares}",
                flush=True,
            )
    report = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "devices": f"{len(jax.devices())} x {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": versions(),
        "projection": project(rows, args.runs if args.runs.exists() else None),
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(json.dumps(report["projection"], indent=1))


if __name__ == "__main__":
    main()
