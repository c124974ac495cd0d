"""Parameter trees: flat vectors, dot products, paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxattr.types import Array, Params


def flatten(tree: Params) -> Array:
    """All leaves as one (P,) vector, in the tree's own leaf order."""
    return ravel_pytree(tree)[0]


def unflattener(tree: Params) -> Callable[[Array], Params]:
    """The inverse of `flatten` for trees like this one."""
    return ravel_pytree(tree)[1]


def dot(a: Params, b: Params) -> Array:
    """Sum over leaves of <a, b>."""
    return jnp.asarray(sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)))


def norm(tree: Params) -> Array:
    """Euclidean norm over all leaves."""
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def paths(tree: Any) -> list[str]:
    """The leaves' paths, such as `policy/dense_0/kernel`."""
    return ["/".join(_name(k) for k in path) for path, _ in jax.tree.leaves_with_path(tree)]


def keep_matching(tree: Params, pattern: str) -> Params:
    """`tree` with every leaf set to zero whose path the regular expression does not match from its start."""
    wanted = re.compile(pattern)
    flags = [wanted.match(path) is not None for path in paths(tree)]
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [x if f else jnp.zeros_like(x) for f, x in zip(flags, leaves, strict=True)])


def all_finite(tree: Any) -> Array:
    """() bool: every entry of every float leaf is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
