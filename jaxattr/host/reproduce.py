"""`jaxattr reproduce`: the paper's comparison with its missing controls, and its ablation; in resumable pieces."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from jaxattr.config import ConfigError, near
from jaxattr.host.xla import use_all_cores
from jaxattr.studies import ablation
from jaxattr.studies.reproduction import (
    DEFAULT_ARMS,
    QUICK_ARMS,
    SETTINGS,
    TASKS,
    Task,
    arm_config,
    choose_tasks,
    parse_arms,
)

if TYPE_CHECKING:
    from jaxattr.host.reproduce_run import Piece

COMPARISONS = ("iif", "ablation")


@dataclass
class Reproduce:
    """Run the comparison of the IIF paper (NeurIPS 2025, Figure 6) again, with a null, intervals and more controls.

    Every (setting, environment, arm) is one run with all seeds; what is finished in --out is kept, the rest continues.
    `iif` writes reproduction.json, reproduction.csv and a picture per setting. `ablation` takes IIF apart: what each of
    its differences to other variants does, on four environments; writes ablation.json, ablation.csv and ablation.png.
    Both may share one --out.
    """

    what: tyro.conf.Positional[str]
    """What to reproduce: iif or ablation."""
    envs: tuple[str, ...] = ()
    """Environments; default: the paper's six and MiniGrid-DoorKey (ablation: four), if their backend is there."""
    settings: tuple[str, ...] = ()
    """paper, tuned or both (default; --quick: paper). ablation: paper only."""
    seeds: int = 5
    """Seeds per arm."""
    arms: tuple[str, ...] = ()
    """Arms as NAME (at the environment's published best p) or NAME:P; `none` is always run. Default: all."""
    quick: bool = False
    """Minutes instead of hours: four environments, none, iif and random, fewer rounds and test episodes."""
    out: Path | None = None
    """Folder; default: runs/reproduce, or runs/reproduce_quick."""
    first_seed: int = 0
    """Seeds are first_seed, first_seed + 1, ..."""
    quiet: bool = False
    """No progress."""


@dataclass
class Plan:
    """All pieces, in the order in which they run, and what is not run."""

    pieces: list[Piece]
    skipped: dict[str, str] = field(default_factory=dict)
    """Environment -> why."""
    left_out: list[str] = field(default_factory=list)
    """What --quick leaves out, in words."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    args = tyro.cli(Reproduce, prog="jaxattr reproduce", args=list(argv))
    if args.what not in COMPARISONS:
        raise ConfigError(f"reproduce {args.what!r}: unknown{near(args.what, COMPARISONS)}")
    if args.what == "ablation" and set(args.settings) - {ablation.SETTING}:
        raise ConfigError(f"--settings {' '.join(args.settings)}: the ablation is about {ablation.SETTING!r} only")
    use_all_cores(args.seeds)
    result = reproduce(
        args.what,
        envs=args.envs,
        settings=args.settings,
        seeds=args.seeds,
        arms=args.arms,
        quick=args.quick,
        out=args.out,
        first_seed=args.first_seed,
        quiet=args.quiet,
        command=" ".join(["jaxattr reproduce", *argv]),
    )
    print(result["text"])
    print(f"{result['out']}: {', '.join(result['files'])}")
    return 0


def make_plan(
    out: Path,
    what: str = "iif",
    *,
    envs: Sequence[str] = (),
    settings: Sequence[str] = (),
    seeds: Sequence[int],
    arms: Sequence[str] = (),
    quick: bool = False,
) -> Plan:
    """What is to be run, checked as far as possible; nothing is compiled or written.

    Raises:
      ConfigError: unknown names, a result in `out` that was made with other settings, an environment that was named
        but whose backend is missing, an arm that was named but cannot be run there, or nothing is left.
    """
    from jaxattr.attribution.filters import FILTERS
    from jaxattr.envs.registry import make
    from jaxattr.host.compare import NULL_OFFSET
    from jaxattr.host.reproduce_run import Piece, folder_name
    from jaxattr.train import make_collector

    if what == "ablation":
        tasks = choose_tasks(envs, quick, ablation.ENVS)
        settings, chosen = (ablation.SETTING,), tuple(arms) or ablation.ABLATION_ARMS
    else:
        tasks = choose_tasks(envs, quick)
        settings = tuple(settings) or (SETTINGS[:1] if quick else SETTINGS)
        chosen = tuple(arms) or (QUICK_ARMS if quick else DEFAULT_ARMS)
    plan = Plan([])
    for setting in dict.fromkeys(settings):
        for task in tasks:
            for arm in parse_arms(chosen, task):
                config = arm_config(setting, task, arm, len(seeds), quick)
                if config.filter not in FILTERS:
                    raise ConfigError(f"arm {arm.name!r}: no filter {config.filter!r}{near(config.filter, FILTERS)}")
                own = tuple(s + NULL_OFFSET for s in seeds) if arm.is_null else tuple(seeds)
                folder = out / setting / folder_name(task.env_id) / folder_name(arm.name)
                plan.pieces.append(Piece(setting, task, arm, config, own, folder))
    possible = []
    for task in tasks:
        own = [piece for piece in plan.pieces if piece.task is task]
        try:
            env = make(task.env_id, own[0].config.env_args)
        except ConfigError as error:
            if task.env_id in envs:
                raise
            plan.skipped[task.env_id] = str(error)
            continue
        for piece in own:
            try:
                make_collector(env, piece.config)
            except ConfigError as error:
                if arms:
                    raise
                plan.left_out.append(f"{piece.title}: not run: {error}")
            else:
                possible.append(piece)
    plan.pieces = possible
    if not plan.pieces:
        raise ConfigError(f"no environment is left: {'; '.join(plan.skipped.values())}")
    for piece in plan.pieces:
        piece.begun()
    if quick:
        plan.left_out += _left_out(tasks, settings, chosen)
    return plan


def reproduce(
    what: str = "iif",
    *,
    envs: Sequence[str] = (),
    settings: Sequence[str] = (),
    seeds: int = 5,
    arms: Sequence[str] = (),
    quick: bool = False,
    out: Path | None = None,
    first_seed: int = 0,
    quiet: bool = True,
    command: str = "",
) -> dict[str, Any]:
    """Run everything that is not yet finished in `out`, then write tables and pictures. See `Reproduce`.

    Returns:
      `document` (what the JSON file holds), `text` (the tables), `files` (names) and `out`.

    Raises:
      ConfigError: see `make_plan`.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}: must be 1 or more")
    where = Path("runs/reproduce_quick" if quick else "runs/reproduce") if out is None else Path(out)
    lanes = tuple(range(first_seed, first_seed + seeds))
    plan = make_plan(where, what, envs=envs, settings=settings, seeds=lanes, arms=arms, quick=quick)
    from jaxattr.host.reproduce_files import write_ablation, write_results
    from jaxattr.host.reproduce_run import Job, measure_group
    from jaxattr.host.xla import shared_programs

    # Runs of --quick are mostly compilation, which one core does: two at a time. Else one waits for the other, so that
    # a run's seconds are its own.
    kept = [piece for piece in plan.pieces if piece.kept.exists()]
    job = Job([piece for piece in plan.pieces if piece not in kept], quiet, workers=2 if quick else 1)
    groups: dict[tuple[str, str], list[Piece]] = {}
    for piece in plan.pieces:
        groups.setdefault((piece.setting, piece.task.env_id), []).append(piece)
    begin = time.monotonic()
    with job, shared_programs():
        for line in (*plan.left_out, *(f"{env}: skipped: {why}" for env, why in plan.skipped.items())):
            job.say(line)
        if kept:
            job.say(f"{len(kept)} of {len(plan.pieces)} runs are finished in {where} and kept")
        if quick:
            job.run(job.pieces)
        else:
            for group in groups.values():
                job.run([piece for piece in group if piece not in kept])
                if what == "iif":  # the ablation is not about seconds
                    measure_group(group, job)
    write = write_ablation if what == "ablation" else write_results
    return write(plan, groups, where, command=command, seconds=time.monotonic() - begin, quick=quick)


def _left_out(tasks: Sequence[Task], settings: Sequence[str], arms: Sequence[str]) -> list[str]:
    """What --quick does not do, in words."""
    names = [task.env_id for task in tasks]
    others = [env for env in TASKS if env not in names]
    lines = [f"--quick leaves out: environments {', '.join(others)}"] if others else []
    if set(settings) != set(SETTINGS):
        lines.append(f"--quick leaves out: settings {', '.join(s for s in SETTINGS if s not in settings)}")
    if tuple(arms) == QUICK_ARMS:
        lines.append("--quick leaves out: all arms but none, iif at the published p and random; also the null")
    lines.append("--quick leaves out: timing arms alternately; two run at a time, so seconds and RT_peak are rough")
    lines += [
        f"--quick shortens {task.env_id}: {task.quick.rounds} rounds at most, {task.quick.episodes} test episodes "
        "each time, all seeds together"
        for task in tasks
        if task.quick
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
