"""`jaxattr reproduce`: the plan, runs that are kept, continued and refused, and what its numbers are."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxattr.analysis.reproduction import improvement
from jaxattr.config import ConfigError
from jaxattr.host import reproduce as command
from jaxattr.host import reproduce_run as runs
from jaxattr.host.cli import main
from jaxattr.host.compare import NULL, NULL_OFFSET
from jaxattr.studies import reproduction as study

LAKE = "FrozenLake-misc"
ARMS = ("none", NULL, "iif:0.25", "iif:0.5", "random:0.5")


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """The lake's task, four rounds long."""
    task = study.TASKS[LAKE]
    with pytest.MonkeyPatch.context() as patch:
        short = dataclasses.replace(task, quick=study.Quick(rounds=4, evaluations=4, episodes=32))
        patch.setitem(study.TASKS, LAKE, short)
        yield


def whole(out, **options):
    return command.reproduce(envs=[LAKE], seeds=4, arms=ARMS, quick=True, out=out, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("reproduce") / "whole")


def rows_of(result):
    """Everything but what a clock said."""
    clocks = ("seconds", "rt_peak", "interval")
    return [{k: v for k, v in row.items() if not any(c in k for c in clocks)} for row in result["document"]["rows"]]


def test_a_whole_reproduction_its_files_and_its_continuation(finished, monkeypatch):
    out = finished["out"]
    names = {p.name for p in out.iterdir() if p.is_file()}
    assert names == {"reproduction.json", "reproduction.csv", "reproduction_paper.png"} == set(finished["files"])
    document = json.loads((out / "reproduction.json").read_text())
    assert [row["arm"] for row in document["rows"]] == ["none", NULL, "iif:0.25", "iif:0.5", "random:0.5"]
    for text in ("SE_ave %", "34 +- 2", "P(better)", "--quick leaves out", "Choosing p", "other seeds"):
        assert text in finished["text"]
    null = next(r for r in document["per_seed"] if r["arm"] == NULL)
    assert null["seed"] >= NULL_OFFSET
    assert {c["metric"] for c in document["choice_of_p"]} == {"difference of AUC", "SE_ave %"}

    # finished pieces are not run again
    monkeypatch.setattr(runs, "Session", None)
    again = whole(out)
    assert rows_of(again) == rows_of(finished)
    monkeypatch.undo()


def test_an_interrupted_reproduction_goes_on_with_the_same_numbers(finished, tmp_path, monkeypatch):
    out, real, seen = tmp_path / "cut", runs.Job.advance, []

    def advance(self, piece, share):
        seen.append(piece.arm.name)
        if len(set(seen)) == 3:
            raise KeyboardInterrupt
        real(self, piece, share)

    monkeypatch.setattr(runs.Job, "advance", advance)
    with pytest.raises(KeyboardInterrupt):
        whole(out)
    monkeypatch.setattr(runs.Job, "advance", real)
    kept = sorted(p.parent.name for p in out.rglob("arm.json"))
    assert 0 < len(kept) < len(ARMS)
    assert not (out / "reproduction.json").exists()
    started, original = [], runs.run_piece
    monkeypatch.setattr(runs, "run_piece", lambda piece, job: started.append(piece) or original(piece, job))
    assert rows_of(whole(out)) == rows_of(finished)
    assert len(started) == len(ARMS) - len(kept)


def test_other_settings_in_the_same_folder_are_refused(finished):
    with pytest.raises(ConfigError, match=r"was run with other settings .*seeds.*use another --out"):
        command.reproduce(envs=[LAKE], seeds=3, arms=ARMS, quick=True, out=finished["out"])


def test_arms_are_timed_in_turn_once(tmp_path, monkeypatch):
    """Three bursts of each timed arm, alternately; the median is kept and not measured again."""
    plan = command.make_plan(tmp_path, envs=[LAKE], settings=["paper"], seeds=(0, 1), arms=ARMS)
    log = []

    def make_burst(piece):
        times = iter([5.0, 1.0, 2.0])
        return lambda: log.append(piece.arm.name) or next(times)

    monkeypatch.setattr(runs, "make_burst", make_burst)
    job = runs.Job([], quiet=True)
    (tmp_path / "paper" / LAKE).mkdir(parents=True)
    runs.measure_group(plan.pieces, job)
    assert log == ["none", "iif:0.5", "random:0.5"] * 3
    kept = json.loads((tmp_path / "paper" / LAKE / "timing.json").read_text())
    assert kept["seconds_per_round"] == {"none": 2.0, "iif:0.5": 2.0, "random:0.5": 2.0}
    runs.measure_group(plan.pieces, job)
    assert len(log) == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppo"], "reproduce 'ppo': unknown"),
        (["iif", "--envs", "FrozenLake"], "did you mean 'FrozenLake-misc'"),
        (["iif", "--arms", "iff"], "unknown arm 'iff'; did you mean 'iif'"),
        (["iif", "--arms", "iif:2"], "p must be a number from 0 to 1"),
        (["iif", "--arms", "dtv:0.5"], "dtv has no p"),
        (["iif", "--settings", "papers"], "did you mean 'paper'"),
        (["iif", "--seeds", "0"], "must be 1 or more"),
        (["iif", "--quick", "--envs", "envpool/Highway-v0"], "has no --quick budget"),
    ],
)
def test_bad_words_are_one_line(words, message, tmp_path, capsys):
    assert main(["reproduce", *words, "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_an_environment_without_its_backend_is_skipped_unless_it_was_named(monkeypatch, tmp_path):
    from jaxattr.envs import registry

    real = registry.make

    def make(env_id, options=()):
        if env_id.startswith("envpool/"):
            raise ConfigError("envpool/*: needs EnvPool: pip install 'jaxattr[envpool]'")
        return real(env_id, options)

    monkeypatch.setattr(registry, "make", make)
    plan = command.make_plan(tmp_path, seeds=(0,), arms=("none",))
    assert {p.task.env_id for p in plan.pieces} == {LAKE, "Acrobot-v1"}
    assert len(plan.skipped) == 5
    assert all("pip install" in why for why in plan.skipped.values())
    with pytest.raises(ConfigError, match="pip install"):
        command.make_plan(tmp_path, envs=["envpool/LunarLander-v3"], seeds=(0,), arms=("none",))


def test_the_plans(tmp_path):
    quick = command.make_plan(tmp_path, seeds=range(5), quick=True)
    assert [p.task.env_id.split("/")[-1].split("-")[0] for p in quick.pieces[::3]] == [
        "FrozenLake", "Acrobot", "MiniGrid", "LunarLander",
    ]  # fmt: skip
    assert [p.arm.name for p in quick.pieces[:3]] == ["none", "iif:0.5", "random:0.5"]
    assert {p.setting for p in quick.pieces} == {"paper"}
    assert "Highway" in quick.left_out[0]
    full = command.make_plan(tmp_path, seeds=range(5))
    assert len(full.pieces) == 2 * 7 * 15
    by = {(p.setting, p.task.env_id, p.arm.name): p.config for p in full.pieces}
    for (setting, env, arm), config in by.items():
        if setting == "paper" and study.TASKS[env].published:
            assert config.total_steps == study.TASKS[env].published.env_steps
        assert config.eval_policy == "stochastic"
        if arm.startswith("iif:"):  # the same rule in both settings
            assert (config.score_normalize, config.target_normalize) == ("chunk", False)
        if arm.startswith("iif-norm"):
            assert (config.score_normalize, config.target_normalize) == ("buffer", True)
    assert by["paper", LAKE, "iif-matched:0.5"].training == "step_matched"
    assert by["paper", LAKE, "gated:0.5"].filter == "gated"
    assert by["paper", LAKE, "none"].final_eval_episodes == 1000
    more = command.make_plan(tmp_path, seeds=range(32), envs=[LAKE], arms=["none"]).pieces[0].config
    assert (more.eval_episodes, more.final_eval_episodes) == (10, 156)  # a budget for all seeds together


def test_p_is_chosen_on_one_half_and_reported_on_the_other():
    # by hand: seeds 0, 2 favour p = 1 (4 against 3), seeds 1, 3 favour p = 0.5 (2 against -1)
    table = {0.5: [3.0, 2.0, 3.0, 2.0], 1.0: [4.0, -1.0, 4.0, -1.0], 0.25: [np.nan] * 4}
    value = lambda p, at: float(np.mean([table[p][i] for i in at]))
    choice = study.choose_p(value, (0.25, 0.5, 1.0), 4)
    assert choice == (1.0, -1.0, 0.5, 2.0)
    assert choice.gain == 3.0
    assert study.choose_p(value, (0.5, 1.0), 3) is None
    assert study.choose_p(value, (0.5,), 4) is None


def test_probability_of_improvement_by_hand():
    # x beats y in 3 of 4 pairs and ties in one: (3 + 1/2) / 4
    found = improvement([2.0, 3.0], [1.0, 2.0])
    assert found[0] == 3.5 / 4
    assert found[1] <= found[0] <= found[2]
    assert improvement([1.0, 1.0], [1.0, 1.0])[:3] == (0.5, 0.5, 0.5)
    assert improvement([np.nan, 1.0], [0.0, 0.0])[0] == 0.5  # a run without a value is worse than every other
    assert np.isnan(improvement([1.0], [0.0])[1])
