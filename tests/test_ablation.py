"""`jaxattr reproduce ablation`: its contrasts, its arithmetic by hand, and a tiny run."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxattr.analysis import ablation as analysis
from jaxattr.analysis.compare import NULL, ArmResult
from jaxattr.config import ConfigError, diff
from jaxattr.host import reproduce as command
from jaxattr.host import reproduce_run as runs
from jaxattr.host.cli import main
from jaxattr.studies import ablation
from jaxattr.studies import reproduction as study

LAKE = "FrozenLake-misc"
SCORING = {"filter", "p", "score_normalize", "target_normalize", "entropy_scale", "training"}


def test_a_contrast_differs_in_the_filter_alone(tmp_path):
    """Arm and base of every contrast: the same run but for the rule; across variants: but for the variant."""
    task = study.TASKS[LAKE]
    config = {
        name: study.arm_config("paper", task, study.parse_arm(name, task), 32).to_dict()
        for name in ablation.ABLATION_ARMS
    }
    changed = lambda a, b: {line.split(":")[0] for line in diff(config[a], config[b])}
    for label, arm, base in ablation.CONTRASTS:
        if label.startswith("no filter"):
            assert changed(arm, base) in ({"max_grad_norm"}, {"num_envs", "num_steps"}, {"round_start"})
        elif "in IIF only" not in label:
            assert changed(arm, base) <= SCORING, label
    published = config["iif"]
    assert (published["score_normalize"], published["target_normalize"]) == ("chunk", False)
    assert changed("iif", "iif-buffer") == {"score_normalize"}
    assert changed("iif", "iif-target") == {"target_normalize"}
    assert changed("iif", "iif-matched") == {"training"}
    assert changed("iif", "iif-cut") == {"round_start"} == changed("none", "none-cut")
    assert changed("iif", "iif-8") == {"num_envs", "num_steps"}
    assert {config[name]["num_envs"] * config[name]["num_steps"] for name in config} == {2048}


def arm(name, curves, seeds=(0, 1, 2, 3)):
    curves = np.asarray(curves, float)
    shape = curves.shape
    return ArmResult(
        name, seeds, np.arange(shape[1]) + 1, (np.arange(shape[1]) + 1) * 100, curves, curves,
        np.full(shape, 75), 100, np.full(shape, 4), np.arange(shape[1]) + 1.0,
    )  # fmt: skip


def test_contrasts_by_hand():
    base = arm("none", [[0, 2], [0, 4], [0, 6], [0, 8]])  # AUC 1 2 3 4
    iif = arm("iif:0.5", [[2, 2], [2, 4], [2, 6], [2, 8]])  # AUC + 1 on every seed
    cut_base = arm("none-cut", [[0, 0], [0, 2], [0, 4], [0, 6]])  # AUC 0 1 2 3
    cut = arm("iif-cut:0.5", [[6, 0], [6, 2], [6, 4], [0, 0]])  # AUC 3 4 5 0: + 3 + 3 + 3 - 3
    null = arm(NULL, [[0, 2], [0, 4], [0, 6], [0, 8]], seeds=(10, 11, 12, 13))
    arms = {"none": base, "iif": iif, "none-cut": cut_base, "iif-cut": cut, NULL: null}
    contrasts = (
        ("published", "iif", "none"),
        ("null", NULL, "none"),
        ("cut", "iif-cut", "none-cut"),
        ("no filter", "none-cut", "none"),
        ("not run", "iif-8", "none-8"),
    )
    first, other, second, third = analysis.contrast_rows("env", arms, contrasts, ("iif", "none"), failed=0.0)
    assert [first[f"gain_auc_{k}"] for k in ("mean", "low", "high")] == [1.0, 1.0, 1.0]
    assert (first["verdict"], first["seeds_better"], first["change_auc_mean"]) == ("better", 1.0, None)
    assert first["dropped_share"] == 0.25
    assert (other["paired"], other["seeds_better"], other["gain_auc_mean"]) == (False, None, 0.0)
    assert other["verdict"] == "undecided"
    assert (second["gain_auc_mean"], second["seeds_better"]) == (1.5, 0.75)
    assert second["change_auc_mean"] == 0.5  # gains 3 3 3 -3 minus 1
    assert second["verdict"] == "undecided"
    assert second["gain_auc_low"] < 0 < second["gain_auc_high"]
    assert (second["arm_failed"], second["base_failed"]) == (0.5, 0.25)  # final returns 0 2 4 0 and 0 2 4 6
    assert (third["gain_auc_mean"], third["verdict"], third["change_auc_mean"]) == (-1.0, "worse", -2.0)
    text = analysis.ablation_table([first, other, second, third])
    for part in ("+1.50 [", "none-cut - none", f"{NULL} - none *", "50 % / 25 %", "undecided"):
        assert part in text


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    task = study.TASKS[LAKE]
    out = tmp_path_factory.mktemp("ablation") / "out"
    with pytest.MonkeyPatch.context() as patch:
        short = dataclasses.replace(task, quick=study.Quick(rounds=3, evaluations=3, episodes=32))
        patch.setitem(study.TASKS, LAKE, short)
        options = {"envs": [LAKE], "seeds": 2, "quick": True, "out": out}
        yield options, command.reproduce("ablation", arms=("iif", "none-cut", "iif-cut"), **options)


def test_a_whole_ablation_shares_its_runs_with_the_comparison(finished, monkeypatch):
    options, result = finished
    out = options["out"]
    assert {p.name for p in out.iterdir() if p.is_file()} == {"ablation.json", "ablation.csv", "ablation.png"}
    document = json.loads((out / "ablation.json").read_text())
    assert [(row["arm"], row["base"]) for row in document["rows"]] == [
        ("iif", "none"), ("iif-cut", "none-cut"), ("iif-cut", "none"), ("none-cut", "none"),
    ]  # fmt: skip
    auc = {(r["arm"], r["seed"]): r["auc_test_return"] for r in document["per_seed"]}
    gain = np.mean([auc["iif-cut", s] - auc["none-cut", s] for s in (0, 1)])
    assert math.isclose(document["rows"][1]["gain_auc_mean"], gain, abs_tol=1e-12)
    assert "episodes cut at each round, both arms" in result["text"]
    monkeypatch.setattr(runs, "Session", None)  # finished runs are not run again
    shared = command.reproduce("iif", arms=("iif",), **options)
    assert {row["arm"] for row in shared["document"]["rows"]} == {"none", "iif:0.5"}


def test_arms_without_a_contrast_are_refused(finished):
    options, _ = finished
    with pytest.raises(ConfigError, match="none of the arms makes a contrast"):
        command.reproduce("ablation", arms=("none",), **options)


def test_what_a_pool_cannot_run_is_said(tmp_path, capsys):
    pytest.importorskip("envpool")
    lander = "envpool/LunarLander-v3"
    plan = command.make_plan(tmp_path, "ablation", seeds=(0,))
    assert {p.task.env_id for p in plan.pieces} == set(ablation.ENVS)
    assert [p.arm.rule for p in plan.pieces if p.task.env_id == LAKE] == list(ablation.ABLATION_ARMS)
    left = [p.arm.rule for p in plan.pieces if p.task.env_id == lander]
    assert set(ablation.ABLATION_ARMS) - set(left) == {"none-cut", "iif-cut"}
    assert sum(lander in line and "round_start = continue" in line for line in plan.left_out) == 2
    words = ["reproduce", "ablation", "--out", str(tmp_path / "x")]
    assert main([*words, "--settings", "tuned"]) == 2
    assert "is about 'paper' only" in capsys.readouterr().err
    assert main([*words, "--envs", lander, "--arms", "iif-cut"]) == 2
    assert "round_start = continue" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
