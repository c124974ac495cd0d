"""Many rounds, many lanes: initial states, the compiled chunk of updates, and lanes spread over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config, ConfigError, check_number
from jaxattr.envs.base import AnyEnv, Env, Step, pure
from jaxattr.evaluate import MODES, Evaluation, evaluate_lanes
from jaxattr.lanes import spread_lanes
from jaxattr.networks import make_networks
from jaxattr.ops import trees
from jaxattr.ops.statistics import init_stats
from jaxattr.pools import Played, PoolCollector, PoolTest
from jaxattr.rollout import Collector, VmapCollector
from jaxattr.types import Array, Box, Discrete, Metrics, Params, PRNGKey, RunningStats, Settings, TrainState
from jaxattr.update import Judged, UpdateStep, make_optimizer


def make_update_step(
    env: AnyEnv, config: Config, module: nn.Module | None = None, *, keep_states: bool = False
) -> UpdateStep:
    """The update step of one pure environment, vmapped over environments and lanes, or of a pool.

    `keep_states` also keeps every environment state of a round, so that it can be branched (not of a pool).

    Raises:
      ConfigError: network and environment do not fit, or a name is not registered.
    """
    from jaxattr.attribution.filters import FILTERS
    from jaxattr.attribution.targets import OF_OBJECTIVE, TARGETS
    from jaxattr.config import near

    if config.filter not in FILTERS:
        raise ConfigError(f"unknown filter {config.filter!r}{near(config.filter, FILTERS)}")
    targets = (*TARGETS, *OF_OBJECTIVE)
    if config.target not in targets:
        raise ConfigError(f"unknown target {config.target!r}{near(config.target, targets)}")
    if not isinstance(env.spec.action, (Discrete, Box)):
        raise ConfigError(
            f"{env.spec.name}: action space is {env.spec.action!r}: must be Discrete or Box; multi-discrete "
            "actions are not supported yet"
        )
    nets = make_networks(env.spec, config, module)
    if config.score_params != "policy":
        shapes = jax.eval_shape(nets.init, jax.random.key(0))
        _check_score_params(config.score_params, shapes)
    return UpdateStep(config=config, nets=nets, collector=make_collector(env, config, keep_states))


def make_collector(env: AnyEnv, config: Config, keep_states: bool = False) -> Collector:
    """Where experience comes from.

    Raises:
      ConfigError: something is asked of a pool that only a pure environment can do.
    """
    if isinstance(env, Env):
        return VmapCollector(
            env,
            config.num_envs,
            config.num_steps,
            cached_reset=config.reset == "cached",
            keeps_states=keep_states,
            restarts=config.round_start == "reset",
        )
    if keep_states:
        pure(env, "be recorded whole (--record-rounds): its state cannot be copied")
    if config.on_nonfinite == "skip":
        pure(env, "start over in the middle of a run: use on_nonfinite = stop")
    if config.reset == "cached":
        pure(env, "return to a copy of its first state: use reset = fresh")
    if config.round_start == "reset":
        pure(env, "start over in every round: use round_start = continue")
    return PoolCollector(env, config.num_envs, config.num_steps)


def _check_score_params(pattern: str, params: Params) -> None:
    import re

    names = trees.paths(params)
    try:
        hits = [n for n in names if re.match(pattern, n)]
    except re.error as error:
        raise ConfigError(f"score_params is {pattern!r}: no regular expression ({error})") from None
    if not hits:
        raise ConfigError(f"score_params is {pattern!r}: matches none of {', '.join(names)}")


def lane_settings(config: Config, lanes: int, sweep: Mapping[str, Sequence[float]] | None = None) -> Settings:
    """Traced numbers with a leading lane axis (S,); `sweep` gives some of them one value per lane.

    Raises:
      ConfigError: a swept name is not a traced setting, a value is out of range, or a length is not `lanes`.
    """
    values: dict[str, Any] = config.settings()._asdict()
    for name, per_lane in (sweep or {}).items():
        if name not in values or name == "total_updates":
            known = ", ".join(n for n in values if n != "total_updates")
            raise ConfigError(f"{name!r} cannot differ between lanes of one run; these can: {known}")
        if len(per_lane) != lanes:
            raise ConfigError(f"sweep over {name} has {len(per_lane)} values for {lanes} lanes")
        for value in per_lane:
            check_number(name, value)
        values[name] = np.asarray(per_lane, np.float32)
    return Settings(**{k: jnp.broadcast_to(jnp.asarray(v, jnp.float32), (lanes,)) for k, v in values.items()})


def init_state(step: UpdateStep, seeds: Sequence[int], *, attempt: int = 0) -> TrainState:
    """The state before the first round, one lane per seed. A lane depends on its own seed only.

    A pool is opened here, with seeds that also depend on `attempt`: a run that goes on with fresh episodes should not
    see the first ones again.

    Networks are initialised lane after lane: orthogonal matrices made in parallel under one jit can hang XLA's CPU
    client for ever.
    """
    config, lanes = step.config, len(seeds)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    split = jax.vmap(lambda k: jax.random.split(k, 3))(keys)
    init = jax.jit(step.nets.init)
    params = jax.tree.map(lambda *x: jnp.stack(x), *[init(split[i, 1]) for i in range(lanes)])

    @jax.jit
    def rest(params: Params, keys: Array, env_state: Any) -> TrainState:
        def opt_init(p: Params) -> Any:
            return make_optimizer(config, config.settings(), 0.0).init(trees.flatten(p))

        def tiled(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), tree)

        return TrainState(
            params=params,
            opt_state=jax.vmap(opt_init)(params),
            obs_stats=tiled(init_stats(step.collector.spec.obs_shape)),
            reward_stats=tiled(init_stats(())),
            discounted_return=jnp.zeros((lanes, config.num_envs), jnp.float32),
            env_state=step.collector.init(keys[:, 2]) if env_state is None else env_state,
            key=keys[:, 0],
            update=jnp.zeros(lanes, jnp.int32),
            alive=jnp.ones(lanes, bool),
        )

    opened = None
    if not step.collector.pure:
        opened = step.collector.init(jax.vmap(lambda k: jax.random.fold_in(k, attempt))(split[:, 2]))
    return rest(params, split, opened)


Chunk = Callable[[TrainState, Settings, Any], tuple[TrainState, Metrics, Judged]]
"""`chunk(state, settings, count)`: `count` rounds; metrics come back with leading axes (rounds, S), and what
`UpdateStep.round` says about the records of the last one."""


def compile_chunk(step: UpdateStep, state: TrainState, settings: Settings, length: int) -> Chunk:
    """The compiled unit of training, for up to `length` rounds a call."""
    lanes = settings.p.shape[0]
    if not step.collector.in_jit:
        return HostedChunk(step, state, settings)
    program = make_chunk(step, lanes, length).lower(state, settings, jnp.int32(1)).compile()
    # A program that steps a pool holds a bare pointer to it: the pool must live as long as the program.
    return program if step.collector.pure else functools.partial(_run, program, step.collector)


def _run(program: Any, keeps_alive: Collector, state: TrainState, settings: Settings, count: Any) -> Any:
    return program(state, settings, count)


def make_chunk(step: UpdateStep, lanes: int, length: int, block: int | None = None) -> Any:
    """The compiled unit of training: `chunk(state, settings, count) -> (state, metrics, last)`.

    `count` <= `length` is traced, so ten updates, one update, or the rest after a resume all run the very same
    machine code; metrics come back with leading axes (length, S), rows from `count` on are unset (zeros). `last` is
    what `UpdateStep.round` says about the records of the last round.

    `block`: most lanes that a device trains at a time, one block after the other inside the program (the largest even
    share up to it); None = all at once. Only for pure collectors: a pool's lanes are stepped together.
    """

    def chunk(state: TrainState, settings: Settings, count: Array) -> tuple[TrainState, Metrics, Judged]:
        _, one, records = jax.eval_shape(step.round, state, settings)
        empty = lambda shapes, lead: jax.tree.map(lambda s: jnp.zeros((*lead, *s.shape), s.dtype), shapes)

        def body(i: Array, carry: Any) -> Any:
            state, buffer, _ = carry
            state, metrics, judged = step.round(state, settings)
            return state, jax.tree.map(lambda b, m: b.at[i].set(m), buffer, metrics), judged

        return jax.lax.fori_loop(0, count, body, (state, empty(one, (length,)), empty(records, ())))

    def blocks(state: TrainState, settings: Settings, count: Array) -> tuple[TrainState, Metrics, Judged]:
        mine = state.update.shape[0]
        share = max(d for d in range(1, min(block or mine, mine) + 1) if mine % d == 0)
        if share in (1, mine):  # one lane at a time would gain nothing
            return chunk(state, settings, count)
        parted = jax.tree.map(lambda x: x.reshape(-1, share, *x.shape[1:]), (state, settings))
        state, metrics, judged = jax.lax.map(lambda part: chunk(part[0], part[1], count), parted)
        lanes_of = lambda tree: jax.tree.map(lambda x: x.reshape(mine, *x.shape[2:]), tree)
        rows = lambda x: jnp.moveaxis(x, 0, 1).reshape(length, mine, *x.shape[3:])
        return lanes_of(state), jax.tree.map(rows, metrics), lanes_of(judged)

    return jax.jit(spread_lanes(chunk if block is None else blocks, lanes, (True, True, False), (0, 1, 0)))


class HostedChunk:
    """A chunk whose environments are stepped from the host, between a compiled start and a compiled end of each round.

    The same keys, records and learning as in `make_chunk`; only the T steps of collection are a Python loop.
    """

    def __init__(self, step: UpdateStep, state: TrainState, settings: Settings):
        collector: Any = step.collector
        self._collector, lanes = collector, settings.p.shape[0]

        def begin(state: TrainState) -> tuple[Array, Array]:
            keys = step.split(state)
            return keys, collector.noise(step.nets, keys[:, 1])

        def act(params: Params, obs_stats: RunningStats, obs: Array, noise: Array, t: Array) -> tuple[Array, Array]:
            return collector.act(step.nets, params, obs_stats, obs, noise[t])

        def end(state: TrainState, settings: Settings, keys: Array, played: Played) -> Any:
            env_state, rollout, episodes = collector.finish(step.nets, state, played)
            return step.conclude(state, settings, keys, env_state, rollout, episodes)

        self._begin = jax.jit(begin).lower(state).compile()
        keys, noise = jax.eval_shape(begin, state)
        obs = state.env_state.obs
        action, _ = jax.eval_shape(act, state.params, state.obs_stats, obs, noise, 0)
        flags = jnp.zeros(action.shape[:2], bool)
        result = Step(obs, flags.astype(jnp.float32), flags, flags)
        over_time = lambda x: jax.ShapeDtypeStruct((x.shape[0], collector.num_steps, *x.shape[1:]), x.dtype)
        played = jax.tree.map(over_time, Played(action, result))
        self._act = jax.jit(act)
        self._end = jax.jit(spread_lanes(end, lanes, (True,) * 4, 0)).lower(state, settings, keys, played).compile()

    def __call__(self, state: TrainState, settings: Settings, count: Any) -> tuple[TrainState, Metrics, Judged]:
        """`count` >= 1 rounds."""
        rows, judged = [], None
        for _ in range(int(count)):
            keys, noise = self._begin(state)
            played = self._collector.play(self._act, state, noise)
            state, metrics, judged = self._end(state, settings, keys, played)
            rows.append(metrics)
        assert judged is not None
        return state, jax.tree.map(lambda *x: np.stack(x), *rows), judged


Test = Callable[[Params, RunningStats, PRNGKey], Evaluation]


def compile_test(step: UpdateStep, env: AnyEnv, state: TrainState, key: PRNGKey, episodes: int) -> Test:
    """The compiled evaluation of all lanes: (params, obs_stats, key) -> `Evaluation` with leading lane axes."""
    lanes, modes = state.update.shape[0], MODES[step.config.eval_policy]
    if not isinstance(env, Env):
        return PoolTest(step.nets, env, episodes, modes)
    run = spread_lanes(evaluate_lanes(step.nets, env, episodes, modes), lanes, (True, True, False), 0)
    return jax.jit(run).lower(state.params, state.obs_stats, key).compile()
