"""Environments: every backend keeps the contract, options take effect, and known episodes come out exactly."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattr.config import Config, ConfigError
from jaxattr.envs import brax, gymnax, registry
from jaxattr.envs.base import Box, Discrete, EnvSpec, Step, auto_reset, carry_avals, cast_like
from jaxattr.envs.probes import PROBES
from jaxattr.testing import check_env

COMPILE_HEAVY = ("Asterix-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar")
GYMNAX_IDS = [
    pytest.param(i, marks=[pytest.mark.slow] if i in COMPILE_HEAVY else [])
    for i in gymnax.ids()
    if i not in gymnax.UNAVAILABLE
]


def play(env, policy, steps, seed=0):
    """Step with leaves (T, ...) of one episode under `policy(obs) -> action`; nothing is reset at its end."""

    def move(carry, key):
        state, obs = carry
        state, step = env.step(key, state, policy(obs))
        return (state, step.obs), step

    key_reset, key_steps = jax.random.split(jax.random.key(seed))
    run = jax.jit(lambda k, ks: jax.lax.scan(move, env.reset(k), ks)[1])
    return jax.device_get(run(key_reset, jax.random.split(key_steps, steps)))


def first(flags):
    """Number of the first step (from 1) at which a flag is set; 0 if none is."""
    return int(np.argmax(flags)) + 1 if flags.any() else 0


# -- the contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", GYMNAX_IDS)
def test_every_gymnax_id_keeps_the_contract(env_id):
    check_env(registry.make(env_id, {"max_steps_in_episode": 7}), steps=18)


@pytest.mark.parametrize("env_id", list(PROBES))
def test_every_probe_keeps_the_contract(env_id):
    check_env(registry.make(env_id), steps=8)


def test_brax_keeps_the_contract():
    env = registry.make("brax/inverted_pendulum", {"max_steps_in_episode": 3})
    assert env.spec.notes == ("brax backend spring",)
    assert env.spec.action == Box(1, (-1.0,), (1.0,))
    check_env(env, steps=7, plain=False)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["brax/ant", "brax/halfcheetah", "brax/hopper", "brax/reacher", "brax/walker2d"])
def test_other_brax_ids_keep_the_contract(env_id):
    check_env(registry.make(env_id, {"max_steps_in_episode": 3}), steps=7, plain=False)


def test_brax_environment_that_the_installed_jax_breaks_is_named(monkeypatch):
    # The real case is swimmer: brax 0.14.2 calls jnp.clip(a_min=...), which jax 0.10 no longer has.
    envs = brax.load()

    def step(self, state, action):
        raise TypeError("clip() got an unexpected keyword argument 'a_min'")

    monkeypatch.setattr(envs._envs["inverted_pendulum"], "step", step)
    with pytest.raises(ConfigError, match=r"brax/inverted_pendulum does not run with brax .* and jax .*a_min"):
        registry.make("brax/inverted_pendulum")


def test_importing_the_registry_loads_no_backend():
    code = "import sys, jaxattr.envs.registry; print([m for m in ('gymnax', 'brax', 'mujoco') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- ends of episodes -----------------------------------------------------------------------------------------


def test_T03_tie_is_terminated():
    out = play(registry.make("probe/tie"), lambda obs: 0, 5)
    assert out.terminated.tolist() == [False] * 4 + [True]
    assert not out.truncated.any()


def test_T03_cartpole_falling_on_its_last_allowed_step_is_terminated():
    def push(obs):
        return 1

    falls = first(play(registry.make("CartPole-v1"), push, 30).terminated)
    assert 5 < falls < 30
    out = play(registry.make("CartPole-v1", {"max_steps_in_episode": falls}), push, falls)
    assert out.terminated[-1]
    assert not out.truncated.any()


def balance(obs):
    """Keeps the pole up and the cart in the middle."""
    return (obs @ jnp.array([0.1, 0.3, 1.0, 0.6]) > 0).astype(jnp.int32)


def test_T04_cartpole_step_500_is_truncated():
    env = registry.make("CartPole-v1")
    out = play(env, balance, 500)
    assert not out.terminated.any()
    assert first(out.truncated) == 500
    assert out.reward.sum() == 500


def test_T04_old_gymnax_is_named():
    with pytest.raises(ConfigError, match=r"gymnax 0\.0\.9 is installed, but jaxattr needs gymnax >= 1\.0") as error:
        gymnax.check_version("0.0.9")
    assert "\n" not in str(error.value)
    gymnax.check_version("1.0.1")


def test_T08_probe_episodes_have_their_known_return_and_length():
    out = play(registry.make("probe/ends_at_3"), lambda obs: 0, 3)
    assert (out.reward.sum(), first(out.terminated), out.truncated.any()) == (3.0, 3, False)
    out = play(registry.make("probe/never_ends"), lambda obs: 0, 1000)
    assert (out.reward.sum(), first(out.truncated), out.terminated.any()) == (1000.0, 1000, False)


def test_auto_reset_returns_the_true_final_observation():
    env = registry.make("probe/ends_at_3")
    state, obs = env.reset(jax.random.key(0))
    for _ in range(3):
        state, obs, step = auto_reset(env, jax.random.key(0), state, 0, env.reset(jax.random.key(1)))
    assert step.terminated
    assert step.obs == 1.0  # t / 3 at t = 3
    assert obs == 0.0
    assert state.time == 0


# -- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "policy"),
    [
        ("CartPole-v1", balance),
        ("Pendulum-v1", lambda obs: jnp.zeros(1)),
        ("brax/inverted_pendulum", lambda obs: jnp.zeros(1)),
    ],
)
def test_T20_max_steps_option_ends_the_episode(env_id, policy):
    env = registry.make(env_id, registry.parse_env_args(["max_steps_in_episode=10"]))
    assert env.spec.max_steps == 10
    out = play(env, policy, 10)
    assert first(out.truncated) == 10
    assert not out.terminated.any()


@pytest.mark.parametrize(
    ("env_id", "name", "valid"),
    [
        ("CartPole-v1", "max_step_in_episode", "'max_steps_in_episode'"),
        ("FrozenLake-misc", "slippery", "is_slippery"),
        ("brax/inverted_pendulum", "max_steps", "backend, debug, max_steps_in_episode, n_frames"),
        ("probe/never_ends", "max_steps", "max_steps_in_episode"),
        ("probe/tie", "max_steps", "none"),
    ],
)
def test_T20_misspelt_option_lists_the_valid_names(env_id, name, valid):
    with pytest.raises(ConfigError, match=f"{env_id} has no option '{name}'") as error:
        registry.make(env_id, {name: 10})
    assert valid in str(error.value)


def test_T20_an_option_that_gymnax_never_reads_is_refused():
    with pytest.raises(ConfigError, match="never reads"):
        registry.make("Asterix-MinAtar", {"shot_cool_down": 1})


def test_T20_cartpole_mass_takes_effect():
    env = registry.make("CartPole-v1", {"masscart": 3.0, "length": 1.0})
    assert env.params.total_mass == pytest.approx(3.1)
    assert env.params.polemass_length == pytest.approx(0.1)
    assert registry.make("CartPole-v1", {"masscart": 3.0, "total_mass": 2.0}).params.total_mass == 2.0


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("FrozenLake-misc", {"is_slippery": "maybe"}, "true or false"),
        ("FrozenLake-misc", {"map_name": "9x9"}, "map_name must be"),
        ("CartPole-v1", {"gravity": "high"}, "a number"),
        ("CartPole-v1", {"max_steps_in_episode": 0}, "whole number, 1 or more"),
        ("BernoulliBandit-misc", {"max_steps_in_episode": 7.5}, "whole number, 1 or more"),
        ("brax/inverted_pendulum", {"max_steps_in_episode": True}, "whole number, 1 or more"),
        ("brax/inverted_pendulum", {"backend": "bullet"}, "generalized, mjx, positional, spring"),
        ("brax/inverted_pendulum", {"n_frames": "many"}, "a whole number"),
        ("brax/swimmer", {"backend": "spring"}, "Unsupported backend"),
        ("probe/nan", {"nan_prob": 2}, r"\[0, 1\]"),
    ],
)
def test_bad_option_values_are_refused(env_id, options, message):
    with pytest.raises(ConfigError, match=message):
        registry.make(env_id, options)


def test_constructor_options_reach_the_environment():
    env = registry.make("FrozenLake-misc", {"map_name": "8x8"})
    assert env.spec.obs_shape == (64,)
    assert env.spec.max_steps == 200
    assert registry.make("DeepSea-bsuite", {"size": 5}).spec.max_steps == 5
    env = registry.make("FourRooms-misc", registry.parse_env_args(["goal_fixed=[1,1]"]))
    assert env.env.goal_fixed.tolist() == [1, 1]
    env = registry.make("Acrobot-v1", registry.parse_env_args(["available_torque=[-2,0,2]"]))
    assert env.params.available_torque.tolist() == [-2.0, 0.0, 2.0]


def test_parse_env_args():
    items = ["b=false", "a=10", "c=1e-3", "d=none", "e=4x4", "f=[8, 9]", 'g=["SF","HG"]', "h=x=y", 'i="10"']
    expected = {"a": 10, "b": False, "c": 1e-3, "d": None, "e": "4x4", "f": (8, 9), "g": ("SF", "HG")}
    got = registry.parse_env_args(items)
    assert dict(got) == expected | {"h": "x=y", "i": "10"}
    assert type(dict(got)["a"]) is int
    hash(got)
    assert Config(env_args=got).env_args == got
    for bad in ("slippery", "=3", "a b=3", "a=", "a=[1,", "a=[1"):
        with pytest.raises(ConfigError, match="environment option"):
            registry.parse_env_args([bad])
    with pytest.raises(ConfigError, match="twice"):
        registry.parse_env_args(["a=1", "a=2"])


# -- the registry ---------------------------------------------------------------------------------------------


def test_unknown_id_names_near_ones():
    for wrong, right in (("CartPole-v2", "CartPole-v1"), ("inverted_pendulum", "brax/inverted_pendulum")):
        with pytest.raises(ConfigError, match="did you mean") as error:
            registry.make(wrong)
        assert right in str(error.value)
    with pytest.raises(ConfigError, match="'brax/hopper'"):
        registry.make("brax/hoper")
    with pytest.raises(ConfigError, match="MNISTBandit-bsuite is not available: it needs the MNIST"):
        registry.make("MNISTBandit-bsuite")


def test_list_names_every_family_and_what_is_unavailable():
    rows = {row.id: row for row in registry.list_envs()}
    assert rows["CartPole-v1"] == ("CartPole-v1", "gymnax", "obs (4,), 2 actions, limit 500")
    assert rows["MNISTBandit-bsuite"].description.startswith("unavailable: ")
    assert rows["brax/ant"].family == "brax"
    assert rows["probe/policy"].family == "probe"


def test_register(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("mine/short", lambda limit=4: registry.make("probe/never_ends", {"max_steps_in_episode": limit}))
    assert registry.make("mine/short", [("limit", 6)]).spec.max_steps == 6
    assert registry.list_envs()[0].family == "registered"
    with pytest.raises(ConfigError, match=r"no option 'limits'.*options: limit"):
        registry.make("mine/short", {"limits": 6})
    for taken in ("mine/short", "CartPole-v1", "probe/obs", "brax/new"):
        with pytest.raises(ConfigError, match="already taken"):
            registry.register(taken, lambda: None)
    for bad in ("", None, 3):
        with pytest.raises(ConfigError, match="environment id"):
            registry.register(bad, lambda: None)
    with pytest.raises(ConfigError, match="must be callable"):
        registry.register("mine/none", None)
    registry.register("mine/wrong", lambda: 3)
    with pytest.raises(ConfigError, match="returned int, not an Env"):
        registry.make("mine/wrong")


def test_unsupported_spaces_are_refused():
    from gymnax.environments import spaces

    box = spaces.Box(0, 1, (2,))
    for space in (spaces.Tuple((box, box)), spaces.Dict({"a": box})):
        with pytest.raises(ConfigError, match="supported are Box and Discrete"):
            gymnax._observation_space("x", space)
    for space in (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), spaces.Box(0, 3, (2,), jnp.int32)):
        with pytest.raises(ConfigError, match="supported are Discrete"):
            gymnax._action("x", space)


# -- exact episodes -------------------------------------------------------------------------------------------


def test_frozen_lake_without_slipping_pays_1_on_the_sixth_step():
    env = registry.make("FrozenLake-misc", {"is_slippery": False})
    path = jnp.array([1, 1, 2, 2, 1, 2])  # down, down, right, right, down, right
    state, obs = env.reset(jax.random.key(0))
    assert obs.tolist() == [1.0] + [0.0] * 15
    rewards = []
    for action in path:
        state, step = env.step(jax.random.key(0), state, action)
        rewards.append(float(step.reward))
    assert rewards == [0, 0, 0, 0, 0, 1]
    assert step.terminated
    assert not step.truncated
    assert step.obs.argmax() == 15


def test_acrobot_pays_0_on_the_goal_step_and_minus_1_otherwise():
    env = registry.make("Acrobot-v1")
    out = play(env, lambda obs: jnp.where(obs[5] > 0, 2, 0), 500)  # torque along the second joint's speed
    n = first(out.terminated)
    assert 0 < n < 500
    assert out.reward[:n].sum() == -(n - 1)
    out = play(env, lambda obs: 1, 500)
    assert (out.reward.sum(), first(out.truncated), out.terminated.any()) == (-500, 500, False)


def test_mountain_car_timeout_is_minus_200():
    out = play(registry.make("MountainCar-v0"), lambda obs: 1, 200)
    assert (out.reward.sum(), first(out.truncated), out.terminated.any()) == (-200, 200, False)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_continuous_actions_reach_the_environment(env_id):
    env = registry.make(env_id)
    state, _ = env.reset(jax.random.key(0))
    left, right = (env.step(jax.random.key(0), state, jnp.array([a]))[1] for a in (-1.0, 1.0))
    assert left.reward.shape == ()
    assert not np.array_equal(left.obs, right.obs)


def test_probe_rewards():
    def reward(env_id, action, seed):
        env = registry.make(env_id)
        state, obs = env.reset(jax.random.key(seed))
        return float(obs[0]), float(env.step(jax.random.key(0), state, action)[1].reward)

    assert reward("probe/constant", 0, 0) == (0.0, 1.0)
    assert [reward("probe/policy", a, 0)[1] for a in (0, 1)] == [-1.0, 1.0]
    assert reward("probe/continuous", jnp.array([0.0]), 0)[1] == -0.25
    starts = set()
    for seed in range(8):
        obs, earned = reward("probe/obs", 0, seed)
        assert obs == earned
        starts.add(obs)
        obs, earned = reward("probe/obs_policy", 1, seed)
        assert earned == obs
    assert starts == {-1.0, 1.0}
    out = play(registry.make("probe/discount"), lambda obs: 0, 2)
    assert out.reward.tolist() == [0.0, 1.0]
    assert out.terminated.tolist() == [False, True]


def test_nan_probe_fails_at_its_step_only():
    out = play(registry.make("probe/nan", {"nan_step": 3}), lambda obs: 0, 6)
    assert np.isnan(out.obs[:, 0]).tolist() == [False, False, True, False, False, False]
    out = play(registry.make("probe/nan", {"nan_step": 3, "nan_prob": 0.0}), lambda obs: 0, 6)
    assert not np.isnan(out.obs).any()


# -- the check itself and its helpers -------------------------------------------------------------------------


class Broken:
    """Counts to `ends`, with one deliberate fault."""

    def __init__(self, fault):
        self.fault = fault
        self.spec = EnvSpec("broken", (1,), Discrete(2), 4)
        self.calls = 0

    def reset(self, key):
        obs = jnp.zeros(2 if self.fault == "shape" else 1)
        return (0 if self.fault == "weak" else jnp.int32(0)), obs

    def step(self, key, state, action):
        self.calls += 1
        time = (jnp.int32(0) if self.fault == "weak" else state) + 1
        end = time >= {"late": 5, "early": 3}.get(self.fault, 4)
        obs = jnp.float32(self.calls if self.fault == "impure" else 0)[None]
        reward = jnp.float32(1.0) if self.fault != "reward" else jnp.int32(1)
        return time, Step(obs, reward, end if self.fault == "both" else jnp.bool_(False), end)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (None, None),
        ("shape", r"observation of reset is float32\(2,\), must be float32\(1,\)"),
        ("weak", "weakly typed"),
        ("reward", "reward is int32"),
        ("impure", "differs under jit"),
        ("both", "terminated and truncated at once"),
        ("late", "goes on after max_steps = 4"),
        ("early", "before max_steps = 4"),
    ],
)
def test_check_env_finds_the_fault(fault, message):
    if fault is None:
        check_env(Broken(fault), steps=10)
        return
    with pytest.raises(AssertionError, match=message):
        check_env(Broken(fault), steps=10)


def test_carry_avals_widens_instead_of_rounding():
    def step(key, state, action):
        return {"n": state["n"] + 1, "x": state["x"] + 0.5}

    action = jax.ShapeDtypeStruct((), jnp.int32)
    avals = carry_avals("t", lambda key: {"n": 0, "x": 0}, step, action)
    assert (avals["n"].dtype, avals["x"].dtype) == (jnp.int32, jnp.float32)
    state = cast_like({"n": 0, "x": 0.5, "k": jax.random.key(0)}, avals | {"k": jax.random.key(1)})
    assert not state["n"].weak_type
    assert state["x"] == 0.5
    with pytest.raises(ConfigError, match="changes its shape"):
        carry_avals("t", lambda key: jnp.zeros(2), lambda k, s, a: jnp.zeros(3), action)
    with pytest.raises(ConfigError, match="structure"):
        carry_avals("t", lambda key: 0, lambda k, s, a: (0, 0), action)
