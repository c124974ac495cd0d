"""What `jaxattr reproduce` writes at the end: tables, JSON, CSV and pictures from the kept arms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxattr.analysis import ablation
from jaxattr.analysis import reproduction as analysis
from jaxattr.analysis.compare import NULL, ArmResult
from jaxattr.analysis.tables import csv_text, percent, plain
from jaxattr.config import ConfigError
from jaxattr.host.checkpoint import write_text
from jaxattr.host.progress import duration
from jaxattr.host.reproduce_run import Piece
from jaxattr.host.runner import versions
from jaxattr.studies.ablation import ABLATION_ARMS, CONTRASTS, PUBLISHED
from jaxattr.studies.reproduction import GRID, TASKS, Choice, choose_p, parse_arm

if TYPE_CHECKING:
    from jaxattr.host.reproduce import Plan
    from jaxattr.host.reproduce_run import Piece


def load_arm(path: Path) -> tuple[ArmResult, dict[str, Any]]:
    """A kept arm and everything else that its file says."""
    saved = json.loads(path.read_text())
    return ArmResult(**saved.pop("result")), saved


def load_panel(group: Sequence[Piece]) -> tuple[analysis.Panel, dict[str, Any]]:
    """The finished arms of one environment in one setting, and each arm's times and evaluation noise."""
    task = group[0].task
    arms, about = {}, {}
    for piece in group:
        arms[piece.arm.name], about[piece.arm.name] = load_arm(piece.kept)
    measured = group[0].folder.parent / "timing.json"  # not made by --quick
    timing = json.loads(measured.read_text())["seconds_per_round"] if measured.exists() else {}
    if NULL in arms and timing:
        timing[NULL] = timing["none"]  # the same program
    grid = {piece.arm.name: piece.arm.name if piece.arm.rule == "iif" else piece.arm.rule for piece in group}
    published = {}
    if task.published is not None:
        published = {m: getattr(task.published, m) for m in ("se_ave", "se_peak", "rt_peak")}
    return analysis.Panel(task.env_id, arms, task.p, task.failed, grid, published, timing), about


def write_results(
    plan: Plan,
    groups: Mapping[tuple[str, str], Sequence[Piece]],
    out: Path,
    *,
    command: str,
    seconds: float,
    quick: bool,
) -> dict[str, Any]:
    """Write reproduction.json, reproduction.csv and one picture per setting; see `host.reproduce.reproduce`."""
    rows: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    aggregate: list[dict[str, Any]] = []
    per_seed: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    parts, files = [], ["reproduction.json", "reproduction.csv"]
    seeds = next(iter(groups.values()))[0].seeds
    for setting in dict.fromkeys(name for name, _ in groups):
        panels: list[analysis.Panel] = []
        own_rows: list[dict[str, Any]] = []
        own_choices: list[dict[str, Any]] = []
        for (name, env), group in groups.items():
            if name != setting:
                continue
            panel, about = load_panel(group)
            panels.append(panel)
            own_rows += [{"setting": setting, **row} for row in analysis.arm_rows(panel)]
            own_choices += choices_of(panel, setting)
            for arm in panel.arms.values():
                where = {"setting": setting, "env": env, "arm": arm.name}
                evaluation.append({**where, **{k: about[arm.name][k] for k in _ABOUT}})
                for s, final, auc in zip(arm.seeds, arm.final_return, arm.auc, strict=True):
                    per_seed.append({**where, "seed": s, "final_test_return": final, "auc_test_return": auc})
        own_aggregate = analysis.across_environments(panels)
        analysis.reproduction_figure(out / f"reproduction_{setting}.png", panels, setting)
        files.append(f"reproduction_{setting}.png")
        parts.append(_text(setting, panels, own_rows, own_choices, own_aggregate, plan.skipped, len(seeds)))
        rows, choices = rows + own_rows, choices + own_choices
        aggregate += [{"setting": setting, **row} for row in own_aggregate]
    used = {piece.task.env_id: piece.task for piece in plan.pieces}
    document = {
        **_provenance(plan, command, seconds, quick),
        "published": {env: None if task.published is None else vars(task.published) for env, task in used.items()},
        "rows": rows,
        "choice_of_p": choices,
        "across_environments": aggregate,
        "per_seed": per_seed,
        "runs": evaluation,
        "configs": {piece.title: piece.config.to_dict() for piece in plan.pieces},
    }
    write_text(out / "reproduction.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    write_text(out / "reproduction.csv", csv_text(rows))
    tail = [f"all runs: {_total(evaluation)}", *(f"{env}: not run: {why}" for env, why in plan.skipped.items())]
    text = "\n\n".join([*parts, "\n".join([*plan.left_out, *tail])])
    return {"document": document, "text": text, "files": files, "out": out}


def write_ablation(
    plan: Plan,
    groups: Mapping[tuple[str, str], Sequence[Piece]],
    out: Path,
    *,
    command: str,
    seconds: float,
    quick: bool,
) -> dict[str, Any]:
    """Write ablation.json, ablation.csv and ablation.png; see `host.reproduce.reproduce`."""
    tables: dict[str, list[dict[str, Any]]] = {}
    per_seed, runs, parts = [], [], []
    for (_, env), group in groups.items():
        panel, about = load_panel(group)
        task = group[0].task
        # At the published p: another p of the same rule is no part of a contrast.
        arms = {
            piece.arm.rule: panel.arms[piece.arm.name]
            for piece in group
            if piece.arm.name == parse_arm(piece.arm.rule, task).name
        }
        rows = ablation.contrast_rows(env, arms, CONTRASTS, PUBLISHED, task.failed)
        if not rows:
            raise ConfigError(f"{env}: none of the arms makes a contrast; these do: {', '.join(ABLATION_ARMS)}")
        tables[f"{env}, p = {percent(task.p)}"] = rows
        for name, arm in arms.items():
            where = {"env": env, "arm": name}
            runs.append({**where, **{k: about[arm.name][k] for k in _ABOUT}})
            per_seed += [
                {**where, "seed": s, "final_test_return": final, "auc_test_return": auc}
                for s, final, auc in zip(arm.seeds, arm.final_return, arm.auc, strict=True)
            ]
    parts = [f"{title}\n\n{ablation.ablation_table(rows)}" for title, rows in tables.items()]
    parts.append("\n".join([*ablation.ablation_notes(len(plan.pieces[0].seeds)), *plan.left_out]))
    parts.append(f"all runs: {_total(runs)}")
    rows = [row for own in tables.values() for row in own]
    document = {
        **_provenance(plan, command, seconds, quick),
        "rows": rows,
        "per_seed": per_seed,
        "runs": runs,
        "configs": {piece.title: piece.config.to_dict() for piece in plan.pieces},
    }
    ablation.ablation_figure(out / "ablation.png", tables)
    write_text(out / "ablation.json", json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    write_text(out / "ablation.csv", csv_text(rows))
    files = ["ablation.json", "ablation.csv", "ablation.png"]
    return {"document": document, "text": "\n\n".join(parts), "files": files, "out": out}


def _provenance(plan: Plan, command: str, seconds: float, quick: bool) -> dict[str, Any]:
    """Where the numbers of a document come from."""
    device = jax.devices()[0]
    used = {piece.task.env_id: piece.task for piece in plan.pieces}
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "left_out": plan.left_out,
        "skipped": plan.skipped,
        "seeds": list(plan.pieces[0].seeds),
        "device": f"{device.device_kind} ({device.platform})",
        "versions": versions(),
        "seconds_this_session": seconds,
        "interval": "95 % percentile bootstrap over seeds",
        "failed": {env: {"at_most": task.failed, "means": task.failed_means} for env, task in used.items()},
    }


def choices_of(panel: analysis.Panel, setting: str) -> list[dict[str, Any]]:
    """p chosen on half of the seeds, by AUC and by SE_ave; empty where there are too few seeds or p."""
    ps = [p for p in GRID if f"iif:{p:g}" in panel.arms]
    seeds = panel.arms["none"].seeds.size
    rows = []
    for metric, value in (("difference of AUC", analysis.auc_gain), ("SE_ave %", analysis.se_ave_percent)):
        found: Choice | None = choose_p(lambda p, at, f=value: f(panel, f"iif:{p:g}", at), ps, seeds)
        if found is not None:
            row = {"setting": setting, "env": panel.env, "metric": metric}
            rows.append({**row, **found._asdict(), "gain": found.gain})
    return rows


_ABOUT = ("train_s", "eval_s", "compile_s", "wall_s", "eval_noise", "resumed", "nonfinite")


def _text(
    setting: str,
    panels: Sequence[analysis.Panel],
    rows: Sequence[Mapping[str, Any]],
    choices: Sequence[Mapping[str, Any]],
    aggregate: Sequence[Mapping[str, Any]],
    skipped: Mapping[str, str],
    seeds: int,
) -> str:
    """All tables of a setting."""
    parts = [f"Setting {setting!r}: IIF at the published best p, {seeds} seeds"]
    parts.append(analysis.headline_table(panels, rows, skipped))
    for panel in panels:
        own = [row for row in rows if row["env"] == panel.env]
        parts.append(f"{panel.env}\n\n{analysis.detail_table(own)}")
    if choices:
        parts.append(f"Choosing p\n\n{analysis.choice_table(choices)}")
    if aggregate:
        parts.append(f"Across environments (0 = failed, 1 = mean of 'none')\n\n{analysis.across_table(aggregate)}")
    means = {task.env_id: task.failed_means for task in TASKS.values()}
    parts.append("\n".join(analysis.notes(panels, seeds, means, bool(choices))))
    return "\n\n".join(parts)


def _total(runs: Sequence[Mapping[str, Any]]) -> str:
    """Training, evaluation and compilation apart."""
    total = {k: sum(run[k] for run in runs) for k in ("train_s", "eval_s", "compile_s")}
    names = {"train_s": "training", "eval_s": "evaluation", "compile_s": "compiling"}
    return ", ".join(f"{names[k]} {duration(v)}" for k, v in total.items())
