"""Whole runs: evaluation, files, resume, agents, records, stops. One configuration serves most tests."""

from __future__ import annotations

import csv
import functools
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattr
from jaxattr.config import Config, ConfigError
from jaxattr.envs import registry
from jaxattr.envs.base import Discrete, EnvSpec, Step
from jaxattr.evaluate import evaluate
from jaxattr.host import checkpoint, cli, runner
from jaxattr.host.outputs import COLUMNS
from jaxattr.host.saved import open_run
from jaxattr.lanes import place_lanes
from jaxattr.networks import make_networks
from jaxattr.ops.statistics import init_stats
from jaxattr.train import init_state, lane_settings, make_chunk

N = 128  # records per round
ENV = "CartPole-v1"
SEEDS = (7, 8)
CONFIG = Config(
    num_envs=4,
    num_steps=32,
    minibatch_size=32,
    num_epochs=2,
    hidden=(16,),
    total_steps=50 * N,
    learning_rate=3e-3,
    lr_schedule="linear",
    filter="iif",
    p=0.5,
    normalize_obs=True,
    normalize_reward=True,
    env_args={"max_steps_in_episode": 60},
    eval_episodes=8,
    checkpoint_every=10,
)


def train(**kwargs):
    return jaxattr.train(ENV, **{"config": CONFIG, "seeds": SEEDS, **kwargs})


SCRIPT = """
import json, sys
import jaxattr
from jaxattr.host.checkpoint import digest
kwargs = json.loads(sys.argv[1])
run = jaxattr.train(kwargs.pop("env"), jaxattr.Config.from_dict(kwargs.pop("config")), **kwargs)
metrics = {k: v.tolist() for k, v in run.metrics.items()}
print(json.dumps({"state": digest(run.state), "params": run.summary["params_sha256"], "metrics": metrics}))
"""


def process(**kwargs):
    """The same call in another Python process, which shares the compilation cache."""
    full = {"env": ENV, "config": CONFIG.to_dict(), "seeds": SEEDS, **kwargs}
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(full)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def result(p):
    out, err = p.communicate(timeout=300)
    assert p.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1]), err


def rows(folder):
    with (Path(folder) / "metrics.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def lane(tree, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], checkpoint.to_plain(tree))


def same(a, b):
    return checkpoint.digest(a) == checkpoint.digest(b)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run, with files, records of round 2, and what a callback saw."""
    seen: list[Any] = []
    compile_chunk, write = runner.compile_chunk, runner.Session._write
    # The runner's clock: a millisecond each time it is read, and what the parts below take. Real time proves nothing
    # on a busy machine.
    now = [0.0]

    def clock():
        now[0] += 0.001
        return now[0]

    def slowly(f, seconds):
        def call(*args):
            out = f(*args)
            now[0] += seconds(args)
            return out

        return call

    def watched(*args):
        return slowly(compile_chunk(*args), lambda call: 0.01 * int(call[-1]))  # per round

    compiled: list[list[str]] = []
    names: list[str] = []
    listen = lambda name, *_, **__: names.append(name) if "backend_compile" in name else None

    def callback(info):
        seen.append(info)
        compiled.append(list(names))
        names.clear()

    out = tmp_path_factory.mktemp("runs") / "whole"
    patch = pytest.MonkeyPatch()
    patch.setattr(runner, "compile_chunk", slowly(watched, lambda _: 11.0))
    patch.setattr(runner, "time", types.SimpleNamespace(perf_counter=clock))
    patch.setattr(runner.Session, "_write", slowly(write, lambda _: 3.0))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = train(out=out, record_rounds=(2,), callback=callback)
    finally:
        patch.undo()
        jax.monitoring.unregister_event_duration_listener(listen)
    return types.SimpleNamespace(run=run, out=out, seen=seen, compiled=compiled)


# -- evaluation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps"), [("ends_at_3", 3), ("never_ends", 1000)])
def test_t08_one_episode_per_environment(name, steps):
    env = registry.make(f"probe/{name}")
    nets = make_networks(env.spec, CONFIG)
    params = nets.init(jax.random.key(0))
    run = jax.jit(
        lambda limit=None: evaluate(nets, env, params, init_stats((1,)), jax.random.key(0), 5, limit), static_argnums=0
    )
    r = run(None)
    assert r.episode_return.shape == (2, 5)
    assert np.all(r.episode_return == steps)
    assert np.all(r.length == steps)
    assert np.all(r.finished)
    short = run(2)  # cut off before any end: flagged
    assert np.all(short.length == 2)
    assert not np.any(short.finished)


class Echo:
    """One step; the reward is the first entry of the start observation, whatever one does: a return names its start."""

    spec = EnvSpec("test/echo", (2,), Discrete(2), 1)

    def reset(self, key):
        obs = jax.random.uniform(key, (2,))
        return obs, obs

    def step(self, key, state, action):
        return state, Step(state, state[0], jnp.bool_(True), jnp.bool_(False))


@pytest.fixture(scope="module")
def echo():
    """Eight seeds together and seed 3 alone, three rounds."""
    if "test/echo" not in registry._registered:
        jaxattr.register("test/echo", Echo)
    config = CONFIG.replace(total_steps=3 * N, env_args=(), normalize_reward=False)
    return jaxattr.train("test/echo", config, seeds=8), jaxattr.train("test/echo", config, seeds=[3])


def test_t11_the_same_start_states_for_every_seed(echo, whole):
    many, _ = echo
    returns = many.evaluations[3]
    assert returns.shape == (8, 2, 8)
    assert len(np.unique(returns)) == 8  # one value per evaluation environment
    assert np.array_equal(returns, np.broadcast_to(returns[0, 0], returns.shape))
    s = whole.run.summary
    assert 0 < s["eval_s"] < s["wall_s"]  # its time is apart


def test_t10_evaluation_does_not_touch_training(whole):
    every = train(config=CONFIG.replace(eval_every=1, total_steps=50 * N))
    assert len(every.evaluations) == 50
    assert len(whole.run.evaluations) == 1
    for part in ("params", "opt_state", "obs_stats", "reward_stats", "env_state", "key"):
        assert same(getattr(every.state, part), getattr(whole.run.state, part)), part
    assert np.array_equal(every.evaluations[50], whole.run.evaluations[50])


# -- figures of a run -----------------------------------------------------------------------------------------


def test_t12_speed_is_steps_over_the_time_that_training_took(whole):
    # Compiling (11 s), writing (3 s each) and evaluating are no part of it; a round takes 10 ms on the fixture's clock.
    s = whole.run.summary
    calls, writes = len(whole.seen), 5
    assert s["env_steps"] == s["env_steps_this_session"] == 50 * N * 2
    assert s["train_s"] == pytest.approx(50 * 0.01 + calls * 0.001, abs=6e-4)
    assert s["env_steps_per_s"] == pytest.approx(s["env_steps"] / s["train_s"], rel=0.002)
    assert s["compile_s"] == pytest.approx(11.001, abs=0.06)
    assert s["write_s"] == pytest.approx(writes * 3 + calls * 0.001, abs=6e-4)
    assert s["eval_s"] == pytest.approx(0.001, abs=1e-4)  # once, at the end
    assert s["wall_s"] == pytest.approx(s["train_s"] + s["eval_s"] + s["write_s"] + s["compile_s"], abs=0.1)
    assert whole.run.seconds.sum() == pytest.approx(s["train_s"], abs=1e-3)


def test_t30_nothing_is_compiled_after_update_2(whole):
    # Round 2 is recorded whole, so it is a call of its own.
    assert [info.update for info in whole.seen[:2]] == [1, 2]
    assert whole.compiled[0]  # the listener works
    assert functools.reduce(operator.iadd, whole.compiled[2:], []) == []


def test_callback_once_per_chunk(whole):
    updates = [info.update for info in whole.seen]
    assert updates == sorted(set(updates))
    assert updates[-1] == 50
    assert {10, 20, 30, 40} <= set(updates)  # checkpoints are between chunks
    joined = np.concatenate([info.metrics["kept"] for info in whole.seen])
    assert np.array_equal(joined, whole.run.metrics["kept"])
    assert whole.seen[0].total_updates == 50


def test_callback_stops_a_run_early_and_it_goes_on(tmp_path, whole):
    half = train(out=tmp_path / "r", callback=lambda info: info.update >= 15)
    assert 15 <= half.summary["updates"] < 50
    rest = train(out=tmp_path / "r", resume=True)
    assert same(rest.state, whole.run.state)
    assert rows(tmp_path / "r") == rows(whole.out)


def test_files(whole):
    names = {p.name for p in whole.out.iterdir()}
    wanted = "config.json metrics.csv records.csv summary.json timing.csv learning_curve.png scores.png"
    assert {*wanted.split(), "checkpoints", "tensorboard"} <= names
    table = rows(whole.out)
    assert tuple(table[0]) == COLUMNS
    assert len(table) == 2 * 50
    assert [int(r["seed"]) for r in table[:2]] == list(SEEDS)  # per-seed curves can be drawn
    assert sum(1 for _ in (whole.out / "tensorboard").glob("*seed_*/events*")) == 2
    kept = np.array([int(r["kept"]) for r in table]).reshape(50, 2)
    assert np.array_equal(kept, whole.run.metrics["kept"])
    for r in table:
        assert int(r["kept"]) + int(r["dropped"]) == N
        assert (r["return_mean"] == "") == (r["episodes"] == "0")
    saved = json.loads((whole.out / "config.json").read_text())
    assert Config.from_dict(saved["config"]) == CONFIG
    assert json.loads((whole.out / "summary.json").read_text()) == json.loads(json.dumps(whole.run.summary))


# -- the same seed, the same run ------------------------------------------------------------------------------


def test_t24_t09_same_seed_in_another_process_without_logging(whole, tmp_path):
    """T24: identical parameters and metrics. T09: two saved agents act identically in a fresh process."""
    p = process()
    obs = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    np.save(tmp_path / "obs.npy", obs)
    early = open_run(whole.out)[2][1]  # the last checkpoint
    fresh, _ = checkpoint.load(sorted((whole.out / "checkpoints").glob("[0-9]*"))[0], whole.run.state)
    take = lambda tree: jax.tree.map(lambda x: x[1], tree)
    first = jaxattr.Agent(ENV, 8, CONFIG, early.nets, take(fresh.params), take(fresh.obs_stats))
    assert not same(first.obs_stats, early.obs_stats)  # each has the statistics of its own time
    for name, agent in (("a", first), ("b", early)):
        agent.save(tmp_path / name)
        np.save(tmp_path / f"{name}.npy", agent.act(obs))
    code = (
        "import sys, numpy as np, jaxattr\n"
        "for n in 'ab':\n"
        "    d = sys.argv[1] + '/'\n"
        "    a = jaxattr.load_agent(d + n + '.npz').act(np.load(d + 'obs.npy'))\n"
        "    assert np.array_equal(a, np.load(d + n + '.npy')), n\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert not np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))

    got, _ = result(p)
    assert got["params"] == whole.run.summary["params_sha256"]
    assert got["state"] == checkpoint.digest(whole.run.state)
    for name, values in whole.run.metrics.items():
        assert np.array_equal(np.array(got["metrics"][name], values.dtype), values, equal_nan=values.dtype.kind == "f")


def test_t19_the_callers_configuration_is_not_touched(whole):
    mapping = CONFIG.to_dict()
    copy = json.loads(json.dumps(mapping))
    runs = [train(config=Config.from_dict(mapping)) for _ in range(2)]
    assert mapping == copy
    assert same(runs[0].state, runs[1].state)
    assert same(runs[0].state, whole.run.state)


def test_t20_options_of_the_environment_reach_training(whole):
    lengths = whole.run.metrics["length_mean"]
    assert np.nanmax(lengths) <= 60
    assert np.nanmax(lengths) > 10
    config = CONFIG.replace(env_args={"max_steps_in_episode": 10}, total_steps=3 * N)
    short = jaxattr.train("probe/never_ends", config)
    assert short.metrics["length_mean"].tolist() == [[10.0]] * 3
    assert np.all(short.evaluations[3] == 10)
    with pytest.raises(ConfigError, match=r"max_stps.*did you mean 'max_steps_in_episode'"):
        jaxattr.train(ENV, CONFIG.replace(env_args={"max_stps_in_episode": 10}))


def test_t21_config_diff_is_one_line(tmp_path, capsys):
    reference = CONFIG.replace(gamma=0.995)
    for name, config in (("a", reference), ("b", reference.replace(gamma=0.9995))):
        (tmp_path / f"{name}.json").write_text(json.dumps({"env": ENV, "config": config.to_dict()}))
    assert cli.main(["config", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out == "gamma: 0.995 -> 0.9995\n"


# -- checkpoint and resume ------------------------------------------------------------------------------------
def test_runs_of_one_process_save_side_by_side(tmp_path):
    """Orbax alone breaks files when two threads save at once; `reproduce --quick` runs two."""
    state = {
        "a": np.ones((4, 64), "f"),
        "alive": np.ones(4, bool),
        "b": {str(i): np.full(9, i, "i") for i in range(20)},
    }

    def save(name):
        for update in range(1, 9):
            checkpoint.save(tmp_path / name, update, state, {})
        return checkpoint.load_latest(tmp_path / name, state)

    with ThreadPoolExecutor(3) as pool:
        for loaded, meta, warnings in pool.map(save, "xyz"):
            assert (meta["update"], warnings) == (8, [])
            assert checkpoint.digest(loaded) == checkpoint.digest(state)


def test_t28_t29_a_checkpoint_is_the_state(whole):
    like = init_state(whole.run.step, SEEDS)
    state, meta, warnings = checkpoint.load_latest(whole.out / "checkpoints", like)
    assert (meta["update"], warnings) == (50, [])
    assert jax.tree.structure(state) == jax.tree.structure(like) == jax.tree.structure(whole.run.state)
    for x, y in zip(*map(jax.tree.leaves, (state, like)), strict=True):
        assert x.aval == y.aval  # shape, dtype, weak type, typed keys
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    assert same(state, whole.run.state)
    assert np.asarray(state.opt_state[1].count).tolist() == whole.run.metrics["optimizer_steps"].sum(0).tolist()
    assert same(state.opt_state, whole.run.state.opt_state)


def test_t29_t31_a_restored_state_runs_in_the_same_compiled_chunk(whole):
    step, settings = whole.run.step, lane_settings(CONFIG, 2)
    fresh, settings = place_lanes(init_state(step, SEEDS), 2), place_lanes(settings, 2)
    restored, meta = checkpoint.load(sorted((whole.out / "checkpoints").glob("[0-9]*"))[0], fresh)
    restored, done = place_lanes(restored, 2), meta["update"]
    chunk, names = make_chunk(step, 2, 50), []
    listen = lambda name, *_, **__: names.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state = chunk(fresh, settings, jnp.int32(3))[0]
        assert len(names) == 1
        chunk(state, settings, jnp.int32(2))
        end = chunk(restored, settings, jnp.int32(50 - done))[0]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(names) == 1  # neither its own result nor a restored state needs another one
    assert same(end, whole.run.state)


def test_t27_two_halves_equal_one_run(whole, tmp_path):
    out = tmp_path / "r"
    train(out=out, callback=lambda info: info.update == 20)
    assert rows(out) == rows(whole.out)[:40]
    got, _ = result(process(out=str(out), resume=True))  # the second half in a new process
    assert got["state"] == checkpoint.digest(whole.run.state)  # parameters, optimiser, normaliser, environments, keys
    assert (out / "metrics.csv").read_bytes() == (whole.out / "metrics.csv").read_bytes()
    for name, values in whole.run.metrics.items():
        assert np.allclose(np.array(got["metrics"][name], float), np.array(values, float), rtol=1e-6, equal_nan=True), (
            name
        )


def test_resume_of_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole.out, tmp_path / "r")
    again = train(out=tmp_path / "r", resume=True)
    assert same(again.state, whole.run.state)
    assert rows(tmp_path / "r") == rows(whole.out)


def test_resume_with_more_steps(tmp_path):
    config = CONFIG.replace(lr_schedule="constant", env_args=(), total_steps=3 * N, filter="none")
    longer = config.replace(total_steps=6 * N)
    jaxattr.train("probe/obs_policy", config, out=tmp_path / "r")
    rest = jaxattr.train("probe/obs_policy", longer, out=tmp_path / "r", resume=True)
    once = jaxattr.train("probe/obs_policy", longer, out=tmp_path / "once")
    assert same(rest.state, once.state)
    assert rest.summary["updates"] == 6
    assert rest.summary["env_steps_this_session"] == 3 * N
    a, b = rows(tmp_path / "r"), rows(tmp_path / "once")
    for r in (*a, *b):
        r.pop("test_return"), r.pop("test_return_deterministic")  # the first part ended with an evaluation of its own
    assert a == b


def test_resume_after_kill_9_at_any_moment(whole, tmp_path):
    out = tmp_path / "r"
    config = {**CONFIG.to_dict(), "checkpoint_every": 1}
    rng = np.random.default_rng()
    moments = []
    for attempt in range(3):
        p = process(config=config, out=str(out), resume=attempt > 0)
        seen = newest(out)
        while p.poll() is None:
            writing = list((out / "checkpoints").glob(".tmp-*")) if attempt == 1 else []
            if newest(out) > seen + 2 and (attempt != 1 or writing):  # attempt 1: in the middle of a checkpoint
                break
            time.sleep(0.001)
        if attempt != 1:
            time.sleep(rng.uniform(0, 0.6))
        p.send_signal(signal.SIGKILL)
        p.wait()
        p.stdout.close(), p.stderr.close()
        moments.append(newest(out))
    assert moments[0] >= 3
    got, _ = result(process(config=config, out=str(out), resume=True))
    assert got["state"] == checkpoint.digest(whole.run.state), moments
    assert (out / "metrics.csv").read_bytes() == (whole.out / "metrics.csv").read_bytes(), moments


def newest(out):
    return max((int(p.name) for p in (out / "checkpoints").glob("[0-9]*")), default=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's threads, about the damage
@pytest.mark.parametrize("damage", ["truncated", "emptied", "no meta", "flipped", "unfinished"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(whole, tmp_path, capsys, damage):
    out = tmp_path / "r"
    shutil.copytree(whole.out, out)
    last = out / "checkpoints" / "00000050"
    files = sorted(
        (p for p in last.rglob("*") if p.is_file() and p.name != "meta.json"), key=lambda p: p.stat().st_size
    )
    if damage == "unfinished":
        last.rename(out / "checkpoints" / ".tmp-00000050")
    elif damage == "no meta":
        (last / "meta.json").unlink()
    elif damage == "emptied":
        for f in files:
            f.write_bytes(b"")
    else:
        data = [p for p in files if "/d/" in str(p)] or files[-1:]
        for f in data:
            raw = f.read_bytes()
            f.write_bytes(raw[: len(raw) // 2] if damage == "truncated" else flip(raw))
    with (out / "metrics.csv").open("a") as f:
        f.write("7,51,65")  # a row that was being written
    rest = train(out=out, resume=True, quiet=False)
    said = capsys.readouterr().err
    assert ("unfinished checkpoint .tmp-00000050" if damage == "unfinished" else "damaged checkpoint 00000050") in said
    assert "resuming after round 40" in said
    assert same(rest.state, whole.run.state)
    assert rows(out) == rows(whole.out)


def flip(raw):
    middle = len(raw) // 2
    return raw[:middle] + bytes(b ^ 0xFF for b in raw[middle : middle + 64]) + raw[middle + 64 :]


def test_no_whole_checkpoint_is_one_clear_line(whole, tmp_path):
    out = tmp_path / "r"
    shutil.copytree(whole.out, out)
    for p in (out / "checkpoints").glob("[0-9]*"):
        (p / "meta.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no usable checkpoint.*00000050.*00000040.*00000030") as error:
        train(out=out, resume=True)
    assert "\n" not in str(error.value)


def test_t16_init_from_takes_weights_optimiser_and_normaliser_with_other_environments(whole):
    config = CONFIG.replace(num_envs=8, num_steps=16, learning_rate=0.0, total_steps=N, lr_schedule="constant")
    run = train(config=config, init_from=whole.out)
    start, state = whole.run.state, run.state
    assert same(state.params, start.params)
    assert state.discounted_return.shape == (2, 8)
    assert state.obs_stats.mean.shape == (2, 4)  # per entry, not per environment
    assert np.asarray(state.obs_stats.count).tolist() == [51 * N] * 2  # 50 rounds there, one here
    steps = np.asarray(state.opt_state[1].count) - np.asarray(start.opt_state[1].count)
    assert steps.tolist() == run.metrics["optimizer_steps"][0].tolist()
    with pytest.raises(ConfigError, match="params does not fit"):
        train(config=config.replace(hidden=(8,)), init_from=whole.out)
    with pytest.raises(ConfigError, match="has 2 seeds, this run 3"):
        train(config=config, seeds=3, init_from=whole.out)


# -- agents, records ------------------------------------------------------------------------------------------


def test_t42_agent_3_of_8(echo, tmp_path):
    many, solo = echo
    agent, alone = many.agent(3), solo.agent(0)
    assert agent.seed == alone.seed == 3
    for x, y in zip(*map(jax.tree.leaves, (agent.params, alone.params)), strict=True):
        assert np.allclose(x, y, rtol=1e-5, atol=1e-6)
    obs = np.random.default_rng(1).uniform(size=(5, 20, 2))
    assert agent.act(obs).shape == (5, 20)
    assert agent.act(obs[0, 0]).shape == ()
    key = jax.random.key(4)
    assert len(set(np.asarray(agent.act(obs, key)).ravel().tolist())) == 2  # drawn, near uniform
    assert np.array_equal(agent.act(obs, key), agent.act(obs, key))
    path = agent.save(tmp_path / "three")
    loaded = jaxattr.load_agent(path)
    assert same(loaded.params, agent.params)
    assert np.array_equal(loaded.act(obs), agent.act(obs))
    assert np.array_equal(loaded.act(obs), alone.act(obs))
    assert (loaded.seed, loaded.env_id, loaded.config) == (3, "test/echo", many.config)
    with pytest.raises(IndexError, match="seed index 8: this run has 8"):
        many.agent(8)
    with pytest.raises(ValueError, match="must end in"):
        agent.act(np.zeros(3))


def test_t42_one_seed_of_many_equals_a_solo_run(echo):
    many, solo = echo
    for name in ("kept", "optimizer_steps", "episodes"):
        assert np.array_equal(many.metrics[name][:, 3], solo.metrics[name][:, 0])
    assert np.allclose(many.metrics["return_mean"][:, 3], solo.metrics["return_mean"][:, 0], rtol=1e-5)


def test_records_are_the_ends_of_the_ranking(whole):
    found = whole.run.records(index=1, top=10)
    assert len(found) == 20
    judged = whole.run._judged[50]
    scores, weights = judged.scores[1], judged.weights[1]
    assert [r["score"] for r in found[:10]] == np.sort(scores)[::-1][:10].tolist()
    assert [r["score"] for r in found[10:]] == np.sort(scores)[::-1][-10:].tolist()
    assert [r["rank"] for r in found] == [*range(1, 11), *range(N - 9, N + 1)]
    for r in found:
        i = r["record"]
        assert (r["seed"], r["round"]) == (8, 50)
        assert r["step"] * 4 + r["env"] == i
        assert r["score"] == scores[i]
        assert r["kept"] == (weights[i] > 0)
        assert r["action"] == judged.records.action[1, i]
        assert r["advantage"] == judged.records.advantage[1, i]
        assert r["reward"] == judged.records.reward[1, i]
    dropped = whole.run.metrics["dropped"][49, 1]
    assert sum(not r["kept"] for r in whole.run.records(index=1, top=64)) == dropped
    assert not found[-1]["kept"]
    assert len(whole.run.records(top=N)) == N


def test_records_of_a_round_that_was_not_kept_are_replayed(whole):
    recorded = whole.run.records(2)
    other = train()
    assert 2 not in other._judged
    assert other.records(2) == recorded
    assert other.records() == whole.run.records()
    with pytest.raises(ValueError, match="round 51"):
        other.records(51)
    with (whole.out / "records.csv").open(newline="") as f:
        table = list(csv.DictReader(f))
    assert {(r["seed"], r["round"]) for r in table} == {("7", "2"), ("8", "2"), ("7", "50"), ("8", "50")}
    assert [float(r["score"]) for r in table[:40]] == [r["score"] for r in recorded]


# -- what goes wrong ------------------------------------------------------------------------------------------

NAN = {"nan_step": 40, "nan_prob": 0.15}  # made by step 40: record step 8 (from 0) of round 2


@pytest.fixture(scope="module")
def poisoned():
    """(config, seeds that die, seeds that live): the observation turns NaN in step 40 of some environments."""
    config = CONFIG.replace(env_args=NAN, total_steps=4 * N, checkpoint_every=1)
    dead, alive = [], []
    for first in range(0, 20, 2):
        try:
            run = jaxattr.train("probe/nan", config, seeds=[first, first + 1])
        except jaxattr.Stopped as error:
            run = error.run
        dead += run.summary["stopped_seeds"]
        alive += [s for s in (first, first + 1) if s not in dead]
        if len(dead) >= 2 and alive:
            break
    return config, dead, alive


def finite(*trees):
    return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(trees))


def test_t13_a_seed_that_meets_nan_stops_and_others_go_on(poisoned, tmp_path, capsys):
    config, (bad, *_), (good, *_) = poisoned
    out = tmp_path / "r"
    run = jaxattr.train("probe/nan", config, seeds=[bad, good], out=out, quiet=False)
    said = [line for line in capsys.readouterr().err.splitlines() if "non-finite" in line]
    assert len(said) == 1
    assert said[0].startswith(f"seed {bad}: non-finite observation in update 2, record ")
    assert "(step 8, environment " in said[0]
    assert said == run.summary["nonfinite"]
    assert run.summary["stopped_seeds"] == [bad]
    assert finite(run.state.params, run.state.obs_stats, run.state.opt_state, run.state.reward_stats)
    assert np.asarray(run.state.update).tolist() == [1, 4]
    table = rows(out)
    logged = {s: [r["nonfinite"] for r in table if int(r["seed"]) == s] for s in (bad, good)}
    assert logged == {bad: ["", "observation"], good: [""] * 4}
    assert (out / "checkpoints" / "00000004").exists()
    with (out / "records.csv").open(newline="") as f:
        assert {int(r["seed"]) for r in csv.DictReader(f)} == {good}
    again = jaxattr.train("probe/nan", config, seeds=[bad, good], out=out, resume=True)
    assert again.summary["stopped_seeds"] == [bad]
    assert same(again.state, run.state)


def test_t13_exit_code_3_and_the_last_good_checkpoint_stays(poisoned, tmp_path, capsys):
    config, dead, _ = poisoned
    with pytest.raises(jaxattr.Stopped, match=r"every seed stopped: seed .* non-finite observation in update 2"):
        jaxattr.train("probe/nan", config, seeds=dead[:2], out=tmp_path / "r")
    like = init_state(runner.make_update_step(registry.make("probe/nan", config.env_args), config), dead[:2])
    state, _meta, warnings = checkpoint.load_latest(tmp_path / "r" / "checkpoints", like)
    assert warnings == []
    assert np.asarray(state.update).tolist() == [1, 1]
    assert finite(state.params, state.obs_stats)

    file = tmp_path / "c.json"
    file.write_text(json.dumps({"env": "probe/nan", "config": config.to_dict()}))
    pair = dead[0] // 2 * 2  # two neighbouring seeds of which one or both die
    words = ["train", "--config", str(file), "--first-seed", str(pair), "--seeds", "2", "--out", str(tmp_path / "c")]
    assert cli.main([*words, "--quiet"]) == 3
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 or {pair, pair + 1} <= set(dead)
    assert any("non-finite observation in update 2, record" in line for line in err)


def test_t13_skip_discards_the_round_and_goes_on(capsys):
    config = CONFIG.replace(env_args=NAN | {"nan_prob": 1.0}, total_steps=6 * N, on_nonfinite="skip")
    run = jaxattr.train("probe/nan", config, seeds=2, quiet=False)
    said = capsys.readouterr().err
    # Every episode meets it in step 40: rounds 2, 4, 6 are discarded, and their environments start anew.
    assert np.array_equal(run.metrics["nonfinite"] > 0, np.array([[False] * 2, [True] * 2] * 3))
    assert said.count("non-finite observation in update 2") == 2
    assert "discarded this round" in said
    assert np.asarray(run.state.update).tolist() == [6, 6]
    assert np.all(np.asarray(run.state.alive))
    assert np.asarray(run.state.obs_stats.count).tolist() == [3 * N] * 2
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((run.state.params, run.state.obs_stats)))


# -- sweeps, W&B ----------------------------------------------------------------------------------------------


def test_sweep_is_a_grid_in_one_program(echo):
    run = jaxattr.train("test/echo", echo[0].config, seeds=[3, 5], sweep={"p": [0.0, 0.5], "gamma": [0.9, 0.99]})
    assert run.seeds == (3, 5) * 4
    dropped = run.metrics["dropped"]
    assert np.all(dropped[:, :4] == 0)
    assert np.all(dropped[:, 4:] > 0)
    want = echo[0]  # its settings are p 0.5, gamma 0.99: lanes 6 and 7 are its seeds 3 and 5
    assert same(lane(run.state.params, 6), lane(want.state.params, 3))
    assert same(lane(run.state.params, 7), lane(want.state.params, 5))
    with pytest.raises(ConfigError, match="'num_envs' cannot differ"):
        jaxattr.train("test/echo", echo[0].config, sweep={"num_envs": [1, 2]})
    with pytest.raises(ConfigError, match="p is 2"):
        jaxattr.train("test/echo", echo[0].config, sweep={"p": [0, 2]})


def test_wandb_gets_every_row(monkeypatch, tmp_path):
    logged, started = [], []

    class Fake(types.ModuleType):
        def init(self, **kwargs):
            started.append(kwargs)
            return types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))

    monkeypatch.setitem(sys.modules, "wandb", Fake("wandb"))
    run = train(out=tmp_path / "r", wandb=True)
    assert len(logged) == 2 * 50 + 1
    assert logged[-1] == "finished"
    assert started[0]["config"]["config"]["gamma"] == CONFIG.gamma
    assert logged[0]["lane_0_seed_7/kept"] == run.metrics["kept"][0, 0]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install"):
        train(out=tmp_path / "other", wandb=True)
    with pytest.raises(ConfigError, match="--wandb needs --out"):
        train(wandb=True)


def test_wandb_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'jaxattr[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(out=tmp_path / "r", wandb=True)
    assert list((tmp_path / "r" / "wandb").glob("offline-run-*"))
