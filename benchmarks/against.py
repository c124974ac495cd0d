"""Ours against rejax, alternating in one go, as ratios of medians.

    python benchmarks/against.py --peer-python PATH/TO/rejax-env/bin/python --works W1,W3 --rounds 3 --out FILE.json

The same machine moves by tens of percent from minute to minute, so only numbers of one go are compared: for every
work the programs run in turn (ours, peer, ours pinned to no core, ...), `--rounds` times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def last_json(command: list[str]) -> dict[str, Any]:
    """Run a program in its own process; its last line of output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has rejax; without it only our filters are compared")
    parser.add_argument("--works", default="W1,W2,W3,W3x8,W4,W4x8")
    parser.add_argument("--filters", default="none", help="with commas, NAME or NAME:P; the first is the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "works": {},
    }
    for work in args.works.split(","):
        timing = ["--work", work, "--seconds", str(args.seconds), "--repeats", "2"]
        programs = {}
        for text in args.filters.split(","):
            rule, _, p = text.partition(":")
            ours = [sys.executable, str(HERE / "throughput.py"), *timing, "--json", "--filter", rule]
            programs[text] = ours + (["--p", p] if p else [])
        if args.peer_python:
            programs["rejax"] = [args.peer_python, str(HERE / "peers" / "rejax_speed.py"), *timing]
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
        for _ in range(args.rounds):
            for name, command in programs.items():
                rows[name].append(last_json(command))
        base = next(iter(programs))
        speed = {n: statistics.median(r["steps_per_s"] for r in rs) for n, rs in rows.items()}
        entry = {
            n: {
                "steps_per_s": round(speed[n]),
                "all": [round(r["steps_per_s"]) for r in rs],
                "compile_s": statistics.median(r["compile_s"] for r in rs),
                "speed_of_base_over_this": round(speed[base] / speed[n], 3),
            }
            for n, rs in rows.items()
        }
        report["works"][work] = entry
        report["versions"] = rows[base][0]["versions"]
        report["xla_flags"] = rows[base][0]["xla_flags"]
        line = ", ".join(f"{n} {e['steps_per_s']:,} ({e['compile_s']:.1f} s)" for n, e in entry.items())
        ratios = ", ".join(f"{e['speed_of_base_over_this']:.2f} x {n}" for n, e in entry.items() if n != base)
        print(f"{work}: {line}; {base} = {ratios}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
