"""Progress with time left, on stderr: a live bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

LINE_SECONDS = 5.0
CALL_SECONDS = 1.0
"""How long one call of a compiled program should take: often enough for progress, rarely enough to cost nothing."""


def rounds_per_call(pace: float) -> int:
    """A few rounds until the pace (seconds per round, 0 = unknown) is known, then about `CALL_SECONDS` worth."""
    return 2 if pace == 0 else max(1, int(CALL_SECONDS / pace))


class Progress:
    """Progress of one run, or of a job in another `unit`. Use as a context manager; `quiet` shows nothing at all."""

    def __init__(self, title: str, total: int, quiet: bool = False, unit: str = "round"):
        self.title, self.total, self.quiet, self.unit = title, total, quiet, unit
        self._bar: Any = None
        self._task: Any = None
        self._last = self._begin = time.monotonic()
        self._first = 0

    def __enter__(self) -> Progress:
        """Start showing."""
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop showing."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line about what happens (compiling, resuming, a stopped seed)."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def begin(self, done: int) -> None:
        """The clock for the time left starts now, with `done` rounds already finished."""
        self._begin, self._first = time.monotonic(), done
        if self._bar is not None:
            self._bar.reset(self._task, total=self.total, completed=done, note="")

    def update(self, done: int, note: str) -> None:
        """`done` of `total` rounds are finished."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS or done == self.total:
            self._last = now
            rate = (now - self._begin) / max(done - self._first, 1)
            left = f", {duration(rate * (self.total - done))} left" if done < self.total else ""
            print(f"{self.title}: {self.unit} {done}/{self.total}, {note}{left}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    if not math.isfinite(seconds):
        return "?"
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min"
