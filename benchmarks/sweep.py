"""A sweep in one compiled program against solo runs of the same settings.

    python benchmarks/sweep.py --out benchmarks/results/sweep.json

The sweep is `benchmarks/sweeps/cartpole.toml`: 64 settings x 4 seeds of CartPole-v1, 100k steps each. A solo run is one
setting with one seed in a program of its own that is compiled already (warm), with the same evaluation at the end. A
few of those are timed, spread over the settings, and their median is multiplied by the number of settings x seeds:
nobody waits for 256 of them. Both are timed in turn (solo, sweep, solo), on all cores, in one process.
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

HERE = Path(__file__).parent


def measure(definition: Path, solo_runs: int, sweeps: int) -> dict[str, Any]:
    """Seconds of the sweep, compiled and not, and of solo runs."""
    import dataclasses

    import jax

    from jaxattr.host import sweep_lanes
    from jaxattr.host.runner import versions
    from jaxattr.host.sweep import read_sweep
    from jaxattr.studies.sweep import group_by_shape, points_of

    compiled, make_chunk = [], sweep_lanes.make_chunk

    def counted(*args: Any) -> Any:
        compiled.append(args[1])
        return make_chunk(*args)

    sweep_lanes.make_chunk = counted
    sweep = read_sweep(definition)
    points = points_of(sweep)
    if len(group_by_shape(sweep, points)) != 1:
        raise SystemExit(f"{definition}: its settings do not fit one program")
    alone = sweep_lanes.Programs(dataclasses.replace(sweep, seeds=sweep.seeds[:1]))
    together = sweep_lanes.Programs(sweep)

    def timed(programs: sweep_lanes.Programs, chosen: list[dict[str, Any]]) -> float:
        begin = time.perf_counter()
        programs.run(chosen)
        return time.perf_counter() - begin

    every = max(1, len(points) // solo_runs)
    picked = points[::every][:solo_runs]
    first_solo = timed(alone, picked[:1])
    solo = [timed(alone, [p]) for p in picked[::2]]
    first_sweep = timed(together, points)
    warm = [timed(together, points) for _ in range(sweeps)]
    solo += [timed(alone, [p]) for p in picked[1::2]]
    lanes = len(points) * len(sweep.seeds)
    one, whole = statistics.median(solo), statistics.median([first_sweep, *warm])
    rounds = sweep.config.total_updates
    steps = rounds * sweep.config.records_per_round
    return {
        "settings": len(points),
        "seeds": len(sweep.seeds),
        "env_steps_per_lane": steps,
        "eval_episodes": sweep.config.eval_episodes,
        "sweep_cold_s": round(first_sweep, 2),
        "sweep_warm_s": [round(x, 2) for x in warm],
        "solo_cold_s": round(first_solo, 2),
        "solo_warm_s": [round(x, 3) for x in solo],
        "solo_warm_median_s": round(one, 3),
        "solo_extrapolated_s": round(one * lanes, 1),
        "extrapolation": f"median of {len(solo)} warm solo runs x {lanes}",
        "sweep_over_solo": round(first_sweep / (one * lanes), 3),
        "warm_sweep_over_solo": round(statistics.median(warm) / (one * lanes), 3) if warm else None,
        "target": 0.5,
        "sweep_env_steps_per_s": round(steps * lanes / whole),
        "solo_env_steps_per_s": round(steps / one),
        "programs_compiled_for_the_sweep": sum(n == lanes for n in compiled),
        "devices": f"{len(jax.devices())} x {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--definition", type=Path, default=HERE / "sweeps" / "cartpole.toml")
    parser.add_argument("--solo-runs", type=int, default=8, help="warm solo runs that are timed")
    parser.add_argument("--sweeps", type=int, default=1, help="warm sweeps that are timed, after the cold one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    use_all_cores()
    report = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        **measure(args.definition, args.solo_runs, args.sweeps),
    }
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
