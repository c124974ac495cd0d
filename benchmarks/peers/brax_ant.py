"""brax's own PPO on ant (spring) at 2 M steps: the reference for `learning.py`.

    python benchmarks/peers/brax_ant.py [--steps 2000000] [--seeds 3] > benchmarks/results/brax_ant.json

Its notebook's ant settings, with the environment count of our preset (64 instead of 4096: at 2 M steps the notebook's
own would make fewer than 100 updates).
"""

import argparse
import importlib.metadata
import json

import jax
import jax.numpy as jnp
from brax import envs
from brax.training.agents.ppo import train as ppo

if not hasattr(jax, "device_put_replicated"):  # gone from newer jax, still called by brax 0.14.2

    def _replicate(tree, devices):
        tree = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * len(devices)), tree)
        return jax.pmap(lambda t: t, devices=devices)(tree)

    jax.device_put_replicated = _replicate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2_000_000)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--num-envs", type=int, default=64)
parser.add_argument("--unroll", type=int, default=5)
args = parser.parse_args()

finals, curves = [], []
for seed in range(args.seeds):
    curve = []
    ppo.train(
        envs.get_environment("ant", backend="spring"),
        num_timesteps=args.steps,
        num_evals=5,
        progress_fn=lambda step, m, c=curve: c.append([int(step), round(float(m["eval/episode_reward"]), 1)]),
        episode_length=1000,
        num_eval_envs=32,
        reward_scaling=10.0,
        normalize_observations=True,
        unroll_length=args.unroll,
        num_minibatches=32,
        num_updates_per_batch=4,
        discounting=0.97,
        learning_rate=3e-4,
        entropy_cost=1e-2,
        num_envs=args.num_envs,
        batch_size=args.num_envs,
        max_devices_per_host=1,
        seed=seed,
    )
    finals.append(curve[-1][1])
    curves.append(curve)
print(
    json.dumps(
        {
            "peer": f"brax {importlib.metadata.version('brax')} PPO",
            "env": "ant (spring)",
            "steps": args.steps,
            "settings": vars(args),
            "final_test_return": finals,
            "mean": sum(finals) / len(finals),
            "curves": curves,
        }
    )
)
