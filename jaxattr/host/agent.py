"""A trained policy by itself: act, save, load. Independent of how many seeds it was trained with."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config, ConfigError
from jaxattr.envs.registry import make
from jaxattr.networks import Networks, make_networks
from jaxattr.ops import trees
from jaxattr.ops.statistics import normalize
from jaxattr.types import Array, Params, PRNGKey, RunningStats

FORMAT = 1


@dataclass(frozen=True)
class Agent:
    """One lane's policy with the observation statistics it acts with.

    Attributes:
      env_id, seed: where it comes from.
      config: of the run.
      nets: networks; params: their parameters; obs_stats: frozen statistics.
    """

    env_id: str
    seed: int
    config: Config
    nets: Networks
    params: Params
    obs_stats: RunningStats

    def act(self, obs: Any, key: PRNGKey | None = None) -> Array:
        """The environment action for one observation, or for a batch of them.

        Args:
          obs: (*obs_shape,) or (..., *obs_shape), raw (not normalised).
          key: draws from the policy; None takes its mode.
        """
        obs = jnp.asarray(obs, jnp.float32)
        shape = self.obs_stats.mean.shape
        lead = obs.shape[: obs.ndim - len(shape)]
        if obs.shape[len(lead) :] != shape:
            raise ValueError(f"observation has shape {obs.shape}: must end in {shape}")
        actions = self._act(obs.reshape(-1, *shape), jax.random.key(0) if key is None else key, key is None)
        return actions.reshape(*lead, *actions.shape[1:])

    @cached_property
    def _act(self) -> Any:
        distribution = self.nets.distribution

        def act(obs: Array, key: PRNGKey, deterministic: bool) -> Array:
            head = jax.vmap(lambda o: self.nets.policy(self.params, normalize(self.obs_stats, o)))(obs)
            noise = distribution.noise(key, obs.shape[:1])
            chosen = jax.vmap(distribution.mode)(head) if deterministic else jax.vmap(distribution.sample)(head, noise)
            return jax.vmap(distribution.to_env)(chosen)

        return jax.jit(act, static_argnums=2)

    def save(self, path: str | os.PathLike) -> Path:
        """Write one `.npz` file (arrays and a JSON description; nothing is pickled), atomically."""
        path = Path(path).with_suffix(".npz")
        meta = {"format": FORMAT, "env_id": self.env_id, "seed": self.seed, "config": self.config.to_dict()}
        arrays: dict[str, Any] = {
            f"params/{n}": np.asarray(x)
            for n, x in zip(trees.paths(self.params), jax.tree.leaves(self.params), strict=True)
        }
        arrays |= {f"obs_stats/{n}": np.asarray(getattr(self.obs_stats, n)) for n in ("mean", "var", "count")}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps(meta)), **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}")
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)
        return path


def load_agent(path: str | os.PathLike, network: nn.Module | None = None) -> Agent:
    """Read what `Agent.save` wrote.

    Args:
      path: the file.
      network: the user's module, if the agent was trained with one.

    Raises:
      ConfigError: no such file, another format, or parameters that do not fit the network.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as data:
            meta = json.loads(str(data["meta"]))
            arrays = {k: data[k] for k in data.files if k != "meta"}
    except FileNotFoundError:
        raise ConfigError(f"no agent at {path}") from None
    except Exception as error:
        raise ConfigError(f"{path} is no saved agent ({type(error).__name__})") from error
    if meta.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {meta.get('format')}; this version reads {FORMAT}")
    config = Config.from_dict(meta["config"])
    nets = make_networks(make(meta["env_id"], config.env_args).spec, config, network)
    like = jax.eval_shape(nets.init, jax.random.key(0))
    names = trees.paths(like)
    got = {k: v.shape for k, v in arrays.items() if k.startswith("params/")}
    want = {f"params/{n}": x.shape for n, x in zip(names, jax.tree.leaves(like), strict=True)}
    if got != want:
        odd = sorted(set(got.items()) ^ set(want.items()))[0][0]
        raise ConfigError(f"{path} does not fit the network ({odd}); pass the module it was trained with as network=")
    params = jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[f"params/{n}"]) for n in names])
    stats = RunningStats(**{n: jnp.asarray(arrays[f"obs_stats/{n}"]) for n in ("mean", "var", "count")})
    return Agent(meta["env_id"], meta["seed"], config, nets, params, stats)
