"""Shared set-up: a persistent compilation cache, and fixtures whose compiled functions several tests use."""

import os
from pathlib import Path

# Before JAX starts: two host devices, so that lanes are spread in the tests as on the command line.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.devices()  # reads XLA_FLAGS now: commands that the tests run in this process may change it later

CACHE = Path(__file__).parents[1] / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_numpy_rank_promotion", "warn")
