"""Whole rounds on disk: enough to score, branch and retrain a round later, exactly.

    RUN/rounds/round_000005.npz     a zip of .npy arrays, readable with numpy.load(path, allow_pickle=False)

Every array is named by its place in `studies.replay.RoundData`, such as `before/params/policy/body/dense_0/kernel`,
and has a leading lane axis; PRNG keys are stored as their raw uint32 data. `meta` is a JSON text: format, version,
environment, seeds, swept settings, configuration, round. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config, ConfigError
from jaxattr.envs.base import pure
from jaxattr.envs.registry import make
from jaxattr.host.checkpoint import from_plain, to_plain
from jaxattr.ops import trees
from jaxattr.studies.replay import Round, RoundData, round_data
from jaxattr.train import init_state, lane_settings, make_update_step
from jaxattr.types import TrainState
from jaxattr.version import __version__

FORMAT = 1


def parse_rounds(words: Sequence[str], total: int) -> tuple[int, ...]:
    """`5`, `1,5,10` or `every:10` -> 1-based rounds, sorted.

    Raises:
      ConfigError: no such notation, or no such round.
    """
    rounds: set[int] = set()
    for word in ",".join(words).split(","):
        every = re.fullmatch(r"every:([1-9]\d*)", word.strip())
        if every:
            rounds |= set(range(int(every[1]), total + 1, int(every[1])))
        elif re.fullmatch(r"\d+", word.strip()):
            rounds.add(int(word))
        elif word.strip():
            raise ConfigError(f"--record-rounds {word}: must be rounds such as 1,5,10, or every:10")
    check_rounds(sorted(rounds), total)
    return tuple(sorted(rounds))


def check_rounds(rounds: Sequence[int], total: int) -> None:
    """Raise ConfigError unless all of them exist."""
    wrong = [r for r in rounds if not 1 <= r <= total]
    if wrong:
        raise ConfigError(f"record round {wrong[0]}: this run has rounds 1 to {total}")


def path_of(folder: Path, number: int) -> Path:
    """Where round `number` of the run in `folder` is kept."""
    return folder / "rounds" / f"round_{number:06d}.npz"


def size_of(step: Any, state: TrainState, settings: Any) -> int:
    """Bytes that one recorded round takes."""

    def both(state: TrainState, settings: Any) -> RoundData:
        after, _, judged = step.round(state, settings)
        return round_data(settings, state, after, judged)

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(both, state, settings)))


def save_round(folder: Path, number: int, data: RoundData, description: dict[str, Any]) -> Path:
    """Write a round of the run in `folder`, whole or not at all."""
    path = path_of(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = to_plain(data)
    arrays = dict(zip(trees.paths(plain), jax.tree.leaves(plain), strict=True))
    meta = {"format": FORMAT, "version": __version__, "round": number, **description}
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, meta=np.array(json.dumps(meta)), **arrays)
    os.replace(temporary, path)
    return path


def load_round(path: str | os.PathLike, *, network: nn.Module | None = None) -> Round:
    """Read a recorded round.

    Args:
      path: of the .npz file, or of a run's folder that holds exactly one.
      network: the run's own flax module, if it was trained with one.

    Raises:
      ConfigError: no round is there, it is damaged, or another version wrote it; one line.
    """
    file = find_round(Path(path))
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        meta = json.loads(str(arrays.pop("meta")))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{file}: not a readable round ({line[:120]}); record it again") from None
    if meta.get("format") != FORMAT:
        raise ConfigError(
            f"{file}: format {meta.get('format')} of jaxattr {meta.get('version')}, this is jaxattr {__version__} "
            f"(format {FORMAT}); record it again"
        )
    if meta["network_module"] and network is None:
        raise ConfigError(f"{file}: trained with your own module {meta['network_module']}; pass it as network=")
    config, seeds = Config.from_dict(meta["config"]), tuple(meta["seeds"])
    env = pure(make(meta["env"], config.env_args), "be branched")
    step = make_update_step(env, config, network, keep_states=True)
    like = _structure(step, config, seeds, meta["sweep"])
    names = trees.paths(like)
    missing = sorted(set(names) ^ set(arrays))
    if missing:
        raise ConfigError(f"{file}: does not fit this version ({missing[0]} is missing or unknown); record it again")
    try:
        plain = jax.tree.unflatten(jax.tree.structure(like), [arrays[n] for n in names])
        data = from_plain(plain, like)
    except ValueError as error:
        raise ConfigError(f"{file}: does not fit this version ({error}); record it again") from None
    return Round(meta["env"], config, seeds, meta["round"], env, step, data)


def load_rounds(folder: Path, *, network: nn.Module | None = None) -> list[Round]:
    """All recorded rounds of a run, in order.

    Raises:
      ConfigError: there is none, or one is damaged.
    """
    files = sorted((folder / "rounds").glob("round_*.npz"))
    if not files:
        raise ConfigError(f"{folder}: holds no recorded round; train with --record-rounds, for example every:5")
    return [load_round(file, network=network) for file in files]


def find_round(path: Path) -> Path:
    """The file of a round: `path` itself, or the only one of the run in `path`.

    Raises:
      ConfigError: there is none, or several.
    """
    if path.is_file():
        return path
    files = sorted((path / "rounds").glob("round_*.npz"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"{path}: holds {len(files)} recorded rounds; name one, such as {files[-1]}")
    if path.is_dir():
        raise ConfigError(f"{path}: holds no recorded round; train with --record-rounds, for example every:5")
    raise ConfigError(f"{path}: no such file")


def _structure(step: Any, config: Config, seeds: Sequence[int], sweep: dict[str, list[float]]) -> RoundData:
    """Shapes and dtypes of a round's data; nothing is computed."""

    def made() -> RoundData:
        state, settings = init_state(step, seeds), lane_settings(config, len(seeds), sweep)
        after, _, judged = step.round(state, settings)
        return round_data(settings, state, after, judged)

    return jax.eval_shape(made)


def on_host(tree: Any) -> Any:
    """numpy arrays instead of device arrays, and PRNG keys that are tied to no device."""

    def leaf(x: Any) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            raw = jnp.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
        return np.asarray(x)

    return jax.tree.map(leaf, tree)
