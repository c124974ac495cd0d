"""`jaxattr report RUN`: a run as ONE HTML file: curves, scores over rounds, and the records of recorded rounds drawn.

Everything is computed here and embedded as JSON in the page `report.html` (plain HTML, CSS and JavaScript, no network,
no libraries). The file opens from disk, also where jaxattr is not installed.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from jaxattr.analysis.tables import plain
from jaxattr.config import Config, ConfigError
from jaxattr.host import render
from jaxattr.host.checkpoint import write_text
from jaxattr.host.outputs import record_rows
from jaxattr.host.progress import Progress
from jaxattr.host.rounds import load_round
from jaxattr.host.thumbnails import Drawer, data_uri
from jaxattr.host.xla import use_all_cores
from jaxattr.types import Judged

PLACEHOLDER = "/*DATA*/"
POINTS = 1000
"""Records in a scatter plot at most."""
BINS = 40
ROUNDS_DRAWN = 600
"""A longer run's curves show this many of its rounds, evenly, and the recorded ones."""
TALL = 30.0
"""An axis whose largest value is more than TALL times its median one is logarithmic away from 0 (see `tail_scale`)."""
QUANTILES = ("score_min", "score_q25", "score_median", "score_q75", "score_max")
STUDIES = {
    "diagnosis": "Were the advantages right? Compared with Monte Carlo rollouts from the same states.",
    "counterfactual": "Do scores predict what retraining the round does?",
    "behaviour": "Which records made an action likely, round by round.",
    "intervention": "Does each round end better on filtered records?",
}
"""Folders that other commands write into the run's -> caption of their pictures."""
DETAILS = ("round", "rounds", "seed", "seeds", "unit", "subsets", "rollouts_per_mean", "episodes", "command")


@dataclass
class Report:
    """Write RUN as one HTML file that opens anywhere: learning curves, scores over rounds, and for each recorded round
    its most helpful and most harmful records, drawn."""

    run: tyro.conf.Positional[Path]
    """Folder of a run; train it with --record-rounds to see records."""
    out: Path | None = None
    """File to write; default: RUN/report.html."""
    top: int = 8
    """Records drawn at either end of a round."""
    max_rounds: int = 20
    """Recorded rounds shown at most, evenly chosen."""
    max_seeds: int = 8
    """Seeds whose scores and records are shown at most, the first ones (curves show all)."""
    quiet: bool = False
    """No progress."""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    args = tyro.cli(Report, prog="jaxattr report", args=list(argv))
    use_all_cores(1)
    options = {name: value for name, value in vars(args).items() if name != "run"}
    out = report(args.run, **options)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    return 0


def report(
    run: Path,
    out: Path | None = None,
    *,
    top: int = 8,
    max_rounds: int = 20,
    max_seeds: int = 8,
    network: Any = None,
    quiet: bool = True,
) -> Path:
    """Write a run's report, whole or not at all.

    Args:
      run: its folder.
      out: file, its folder is made if missing; None = RUN/report.html.
      top: records at either end of each recorded round, 1 or more.
      max_rounds, max_seeds: recorded rounds and seeds shown at most, 1 or more.
      network: the run's own flax module, if it was trained with one.
      quiet: no progress.

    Returns:
      The path written.

    Raises:
      ConfigError: no run, a damaged file, or a number out of range; one line.
    """
    for name, value in (("--top", top), ("--max-rounds", max_rounds), ("--max-seeds", max_seeds)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: must be 1 or more")
    run = Path(run)
    out = run / "report.html" if out is None else Path(out)
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, such as {out / 'report.html'}")
    data = gather(run, top=top, max_rounds=max_rounds, max_seeds=max_seeds, network=network, quiet=quiet)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(data))
    return out


def page(data: Mapping[str, Any]) -> str:
    """The template with `data` in it. No text in `data` can end the script element or be read as markup."""
    template = resources.files("jaxattr.host").joinpath("report.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    before, after = template.split(PLACEHOLDER)
    return before + text + after


def gather(
    run: Path, *, top: int, max_rounds: int, max_seeds: int, network: Any = None, quiet: bool = True
) -> dict[str, Any]:
    """What the page shows, as plain values (see `report` for the arguments)."""
    saved = _json(run / "config.json")
    if not isinstance(saved.get("config"), dict) or "env" not in saved:
        raise ConfigError(f"{run}: holds no run (no config.json)")
    summary = _json(run / "summary.json")
    metrics = read_metrics(run / "metrics.csv", len(saved["seeds"]))
    files = {int(p.stem.removeprefix("round_")): p for p in sorted((run / "rounds").glob("round_*.npz"))}
    numbers = [n for n in sorted(files) if n <= metrics["update"][-1]]
    chosen = [numbers[i] for i in spread(len(numbers), max_rounds)]
    labels = lane_labels(saved)
    lanes = min(len(labels), max_seeds)
    recorded, images, undrawn = _recorded([files[n] for n in chosen], lanes, top, network, quiet)
    shown = spread(len(metrics["update"]), ROUNDS_DRAWN)
    shown = sorted({*shown, *(metrics["update"].index(n) for n in chosen if n in metrics["update"])})
    data = {
        "header": header(saved, summary, metrics),
        "lanes": labels,
        "lanes_with_scores": lanes,
        "curves": {name: curve(metrics, name) for name in ("return_mean", "test_return")},
        "rounds": {
            "total": len(metrics["update"]),
            "x": [metrics["update"][i] for i in shown],
            "lanes": [_score_lane(metrics, k, shown) for k in range(lanes)],
        },
        "recorded": recorded,
        "recorded_total": len(numbers),
        "images": images,
        "undrawn": undrawn,
        "top": top,
        "studies": studies(run),
    }
    return plain(data)


# -- the run's files -----------------------------------------------------------------------------------------------


def read_metrics(path: Path, lanes: int) -> dict[str, Any]:
    """metrics.csv as `update` and `env_steps` (K,), and arrays (S, K), NaN where there is no value."""
    try:
        with path.open(newline="") as file:
            rows = [r for r in csv.DictReader(file) if None not in r.values() and r.get("update", "").isdigit()]
        updates = sorted({int(r["update"]) for r in rows})
        steps = {int(r["update"]): int(r["env_steps"]) for r in rows}
        names = ("return_mean", "test_return", "kept", "dropped", *QUANTILES)
        arrays = {name: np.full((lanes, len(updates)), np.nan) for name in names}
        place = {update: k for k, update in enumerate(updates)}
        for r in rows:
            for name in names:
                arrays[name][int(r["lane"]), place[int(r["update"])]] = float(r[name] or "nan")
    except OSError:
        raise ConfigError(f"{path}: does not exist, so no round of this run is finished") from None
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"{path}: not a run's metrics ({type(error).__name__}: {error})") from None
    if not updates:
        raise ConfigError(f"{path}: holds no finished round")
    return {"update": updates, "env_steps": [steps[u] for u in updates], **arrays}


def lane_labels(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seed and words of each lane (a sweep has several lanes per seed)."""
    swept = saved.get("sweep") or {}
    return [
        {"seed": seed, "label": ", ".join([f"seed {seed}", *(f"{name} {v[i]:g}" for name, v in swept.items())])}
        for i, seed in enumerate(saved["seeds"])
    ]


def header(saved: Mapping[str, Any], summary: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Environment, filter, results, versions, and the settings that are not defaults."""
    config = {**Config().to_dict(), **saved["config"]}
    default = Config().to_dict()
    changed = [
        {"name": name, "value": _word(value), "default": _word(default.get(name, ""))}
        for name, value in config.items()
        if value != default.get(name)
    ]
    rule = str(config["filter"])
    words = rule if rule == "none" else f"{rule}, p = {config['p']:g}, {config['training']} training"
    return {
        "env": saved["env"],
        "filter": words,
        "seeds": saved["seeds"],
        "rounds": metrics["update"][-1],
        "records_per_round": int(config["num_envs"]) * int(config["num_steps"]),
        "env_steps": metrics["env_steps"][-1],
        "final": summary.get("final_test_return"),
        "final_deterministic": summary.get("final_test_return_deterministic"),
        "eval_episodes": summary.get("eval_episodes"),
        "finished": bool(summary),
        "stopped": summary.get("stopped_seeds") or [],
        "device": summary.get("device"),
        "wall_s": summary.get("wall_s"),
        "versions": summary.get("versions") or {"jaxattr": saved.get("version", "unknown")},
        "changed": changed,
        "unchanged": len(config) - len(changed),
    }


def curve(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Mean, smallest and largest over lanes, and each lane, over environment steps; rounds without a value left out."""
    values = metrics[name]
    have = np.flatnonzero(np.isfinite(values).any(axis=0))
    have = have[spread(len(have), ROUNDS_DRAWN)]
    y = values[:, have]
    result = {"x": [metrics["env_steps"][i] for i in have], "lanes": _short(y)}
    if not have.size:
        return {**result, "mean": [], "low": [], "high": []}
    bands = {"mean": np.nanmean(y, axis=0), "low": np.nanmin(y, axis=0), "high": np.nanmax(y, axis=0)}
    return {**result, **{k: _short(v) for k, v in bands.items()}}


def studies(run: Path) -> list[dict[str, Any]]:
    """Pictures that diagnose, counterfactual, behaviour and intervene left in the run's folder."""
    found = []
    for kind, caption in STUDIES.items():
        for path in sorted((run / kind).glob("**/*.png")):
            content = path.read_bytes()
            if not content.startswith(b"\x89PNG"):
                continue
            about = _json(path.with_suffix(".json"), strict=False)
            given = {name: about[name] for name in DETAILS if name in about and _is_short(about[name])}
            details = [f"{name.replace('_', ' ')}: {_word(value)}" for name, value in given.items()]
            found.append(
                {"kind": kind, "file": path.relative_to(run).as_posix(), "caption": caption, "details": details}
                | {"image": data_uri(content)}
            )
    return found


# -- recorded rounds -----------------------------------------------------------------------------------------------


def _recorded(files: Sequence[Path], lanes: int, top: int, network: Any, quiet: bool) -> tuple[list, list[str], str]:
    """Each recorded round's lanes, the distinct pictures, and why there is none."""
    rounds, drawer = [], None
    with Progress("report", len(files), quiet) as progress:
        for i, file in enumerate(files):
            one = load_round(file, network=network)
            drawer = drawer or Drawer(one.env, one.env_id)
            rounds.append({"round": one.number, "lanes": [lane_data(one, k, top, drawer) for k in range(lanes)]})
            progress.update(i + 1, f"{len(drawer.images)} pictures")
    return rounds, drawer.images if drawer else [], drawer.why if drawer else ""


def lane_data(one: Any, lane: int, top: int, draw: Drawer) -> dict[str, Any]:
    """One lane of a recorded round: histogram, scatter points, and its extreme records.

    Args:
      one: `studies.replay.Round`.
      lane: position in the run.
      top: records at either end.
      draw: draws their states.
    """
    data = jax.tree.map(lambda x: x[lane], one.data)
    r, scores, weights = data.records, np.asarray(data.scores), np.asarray(data.weights)
    usable = np.asarray(r.valid) & np.isfinite(scores)
    if not bool(data.before.alive):
        return {"note": "This seed had stopped before this round."}
    if not usable.any():
        return {"note": "No scores in this round: train with a filter, or with --score-always."}
    at, advantage, kept = np.flatnonzero(usable), np.asarray(r.advantage), weights > 0
    envs = one.config.num_envs
    raw = r.replace(obs=data.rollout.obs.reshape(r.obs.shape), valid=usable)  # as the environment gave them
    judged = jax.tree.map(lambda x: np.asarray(x)[None], Judged(raw, data.scores, data.weights))
    rows = record_rows(judged, 0, one.seeds[lane], one.number, envs, top)
    cards = [{k: v for k, v in row.items() if k not in ("seed", "lane", "round")} for row in rows]
    where = [divmod(card["record"], envs) for card in cards]
    before = _raw_keys(data.rollout.env_state)
    states = [jax.tree.map(lambda x, t=t, b=b: x[t, b], before) for t, b in where]
    obs, action = np.asarray(judged.records.obs[0]), np.asarray(judged.records.action[0])
    alike = np.unique(np.concatenate([obs.reshape(len(obs), -1), action.reshape(len(obs), -1)], 1), axis=0,
                      return_inverse=True)[1].reshape(-1)  # fmt: skip
    pictures = draw(states, [obs[c["record"]] for c in cards], [action[c["record"]] for c in cards])
    names = render.ACTION_NAMES.get(one.env_id)
    for card, picture in zip(cards, pictures, strict=True):
        card["image"] = picture
        card["action_name"] = names[int(card["action"])] if names else ""
        card["alike"] = int((alike[usable] == alike[card["record"]]).sum())
    half = min(top, (len(cards) + 1) // 2)
    drawn = sorted({int(at[i]) for i in spread(len(at), POINTS)} | {c["record"] for c in cards})
    return {
        "records": len(at),
        "kept": int(kept[at].sum()),
        "negative": int((scores[at] < 0).sum()),
        "histogram": histogram(scores[at], kept[at]),
        "points": [[_digits(advantage[i]), _digits(scores[i]), int(kept[i]), i] for i in drawn],
        "tails": [tail_scale(advantage[at]), tail_scale(scores[at])],
        "top": cards[:half],
        "bottom": cards[half:][::-1],
    }


def tail_scale(values: np.ndarray) -> float | None:
    """c of a scale sign(v) log(1 + |v| / c) if a linear one would hide most values, else None."""
    size = np.abs(values[values != 0])
    middle = float(np.median(size)) if size.size else 0.0
    return _digits(middle) if middle > 0 and size.max() > TALL * middle else None


def histogram(scores: np.ndarray, kept: np.ndarray) -> dict[str, Any]:
    """Counts of kept and dropped records in about BINS equal bins of the score's scale; 0 is an edge if inside."""
    c = tail_scale(scores)
    forth = (lambda v: np.sign(v) * np.log1p(np.abs(v) / c)) if c else np.asarray
    back = (lambda v: np.sign(v) * np.expm1(np.abs(v)) * c) if c else np.asarray
    seen = forth(scores.astype(np.float64))
    low, high = float(seen.min()), float(seen.max())
    width = (high - low) / BINS or max(abs(high), 1e-12) / BINS
    first, last = int(np.floor(low / width)), int(np.floor(high / width)) + 1
    place = np.clip(np.floor(seen / width).astype(int) - first, 0, last - first - 1)
    count = lambda chosen: np.bincount(place[chosen], minlength=last - first).tolist()
    edges = back(np.arange(first, last + 1) * width)
    return {"edges": _short(edges), "kept": count(kept), "dropped": count(~kept), "tail": c}


# -- small things --------------------------------------------------------------------------------------------------


def spread(total: int, most: int) -> list[int]:
    """At most `most` of 0 .. total - 1, evenly, the first and the last among them."""
    if total <= most:
        return list(range(total))
    return sorted({round(x) for x in np.linspace(0, total - 1, most).tolist()} if most > 1 else {total - 1})


def _raw_keys(tree: Any) -> Any:
    """numpy arrays; typed PRNG keys as their raw data."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def _score_lane(metrics: Mapping[str, Any], lane: int, shown: Sequence[int]) -> dict[str, Any]:
    kept, dropped = (metrics[name][lane, shown] for name in ("kept", "dropped"))
    total = kept + dropped
    share = np.divide(kept, total, out=np.full_like(kept, np.nan), where=total > 0)
    return {"kept": _short(share), "quantiles": [_short(metrics[q][lane, shown]) for q in QUANTILES]}


def _json(path: Path, strict: bool = True) -> dict[str, Any]:
    """A JSON object; empty if there is none (or, unless `strict`, a damaged one)."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        if strict:
            raise ConfigError(f"{path}: not readable ({error})") from None
        return {}
    return content if isinstance(content, dict) else {}


def _is_short(value: Any) -> bool:
    """A text, a number, or a few of them."""
    values = value if isinstance(value, list) else [value]
    return len(values) <= 40 and all(isinstance(v, (str, int, float)) for v in values)


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {_word(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_word, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _digits(value: Any) -> float:
    return float(f"{float(value):.6g}")


def _short(values: np.ndarray) -> list[Any]:
    """Nested lists of six significant digits, None where there is no number."""
    if values.ndim > 1:
        return [_short(row) for row in values]
    return [_digits(v) if np.isfinite(v) else None for v in values]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
