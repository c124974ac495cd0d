"""jaxattr: train reinforcement-learning agents in JAX and know which of their experiences made them."""

from jaxattr.attribution.filters import keep_mask, register_filter
from jaxattr.attribution.scores import influence_scores, per_sample_gradients
from jaxattr.attribution.targets import register_target
from jaxattr.config import Config, ConfigError
from jaxattr.envs.registry import register
from jaxattr.host.agent import Agent, load_agent
from jaxattr.host.rounds import load_round
from jaxattr.host.run import ChunkInfo, Run, Stopped
from jaxattr.host.runner import train
from jaxattr.host.xla import use_all_cores
from jaxattr.presets import preset
from jaxattr.version import __version__

__all__ = [
    "Agent",
    "ChunkInfo",
    "Config",
    "ConfigError",
    "Run",
    "Stopped",
    "__version__",
    "influence_scores",
    "keep_mask",
    "load_agent",
    "load_round",
    "per_sample_gradients",
    "preset",
    "register",
    "register_filter",
    "register_target",
    "train",
    "use_all_cores",
]
