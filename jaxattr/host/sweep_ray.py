"""A sweep's programs as tasks on a Ray cluster. The storage stays with this process; tasks see plain values only."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from jaxattr.config import ConfigError
from jaxattr.studies.sweep import Point, Sweep

ANSWER_SECONDS = 5.0
"""How long a cluster may take to accept a connection."""
GPU_SHARE = 0.9
"""Share of an accelerator's memory that its tasks take together; the rest is the driver's."""


class Cluster:
    """A Ray cluster that is already running.

    Args:
      address: HOST:PORT, ray://HOST:PORT, or auto.
      cpus: cores per task, 1 or more.
      gpus: accelerators per task, may be a share; None = 1 if the cluster has any.

    Raises:
      ConfigError: Ray is not installed, or no cluster answers; one line.
    """

    def __init__(self, address: str, cpus: int, gpus: float | None):
        try:
            import ray  # pyright: ignore[reportMissingImports]  # an extra of its own
        except ImportError:
            raise ConfigError("--executor ray needs Ray: pip install 'jaxattr[ray]'") from None
        if cpus < 1 or (gpus is not None and gpus < 0):
            raise ConfigError(f"--cpus-per-task {cpus}, --gpus-per-task {gpus}: must be 1 or more, and 0 or more")
        self.ray, self.cpus = ray, cpus
        if not ray.is_initialized():
            _knock(address)
            try:
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            except Exception as error:  # Ray raises many kinds for a cluster that is not there
                line = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
                raise ConfigError(f"no Ray cluster answers at {address!r} ({line[:160]})") from None
        resources = ray.cluster_resources()
        self.gpus = float(resources.get("GPU", 0) > 0) if gpus is None else gpus
        for kind, wanted in (("CPU", cpus), ("GPU", self.gpus)):
            if wanted > resources.get(kind, 0):
                raise ConfigError(f"a task wants {wanted:g} {kind}, the cluster at {address!r} has fewer")

    def run(self, sweep: Sweep, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Run all jobs; (job, outcomes) as they finish."""
        ray = self.ray
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # tasks share an accelerator with each other
        if self.gpus > 0:
            memory["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{GPU_SHARE * min(self.gpus, 1):.3f}"
        task = ray.remote(_task).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=3, runtime_env={"env_vars": memory}
        )
        shared = ray.put(sweep)
        waiting = {task.remote(shared, [c.point for c in j.claims], j.width, self.cpus): j for j in jobs}
        try:
            while waiting:
                (ready,), _ = ray.wait(list(waiting), num_returns=1)
                try:
                    outcomes = ray.get(ready)
                except ray.exceptions.RayError as error:
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    raise ConfigError(f"a Ray task failed ({lines[-1][:160]}); what is finished is kept") from None
                yield waiting.pop(ready), outcomes
        finally:
            for left in waiting:
                ray.cancel(left, force=True)


def _task(sweep: Sweep, points: list[Point], width: int | None, cpus: int) -> Any:
    """What runs on the cluster: one program."""
    from jaxattr.host.xla import use_all_cores

    use_all_cores(cpus)
    from jaxattr.host.sweep_lanes import Programs

    global _programs
    if _programs is None or _programs.sweep.digest() != sweep.digest():  # a worker process keeps what it has compiled
        _programs = Programs(sweep)
    return _programs.run(points, width)


_programs: Any = None


def _knock(address: str) -> None:
    """A TCP connection to an explicit address: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        if address == "auto":
            return
        raise ConfigError(f"--address is {address!r}: must be auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address!r} ({error})") from None
