"""From an environment's id to the environment: registered ones, probes, gymnax ids as they are, `brax/<name>`,
`envpool/<task>`, `gymnasium/<id>`.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxattr.config import ConfigError, near
from jaxattr.envs import brax, envpool, gymnasium, gymnax
from jaxattr.envs.base import AnyEnv, Env, EnvSpec, Pool, check_option_value, check_options
from jaxattr.envs.probes import PROBES

_registered: dict[str, Callable[..., AnyEnv]] = {}
_PREFIXED: dict[str, Any] = {"brax/": brax, "envpool/": envpool, "gymnasium/": gymnasium}


class EnvInfo(NamedTuple):
    """One line of `list_envs`."""

    id: str
    family: str  # registered, gymnax, brax, envpool, gymnasium or probe
    description: str  # spaces and time limit, or "unavailable: why"


def register(env_id: str, factory: Callable[..., AnyEnv]) -> None:
    """Make `factory(**options)`, an `Env` or a `Pool`, available as `env_id` in this process.

    The factory's keyword arguments are the environment's options; a misspelt one is refused unless the factory
    takes `**kwargs`.

    Raises:
      ConfigError: the id is empty, no text, or taken; or the factory cannot be called.
    """
    if not isinstance(env_id, str) or not env_id.strip():
        raise ConfigError(f"environment id is {env_id!r}: must be a text that is not empty")
    if not callable(factory):
        raise ConfigError(f"factory of {env_id!r} is {factory!r}: must be callable, factory(**options) -> Env")
    if env_id in _registered or env_id in PROBES or env_id.startswith(tuple(_PREFIXED)) or env_id in _ids(gymnax):
        raise ConfigError(f"environment id {env_id!r} is already taken")
    _registered[env_id] = factory


def make(env_id: str, env_args: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> AnyEnv:
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
    for prefix, module in _PREFIXED.items():
        if env_id.startswith(prefix):
            return module.make(env_id, options)
    if env_id in gymnax.ids():
        return gymnax.make(env_id, options)
    raise ConfigError(f"unknown environment {env_id!r}{near(env_id, _all_ids())}")


def list_envs(containing: str = "") -> list[EnvInfo]:
    """Every environment that `make` knows, in a fixed order; nothing is compiled, no physics model is loaded.

    EnvPool's and Gymnasium's are too many for one list: they are spelt out only where `containing` selects some.

    Args:
      containing: part of the ids to list, in any case.
    """
    rows = [EnvInfo(env_id, "registered", _summary(f.__doc__)) for env_id, f in _registered.items()]
    for family, module in {"gymnax": gymnax, **{p.rstrip("/"): m for p, m in _PREFIXED.items()}}.items():
        try:
            known = module.ids()
        except ConfigError as error:
            rows.append(EnvInfo(f"{family}: all", family, f"unavailable: {error}"))
            continue
        chosen = [env_id for env_id in known if containing.lower() in env_id.lower()]
        if not containing and module in (envpool, gymnasium):
            text = f"{len(known)} of them; `jaxattr envs {family}` or, say, `jaxattr envs Lunar` lists some"
            rows.append(EnvInfo(f"{family}/...", family, text))
        else:
            rows += [EnvInfo(env_id, family, _described(module, env_id)) for env_id in chosen]
    rows += [EnvInfo(env_id, "probe", _summary(f.__doc__)) for env_id, f in PROBES.items()]
    return [row for row in rows if containing.lower() in row.id.lower()]


def _described(module: Any, env_id: str) -> str:
    try:
        return module.describe(env_id)
    except ConfigError as error:  # a space that is not supported, a package that is missing
        return f"unavailable: {str(error).removeprefix(env_id + ': ')}"


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


def _call(env_id: str, factory: Callable[..., AnyEnv], options: dict[str, Any]) -> AnyEnv:
    """`factory(**options)`, with names and types checked against the factory's signature."""
    parameters = inspect.signature(factory).parameters.values()
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        check_options(env_id, options, [p.name for p in parameters if p.kind != p.VAR_POSITIONAL])
    defaults = {p.name: p.default for p in parameters}
    env = factory(**{k: check_option_value(env_id, k, v, defaults.get(k)) for k, v in options.items()})
    if not isinstance(env, (Env, Pool)) or not isinstance(env.spec, EnvSpec):
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
    return [*_registered, *_ids(gymnax), *(i for module in _PREFIXED.values() for i in _ids(module)), *PROBES]
