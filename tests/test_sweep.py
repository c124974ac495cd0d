"""Sweeps: definitions, points and programs, one storage for many workers, kills, failures, executors, pictures."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxattr
from jaxattr.analysis.sweep import overlap_note, render_ranking, trial_table
from jaxattr.config import TRACED, ConfigError
from jaxattr.host import sweep as command
from jaxattr.host import sweep_lanes
from jaxattr.host.cli import main
from jaxattr.host.sweep import run_sweep
from jaxattr.studies.sweep import (
    Interval,
    aggregate,
    chunks_of,
    group_by_shape,
    lane_values,
    points_of,
    rung_rounds,
    shape_of,
    survivors,
)
from jaxattr.studies.sweep_file import parse_sweep
from jaxattr.update import UpdateStep

pytest.importorskip("optuna")
from jaxattr.host.sweep_trials import Trials

SMALL = {
    "num_envs": 4, "num_steps": 16, "minibatch_size": 16, "num_epochs": 2, "hidden": [8, 8, 8], "activation": "relu",
    "lr_schedule": "constant", "eval_episodes": 8,
}  # fmt: skip
RATES = [1e-3, 3e-3, 1e-2, 1e6]


def definition(**changes):
    """Eight settings of numbers x 4 seeds: one program."""
    values = {
        "env": "probe/obs_policy",
        "seeds": 4,
        "rounds": 6,
        "fixed": SMALL,
        "sweep": {"learning_rate": RATES, "clip_range": [0.1, 0.3]},
    }
    return {**values, **changes}


def toml(values):
    """Enough TOML for these definitions."""
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in values.items() if k not in tables]
    for name, table in tables.items():
        lines.append(f"[{name}]")
        for k, v in table.items():
            inner = "{" + ", ".join(f"{a} = {json.dumps(b)}" for a, b in v.items()) + "}" if isinstance(v, dict) else 0
            lines.append(f"{k} = {inner or json.dumps(v)}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The eight settings in one go, with the number of compiled programs and of traces of the update step."""
    out, counts = tmp_path_factory.mktemp("sweep") / "whole", {"programs": 0, "traces": 0}
    make_chunk, round_ = sweep_lanes.make_chunk, UpdateStep.round

    def counted_chunk(*args):
        counts["programs"] += 1
        return make_chunk(*args)

    def counted_round(*args):
        counts["traces"] += 1
        return round_(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_lanes, "make_chunk", counted_chunk)
        patch.setattr(UpdateStep, "round", counted_round)
        result = run_sweep(parse_sweep(definition(lanes_per_program=32)), out)
    return {**result, "out": out, **counts}


@pytest.fixture
def fake(monkeypatch):
    """Programs that compute nothing: a seed's metric is the point's learning rate. Returns the points that were run."""
    ran = []

    def run(self, points, width=None, watch=None):
        ran.append([dict(p) for p in points])
        seeds = len(self.sweep.seeds)
        outcomes = []
        for p in points:
            bad = p["learning_rate"] >= 1
            values = [None if bad and s == 0 else p["learning_rate"] + s for s in range(seeds)]
            outcomes.append(
                sweep_lanes.Outcome(
                    per_seed=values,
                    reasons=["seed 0: non-finite reward in update 2"] * bad,
                    failed=[bad and s == 0 for s in range(seeds)],
                    behind=None,
                    rounds=6,
                    steps=[64, 128],
                    curve=[[1.0, None]] * seeds,
                    curve_of="test return",
                    seconds=0.1,
                )
            )
        return outcomes

    monkeypatch.setattr(sweep_lanes.Programs, "run", run)
    return ran


# -- definitions -----------------------------------------------------------------------------------------------------
BAD = {
    "unknown name": ({"sampler": "tpe"}, ["'sampler'", "'sampler_seed'"]),
    "unknown swept setting": ({"sweep": {"learning_rat": [1.0]}}, ["'learning_rat'", "'learning_rate'", "[sweep]"]),
    "unknown fixed setting": ({"fixed": {"num_env": 4}}, ["'num_env'", "'num_envs'", "[fixed]"]),
    "unknown environment": ({"env": "probe/obs_polic"}, ["probe/obs_polic", "probe/obs_policy"]),
    "no environment": ({"env": ""}, ["no environment"]),
    "unknown preset": ({"preset": "tund"}, ["'tund'", "'tuned'"]),
    "unknown method": ({"method": "gird"}, ["method", "grid, random, optuna"]),
    "unknown metric": ({"metric": "return"}, ["metric", "final_test_return"]),
    "unknown aggregate": ({"aggregate": "best"}, ["aggregate", "iqm"]),
    "value out of range": ({"sweep": {"gamma": [0.9, 1.1]}}, ["gamma is 1.1", "[0, 1]"]),
    "interval out of range": ({"method": "random", "trials": 2, "sweep": {"p": {"low": 0.1, "high": 2.0}}}, ["p is 2"]),
    "unknown filter": ({"sweep": {"filter": ["none", "iff"]}}, ["'iff'", "'iif'"]),
    "sizes do not divide": (
        {"fixed": {"num_envs": 4, "num_steps": 16}, "sweep": {"minibatch_size": [16, 24]}},
        ["4 * 16 = 64", "minibatch_size = 24"],
    ),
    "interval in a grid": ({"sweep": {"gamma": {"low": 0.9, "high": 0.99}}}, ["gamma", "grid", "list"]),
    "no list": ({"sweep": {"gamma": 0.9}}, ["gamma is 0.9", "list"]),
    "same value twice": ({"sweep": {"gamma": [0.9, 0.9]}}, ["each once"]),
    "empty interval": (
        {"method": "random", "trials": 2, "sweep": {"gamma": {"low": 0.9, "high": 0.9}}},
        ["low < high"],
    ),
    "log from 0": (
        {"method": "random", "trials": 2, "sweep": {"ent_coef": {"low": 0.0, "high": 0.1, "log": True}}},
        ["ent_coef", "above 0"],
    ),
    "interval of words": ({"method": "random", "trials": 2, "sweep": {"filter": {"low": 0, "high": 1}}}, ["no number"]),
    "unknown name in an interval": (
        {"method": "random", "trials": 2, "sweep": {"gamma": {"lo": 0.9, "high": 1.0}}},
        ["'lo'", "'low'"],
    ),
    "no trials": ({"method": "random"}, ["trials"]),
    "trials of a grid": ({"trials": 4}, ["trials", "grid"]),
    "fixed and swept": ({"sweep": {"num_envs": [4, 8]}, "rounds": 6}, ["num_envs", "fixed and swept"]),
    "rounds of different length": (
        {"fixed": {"hidden": [8]}, "sweep": {"num_envs": [4, 8]}},
        ["num_envs", "total_steps"],
    ),
    "rounds and steps": ({"total_steps": 640}, ["rounds and total_steps"]),
    "no seeds": ({"seeds": 0}, ["seeds is 0"]),
    "same seed twice": ({"seeds": [1, 1]}, ["each once"]),
    "fewer lanes than seeds": ({"lanes_per_program": 3}, ["lanes_per_program is 3", "4 seeds"]),
    "rung after the end": ({"halving": {"rungs": [1.5]}}, ["halving.rungs", "(0, 1)"]),
    "eta of 1": ({"halving": {"eta": 1}}, ["halving.eta"]),
    "word for a number": ({"fixed": {**SMALL, "normalize_obs": "yes"}}, ["normalize_obs", "true or false"]),
    "nothing swept": ({"sweep": {}}, ["[sweep]"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_definitions_are_one_line_before_anything_is_made(case, capsys, monkeypatch, tmp_path):
    changes, wanted = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_lanes, "make_chunk", None)  # nothing may compile
    Path("sweep.toml").write_text(toml(definition(**changes)))
    assert main(["sweep", "sweep.toml", "--quiet"]) == 2
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1, line
    assert all(word in line for word in wanted), line
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.toml"]


@pytest.mark.parametrize(("text", "word"), [(None, "no sweep definition"), ("env = ", "not readable")])
def test_a_file_that_is_none(text, word, capsys, tmp_path):
    file = tmp_path / "sweep.toml"
    if text is not None:
        file.write_text(text)
    assert main(["sweep", str(file)]) == 2
    assert word in capsys.readouterr().err


def test_the_shipped_definition_is_one_program_of_64_settings():
    sweep = command.read_sweep(Path(__file__).parents[1] / "benchmarks" / "sweeps" / "cartpole.toml")
    points = points_of(sweep)
    assert len(points) == sweep.trials == 64
    assert len(sweep.seeds) == 4
    assert len(group_by_shape(sweep, points)) == 1


def test_missing_optuna_is_one_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "sweep.toml").write_text(toml(definition()))
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'jaxattr[sweep]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- points, programs, judging ---------------------------------------------------------------------------------------
def test_a_grid_has_every_combination_the_last_setting_fastest():
    points = points_of(parse_sweep(definition()))
    assert [p["learning_rate"] for p in points] == [r for r in RATES for _ in range(2)]
    assert [p["clip_range"] for p in points] == [0.1, 0.3] * 4


def test_random_points_are_inside_and_repeat():
    space = {
        "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
        "gamma": {"low": 0.9, "high": 0.99},
        "num_epochs": {"low": 1, "high": 3},
        "filter": ["none", "iif"],
    }
    fixed = {k: v for k, v in SMALL.items() if k != "num_epochs"}
    values = definition(method="random", trials=200, sweep=space, fixed=fixed)
    points = points_of(parse_sweep(values))
    assert points == points_of(parse_sweep(values))
    assert points != points_of(parse_sweep({**values, "sampler_seed": 1}))
    rates = np.array([p["learning_rate"] for p in points])
    assert rates.min() >= 1e-4
    assert rates.max() <= 1e-2
    assert 0.35 < np.mean(rates < 1e-3) < 0.65  # half of a log scale lies below its middle
    epochs = [p["num_epochs"] for p in points]
    assert {epochs.count(k) > 40 for k in (1, 2, 3)} == {True}
    assert all(isinstance(e, int) for e in epochs)
    assert parse_sweep(values).space[2][1] == Interval(1, 3, False, True)


def test_traced_settings_never_split_a_program_and_others_do():
    sweep = parse_sweep(definition())
    lower = {"learning_rate": 0.1, "max_grad_norm": None, "p": 1.0, "gamma": 0.5}
    for name in TRACED:
        value = lower.get(name, 0.25)
        expect = name == "value_clip_range"  # whether to clip at all is compiled in
        assert (shape_of(sweep.config.replace(**{name: value})) != shape_of(sweep.config)) == expect, name
    assert shape_of(sweep.config.replace(num_epochs=3)) != shape_of(sweep.config)
    mixed = parse_sweep(definition(sweep={"ent_coef": [0.0, 0.1], "filter": ["none", "iif"]}))
    assert group_by_shape(mixed, points_of(mixed)) == [[0, 2], [1, 3]]


def test_chunks_have_one_width_and_lose_nothing():
    for count in range(1, 40):
        for most in range(1, 12):
            width, chunks = chunks_of(count, most)
            assert [i for c in chunks for i in c] == list(range(count))
            assert width <= most
            assert all(0 < len(c) <= width for c in chunks)
            assert len(chunks) == math.ceil(count / most)


def test_lanes_are_points_times_seeds():
    sweep = parse_sweep(definition(sweep={"learning_rate": [0.1, 0.2], "max_grad_norm": ["none", 1.0]}))
    seeds, lanes = lane_values(sweep.config, points_of(sweep)[:2], (5, 7))
    assert seeds == [5, 7, 5, 7]
    assert lanes == {"learning_rate": [0.1] * 4, "max_grad_norm": [math.inf, math.inf, 1.0, 1.0]}


def test_aggregates_by_hand():
    sweep = lambda name: parse_sweep(definition(aggregate=name))
    values = [1.0, 2.0, 3.0, 100.0]
    for name, expected in (("iqm", 2.5), ("mean", 26.5), ("median", 2.5), ("min", 1.0)):
        value, low, high = aggregate(sweep(name), values)
        assert value == expected
        assert low <= value <= high
    assert all(map(math.isnan, aggregate(sweep("min"), [1.0, None, 3.0, 4.0])))  # not the best of those that are left


def test_survivors_of_a_rung():
    up, down = parse_sweep(definition()), parse_sweep(definition(direction="minimize"))
    values = [3.0, math.nan, 5.0, 1.0, 3.0]
    assert survivors(up, values, 2.0) == [0, 2]
    assert survivors(down, values, 2.0) == [0, 3]
    assert survivors(up, [math.nan] * 2, 2.0) == []
    assert rung_rounds(up.halving, 10) == []
    halving = parse_sweep(definition(halving={"rungs": [0.01, 0.25, 0.26, 0.99]})).halving
    assert rung_rounds(halving, 10) == [2, 3]


# -- one program -----------------------------------------------------------------------------------------------------
def test_all_numbers_run_in_one_program_that_is_compiled_once(whole):
    assert whole["programs"] == 1
    assert whole["traces"] == 2  # of one program: its shapes, and its body
    assert len(whole["trials"]) == 8


def test_a_lane_is_what_a_run_of_its_own_gives(whole):
    trial = whole["trials"][3]  # learning rate 3e-3, clip range 0.3
    sweep = parse_sweep(definition())
    run = jaxattr.train("probe/obs_policy", sweep.config_of(trial["settings"]), seeds=(2, 3))
    assert np.allclose(run.summary["final_test_return"], trial["per_seed"][2:])
    assert np.allclose(run.metrics["return_mean"].T, np.array(trial["curve"])[2:], rtol=1e-5)


def test_t41_a_diverged_setting_is_reported_and_never_best(whole):
    """Eight settings x 4 seeds, some with learning rate 1e6."""
    failed = [t for t in whole["trials"] if t["state"] == "fail"]
    assert [t["settings"]["learning_rate"] for t in failed] == [1e6, 1e6]
    for t in failed:
        assert "seed 0: non-finite parameters in update 1" in t["reason"]
        assert t["reason"] in whole["table"]
    rows = list(csv.DictReader((whole["out"] / "trials.csv").open()))
    assert [r["rank"] for r in rows] == ["1", "2", "3", "4", "5", "6", "", ""]
    assert {r["learning_rate"] for r in rows if not r["rank"]} == {"1e+06"}
    assert "iqm of final_test_return" in whole["table"]  # the aggregate is named
    for row, t in zip(rows[:6], sorted(whole["trials"][:6], key=lambda t: -t["value"]), strict=True):
        assert float(row["aggregate"]) == t["value"]
    assert all(float(r[f"metric_seed_{s}"]) >= 0 for r in rows[:6] for s in range(4))  # every seed's value is kept
    assert all(r["failed_seeds"] == "4" for r in rows[6:])


def test_several_programs_give_the_same_and_a_kill_repeats_nothing(whole, tmp_path, monkeypatch):
    """Killed inside the third of four programs, and again between two: the table is that of one go."""
    sweep, ran, stop = parse_sweep(definition(lanes_per_program=8)), [], {"after": 2}
    programs, run = [], sweep_lanes.Programs.run

    def interrupted(self, points, width=None, watch=None):
        def look(done, note):
            watch(done, note)
            if done and len(ran) == stop["after"]:
                raise KeyboardInterrupt

        outcomes = run(self, points, width, look)
        ran.append([p["learning_rate"] for p in points])
        programs.append(len(self.shape(self.sweep.config).compiled))
        return outcomes

    monkeypatch.setattr(sweep_lanes.Programs, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path / "out")
    assert len(ran) == 2
    assert len(list(csv.DictReader((tmp_path / "out" / "trials.csv").open()))) == 8
    stop["after"] = None
    result = run_sweep(sweep, tmp_path / "out")
    assert ran == [[r, r] for r in RATES]
    assert set(programs) == {1}
    assert result["programs"] == 2
    assert result["table"] == whole["table"]
    assert run_sweep(sweep, tmp_path / "out")["programs"] == 0


def test_halving_stops_what_is_behind(tmp_path):
    values = definition(halving={"rungs": [0.5], "eta": 2}, seeds=2, lanes_per_program=16)
    sweep = parse_sweep(values)
    result = run_sweep(sweep, tmp_path / "out")
    by_state = {s: [t for t in result["trials"] if t["state"] == s] for s in ("complete", "pruned", "fail")}
    assert [len(v) for v in by_state.values()] == [3, 3, 2]
    assert {t["rounds"] for t in by_state["complete"]} == {6}
    assert {t["rounds"] for t in by_state["pruned"]} == {3}
    assert all("behind after 3 of 6 rounds" in t["reason"] for t in by_state["pruned"])
    assert "stopped early, because they were behind: 3" in result["table"]
    assert len(by_state["complete"][0]["curve"][0]) == 6
    for name in ("parallel.png", "curves.png"):
        assert (tmp_path / "out" / name).stat().st_size > 10_000


# -- one storage for all ---------------------------------------------------------------------------------------------
def test_another_definition_on_one_storage_is_refused(fake, tmp_path, capsys):
    run_sweep(parse_sweep(definition()), tmp_path)
    before = (tmp_path / "trials.csv").read_text()
    (tmp_path / "other.toml").write_text(toml(definition(seeds=3)))
    assert main(["sweep", str(tmp_path / "other.toml"), "--out", str(tmp_path)]) == 2
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    assert "another sweep" in line
    assert "seeds: [0, 1, 2, 3] -> [0, 1, 2]" in line
    assert (tmp_path / "trials.csv").read_text() == before
    run_sweep(parse_sweep(definition(lanes_per_program=4)), tmp_path)  # how lanes are shared out is no difference
    assert sum(map(len, fake)) == 8


def test_a_storage_that_cannot_be_opened(fake, tmp_path):
    with pytest.raises(ConfigError, match="cannot be opened"):
        run_sweep(parse_sweep(definition()), tmp_path, storage="nosuchdb://x")


CLAIMER = """
import sys, json
from pathlib import Path
from jaxattr.studies.sweep_file import parse_sweep
from jaxattr.host.sweep_trials import Trials
sweep = parse_sweep(json.loads(sys.argv[2]))
trials = Trials(f"sqlite:///{sys.argv[1]}/sweep.db", sweep, 60.0)
trials.plan([(1, [i]) for i in range(sweep.trials)])
print("ready", flush=True)
sys.stdin.readline()
got = []
with trials:
    while claims := trials.claim():
        got += [c.number for c in claims]
    trials._mine.clear()
print(json.dumps(got))
"""


def test_workers_at_once_never_claim_a_point_twice(tmp_path):
    values = definition(sweep={"learning_rate": RATES, "clip_range": [0.1, 0.2, 0.3, 0.4, 0.5], "gamma": [0.9, 0.99]})
    words = [sys.executable, "-c", CLAIMER, str(tmp_path), json.dumps(values)]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for w in workers:
        assert w.stdout.readline() == "ready\n"
    for w in workers:
        w.stdin.write("go\n")
        w.stdin.flush()
    claimed = [json.loads(w.communicate()[0]) for w in workers]
    assert sorted(n for got in claimed for n in got) == list(range(40))


def test_claims_of_the_dead_are_taken_over(fake, tmp_path):
    sweep = parse_sweep(definition(lanes_per_program=8))
    dead = Trials(f"sqlite:///{tmp_path / 'sweep.db'}", sweep, 60.0)
    dead.plan([(2, [2 * i, 2 * i + 1]) for i in range(4)])
    dead._beat()
    lost = dead.claim()  # and never heard of again
    first = run_sweep(sweep, tmp_path, stale_after=60.0)
    assert first["programs"] == 3
    assert "not finished yet: 2" in first["table"]
    second = run_sweep(sweep, tmp_path, stale_after=60.0, retry=True)
    assert second["programs"] == 1
    assert "not finished" not in second["table"]
    assert sum(map(len, fake)) == 8
    assert not dead.finish(lost[0], sweep_outcome())  # it was not dead after all: the other result stays
    again = Trials(f"sqlite:///{tmp_path / 'sweep.db'}", sweep, 60.0)
    assert [t["state"] for t in again.rows()] == ["complete"] * 6 + ["fail"] * 2


def test_silence_frees_a_claim(fake, tmp_path):
    sweep = parse_sweep(definition(lanes_per_program=16))
    dead = Trials(f"sqlite:///{tmp_path / 'sweep.db'}", sweep, 60.0)
    dead.plan([(4, [0, 1, 2, 3]), (4, [4, 5, 6, 7])])
    dead._beat()
    dead.claim()
    time.sleep(0.05)
    assert run_sweep(sweep, tmp_path, stale_after=0.04)["programs"] == 2


def sweep_outcome():
    return sweep_lanes.Outcome([9.0] * 4, [], [False] * 4, None, 6, [64], [[9.0]] * 4, "test return", 0.1)


def test_optuna_asks_in_batches_and_goes_on(fake, tmp_path, monkeypatch):
    space = {"learning_rate": {"low": 1e-4, "high": 10.0, "log": True}, "clip_range": [0.1, 0.3], "num_epochs": [1, 2]}
    fixed = {k: v for k, v in SMALL.items() if k != "num_epochs"}
    values = definition(method="optuna", trials=11, batch=4, sweep=space, fixed=fixed)
    sweep, save = parse_sweep(values), command._Worker.save

    def killed(self):
        save(self)
        if self.finished == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command._Worker, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, tmp_path)
    result = run_sweep(sweep, tmp_path)
    points = [json.dumps(p) for job in fake for p in job]
    assert len(points) == len(set(points)) == 11  # none twice, none too many
    assert all(len({p["num_epochs"] for p in job}) == 1 for job in fake)  # one shape per program
    for t in result["trials"]:
        assert (t["state"] == "fail") == (t["settings"]["learning_rate"] >= 1)
    assert run_sweep(sweep, tmp_path)["programs"] == 0


def test_a_point_of_optuna_that_cannot_run_is_a_failure_with_its_reason(fake, tmp_path):
    fixed = {k: v for k, v in SMALL.items() if k != "minibatch_size"}
    space = {"learning_rate": [1e-3], "minibatch_size": [16, 24]}
    values = definition(method="optuna", trials=8, batch=4, sweep=space, fixed=fixed, preset="paper")
    result = run_sweep(parse_sweep(values), tmp_path)
    for t in result["trials"]:
        if t["settings"]["minibatch_size"] == 24:
            assert t["state"] == "fail"
            assert "minibatch_size = 24" in t["reason"]
        else:
            assert t["state"] == "complete"
    assert {t["state"] for t in result["trials"]} == {"fail", "complete"}


# -- tables ------------------------------------------------------------------------------------------------------------
def trial(number, value, low, high, state="complete"):
    return {
        "number": number, "state": state, "settings": {"gamma": 0.9 + number / 100}, "per_seed": [value] * 2,
        "failed": [False] * 2, "value": value, "low": low, "high": high, "reason": "", "rounds": 6, "seconds": 1.0,
    }  # fmt: skip


def test_the_ranking_says_what_the_seeds_do_not_settle():
    apart = [trial(0, 5.0, 4.0, 6.0), trial(1, 2.0, 1.0, 3.0)]
    assert "overlaps with no other" in overlap_note(apart, 2, "maximize")
    assert "do not settle" in overlap_note([apart[0], trial(2, 4.5, 3.0, 5.5), apart[1]], 2, "maximize")
    assert "do not settle" in overlap_note([apart[1], trial(2, 4.5, 3.0, 5.5)], 2, "minimize")
    assert "one seed" in overlap_note([trial(0, 1.0, None, None)] * 2, 1, "maximize")


def test_minimize_ranks_the_lowest_first():
    trials = [
        trial(0, 5.0, 4.0, 6.0),
        trial(1, 2.0, 1.0, 3.0),
        {"number": 2, "state": "waiting", "settings": {"gamma": 1}},
    ]
    rows = trial_table(trials, (0, 1), "minimize")
    assert [r["trial"] for r in rows] == [1, 0, 2]
    assert [r["rank"] for r in rows] == [1, 2, None]
    text = render_ranking(trials, (0, 1), "auc", "min", "minimize")
    assert "min of auc" in text
    assert "not finished yet: 1" in text


def test_nothing_but_failures_is_exit_code_3(fake, tmp_path, capsys):
    (tmp_path / "s.toml").write_text(toml(definition(sweep={"learning_rate": [1e5, 1e6]})))
    assert main(["sweep", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out"), "--quiet"]) == 3
    out = capsys.readouterr().out
    assert "no setting has a result" in out
    assert "failed, not ranked: 2" in out


# -- Ray ---------------------------------------------------------------------------------------------------------------
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_cluster_that_does_not_answer_is_one_line(tmp_path, capsys):
    pytest.importorskip("ray")
    (tmp_path / "s.toml").write_text(toml(definition()))
    words = ["sweep", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out"), "--executor", "ray"]
    for address in (f"127.0.0.1:{free_port()}", "nonsense"):
        assert main([*words, "--address", address]) == 2
        line = capsys.readouterr().err.strip()
        assert len(line.splitlines()) == 1
        assert address in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ray_gives_the_same_table(whole, tmp_path):
    ray = pytest.importorskip("ray")
    from conftest import CACHE

    port, environment = free_port(), {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    script, folder = Path(sys.executable).with_name("ray"), Path(f"/tmp/ray-{os.getpid()}")  # socket paths are short
    words = [str(script), "start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
    # A session of its own, so that exactly this cluster can be ended (`ray stop` ends every one on the machine).
    null = subprocess.DEVNULL
    cluster = subprocess.Popen(
        [*words, f"--temp-dir={folder}"], env=environment, stdout=null, stderr=null, start_new_session=True
    )
    try:
        wait_for(port, cluster)
        result = run_sweep(
            parse_sweep(definition(lanes_per_program=32)),
            tmp_path,
            executor="ray",
            address=f"127.0.0.1:{port}",
            cpus_per_task=2,
        )
        assert result["table"] == whole["table"]
        for ours, theirs in zip(whole["trials"], result["trials"], strict=True):
            assert ours["per_seed"] == theirs["per_seed"]
    finally:
        ray.shutdown()
        cluster.terminate()  # it ends its own processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            cluster.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cluster.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(port, process, seconds=60):
    """Until something listens there and has had time to start the rest."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            time.sleep(5)
            return
        time.sleep(0.3)
    pytest.fail("the local Ray cluster did not start")
