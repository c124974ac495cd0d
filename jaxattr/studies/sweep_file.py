"""A sweep's definition, as read from a TOML file, checked: every mistake is one line, before anything compiles."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxattr.config import FIELDS, TRACED, Config, ConfigError, check_int, near
from jaxattr.presets import preset
from jaxattr.studies.sweep import AGGREGATES, Choices, Halving, Interval, Sweep

METHODS = ("grid", "random", "optuna")
METRICS = ("final_test_return", "auc")
DIRECTIONS = ("maximize", "minimize")
NAMES = (
    "env", "preset", "seeds", "rounds", "total_steps", "fixed", "sweep", "method", "trials", "sampler_seed", "metric",
    "aggregate", "direction", "halving", "batch", "lanes_per_program",
)  # fmt: skip


def parse_sweep(values: Mapping[str, Any]) -> Sweep:
    """Check a definition, read from TOML, and fill in its defaults.

    Args:
      values: `env` (required); `preset`; `seeds` (how many, or a list); `rounds` or `total_steps`; tables `fixed` and
        `sweep` (a list of values, or {low, high, log, int}); `method`, `trials`, `sampler_seed`, `metric`,
        `aggregate`, `direction`, `halving` (true, or {rungs, eta}), `batch`, `lanes_per_program`.

    Raises:
      ConfigError: an unknown name (near names are listed), a value out of range, or settings that do not fit.
    """
    _known(values, NAMES, "unknown name {!r} in the sweep")
    env = values.get("env")
    if not isinstance(env, str) or not env:
        raise ConfigError('the sweep names no environment: add env = "CartPole-v1" or another one')
    swept, fixed = _table(values, "sweep"), _table(values, "fixed")
    if not swept:
        raise ConfigError("the sweep has no [sweep] table: which settings should vary?")
    for where, table in (("[fixed]", fixed), ("[sweep]", swept)):
        _known(table, FIELDS, f"unknown setting {{!r}} in {where}")
    for name in swept:
        if name in fixed or (name == "total_steps" and ("total_steps" in values or "rounds" in values)):
            raise ConfigError(f"{name} is fixed and swept: keep one of them")
    space = tuple((name, _space(name, what)) for name, what in swept.items())
    # The settings of no point in particular, but ones that work together: a preset's sizes need not fit the swept ones.
    start = {name: what.values[0] if isinstance(what, Choices) else what.low for name, what in space}
    config = _with_length(preset(values.get("preset", "tuned"), env), values, fixed, start)
    for name, what in space:
        for value in what.values if isinstance(what, Choices) else (what.low, what.high):
            if name in TRACED:
                config.replace(**{name: value})
    method = _one_of(values, "method", METHODS, "grid")
    if config.eval_every == 0 and _one_of(values, "metric", METRICS, METRICS[0]) == "auc":
        config = config.replace(eval_every=max(1, config.total_updates // 20))
    trials = _trials(values, method, space)
    batch = _whole(values, "batch", min(trials, 16), 1)
    lanes = values.get("lanes_per_program")
    seeds = _seeds(values.get("seeds", 4))
    if lanes is not None and _whole(values, "lanes_per_program", 1, 1) < len(seeds):
        raise ConfigError(f"lanes_per_program is {lanes}: the {len(seeds)} seeds of a setting run together")
    return Sweep(
        env=env,
        config=config,
        seeds=seeds,
        space=space,
        method=method,
        trials=trials,
        sampler_seed=_whole(values, "sampler_seed", 0, 0),
        metric=_one_of(values, "metric", METRICS, METRICS[0]),
        aggregate=_one_of(values, "aggregate", tuple(AGGREGATES), "iqm"),
        direction=_one_of(values, "direction", DIRECTIONS, DIRECTIONS[0]),
        halving=_halving(values.get("halving", False)),
        batch=batch,
        lanes_per_program=lanes,
    )


# -- pieces of the definition ----------------------------------------------------------------------------------------
def _known(table: Mapping[str, Any], names: Sequence[str], message: str) -> None:
    for name in table:
        if name not in names:
            raise ConfigError(f"{message.format(name)}{near(name, names)}")


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} is {table!r}: must be a table, [{name}]")
    return table


def _one_of(values: Mapping[str, Any], name: str, options: Sequence[str], default: str) -> str:
    value = values.get(name, default)
    if value not in options:
        raise ConfigError(f"{name} is {value!r}: must be one of {', '.join(options)}")
    return value


def _whole(values: Mapping[str, Any], name: str, default: int, low: int) -> int:
    value = values.get(name, default)
    check_int(name, value, low)
    return value


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        if not value or len(set(map(str, value))) < len(value):
            raise ConfigError(f"seeds is {value}: must name one or more, each once")
        return tuple(_whole({"seeds": v}, "seeds", 0, 0) for v in value)
    return tuple(range(_whole({"seeds": value}, "seeds", 4, 1)))


def _with_length(base: Config, values: Mapping[str, Any], fixed: Mapping[str, Any], start: Mapping[str, Any]) -> Config:
    """`base` with the fixed settings, some values of the swept ones, and the length of a run."""
    if "rounds" in values and "total_steps" in values:
        raise ConfigError("rounds and total_steps both say how long a run is: keep one of them")
    changes = {**{name: _value(name, value) for name, value in fixed.items()}, **start}
    if "rounds" in values:
        sizes = [name for name in ("num_envs", "num_steps") if name in start]
        if sizes:
            raise ConfigError(f"{sizes[0]} is swept, so rounds differ in length: give total_steps instead of rounds")
        sized = {name: changes.get(name, getattr(base, name)) for name in ("num_envs", "num_steps")}
        for name in sized:
            _whole(sized, name, 1, 1)
        changes["total_steps"] = _whole(values, "rounds", 1, 1) * sized["num_envs"] * sized["num_steps"]
    elif "total_steps" in values:
        changes["total_steps"] = values["total_steps"]
    return base.replace(**changes)


def _trials(values: Mapping[str, Any], method: str, space: Sequence[tuple[str, Choices | Interval]]) -> int:
    if method != "grid":
        if "trials" not in values:
            raise ConfigError(f"method is {method!r}: trials must say how many settings to try")
        return _whole(values, "trials", 1, 1)
    if "trials" in values:
        raise ConfigError('method is "grid", which tries every combination: leave trials out')
    count = 1
    for name, what in space:
        if not isinstance(what, Choices):
            raise ConfigError(f'{name} is an interval: method = "grid" needs a list; or use random or optuna')
        count *= len(what.values)
    return count


def _halving(value: Any) -> Halving | None:
    if isinstance(value, bool):
        return Halving() if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(f"halving is {value!r}: must be true, false or a table of rungs and eta")
    _known(value, ("rungs", "eta"), "unknown name {!r} in halving")
    halving = Halving(tuple(value.get("rungs", Halving.rungs)), value.get("eta", Halving.eta))
    if not halving.rungs or not all(_is_number(r) and 0 < r < 1 for r in halving.rungs):
        raise ConfigError(f"halving.rungs is {list(halving.rungs)}: must be shares of the rounds, each in (0, 1)")
    if not _is_number(halving.eta) or not 1 < halving.eta < math.inf:
        raise ConfigError(f"halving.eta is {halving.eta!r}: must be in (1, inf)")
    return halving


def _space(name: str, what: Any) -> Choices | Interval:
    """What a swept setting may be; whether its values are in range is checked with the others."""
    if isinstance(what, list):
        values = tuple(_value(name, v) for v in what)
        if not values or len({json.dumps(v) for v in values}) < len(values):
            raise ConfigError(f"{name} is {what}: must list one or more values, each once")
        return Choices(values)
    if not isinstance(what, Mapping):
        raise ConfigError(f"{name} is {what!r} in [sweep]: must be a list of values or {{low = ..., high = ...}}")
    _known(what, ("low", "high", "log", "int"), f"unknown name {{!r}} in sweep.{name}")
    kind = str(Config.__dataclass_fields__[name].type)
    if not kind.startswith(("int", "float")):
        raise ConfigError(f"{name} is no number: [sweep] must list its values")
    low, high, log, whole = (what.get(k, d) for k, d in (("low", None), ("high", None), ("log", False), ("int", None)))
    whole = kind.startswith("int") if whole is None else whole
    if not _is_number(low) or not _is_number(high) or not low < high:
        raise ConfigError(f"{name} is from {low!r} to {high!r}: low and high must be numbers, low < high")
    if not isinstance(log, bool) or not isinstance(whole, bool):
        raise ConfigError(f"sweep.{name}: log and int must be true or false")
    if log and low <= 0:
        raise ConfigError(f"{name} is from {low!r} with log = true: low must be above 0")
    if whole and (low != int(low) or high != int(high)):
        raise ConfigError(f"{name} is from {low!r} to {high!r}: must be whole numbers")
    if kind.startswith("int") and not whole:
        raise ConfigError(f"{name} is a whole number: int = false cannot be")
    return Interval(low, high, log, whole)


def _value(name: str, value: Any) -> Any:
    """A value from TOML as `Config` wants it.

    Raises:
      ConfigError: of another kind than the setting (what `Config` itself does not check).
    """
    kind = str(Config.__dataclass_fields__[name].type)
    if kind.endswith("| None") and value == "none":  # a TOML file has no null
        return None
    wrong = {
        "bool": kind == "bool" and not isinstance(value, bool),
        "text": kind == "str" and not isinstance(value, str),
        "a list of whole numbers": kind == "tuple[int, ...]"
        and not (isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)),
        "a table": name == "env_args" and not isinstance(value, Mapping),
        "a number": kind == "float" and not _is_number(value),
    }
    for wanted, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{name} is {value!r}: must be {'true or false' if wanted == 'bool' else wanted}")
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
