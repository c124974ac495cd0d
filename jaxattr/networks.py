"""Policy and value networks behind two pure functions. The only file of the RL side that knows flax.

A network is written for ONE observation; callers vmap. Users may pass any `flax.linen` module whose call on one
observation returns `(head, value)`: head = logits (n,) for discrete actions or (mean (A,), log_std (A,)) for
continuous ones, value = ().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config, ConfigError
from jaxattr.ops.distributions import Categorical, Distribution, make_distribution
from jaxattr.types import Array, EnvSpec, Params, PRNGKey

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": nn.tanh, "relu": nn.relu, "swish": nn.swish}


@dataclass(frozen=True)
class Networks:
    """A policy and a value function over one parameter tree.

    Attributes:
      init: key -> params. Never vmap it under jit: orthogonal matrices made in parallel can hang XLA's CPU client.
      apply: (params, obs) -> (head, value ()), for one observation.
      distribution: what `head` means.
    """

    init: Callable[[PRNGKey], Params]
    apply: Callable[[Params, Array], tuple[Any, Array]]
    distribution: Distribution

    def policy(self, params: Params, obs: Array) -> Any:
        """The distribution's raw parameters for one observation."""
        return self.apply(params, obs)[0]

    def value(self, params: Params, obs: Array) -> Array:
        """V(obs), () float32, for one observation."""
        return self.apply(params, obs)[1]

    def log_prob(self, params: Params, obs: Array, action: Array) -> Array:
        """log pi(action given obs), nats, for one record."""
        return self.distribution.log_prob(self.policy(params, obs), action)

    def entropy(self, params: Params, obs: Array, action: Array) -> Array:
        """Entropy of pi(. given obs), nats, for one record."""
        return self.distribution.entropy(self.policy(params, obs), action)


class MLP(nn.Module):
    """Dense layers named dense_0, dense_1, ... with orthogonal weights (gain sqrt 2) and zero biases."""

    widths: Sequence[int]
    activation: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """(..., in) -> (..., widths[-1])."""
        for i, width in enumerate(self.widths):
            x = nn.Dense(width, kernel_init=nn.initializers.orthogonal(np.sqrt(2)), name=f"dense_{i}")(x)
            x = _ACTIVATIONS[self.activation](x)
        return x


class ConvTrunk(nn.Module):
    """3x3 convolutions (stride 1, no padding, ReLU), flattened, then perhaps a linear layer with ReLU.

    One layer of 16 filters is the MinAtar network (Young & Tian 2019); 16 and 32 filters and 64 features are MiniGrid's
    (Hu et al. 2025). Written as matrix products over patches: the batch axes that vmap adds (records, lanes with
    weights of their own) stay batched products, where XLA would turn a convolution with batched kernels into a grouped
    one, which on CPUs is slower by orders of magnitude.
    """

    filters: tuple[int, ...] = (16,)
    features: int | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """(H, W, C) -> (F,)."""
        orthogonal = nn.initializers.orthogonal(np.sqrt(2))
        for i, filters in enumerate(self.filters):
            height, width, _ = x.shape
            shifts = [x[a : height - 2 + a, b : width - 2 + b] for a in range(3) for b in range(3)]
            dense = nn.Dense(filters, kernel_init=orthogonal, name=f"conv_{i}")
            x = nn.relu(dense(jnp.concatenate(shifts, axis=-1)))
        x = x.reshape(-1)
        return (
            x if self.features is None else nn.relu(nn.Dense(self.features, kernel_init=orthogonal, name="linear")(x))
        )


class PolicyHead(nn.Module):
    """The last layer (orthogonal, gain 0.01, so the first policy is near uniform) and the free log_std."""

    size: int
    continuous: bool
    log_std_init: float

    @nn.compact
    def __call__(self, x: Array) -> Any:
        """Features -> logits, or (mean, log_std)."""
        out = nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(0.01), name="out")(x)
        if not self.continuous:
            return out
        log_std = self.param("log_std", nn.initializers.constant(self.log_std_init), (self.size,))
        return out, log_std


class ActorCritic(nn.Module):
    """Top-level parameter groups: `trunk` (if anything is shared), `policy`, `value`."""

    size: int
    continuous: bool
    hidden: tuple[int, ...]
    activation: str
    shared: bool
    conv_filters: tuple[int, ...]  # empty: no convolutions
    conv_features: int | None
    log_std_init: float

    def setup(self) -> None:
        """Name the parts."""
        conv = ConvTrunk(self.conv_filters, self.conv_features) if self.conv_filters else None
        self.trunk = conv or (MLP(self.hidden, self.activation) if self.shared else None)
        body = () if self.shared and conv is None else self.hidden
        self.policy = _Tower(
            body, self.activation, PolicyHead(self.size, self.continuous, self.log_std_init, parent=None)
        )
        value_head = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0), name="out", parent=None)
        self.value = _Tower(body, self.activation, value_head)

    def __call__(self, obs: Array) -> tuple[Any, Array]:
        """One observation -> (head, value)."""
        x = obs if self.conv_filters else obs.reshape(-1)
        if self.trunk is not None:
            x = self.trunk(x)
        return self.policy(x), self.value(x)[0]


class _Tower(nn.Module):
    widths: tuple[int, ...]
    activation: str
    head: nn.Module

    @nn.compact
    def __call__(self, x: Array) -> Any:
        if self.widths:
            x = MLP(self.widths, self.activation, name="body")(x)
        return self.head(x)


def make_networks(spec: EnvSpec, config: Config, module: nn.Module | None = None) -> Networks:
    """Build the networks a config asks for, or wrap the user's module.

    Raises:
      ConfigError: the network does not fit the environment, or a per-record gradient has no meaning for it.
    """
    try:
        distribution = make_distribution(spec.action, config.squash)
    except ValueError as error:
        raise ConfigError(f"{spec.name}: {error}") from None
    conv = config.network == "cnn" or (config.network == "auto" and len(spec.obs_shape) == 3)
    if conv and len(spec.obs_shape) != 3:
        raise ConfigError(f"network is cnn, but {spec.name} has observations of shape {spec.obs_shape}, not (H, W, C)")
    if conv and min(spec.obs_shape[:2]) <= 2 * len(config.conv_filters):
        raise ConfigError(
            f"{spec.name}: observations of shape {spec.obs_shape} are too small for {len(config.conv_filters)} "
            "convolutions of 3x3 without padding (conv_filters); use network = mlp or fewer"
        )
    if module is None:
        size = distribution.n if isinstance(distribution, Categorical) else distribution.box.size
        module = ActorCritic(
            size=size,
            continuous=not isinstance(distribution, Categorical),
            hidden=config.hidden,
            activation=config.activation,
            shared=config.shared_trunk,
            conv_filters=config.conv_filters if conv else (),
            conv_features=config.conv_features,
            log_std_init=config.log_std_init,
        )
    check_module(module, spec, distribution)

    def init(key: PRNGKey) -> Params:
        return module.init(key, jnp.zeros(spec.obs_shape))["params"]

    def apply(params: Params, obs: Array) -> tuple[Any, Array]:
        out: Any = module.apply({"params": params}, obs)
        return out

    return Networks(init=init, apply=apply, distribution=distribution)


def check_module(module: nn.Module, spec: EnvSpec, distribution: Distribution) -> None:
    """Refuse a module that is no function of one record, or that returns something else than (head, value).

    Raises:
      ConfigError: one line with the reason.
    """
    name = type(module).__name__
    obs = jax.ShapeDtypeStruct(spec.obs_shape, jnp.float32)
    try:
        variables = jax.eval_shape(lambda o: module.init(jax.random.key(0), o), obs)
    except Exception as error:  # whatever a user's module raises, the line below says where
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"network {name} fails on one observation of shape {spec.obs_shape}: {line}") from error
    extra = sorted(set(variables) - {"params"})
    if extra:
        raise ConfigError(
            f"network {name} keeps {', '.join(extra)}: with BatchNorm or other state the output of one record depends "
            "on others, so a gradient per record has no meaning; use LayerNorm or GroupNorm"
        )
    out = jax.eval_shape(lambda v, o: module.apply(v, o), variables, obs)
    size = distribution.n if isinstance(distribution, Categorical) else distribution.box.size
    want = [(size,), ()] if isinstance(distribution, Categorical) else [(size,), (size,), ()]
    got = [x.shape for x in jax.tree.leaves(out)]
    if got != want:
        raise ConfigError(
            f"network {name} returns shapes {got}: must return (head, value) with shapes {want}; recurrent and "
            "multi-discrete policies are not supported yet"
        )
