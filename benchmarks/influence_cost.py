"""What do influence scores cost? Scores of all records of one buffer against one full-buffer gradient of PPO's loss.

    python benchmarks/influence_cost.py --json      # one JSON line per row
    python benchmarks/influence_cost.py             # a table

All programs run in one process, alternating, and medians are compared: read the ratio, not the seconds. Peak memory is
XLA's own account of a program's temporary buffers (`memory_analysis`), so it does not depend on what ran before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from typing import Any

from jaxattr.host.xla import use_all_cores

ROWS = (  # network, observation size, hidden widths, actions (0 = 8 continuous), records
    ("8-64-64-4", 8, (64, 64), 4, 2048),
    ("8-64-64-4", 8, (64, 64), 4, 16384),
    ("27-256x4-8", 27, (256,) * 4, 0, 2048),
)
CHUNKS = (32, 256, 2048)


def programs(obs_size: int, hidden: tuple[int, ...], actions: int, n: int) -> dict[str, Any]:
    """name -> compiled program of no arguments."""
    import jax
    import jax.numpy as jnp

    from jaxattr.attribution.scores import influence_scores
    from jaxattr.config import Config
    from jaxattr.networks import make_networks
    from jaxattr.ops.losses import clipped_policy_loss
    from jaxattr.types import Box, Discrete, EnvSpec

    action = Discrete(actions) if actions else Box(8, (-1.0,) * 8, (1.0,) * 8)
    nets = make_networks(EnvSpec("buffer", (obs_size,), action, 1000), Config(hidden=hidden))
    keys = jax.random.split(jax.random.key(0), 4)
    params = nets.init(keys[0])
    obs, advantage = jax.random.normal(keys[1], (n, obs_size)), jax.random.normal(keys[2], (n,))
    head = jax.vmap(nets.policy, (None, 0))(params, obs)
    act = jax.vmap(nets.distribution.sample)(head, nets.distribution.noise(keys[3], (n,)))
    old = jax.vmap(nets.log_prob, (None, 0, 0))(params, obs, act)
    data = (obs, act, advantage, old)

    def ppo_loss(params, obs, act, advantage, old):
        def one(o, a, adv, old):
            head, value = nets.apply(params, o)
            loss, *_ = clipped_policy_loss(nets.distribution.log_prob(head, a) - old, adv, jnp.float32(0.2))
            return loss + 0.5 * (value - adv) ** 2

        return jnp.mean(jax.vmap(one)(obs, act, advantage, old))

    def scores(estimator, chunk):
        def run(params, obs, act, advantage, old):
            return influence_scores(
                nets.log_prob, params, obs, act, advantage, estimator=estimator, chunk_size=chunk, normalize="chunk"
            )

        return run

    made = {"gradient": jax.grad(ppo_loss), "jvp": scores("jvp", None)}
    made |= {f"per_sample/{c}": scores("per_sample", c) for c in CHUNKS if c <= n}
    compiled = {name: jax.jit(f).lower(params, *data).compile() for name, f in made.items()}
    return {name: (c, lambda c=c: jax.block_until_ready(c(params, *data))) for name, c in compiled.items()}


def measure(row: tuple, repeats: int) -> list[dict[str, Any]]:
    """One result per estimator."""
    network, obs_size, hidden, actions, n = row
    made = programs(obs_size, hidden, actions, n)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _, run in made.values():
        run()
    for _ in range(repeats):
        for name, (_, run) in made.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    return [
        {
            "network": network,
            "records": n,
            "estimator": name,
            "seconds": round(median[name], 6),
            "full_gradient_seconds": round(median["gradient"], 6),
            "ratio": round(median[name] / median["gradient"], 3),
            "peak_mib": round(made[name][0].memory_analysis().temp_size_in_bytes / 2**20, 2),
        }
        for name in made
        if name != "gradient"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line per row")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only the first ROWS buffers")
    args = parser.parse_args()
    use_all_cores(1)
    rows = [line for row in ROWS[: args.rows] for line in measure(row, args.repeats)]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return
    import jax

    print(
        f"{datetime.date.today()}, {jax.devices()[0].device_kind}, jax {jax.__version__}, medians of {args.repeats}\n"
    )
    print("| network | records | estimator | ms | one gradient, ms | ratio | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['network']} | {r['records']} | {r['estimator']} | {r['seconds'] * 1e3:.2f} | "
            f"{r['full_gradient_seconds'] * 1e3:.2f} | {r['ratio']:.2f} | {r['peak_mib']:.1f} |"
        )


if __name__ == "__main__":
    main()
