"""`jaxattr behaviour RUN`: which records made an action likely, round by round."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from jaxattr.config import ConfigError
from jaxattr.host.xla import use_all_cores


@dataclass
class Behaviour:
    """Follow one observation and action through the recorded rounds of RUN: how likely the action was, how much each
    record of a round pushed it, and whether similar records pushed alike.

    Writes behaviour.csv, behaviour.json and behaviour.png.
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run that was trained with --record-rounds."""
    record: str | None = None
    """The observation and action to follow, as ROUND:RECORD; default: the record of the last recorded round whose
    action's probability rose most since the first one."""
    seed_index: int = 0
    """Position of the agent in the run."""
    top: int = 5
    """Records of highest and lowest influence to list per round."""
    shuffles: int = 20
    """Shuffled scores per round that the roughness is compared with."""
    permutations: int = 999
    """Random orders of the rounds that the phases are compared with."""
    out: Path | None = None
    """Folder for the results; default: RUN/behaviour."""
    quiet: bool = False
    """No progress."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    args = tyro.cli(Behaviour, prog="jaxattr behaviour", args=list(argv))
    use_all_cores(1)
    options = {name: value for name, value in vars(args).items() if name != "run"}
    result = behaviour(args.run, **options)
    print(result["table"])
    print(f"{result['out']}: behaviour.csv, behaviour.json, behaviour.png")
    return 0


def behaviour(
    run: Path,
    *,
    record: str | None = None,
    seed_index: int = 0,
    top: int = 5,
    shuffles: int = 20,
    permutations: int = 999,
    out: Path | None = None,
    network: Any = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Run the study on all recorded rounds of a run and write its files.

    Args:
      run: its folder.
      record: ROUND:RECORD; None = see `studies.behaviour.most_risen`.
      seed_index: position of the agent.
      top: records of highest and lowest score per round, 1 or more.
      shuffles: see `analysis.behaviour.roughness`, 2 or more.
      permutations: see `analysis.behaviour.phases`, 1 or more.
      out: folder, made if missing; None = RUN/behaviour.
      network: the run's own flax module, if it was trained with one.
      quiet: no progress.

    Returns:
      `rows` (one per round), `extremes` (per round), `scores` (K, N), `phases`, `chosen`, `table` (text), `out`.

    Raises:
      ConfigError: no recorded round, no such record or seed, or a number out of range; one line.
    """
    import jax
    import numpy as np

    from jaxattr.analysis.behaviour import behaviour_figure, phase_words, phases, render_table, roughness
    from jaxattr.analysis.tables import csv_text, plain
    from jaxattr.host.checkpoint import write_text
    from jaxattr.host.progress import Progress
    from jaxattr.host.rounds import load_rounds
    from jaxattr.studies.behaviour import choose, extremes, has_features, make_viewer, most_risen, parse_record

    for name, value, low in (("--top", top, 1), ("--shuffles", shuffles, 2), ("--permutations", permutations, 1)):
        if value < low:
            raise ConfigError(f"{name} is {value}: must be {low} or more")
    wanted = None if record is None else parse_record(record)
    rounds = load_rounds(Path(run), network=network)
    first, last = rounds[0], rounds[-1]
    last.lane(seed_index)  # is there such a seed?
    if wanted is None:
        wanted = last.number, most_risen(first, last, seed_index)
    chosen = choose(rounds, seed_index, *wanted)
    view = make_viewer(first.step)
    rows, listed, scores = [], [], []
    with Progress("behaviour", len(rounds), quiet) as progress:
        for i, one in enumerate(rounds):
            data = one.lane(seed_index)
            seen = jax.tree.map(np.asarray, view(data, chosen.obs, chosen.action))
            usable = np.where(np.asarray(data.records.valid), seen.scores, np.nan)
            rough = roughness(usable, seen.features, shuffles=shuffles, seed=one.number)
            listed.append(extremes(data, usable, top))
            scores.append(usable)
            rows.append(_row(one.number, seen, usable, rough, listed[-1]))
            progress.update(i + 1, "scored")
    found = {
        name: phases([row[name] for row in rows], permutations=permutations)
        for name in ("roughness", "relative_roughness")
    }
    for row in rows:
        for name, of in found.items():
            position = [r["round"] for r in rows].index(row["round"])
            row[f"{name}_phase"] = 1 + sum(position >= s for s in of.starts) if of.found else None

    numbers = [one.number for one in rounds]
    density = not np.issubdtype(np.asarray(chosen.action).dtype, np.integer)
    words = {name: phase_words(of, numbers) for name, of in found.items()}
    action = np.array2string(np.asarray(chosen.action), precision=3, separator=", ", threshold=8)
    what = f"action {action} in the observation of record {chosen.index} of round {chosen.number}"
    head = f"{first.env_id}, seed {first.seeds[seed_index]}: {what}"
    table = "\n".join(
        [head, "", render_table(rows, density), "", *(f"{name.replace('_', ' ')}: {w}" for name, w in words.items())]
    )
    where = Path(run) / "behaviour" if out is None else Path(out)
    where.mkdir(parents=True, exist_ok=True)
    hidden = has_features(first.lane(seed_index).before.params)
    document = {
        "env": first.env_id,
        "run": str(run),
        "seed": first.seeds[seed_index],
        "chosen": {"round": chosen.number, "record": chosen.index, "obs": chosen.obs, "action": chosen.action},
        "features": "output of the policy's last hidden layer" if hidden else "observation",
        "kernel": "Gaussian, bandwidth = median distance of the round's records",
        "null": f"{shuffles} shuffles of the scores: mean, 2.5 % and 97.5 % quantiles",
        "phases": {name: {**of._asdict(), "words": words[name]} for name, of in found.items()},
        "permutations": permutations,
        "rounds": [{**row, **one} for row, one in zip(rows, listed, strict=True)],
        "config": first.config.to_dict(),
    }
    document = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, document)
    write_text(where / "behaviour.csv", csv_text(rows))
    write_text(where / "behaviour.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    title = f"{first.env_id}, seed {first.seeds[seed_index]}: which records made the action likely\n"
    title += f"s, a: observation and action {action} of record {chosen.index}, round {chosen.number}"
    behaviour_figure(where / "behaviour.png", rows, listed, found, title, density=density)
    return {
        "rows": rows,
        "extremes": listed,
        "scores": np.stack(scores),
        "phases": found,
        "chosen": chosen,
        "table": table,
        "out": where,
    }


def _row(number: int, seen: Any, scores: Any, rough: Any, listed: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One line of behaviour.csv."""
    import numpy as np

    known = scores[np.isfinite(scores)]
    quantiles = np.quantile(known, [0, 0.25, 0.5, 0.75, 1]) if known.size else np.full(5, np.nan)
    names = ("score_min", "score_q25", "score_median", "score_q75", "score_max")
    extreme = {f"{end}_record": listed[end][0]["record"] if listed[end] else None for end in ("top", "bottom")}
    return {
        "round": number,
        "prob_before": float(np.exp(seen.log_prob_before)),
        "prob_after": float(np.exp(seen.log_prob_after)),
        "log_prob_before": float(seen.log_prob_before),
        "log_prob_after": float(seen.log_prob_after),
        **dict(zip(names, map(float, quantiles), strict=True)),
        "score_sum": float(known.sum()),
        "positive_share": float((known > 0).mean()) if known.size else float("nan"),
        **extreme,
        "roughness": rough.value,
        "null_mean": rough.null_mean,
        "null_low": rough.null_low,
        "null_high": rough.null_high,
        "relative_roughness": rough.relative,
        "bandwidth": rough.bandwidth,
        "graph_records": rough.records,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
