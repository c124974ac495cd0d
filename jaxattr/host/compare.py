"""`jaxattr compare`: one run per filter on the same seeds, then tables and figures. No statistics in here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxattr.analysis.compare import ArmResult, render_table, write_comparison
from jaxattr.config import Config, ConfigError
from jaxattr.host.progress import duration
from jaxattr.host.run import Run
from jaxattr.host.runner import Session
from jaxattr.host.xla import shared_programs

NULL = "none (other seeds)"
NULL_OFFSET = 1_000_000
"""Seeds of the null arm are the others plus this."""
MATCHED = "+matched"


def compare(
    env_id: str,
    config: Config,
    *,
    filters: Sequence[str],
    seeds: tuple[int, ...],
    out: Path,
    null: bool = True,
    quiet: bool = True,
) -> str:
    """Train every arm, write the comparison, return its table.

    Args:
      env_id, config: what is the same in all arms; without `eval_every`, about 50 evaluations are spread over a run.
      filters: arms; `NAME+matched` trains with `training="step_matched"`.
      seeds: of every arm.
      out: an arm that is finished in there is not run again, an unfinished one continues.
      null: also run `none` on other seeds.
      quiet: no progress.

    Raises:
      ConfigError: anything that can be known before compiling.
    """
    if len(set(filters)) < len(filters) or not filters:
        raise ConfigError(f"--filters {' '.join(filters)}: name one or more, each once")
    if config.eval_every == 0:
        config = config.replace(eval_every=max(1, config.total_updates // 50))
    plan = {name: (_arm_config(config, name), seeds) for name in filters}
    if null:
        plan[NULL] = (_arm_config(config, "none"), tuple(s + NULL_OFFSET for s in seeds))
    sessions = {name: _open(env_id, c, s, out / _folder(name)) for name, (c, s) in plan.items()}
    arms = {}
    with shared_programs():
        for i, (name, session) in enumerate(sessions.items()):
            if not quiet:
                print(f"arm {i + 1} of {len(sessions)}: {name}", flush=True)
            run = session.run(quiet=quiet)
            arms[name] = arm_result(name, run)
            run._replay = None  # frees the compiled program before the next arm
    title = f"{env_id}: filters compared over {len(seeds)} seeds"
    rows = write_comparison(
        out,
        arms,
        baseline="none",
        null=NULL,
        title=title,
        extra={"env": env_id, "config": config.to_dict(), "eval_episodes": config.eval_episodes},
    )
    spent = sum(a.seconds[-1] for a in arms.values())
    return f"{title} ({duration(float(spent))} of training)\n\n{render_table(rows)}"


def arm_result(name: str, run: Run) -> ArmResult:
    """A `Run` as an `ArmResult` with a column for EVERY round; rounds that a stopped run never reached hold NaN."""
    m, total = run.metrics, run.config.total_updates
    rounds = np.arange(1, total + 1)

    def whole(column: str) -> np.ndarray:
        values = np.full((total, len(run.seeds)), np.nan)
        values[: len(m[column])] = m[column]
        values[: len(m[column])][m["stopped"]] = np.nan
        return values.T

    seconds = np.cumsum(run.seconds)
    return ArmResult(
        name=name,
        seeds=np.array(run.seeds),
        rounds=rounds,
        env_steps=rounds * run.config.records_per_round,
        test_return=whole("test_return"),
        train_return=whole("return_mean"),
        kept=whole("kept"),
        records_per_round=run.config.records_per_round,
        optimizer_steps=whole("optimizer_steps"),
        seconds=np.append(seconds, np.full(total - len(seconds), seconds[-1])),
        compile_s=float(run.summary["compile_s"]),
    )


def _arm_config(config: Config, name: str) -> Config:
    rule = name.removesuffix(MATCHED)
    return config.replace(filter=rule, training="step_matched" if name.endswith(MATCHED) else "compact")


def _folder(name: str) -> str:
    return name.replace(" (", "_").replace(" ", "_").replace(")", "")


def _open(env_id: str, config: Config, seeds: tuple[int, ...], path: Path) -> Session:
    """A new session, or the one that continues what `path` holds."""
    begun = (path / "config.json").exists() and json.loads((path / "config.json").read_text())["seeds"] == list(seeds)
    return Session(env_id, config, seeds=seeds, out=path, resume=begun)
