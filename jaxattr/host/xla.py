"""XLA's CPU switches: the only place that knows them. Must run before JAX starts its backend.

Lanes (seeds) are spread over host devices, one per core: on a CPU vmapping them on one device buys next to nothing.
Wider vectors help where the processor has AVX-512. Flags the user has set are left alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Inside, a program that was compiled once is not compiled again (two arms of a comparison may be the same one).

    Uses JAX's persistent compilation cache: the user's, if one is set, else a temporary one.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir:  # pyright: ignore
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
