"""The paper's main comparison as data: environments with published numbers, arms, budgets, and how p is chosen.

Source: Hu et al., NeurIPS 2025 (arXiv 2505.19281), Figure 6 and appendix. MiniGrid-DoorKey-8x8 is ours: Empty-8x8 is
so easy that methods hardly differ there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxattr.analysis.compare import NULL
from jaxattr.config import Config, ConfigError, near
from jaxattr.presets import preset

SETTINGS = ("paper", "tuned")


@dataclass(frozen=True)
class Published:
    """What the paper reports for an environment: percent, each with its +-."""

    env_steps: int
    se_ave: tuple[float, float]
    se_peak: tuple[float, float]
    rt_peak: tuple[float, float]
    seconds: tuple[float, float]
    """Whole run, standard PPO and IIF (20-core Xeon and A6000)."""


@dataclass(frozen=True)
class Quick:
    """Budget of `--quick`; the fields mean what they mean in `Task`."""

    rounds: int
    evaluations: int
    episodes: int
    """Of each evaluation, the last one included."""


@dataclass(frozen=True)
class Task:
    """One environment of the comparison: budgets, and what counts as a seed that failed."""

    env_id: str
    p: float
    """The published best p (share of the negative records that IIF drops)."""
    published: Published | None
    tuned_steps: int
    """Environment steps per seed in the `tuned` setting; `paper` has the paper's."""
    evaluations: int
    """About how many evaluations are spread over a run; fewer where a run has fewer rounds."""
    eval_episodes: int
    """Stochastic test episodes of each, all seeds together (but `LEAST_EPISODES` for every seed)."""
    final_episodes: int
    """Test episodes after the last round, all seeds together."""
    failed: float
    """A seed has failed if its final test return is at most this."""
    failed_means: str
    pace: float
    """Rough seconds per lane and round of 2,048 records: a first guess of the time left, used for nothing else."""
    quick: Quick | None = None
    """None: not part of `--quick`."""


TASKS: dict[str, Task] = {
    task.env_id: task
    for task in (
        Task(
            "FrozenLake-misc", 0.5,
            Published(102_400, (34.0, 2.0), (19.2, 5.9), (29.5, 2.9), (93.9, 82.2)),
            tuned_steps=102_400, evaluations=50, eval_episodes=320, final_episodes=5_000,
            failed=0.5, failed_means="reaches the goal in at most half of the episodes", pace=0.03,
            quick=Quick(rounds=20, evaluations=20, episodes=160),
        ),
        Task(
            "Acrobot-v1", 0.5,
            Published(102_400, (36.7, 6.5), (48.5, 0.8), (55.2, 1.0), (79.9, 70.0)),
            tuned_steps=102_400, evaluations=50, eval_episodes=160, final_episodes=5_000,
            failed=-499.0, failed_means="swings up in next to no episode", pace=0.06,
            quick=Quick(rounds=16, evaluations=16, episodes=80),
        ),
        Task(
            "envpool/MiniGrid-Empty-8x8-v0", 0.125,
            Published(81_920, (65.8, 3.3), (61.7, 4.1), (69.1, 1.7), (378.0, 365.0)),
            tuned_steps=81_920, evaluations=40, eval_episodes=160, final_episodes=5_000,
            failed=0.1, failed_means="hardly ever finds the goal (1 = at once)", pace=0.4,
            quick=Quick(rounds=6, evaluations=6, episodes=80),
        ),
        Task(
            "envpool/Highway-v0", 0.5,
            Published(204_800, (37.7, 6.1), (55.1, 2.9), (59.9, 0.7), (234.0, 214.0)),
            tuned_steps=204_800, evaluations=50, eval_episodes=80, final_episodes=500,
            failed=10.0, failed_means="crashes about as early as random actions do", pace=0.15,
        ),
        Task(
            "envpool/LunarLander-v3", 0.125,
            Published(307_200, (26.0, 1.8), (39.7, 3.7), (44.9, 2.5), (329.0, 319.0)),
            tuned_steps=307_200, evaluations=30, eval_episodes=160, final_episodes=5_000,
            failed=-100.0, failed_means="crashes about as hard as random actions do", pace=0.08,
            quick=Quick(rounds=16, evaluations=8, episodes=40),
        ),
        Task(
            "envpool/BipedalWalker-v3", 0.0625,
            Published(1_024_000, (31.0, 8.7), (26.2, 8.0), (29.2, 0.7), (691.0, 677.0)),
            tuned_steps=1_024_000, evaluations=25, eval_episodes=80, final_episodes=500,
            failed=-50.0, failed_means="falls early or stands still", pace=0.1,
        ),
        Task(
            "envpool/MiniGrid-DoorKey-8x8-v0", 0.125, None,
            tuned_steps=409_600, evaluations=50, eval_episodes=160, final_episodes=5_000,
            failed=0.1, failed_means="hardly ever opens the door and finds the goal (1 = at once)", pace=0.4,
        ),
    )
}  # fmt: skip
"""Environment id -> task: the paper's six, then DoorKey."""

PUBLISHED_NORMALIZATION = {"score_normalize": "chunk", "target_normalize": False, "entropy_scale": "published"}
"""Loss side standardised per shuffled chunk of 64, target side raw: the authors' code."""
BUFFER_NORMALIZATION = {"score_normalize": "buffer", "target_normalize": True, "entropy_scale": "record"}
"""Both sides standardised over the whole buffer."""
COMMON = {"training": "compact", "target": "return", "norm_chunk": 64, "score_metric": "plain", "warmup_rounds": 0}
"""Said by every arm, so that an arm means the same whatever a setting's preset says."""

_COMPARED: dict[str, dict[str, Any]] = {
    "none": {"filter": "none"},
    NULL: {"filter": "none"},
    "iif": {"filter": "iif", **PUBLISHED_NORMALIZATION},
    "random": {"filter": "random", **PUBLISHED_NORMALIZATION},
    "iif-matched": {"filter": "iif", **PUBLISHED_NORMALIZATION, "training": "step_matched"},
    "iif-norm": {"filter": "iif", **BUFFER_NORMALIZATION},
    "gated": {"filter": "gated", **BUFFER_NORMALIZATION},
    "dtv": {"filter": "dtv", **BUFFER_NORMALIZATION},
    "dtv_loo": {"filter": "dtv_loo", **BUFFER_NORMALIZATION},
    "advantage_sign": {"filter": "advantage_sign", **PUBLISHED_NORMALIZATION},
    "td_error": {"filter": "td_error", **PUBLISHED_NORMALIZATION},
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {"max_grad_norm": 0.5},
    "8": {"num_envs": 8, "num_steps": 256},
    "cut": {"round_start": "reset"},
}
ARMS: dict[str, dict[str, Any]] = {
    **_COMPARED,
    "iif-buffer": {**_COMPARED["iif"], "score_normalize": "buffer"},
    "iif-target": {**_COMPARED["iif"], "target_normalize": True},
    **{f"{rule}-{name}": {**_COMPARED[rule], **v} for name, v in _VARIANTS.items() for rule in ("none", "iif")},
}
"""Arm -> changes of the setting's configuration: those of the comparison, then those of the ablation."""
WITHOUT_P = tuple(name for name, changes in ARMS.items() if changes["filter"] in ("none", "dtv", "dtv_loo"))
GRID = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""The p of `iif` that are tried."""
DEFAULT_ARMS = ("none", NULL, *(f"iif:{p:g}" for p in GRID), *list(_COMPARED)[3:])
QUICK_ARMS = ("none", "iif", "random")


class Arm(NamedTuple):
    """One arm of one environment."""

    name: str
    """`NAME:P`, or `NAME` where the rule has no p."""
    rule: str
    """A key of `ARMS`."""
    changes: Mapping[str, Any]

    @property
    def is_null(self) -> bool:
        """Whether it is the baseline on other seeds."""
        return self.rule == NULL


def parse_arm(text: str, task: Task) -> Arm:
    """`NAME`, at the environment's published best p, or `NAME:P`.

    Raises:
      ConfigError: no such arm, a p that is no number in [0, 1], or a p where the rule has none.
    """
    rule, colon, share = text.partition(":")
    if rule not in ARMS:
        raise ConfigError(f"unknown arm {text!r}{near(rule, ARMS)}")
    changes = {**COMMON, **ARMS[rule]}
    if rule in WITHOUT_P:
        if colon:
            raise ConfigError(f"arm {text!r}: {rule} has no p")
        return Arm(rule, rule, changes)
    try:
        p = float(share) if colon else task.p
    except ValueError:
        p = math.nan
    if not 0 <= p <= 1:
        raise ConfigError(f"arm {text!r}: p must be a number from 0 to 1")
    return Arm(f"{rule}:{p:g}", rule, {**changes, "p": p})


def parse_arms(texts: Sequence[str], task: Task) -> list[Arm]:
    """Each once (`iif` and `iif:0.5` may be the same arm), `none` first: the others are compared with it.

    Raises:
      ConfigError: see `parse_arm`.
    """
    arms = {arm.name: arm for arm in (parse_arm(text, task) for text in ("none", *texts))}
    return list(arms.values())


def choose_tasks(names: Sequence[str], quick: bool, default: Sequence[str] = tuple(TASKS)) -> list[Task]:
    """The named environments; without names those of `default`, with `quick` as far as they have such a budget.

    Raises:
      ConfigError: an environment that is no part of the comparison, or not of `--quick`.
    """
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"--envs {name!r}: not part of this comparison{near(name, TASKS)}")
        if quick and TASKS[name].quick is None:
            known = ", ".join(task.env_id for task in TASKS.values() if task.quick)
            raise ConfigError(f"--envs {name!r}: has no --quick budget; these have: {known}")
    wanted = names or [env for env in default if TASKS[env].quick or not quick]
    return [task for task in TASKS.values() if task.env_id in wanted]


LEAST_EPISODES = 8
"""Test episodes of every seed, however many seeds there are."""


def arm_config(setting: str, task: Task, arm: Arm, seeds: int, quick: bool = False) -> Config:
    """The whole configuration of one arm of so many seeds: the setting's preset, the task's budget, the arm's changes.

    Raises:
      ConfigError: unknown setting, or values that cannot work together.
    """
    if setting not in SETTINGS:
        raise ConfigError(f"--settings {setting!r}: unknown{near(setting, SETTINGS)}")
    base = preset(setting, task.env_id)
    base = base.replace(env_args=preset("paper", task.env_id).env_args)  # the same task in every setting
    per_round = base.records_per_round
    rounds = (base.total_steps if setting == "paper" else task.tuned_steps) // per_round
    evaluations, episodes, final = task.evaluations, task.eval_episodes, task.final_episodes
    checkpoint_every = base.checkpoint_every
    if quick and task.quick is not None:
        rounds = checkpoint_every = min(rounds, task.quick.rounds)
        evaluations, episodes, final = task.quick.evaluations, task.quick.episodes, task.quick.episodes
    return base.replace(
        total_steps=rounds * per_round,
        eval_every=max(1, rounds // evaluations),
        eval_episodes=max(LEAST_EPISODES, episodes // seeds),
        final_eval_episodes=max(LEAST_EPISODES, final // seeds),
        eval_policy="stochastic",
        checkpoint_every=checkpoint_every,
        **arm.changes,
    )


class Choice(NamedTuple):
    """p chosen on some seeds and reported on others, beside the p that is best on the reporting seeds themselves."""

    p: float
    value: float
    """Of p on the reporting seeds: an honest number."""
    best_p: float
    best_value: float
    """Of `best_p`, chosen and reported on the same seeds."""

    @property
    def gain(self) -> float:
        """What choosing on the same seeds adds without any effect; never negative."""
        return self.best_value - self.value


def choose_p(value: Callable[[float, Sequence[int]], float], ps: Sequence[float], seeds: int) -> Choice | None:
    """Choose p on the seeds at even positions 0, 2, ..., report it on those at odd ones.

        p      = argmax_p value(p, even),   reported: value(p, odd)
        best_p = argmax_p value(p, odd),    reported: value(best_p, odd)

    Ties go to the p that comes first; a value of NaN is worse than every number.

    Args:
      value: (p, positions of seeds) -> a number, more is better.
      ps: what to choose from.
      seeds: S.

    Returns:
      None for fewer than four seeds (halves of one seed say nothing) or fewer than two p.
    """
    if seeds < 4 or len(ps) < 2:
        return None
    even, odd = range(0, seeds, 2), range(1, seeds, 2)

    def score(p: float, positions: Sequence[int]) -> float:
        found = value(p, positions)
        return -math.inf if math.isnan(found) else found

    chosen = max(ps, key=lambda p: score(p, even))
    best = max(ps, key=lambda p: score(p, odd))
    return Choice(chosen, value(chosen, odd), best, value(best, odd))
