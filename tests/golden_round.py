"""The authors' recorded rounds (tests/golden/*.npz) as inputs of OUR learner. See tests/golden/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config
from jaxattr.networks import make_networks
from jaxattr.ops import trees
from jaxattr.types import Discrete, EnvSpec, EpisodeStats, Rollout, TrainState
from jaxattr.update import UpdateStep, make_optimizer

FOLDER = Path(__file__).parent / "golden"
LAYERS = {"pi.0": "policy/body/dense_0", "pi.1": "policy/body/dense_1", "pi.out": "policy/head/out"}
LAYERS |= {"vf.0": "value/body/dense_0", "vf.1": "value/body/dense_1", "vf.out": "value/head"}


def params_from(data: Any, prefix: str) -> dict:
    """The recorded weights as our parameter tree (kernels are transposed: ours are (in, out))."""
    tree: dict = {}
    for theirs, ours in LAYERS.items():
        node = tree
        for part in ours.split("/"):
            node = node.setdefault(part, {})
        node["kernel"] = jnp.asarray(data[f"{prefix}.{theirs}.weight"].T)
        node["bias"] = jnp.asarray(data[f"{prefix}.{theirs}.bias"])
    return tree


class GoldenRound:
    """One recorded round: config, learner with the recorded permutations injected, state, rollout."""

    def __init__(self, name: str, **changes: Any):
        d = self.data = np.load(FOLDER / f"lunarlander_{name}.npz")
        n = self.n = len(d["adv"])
        self.time = d["time_index"]  # record -> time step
        in_time = np.argsort(self.time)
        self.config = Config(
            num_envs=1,
            num_steps=n,
            minibatch_size=64,
            num_epochs=int(d["n_epochs"]),
            learning_rate=float(d["lr"]),
            adam_eps=float(d["adam_eps"]),
            max_grad_norm=None,
            gamma=float(d["gamma"]),
            gae_lambda=float(d["gae_lambda"]),
            vf_coef=float(d["vf_coef"]),
            clip_range=float(d["clip_range"]),
            filter="iif",
            p=float(d["drop_percent"]) / 100,
            entropy_scale="published",
        ).replace(**changes)
        spec = EnvSpec("LunarLander-v2", (d["obs"].shape[1],), Discrete(4), 1000)
        self.nets = make_networks(spec, self.config)
        self.settings = jax.tree.map(jnp.float32, self.config.settings())

        class Recorded:
            all_valid = True

        Recorded.spec = spec
        self.step = UpdateStep(self.config, self.nets, Recorded(), shuffle=self.shuffle)
        params = params_from(d, "param")
        opt_state = make_optimizer(self.config, self.config.settings(), 0.0).init(trees.flatten(params))
        moments = {k: trees.flatten(params_from(d, f"adam_{k}")) for k in "mv"}
        adam = opt_state[1]._replace(count=jnp.int32(d["adam_step"]), mu=moments["m"], nu=moments["v"])
        self.state = TrainState(
            params=params,
            opt_state=(opt_state[0], adam, opt_state[2]),
            obs_stats=_nothing_seen(spec.obs_shape),
            reward_stats=_nothing_seen(()),
            discounted_return=jnp.zeros(1),
            env_state=None,
            key=jax.random.key(0),
            update=jnp.int32(0),
            alive=jnp.bool_(True),
        )
        self.rollout = self._rollout(in_time)
        self.episodes = EpisodeStats(jnp.int32(0), jnp.float32(0), jnp.float32(0))

    def shuffle(self, key: Any, n: int, epochs: int, keep: Any) -> Any:
        """The recorded visiting orders, in our record numbering (time order)."""
        if keep is None:
            return jnp.asarray(self.time)[None]
        recorded = self.data["batch_index"].reshape(epochs, -1)
        return jnp.pad(jnp.asarray(self.time[recorded]), ((0, 0), (0, n - recorded.shape[1])))

    def record_order(self, x: Any) -> np.ndarray:
        """Ours (time order) -> theirs."""
        return np.asarray(x)[self.time]

    def _rollout(self, in_time: np.ndarray) -> Rollout:
        d = {k: self.data[k][in_time] for k in ("obs", "action", "old_logp", "value", "reward", "episode_start")}
        next_value = np.append(d["value"][1:], self.data["last_bootstrap"]).astype(np.float32)
        # An episode ends where the next one starts; whether the last step ended one is already in last_bootstrap.
        terminated = np.append(d["episode_start"][1:] > 0, False)
        column = lambda x: jnp.asarray(x)[:, None]
        return Rollout(
            obs=column(d["obs"]),
            action=column(d["action"]),
            log_prob=column(d["old_logp"]),
            value=column(d["value"]),
            next_value=column(next_value),
            reward=column(d["reward"]),
            terminated=column(terminated),
            truncated=column(np.zeros_like(terminated)),
            valid=column(np.ones_like(terminated)),
        )


def _nothing_seen(shape: tuple[int, ...]) -> Any:
    from jaxattr.ops.statistics import init_stats

    return init_stats(shape)
