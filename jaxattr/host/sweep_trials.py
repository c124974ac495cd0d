"""A sweep's trials in an Optuna storage: the plan, claims of several workers, results.

Every point is one Optuna trial, whatever the method. WAITING: nobody has it. RUNNING: a worker has claimed it.
COMPLETE: has an aggregate. PRUNED: stopped early, behind the others. FAIL: has none, with the reason.

Claims are made one worker at a time: under a lock beside an SQLite file, which the operating system drops when its
holder dies. (Optuna's own check of a trial's state is atomic on database servers, not in SQLite.) Each worker says
every few seconds that it is there; a claim of one that has not been heard of for `stale_after` seconds is free again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxattr.config import ConfigError
from jaxattr.host.sweep_lanes import Outcome
from jaxattr.studies.sweep import Choices, Point, Sweep, aggregate, difference, encode, points_of
from jaxattr.version import __version__

STUDY = "jaxattr-sweep"
HEARTBEAT = 5.0
"""Seconds between a worker's signs of life."""
LOCK_SECONDS = 120.0
"""How long to wait for another worker's claim to be written."""
HEARD = "heard "


@dataclass(frozen=True)
class Claim:
    """A point that is this worker's to run."""

    number: int  # of the trial
    trial_id: int  # in the storage
    point: Point
    program: int  # claims of one number run together
    width: int | None  # points that a program of this one's shape is compiled for


class Trials:
    """The trials of one sweep, shared with other workers. Use as a context manager: claims left over are given back.

    Args:
      url: of the storage, such as sqlite:///sweep.db.
      sweep: the definition; a storage with another one is refused.
      stale_after: seconds after which a silent worker counts as dead.

    Raises:
      ConfigError: the storage cannot be opened, or holds another sweep.
    """

    def __init__(self, url: str, sweep: Sweep, stale_after: float):
        self.optuna = import_optuna()
        self.sweep, self.stale_after = sweep, stale_after
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._lock_file = f"{url.removeprefix('sqlite:///')}.lock" if url.startswith("sqlite:///") else None
        self._mine: dict[int, Claim] = {}
        self._stop = threading.Event()
        self._optuna_space = {name: self._distribution(what) for name, what in sweep.space}
        with self.lock():
            self.storage = self._open_storage(url)
            self.study = self._open_study(url)

    def _open_storage(self, url: str) -> Any:
        options = {"connect_args": {"timeout": LOCK_SECONDS}} if url.startswith("sqlite") else {}
        try:
            return self.optuna.storages.RDBStorage(url, engine_kwargs=options)
        except Exception as error:  # SQLAlchemy and the drivers raise many kinds
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"storage {url} cannot be opened: {line[:160]}") from None

    def _open_study(self, url: str) -> Any:
        study = self.optuna.create_study(
            storage=self.storage, study_name=STUDY, direction=self.sweep.direction, load_if_exists=True
        )
        known = study.user_attrs
        if "digest" not in known:
            if study.get_trials(deepcopy=False):
                raise ConfigError(f"{url} has a study {STUDY!r} that no sweep of ours made: give another --storage")
            study.set_user_attr("definition", self.sweep.describe())
            study.set_user_attr("version", __version__)
            study.set_user_attr("digest", self.sweep.digest())  # last: with it, the description is whole
        elif known["digest"] != self.sweep.digest():
            what = difference(known["definition"], self.sweep)
            raise ConfigError(f"{url} holds another sweep ({what}): give another --out or --storage")
        return study

    # -- the plan --------------------------------------------------------------------------------------------------
    def plan(self, programs: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Write the points of a grid or random search, unless they are there.

        Args:
          programs: (width, positions in `points_of`) per program.
        """
        points = points_of(self.sweep)
        with self.lock():
            there = {t.user_attrs.get("point") for t in self._trials()}
            for number, (width, positions) in enumerate(programs):
                for i in positions:
                    if i in there:
                        continue
                    self.study.add_trial(
                        self.optuna.trial.create_trial(
                            state=self.optuna.trial.TrialState.WAITING,
                            params={n: encode(v) for n, v in points[i].items()},
                            distributions=self._optuna_space,
                            user_attrs={"point": i, "program": number, "width": width},
                        )
                    )

    def planned(self) -> bool:
        """Whether every point of a grid or random search is in the storage."""
        return len(self._trials()) >= self.sweep.trials

    def _distribution(self, what: Any) -> Any:
        d = self.optuna.distributions
        if isinstance(what, Choices):
            return d.CategoricalDistribution([encode(v) for v in what.values])
        if what.whole:
            return d.IntDistribution(int(what.low), int(what.high), log=what.log)
        return d.FloatDistribution(what.low, what.high, log=what.log)

    # -- claims ------------------------------------------------------------------------------------------------------
    def claim(self, programs: int = 1, *, retry: bool = False) -> list[Claim]:
        """Points for this worker: those of the first `programs` programs that have free points, or a batch of Optuna's.

        Args:
          programs: most programs.
          retry: claims of other workers are free, however recently those were heard of.
        """
        states = self.optuna.trial.TrialState
        with self.lock():
            trials = self._trials()
            self._free_stale(trials, retry)
            waiting = [t for t in self._trials() if t.state == states.WAITING]
            wanted = sorted({t.user_attrs["program"] for t in waiting})[:programs]
            chosen = [t for t in waiting if t.user_attrs["program"] in wanted]
            if not chosen and self.sweep.method == "optuna":
                chosen = self._ask(len(trials))
            claims = [c for t in chosen if (c := self._take(t)) is not None]
        for c in claims:
            self._mine[c.number] = c
        return claims

    def _ask(self, already: int) -> list[Any]:
        """A batch of new points from Optuna's sampler, not yet claimed."""
        count = min(self.sweep.batch, self.sweep.trials - already)
        # Seeded by what is there already, so that a sweep that was killed does not draw its first points again.
        seed = self.sweep.sampler_seed + already
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        asked = [self.study.ask(self._optuna_space) for _ in range(max(0, count))]
        for trial in asked:
            trial.set_user_attr("program", already)
        numbers = {t.number for t in asked}
        return [t for t in self._trials() if t.number in numbers]

    def _take(self, trial: Any) -> Claim | None:
        states = self.optuna.trial.TrialState
        if trial.state == states.WAITING and not self.storage.set_trial_state_values(trial._trial_id, states.RUNNING):
            return None
        self.storage.set_trial_user_attr(trial._trial_id, "worker", self.worker)
        attrs = trial.user_attrs
        return Claim(trial.number, trial._trial_id, self.point_of(trial), attrs["program"], attrs.get("width"))

    def _free_stale(self, trials: Sequence[Any], retry: bool) -> None:
        """Claims of workers that are silent (or all but ours) become free."""
        states, silent = self.optuna.trial.TrialState, self._silence()
        for t in trials:
            owner = t.user_attrs.get("worker")
            if t.state != states.RUNNING or owner == self.worker:
                continue
            # Without an owner its worker died between two writes of its claim, inside the lock.
            if owner is None or retry or silent(owner) > self.stale_after:
                self.storage.set_trial_state_values(t._trial_id, states.WAITING)

    def _silence(self) -> Any:
        heard = {k.removeprefix(HEARD): v for k, v in self.study.user_attrs.items() if k.startswith(HEARD)}
        now = time.time()  # workers' clocks have to agree to within `stale_after`
        return lambda worker: now - heard.get(worker, 0.0)

    def others(self) -> tuple[int, float]:
        """Points that other workers have claimed, and the seconds since the most silent of those was heard of."""
        silent, states = self._silence(), self.optuna.trial.TrialState
        owners = [t.user_attrs.get("worker") for t in self._trials() if t.state == states.RUNNING]
        owners = [o for o in owners if o != self.worker]
        return len(owners), max((silent(o) for o in owners), default=0.0)

    def left(self) -> int:
        """Programs that nobody has begun, as far as is known."""
        trials, states = self._trials(), self.optuna.trial.TrialState
        waiting = {t.user_attrs["program"] for t in trials if t.state == states.WAITING}
        new = self.sweep.trials - len(trials) if self.sweep.method == "optuna" else 0
        return len(waiting) + -(-new // self.sweep.batch)

    # -- results -----------------------------------------------------------------------------------------------------
    def finish(self, claim: Claim, outcome: Outcome) -> bool:
        """Write what became of a claim; False if another worker has taken it over in the meantime."""
        with self.lock():
            return self._finish(claim, outcome)

    def _finish(self, claim: Claim, outcome: Outcome) -> bool:
        self._mine.pop(claim.number, None)
        now = self.storage.get_trial(claim.trial_id)
        if now.state.is_finished() or now.user_attrs["worker"] != self.worker:
            return False
        value, low, high = aggregate(self.sweep, outcome.per_seed)
        reason = outcome.behind or "; ".join(outcome.reasons)
        states = self.optuna.trial.TrialState
        if value != value:
            state, reason = states.FAIL, reason or "no seed has a value" * (not any(outcome.failed))
        else:
            state = states.COMPLETE if outcome.behind is None else states.PRUNED
        attrs = {**asdict(outcome), "value": value, "low": low, "high": high, "reason": reason}
        for name, x in attrs.items():
            x = None if isinstance(x, float) and x != x else x  # not every database stores a NaN
            self.storage.set_trial_user_attr(claim.trial_id, name, x)
        if state == states.PRUNED:
            self.storage.set_trial_intermediate_value(claim.trial_id, outcome.rounds, value)
        # The state comes last: a trial that counts as finished has all of its results.
        self.storage.set_trial_state_values(claim.trial_id, state, [value] if state == states.COMPLETE else None)
        return True

    def refuse(self, claim: Claim, reason: str) -> None:
        """A point that cannot be run at all."""
        self.storage.set_trial_user_attr(claim.trial_id, "reason", reason)
        self.storage.set_trial_state_values(claim.trial_id, self.optuna.trial.TrialState.FAIL)
        self._mine.pop(claim.number, None)

    def rows(self) -> list[dict[str, Any]]:
        """All trials as plain values: number, state, point, and what `Outcome` and `finish` say (where finished)."""
        return [
            {**t.user_attrs, "number": t.number, "state": t.state.name.lower(), "settings": self.point_of(t)}
            for t in self._trials()
        ]

    def point_of(self, trial: Any) -> Point:
        """A trial's settings, as `Config` takes them."""
        point = {}
        for name, what in self.sweep.space:
            value = trial.params[name]
            if isinstance(what, Choices):
                value = next(v for v in what.values if encode(v) == value)
            point[name] = value
        return point

    def _trials(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False)

    # -- being one of several workers ----------------------------------------------------------------------------------
    def __enter__(self) -> Trials:
        """Give signs of life from now on."""
        self._beat()
        threading.Thread(target=self._beat_on, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Give back what was claimed and not finished."""
        self._stop.set()
        self.release()
        self.storage.remove_session()

    def release(self) -> None:
        """Claims of this worker that are not finished are free again."""
        if not self._mine:
            return
        with self.lock():
            for number in list(self._mine):
                claim = self._mine.pop(number)
                now = self.storage.get_trial(claim.trial_id)
                if not now.state.is_finished() and now.user_attrs["worker"] == self.worker:
                    self.storage.set_trial_state_values(claim.trial_id, self.optuna.trial.TrialState.WAITING)

    def _beat(self) -> None:
        self.study.set_user_attr(HEARD + self.worker, time.time())

    def _beat_on(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with contextlib.suppress(Exception):  # a busy storage: the next one will do
                self._beat()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Alone among the workers on an SQLite storage; no more than Optuna's own checks on a database server."""
        if self._lock_file is None:
            yield
            return
        Path(self._lock_file).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self._lock_file, timeout=LOCK_SECONDS, isolation_level=None)) as held:
            try:
                held.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                raise ConfigError(f"{self._lock_file}: no lock after {LOCK_SECONDS:g} s ({error})") from None
            try:
                yield
            finally:
                held.execute("ROLLBACK")


def import_optuna() -> Any:
    """Optuna, quiet.

    Raises:
      ConfigError: it is not installed; says what to install.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError("a sweep needs optuna: pip install 'jaxattr[sweep]'") from None
    import warnings

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
