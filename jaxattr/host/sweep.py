"""`jaxattr sweep FILE.toml`: many settings x seeds, as few compiled programs as their shapes allow; resumable."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from jaxattr.config import ConfigError
from jaxattr.host.xla import use_all_cores
from jaxattr.studies.sweep import Choices, Sweep, chunks_of, group_by_shape, points_of
from jaxattr.studies.sweep_file import parse_sweep

if TYPE_CHECKING:
    from jaxattr.host.progress import Progress
    from jaxattr.host.sweep_lanes import Outcome, Programs, Shape
    from jaxattr.host.sweep_trials import Claim, Trials

STALE_AFTER = 120.0
SIZES = ("num_envs", "num_steps", "minibatch_size", "total_steps", "norm_chunk", "score_metric", "optimizer")
"""Settings whose values may be fine only together with others."""
MEMORY_SHARE = {"cpu": 0.25}
"""Share of the memory that the lanes of a program may take; of an accelerator's: 0.6."""


@dataclass
class SweepCommand:
    """Try many settings, each on several seeds, and rank them. The same command again goes on where it stopped.

    FILE says what to try: env, preset, seeds, rounds or total_steps, method (grid, random, optuna), trials, metric,
    aggregate, and tables [fixed] and [sweep]. Writes sweep.db, trials.csv, ranking.txt, parallel.png and curves.png.
    """

    file: tyro.conf.Positional[Path]
    """The definition, a toml file."""
    out: Path = Path("runs/sweep")
    """Folder for the results."""
    storage: str | None = None
    """Optuna storage, such as a database server's URL; default: sqlite:///OUT/sweep.db. Several workers, each started
    with this same command, may share one."""
    executor: Literal["local", "ray"] = "local"
    """Where programs run: in this process, or as tasks on a Ray cluster that is there already."""
    address: str = "auto"
    """Address of the Ray cluster, HOST:PORT; auto: the one that this machine belongs to."""
    cpus_per_task: int = 1
    """Cores of a Ray task."""
    gpus_per_task: float | None = None
    """Accelerators of a Ray task, such as 0.5; default: 1 if the cluster has any, else 0."""
    stale_after: float = STALE_AFTER
    """Seconds without a sign of life after which a worker counts as dead and its settings are run by another."""
    retry: bool = False
    """Take over at once what other workers have claimed: say this only when they are dead."""
    top: int = 5
    """Settings in the picture of learning curves."""
    quiet: bool = False
    """No progress."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code: 0, or 3 if no setting has a result."""
    args = tyro.cli(SweepCommand, prog="jaxattr sweep", args=list(argv))
    sweep = read_sweep(args.file)
    use_all_cores()
    try:
        result = run_sweep(
            sweep,
            args.out,
            storage=args.storage,
            executor=args.executor,
            address=args.address,
            cpus_per_task=args.cpus_per_task,
            gpus_per_task=args.gpus_per_task,
            stale_after=args.stale_after,
            retry=args.retry,
            top=args.top,
            quiet=args.quiet,
        )
    except KeyboardInterrupt:
        print("jaxattr: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    print(result["table"])
    print(f"{args.out}: {', '.join(result['files'])}")
    return 0 if any(t["state"] == "complete" for t in result["trials"]) else 3


def read_sweep(path: Path) -> Sweep:
    """The definition in a toml file.

    Raises:
      ConfigError: no such file, no TOML, or a definition that cannot work; one line.
    """
    try:
        values = tomllib.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{path}: no sweep definition there") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not readable ({error})") from None
    try:
        return parse_sweep(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    storage: str | None = None,
    executor: str = "local",
    address: str = "auto",
    cpus_per_task: int = 1,
    gpus_per_task: float | None = None,
    stale_after: float = STALE_AFTER,
    retry: bool = False,
    top: int = 5,
    quiet: bool = True,
) -> dict[str, Any]:
    """Run what is left of a sweep, and write its tables and pictures.

    Args:
      sweep: the definition.
      out: folder, made if missing.
      storage: an Optuna storage's URL; None = an SQLite file in `out`.
      executor: local or ray.
      address, cpus_per_task, gpus_per_task: of the Ray cluster and its tasks.
      stale_after: seconds without a sign of life after which a worker counts as dead.
      retry: take over all that other workers have claimed.
      top: settings in the picture of learning curves.
      quiet: no progress.

    Returns:
      `trials` (see `jaxattr.analysis.sweep`), `table` (text), `files` (names in `out`), `programs` (run here).

    Raises:
      ConfigError: anything that can be known before compiling, or a storage or cluster that cannot be used.
    """
    from jaxattr.host.progress import Progress
    from jaxattr.host.sweep_lanes import Programs
    from jaxattr.host.sweep_trials import Trials, import_optuna

    import_optuna()
    programs = Programs(sweep)
    check(sweep, programs)
    cluster = None
    if executor == "ray":
        from jaxattr.host.sweep_ray import Cluster

        cluster = Cluster(address, cpus_per_task, gpus_per_task)
    out.mkdir(parents=True, exist_ok=True)
    trials = Trials(storage or f"sqlite:///{out / 'sweep.db'}", sweep, stale_after)
    if sweep.method != "optuna" and not trials.planned():
        trials.plan(plan(sweep, programs))
    with Progress(f"sweep {sweep.env}", 1, quiet) as progress, trials:
        worker = _Worker(sweep, trials, programs, progress, out)
        try:
            worker.work(cluster, retry)
        finally:
            trials.release()
            worker.save()
        worker.say_who_else()
    return {**worker.report(top), "programs": worker.finished}


def check(sweep: Sweep, programs: Programs) -> None:
    """Everything that can be wrong with single values, before any file is made.

    Raises:
      ConfigError: an unknown environment, filter, target or network option, or sizes that do not fit.
    """
    programs.shape(sweep.config)
    points = points_of(sweep)
    for group in group_by_shape(sweep, points):
        programs.shape(sweep.config_of(points[group[0]]))
    if sweep.method == "optuna":
        for name, what in sweep.space:
            if isinstance(what, Choices) and name not in SIZES:
                for value in what.values:
                    programs.shape(sweep.config.replace(**{name: value}))


def plan(sweep: Sweep, programs: Programs) -> list[tuple[int, list[int]]]:
    """Which points run together: (width, positions) per program, shape after shape."""
    points, out = points_of(sweep), []
    for group in group_by_shape(sweep, points):
        most = points_per_program(sweep, programs.shape(sweep.config_of(points[group[0]])))
        width, chunks = chunks_of(len(group), most)
        out += [(width, [group[i] for i in chunk]) for chunk in chunks]
    return out


def points_per_program(sweep: Sweep, shape: Shape) -> int:
    """Settings that fit into one program: `lanes_per_program`, or as many as memory seems to hold."""
    lanes = sweep.lanes_per_program or int(memory_for_lanes() / shape.lane_bytes())
    return max(1, lanes // len(sweep.seeds))


def memory_for_lanes() -> float:
    """Bytes that a program's lanes may take on this machine."""
    import jax

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if limit is not None:
        return 0.6 * limit
    return MEMORY_SHARE["cpu"] * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass
class Job:
    """Claims that run in one program."""

    claims: list[Claim]
    width: int | None


@dataclass
class _Worker:
    """One process at work on a sweep."""

    sweep: Sweep
    trials: Trials
    programs: Programs
    progress: Progress
    out: Path
    finished: int = 0

    def work(self, cluster: Any, retry: bool) -> None:
        """Claim, run, write, until there is nothing free."""
        rounds, begun = self.sweep.config.total_updates, False
        progress, counts = self.progress, "{} settings x {} seeds, {} programs left"
        progress.say(
            f"{self.sweep.env}: " + counts.format(self.sweep.trials, len(self.sweep.seeds), self.trials.left())
        )
        while claims := self.trials.claim(1 if cluster is None else 1_000, retry=retry):
            retry = False  # what others claim from now on is theirs
            jobs = list(self.jobs(claims))
            ahead = self.trials.left()
            progress.total = rounds * (self.finished + ahead + len(jobs))

            def watch(done: int, note: str) -> None:
                nonlocal begun
                if not begun:  # the first program's compilation says nothing about the time left
                    progress.say(note)
                    progress.begin(rounds * self.finished)
                    begun = True
                    return
                progress.update(rounds * self.finished + done, note)

            if cluster is None:
                for job in jobs:
                    points = [c.point for c in job.claims]
                    self.keep(job, self.programs.run(points, job.width, watch))
            else:
                for job, outcomes in cluster.run(self.sweep, jobs):
                    self.keep(job, outcomes)
                    watch(0, f"{len(job.claims)} settings x {len(self.sweep.seeds)} seeds done on the cluster")

    def jobs(self, claims: Sequence[Claim]) -> Iterator[Job]:
        """Claims by program and shape; those that cannot run at all are written down and left out."""
        whole: dict[int, list[Claim]] = {}
        for claim in claims:
            try:
                self.programs.shape(self.sweep.config_of(claim.point))
            except ConfigError as error:
                self.trials.refuse(claim, str(error))
                continue
            whole.setdefault(claim.program, []).append(claim)
        for together in whole.values():
            for group in group_by_shape(self.sweep, [c.point for c in together]):
                members = [together[i] for i in group]
                if members[0].width is not None:  # planned: always in the width that was planned
                    yield Job(members, max(members[0].width, len(members)))
                    continue
                shape = self.programs.shape(self.sweep.config_of(members[0].point))
                _, chunks = chunks_of(len(members), points_per_program(self.sweep, shape))
                yield from (Job([members[i] for i in chunk], None) for chunk in chunks)

    def keep(self, job: Job, outcomes: Sequence[Outcome]) -> None:
        """Write a program's results, and say what went wrong."""
        for claim, outcome in zip(job.claims, outcomes, strict=True):
            if not self.trials.finish(claim, outcome):
                self.progress.say(f"trial {claim.number}: another worker took it over; its result counts")
            if outcome.reasons:
                self.progress.say(f"trial {claim.number}: {'; '.join(outcome.reasons)}")
        self.finished += 1
        self.save()

    def save(self) -> None:
        """trials.csv as of now; under the lock, for other workers write it, too."""
        from jaxattr.analysis.sweep import trial_table
        from jaxattr.analysis.tables import csv_text
        from jaxattr.host.checkpoint import write_text

        with self.trials.lock():
            rows = trial_table(self.trials.rows(), self.sweep.seeds, self.sweep.direction)
            if rows:
                write_text(self.out / "trials.csv", csv_text(rows))

    def say_who_else(self) -> None:
        """What other workers still have."""
        count, silent = self.trials.others()
        if count:
            self.progress.say(
                f"{count} settings are with other workers (the most silent one was heard of {silent:.0f} s ago): the "
                "same command later gives the whole table; --retry takes them over, if those workers are dead"
            )

    def report(self, top: int) -> dict[str, Any]:
        """The ranking and the pictures."""
        from jaxattr.analysis.sweep import curves_figure, parallel_figure, render_ranking
        from jaxattr.host.checkpoint import write_text

        s, trials = self.sweep, self.trials.rows()
        table = render_ranking(trials, s.seeds, s.metric, s.aggregate, s.direction)
        draw: list[tuple[str, Callable[[Path], Any]]] = [
            ("parallel.png", lambda p: parallel_figure(p, trials, s.env, f"{s.aggregate} of {s.metric}", s.direction)),
            ("curves.png", lambda p: curves_figure(p, trials, s.env, s.direction, top=top)),
        ]
        with self.trials.lock():
            write_text(self.out / "ranking.txt", table + "\n")
            for name, picture in draw:
                picture(self.out / name)
        files = ("sweep.db", "trials.csv", "ranking.txt", *(name for name, _ in draw))
        return {"trials": trials, "table": table, "files": [f for f in files if (self.out / f).exists()]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
