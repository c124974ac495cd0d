"""`jaxattr intervene RUN`: every recorded round of a run once more, on filtered records, and tested."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from jaxattr.config import ConfigError
from jaxattr.host.xla import use_all_cores

ARMS = ("iif:0.125", "iif:0.5", "iif:1", "random:0.5")


@dataclass
class Intervene:
    """Retrain each recorded round of RUN from its own start, on all records and on filtered ones, and test the results.

    Writes intervention.csv, intervention.json and intervention.png.
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run that was trained with --record-rounds."""
    arms: tuple[str, ...] = ARMS
    """Rules as NAME:P (P: share of the negative records to drop; without it the run's own). NAME:P+matched: as many
    minibatches as without a filter. All are compared with `none`, the same round on all of its records."""
    episodes: int = 100
    """Test episodes per seed, round and arm; they begin in the same states everywhere."""
    eval_seed: int | None = None
    """Seed of the test episodes; default: the run's own."""
    out: Path | None = None
    """Folder for the results; default: RUN/intervention."""
    quiet: bool = False
    """No progress."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    args = tyro.cli(Intervene, prog="jaxattr intervene", args=list(argv))
    use_all_cores()
    result = intervene(
        args.run, arms=args.arms, episodes=args.episodes, eval_seed=args.eval_seed, out=args.out, quiet=args.quiet
    )
    print(result["table"])
    print(f"{result['out']}: intervention.csv, intervention.json, intervention.png")
    return 0


def intervene(
    run: Path,
    *,
    arms: Sequence[str] = ARMS,
    episodes: int = 100,
    eval_seed: int | None = None,
    out: Path | None = None,
    network: Any = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Run the study on all recorded rounds of a run and write its files.

    Args:
      run: its folder.
      arms: see `studies.intervention.parse_arm`.
      episodes: E >= 1, test episodes per seed, round and arm.
      eval_seed: of their start states; None = the run's.
      out: folder, made if missing; None = RUN/intervention.
      network: the run's own flax module, if it was trained with one.
      quiet: no progress.

    Returns:
      `rows` (of `analysis.intervention.intervention_table`), `returns` (arm -> (K, S, E)), `table` (text), `out`.

    Raises:
      ConfigError: no recorded round, an unknown arm, p or episodes out of range; one line.
    """
    import numpy as np

    from jaxattr.analysis.intervention import (
        differences,
        intervention_figure,
        intervention_table,
        render_table,
    )
    from jaxattr.analysis.tables import csv_text, plain
    from jaxattr.host.checkpoint import write_text
    from jaxattr.host.progress import Progress
    from jaxattr.host.rounds import load_rounds
    from jaxattr.studies.intervention import make_intervention, parse_arms

    chosen = parse_arms(arms)
    if episodes < 1:
        raise ConfigError(f"--episodes is {episodes}: must be 1 or more")
    begin = time.monotonic()
    rounds = load_rounds(Path(run), network=network)
    first = rounds[0]
    study = make_intervention(
        first.step, first.env, chosen, episodes=episodes, lanes=len(first.seeds), eval_seed=eval_seed
    )
    outcomes: list[dict[str, Any]] = []
    with Progress("intervene", len(rounds), quiet) as progress:
        for i, one in enumerate(rounds):
            outcome = study(one.data)
            outcomes.append({name: (np.asarray(o.returns), np.asarray(o.kept)) for name, o in outcome.items()})
            if i == 0:  # mostly compilation, which says nothing about the time left
                progress.begin(1)
            if i > 0 or len(rounds) == 1:
                progress.update(i + 1, f"{len(chosen)} arms, {len(first.seeds)} seeds")
    returns = {arm.name: np.stack([o[arm.name][0] for o in outcomes]) for arm in chosen}
    kept = {arm.name: np.stack([o[arm.name][1] for o in outcomes]) for arm in chosen}

    numbers = [one.number for one in rounds]
    gaps = differences(returns)
    rows = intervention_table(numbers, returns, kept)
    table = render_table(rows)
    where = Path(run) / "intervention" if out is None else Path(out)
    where.mkdir(parents=True, exist_ok=True)
    document = {
        "env": first.env_id,
        "run": str(run),
        "seeds": first.seeds,
        "rounds": numbers,
        "arms": [arm.name for arm in chosen],
        "episodes": episodes,
        "eval_seed": first.config.eval_seed if eval_seed is None else eval_seed,
        "test": "exact two-sided sign test over seeds, ties left out",
        "interval": "95 % percentile bootstrap over seeds",
        "seconds": time.monotonic() - begin,
        "rows": rows,
        "mean_test_return": {name: x.mean(axis=2) for name, x in returns.items()},
        "difference": gaps,
        "kept_share": kept,
        "config": first.config.to_dict(),
    }
    if rows:
        write_text(where / "intervention.csv", csv_text(rows))
    write_text(where / "intervention.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    intervention_figure(where / "intervention.png", numbers, gaps, rows, first.env_id)
    return {"rows": rows, "returns": returns, "table": table, "out": where}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
