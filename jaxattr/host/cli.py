"""The command line: `jaxattr envs | train | compare | eval | render | config`, and the studies."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxattr.config import Config, ConfigError, diff, near
from jaxattr.host.xla import use_all_cores

OVERVIEW = """jaxattr: train PPO agents in JAX and know which experiences made them.

  jaxattr envs                                    environments that can be trained on
  jaxattr train CartPole-v1 --filter iif --out runs/cp
  jaxattr train --resume runs/cp                  go on where it stopped
  jaxattr compare FrozenLake-misc --preset paper --filters none iif random --out runs/fl
  jaxattr sweep benchmarks/sweeps/cartpole.toml   many settings x seeds, ranked; goes on where it was killed
  jaxattr eval runs/cp --episodes 100             test a trained run
  jaxattr render runs/cp --out cp.gif             watch it
  jaxattr config diff runs/a runs/b               what differs (also tuned:ENV, paper:ENV, files)

Keep whole rounds of a run (train ... --record-rounds every:5), then ask about them:

  jaxattr diagnose runs/cp/rounds/round_000005.npz       were its advantages right?
  jaxattr counterfactual runs/cp/rounds/round_000005.npz does a score predict what retraining does?
  jaxattr behaviour runs/cp                       which records made an action likely, round by round?
  jaxattr intervene runs/cp                       does each round end better on filtered records?
  jaxattr report runs/cp                          all of it as one HTML file

  jaxattr reproduce iif --quick                   the paper's comparison again, with the controls it lacks

Each command has --help. Bad input ends with one line and exit code 2."""


STUDIES = ("counterfactual", "diagnose", "behaviour", "intervene", "report", "reproduce", "sweep")
"""Commands on recorded rounds and runs, and whole comparisons, each in a module of its own."""


@dataclass
class Train:
    """Train PPO on ENV, all seeds in one compiled program. Writes metrics, checkpoints and pictures to --out."""

    env: tyro.conf.Positional[str] = ""
    """Environment id, see `jaxattr envs` (not needed with --resume or a --config that names it)."""
    preset: str = "tuned"
    """Starting point for all settings: tuned, paper or paper-adam."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="FILE")] = None
    """Start from a json or toml file (a run's config.json is one) instead of a preset."""
    seeds: int = 1
    """Number of seeds, trained together."""
    first_seed: int = 0
    """Seeds are first_seed, first_seed + 1, ..."""
    rounds: int | None = None
    """Length of the run in rounds, instead of --total-steps."""
    env_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Option of the environment as NAME=VALUE, such as is_slippery=false."""
    out: Path | None = None
    """Folder for the run's files; without it nothing is kept."""
    resume: Path | None = None
    """Continue the run in this folder from its last good checkpoint."""
    init_from: Path | None = None
    """Start from another run's weights, optimiser and normaliser."""
    record_rounds: tuple[str, ...] = ()
    """Rounds to keep whole, such as 1,5,10 or every:10, for counterfactual, diagnose, behaviour, intervene; their most
    helpful and most harmful records go to records.csv (the last round's always do)."""
    wandb: bool = False
    """Log to Weights & Biases as well (WANDB_MODE=offline works)."""
    quiet: bool = False
    """No progress."""
    settings: tyro.conf.OmitArgPrefixes[Config] = field(default_factory=Config)


@dataclass
class Compare:
    """Train one run per filter on the same seeds and compare them fairly: curves, differences, sample efficiency."""

    env: tyro.conf.Positional[str] = ""
    """Environment id."""
    filters: tuple[str, ...] = ("none", "iif", "random")
    """Arms; NAME+matched trains NAME with as many minibatches as without a filter."""
    preset: str = "tuned"
    """Starting point for all settings: tuned, paper or paper-adam."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="FILE")] = None
    """Start from a json or toml file instead of a preset."""
    seeds: int = 8
    """Seeds per arm (the same ones in every arm)."""
    first_seed: int = 0
    """Seeds are first_seed, first_seed + 1, ..."""
    rounds: int | None = None
    """Length of each run in rounds, instead of --total-steps."""
    env_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Option of the environment as NAME=VALUE."""
    out: Path = Path("runs/compare")
    """Folder: one run per arm, comparison.csv, comparison.json, comparison.png. Finished arms are kept on a rerun."""
    null: bool = True
    """Also train `none` on other seeds: what sample efficiency says when there is no difference at all."""
    quiet: bool = False
    """No progress."""
    settings: tyro.conf.OmitArgPrefixes[Config] = field(default_factory=Config)


@dataclass
class Eval:
    """Test the agents of a run on fresh episodes."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    episodes: int = 100
    """Episodes per agent, stochastic and deterministic each."""
    seed_index: int | None = None
    """Only the agent at this position (0, 1, ...)."""
    eval_seed: int | None = None
    """Seed of the start states; default: the run's own."""


@dataclass
class Render:
    """Draw one episode of a trained agent: .gif (gymnax and others) or .html (brax)."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    out: Path = Path("episode.gif")
    """File to write."""
    seed_index: int = 0
    """Position of the agent in the run."""
    episode_seed: int = 0
    """Seed of the episode."""
    max_steps: int = 500
    """Stop after this many environment steps."""
    stochastic: bool = False
    """Draw actions from the policy instead of taking its mode."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 2 for bad input, 3 if every seed met a non-finite value."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "envs": _envs,
        "train": _train,
        "compare": _compare,
        "eval": _eval,
        "render": _render,
        "config": _config,
        **{name: _study(name) for name in STUDIES},
    }
    if not args or args[0] in ("-h", "--help", "help"):
        print(OVERVIEW)
        return 0
    if args[0] == "--version":
        from jaxattr.version import __version__

        print(__version__)
        return 0
    try:
        if args[0] not in commands:
            raise ConfigError(f"unknown command {args[0]!r}{near(args[0], commands)}")
        return commands[args[0]](args[1:])
    except ConfigError as error:
        print(f"jaxattr: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxattr: interrupted; a run with --out can go on with --resume", file=sys.stderr)
        return 130


def _study(name: str) -> Callable[[list[str]], int]:
    """The `main` of `jaxattr.host.<name>`, imported when it is called."""
    return lambda argv: importlib.import_module(f"jaxattr.host.{name}").main(argv)


def _train(argv: list[str]) -> int:
    base = _base(argv)
    args = _parse("train", argv, Train(env=base.env, settings=base.config))
    use_all_cores(args.seeds if base.seeds is None else len(base.seeds))
    from jaxattr.host.rounds import parse_rounds
    from jaxattr.host.run import Stopped
    from jaxattr.host.runner import Session

    config = _finish(args, base)
    seeds = base.seeds or _seeds(args)
    out = args.resume or args.out
    session = Session(
        args.env,
        config,
        seeds=seeds,
        out=out,
        resume=args.resume is not None,
        init_from=args.init_from,
        wandb=args.wandb,
        record_rounds=parse_rounds(args.record_rounds, config.total_updates),
    )
    try:
        run = session.run(quiet=args.quiet)
    except Stopped as error:
        print(f"jaxattr: {error}", file=sys.stderr)
        return 3
    if out is not None:
        print(f"{out}: {', '.join(sorted(p.name for p in out.iterdir() if p.is_file()))}")
    if not run.summary["stopped_seeds"]:
        return 0
    if args.quiet:  # else it was said when it happened
        print("\n".join(run.summary["nonfinite"]), file=sys.stderr)
    return 3


def _compare(argv: list[str]) -> int:
    base = _base(argv)
    args = _parse("compare", argv, Compare(env=base.env, settings=base.config))
    use_all_cores(args.seeds)
    from jaxattr.host.compare import compare

    table = compare(
        args.env,
        _finish(args, base),
        filters=args.filters,
        seeds=_seeds(args),
        out=args.out,
        null=args.null,
        quiet=args.quiet,
    )
    print(table)
    print(f"{args.out}: comparison.csv, comparison.json, comparison.png")
    return 0


def _eval(argv: list[str]) -> int:
    args = tyro.cli(Eval, prog="jaxattr eval", args=argv)
    use_all_cores(1)
    from jaxattr.host.saved import evaluate_run

    print(evaluate_run(args.run, args.episodes, args.seed_index, args.eval_seed))
    return 0


def _render(argv: list[str]) -> int:
    args = tyro.cli(Render, prog="jaxattr render", args=argv)
    use_all_cores(1)
    from jaxattr.host.render import render
    from jaxattr.host.saved import open_agent

    agent = open_agent(args.run, args.seed_index)
    print(render(agent, args.out, args.episode_seed, args.max_steps, args.stochastic))
    return 0


def _envs(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print("usage: jaxattr envs [TEXT]\n\nList environment ids (those that contain TEXT) with their spaces.")
        return 0
    if len(argv) > 1:
        raise ConfigError(f"jaxattr envs takes one text at most, got {' '.join(argv)!r}")
    from rich.console import Console
    from rich.table import Table

    from jaxattr.envs.registry import list_envs

    table = Table("id", "family", "observations and actions", box=None)
    found = list_envs(*argv)
    if not found:
        raise ConfigError(f"no environment's id contains {argv[0]!r}; `jaxattr envs` lists what there is")
    for env_id, group, text in found:
        table.add_row(env_id, group, text)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _config(argv: list[str]) -> int:
    if len(argv) != 3 or argv[0] != "diff":
        if argv and argv[0] in ("-h", "--help"):
            print("usage: jaxattr config diff A B\n\nA, B: a run's folder, a json or toml file, or PRESET:ENV.")
            return 0
        raise ConfigError("usage: jaxattr config diff A B (each a run's folder, a file, or PRESET:ENV)")
    a, b = (_flat(name) for name in argv[1:])
    lines = diff(a, b)
    print("\n".join(lines) if lines else "no difference")
    return 0


# -- where settings start from -------------------------------------------------------------------------------------


@dataclass
class Base:
    """Defaults that the other flags change."""

    env: str
    config: Config
    seeds: tuple[int, ...] | None = None  # fixed by --resume


def _base(argv: list[str]) -> Base:
    """Find environment, preset, --config and --resume first: they decide the defaults of everything else."""
    env = argv[0] if argv and not argv[0].startswith("-") else ""
    resume, file, name = (_value(argv, flag) for flag in ("--resume", "--config", "--preset"))
    if resume is not None:
        saved = _load(Path(resume))
        if saved.get("sweep"):
            raise ConfigError(
                f"--resume {resume}: a sweep; continue it from Python with the same sweep= and resume=True"
            )
        return Base(env or saved["env"], Config.from_dict(saved["config"]), tuple(saved["seeds"]))
    if file is not None:
        saved = _load(Path(file))
        config = saved.get("config", {k: v for k, v in saved.items() if k != "env"})
        return Base(env or saved.get("env", ""), Config.from_dict(config))
    from jaxattr.presets import preset

    return Base(env, preset(name or "tuned", env))


def _value(argv: list[str], flag: str) -> str | None:
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return None


def _load(path: Path) -> dict[str, Any]:
    """A configuration from a run's folder, a json file or a toml file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text()
        if file.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        return json.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no run and no configuration file") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not readable ({error})") from None


def _parse(command: str, argv: list[str], default: Any) -> Any:
    """tyro's parser; but a setting that cannot work is one line of ours instead of its box of several."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(type(default), prog=f"jaxattr {command}", args=argv, default=default)
    except SystemExit as stop:
        error: BaseException | None = stop
        while error is not None:
            if isinstance(error, ConfigError):
                raise ConfigError(str(error)) from None
            error = error.__context__
        sys.stderr.write(shown.getvalue())
        raise


def _flat(name: str) -> dict[str, Any]:
    """Plain settings of a run, a file or PRESET:ENV, with env, seeds and env_args beside the rest."""
    kind, _, env = name.partition(":")
    if env and not Path(name).exists():
        from jaxattr.presets import preset

        return preset(kind, env).to_dict()
    saved = _load(Path(name))
    inner = saved.get("config", saved)
    full = Config.from_dict({k: v for k, v in inner.items() if k != "env"}).to_dict()
    outer = {k: saved[k] for k in ("env", "seeds") if k in saved}
    return {**outer, **full}


def _seeds(args: Any) -> tuple[int, ...]:
    if args.seeds < 1:
        raise ConfigError(f"--seeds is {args.seeds}: must be 1 or more")
    return tuple(range(args.first_seed, args.first_seed + args.seeds))


def _finish(args: Any, base: Base) -> Config:
    """The settings after --rounds and --env-arg."""
    from jaxattr.envs.registry import parse_env_args

    if not args.env:
        raise ConfigError("which environment? For example `jaxattr train CartPole-v1`; `jaxattr envs` lists them")
    config: Config = args.settings
    # Flags cannot express env_args, so they come from the base and --env-arg on top.
    merged = {**dict(base.config.env_args), **dict(parse_env_args(args.env_arg))}
    config = config.replace(env_args=tuple(sorted(merged.items())))
    if args.rounds is not None:
        if args.rounds < 1:
            raise ConfigError(f"--rounds is {args.rounds}: must be 1 or more")
        config = config.replace(total_steps=args.rounds * config.records_per_round)
    return config


if __name__ == "__main__":
    sys.exit(main())
