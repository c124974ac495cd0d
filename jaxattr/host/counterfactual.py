"""`jaxattr counterfactual ROUND`: retrain a recorded round on many subsets: which scores foretold the outcome?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from jaxattr.analysis.counterfactual import (
    counterfactual_figure,
    prediction_rows,
    render_rows,
)
from jaxattr.analysis.ranks import FEWEST, spearman_interval
from jaxattr.analysis.tables import csv_text, plain
from jaxattr.config import ConfigError
from jaxattr.host.checkpoint import write_text
from jaxattr.host.progress import Progress
from jaxattr.host.xla import use_all_cores

BLOCK = 256
"""Subsets per call of the compiled program: often enough for progress."""
SHUFFLES = 100

VARIANTS: dict[str, dict[str, Any]] = {
    "as configured": {},
    "raw advantages": {"normalize": "none"},
    "buffer-normalised": {"normalize": "buffer"},
    "chunk-normalised": {"normalize": "chunk"},
    "Adam's view": {"normalize": "buffer", "metric": "adam"},
    "mean gradient": {"normalize": "buffer", "target": "gradient"},
    "mean gradient, own left out": {"normalize": "buffer", "target": "gradient_loo"},
    "TracIn, target each epoch": {"checkpoint": "epochs"},
    "TracIn, every step": {"checkpoint": "steps"},
    "TracIn, every step, Adam": {"checkpoint": "steps", "metric": "adam"},
}
"""Scores that are put to the test: name -> options of `studies.replay.score`. Controls are added."""


@dataclass
class Counterfactual:
    """Retrain one round on random subsets of its records: which scores predict what happens?"""

    round: tyro.conf.Positional[Path]
    """File of a recorded round (RUN/rounds/round_000005.npz), or a run with exactly one."""
    subsets: int = 1000
    """Random subsets, each retrained from the round's start."""
    share: float = 0.5
    """Share of the units that a subset keeps."""
    unit: str = "record"
    """What is kept or dropped together: record, segment or episode."""
    training: str = "compact"
    """compact, step_matched, or masked (dropped records stay in their minibatch with weight 0)."""
    record: tuple[int, ...] = ()
    """Also measure the log-probability of these records' actions."""
    episodes: int = 0
    """Also measure the true return, over this many fresh episodes."""
    extremes: int = 32
    """Units at either end that are left out one by one."""
    drop: float = 0.1
    """Share of the units dropped by score: top, bottom, random."""
    seed_index: int = 0
    """Position of the seed in the run."""
    seed: int = 0
    """Of the subsets."""
    out: Path | None = None
    """Folder; default: counterfactual/round_N beside the run's rounds/ folder."""
    quiet: bool = False
    """No progress."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command."""
    args = tyro.cli(Counterfactual, prog="jaxattr counterfactual", args=list(argv))
    use_all_cores()
    from jaxattr.host.rounds import find_round, load_round

    path = find_round(args.round)
    round_ = load_round(path)
    out = args.out or path.parent.parent / "counterfactual" / path.stem
    result = counterfactual(
        round_,
        subsets=args.subsets,
        share=args.share,
        unit=args.unit,
        training=args.training,
        records=args.record,
        episodes=args.episodes,
        extremes=args.extremes,
        drop=args.drop,
        seed_index=args.seed_index,
        seed=args.seed,
        quiet=args.quiet,
    )
    write_result(out, result)
    print(result["text"])
    print(f"{out}: counterfactual.csv, counterfactual.json, counterfactual.png, subsets.csv")
    return 0


def counterfactual(
    round_: Any,
    *,
    subsets: int = 1000,
    share: float = 0.5,
    unit: str = "record",
    training: str = "compact",
    records: Sequence[int] = (),
    episodes: int = 0,
    extremes: int = 32,
    drop: float = 0.1,
    seed_index: int = 0,
    seed: int = 0,
    chunk: int | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Retrain one lane of a recorded round on random subsets and compare with what scores predict.

    Args:
      round_: `studies.replay.Round`.
      subsets: M, at least 20 (an interval over fewer means nothing).
      share: of the units that each subset keeps.
      unit: record, segment or episode.
      training: see `studies.counterfactual.TRAININGS`.
      records: indices of records whose action's log-probability is measured, too.
      episodes: > 0: also measure the true return.
      extremes: how many of the highest and of the lowest units are left out one by one (always `masked`: leaving out
        one record of a compact epoch would move every later one into another minibatch).
      drop: share of the units dropped by score.
      seed_index, seed: lane, and seed of the subsets.
      chunk: subsets at a time per device; bounds memory only.
      variants: scores to test, as in `VARIANTS`.
      quiet: no progress.

    Returns:
      A dict of plain values and arrays: `rows` (LDS), `predicted`, `measured`, `leave_one_out`, `drops`, `text`, sizes
      and seconds.

    Raises:
      ConfigError: anything that can be known before compiling.
    """
    import jax
    import jax.numpy as jnp

    from jaxattr.studies import counterfactual as study

    if subsets < FEWEST:
        raise ConfigError(f"--subsets is {subsets}: an interval needs {FEWEST} or more")
    if extremes < 0 or not 0 < drop < 1:
        raise ConfigError(f"--extremes is {extremes}, --drop is {drop:g}: must be 0 or more, and between 0 and 1")
    step, data = round_.step, round_.lane(seed_index)
    data = data.replace(weights=data.records.valid.astype(jnp.float32))  # the question is about the whole round
    ids, count = study.unit_table(step, data, unit)
    actions = {f"action of {i}": int(i) for i in records}
    effects = study.make_effects(step, data, round_.env, actions, episodes)
    drawn = study.draw_subsets(jax.random.key(seed), ids, data.records.valid, subsets, share)
    everything = data.records.valid[None].astype(jnp.float32)
    chunk = study.CHUNK if chunk is None else chunk
    run = study.make_retrainer(step, effects, training, drawn.kept, chunk)
    # For subsets of other sizes; the same program where the drawn ones have no common size anyway.
    free = run if drawn.kept is None else study.make_retrainer(step, effects, training, None, chunk)
    masked = study.make_retrainer(step, effects, "masked", None, chunk)

    asked = dict(VARIANTS if variants is None else variants)
    if step.config.optimizer != "adam":
        asked = {k: v for k, v in asked.items() if v.get("metric") != "adam"}
    with Progress(f"counterfactual, {round_.env_id} round {round_.number}", subsets, quiet) as progress:
        progress.say(f"{count:,} {unit}s, {subsets:,} subsets of {share:.0%}, scoring {len(asked)} ways")
        begin = time.perf_counter()
        scores = {"return": study.score_all(step, data, asked, unit)}
        scores |= {name: study.score_all(step, data, asked, unit, i) for name, i in actions.items()}
        if episodes:
            scores["true_return"] = scores["return"]
        for effect, made in scores.items():
            scores[effect] = made | _controls(data, made, seed)
        _check_scores(scores, np.asarray(data.records.valid))
        score_s = time.perf_counter() - begin

        progress.begin(0)
        pieces, spent, done = [], [], 0
        begin = time.perf_counter()
        for out in study.run_blocks(run, data, drawn.weights, BLOCK):
            pieces.append(jax.tree.map(np.asarray, out))
            size = len(next(iter(pieces[-1].values())))
            spent.append((time.perf_counter() - begin, size))
            begin, done = time.perf_counter(), done + size
            progress.update(done, f"{size / spent[-1][0]:,.0f} retrainings/s")
        measured = {k: np.concatenate([p[k] for p in pieces]) for k in effects}
        predicted = {
            effect: {name: np.asarray(study.predictions(s, drawn.weights)) for name, s in of_effect.items()}
            for effect, of_effect in scores.items()
        }
        rows = prediction_rows(predicted, measured)

        progress.say("leaving out single units, dropping by score")
        first = next(iter(asked))
        mine = {e: np.asarray(scores[e][first]) for e in effects}
        ends = {e: _both_ends(study.ranked_units(mine[e], ids), extremes) for e in effects}
        alone = {e: study.without_each(ids, data.records.valid, ends[e][0]) for e in effects}
        outcome = _outcomes(masked, data, {"all": everything, **alone}, study)
        leave_one_out = {}
        for e in effects:
            change = outcome["all"][e] - outcome[e][e]  # what each unit contributed
            found = spearman_interval(ends[e][1], change)
            leave_one_out[e] = dict(zip(("spearman", "low", "high"), found, strict=True), units=len(change))
        without = {"all": everything}
        for e in effects:
            drawn_out = study.without_share(mine[e], ids, data.records.valid, drop, 16, seed)
            without |= {f"{e}/{name}": w for name, w in drawn_out.items()}
        outcome = _outcomes(free, data, without, study)
        drops = {
            e: {"all": outcome["all"][e], **{k: outcome[f"{e}/{k}"][e] for k in ("top", "bottom", "random")}}
            for e in effects
        }
    steady = spent[1:] or spent
    rate = sum(n for _, n in steady) / sum(s for s, _ in steady)
    text = _text(round_, rows, leave_one_out, drops, drop, first, subsets, rate)
    return {
        "env": round_.env_id, "round": round_.number, "seed": round_.seeds[seed_index], "unit": unit, "units": count,
        "subsets": subsets, "share": share, "training": training, "rows": rows, "leave_one_out": leave_one_out,
        "drops": drops, "predicted": predicted, "measured": measured, "main": first, "text": text,
        "retrainings_per_s": rate, "scoring_s": score_s, "drop": drop,
    }  # fmt: skip


def _controls(data: Any, made: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What any score must beat: itself in 100 random orders, and two numbers that cost nothing."""
    rng = np.random.default_rng(seed)
    first = np.asarray(next(iter(made.values())))
    return {
        "control: shuffled": np.stack([rng.permutation(first) for _ in range(SHUFFLES)]),
        "control: advantage": data.records.advantage,
        "control: |TD error|": abs(data.records.td_error),
    }


def _check_scores(scores: Mapping[str, Mapping[str, Any]], valid: np.ndarray) -> None:
    for effect, made in scores.items():
        for name, values in made.items():
            bad = np.flatnonzero(valid & ~np.isfinite(np.atleast_2d(np.asarray(values))).all(axis=0))
            if bad.size:
                raise ConfigError(f"score {name!r} about {effect}: not finite for record {bad[0]} ({bad.size} in all)")


def _both_ends(ranked: tuple[np.ndarray, np.ndarray], extremes: int) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest `extremes` of (unit ids, sums), or all of them."""
    count = len(ranked[0])
    chosen = np.arange(count)
    if 2 * extremes < count:
        chosen = np.concatenate([chosen[:extremes], chosen[count - extremes :]])
    return ranked[0][chosen], ranked[1][chosen]


def _outcomes(run: Any, data: Any, weights: Mapping[str, Any], study: Any) -> dict[str, dict[str, np.ndarray]]:
    """name -> (K, N) weights, to name -> effect -> (K,): one program for all of them."""
    import jax.numpy as jnp

    pieces = list(study.run_blocks(run, data, jnp.concatenate(list(weights.values())), BLOCK))
    whole = {e: np.concatenate([np.asarray(p[e]) for p in pieces]) for e in pieces[0]}
    ends = np.cumsum([len(w) for w in weights.values()])[:-1]
    return {name: {e: np.split(v, ends)[k] for e, v in whole.items()} for k, name in enumerate(weights)}


def _text(round_, rows, leave_one_out, drops, drop, main, subsets, rate) -> str:
    lines = [
        f"{round_.env_id}, round {round_.number}: {subsets:,} retrainings ({rate:,.0f}/s)",
        "",
        render_rows(rows),
        "",
    ]
    for effect, r in leave_one_out.items():
        lines.append(
            f"left out one by one ({r['units']} extreme units, score {main!r}): Spearman of score and contribution to "
            f"{effect} {r['spearman']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}]"
        )
    for effect, d in drops.items():
        cells = ", ".join(f"{n} {np.mean(v):.5g}" for n, v in d.items())
        lines.append(f"{effect} after dropping {drop:.0%} of the units: {cells}")
    return "\n".join(lines)


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    """counterfactual.csv (LDS table), subsets.csv (a row per subset), counterfactual.json, counterfactual.png."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "counterfactual.csv", csv_text(result["rows"]))
    main = {e: result["predicted"][e][result["main"]] for e in result["measured"]}
    columns = {f"predicted {e}": main[e] for e in main} | {f"measured {e}": v for e, v in result["measured"].items()}
    table = [{name: float(values[m]) for name, values in columns.items()} for m in range(result["subsets"])]
    write_text(out / "subsets.csv", csv_text(table))
    leave_out = ("predicted", "measured", "text")
    document = {k: v for k, v in result.items() if k not in leave_out}
    document["command"] = " ".join(["jaxattr", *sys.argv[1:]])
    write_text(out / "counterfactual.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    counterfactual_figure(
        out / "counterfactual.png",
        result["rows"],
        main,
        result["measured"],
        result["drops"],
        f"{result['env']}, round {result['round']}, seed {result['seed']}: do scores predict what retraining does? "
        f"({result['subsets']:,} subsets of {result['share']:.0%} of {result['units']:,} {result['unit']}s)",
        result["main"],
    )
