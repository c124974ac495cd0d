"""One frozen dataclass holds a run's whole configuration; validation happens here, before anything compiles.

Static or traced: a field that also exists in `jaxattr.types.Settings` is a traced number, so changing it never
recompiles and lanes of one run may differ in it. Every other field shapes the compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxattr.types import Settings


class ConfigError(ValueError):
    """A setting that cannot work. The message is one line: what is wrong and what would be right."""


@dataclass(frozen=True)
class Config:
    """All settings of a training run. Immutable: `config.replace(p=0.5)` gives a changed copy.

    Raises:
      ConfigError: a value is out of range, or sizes do not divide; the message names field, value and range.
    """

    # -- experience -------------------------------------------------------------------------------------------
    total_steps: int = 500_000
    """Environment steps per seed (rounded down to whole rounds)."""
    num_envs: int = 8
    """Parallel environments per seed."""
    num_steps: int = 256
    """Steps of each environment per round; a round has num_envs * num_steps records."""
    env_args: tuple[tuple[str, Any], ...] = ()
    """Options of the environment as (name, value) pairs; a mapping is accepted too."""
    reset: Literal["fresh", "cached"] = "fresh"
    """`fresh`: every episode starts from a new draw. `cached`: from the environment's first one (cheaper)."""
    round_start: Literal["continue", "reset"] = "continue"
    """`reset`: every round starts new episodes; those that still run are cut off: bootstrapped and not counted."""

    # -- PPO --------------------------------------------------------------------------------------------------
    num_epochs: int = 10
    """Passes over the kept records per round."""
    minibatch_size: int = 64
    """Records per optimiser step."""
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 3e-4
    """Step size (traced)."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: round k of K uses learning_rate * (1 - k / K), k from 0: constant within a round, never 0."""
    adam_eps: float = 1e-5
    """Adam's epsilon (traced)."""
    max_grad_norm: float | None = 0.5
    """Global gradient-norm clip (traced); none = off."""
    clip_range: float = 0.2
    """PPO's ratio clip (traced)."""
    value_clip_range: float | None = None
    """Clip of the value prediction around its old value (traced); none = off."""
    ent_coef: float = 0.0
    """Entropy bonus (traced)."""
    vf_coef: float = 0.5
    """Weight of the value loss, mean of (return - value)^2 (traced)."""
    gamma: float = 0.99
    """Discount (traced)."""
    gae_lambda: float = 0.95
    """GAE's lambda (traced)."""
    normalize_advantage: Literal["minibatch", "buffer", "none"] = "minibatch"
    """Where the training loss standardises advantages (ddof 1)."""
    normalize_obs: bool = False
    """Standardise observations with running statistics, frozen within a round."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""

    # -- network ----------------------------------------------------------------------------------------------
    network: Literal["auto", "mlp", "cnn"] = "auto"
    """`auto`: a CNN for (height, width, channel) observations, else an MLP."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""
    conv_filters: tuple[int, ...] = (16,)
    """CNN: filters of each shared 3x3 convolution (stride 1, no padding, ReLU)."""
    conv_features: int | None = None
    """CNN: width of a shared linear layer with ReLU behind the convolutions; none = their outputs go on as they are."""
    activation: Literal["tanh", "relu", "swish"] = "tanh"
    shared_trunk: bool = False
    """Policy and value share all hidden layers (a CNN always shares its convolutions)."""
    squash: bool = False
    """Continuous actions: tanh squashing into the bounds instead of clipping at them."""
    log_std_init: float = 0.0
    """Continuous actions: initial log standard deviation."""

    # -- influence scores and filter --------------------------------------------------------------------------
    filter: str = "none"
    """Rule that decides which records are learned from: none, iif, zero, random, dtv, dtv_loo, reweight,
    advantage_sign, td_error, gated, or a registered one."""
    p: float = 0.125
    """Share of the negative-score records to drop, 0 to 1 (traced)."""
    warmup_rounds: int = 0
    """First rounds in which nothing is filtered."""
    training: Literal["compact", "step_matched"] = "compact"
    """`compact`: fewer minibatches after filtering (as published). `step_matched`: as many as unfiltered."""
    estimator: Literal["jvp", "per_sample"] = "jvp"
    """How scores are computed; the numbers agree to rounding."""
    target: str = "return"
    """What a score is about: return (f_ret), gradient (the round's mean gradient), gradient_loo (that without the
    segment that is scored), or a registered target. dtv and dtv_loo bring their own."""
    target_normalize: bool = False
    """Standardise the target's advantages over the buffer."""
    score_normalize: Literal["chunk", "buffer", "none"] = "chunk"
    """Loss-side advantages: standardised per shuffled chunk (as published), over the buffer, or raw."""
    norm_chunk: int = 64
    """Records per chunk when score_normalize is `chunk`."""
    score_entropy: bool = True
    """Include the entropy bonus (if ent_coef > 0) in a record's objective."""
    entropy_scale: Literal["record", "published"] = "record"
    """`published`: a record's entropy term weighs 1/N beside its policy term, as in the authors' code."""
    score_params: str = "policy"
    """Parameters that count: policy (all that the policy depends on, a shared trunk too), or a regular
    expression matched against paths such as `policy/dense_0/kernel`."""
    score_metric: Literal["plain", "adam"] = "plain"
    """`adam`: gradients are compared as Adam would scale them, with its second moments at the round's start."""
    score_chunk: int | None = None
    """Records scored at a time: bounds memory, never changes a number. none: all (jvp), 256 (per_sample)."""
    score_always: bool = False
    """Compute scores also where the filter does not use them (filter none), for the metrics."""

    # -- evaluation and safety --------------------------------------------------------------------------------
    eval_every: int = 0
    """Rounds between evaluations; 0 = only after the last round."""
    eval_episodes: int = 100
    """Evaluation episodes of each kind of policy."""
    final_eval_episodes: int | None = None
    """Episodes of the evaluation after the last round; none = eval_episodes."""
    eval_policy: Literal["both", "stochastic", "deterministic"] = "both"
    """Kinds of episodes: actions sampled, or the policy's mode."""
    eval_seed: int = 1_000_003
    """Seed of the evaluation's start states, the same for every training seed."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A non-finite observation, reward, loss or score: stop this seed, or discard the round and reset."""
    checkpoint_every: int = 0
    """Rounds between checkpoints; 0 = about ten per run."""

    def __post_init__(self) -> None:
        if isinstance(self.env_args, Mapping):
            object.__setattr__(self, "env_args", tuple(sorted(self.env_args.items())))
        else:
            object.__setattr__(self, "env_args", tuple((str(k), v) for k, v in self.env_args))
        object.__setattr__(self, "hidden", tuple(int(h) for h in self.hidden))
        object.__setattr__(self, "conv_filters", tuple(int(f) for f in self.conv_filters))
        _check(self)

    # -- derived sizes ----------------------------------------------------------------------------------------
    @property
    def records_per_round(self) -> int:
        """N = num_envs * num_steps."""
        return self.num_envs * self.num_steps

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches of an unfiltered epoch."""
        return self.records_per_round // self.minibatch_size

    @property
    def total_updates(self) -> int:
        """Rounds in the run."""
        return self.total_steps // self.records_per_round

    @property
    def needs_scores(self) -> bool:
        """Whether the update computes influence scores."""
        return self.filter != "none" or self.score_always

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed.

        Raises:
          ConfigError: a name is no field (near names are listed), or the new value cannot work.
        """
        unknown = [name for name in changes if name not in FIELDS]
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}{near(unknown[0], FIELDS)}")
        return dataclasses.replace(self, **changes)

    def settings(self) -> Settings:
        """The traced numbers as Python floats (the trainer turns them into arrays)."""
        values: dict[str, Any] = {name: getattr(self, name) for name in TRACED}
        for name in ("max_grad_norm", "value_clip_range"):
            values[name] = math.inf if values[name] is None else values[name]
        values["total_updates"] = float(self.total_updates)
        return Settings(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values; `Config.from_dict` is the inverse."""
        out = dataclasses.asdict(self)
        out["env_args"] = dict(self.env_args)
        out["hidden"], out["conv_filters"] = list(self.hidden), list(self.conv_filters)
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build from plain values; the mapping is left untouched.

        Raises:
          ConfigError: an unknown name (near names are listed) or a value that cannot work.
        """
        return cls().replace(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


FIELDS = tuple(f.name for f in dataclasses.fields(Config))
TRACED = tuple(name for name in Settings._fields if name in FIELDS)


def near(word: str, known: Any) -> str:
    """`"; did you mean 'a' or 'b'?"` for the names most like `word`, or the whole list if none is."""
    import difflib

    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    close += [n for n in names if n.lower().endswith("/" + word.lower()) and n not in close]
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if len(names) > 100:
        return f"; {len(names)} are known, such as {', '.join(names[:: len(names) // 4][:4])}"
    return "; known: " + ", ".join(names)


_RANGES: dict[str, tuple[float, float, bool, bool]] = {  # name: (low, high, low allowed, high allowed)
    "learning_rate": (0, math.inf, True, False),
    "adam_eps": (0, math.inf, False, False),
    "max_grad_norm": (0, math.inf, False, True),
    "clip_range": (0, math.inf, False, False),
    "value_clip_range": (0, math.inf, False, True),
    "ent_coef": (0, math.inf, True, False),
    "vf_coef": (0, math.inf, True, False),
    "gamma": (0, 1, True, True),
    "gae_lambda": (0, 1, True, True),
    "p": (0, 1, True, True),
}


def check_number(name: str, value: Any) -> None:
    """Raise ConfigError unless the traced setting `name` may hold `value`."""
    low, high, low_in, high_in = _RANGES[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    inside = number and (value > low or (low_in and value == low)) and (value < high or (high_in and value == high))
    if not inside:
        interval = f"{'[' if low_in else '('}{low:g}, {high:g}{']' if high_in else ')'}"
        raise ConfigError(f"{name} is {value!r}: must be in {interval}")


def _check(c: Config) -> None:
    for name in ("total_steps", "num_envs", "num_steps", "num_epochs", "minibatch_size", "norm_chunk", "eval_episodes"):
        check_int(name, getattr(c, name), 1)
    for name in ("eval_every", "checkpoint_every", "eval_seed", "warmup_rounds"):
        check_int(name, getattr(c, name), 0)
    for name in ("score_chunk", "conv_features", "final_eval_episodes"):
        if getattr(c, name) is not None:
            check_int(name, getattr(c, name), 1)
    for f in dataclasses.fields(Config):
        options = _literal(str(f.type))
        if options and getattr(c, f.name) not in options:
            raise ConfigError(f"{f.name} is {getattr(c, f.name)!r}: must be one of {', '.join(options)}")
    for name in TRACED:
        value = getattr(c, name)
        if value is not None or name not in ("max_grad_norm", "value_clip_range"):
            check_number(name, value)
    if not c.hidden or min(c.hidden) < 1:
        raise ConfigError(f"hidden is {c.hidden}: must be one or more positive widths")
    if not c.conv_filters or min(c.conv_filters) < 1:
        raise ConfigError(f"conv_filters is {c.conv_filters}: must be one or more positive numbers of filters")

    n = c.records_per_round
    sizes = f"num_envs * num_steps = {c.num_envs} * {c.num_steps} = {n}"
    if n == 1:
        raise ConfigError(f"{sizes}: advantages cannot be standardised over one record; collect more per round")
    if n % c.minibatch_size:
        raise ConfigError(f"{sizes} records do not divide into minibatches of minibatch_size = {c.minibatch_size}")
    if c.minibatch_size == 1 and c.normalize_advantage == "minibatch":
        raise ConfigError("minibatch_size is 1: normalize_advantage = minibatch needs 2 or more records per minibatch")
    if c.norm_chunk == 1 and c.score_normalize == "chunk":
        raise ConfigError("norm_chunk is 1: score_normalize = chunk needs 2 or more records per chunk")
    if c.score_metric == "adam" and c.optimizer != "adam":
        raise ConfigError(
            f"score_metric is 'adam', but optimizer is {c.optimizer!r}: its state holds no second moments"
        )
    if c.total_steps < n:
        raise ConfigError(f"total_steps = {c.total_steps} is less than one round of {sizes}")


def check_int(name: str, value: Any, low: int) -> None:
    """Raise ConfigError unless `value` is a whole number, `low` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} is {value!r}: must be a whole number, {low} or more")


def _literal(annotation: str) -> tuple[str, ...]:
    if not annotation.startswith("Literal["):
        return ()
    return tuple(part.strip().strip("\"'") for part in annotation[len("Literal[") : -1].split(","))


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Lines `name: old -> new` for every entry in which two plain configurations differ."""
    missing = "(absent)"
    lines = []
    for name in list(a) + [k for k in b if k not in a]:
        old, new = a.get(name, missing), b.get(name, missing)
        if old != new:
            lines.append(f"{name}: {old} -> {new}")
    return lines
