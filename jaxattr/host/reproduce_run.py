"""The runs behind `jaxattr reproduce`: one per arm, kept when finished, continued when not; timing and progress."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.analysis.tables import plain
from jaxattr.config import Config, ConfigError, diff
from jaxattr.envs.registry import make
from jaxattr.evaluate import STOCHASTIC
from jaxattr.host.checkpoint import write_text
from jaxattr.host.compare import arm_result
from jaxattr.host.progress import Progress
from jaxattr.host.run import Stopped
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
        old = {**Config.from_dict(there["config"]).to_dict(), "env": there["env"], "seeds": there["seeds"]}
        mine = self.describe()
        changed = diff(old, {**mine.pop("config"), **mine})
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
        run = session.run(callback=lambda info: job.advance(piece, info.update / info.total_updates))
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
        "result": vars(arm_result(piece.arm.name, run)),
    }
    write_text(piece.kept, json.dumps(plain(document), allow_nan=False) + "\n")
    job.finish(piece, wall, document)


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
    """Runs pieces and shows progress of the whole job, in thousandths of its expected time: a fair time left.

    A piece is expected to take as long as the last finished one of its setting and environment; before there is one, a
    rough guess per environment, scaled by how the guesses did so far.
    """

    def __init__(self, pieces: Sequence[Piece], quiet: bool, workers: int = 1):
        self.pieces, self.workers = list(pieces), workers
        self.progress = Progress("reproduce", 1000, quiet, unit="part")
        self.begun: dict[str, float] = {}  # title -> when
        self.left: dict[str, float] = {}  # title of a piece that runs -> expected seconds left
        self.finished: set[str] = set()
        self.measured: dict[tuple[str, str], float] = {}
        self.guessed, self.took = 0.0, 0.0
        self.begin, self.done, self.stop = time.monotonic(), 0, False
        self.lock = threading.Lock()

    def __enter__(self) -> Job:
        self.progress.__enter__()
        self.progress.begin(0)
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.__exit__(*exc)

    def say(self, line: str) -> None:
        """One line."""
        self.progress.say(line)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Run these pieces, `workers` at a time; an error or an interrupt in one ends them all."""
        if self.workers == 1:
            for piece in pieces:
                run_piece(piece, self)
            return
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(run_piece, piece, self) for piece in pieces]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self.stop = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def start(self, piece: Piece) -> None:
        """A piece begins."""
        with self.lock:
            self.begun[piece.title] = time.monotonic()

    def advance(self, piece: Piece, share: float) -> None:
        """This share of a piece is done.

        Raises:
          KeyboardInterrupt: another piece failed or was interrupted.
        """
        if self.stop:
            raise KeyboardInterrupt
        with self.lock:
            spent = time.monotonic() - self.begun[piece.title]
            # Soon its own pace says more than a guess, compilation included.
            whole = spent / share if share > 0.2 else max(self._expected(piece), spent)
            self.left[piece.title] = whole - spent
            self._show(f"{piece.title}, {len(self.finished)} of {len(self.pieces)} runs finished")

    def finish(self, piece: Piece, wall: float, document: Mapping[str, Any]) -> None:
        """A piece is finished; says so."""
        final = document["result"]["test_return"][:, -1]
        mean = float(np.nanmean(final)) if np.isfinite(final).any() else float("nan")
        with self.lock:
            self.measured[piece.setting, piece.task.env_id] = wall
            self.guessed += _guess(piece)
            self.took += wall
            self.left.pop(piece.title, None)
            self.finished.add(piece.title)
            self.say(
                f"{piece.title}: final return {mean:.4g} over {len(piece.seeds)} seeds; {piece.config.total_updates} "
                f"rounds, training {document['train_s']:.1f} s, evaluation {document['eval_s']:.1f} s, compiling "
                f"{document['compile_s']:.1f} s"
            )
            self._show(f"{len(self.finished)} of {len(self.pieces)} runs finished")

    def _expected(self, piece: Piece) -> float:
        scale = self.took / self.guessed if self.guessed else 1.0
        return self.measured.get((piece.setting, piece.task.env_id), _guess(piece) * scale)

    def _show(self, note: str) -> None:
        spent = time.monotonic() - self.begin
        waiting = [piece for piece in self.pieces if piece.title not in self.begun]
        left = (sum(self.left.values()) + sum(map(self._expected, waiting))) / self.workers
        last = 1000 if len(self.finished) == len(self.pieces) else 999
        self.done = max(self.done, min(last, int(1000 * spent / max(spent + left, 1e-9))))
        self.progress.update(self.done, note)


def _guess(piece: Piece) -> float:
    """Rough seconds of a piece."""
    records = piece.config.total_updates * piece.config.records_per_round * len(piece.seeds)
    return 10 + piece.task.pace * records / 2048


def folder_name(name: str) -> str:
    """An environment or arm as the name of a folder."""
    return name.replace("/", "_").replace(" (", "_").replace(" ", "_").replace(")", "").replace(":", "_")
