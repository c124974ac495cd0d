"""Lanes: several seeds or settings side by side, vmapped on a device and spread over devices.

Everything that trains has a leading lane axis S. A function for one lane becomes one for all with `over_lanes`; a
function of all lanes runs on each device's share of them with `spread_lanes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
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
    """The most devices over which `lanes` spread evenly."""
    devices = jax.devices()
    count = max(d for d in range(1, min(len(devices), lanes) + 1) if lanes % d == 0)
    return devices[:count]


def spread_lanes(f: Any, lanes: int, in_lanes: Sequence[bool], out_axes: Any) -> Any:
    """Run `f` on each device's share of the lanes (identity where one device has them all).

    Args:
      f: function of arrays with a leading lane axis.
      lanes: S.
      in_lanes: per argument, whether it has a lane axis (else it is the same everywhere).
      out_axes: per output, the position of its lane axis.
    """
    devices = lane_devices(lanes)
    if len(devices) == 1:
        return f
    mesh = jax.make_mesh((len(devices),), (LANES,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    in_specs = tuple(PartitionSpec(LANES) if has else PartitionSpec() for has in in_lanes)
    out_specs = jax.tree.map(lambda axis: PartitionSpec(*([None] * axis), LANES), out_axes)
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def place_lanes(tree: Any, lanes: int) -> Any:
    """Put arrays with a leading lane axis where `spread_lanes` will want them."""
    devices = lane_devices(lanes)
    mesh = jax.make_mesh((len(devices),), (LANES,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(LANES)))
