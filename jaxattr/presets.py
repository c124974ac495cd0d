"""Named starting points: `tuned` (per environment, sources named), `paper` and `paper-adam` (the published setups).

A preset is a plain dict of changes against `Config()`; `jaxattr config diff tuned:ENV paper:ENV` shows any two of
them side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxattr.config import Config, ConfigError, near

_INFLUENCE_TUNED = {"score_normalize": "buffer", "target_normalize": True}

_TUNED: dict[str, dict[str, Any]] = {
    # Common ground of CleanRL's and rl-zoo's classic-control settings.
    "default": {
        "num_envs": 16,
        "num_steps": 128,
        "minibatch_size": 256,
        "num_epochs": 10,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "total_steps": 500_000,
    },
    # Continuous control in small environments: rl-zoo's Pendulum settings (gamma 0.9), more environments.
    "Pendulum-v1": {
        "num_envs": 16,
        "num_steps": 128,
        "minibatch_size": 64,
        "num_epochs": 10,
        "gamma": 0.9,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "total_steps": 500_000,
        "normalize_reward": True,
    },
    # rl-zoo's Acrobot settings: normalised observations, lambda 0.94.
    "Acrobot-v1": {
        "num_envs": 16,
        "num_steps": 128,
        "minibatch_size": 256,
        "num_epochs": 4,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "gae_lambda": 0.94,
        "normalize_obs": True,
        "total_steps": 500_000,
    },
    # rl-zoo's LunarLander settings (16 environments, gamma 0.999, lambda 0.98, entropy 0.01, 4 epochs of minibatches of
    # 64) with rounds of 2,048 instead of 16,384 records, so that a short run has rounds enough to compare.
    "envpool/LunarLander-v3": {
        "num_envs": 16,
        "num_steps": 128,
        "minibatch_size": 64,
        "num_epochs": 4,
        "learning_rate": 3e-4,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "ent_coef": 0.01,
        "total_steps": 1_000_000,
    },
    # rl-zoo's BipedalWalker settings (normalised observations and rewards, gamma 0.999, clip 0.18, 10 epochs of
    # minibatches of 64), 16 environments x 256 steps instead of 32 x 2,048.
    "envpool/BipedalWalker-v3": {
        "num_envs": 16,
        "num_steps": 256,
        "minibatch_size": 64,
        "num_epochs": 10,
        "learning_rate": 3e-4,
        "gamma": 0.999,
        "gae_lambda": 0.95,
        "clip_range": 0.18,
        "normalize_obs": True,
        "normalize_reward": True,
        "total_steps": 1_000_000,
    },
    # rl-starter-files' MiniGrid settings (16 processes x 128 steps, 4 epochs of 256, Adam 1e-3, entropy 0.01), with the
    # paper's network.
    "MiniGrid": {
        "num_envs": 16,
        "num_steps": 128,
        "minibatch_size": 256,
        "num_epochs": 4,
        "learning_rate": 1e-3,
        "ent_coef": 0.01,
        "conv_filters": (16, 32),
        "conv_features": 64,
        "total_steps": 500_000,
    },
    # highway-env's own PPO example (batches of 64, 10 epochs, Adam 5e-4, gamma 0.8, two layers of 256).
    "Highway": {
        "num_envs": 16,
        "num_steps": 64,
        "minibatch_size": 64,
        "num_epochs": 10,
        "learning_rate": 5e-4,
        "gamma": 0.8,
        "hidden": (256, 256),
        "env_args": (("vehicles_count", 10),),
        "total_steps": 200_000,
    },
    # PureJaxRL's MinAtar settings with Young & Tian's convolution; half the learning rate for the CNN.
    "MinAtar": {
        "num_envs": 64,
        "num_steps": 128,
        "minibatch_size": 1024,
        "num_epochs": 4,
        "learning_rate": 2.5e-3,
        "lr_schedule": "linear",
        "ent_coef": 0.01,
        "hidden": (128,),
        "activation": "relu",
        "total_steps": 1_000_000,
    },
    # brax's own PPO notebook (gamma 0.97, lr 3e-4, entropy 1e-2), batch sizes for 2 M steps instead of 50 M.
    "brax": {
        "num_envs": 64,
        "num_steps": 64,
        "minibatch_size": 256,
        "num_epochs": 4,
        "learning_rate": 3e-4,
        "gamma": 0.97,
        "gae_lambda": 0.95,
        "ent_coef": 1e-3,
        "hidden": (256, 256),
        "normalize_obs": True,
        "normalize_reward": True,
        "total_steps": 2_000_000,
        "eval_episodes": 32,
    },
    # Ours, from a few tries on seeds 0-3: brax's gamma 0.97 and 1e-3 of entropy leave falls after hundreds of steps.
    "brax/inverted_pendulum": {
        "num_envs": 64,
        "num_steps": 128,
        "minibatch_size": 512,
        "num_epochs": 4,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "gamma": 0.995,
        "gae_lambda": 0.95,
        "hidden": (64, 64),
        "normalize_obs": True,
        "normalize_reward": True,
        "total_steps": 2_000_000,
        "eval_episodes": 32,
    },
}

# METHOD: 2048 records from one environment, minibatch 64, 10 epochs, 64x64 tanh, SGD 5e-3, no gradient-norm clipping;
# advantages of the loss side standardised per shuffled chunk of 64, target side raw (Hu et al. 2025, appendix, and
# their code).
_PAPER: dict[str, Any] = {
    "num_envs": 1,
    "num_steps": 2048,
    "minibatch_size": 64,
    "num_epochs": 10,
    "optimizer": "sgd",
    "learning_rate": 5e-3,
    "max_grad_norm": None,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "score_normalize": "chunk",
    "norm_chunk": 64,
    "target_normalize": False,
    "entropy_scale": "published",
    "total_steps": 102_400,
    "eval_every": 1,
}

_MINIGRID: dict[str, Any] = {"conv_filters": (16, 32), "conv_features": 64}

# What differs from environment to environment: length, network, options, and Adam for BipedalWalker.
_PAPER_ENVS: dict[str, dict[str, Any]] = {
    "FrozenLake-misc": {"env_args": (("is_slippery", False),)},
    "MiniGrid": {**_MINIGRID, "total_steps": 81_920},
    "Highway": {"env_args": (("vehicles_count", 10),), "total_steps": 204_800},
    "envpool/LunarLander-v3": {"total_steps": 307_200},
    "envpool/BipedalWalker-v3": {"optimizer": "adam", "learning_rate": 3e-4, "total_steps": 1_024_000},
}
# The authors' runs with Adam: learning rate 1e-3 (their LunarLander script), everything else the same.
_ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3}

PRESETS = ("tuned", "paper", "paper-adam")
_FAMILIES = {
    "-MinAtar": "MinAtar",
    "envpool/MiniGrid": "MiniGrid",
    "envpool/Highway": "Highway",
    "envpool/highway": "Highway",
    "brax/": "brax",
}


def family(env_id: str, known: Mapping[str, Any] = _TUNED) -> str:
    """The key of a table of presets that an environment falls under."""
    if env_id in known:
        return env_id
    if env_id.startswith("gymnasium/"):  # the same task in another backend
        return family("envpool/" + env_id.removeprefix("gymnasium/"), known)
    return next((name for part, name in _FAMILIES.items() if part in env_id), "default")


def preset(name: str, env_id: str) -> Config:
    """The configuration called `name` for an environment.

    Raises:
      ConfigError: no such preset.
    """
    if name == "tuned":
        return Config().replace(**_TUNED[family(env_id)], **_INFLUENCE_TUNED)
    if name in ("paper", "paper-adam"):
        special = _PAPER_ENVS.get(family(env_id, _PAPER_ENVS), {})
        return Config().replace(**{**_PAPER, **special, **(_ADAM if name == "paper-adam" else {})})
    raise ConfigError(f"unknown preset {name!r}{near(name, PRESETS)}")
