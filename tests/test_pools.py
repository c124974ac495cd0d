"""Environments that keep their own state: the contract, the records made of them, and the two backends."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattr
from jaxattr.config import Config, ConfigError
from jaxattr.envs import envpool, registry, spaces
from jaxattr.envs.base import Box, Discrete, EnvSpec, Step, pure
from jaxattr.envs.envpool import EnvPoolCopies
from jaxattr.evaluate import evaluate_lanes
from jaxattr.host.cli import main
from jaxattr.lanes import place_lanes
from jaxattr.ops.statistics import init_stats
from jaxattr.pools import PoolTest
from jaxattr.presets import preset
from jaxattr.testing import check_pool
from jaxattr.train import HostedChunk, compile_chunk, init_state, lane_settings, make_update_step
from jaxattr.update import UpdateStep
from tests.oracles import returns as oracle

SMALL = Config(
    num_envs=2, num_steps=24, minibatch_size=8, num_epochs=2, hidden=(8,), total_steps=3 * 48, learning_rate=3e-3,
    eval_episodes=3, norm_chunk=8,
)  # fmt: skip


# -- a pool whose every row is known -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Copy `seed` climbs: at step t it sees (seed, t), gets reward t; odd seeds fail at 3, even ones are cut at 5.

    `spoil` breaks one point of the contract.
    """

    spoil: str = ""
    in_jit: bool = False
    spec = EnvSpec("test/ladder", (2,), Discrete(2), 5)

    def open(self, seeds, threads=0):
        return OpenLadder(self, np.array(seeds))


class OpenLadder:
    traced_step = None

    def __init__(self, env, seeds):
        self.env, self.seeds, self.t = env, seeds % 1000, np.zeros(len(seeds), int)
        self.ended = np.zeros(len(seeds), bool)
        self.closed = False

    @property
    def obs(self):
        return np.stack([self.seeds, self.t], axis=-1).astype(np.float32)

    def step(self, action, which=None):
        spoil = self.env.spoil
        reset = self.ended
        self.t = np.where(reset, 0, self.t + 1)
        odd = self.seeds % 2 == 1
        terminated, truncated = odd & (self.t == 3), ~odd & (self.t == (6 if spoil == "late" else 5))
        if spoil == "both":
            truncated |= terminated
        reward = np.where(reset, 1.0 if spoil == "reward" else 0.0, self.t).astype(np.float32)
        if spoil == "action":
            reward = reward + np.where(self.t == 1, action, 0).astype(np.float32)
            self.t = np.where(reset, np.asarray(action), self.t)
        if spoil == "position":
            reward = reward + np.where(reset, 0, np.arange(len(reset))).astype(np.float32)
        self.ended = terminated | truncated
        obs = self.obs.astype(np.float64) if spoil == "dtype" else self.obs
        return Step(obs, reward, terminated, truncated)

    def close(self):
        self.closed = True


def test_the_contract_check_passes_a_good_pool():
    check_pool(Ladder(), steps=20)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("late", "goes on after 5 steps"),
        ("both", "terminated and truncated"),
        ("reward", "no reset"),
        ("action", "not ignored"),
        ("position", "depends on more than its seed"),
        ("dtype", "must be float32"),
    ],
)
def test_the_contract_check_finds_each_fault(spoil, message):
    with pytest.raises(AssertionError, match=message):
        check_pool(Ladder(spoil), steps=20)


@pytest.fixture(scope="module")
def ladder():
    """One round of two lanes x two copies on the ladder, and what the chunk says of it."""
    step = make_update_step(Ladder(), SMALL)
    state, settings = init_state(step, [0, 1]), lane_settings(SMALL, 2)
    assert isinstance(compile_chunk(step, state, settings, 3), HostedChunk)
    collector = step.collector
    keys = step.split(state)
    noise = collector.noise(step.nets, keys[:, 1])
    act = jax.jit(lambda p, o, obs, noise, t: collector.act(step.nets, p, o, obs, noise[t]))
    played = collector.play(act, state, noise)
    after, rollout, episodes = jax.jit(lambda s, p: collector.finish(step.nets, s, p))(state, played)
    return step, state, played, after, rollout, episodes


def expected_rows(seed, steps, ended=False, t=0):
    """(obs, reward, terminated, truncated, valid, next obs) of one copy, by a plain loop."""
    rows = []
    for _ in range(steps):
        obs, valid = (seed, t), not ended
        t = 0 if ended else t + 1
        terminated, truncated = bool(seed % 2 and t == 3), bool(seed % 2 == 0 and t == 5)
        rows.append((obs, 0 if ended else t, terminated, truncated, valid, (seed, t)))
        ended = terminated or truncated
    return rows


def test_rows_are_what_the_copies_did(ladder):
    step, state, _, after, rollout, _ = ladder
    for lane in range(2):
        for copy in range(2):
            seed = int(state.env_state.obs[lane, copy, 0])
            want = [np.array(x) for x in zip(*expected_rows(seed, SMALL.num_steps), strict=True)]
            got = jax.tree.map(lambda x: np.asarray(x)[lane, :, copy], rollout)  # noqa: B023
            np.testing.assert_array_equal(got.obs, want[0])
            np.testing.assert_array_equal(got.reward, want[1])
            np.testing.assert_array_equal(got.terminated, want[2])
            np.testing.assert_array_equal(got.truncated, want[3])
            np.testing.assert_array_equal(got.valid, want[4])
            np.testing.assert_array_equal(np.asarray(after.obs)[lane, copy], want[5][-1])
            # V of the TRUE next observation, also at an episode's end, where the next row is a reset
            values = jax.vmap(lambda o: step.nets.value(jax.tree.map(lambda x: x[lane], state.params), o))  # noqa: B023
            np.testing.assert_allclose(got.next_value, values(jnp.asarray(want[5], jnp.float32)), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got.value, values(jnp.asarray(want[0], jnp.float32)), rtol=1e-5, atol=1e-6)


def test_every_episode_counts_once_with_its_own_rows(ladder):
    _, state, _, after, _, episodes = ladder
    for lane in range(2):
        count = total = length = 0
        for copy in range(2):
            rows = expected_rows(int(state.env_state.obs[lane, copy, 0]), SMALL.num_steps)
            ends = [i for i, r in enumerate(rows) if r[2] or r[3]]
            count += len(ends)
            kept = [r for r in rows[: ends[-1] + 1] if r[4]]
            total, length = total + sum(r[1] for r in kept), length + len(kept)
            open_rows = [r for r in rows[ends[-1] + 1 :] if r[4]]
            assert float(after.episode_return[lane, copy]) == sum(r[1] for r in open_rows)
            assert int(after.episode_length[lane, copy]) == len(open_rows)
        assert int(episodes.count[lane]) == count
        assert float(episodes.return_sum[lane]) == total
        assert float(episodes.length_sum[lane]) == length


def test_advantages_bootstrap_at_the_limit_and_never_cross_a_reset_row(ladder):
    step, state, _, _, rollout, _ = ladder
    settings = jax.tree.map(lambda x: x[0], lane_settings(SMALL, 2))
    lane = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    for i in range(2):
        records, _, _ = step.advantages(lane(state, i), lane(rollout, i), settings)
        advantage = np.asarray(records.advantage).reshape(SMALL.num_steps, 2)
        for copy in range(2):
            column = jax.tree.map(lambda x: np.asarray(x)[i, :, copy], rollout)  # noqa: B023
            ends = np.flatnonzero(~column.valid)
            for part in np.split(np.arange(SMALL.num_steps), ends):  # stretches between reset rows
                part = part[column.valid[part]]
                want = oracle.gae(
                    *(np.asarray(getattr(column, f)[part], np.float64) for f in ("reward", "value", "next_value")),
                    column.terminated[part], column.truncated[part], SMALL.gamma, SMALL.gae_lambda,
                )  # fmt: skip
                want = want[0] if isinstance(want, tuple) else want
                np.testing.assert_allclose(advantage[part, copy], want, rtol=1e-4, atol=1e-5)
        assert not np.asarray(records.valid).all()
        assert (np.asarray(records.advantage)[~np.asarray(records.valid)] == 0).all()


def test_reset_rows_reach_no_loss_no_score_and_no_count(ladder):
    """Whatever stands in a row that is no record, NaN too, the round ends the same."""
    _, state, _, _, rollout, episodes = ladder
    config = SMALL.replace(filter="iif", p=0.5, target="return")
    learner = make_update_step(Ladder(), config)
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)
    learn = jax.jit(learner.learn)
    settings, key = one(lane_settings(config, 2)), jax.random.key(3)
    plain = learn(one(state), one(rollout), one(episodes), key, settings)
    bad = jax.tree.map(
        lambda x: jnp.where(
            one(rollout).valid.reshape(one(rollout).valid.shape + (1,) * (x.ndim - 2)),
            x,
            jnp.asarray(np.nan if x.dtype == jnp.float32 else 1, x.dtype),
        ),
        one(rollout).replace(valid=None, env_state=None),
    ).replace(valid=one(rollout).valid)
    spoilt = learn(one(state), bad, one(episodes), key, settings)
    jax.tree.map(np.testing.assert_array_equal, plain[0].params, spoilt[0].params)
    valid = np.asarray(plain[2].records.valid)
    np.testing.assert_array_equal(plain[2].scores[valid], spoilt[2].scores[valid])
    assert (np.asarray(spoilt[2].weights)[~valid] == 0).all()
    assert int(spoilt[1].records) == valid.sum() == int(spoilt[1].kept) + int(spoilt[1].dropped)


def test_tests_count_the_first_episode_of_each_copy_only():
    """The ladder's returns: 1 + 2 + 3 for odd seeds, 1 + 2 + 3 + 4 + 5 for even ones."""
    env = Ladder()
    step = make_update_step(env, SMALL)
    state = init_state(step, [0, 1, 2])
    test = PoolTest(step.nets, env, 7)
    key = jax.random.key(4)
    result = test(state.params, state.obs_stats, key)
    seeds = np.asarray(jax.random.bits(jax.random.split(key)[0], (7,), jnp.uint32)) >> 1
    odd = seeds % 1000 % 2 == 1
    assert result.episode_return.shape == (3, 2, 7)
    np.testing.assert_array_equal(result.episode_return, np.broadcast_to(np.where(odd, 6, 15), (3, 2, 7)))
    np.testing.assert_array_equal(result.length, np.broadcast_to(np.where(odd, 3, 5), (3, 2, 7)))
    assert result.finished.all()
    only = PoolTest(step.nets, env, 7, (0,))(state.params, state.obs_stats, key)
    np.testing.assert_array_equal(only.episode_return[:, 0], result.episode_return[:, 0])
    assert np.isnan(only.episode_return[:, 1]).all()
    assert not only.finished[:, 1].any()


def test_many_test_episodes_are_played_in_blocks(monkeypatch):
    env, opened = Ladder(), []
    monkeypatch.setattr("jaxattr.pools.TEST_COPIES", 12)
    monkeypatch.setattr(
        Ladder, "open", lambda self, seeds, threads=0: opened.append(s := OpenLadder(self, np.array(seeds))) or s
    )
    step = make_update_step(env, SMALL)
    state = init_state(step, [0, 1])
    opened.clear()
    result = PoolTest(step.nets, env, 7)(state.params, state.obs_stats, jax.random.key(0))
    assert [len(p.seeds) for p in opened] == [12, 8, 8]
    assert all(p.closed for p in opened)
    assert result.finished.all()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_a_pool_cannot_do_is_said_before_anything_compiles():
    for config, keep, message in (
        (SMALL, True, "recorded whole"),
        (SMALL.replace(on_nonfinite="skip"), False, "on_nonfinite = stop"),
        (SMALL.replace(reset="cached"), False, "reset = fresh"),
        (SMALL.replace(round_start="reset"), False, "round_start = continue"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_update_step(Ladder(), config, keep_states=keep)
    with pytest.raises(ConfigError, match="test/ladder keeps its state outside JAX: it cannot be drawn"):
        pure(Ladder(), "be drawn")


def test_a_pool_belongs_to_one_run():
    step = make_update_step(Ladder(), SMALL)
    init_state(step, [0])
    with pytest.raises(RuntimeError, match="already in use"):
        init_state(step, [0])


def test_a_user_may_register_a_pool():
    registry.register("test/my-ladder", lambda: Ladder())
    try:
        run = jaxattr.train("test/my-ladder", SMALL.replace(filter="iif"), seeds=2)
        assert run.metrics["records"].shape == (3, 2)
        with pytest.raises(ValueError, match="cannot be run again"):
            run.records(1)
        rows = run.records(3, top=100)
        assert len(rows) == run.metrics["records"][2, 0] < 48  # reset rows are not listed
    finally:
        registry._registered.pop("test/my-ladder")


def test_without_envpool_the_message_says_what_to_install(monkeypatch):
    import sys

    envpool._package.cache_clear()
    monkeypatch.setitem(sys.modules, "envpool", None)
    try:
        with pytest.raises(ConfigError, match=r"pip install 'jaxattr\[envpool\]'.*gymnax and brax"):
            registry.make("envpool/LunarLander-v3")
        row = next(r for r in registry.list_envs() if r.family == "envpool")
        assert "unavailable" in row.description
        assert "install" in row.description
    finally:
        envpool._package.cache_clear()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: registry.make("LunarLander-v3"), "'envpool/LunarLander-v3'"),
        (lambda: registry.make("envpool/LunarLandr-v3"), "did you mean 'envpool/LunarLander-v3'"),
        (lambda: registry.make("gymnasium/Acrobat-v1"), "did you mean 'gymnasium/Acrobot-v1'"),
        (lambda: registry.make("envpool/LunarLander-v3", {"gravity": 1}), "has no option 'gravity'"),
        (lambda: registry.make("envpool/LunarLander-v3", {"num_envs": 3}), "has no option 'num_envs'"),
        (lambda: registry.make("envpool/LunarLander-v3", {"max_episode_steps": "x"}), "must be a whole number"),
        (lambda: registry.make("envpool/MiniGrid-Empty-8x8-v0", {"obs_key": "picture"}), "no entry 'picture'"),
        (lambda: registry.make("envpool/LunarLander-v3", {"obs_key": "image"}), "no Dict"),
        (lambda: registry.make("gymnasium/Blackjack-v1"), "observation space Tuple is not supported"),
        (lambda: registry.make("gymnasium/CartPole-v1", {"wind": 1}), "gymnasium/CartPole-v1: .*wind"),
    ],
)
def test_bad_names_are_one_clear_line(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_listing_many_environments(capsys):
    assert main(["envs", "lunar"]) == 0
    out = capsys.readouterr().out
    assert "envpool/LunarLander-v3" in out
    assert "4 actions" in out
    assert "CartPole" not in out
    assert main(["envs", "nothing-like-this"]) == 2
    assert len(registry.list_envs()) < 120  # EnvPool's are not spelt out


def test_spaces():
    import gymnasium.spaces as gs

    image = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    view = spaces.obs_view("e", gs.Box(0, 255, (3, 4, 5), np.uint8))
    assert view.shape == (4, 5, 3)
    np.testing.assert_allclose(view.encode(image, np), np.moveaxis(image, 1, -1) / np.float32(255))
    np.testing.assert_allclose(view.encode(jnp.asarray(image), jnp), view.encode(image, np))
    last = spaces.obs_view("e", gs.Box(0, 255, (7, 7, 3), np.uint8))
    assert last.shape == (7, 7, 3)
    one_hot = spaces.obs_view("e", gs.Discrete(3, start=2))
    np.testing.assert_array_equal(one_hot.encode(np.array([2, 4]), np), [[1, 0, 0], [0, 0, 1]])
    scalar = spaces.obs_view("e", gs.Box(-1, 1, ()))
    assert scalar.encode(np.zeros(4), np).shape == (4, 1)
    inside = spaces.obs_view("e", gs.Dict(a=gs.Discrete(2), observation=gs.Box(-1, 1, (2,))))
    np.testing.assert_array_equal(inside.encode({"observation": np.ones((5, 2))}, np), np.ones((5, 2)))
    with pytest.raises(ConfigError, match="choose one with obs_key"):
        spaces.obs_view("e", gs.Dict(a=gs.Discrete(2), b=gs.Discrete(2)))
    assert spaces.action_of("e", gs.Box(-1, 2, (2,))) == Box(2, (-1.0, -1.0), (2.0, 2.0))
    for space in (gs.MultiDiscrete([2, 2]), gs.Discrete(2, start=1), gs.Box(-1, 1, (2, 2))):
        with pytest.raises(ConfigError, match="is not supported"):
            spaces.action_of("e", space)


# -- the backends --------------------------------------------------------------------------------------------------

TASKS = [
    ("envpool/LunarLander-v3", {"max_episode_steps": 70}),
    ("envpool/BipedalWalker-v3", {"max_episode_steps": 40}),
    ("envpool/MiniGrid-Empty-8x8-v0", {"max_episode_steps": 50}),
    ("envpool/MiniGrid-DoorKey-8x8-v0", {"max_episode_steps": 50}),
    ("envpool/Highway-v0", {"vehicles_count": 10, "duration": 8}),
    ("envpool/Acrobot-v1", {"max_episode_steps": 50}),
    ("envpool/FrozenLake-v1", {}),
    ("envpool/Ant-v5", {"max_episode_steps": 50}),  # float64: stepped from the host
    ("gymnasium/Acrobot-v1", {"max_episode_steps": 50}),
    ("gymnasium/CartPole-v1", {}),
    ("gymnasium/FrozenLake-v1", {}),
    ("gymnasium/Pendulum-v1", {"max_episode_steps": 50}),
]


@pytest.mark.parametrize(("env_id", "options"), TASKS, ids=[t for t, _ in TASKS])
def test_the_backends_keep_the_contract(env_id, options):
    env = registry.make(env_id, options)
    check_pool(env, steps=150)
    assert env.in_jit == (env_id.startswith("envpool/") and "Ant" not in env_id)


def test_a_failure_in_the_last_step_counts_as_a_failure():
    """CartPole falls in step 10 or so under constant pushes; with that very step as the limit, Gymnasium says both."""

    def first_end(limit):
        pool = registry.make("gymnasium/CartPole-v1", {"max_episode_steps": limit}).open([3])
        for t in range(1, 100):
            step = pool.step(np.zeros(1, np.int32))
            if step.terminated[0] or step.truncated[0]:
                return t, bool(step.terminated[0]), bool(step.truncated[0])
        raise AssertionError("the pole never fell")

    length, *flags = first_end(500)
    assert flags == [True, False]
    assert first_end(length) == (length, True, False)
    assert first_end(length - 1) == (length - 1, False, True)


def test_copies_that_rest_change_no_other_episode(monkeypatch):
    """A test that steps only the copies whose episodes go on finds what one that steps all of them does."""
    step = make_update_step(registry.make("envpool/LunarLander-v3"), SMALL)
    params = jax.tree.map(lambda x: x[None], step.nets.init(jax.random.key(3)))
    stats = jax.tree.map(lambda x: x[None], init_stats((8,)))
    stepped = []

    def play(rest):
        plain = EnvPoolCopies.step
        monkeypatch.setattr(
            EnvPoolCopies,
            "step",
            lambda self, action, which=None: stepped.append(len(which)) or plain(self, action, which if rest else None),
        )
        result = PoolTest(step.nets, registry.make("envpool/LunarLander-v3"), 12, (0,))(
            params, stats, jax.random.key(1)
        )
        monkeypatch.setattr(EnvPoolCopies, "step", plain)
        return result

    some, everything = play(True), play(False)
    assert some.finished[:, 0].all()
    assert len(set(some.length[0, 0].tolist())) > 6  # episodes of many lengths: most copies did rest
    assert stepped[0] == 12
    assert min(stepped) < 3
    jax.tree.map(np.testing.assert_array_equal, some, everything)


def test_one_policy_has_one_return_distribution_on_three_backends():
    """Acrobot in gymnax, EnvPool and Gymnasium, 200 episodes of one random policy each: means within 4 standard errors.

    The policy's last layer is large, so that it is far from uniform; with this key it swings up, sooner or later.
    """
    config = SMALL.replace(eval_episodes=200)
    step = make_update_step(registry.make("Acrobot-v1"), config)
    params = step.nets.init(jax.random.key(3))
    params["policy"]["head"]["out"]["kernel"] *= 30.0
    state = init_state(step, [0])
    lanes = jax.tree.map(lambda x: x[None], params)
    key = jax.random.key(11)
    found = {}
    test = jax.jit(evaluate_lanes(step.nets, registry.make("Acrobot-v1"), 200))
    found["gymnax"] = np.asarray(test(lanes, state.obs_stats, key).episode_return)[0, 0]
    for env_id in ("envpool/Acrobot-v1", "gymnasium/Acrobot-v1"):
        result = PoolTest(step.nets, registry.make(env_id), 200, (0,))(lanes, state.obs_stats, key)
        found[env_id] = result.episode_return[0, 0]
    assert min(np.std(x) for x in found.values()) > 10
    for x in found.values():
        for y in found.values():
            error = np.sqrt(np.var(x) / len(x) + np.var(y) / len(y))
            assert abs(x.mean() - y.mean()) < 4 * max(error, 1e-9), {k: (v.mean(), v.std()) for k, v in found.items()}


LANDER = Config(
    num_envs=2, num_steps=64, minibatch_size=32, num_epochs=2, hidden=(8,), total_steps=2 * 128, filter="iif", p=0.5,
    norm_chunk=32, eval_episodes=4,
)  # fmt: skip


def rounds_of(env, config, seeds, count=2):
    step = make_update_step(env, config)
    lanes = len(seeds)
    state, settings = place_lanes(init_state(step, seeds), lanes), place_lanes(lane_settings(config, lanes), lanes)
    state, metrics, judged = compile_chunk(step, state, settings, count)(state, settings, jnp.int32(count))
    return jax.device_get((state.params, metrics, judged.scores))


@pytest.fixture(scope="module")
def lander():
    """Two rounds of four seeds on LunarLander inside one program, on two devices, each with a pool of its own."""
    env = registry.make("envpool/LunarLander-v3", {"max_episode_steps": 100})
    assert len(jax.devices()) > 1
    return env, rounds_of(env, LANDER, [0, 1, 2, 3])


def test_a_lane_depends_on_its_own_seed_only(lander):
    env, (params, metrics, scores) = lander
    alone = rounds_of(env, LANDER, [2])
    third = lambda tree, axis: jax.tree.map(lambda x: np.take(x, [2], axis), tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), third(params, 0), alone[0])
    np.testing.assert_array_equal(metrics.records[:, 2], alone[1].records[:, 0])
    np.testing.assert_allclose(third(scores, 0), alone[2], rtol=5e-3, atol=1e-3)


def test_stepped_from_the_host_or_in_the_program_the_rounds_are_the_same(lander):
    env, inside = lander
    outside = rounds_of(dataclasses.replace(env, in_jit=False), LANDER, [0, 1, 2, 3])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), inside[0], outside[0])
    for name in ("records", "kept", "dropped", "episodes", "optimizer_steps"):
        np.testing.assert_array_equal(getattr(inside[1], name), getattr(outside[1], name))
    assert (inside[1].records < LANDER.records_per_round).any()  # episodes ended: some rows only reset


def test_a_run_on_disk_resumes_with_fresh_episodes_and_says_so(tmp_path, capfd):
    out = tmp_path / "run"
    args = ["train", "envpool/FrozenLake-v1", "--num-envs", "2", "--num-steps", "32", "--minibatch-size", "16"]
    args += ["--norm-chunk", "16", "--num-epochs", "1", "--hidden", "8", "--eval-episodes", "4"]
    assert main([*args, "--rounds", "3", "--out", str(out)]) == 0
    assert "no exact resume, no branching" in capfd.readouterr().err
    assert main([*args, "--rounds", "5", "--resume", str(out)]) == 0
    assert "all episodes start anew" in capfd.readouterr().err
    assert json.loads((out / "summary.json").read_text())["updates"] == 5
    assert main(["eval", str(out), "--episodes", "5"]) == 0
    assert "stochastic" in capfd.readouterr().out
    assert main(["render", str(out), "--out", str(tmp_path / "x.gif")]) == 2
    assert main([*args, "--rounds", "3", "--record-rounds", "1"]) == 2
    errors = capfd.readouterr().err
    assert "cannot be drawn" in errors
    assert "--record-rounds" in errors


# -- MiniGrid's network ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minigrid() -> tuple[UpdateStep, object, object]:
    """The paper's network on records of MiniGrid-Empty-8x8."""
    config = preset("paper", "envpool/MiniGrid-Empty-8x8-v0").replace(
        num_steps=64, total_steps=64, filter="iif", norm_chunk=32, minibatch_size=32
    )
    env = registry.make("envpool/MiniGrid-Empty-8x8-v0", {"max_episode_steps": 40})
    step = make_update_step(env, config)
    state, settings = init_state(step, [0]), lane_settings(config, 1)
    collect = jax.jit(lambda s, k: step.collector.collect(step.nets, s, k))
    _, rollout, _ = collect(state, step.split(state)[:, 1])
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)
    # The first policy is near uniform whatever the trunk says; a larger last layer lets it matter.
    state.params["policy"]["head"]["out"]["kernel"] *= 100.0
    records, _, _ = step.advantages(one(state), one(rollout), one(settings))
    # A reward for moving, so that advantages are no mere noise of the critic.
    records = records.replace(advantage=records.advantage + jnp.sin(jnp.arange(64.0)))
    return step, one(state), (records, one(settings))


def test_minigrid_network_has_the_papers_shapes(minigrid):
    _, state, _ = minigrid
    shapes = jax.tree.map(lambda x: x.shape, state.params)
    assert shapes["trunk"]["conv_0"]["kernel"] == (27, 16)
    assert shapes["trunk"]["conv_1"]["kernel"] == (144, 32)
    assert shapes["trunk"]["linear"]["kernel"] == (288, 64)
    assert shapes["policy"]["body"]["dense_1"]["kernel"] == (64, 64)
    assert shapes["value"]["body"]["dense_0"]["kernel"] == (64, 64)


def test_minigrid_convolutions_are_convolutions(minigrid):
    """The matrix products over patches against XLA's own convolution."""
    _, state, (records, _) = minigrid
    trunk = state.params["trunk"]
    x = records.obs[:5]
    for name, inputs in (("conv_0", 3), ("conv_1", 16)):
        kernel = trunk[name]["kernel"].reshape(3, 3, inputs, -1)
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + trunk[name]["bias"])
    want = jax.nn.relu(x.reshape(5, -1) @ trunk["linear"]["kernel"] + trunk["linear"]["bias"])
    from jaxattr.networks import ConvTrunk

    got = jax.vmap(lambda o: ConvTrunk((16, 32), 64).apply({"params": trunk}, o))(records.obs[:5])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_minigrid_scores_by_jvp_are_those_by_single_gradients_and_the_trunk_counts(minigrid):
    step, state, (records, settings) = minigrid
    key = jax.random.key(0)

    def scores(**changes):
        changed = dataclasses.replace(step, config=step.config.replace(**changes))
        return np.asarray(jax.jit(changed.score)(state, records, key, settings)[0])

    whole = scores()
    by_gradients = scores(estimator="per_sample")
    np.testing.assert_allclose(whole, by_gradients, atol=1e-5 * np.abs(by_gradients).max())
    parts = scores(score_params="trunk/.*") + scores(score_params="policy/.*")
    np.testing.assert_allclose(whole, parts, atol=1e-5 * np.abs(whole).max())
    assert np.abs(scores(score_params="trunk/.*")).max() > 0.01 * np.abs(whole).max()


def test_a_picture_too_small_for_the_convolutions_is_refused():
    env = registry.make("envpool/MiniGrid-Empty-8x8-v0")
    with pytest.raises(ConfigError, match="too small for 4 convolutions"):
        make_update_step(env, SMALL.replace(conv_filters=(4, 4, 4, 4)))


@pytest.mark.parametrize("name", ["paper", "paper-adam", "tuned"])
def test_presets_exist_for_the_papers_environments(name):
    lengths = {}
    for task in ("MiniGrid-Empty-8x8", "MiniGrid-DoorKey-8x8", "Highway", "LunarLander", "BipedalWalker"):
        env_id = f"envpool/{task}-v{3 if task in ('LunarLander', 'BipedalWalker') else 0}"
        config = preset(name, env_id)
        make_update_step(registry.make(env_id, config.env_args), config)
        lengths[task] = config.total_steps
        assert ("MiniGrid" in task) == (config.conv_features == 64)
        if name != "tuned":
            adam = name == "paper-adam" or task == "BipedalWalker"
            assert (config.optimizer, config.num_envs, config.num_steps) == ("adam" if adam else "sgd", 1, 2048)
    if name == "paper":
        assert lengths == {
            "MiniGrid-Empty-8x8": 81_920, "MiniGrid-DoorKey-8x8": 81_920, "Highway": 204_800, "LunarLander": 307_200,
            "BipedalWalker": 1_024_000,
        }  # fmt: skip
