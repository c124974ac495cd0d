"""Runs on disk: open one, take an agent out of it, test it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config, ConfigError
from jaxattr.envs.base import Env
from jaxattr.envs.registry import make
from jaxattr.evaluate import DETERMINISTIC, STOCHASTIC, evaluate
from jaxattr.host import checkpoint
from jaxattr.host.agent import Agent
from jaxattr.pools import PoolTest
from jaxattr.train import init_state, make_update_step


def open_run(path: Path, network: Any = None) -> tuple[dict[str, Any], Config, list[Agent]]:
    """(description, config, agents) of a run's last good checkpoint.

    Raises:
      ConfigError: no run there, or none of its checkpoints is whole.
    """
    path = Path(path)
    try:
        saved = json.loads((path / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: holds no run") from None
    if saved.get("network_module") and network is None:
        raise ConfigError(f"{path} was trained with the module {saved['network_module']}: open it from Python")
    config = Config.from_dict(saved["config"])
    step = make_update_step(make(saved["env"], config.env_args), config, network)
    try:
        state, _, _ = checkpoint.load_latest(path / "checkpoints", init_state(step, saved["seeds"]))
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from None
    take = lambda tree, i: jax.tree.map(lambda x: jnp.asarray(x[i]), tree)
    agents = [
        Agent(saved["env"], seed, config, step.nets, take(state.params, i), take(state.obs_stats, i))
        for i, seed in enumerate(saved["seeds"])
    ]
    return saved, config, agents


def open_agent(path: Path, index: int) -> Agent:
    """The agent at one position of a run.

    Raises:
      ConfigError: see `open_run`; or there is no such position.
    """
    agents = open_run(path)[2]
    _check_index(path, index, len(agents))
    return agents[index]


def _check_index(path: Path, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ConfigError(f"--seed-index {index}: {path} has {count} agents (0 to {count - 1})")


def evaluate_run(path: Path, episodes: int, index: int | None, eval_seed: int | None) -> str:
    """A table of test returns, one line per agent."""
    if episodes < 1:
        raise ConfigError(f"--episodes is {episodes}: must be 1 or more")
    saved, config, agents = open_run(path)
    chosen = range(len(agents)) if index is None else [index]
    if index is not None:
        _check_index(path, index, len(agents))
    env = make(saved["env"], config.env_args)
    key = jax.random.key(config.eval_seed if eval_seed is None else eval_seed)
    nets = agents[0].nets
    if isinstance(env, Env):
        run: Any = jax.jit(lambda params, stats: evaluate(nets, env, params, stats, key, episodes))
    else:
        test, one = PoolTest(nets, env, episodes), lambda tree: jax.tree.map(lambda x: x[None], tree)
        run = lambda params, stats: jax.tree.map(lambda x: x[0], test(one(params), one(stats), key))
    lines = [f"{saved['env']}, {episodes} episodes per agent: return mean +- standard deviation (length, env steps)"]
    for i in chosen:
        result = jax.tree.map(np.asarray, run(agents[i].params, agents[i].obs_stats))
        cells = []
        for name, kind in (("stochastic", STOCHASTIC), ("deterministic", DETERMINISTIC)):
            r, n = result.episode_return[kind], result.length[kind]
            cut = int((~result.finished[kind]).sum())
            cells.append(
                f"{name} {r.mean():.4g} +- {r.std():.3g} ({n.mean():.4g})" + (f", {cut} unfinished" if cut else "")
            )
        lines.append(f"  index {i}, seed {agents[i].seed}: {'; '.join(cells)}")
    return "\n".join(lines)
