"""From an environment's id to the environment: registered ones, probes, gymnax ids as they are, `brax/<name>`."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxattr.config import ConfigError, near
from jaxattr.envs import brax, gymnax
from jaxattr.envs.base import Env, EnvSpec, check_option_value, check_options
from jaxattr.envs.probes import PROBES

_registered: dict[str, Callable[..., Env]] = {}


class EnvInfo(NamedTuple):
    """One line of `list_envs`."""

    id: str
    family: str  # registered, gymnax, brax or probe
    description: str  # spaces and time limit, or "unavailable: why"


def register(env_id: str, factory: Callable[..., Env]) -> None:
    """Make `factory(**options) -> Env` available as `env_id` in this process.

    The factory's keyword arguments are the environment's options; a misspelt one is refused unless the factory
    takes `**kwargs`.

    Raises:
      ConfigError: the id is empty, no text, or taken; or the factory cannot be called.
    """
    if not isinstance(env_id, str) or not env_id.strip():
        raise ConfigError(f"environment id is {env_id!r}: must be a text that is not empty")
    if not callable(factory):
        raise ConfigError(f"factory of {env_id!r} is {factory!r}: must be callable, factory(**options) -> Env")
    if env_id in _registered or env_id in PROBES or env_id.startswith("brax/") or env_id in _ids(gymnax):
        raise ConfigError(f"environment id {env_id!r} is already taken")
    _registered[env_id] = factory


def make(env_id: str, env_args: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> Env:
    """The environment `env_id` with the options `env_args`.

    Raises:
      ConfigError: an unknown id (near names are listed), or an option that the environment does not have.
    """
    given: Any = env_args.items() if isinstance(env_args, Mapping) else env_args
    pairs: list[tuple[str, Any]] = list(given)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{env_id}: an option is given twice: {', '.join(name for name, _ in pairs)}")
    if not isinstance(env_id, str):
        raise ConfigError(f"environment id is {env_id!r}: must be a text")
    factory = _registered.get(env_id) or PROBES.get(env_id)
    if factory is not None:
        return _call(env_id, factory, options)
    if env_id.startswith("brax/"):
        return brax.make(env_id, options)
    if env_id in gymnax.ids():
        return gymnax.make(env_id, options)
    raise ConfigError(f"unknown environment {env_id!r}{near(env_id, _all_ids())}")


def list_envs() -> list[EnvInfo]:
    """Every environment that `make` knows, in a fixed order; nothing is compiled, no physics model is loaded."""
    rows = [EnvInfo(env_id, "registered", _summary(f.__doc__)) for env_id, f in _registered.items()]
    for module, family in ((gymnax, "gymnax"), (brax, "brax")):
        try:
            rows += [EnvInfo(env_id, family, module.describe(env_id)) for env_id in module.ids()]
        except ConfigError as error:
            rows.append(EnvInfo(f"{family}: all", family, f"unavailable: {error}"))
    rows += [EnvInfo(env_id, "probe", _summary(f.__doc__)) for env_id, f in PROBES.items()]
    return rows


def parse_env_args(items: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """`["is_slippery=false", "size=10"]` as `(("is_slippery", False), ("size", 10))`, sorted by name.

    A value is true, false, none, a whole number, a number, a list such as `[8, 9]` (a tuple in the result, so that
    the configuration stays hashable) or else a text.

    Raises:
      ConfigError: an item is not of the form name=value, or a name comes twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = str(item).partition("=")
        name, text = name.strip(), text.strip()
        if not equals or not name.isidentifier() or not text:
            raise ConfigError(f"environment option {item!r}: must have the form name=value")
        if name in found:
            raise ConfigError(f"environment option {name!r} is given twice")
        found[name] = _parse_value(item, text)
    return tuple(sorted(found.items()))


def _parse_value(item: str, text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    if text[0] in "[('\"":
        for read in (json.loads, ast.literal_eval):
            try:
                return _freeze(read(text))
            except (ValueError, SyntaxError):
                pass
        raise ConfigError(f"environment option {item!r}: the value is no list or quoted text that can be read")
    return text


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, (list, tuple)) else value


def _call(env_id: str, factory: Callable[..., Env], options: dict[str, Any]) -> Env:
    """`factory(**options)`, with names and types checked against the factory's signature."""
    parameters = inspect.signature(factory).parameters.values()
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        check_options(env_id, options, [p.name for p in parameters if p.kind != p.VAR_POSITIONAL])
    defaults = {p.name: p.default for p in parameters}
    env = factory(**{k: check_option_value(env_id, k, v, defaults.get(k)) for k, v in options.items()})
    if not isinstance(env, Env) or not isinstance(env.spec, EnvSpec):
        raise ConfigError(f"factory of {env_id!r} returned {type(env).__name__}, not an Env (spec, reset, step)")
    return env


def _summary(doc: str | None) -> str:
    return (doc or "").strip().split("\n")[0]


def _ids(module: Any) -> list[str]:
    """The ids of a backend; none if it is not installed."""
    try:
        return module.ids()
    except ConfigError:
        return []


def _all_ids() -> list[str]:
    return [*_registered, *_ids(gymnax), *_ids(brax), *PROBES]
