"""rejax PPO on the works of `benchmarks/throughput.py`: whole runs in one jit, evaluation off, compilation apart.

    pip install rejax==0.1.3 gymnax==0.0.9 jax==0.10.2 brax==0.14.2     # in an environment of its own
    python benchmarks/peers/rejax_speed.py --work W3

Prints one JSON line in the format of throughput.py. Run by `benchmarks/against.py`, alternating with ours.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
from rejax import PPO

WORKS = {  # environment, envs, steps, minibatches, epochs, seeds, brax backend
    "W1": ("CartPole-v1", 4, 128, 4, 4, 1, None),
    "W2": ("CartPole-v1", 4, 128, 4, 4, 16, None),
    "W3": ("CartPole-v1", 64, 32, 32, 10, 1, None),
    "W3x8": ("CartPole-v1", 64, 32, 32, 10, 8, None),
    "W4": ("Acrobot-v1", 64, 32, 32, 10, 1, None),
    "W4x8": ("Acrobot-v1", 64, 32, 32, 10, 8, None),
}
for _env in ("ant", "halfcheetah"):
    for _backend in ("spring", "positional"):
        for _envs, _steps in ((64, 32), (256, 10)):
            WORKS[f"W5-{_env}-{_backend}-{_envs}x{_steps}"] = (_env, _envs, _steps, 4, 4, 1, _backend)

parser = argparse.ArgumentParser()
parser.add_argument("--work", required=True, choices=WORKS)
parser.add_argument("--seconds", type=float, default=5.5)
parser.add_argument("--repeats", type=int, default=3)
args = parser.parse_args()
env, envs, steps, minibatches, epochs, seeds, backend = WORKS[args.work]
per_update = envs * steps * seeds


def build(updates):
    """(compiled whole run, compile seconds)"""
    total = updates * envs * steps
    algo = PPO.create(
        env=env if backend is None else f"brax/{env}",
        env_params={} if backend is None else {"backend": backend},
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64) if backend is None else (256, 256)},
        num_envs=envs,
        num_steps=steps,
        num_minibatches=minibatches,
        num_epochs=epochs,
        learning_rate=2.5e-4,
        max_grad_norm=0.5,
        total_timesteps=total,
        eval_freq=total,
        skip_initial_evaluation=True,
        normalize_observations=backend is not None,
        normalize_rewards=backend is not None,
    )
    algo = algo.replace(eval_callback=lambda algo, ts, rng: jnp.zeros(()))
    begin = time.perf_counter()
    run = jax.jit(jax.vmap(algo.train) if seeds > 1 else algo.train).lower(key(0)).compile()
    return run, time.perf_counter() - begin


def key(i):
    """A key, or one per seed."""
    k = jax.random.PRNGKey(30 + i)
    return jax.random.split(k, seeds) if seeds > 1 else k


def timed(run, i):
    """Seconds of one run."""
    begin = time.perf_counter()
    jax.block_until_ready(run(key(i)))
    return time.perf_counter() - begin


small = 8
run, first = build(small)
timed(run, 0)
pace = timed(run, 1) / small
updates = max(4, int(args.seconds / pace) + 1)
run, second = build(updates)
timed(run, 0)
runs = [timed(run, i + 1) for i in range(args.repeats)]
env_steps = updates * per_update
print(
    json.dumps(
        {
            "work": args.work,
            "peer": "rejax",
            "env_steps": env_steps,
            "seconds": round(statistics.median(runs), 4),
            "steps_per_s": round(env_steps / statistics.median(runs), 1),
            "compile_s": round(max(first, second), 2),
        }
    )
)
