"""The runs behind `jaxattr reproduce`: one per arm, kept when finished, continued when not; timing and progress."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.analysis.compare import ArmResult
from jaxattr.analysis.tables import plain
from jaxattr.config import Config, ConfigError, diff
from jaxattr.envs.registry import make
from jaxattr.evaluate import STOCHASTIC
from jaxattr.host.checkpoint import write_text
from jaxattr.host.progress import Progress
from jaxattr.host.run import Run, Stopped
from jaxattr.host.runner import CHUNK, Session
from jaxattr.lanes import place_lanes
from jaxattr.studies.reproduction import Arm, Task
from jaxattr.train import compile_chunk, init_state, lane_settings, make_update_step

BURSTS, BURST_SECONDS = 3, 1.0
"""Timing: bursts per arm, alternately, and about how long one takes."""
TIMED = ("none", "iif", "random")


@dataclass(frozen=True)
class Piece:
    """One run: all seeds of an arm of an environment in a setting."""

    setting: str
    task: Task
    arm: Arm
    config: Config
    seeds: tuple[int, ...]
    folder: Path

    @property
    def title(self) -> str:
        """For a line."""
        return f"{self.setting} {self.task.env_id} {self.arm.name}"

    @property
    def kept(self) -> Path:
        """Its result, once finished."""
        return self.folder / "arm.json"

    def describe(self) -> dict[str, Any]:
        """What must be the same for a result to count."""
        return {"env": self.task.env_id, "seeds": list(self.seeds), "config": self.config.to_dict()}

    def begun(self) -> bool:
        """Whether there is something to continue.

        Raises:
          ConfigError: what is there was made with other settings.
        """
        saved = self.kept if self.kept.exists() else self.folder / "config.json"
        if not saved.exists():
            return False
        there = json.loads(saved.read_text())
        old = {"env": there["env"], "seeds": there["seeds"], **Config.from_dict(there["config"]).to_dict()}
        new = self.describe()
        changed = diff(old, {**new, **new.pop("config")})
        if changed:
            raise ConfigError(f"{self.folder}: was run with other settings ({'; '.join(changed)}); use another --out")
        return True


# -- one piece -------------------------------------------------------------------------------------------------------
def run_piece(piece: Piece, job: Job) -> None:
    """Train one arm, or continue it, and keep its result in `arm.json`."""
    clock = time.perf_counter()
    job.start(piece)
    resume = piece.begun()
    options: dict[str, Any] = {"seeds": piece.seeds}
    if resume and not Session(piece.task.env_id, piece.config, **options).exact_resume:
        job.say(f"{piece.title}: cannot be continued exactly, starts again")
        resume = False
    if not resume:
        shutil.rmtree(piece.folder, ignore_errors=True)  # at most an unfinished run of this very piece
    session = Session(piece.task.env_id, piece.config, out=piece.folder, resume=resume, **options)
    try:
        run = session.run(callback=lambda info: job.advance(info.update / info.total_updates))
    except Stopped as stopped:
        run = stopped.run
    run._replay = None  # frees the compiled program before the next arm
    wall = time.perf_counter() - clock
    document = {
        **piece.describe(),
        "setting": piece.setting,
        "arm": piece.arm.name,
        "resumed": resume,
        "wall_s": wall,
        **{name: run.summary[name] for name in ("train_s", "eval_s", "compile_s")},
        "eval_noise": _noise(run.evaluations),
        "nonfinite": run.summary["nonfinite"],
        "result": vars(result_of(piece.arm.name, run)),
    }
    write_text(piece.kept, json.dumps(plain(document), allow_nan=False) + "\n")
    job.finish(piece, wall, document)


def result_of(name: str, run: Run) -> ArmResult:
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


def _noise(evaluations: Mapping[int, Any]) -> float:
    """Standard error of one evaluated point of one seed: sd over episodes / sqrt(E), the median over points."""
    points = [x[:, STOCHASTIC] for x in evaluations.values() if x.shape[-1] > 1]
    errors = [x.std(axis=1, ddof=1) / np.sqrt(x.shape[1]) for x in points]
    return float(np.nanmedian(np.concatenate(errors))) if errors else float("nan")


# -- timing ----------------------------------------------------------------------------------------------------------
def measure_group(group: Sequence[Piece], job: Job) -> None:
    """Seconds per round of none, iif and random at the published p, alternately; kept in `timing.json`.

    Each arm's own run is timed while other arms wait their turn, at another minute of a busy machine; bursts taken in
    turn see the same machine. Every arm starts fresh and goes on from burst to burst.
    """
    wanted = {f"{rule}:{group[0].task.p:g}" if rule != "none" else rule for rule in TIMED}
    pieces = [piece for piece in group if piece.arm.name in wanted]
    path = group[0].folder.parent / "timing.json"
    names = [piece.arm.name for piece in pieces]
    if path.exists() and json.loads(path.read_text())["arms"] == names:
        return
    job.say(f"{group[0].setting} {group[0].task.env_id}: timing {', '.join(names)} alternately")
    bursts = [make_burst(piece) for piece in pieces]
    seconds = [[burst() for burst in bursts] for _ in range(BURSTS)]
    content = {
        "arms": names,
        "seconds_per_round": dict(zip(names, np.median(seconds, axis=0).tolist(), strict=True)),
        "bursts": seconds,
        "lanes": len(group[0].seeds),
    }
    write_text(path, json.dumps(content) + "\n")


def make_burst(piece: Piece) -> Callable[[], float]:
    """A function that trains a few rounds of all lanes and returns seconds per round, without compilation."""
    lanes = len(piece.seeds)
    step = make_update_step(make(piece.task.env_id, piece.config.env_args), piece.config)
    state = place_lanes(init_state(step, piece.seeds), lanes)
    settings = place_lanes(lane_settings(piece.config, lanes), lanes)
    # The same length as in the run: the same program, which need not be compiled again.
    chunk = compile_chunk(step, state, settings, min(CHUNK, piece.config.total_updates))
    held = [jax.block_until_ready(chunk(state, settings, jnp.int32(1)))[0]]
    begin = time.perf_counter()
    held = [jax.block_until_ready(chunk(held[0], settings, jnp.int32(1)))[0]]
    rounds = max(1, min(8, int(BURST_SECONDS / (time.perf_counter() - begin))))

    def burst() -> float:
        begin = time.perf_counter()
        held[0] = jax.block_until_ready(chunk(held[0], settings, jnp.int32(rounds)))[0]
        return (time.perf_counter() - begin) / rounds

    return burst


# -- progress --------------------------------------------------------------------------------------------------------
class Job:
    """Progress of the whole job in thousandths of its expected time, so that unequal pieces give a fair time left.

    A piece takes as long as the last finished one of its setting and environment; before there is one, a rough guess
    per environment, scaled by how the guesses did so far.
    """

    def __init__(self, pieces: Sequence[Piece], quiet: bool):
        self.waiting = list(pieces)
        self.count = len(self.waiting)
        self.progress = Progress("reproduce", 1000, quiet, unit="part")
        self.measured: dict[tuple[str, str], float] = {}
        self.guessed, self.took = 0.0, 0.0
        self.begin = self.piece_begin = time.monotonic()
        self.done = 0
        self.current: Piece | None = None

    def __enter__(self) -> Job:
        self.progress.__enter__()
        self.progress.begin(0)
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.__exit__(*exc)

    def say(self, line: str) -> None:
        """One line."""
        self.progress.say(line)

    def start(self, piece: Piece) -> None:
        """A piece begins."""
        self.waiting.remove(piece)
        self.current, self.piece_begin = piece, time.monotonic()

    def advance(self, share: float) -> None:
        """This share of the current piece is done."""
        assert self.current is not None
        spent = time.monotonic() - self.piece_begin
        whole = max(self._expected(self.current), spent)
        if share > 0.2:  # by now its own pace says more, compilation included
            whole = spent / share
        self._show(whole - spent, f"{self.current.title}, run {self.count - len(self.waiting)} of {self.count}")

    def finish(self, piece: Piece, wall: float, document: Mapping[str, Any]) -> None:
        """A piece is finished; says so."""
        self.measured[piece.setting, piece.task.env_id] = wall
        self.guessed += _guess(piece)
        self.took += wall
        final = document["result"]["test_return"][:, -1]
        mean = float(np.nanmean(final)) if np.isfinite(final).any() else float("nan")
        self.say(
            f"{piece.title}: final return {mean:.4g} over {len(piece.seeds)} seeds; {piece.config.total_updates} "
            f"rounds, training {document['train_s']:.1f} s, evaluation {document['eval_s']:.1f} s, compiling "
            f"{document['compile_s']:.1f} s"
        )
        self._show(0.0, f"{self.count - len(self.waiting)} of {self.count} runs")

    def _expected(self, piece: Piece) -> float:
        scale = self.took / self.guessed if self.guessed else 1.0
        return self.measured.get((piece.setting, piece.task.env_id), _guess(piece) * scale)

    def _show(self, left: float, note: str) -> None:
        spent = time.monotonic() - self.begin
        left += sum(map(self._expected, self.waiting))
        self.done = max(self.done, int(1000 * spent / max(spent + left, 1e-9)))
        self.progress.update(self.done, note)


def _guess(piece: Piece) -> float:
    """Rough seconds of a piece."""
    records = piece.config.total_updates * piece.config.records_per_round * len(piece.seeds)
    return 10 + piece.task.pace * records / 2048


def folder_name(name: str) -> str:
    """An environment or arm as the name of a folder."""
    return name.replace("/", "_").replace(" (", "_").replace(" ", "_").replace(")", "").replace(":", "_")
