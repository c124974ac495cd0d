"""Whole training states on disk: written atomically, checked when read, the last good one used.

    RUN/checkpoints/00000050/state/      the arrays (orbax)
    RUN/checkpoints/00000050/meta.json   update, sha256 over all arrays, versions

A checkpoint is written under a temporary name and renamed when complete, so a run killed at any moment leaves either
the whole of it or a `.tmp-` folder that is never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxattr.ops import trees

KEEP = 3
"""Checkpoints kept per run (newest first)."""
_ONE_AT_A_TIME = threading.Lock()


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says which were tried and what is wrong with them."""


def to_plain(tree: Any) -> Any:
    """Typed PRNG keys -> their raw data, device arrays -> numpy: what storage and hashing see."""

    def leaf(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return jax.tree.map(leaf, tree)


def from_plain(plain: Any, like: Any) -> Any:
    """Inverse of `to_plain`: leaves get the dtypes and key types of `like`.

    Raises:
      ValueError: a shape or dtype differs, naming the leaf. (`like` may hold arrays or `jax.ShapeDtypeStruct`.)
    """
    names = trees.paths(like)

    def leaf(name: str, x: Any, y: Any) -> Any:
        if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            impl = jax.random.key_impl(y) if isinstance(y, jax.Array) else None
            return jax.random.wrap_key_data(jax.numpy.asarray(x), impl=impl)
        if tuple(x.shape) != tuple(y.shape) or x.dtype != y.dtype:
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}, expected {y.dtype}{list(y.shape)}")
        return jax.numpy.asarray(x)

    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(
        treedef, [leaf(n, x, y) for n, x, y in zip(names, jax.tree.leaves(plain), leaves, strict=True)]
    )


def digest(tree: Any) -> str:
    """sha256 over every leaf's path, dtype, shape and bytes."""
    plain = to_plain(tree)
    h = hashlib.sha256()
    for name, x in zip(trees.paths(plain), jax.tree.leaves(plain), strict=True):
        h.update(f"{name}:{x.dtype}:{x.shape};".encode())
        h.update(np.ascontiguousarray(x).tobytes())
    return h.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically: the old content or the new one, never half of it."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def save(folder: Path, update: int, state: Any, meta: dict[str, Any]) -> Path:
    """Store `state` as the checkpoint after `update` rounds; older ones beyond `KEEP` go. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    plain = to_plain(state)
    temporary, final = folder / f".tmp-{update:08d}", folder / f"{update:08d}"
    temporary.mkdir()
    with _checkpointer() as checkpointer:
        checkpointer.save(temporary.absolute() / "state", plain)
    write_text(temporary / "meta.json", json.dumps({"update": update, "sha256": digest(plain), **meta}, indent=1))
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    for old in sorted(folder.glob("[0-9]*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_latest(folder: Path, like: Any) -> tuple[Any, dict[str, Any], list[str]]:
    """The newest checkpoint that is whole, as (state, meta, warnings about those that are not).

    Args:
      folder: RUN/checkpoints.
      like: a state of the same structure, for dtypes, key types and containers.

    Raises:
      CheckpointError: none is whole, or there is none.
    """
    warnings = [f"unfinished checkpoint {p.name} ignored" for p in sorted(folder.glob(".tmp-*"))]
    for path in sorted(folder.glob("[0-9]*"), reverse=True):
        try:
            state, meta = load(path, like)
        except Exception as error:  # damage shows in many ways; each is named and the one before is tried
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.append(f"damaged checkpoint {path.name} skipped ({line[:160]})")
            continue
        return state, meta, warnings
    tried = "; ".join(warnings) or "there is none"
    raise CheckpointError(f"no usable checkpoint in {folder}: {tried}")


def load(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """One checkpoint, verified against its hash.

    Raises:
      ValueError: structure, shapes or content are not what they should be.
    """
    meta = json.loads((path / "meta.json").read_text())
    with _checkpointer() as checkpointer:
        plain = checkpointer.restore(path.absolute() / "state", to_plain(like))
    plain = jax.tree.map(np.asarray, plain)
    if digest(plain) != meta["sha256"]:
        raise ValueError("content does not match its sha256")
    return from_plain(plain, like), meta


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """An orbax checkpointer, one at a time: two that save in one process at once may break each other's files."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every step of every save
    with _ONE_AT_A_TIME, ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer
