"""Environment steps per second of whole training programs, compilation apart.

    python benchmarks/throughput.py --work W3 --json                 # filter off
    python benchmarks/throughput.py --work W3 --filter iif --p 0.125 --json
    python benchmarks/throughput.py --work LIST                      # all names

Works W1-W5 are the usual PPO programs of other JAX frameworks (2x64 tanh networks; W5: brax, 2x256 tanh, observation
and reward normalisation). The program is the one that `jaxattr train` runs: chunks of updates with metrics, lanes
spread over the host devices. The last line is JSON: work, env_steps, seconds (median run), steps_per_s, compile_s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from jaxattr.host.xla import use_all_cores


def _works() -> dict[str, dict[str, Any]]:
    works: dict[str, dict[str, Any]] = {}

    def add(name, env, envs, steps, minibatches, epochs, seeds=1, **changes):
        works[name] = {"env": env, "seeds": seeds}
        works[name]["config"] = {
            "num_envs": envs,
            "num_steps": steps,
            "minibatch_size": envs * steps // minibatches,
            "num_epochs": epochs,
            "learning_rate": 2.5e-4,
            "ent_coef": 0.01,
            "max_grad_norm": 0.5,
            **changes,
        }

    add("W1", "CartPole-v1", 4, 128, 4, 4)
    add("W2", "CartPole-v1", 4, 128, 4, 4, seeds=16)
    add("W3", "CartPole-v1", 64, 32, 32, 10)
    add("W3x8", "CartPole-v1", 64, 32, 32, 10, seeds=8)
    add("W4", "Acrobot-v1", 64, 32, 32, 10)
    add("W4x8", "Acrobot-v1", 64, 32, 32, 10, seeds=8)
    for env in ("ant", "halfcheetah"):
        for backend in ("spring", "positional"):
            for envs, steps in ((64, 32), (256, 10)):
                add(
                    f"W5-{env}-{backend}-{envs}x{steps}",
                    f"brax/{env}",
                    envs,
                    steps,
                    4,
                    4,
                    env_args=(("backend", backend),),
                    hidden=(256, 256),
                    normalize_obs=True,
                    normalize_reward=True,
                )
    return works


WORKS = _works()
CHUNK = 64


def measure(name: str, rule: str, p: float, seconds: float, repeats: int) -> dict[str, Any]:
    """Time one work: median over `repeats` runs of at least `seconds` each."""
    import jax
    import jax.numpy as jnp

    from jaxattr.config import Config
    from jaxattr.envs.registry import make
    from jaxattr.host.runner import versions
    from jaxattr.lanes import place_lanes
    from jaxattr.train import init_state, lane_settings, make_chunk, make_update_step

    work = WORKS[name]
    config = Config(filter=rule, p=p, **work["config"])
    seeds = list(range(work["seeds"]))
    step = make_update_step(make(work["env"], config.env_args), config)
    state = place_lanes(init_state(step, seeds), len(seeds))
    settings = place_lanes(lane_settings(config, len(seeds)), len(seeds))
    begin = time.perf_counter()
    chunk = make_chunk(step, len(seeds), CHUNK).lower(state, settings, jnp.int32(1)).compile()
    compile_s = time.perf_counter() - begin

    def run(updates: int) -> float:
        nonlocal state
        begin, left = time.perf_counter(), updates
        while left:
            count = min(left, CHUNK)
            state, metrics, _ = chunk(state, settings, jnp.int32(count))
            left -= count
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - begin

    run(2)
    updates = 4
    while (taken := run(updates)) < 0.3:
        updates *= 2
    updates = max(2, int(updates * seconds / taken) + 1)
    runs = [run(updates) for _ in range(repeats)]
    env_steps = updates * config.records_per_round * len(seeds)
    return {
        "work": name,
        "filter": rule,
        "p": p,
        "env_steps": env_steps,
        "seconds": round(statistics.median(runs), 4),
        "steps_per_s": round(env_steps / statistics.median(runs), 1),
        "compile_s": round(compile_s, 2),
        "ms_per_round": round(statistics.median(runs) / updates * 1e3, 3),
        "runs": [round(r, 4) for r in runs],
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="a name, several with commas, or LIST")
    parser.add_argument("--filter", default="none")
    parser.add_argument("--p", type=float, default=0.125)
    parser.add_argument("--seconds", type=float, default=5.5, help="least length of one timed run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="JSON lines only")
    args = parser.parse_args()
    if args.work == "LIST":
        print("\n".join(WORKS))
        return
    names = args.work.split(",")
    unknown = [n for n in names if n not in WORKS]
    if unknown:
        parser.error(f"unknown work {unknown[0]}; --work LIST prints all names")
    use_all_cores(max(WORKS[n]["seeds"] for n in names))
    for name in names:
        result = measure(name, args.filter, args.p, args.seconds, args.repeats)
        if not args.json:
            rate, pace = f"{result['steps_per_s']:,.0f} steps/s", f"{result['ms_per_round']} ms a round"
            print(f"{name} {args.filter}: {rate}, {pace}, compiled in {result['compile_s']} s")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
