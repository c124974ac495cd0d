"""rejax PPO on Breakout-MinAtar with the settings of our `tuned` preset: the reference for `learning.py`.

    pip install rejax==0.1.3 gymnax==0.0.9 jax==0.10.2     # in an environment of its own: it needs the old gymnax
    python benchmarks/peers/rejax_breakout.py [--steps 1000000] [--seeds 4] > benchmarks/results/rejax_breakout.json

rejax has no learning-rate schedule and clips gradients element-wise; all that both have is set alike.
"""

import argparse
import importlib.metadata
import json

import jax
import numpy as np
from rejax import PPO
from rejax.evaluate import evaluate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--seeds", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=1e-3)
args = parser.parse_args()

algo = PPO.create(
    env="Breakout-MinAtar",
    agent_kwargs={"activation": "relu", "hidden_layer_sizes": (128,)},
    num_envs=64,
    num_steps=128,
    num_minibatches=8,
    num_epochs=4,
    learning_rate=args.learning_rate,
    max_grad_norm=0.5,
    gamma=0.99,
    gae_lambda=0.95,
    clip_eps=0.2,
    ent_coef=0.01,
    vf_coef=0.5,
    total_timesteps=args.steps,
    eval_freq=args.steps,
    skip_initial_evaluation=True,
)
finals = []
for seed in range(args.seeds):
    state, _ = jax.jit(algo.train)(jax.random.PRNGKey(seed))
    act = algo.make_act(state)
    _, returns = evaluate(act, jax.random.PRNGKey(1_000 + seed), algo.env, algo.env_params, 100, 1000)
    finals.append(float(np.mean(returns)))
print(
    json.dumps(
        {
            "peer": f"rejax {importlib.metadata.version('rejax')}",
            "env": "Breakout-MinAtar",
            "steps": args.steps,
            "learning_rate": args.learning_rate,
            "final_test_return": [round(x, 3) for x in finals],
            "mean": round(float(np.mean(finals)), 3),
            "eval_episodes": 100,
            "network": "MLP 128 relu on the flattened image (rejax has no CNN)",
        }
    )
)
