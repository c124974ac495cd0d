"""From Gymnasium spaces to what the learner sees: float32 observations of one shape, and an action description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxattr.config import ConfigError, near
from jaxattr.types import Box, Discrete, EnvSpec

OBS_KEY = "obs_key"
"""The option that names the entry of a Dict observation to use."""
USUAL_KEYS = ("image", "observation", "obs")
"""Taken from a Dict observation where `obs_key` is not given."""


class ObsView(NamedTuple):
    """How raw observations become the learner's.

    Attributes:
      shape: of one observation.
      encode: (raw batch, array module numpy or jax.numpy) -> (n, *shape) float32.
      notes: for the run's header.
    """

    shape: tuple[int, ...]
    encode: Callable[[Any, Any], Any]
    notes: tuple[str, ...] = ()


def obs_view(name: str, space: Any, obs_key: str | None = None) -> ObsView:
    """The view of an observation space: Box, Discrete (one-hot), or one entry of a Dict.

    uint8 entries are divided by 255; images with the channels first, (C, H, W) with C <= 4, are turned to (H, W, C).

    Args:
      name: environment id, for messages.
      space: a Gymnasium space of ONE environment.
      obs_key: entry of a Dict space.

    Raises:
      ConfigError: a space that is not supported, or a key that is needed or unknown.
    """
    kind = type(space).__name__
    if kind == "Dict":
        keys = list(space.spaces)
        key = obs_key or next((k for k in USUAL_KEYS if k in keys), None)
        if key is None:
            raise ConfigError(f"{name}: observations are a Dict ({', '.join(keys)}): choose one with {OBS_KEY}=NAME")
        if key not in keys:
            raise ConfigError(f"{name}: observations have no entry {key!r}{near(key, keys)}")
        inner = obs_view(name, space.spaces[key])
        return inner._replace(
            encode=lambda x, xp: inner.encode(x[key], xp), notes=(f"observation {key!r}", *inner.notes)
        )
    if obs_key is not None:
        raise ConfigError(f"{name}: observations are a {kind}, no Dict: {OBS_KEY} does not apply")
    if kind == "Discrete":
        n, start = int(space.n), int(getattr(space, "start", 0))
        rows = np.eye(n, dtype=np.float32)
        return ObsView((n,), lambda x, xp: xp.asarray(rows)[x.reshape(-1) - start], (f"one-hot of {n}",))
    if kind != "Box":
        raise ConfigError(
            f"{name}: observation space {kind} is not supported (Box, Discrete, or a Dict with one of them)"
        )
    shape = tuple(map(int, space.shape)) or (1,)
    if space.dtype != np.uint8:
        return ObsView(shape, lambda x, xp: x.reshape(-1, *shape).astype(xp.float32))
    if len(shape) == 3 and shape[0] <= 4 < shape[2]:
        turned = (*shape[1:], shape[0])
        scaled = lambda x, xp: xp.moveaxis(x.reshape(-1, *shape), 1, -1).astype(xp.float32) / 255.0
        return ObsView(turned, scaled, ("uint8 / 255", "channels last"))
    return ObsView(shape, lambda x, xp: x.reshape(-1, *shape).astype(xp.float32) / 255.0, ("uint8 / 255",))


def summary(spec: EnvSpec) -> str:
    """Observation, actions and limit in a few words."""
    act = spec.action
    actions = f"{act.n} actions" if isinstance(act, Discrete) else f"{act.size} continuous actions"
    return f"obs {spec.obs_shape}, {actions}, limit {spec.max_steps}"


def action_of(name: str, space: Any) -> Discrete | Box:
    """The learner's description of an action space.

    Raises:
      ConfigError: it is neither Discrete (from 0) nor a one-dimensional Box.
    """
    kind = type(space).__name__
    if kind == "Discrete" and int(getattr(space, "start", 0)) == 0:
        return Discrete(int(space.n))
    if kind == "Box" and len(space.shape) == 1:
        low, high = (tuple(float(x) for x in np.asarray(b, np.float64)) for b in (space.low, space.high))
        return Box(int(space.shape[0]), low, high)
    raise ConfigError(f"{name}: action space {space} is not supported (Discrete starting at 0, or a Box of shape (A,))")
