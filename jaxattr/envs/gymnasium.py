"""Any environment of Gymnasium, `gymnasium/<id>`, stepped from the host between two compiled programs.

For what no other backend has: slow (Python steps every copy), but the records and everything after them are the same.
Copies run in a Gymnasium vector environment whose reset comes one step late, as `OpenPool` asks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxattr.config import ConfigError, near
from jaxattr.envs.base import Step
from jaxattr.envs.spaces import OBS_KEY, ObsView, action_of, obs_view, summary
from jaxattr.types import EnvSpec

PREFIX = "gymnasium/"
NO_LIMIT = 1_000_000
"""Steps after which a test episode is cut, where the environment itself has no time limit."""


@functools.cache
def _package() -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(f"{PREFIX}*: needs Gymnasium: pip install gymnasium") from None
    return gymnasium


def ids() -> list[str]:
    """Registered ids, newest version of each, with the prefix.

    Raises:
      ConfigError: Gymnasium is not installed.
    """
    return sorted(PREFIX + name for name in _package().registry)


def describe(env_id: str) -> str:
    """Spaces and limit in a few words."""
    return summary(make(env_id, {}).spec)


def make(env_id: str, options: Mapping[str, Any]) -> GymnasiumEnv:
    """The environment `env_id` with its own options, `obs_key` and `max_episode_steps`.

    Raises:
      ConfigError: not installed, unknown, not to be made (a package is missing), or spaces that are not supported.
    """
    gym = _package()
    name = env_id.removeprefix(PREFIX)
    options = dict(options)
    obs_key = options.pop(OBS_KEY, None)
    try:
        one = gym.make(name, **options)
    except gym.error.UnregisteredEnv:
        raise ConfigError(f"unknown environment {env_id!r}{near(env_id, ids())}") from None
    except Exception as error:  # a missing package, an option the environment does not know
        raise ConfigError(f"{env_id}: {(str(error).splitlines() or [repr(error)])[0]}") from None
    view = obs_view(env_id, one.observation_space, obs_key)
    action = action_of(env_id, one.action_space)
    limit = one.spec.max_episode_steps or NO_LIMIT
    one.close()
    return GymnasiumEnv(
        spec=EnvSpec(
            name=env_id,
            obs_shape=view.shape,
            action=action,
            max_steps=limit,
            notes=(
                f"Gymnasium {gym.__version__}, stepped from the host",
                "next-step reset: reset rows are masked",
                "no exact resume, no branching",
                *view.notes,
            ),
        ),
        id=name,
        options=tuple(sorted(options.items())),
        view=view,
    )


@dataclass(frozen=True)
class GymnasiumEnv:
    """An environment of Gymnasium; a `Pool` that is stepped from the host."""

    spec: EnvSpec
    id: str
    options: tuple[tuple[str, Any], ...]
    view: ObsView = field(compare=False)
    in_jit: bool = False

    def open(self, seeds: Sequence[int], threads: int = 0) -> GymnasiumCopies:
        """Start one copy per seed, one after another in this process."""
        gym = _package()
        vector = gym.vector.SyncVectorEnv(
            [lambda: gym.make(self.id, **dict(self.options))] * len(seeds),
            autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
            copy=True,
        )
        return GymnasiumCopies(self, vector, seeds)


class GymnasiumCopies:
    """Running copies; an `OpenPool`."""

    traced_step = None

    def __init__(self, env: GymnasiumEnv, vector: Any, seeds: Sequence[int]):
        self.env, self._vector = env, vector
        self.obs = env.view.encode(vector.reset(seed=[int(s) for s in seeds])[0], np)
        space = vector.single_action_space
        self._action_type = space.dtype

    def step(self, action: Any, which: Any = None) -> Step:
        """All copies by one action each, whatever `which`."""
        obs, reward, terminated, truncated, _ = self._vector.step(np.asarray(action, self._action_type))
        seen, earned = self.env.view.encode(obs, np), reward.astype(np.float32)
        return Step(seen, earned, terminated, truncated & ~terminated)

    def close(self) -> None:
        """Free the copies."""
        self._vector.close()
