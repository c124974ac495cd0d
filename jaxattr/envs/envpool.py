"""EnvPool (Weng et al. 2022): environments in C++, stepped as one batch, also from inside compiled programs.

`envpool/<task>` takes EnvPool's own task ids (Box2D, MiniGrid, highway, toy text, MuJoCo, ...) and its options. A pool
resets itself one step late: the step after an episode's end ignores its action and returns the next start, which is
just what `OpenPool` asks for. The observation at the end is the true last one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import cpu_count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import ConfigError, near
from jaxattr.envs.base import Step, check_option_value, check_options
from jaxattr.envs.spaces import OBS_KEY, ObsView, action_of, obs_view, summary
from jaxattr.types import Array, EnvSpec

PREFIX = "envpool/"
NEEDS = "needs EnvPool: pip install 'jaxattr[envpool]' (Linux, macOS; gymnax and brax environments work without it)"
OWN = ("num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset", "base_path", "seed",
       "env_seed", "gym_reset_return_info")  # fmt: skip
"""Entries of a pool's configuration that are ours to set."""


@functools.cache
def _package() -> Any:
    try:
        import envpool
    except Exception as error:  # not installed, or a wheel that does not load here: either way it is not there
        line = "" if isinstance(error, ModuleNotFoundError) else f" ({str(error).splitlines()[0]})"
        raise ConfigError(f"{PREFIX}*: {NEEDS}{line}") from None
    # EnvPool states bounds in float64, and Gymnasium says so for every space. One filter for good: switching warnings
    # off and on around each call would not be safe among threads.
    warnings.filterwarnings("ignore", message=".*precision lowered by casting")
    return envpool


def ids() -> list[str]:
    """All task ids, with the prefix.

    Raises:
      ConfigError: EnvPool is not installed.
    """
    return sorted(PREFIX + task for task in _package().list_all_envs())


def describe(env_id: str) -> str:
    """Spaces and limit in a few words."""
    return summary(make(env_id, {}).spec)


def make(env_id: str, options: Mapping[str, Any]) -> EnvPoolEnv:
    """The task `env_id` with EnvPool's options and `obs_key`.

    Raises:
      ConfigError: not installed, an unknown task or option, or spaces that are not supported.
    """
    package = _package()
    task = env_id.removeprefix(PREFIX)
    if task not in package.list_all_envs():
        raise ConfigError(f"unknown environment {env_id!r}{near(env_id, ids())}")
    options = dict(options)
    obs_key = options.pop(OBS_KEY, None)
    defaults = package.make_spec(task).config._asdict()
    known = {name: value for name, value in defaults.items() if name not in OWN}
    check_options(env_id, options, [*known, OBS_KEY])
    options = {k: check_option_value(env_id, k, v, known[k]) for k, v in options.items()}
    try:
        spec = package.make_spec(task, **options)
    except Exception as error:
        raise ConfigError(f"{env_id}: {(str(error).splitlines() or [repr(error)])[0]}") from None
    view = obs_view(env_id, spec.observation_space, obs_key)
    config = spec.config._asdict()
    limit = int(config["max_episode_steps"])
    if "duration" in config and "policy_frequency" in config:  # highway: in seconds of its world
        limit = int(config["duration"] * config["policy_frequency"])
    # For the pool's float64 arrays (MuJoCo) XLA would hand out float32 buffers, and the pool would write past them.
    narrow = all(
        np.dtype(s.dtype).itemsize <= 4 for s in (*spec.state_array_spec.values(), *spec.action_array_spec.values())
    )
    how = "stepped inside the compiled update" if narrow else "stepped from the host"
    return EnvPoolEnv(
        spec=EnvSpec(
            name=env_id,
            obs_shape=view.shape,
            action=action_of(env_id, spec.action_space),
            max_steps=limit,
            notes=(
                f"EnvPool {package.__version__}, {how}",
                "next-step reset: reset rows are masked",
                "no exact resume, no branching",
                *view.notes,
            ),
        ),
        in_jit=narrow,
        task=task,
        options=tuple(sorted(options.items())),
        view=view,
        action_type=np.dtype(list(spec.action_array_spec.values())[-1].dtype),
    )


@dataclass(frozen=True)
class EnvPoolEnv:
    """A task of EnvPool; a `Pool`."""

    spec: EnvSpec
    in_jit: bool
    task: str
    options: tuple[tuple[str, Any], ...]
    view: ObsView = field(compare=False)
    action_type: np.dtype = field(compare=False)

    def open(self, seeds: Sequence[int], threads: int = 0) -> EnvPoolCopies:
        """Start one copy per seed."""
        count = len(seeds)
        threads = min(threads or cpu_count(), count)
        pool = _package().make_gymnasium(
            self.task, num_envs=count, env_seed=[int(s) for s in seeds], num_threads=threads, **dict(self.options)
        )
        return EnvPoolCopies(self, pool)


class EnvPoolCopies:
    """Running copies of a task; an `OpenPool`."""

    def __init__(self, env: EnvPoolEnv, pool: Any):
        self.env, self._pool = env, pool
        self.obs = env.view.encode(pool.reset()[0], np)
        # The compiled step holds a pointer to the pool: whoever keeps this function keeps the pool alive.
        self.traced_step: Callable[[Array, Array], tuple[Array, Step]] | None = None
        if env.in_jit:
            _, _, _, step = pool.xla()

            def traced_step(token: Array, action: Array) -> tuple[Array, Step]:
                token, (obs, reward, terminated, truncated, _) = step(token, action.astype(env.action_type))
                return token, self._result(jnp, obs, reward, terminated, truncated)

            self.traced_step = traced_step

    def step(self, action: Any, which: Any = None) -> Step:
        """Copies `which`, or all, by one action each; the others rest and their rows are zeros."""
        action = np.asarray(action, self.env.action_type)
        if which is None:
            return self._result(np, *self._pool.step(action)[:4])
        *moved, info = self._pool.step(action[which], np.asarray(which, np.int32))

        def spread(rows: Any) -> np.ndarray:
            everywhere = np.zeros((len(action), *rows.shape[1:]), rows.dtype)
            everywhere[info["env_id"]] = rows  # in whatever order the threads were done
            return everywhere

        return jax.tree.map(spread, self._result(np, *moved))

    def _result(self, xp: Any, obs: Any, reward: Any, terminated: Any, truncated: Any) -> Step:
        # EnvPool calls every end at the limit truncated, also a failure in that very step: it cannot be told apart.
        return Step(self.env.view.encode(obs, xp), reward.astype(xp.float32), terminated, truncated & ~terminated)

    def close(self) -> None:
        """Free the copies."""
        self._pool.close()
