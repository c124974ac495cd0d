"""Lanes: several seeds or settings side by side, vmapped on a device and spread over devices.

Everything that trains has a leading lane axis S. A function for one lane becomes one for all with `over_lanes`; a
function of all lanes runs on each device's share of them with `spread_lanes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

LANES = "lanes"
"""The mesh axis over which lanes are spread."""


def over_lanes(f: Callable) -> Callable:
    """vmap `f` over the leading axis, except that a single lane runs without a batch axis.

    A lone lane keeps scalar trip counts and predicates, so work that a filter saves is really saved.
    """

    def mapped(*args: Any) -> Any:
        lanes = jax.tree.leaves(args)[0].shape[0]
        if lanes > 1:
            return jax.vmap(f)(*args)
        out = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    return mapped


def lane_devices(lanes: int) -> list[Any]:
    """The devices over which `lanes` are spread: all, but no more than there are lanes."""
    return jax.devices()[:lanes]


def padded_lanes(lanes: int) -> int:
    """Lanes that are really computed: the next multiple of the number of devices."""
    count = len(lane_devices(lanes))
    return -(-lanes // count) * count


def spread_lanes(f: Any, lanes: int, in_lanes: Sequence[bool], out_axes: Any) -> Any:
    """Run `f` on each device's share of the lanes (identity where one device has them all).

    Where the lanes do not divide, the first ones are computed twice and the copies dropped: five lanes on two devices
    take the time of three.

    Args:
      f: function of arrays with a leading lane axis.
      lanes: S.
      in_lanes: per argument, whether it has a lane axis (else it is the same everywhere).
      out_axes: per output, the position of its lane axis.
    """
    if len(lane_devices(lanes)) == 1:
        return f
    mesh, extra = _mesh(lanes), padded_lanes(lanes) - lanes
    in_specs = tuple(PartitionSpec(LANES) if has else PartitionSpec() for has in in_lanes)
    out_specs = jax.tree.map(lambda axis: PartitionSpec(*([None] * axis), LANES), out_axes)
    spread = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if not extra:
        return spread

    def padded(*args: Any) -> Any:
        more = lambda x: jnp.concatenate([x, x[:extra]])
        out = spread(*(jax.tree.map(more, a) if has else a for a, has in zip(args, in_lanes, strict=True)))
        cut = lambda axis, tree: jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, lanes, axis=axis), tree)
        return jax.lax.with_sharding_constraint(jax.tree.map(cut, out_axes, out), NamedSharding(mesh, PartitionSpec()))

    return padded


def place_lanes(tree: Any, lanes: int) -> Any:
    """Put arrays with a leading lane axis where `spread_lanes` will want them."""
    even = padded_lanes(lanes) == lanes
    return jax.device_put(tree, NamedSharding(_mesh(lanes), PartitionSpec(LANES) if even else PartitionSpec()))


def _mesh(lanes: int) -> jax.sharding.Mesh:
    devices = lane_devices(lanes)
    return jax.make_mesh((len(devices),), (LANES,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
