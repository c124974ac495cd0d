"""XLA's CPU switches: the only place that knows them. Must run before JAX starts its backend.

Lanes (seeds) are spread over host devices, one per core: on a CPU vmapping them on one device buys next to nothing.
Wider vectors help where the processor has AVX-512. Flags the user has set are left alone.
"""

from __future__ import annotations

import os
from pathlib import Path


def use_all_cores(max_devices: int | None = None) -> str:
    """Set `XLA_FLAGS` for this process; returns them.

    Has no effect once JAX has started a backend (any array or `jax.devices()`): call it first.

    Args:
      max_devices: most host devices to make; None = one per available core.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    devices = max(1, min(cores, max_devices or cores))
    wanted = {"--xla_force_host_platform_device_count": devices}
    if _has_avx512():
        wanted["--xla_cpu_prefer_vector_width"] = 512
    for name, value in wanted.items():
        if name not in flags:
            flags = f"{flags} {name}={value}".strip()
    os.environ["XLA_FLAGS"] = flags
    return flags


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
