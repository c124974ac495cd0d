"""The command line: bad input ends with one line and exit code 2 before anything compiles; good input its files."""

import csv
import json
import os

import pytest

from jaxattr.host.cli import main

TINY = ["--num-envs", "2", "--num-steps", "16", "--minibatch-size", "16", "--num-epochs", "1"]
TINY += ["--hidden", "8", "--eval-episodes", "2", "--total-steps", "64"]


@pytest.fixture(autouse=True)
def _same_xla_flags(monkeypatch):
    """The commands set XLA_FLAGS: not for the tests that follow."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with one small trained run of two seeds, `a`."""
    folder = tmp_path_factory.mktemp("cli")
    code = main(
        ["train", "probe/obs_policy", "--filter", "iif", "--seeds", "2", "--out", str(folder / "a"), "--quiet", *TINY]
    )
    assert code == 0
    return folder


def refused(capsys, monkeypatch, words):
    """The single line that bad input gives; fails if anything was compiled."""
    import jax.stages

    def compiled(*args, **kwargs):
        raise AssertionError("compiled before the input was checked")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    try:
        code = main(words)
    except SystemExit as stop:  # tyro's own errors
        code = stop.code
    err = capsys.readouterr().err.strip()
    assert code == 2, err
    return err


BAD = {
    "unknown environment": (["train", "CartPole-v2", *TINY], ["CartPole-v2", "CartPole-v1"]),
    "p above 1": (["train", "probe/obs", "--p", "1.5", *TINY], ["p is 1.5", "[0, 1]"]),
    "p below 0": (["train", "probe/obs", "--p=-0.1", *TINY], ["p is -0.1"]),
    "sizes do not divide": (["train", "probe/obs", *TINY, "--minibatch-size", "24"], ["2 * 16 = 32", "24"]),
    "fewer steps than a round": (["train", "probe/obs", *TINY, "--total-steps", "31"], ["31", "2 * 16 = 32"]),
    "one record": (
        ["train", "probe/obs", *TINY, "--num-envs", "1", "--num-steps", "1", "--minibatch-size", "1"],
        ["one record"],
    ),
    "chunks of one record": (
        ["train", "probe/obs", *TINY, "--score-normalize", "chunk", "--norm-chunk", "1"],
        ["norm_chunk is 1"],
    ),
    "unknown filter": (["train", "probe/obs", "--filter", "iff", *TINY], ["'iff'", "'iif'"]),
    "unknown filter in compare": (["compare", "probe/obs", "--filters", "none", "iff", *TINY], ["'iff'", "'iif'"]),
    "unknown target": (["train", "probe/obs", "--target", "retrun", *TINY], ["'return'"]),
    "unknown preset": (["train", "probe/obs", "--preset", "papr", *TINY], ["'papr'", "'paper'"]),
    "unknown command": (["trian", "probe/obs"], ["'trian'", "'train'"]),
    "no environment": (["train", *TINY], ["which environment"]),
    "misspelt environment option": (
        ["train", "FrozenLake-misc", "--env-arg", "is_slipery=false", *TINY],
        ["is_slipery", "is_slippery"],
    ),
    "malformed environment option": (["train", "FrozenLake-misc", "--env-arg", "is_slippery", *TINY], ["is_slippery"]),
    "data to be downloaded": (["train", "MNISTBandit-bsuite", *TINY], ["MNIST"]),
    "environment option twice": (
        ["train", "FrozenLake-misc", "--env-arg", "is_slippery=true", "--env-arg", "is_slippery=false", *TINY],
        ["is_slippery", "twice"],
    ),
    "environment option of another type": (
        ["train", "FrozenLake-misc", "--env-arg", "is_slippery=perhaps", *TINY],
        ["is_slippery", "true or false"],
    ),
    "no rounds": (["train", "probe/obs", "--rounds", "0", *TINY], ["--rounds is 0"]),
    "no such score parameters": (
        ["train", "probe/obs", "--score-params", "critic/.*", *TINY],
        ["critic", "policy/head/out/kernel"],
    ),
    "same filter twice": (["compare", "probe/obs", "--filters", "iif", "iif", *TINY], ["each once"]),
    "no seeds": (["train", "probe/obs", "--seeds", "0", *TINY], ["--seeds is 0"]),
    "squash of discrete actions": (["train", "probe/obs", "--squash", *TINY], ["squash"]),
    "cnn on a vector": (["train", "probe/obs", "--network", "cnn", *TINY], ["cnn", "(H, W, C)"]),
    "record round out of range": (["train", "probe/obs", "--record-rounds", "9", *TINY], ["round 9", "1 to 2"]),
    "missing configuration": (["train", "probe/obs", "--config", "nowhere.json", *TINY], ["nowhere.json"]),
    "resume nothing": (["train", "--resume", "nowhere"], ["nowhere"]),
    "init from nothing": (["train", "probe/obs", "--init-from", "nowhere", *TINY], ["nowhere"]),
    "evaluate nothing": (["eval", "nowhere"], ["nowhere"]),
    "render nothing": (["render", "nowhere"], ["nowhere"]),
    "diff of nothing": (["config", "diff", "nowhere", "tuned:CartPole-v1"], ["nowhere"]),
    "half a diff": (["config", "diff", "tuned:CartPole-v1"], ["usage"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words, wanted = BAD[case]
    line = refused(capsys, monkeypatch, words)
    assert len(line.splitlines()) == 1, line
    assert all(text in line for text in wanted), line
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_an_unknown_flag_exits_with_2(capsys, monkeypatch):
    assert "--filtre" in refused(capsys, monkeypatch, ["train", "probe/obs", "--filtre", "iif"])


def test_out_that_holds_a_run_is_refused(runs, capsys, monkeypatch):
    line = refused(capsys, monkeypatch, ["train", "probe/obs", "--out", str(runs / "a"), *TINY])
    assert "already holds a run" in line
    assert "--resume" in line


def test_resume_with_other_settings_names_the_fields(runs, capsys, monkeypatch):
    line = refused(capsys, monkeypatch, ["train", "--resume", str(runs / "a"), "--gamma", "0.5"])
    assert "gamma: 0.99 -> 0.5" in line
    assert "p:" not in line


def test_resume_with_fewer_steps_is_refused(runs, capsys, monkeypatch):
    line = refused(capsys, monkeypatch, ["train", "--resume", str(runs / "a"), "--total-steps", "32"])
    assert "total_steps: 64 -> 32" in line


def test_weights_that_do_not_fit_are_refused(runs, capsys, monkeypatch):
    words = ["train", "probe/obs_policy", *TINY, "--hidden", "16", "--seeds", "2", "--quiet"]
    line = refused(capsys, monkeypatch, [*words, "--init-from", str(runs / "a")])
    assert len(line.splitlines()) == 1
    assert "params does not fit" in line
    line = refused(capsys, monkeypatch, [*words[:-3], "--seeds", "3", "--quiet", "--init-from", str(runs / "a")])
    assert "has 2 seeds, this run 3" in line


def test_what_is_not_supported_yet_is_refused(capsys, monkeypatch):
    import flax.linen as nn
    import jax.numpy as jnp

    import jaxattr
    from jaxattr.envs.base import EnvSpec
    from jaxattr.envs.probes import Probe

    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, obs):
            cell = nn.GRUCell(4)
            carry, y = cell(jnp.zeros(4), obs)
            return carry, nn.Dense(2)(y), nn.Dense(1)(y)[0]

    with pytest.raises(jaxattr.ConfigError, match="recurrent and multi-discrete policies are not supported") as error:
        jaxattr.train("probe/obs", network=Recurrent())
    assert "\n" not in str(error.value)

    jaxattr.register(
        "test/multi",
        lambda: Probe(EnvSpec("test/multi", (1,), (2, 3), 1), lambda k: 0.0, lambda k, s, a: (0.0, 0.0), 1),
    )
    line = refused(capsys, monkeypatch, ["train", "test/multi", *TINY])
    assert len(line.splitlines()) == 1
    assert "test/multi" in line
    assert "multi-discrete actions are not supported" in line


def test_seed_index_out_of_range(runs, capsys):
    assert main(["eval", str(runs / "a"), "--seed-index", "2", "--episodes", "2"]) == 2
    assert "2 agents (0 to 1)" in capsys.readouterr().err


def test_files_of_a_run(runs):
    folder = runs / "a"
    with (folder / "metrics.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(r["seed"], r["update"], r["env_steps"]) for r in rows] == [
        ("0", "1", "32"),
        ("1", "1", "32"),
        ("0", "2", "64"),
        ("1", "2", "64"),
    ]
    columns = (
        "episodes return_mean length_mean test_return kept dropped negative optimizer_steps approx_kl clip_fraction "
        "entropy value_loss explained_variance score_median nonfinite"
    )
    assert set(columns.split()) <= set(rows[0])
    assert all(int(r["kept"]) + int(r["dropped"]) == 32 for r in rows)
    summary = json.loads((folder / "summary.json").read_text())
    wanted = "env_steps updates wall_s compile_s eval_s env_steps_per_s final_test_return params_sha256 versions device"
    assert set(wanted.split()) <= set(summary)
    assert summary["env_steps"] == 2 * 64
    assert len(summary["params_sha256"]) == len(summary["final_test_return"]) == 2
    present = {p.name for p in folder.iterdir()}
    assert present >= {"config.json", "records.csv", "learning_curve.png", "scores.png", "tensorboard", "checkpoints"}
    with (folder / "records.csv").open(newline="") as f:
        records = list(csv.DictReader(f))
    first = [r for r in records if r["seed"] == "0"]
    assert [float(r["score"]) for r in first] == sorted((float(r["score"]) for r in first), reverse=True)
    assert {"score", "obs", "action", "advantage", "reward", "kept"} <= set(first[0])
    dropped = [r for r in first if r["kept"] == "False"]
    assert all(float(r["score"]) < 0 for r in dropped)


def test_a_longer_resume_evaluation_and_diff(runs, capsys):
    assert main(["train", "--resume", str(runs / "a"), "--total-steps", "128", "--quiet"]) == 0
    with (runs / "a" / "metrics.csv").open(newline="") as f:
        assert max(int(r["update"]) for r in csv.DictReader(f)) == 4
    assert main(["eval", str(runs / "a"), "--episodes", "3", "--seed-index", "1"]) == 0
    out = capsys.readouterr().out
    assert "index 1, seed 1: stochastic" in out
    assert "index 0" not in out
    assert main(["config", "diff", "tuned:CartPole-v1", "tuned:CartPole-v1"]) == 0
    assert capsys.readouterr().out.strip() == "no difference"


def test_start_from_a_file_and_from_another_run(runs, tmp_path, capsys):
    settings = tmp_path / "settings.toml"
    settings.write_text('env = "probe/obs_policy"\nnum_envs = 2\nnum_steps = 16\nminibatch_size = 16\ngamma = 0.5\n')
    words = ["train", "--config", str(settings), "--init-from", str(runs / "a"), "--seeds", "2", "--hidden", "8"]
    words += [
        "--num-epochs",
        "1",
        "--total-steps",
        "32",
        "--eval-episodes",
        "2",
        "--out",
        str(tmp_path / "b"),
        "--quiet",
    ]
    assert main(words) == 0
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (saved["env"], saved["config"]["gamma"]) == ("probe/obs_policy", 0.5)
    capsys.readouterr()
    assert main(["config", "diff", str(runs / "a"), str(tmp_path / "b")]) == 0
    assert "gamma: 0.99 -> 0.5" in capsys.readouterr().out.splitlines()


def test_compare_writes_its_table_and_keeps_finished_arms(tmp_path, capsys):
    out = tmp_path / "c"
    words = [
        "compare",
        "probe/obs_policy",
        "--filters",
        "none",
        "iif",
        "random",
        "iif+matched",
        "--seeds",
        "2",
        "--p",
        "0.5",
    ]
    words += ["--out", str(out), "--quiet", *TINY]
    assert main(words) == 0
    assert "SE_ave" in capsys.readouterr().out
    assert {p.name for p in out.iterdir() if p.is_file()} == {"comparison.csv", "comparison.json", "comparison.png"}
    rows = json.loads((out / "comparison.json").read_text())
    assert rows
    first = json.loads((out / "iif" / "summary.json").read_text())["params_sha256"]
    assert main(words) == 0  # finished arms are taken as they are
    assert json.loads((out / "iif" / "summary.json").read_text())["params_sha256"] == first


def test_help_and_environments(capsys):
    assert main([]) == 0
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    for text in ("jaxattr compare", "CartPole-v1", "brax/ant", "FrozenLake-misc", "probe/"):
        assert text in out
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--p " in shown
    assert "--filter" in shown
