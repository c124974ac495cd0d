"""Numbers and rows as text: aligned tables for a terminal, CSV, and what JSON can hold."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def number(value: float, sign: bool = False) -> str:
    """Three digits; `-` where there is no value."""
    return f"{value:{'+' if sign else ''}.3g}" if math.isfinite(value) else "-"


def percent(share: float) -> str:
    """0.125 -> `12.5 %`; `-` where there is no value."""
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"


def interval(low: float, high: float) -> str:
    """`[low, high]`, or words where there is none."""
    return f"[{number(low, True)}, {number(high, True)}]" if math.isfinite(low) else "[no interval: one seed]"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells (the first is the head) -> a table in markdown, aligned for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    shown = [lines[0], rule, *lines[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in shown)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys -> CSV; an empty cell where a number does not exist."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows([{k: "" if v is None else v for k, v in plain(row).items()} for row in rows])
    return text.getvalue()


def plain(value: Any) -> Any:
    """What JSON can hold: numpy becomes lists and numbers, NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
