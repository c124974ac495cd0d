"""What the studies cost: TracIn beside the optimisation it watches, counterfactual retraining, diagnosis by branching.

    python benchmarks/attribution.py [--json FILE]

One round of FrozenLake (preset `paper`: 2048 records, 10 epochs of minibatches of 64, networks 64-64). Medians of
alternating runs in one process, compilation apart. Targets: TracIn <= 2.5 of the round's own optimisation for the
action target (exact at every step) and for the return target refreshed once an epoch; 5,000 retrainings in <= 60 s on 2
cores, faster than a Python loop over the compiled round; 2048 records x 32 rollouts diagnosed in <= 6 s.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxattr.host.xla import use_all_cores


def seconds(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median wall seconds of each, taking turns; the first call of each compiles and is not counted."""
    import jax

    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in taken.items()}


def tracin(round_: Any, repeats: int) -> dict[str, Any]:
    """Seconds of one optimisation, and of it with TracIn in three ways; what refreshing once an epoch loses."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxattr.attribution.targets import action_target
    from jaxattr.studies.replay import retrain, score

    step, data = round_.step, round_.lane(0)
    data = data.replace(weights=data.records.valid.astype(jnp.float32))
    act = action_target(data.records.obs[7], data.records.action[7])
    jobs = {
        "optimisation alone": lambda d: retrain(step, d, d.weights)[0],
        "action target, every step": lambda d: score(step, d, target=act, checkpoint="steps"),
        "return target, every epoch": lambda d: score(step, d, target="return", checkpoint="epochs"),
        "return target, every step": lambda d: score(step, d, target="return", checkpoint="steps"),
    }
    compiled = {name: jax.jit(job) for name, job in jobs.items()}
    took = seconds({name: lambda f=f: f(data) for name, f in compiled.items()}, repeats)
    exact, rough = (np.asarray(compiled[f"return target, every {k}"](data)) for k in ("step", "epoch"))
    return {
        "seconds": {k: round(v, 5) for k, v in took.items()},
        "ratio": {k: round(v / took["optimisation alone"], 2) for k, v in took.items()},
        "epoch_refresh_relative_error": float(np.linalg.norm(rough - exact) / np.linalg.norm(exact)),
        "epoch_refresh_correlation": float(np.corrcoef(rough, exact)[0, 1]),
    }


def counterfactual(round_: Any, repeats: int) -> dict[str, Any]:
    """Retrainings per second on random halves: the vmapped program, and a Python loop over one compiled retraining."""
    import jax
    import jax.numpy as jnp

    from jaxattr.studies import counterfactual as study
    from jaxattr.studies.replay import retrain, subset_step

    step, data = round_.step, round_.lane(0)
    valid = data.records.valid
    effects = study.make_effects(step, data, round_.env, {}, 0)
    drawn = study.draw_subsets(jax.random.key(0), jnp.arange(valid.shape[0]), valid, 256, 0.5)
    learner = subset_step(step)

    @jax.jit
    def one(data: Any, weights: Any) -> Any:
        return effects["return"](retrain(learner, data, weights)[0], data)

    few = 32
    programs = {f"chunk {c}": study.make_retrainer(step, effects, "compact", drawn.kept, c) for c in (4, 16, 64)}
    runs: dict[str, Callable[[], Any]] = {
        name: lambda run=run: run(data, drawn.weights) for name, run in programs.items()
    }
    runs["python loop"] = lambda: [one(data, w) for w in drawn.weights[:few]]
    took = seconds(runs, repeats)
    count = {name: few if name == "python loop" else 256 for name in runs}
    rate = {name: count[name] / took[name] for name in runs}
    best = max(v for k, v in rate.items() if k != "python loop")
    return {
        "retrainings_per_s": {k: round(v, 1) for k, v in rate.items()},
        "seconds_for_5000": round(5000 / best, 1),
        "against_python_loop": round(best / rate["python loop"], 2),
    }


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--records", type=int, default=2048)
    args = parser.parse_args()
    use_all_cores()
    import jax

    import jaxattr
    from jaxattr.host.diagnose import diagnose
    from jaxattr.host.runner import versions

    config = jaxattr.preset("paper", "FrozenLake-misc").replace(
        filter="none", score_always=True, num_steps=args.records, total_steps=4 * args.records
    )
    round_ = jaxattr.train("FrozenLake-misc", config, seeds=1, record_rounds=(4,)).round(4)
    result: dict[str, Any] = {
        "tracin": tracin(round_, args.repeats),
        "counterfactual": counterfactual(round_, args.repeats),
        "diagnosis": {},
        "records": args.records,
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind} x {len(jax.devices())}",
        "versions": versions(),
    }
    timed = diagnose(round_, rollouts=32)
    result["diagnosis"] = {"seconds": timed.summary["seconds"], "records": args.records, "rollouts": 32}
    text = json.dumps(result, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
