"""`jaxattr diagnose ROUND`: branch the environment from every record; do low scores point at wrong advantages?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from jaxattr.analysis.diagnosis import FEWEST, FIFTHS, agreement, diagnosis_figure, diagnosis_rows, fifths, verdicts
from jaxattr.analysis.tables import csv_text, plain
from jaxattr.config import ConfigError
from jaxattr.host.checkpoint import write_text
from jaxattr.host.outputs import record_rows
from jaxattr.host.progress import LINE_SECONDS, duration
from jaxattr.host.xla import use_all_cores


@dataclass
class Diagnose:
    """Were a round's advantages right? Monte-Carlo advantages from the true environment, by influence score."""

    round: tyro.conf.Positional[Path]
    """File of a recorded round (RUN/rounds/round_000005.npz), or a run with exactly one."""
    rollouts: int = 32
    """Rollouts per record from its state with its action, and as many with actions of the policy."""
    horizon: int | None = None
    """Environment steps after which a rollout is cut and the critic's value stands for the rest; none: never before
    the environment's own time limit."""
    seed_index: int = 0
    """Position of the seed in the run."""
    seed: int = 0
    """Of the rollouts."""
    top: int = 10
    """Lowest-scored records to print."""
    out: Path | None = None
    """Folder; default: diagnosis/round_N beside the run's rounds/ folder (round_N_seed_index_I for I > 0)."""
    quiet: bool = False
    """No progress."""


class Diagnosis(NamedTuple):
    """What `diagnose` found."""

    records: list[dict[str, Any]]
    """One row per scored record, highest score first: what was observed and done, advantage, mc_advantage, ..."""
    fifths: list[dict[str, Any]]
    """One row per fifth of the score, lowest first: see `analysis.diagnosis.diagnosis_rows`."""
    summary: dict[str, Any]
    """Plain values: which round, correlations, sizes, seconds."""
    arrays: dict[str, np.ndarray]
    """(N,) in record order: scores, advantage, mc_advantage, mc_stderr, valid."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command."""
    args = tyro.cli(Diagnose, prog="jaxattr diagnose", args=list(argv))
    use_all_cores()
    from jaxattr.host.rounds import find_round, load_round

    if args.top < 0:
        raise ConfigError(f"--top is {args.top}: must be 0 or more")
    path = find_round(args.round)
    round_ = load_round(path)
    lane = f"_seed_index_{args.seed_index}" if args.seed_index else ""
    out = args.out or path.parent.parent / "diagnosis" / f"{path.stem}{lane}"
    result = diagnose(
        round_,
        rollouts=args.rollouts,
        horizon=args.horizon,
        seed_index=args.seed_index,
        seed=args.seed,
        quiet=args.quiet,
    )
    write_diagnosis(out, result)
    print_diagnosis(result, args.top)
    print(f"{out}: diagnosis.csv, diagnosis.json, diagnosis.png")
    return 0


def diagnose(
    round_: Any,
    *,
    rollouts: int = 32,
    horizon: int | None = None,
    seed_index: int = 0,
    seed: int = 0,
    quiet: bool = True,
) -> Diagnosis:
    """Compare the advantages of one lane of a recorded round with Monte-Carlo advantages.

    Args:
      round_: `studies.replay.Round`, from `load_round` or `Run.round`.
      rollouts: R from (s, a) and R more from s, per record; 2 or more.
      horizon: env steps after which the critic bootstraps; None = the environment's time limit.
      seed_index: lane.
      seed: of the rollouts.
      quiet: no progress.

    Returns:
      `Diagnosis`. Scores are those of the run; where it computed none, those for the target `return`.

    Raises:
      ConfigError: no such lane, a stopped seed, rollouts or horizon out of range, no environment states, or too few
        records.
    """
    import jax

    from jaxattr.studies.diagnosis import monte_carlo
    from jaxattr.studies.replay import score
    from jaxattr.types import Judged

    data = round_.lane(seed_index)
    valid = np.asarray(data.records.valid)
    if not bool(data.before.alive):
        raise ConfigError(f"seed {round_.seeds[seed_index]} had stopped before round {round_.number}")
    if valid.sum() < FEWEST:
        raise ConfigError(f"this round has {valid.sum()} records: fifths of the score need {FEWEST} or more")
    begin = time.perf_counter()
    count = 2 * rollouts * len(valid)
    say = _teller(f"diagnose, {round_.env_id} round {round_.number}", count, quiet)
    mc = monte_carlo(round_.step, round_.env, data, jax.random.key(seed), rollouts, horizon, watch=say)
    mc = jax.tree.map(np.asarray, mc)
    seconds = time.perf_counter() - begin
    computed = not np.isfinite(np.asarray(data.scores)[valid]).any()
    if computed:
        data = data.replace(scores=jax.jit(lambda d: score(round_.step, d, target="return"))(data))

    scores, advantage = np.asarray(data.scores), np.asarray(data.records.advantage)
    arrays = {
        "scores": scores, "advantage": advantage, "mc_advantage": mc.advantage, "mc_stderr": mc.stderr, "valid": valid
    }  # fmt: skip
    if np.isfinite(scores[valid]).sum() < FEWEST:
        raise ConfigError(f"this round has fewer than {FEWEST} finite scores: nothing to compare")
    raw = data.records.replace(obs=data.rollout.obs.reshape(data.records.obs.shape))  # as the environment gave them
    judged = jax.tree.map(lambda x: np.asarray(x)[None], Judged(raw, data.scores, data.weights))
    described = record_rows(
        judged, 0, round_.seeds[seed_index], round_.number, round_.config.num_envs, top=(len(valid) + 1) // 2
    )
    part, verdict = fifths(scores, valid), verdicts(advantage, mc.advantage, mc.stderr)
    records = []
    for row in described:
        i = row["record"]
        row.update(
            lane=seed_index, mc_advantage=float(mc.advantage[i]), mc_stderr=float(mc.stderr[i]), mc_q=float(mc.q[i]),
            mc_v=float(mc.v[i]), verdict=str(verdict[i]), fifth=FIFTHS[part[i]] if part[i] >= 0 else "",
        )  # fmt: skip
        records.append(row)
    rows = diagnosis_rows(**arrays)
    summary = {
        "env": round_.env_id,
        "round": round_.number,
        "seed": round_.seeds[seed_index],
        "seed_index": seed_index,
        "records": int(valid.sum()),
        "rollouts_per_mean": rollouts,
        "horizon": horizon,
        "rollout_seed": seed,
        "scores": "computed now (target return)" if computed else "of the run",
        "spearman_with_mc_times_learned_advantage": agreement(scores, advantage, mc.advantage, valid),
        "env_steps": int(mc.env_steps),
        "bootstrapped_share": float(mc.bootstrapped),
        "seconds": seconds,
        "fifths": rows,
    }
    return Diagnosis(records, rows, summary, arrays)


def write_diagnosis(out: Path, result: Diagnosis) -> None:
    """diagnosis.csv (every record), diagnosis.json (summary), diagnosis.png; each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "diagnosis.csv", csv_text(result.records))
    command = " ".join(["jaxattr", *sys.argv[1:]])
    text = json.dumps(plain({**result.summary, "command": command}), indent=1, allow_nan=False)
    write_text(out / "diagnosis.json", text + "\n")
    s = result.summary
    what = f"{s['env']}, round {s['round']}, seed {s['seed']}"
    diagnosis_figure(
        out / "diagnosis.png",
        **result.arrays,
        title=f"{what}: were the advantages of {s['records']:,} records right?",
        rollouts=s["rollouts_per_mean"],
    )


def print_diagnosis(result: Diagnosis, top: int) -> None:
    """The table of fifths, the correlation, and the `top` lowest-scored records, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    s = result.summary
    console.print(
        f"{s['env']}, round {s['round']}, seed {s['seed']}: {s['records']:,} records, scores {s['scores']}\n"
        f"{s['rollouts_per_mean']} + {s['rollouts_per_mean']} rollouts each, {s['env_steps']:,} env steps in "
        f"{s['seconds']:.1f} s; {s['bootstrapped_share']:.1%} of the rollouts end in the critic's value\n"
    )
    names = ("fifth by score", "records", "signs differ", "[95 %]", "undecided", "wrong, of decided", "[95 %]",
             "mean error", "its noise")  # fmt: skip
    table = Table(*(n.replace("[", r"\[") for n in names), box=None)
    for r in result.fifths:
        table.add_row(
            r["fifth"], f"{r['records']:,}", f"{r['mismatch_share']:.1%}", _range(r, "mismatch"),
            f"{r['undecided_share']:.1%}", f"{r['wrong_share']:.1%}" if r["decided"] else "-", _range(r, "wrong"),
            f"{r['mean_abs_error']:.4g}", f"{r['mean_stderr']:.2g}",
        )  # fmt: skip
    console.print(table)
    undecided = sum(r["undecided_share"] * r["records"] for r in result.fifths) / s["records"]
    if undecided > 0.5:
        console.print(f"{undecided:.0%} are undecided (within 2 standard errors of 0): more --rollouts decide more")
    c = s["spearman_with_mc_times_learned_advantage"]
    console.print(
        "\nSpearman of the score's rank from the top with A_bar * A: "
        f"{c['rank_from_top']:+.3f} \\[{c['rank_from_top_low']:+.3f}, {c['rank_from_top_high']:+.3f}] "
        "(negative: low scores go with wrong advantages)\n"
    )
    if top:
        console.print(f"the {min(top, len(result.records))} lowest-scored records:")
        names = ("record", "step", "env", "score", "observed", "done", "advantage", "true advantage", "")
        table = Table(*names, box=None)
        for r in result.records[::-1][:top]:
            table.add_row(
                *(str(r[n]) for n in ("record", "step", "env")), f"{r['score']:.3g}", r["obs"], _action(r["action"]),
                f"{r['advantage']:+.4g}", f"{r['mc_advantage']:+.4g} +- {r['mc_stderr']:.2g}", r["verdict"],
            )  # fmt: skip
        console.print(table)


def _action(action: Any) -> str:
    return " ".join(f"{x:.4g}" for x in action) if isinstance(action, list) else str(action)


def _range(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{100 * low:.0f} to {100 * high:.0f} %" if np.isfinite(low) else "-"


def _teller(title: str, total: int, quiet: bool) -> Any:
    """Says on stderr how far the rollouts are, from `LINE_SECONDS` on."""
    begin = last = time.monotonic()

    def say(done: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS and done < 1:
            last = now
            left = f", {duration((now - begin) * (1 - done) / done)} left" if done else ""
            print(f"{title}: {done:.0%} of {total:,} rollouts{left}", file=sys.stderr, flush=True)

    return None if quiet else say
