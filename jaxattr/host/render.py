"""`jaxattr render`: one episode of an agent as a moving picture.

A frame shows a state, the action chosen there and the reward it earned. Classic control and FrozenLake are drawn
here (gymnax's visualiser needs pygame for the former and does not know the latter), the other ids that gymnax can
draw by gymnax, brax by brax (its `.html` loads the viewer from the network when opened), and anything else as its
observations.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from jaxattr.config import ConfigError
from jaxattr.envs.base import Env, pure
from jaxattr.envs.brax import BraxEnv
from jaxattr.envs.gymnax import GymnaxEnv
from jaxattr.envs.registry import make
from jaxattr.host.agent import Agent

MAX_FRAMES = 300
"""A longer episode skips states, evenly, and keeps its last one."""

GYMNAX_DRAWS = (
    *(f"{name}-MinAtar" for name in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")),
    *(f"{name}-misc" for name in ("Pong", "PointRobot", "MetaMaze", "FourRooms")),
    "Catch-bsuite",
)
"""Ids drawn by `gymnax.visualize.Visualizer`."""

Paint = Callable[[Axes, int], None]
"""(empty axes, i): draw state i."""


@dataclass(frozen=True)
class Episode:
    """L steps: L + 1 states and observations, L actions and rewards."""

    env_id: str
    states: list[Any]
    obs: np.ndarray  # (L + 1, *obs_shape)
    actions: np.ndarray  # (L,) or (L, A)
    rewards: np.ndarray  # (L,)
    ending: str  # terminated, truncated, or stopped


def render(agent: Agent, out: Path, episode_seed: int, max_steps: int, stochastic: bool) -> str:
    """Play one episode and draw it; the file is written whole or not at all. Returns what to say about it.

    Args:
      agent: whose policy acts.
      out: `.gif`, or `.html` for brax.
      episode_seed: of the start state and of everything random in the episode.
      max_steps: the episode is cut here.
      stochastic: draw actions from the policy; False: its mode.

    Raises:
      ConfigError: a file type that cannot be written, or the episode cannot be drawn on this machine.
    """
    out = Path(out)
    env = pure(make(agent.env_id, agent.config.env_args), "be drawn (only gymnax and brax environments can)")
    kinds = (".html", ".gif") if isinstance(env, BraxEnv) else (".gif",)
    if out.suffix.lower() not in kinds:
        raise ConfigError(f"--out {out}: {agent.env_id} can be drawn as {' or '.join(kinds)}")
    if max_steps < 1 or episode_seed < 0:
        raise ConfigError(f"--max-steps is {max_steps}, --episode-seed is {episode_seed}: must be 1 and 0, or more")
    episode = play(agent, env, episode_seed, max_steps, stochastic)
    shown = frame_indices(len(episode.states))
    if isinstance(env, BraxEnv):
        content = _brax(env, episode, shown, out)
    else:
        content = _gif(_frames(env, episode, shown), _milliseconds(episode, shown))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".tmp-{out.name}")
    temporary.write_bytes(content)
    os.replace(temporary, out)
    length = len(episode.rewards)
    return f"{out}: {len(shown)} frames, {length} steps ({episode.ending}), return {episode.rewards.sum():.4g}"


def play(agent: Agent, env: Env, seed: int, max_steps: int, stochastic: bool) -> Episode:
    """One episode, every state kept."""
    key_reset, key_run = jax.random.split(jax.random.key(seed))
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    state, obs = reset(key_reset)
    states, seen, actions, rewards = [jax.device_get(state)], [np.asarray(obs)], [], []
    ending = "stopped"
    for t in range(max_steps):
        key_act, key_step = jax.random.split(jax.random.fold_in(key_run, t))
        action = agent.act(obs, key_act if stochastic else None)
        state, result = step(key_step, state, action)
        obs = result.obs
        states.append(jax.device_get(state))
        seen.append(np.asarray(obs))
        actions.append(np.asarray(action))
        rewards.append(float(result.reward))
        if result.terminated or result.truncated:
            ending = "terminated" if result.terminated else "truncated"
            break
    return Episode(agent.env_id, states, np.stack(seen), np.stack(actions), np.array(rewards), ending)


def frame_indices(states: int) -> list[int]:
    """At most MAX_FRAMES of 0 .. states - 1, evenly spaced, the first and the last among them."""
    stride = -(-(states - 1) // (MAX_FRAMES - 1)) or 1
    return [*range(0, states - 1, stride), states - 1]


# -- from drawings to a file ---------------------------------------------------------------------------------------


def _frames(env: Env, episode: Episode, shown: Sequence[int]) -> list[np.ndarray]:
    """(H, W, 3) uint8 arrays."""
    if isinstance(env, GymnaxEnv) and episode.env_id in GYMNAX_DRAWS:
        return _by_gymnax(env, episode, shown)
    figure = Figure(figsize=(6.0, 5.0), dpi=80)
    axes = figure.add_axes((0.08, 0.08, 0.84, 0.8))
    paint = painter(env, episode)
    frames = []
    for i in shown:
        axes.clear()
        paint(axes, i)
        axes.set_title(_title(episode, i), fontsize=11)
        frames.append(pixels(figure))
    return frames


def _by_gymnax(env: GymnaxEnv, episode: Episode, shown: Sequence[int]) -> list[np.ndarray]:
    from gymnax.visualize import Visualizer
    from matplotlib import pyplot

    drawn = Visualizer(env.env, env.params, episode.states)
    drawn.fig.set_dpi(80)
    frames = []
    try:
        drawn.init()
        for i in shown:
            drawn.update(i)
            drawn.ax.set_title(_title(episode, i), fontsize=11)
            frames.append(pixels(drawn.fig))
    finally:
        pyplot.close(drawn.fig)
    return frames


def pixels(figure: Figure) -> np.ndarray:
    """A drawn figure as (height, width, 3) uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _title(episode: Episode, i: int) -> str:
    total = episode.rewards[: i + 1].sum()
    if i == len(episode.rewards):
        return f"{episode.env_id}\nstep {i}: {episode.ending}, return {total:.4g}"
    action, names = episode.actions[i], ACTION_NAMES.get(episode.env_id)
    text = names[int(action)] if names else np.array2string(action, precision=2, threshold=6, edgeitems=2)
    return f"{episode.env_id}\nstep {i}: action {text}, reward {episode.rewards[i]:.4g}, return {total:.4g}"


def _milliseconds(episode: Episode, shown: Sequence[int]) -> list[int]:
    """Time of each frame: slow for short episodes, never faster than 25 frames a second; the last one stays."""
    each = int(np.clip(6000 // len(shown), 40, 500))
    return [each] * (len(shown) - 1) + [max(each, 1500)]


def _gif(frames: Sequence[np.ndarray], milliseconds: list[int]) -> bytes:
    images = [Image.fromarray(f).quantize(64, dither=Image.Dither.NONE) for f in frames]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    return buffer.getvalue()


def _brax(env: BraxEnv, episode: Episode, shown: Sequence[int], out: Path) -> bytes:
    states = [episode.states[i].env.pipeline_state for i in shown]
    stride = shown[1] - shown[0]
    if out.suffix.lower() == ".html":
        from brax.io import html

        system = env.env.sys.tree_replace({"opt.timestep": env.env.dt * stride})
        return html.render(system, states).encode()
    try:
        from brax.io import image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GLFW warns; what counts is raised below
            frames = image.render_array(env.env.sys, states)
    except Exception as error:  # what a missing or broken OpenGL raises depends on the machine
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{out}: a .gif of {episode.env_id} needs OpenGL, which does not work here ({line}); use "
            f"--out {out.with_suffix('.html')}, or set MUJOCO_GL to egl or osmesa if one is installed"
        ) from error
    each = max(20, round(1000 * float(env.env.dt) * stride))
    return _gif(list(frames), [each] * (len(shown) - 1) + [1500])


# -- drawings ------------------------------------------------------------------------------------------------------

ACTION_NAMES: dict[str, tuple[str, ...]] = {
    "FrozenLake-misc": ("left", "down", "right", "up"),
    "CartPole-v1": ("left", "right"),
    "MountainCar-v0": ("left", "none", "right"),
}

INK, ACCENT, SOFT = "#22303c", "#c8553d", "#b9c6d0"


def painter(env: Env, episode: Episode) -> Paint:
    """How to draw state i of an episode: the environment's own drawing, or its observations."""
    if isinstance(env, GymnaxEnv) and episode.env_id in PAINTERS:
        return PAINTERS[episode.env_id](env, episode)
    return _paint_images(episode) if episode.obs.ndim in (3, 4) else _paint_vectors(episode)


def _square(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set(xlim=x, ylim=y, xticks=[], yticks=[])
    axes.set_aspect("equal")


def _frozen_lake(env: GymnaxEnv, episode: Episode) -> Paint:
    tiles = np.asarray(env.env.desc)  # (rows, columns): 0 start, 1 frozen, 2 hole, 3 goal
    colours = np.array([[0.82, 0.90, 0.95], [0.93, 0.97, 1.0], [0.16, 0.24, 0.34], [0.62, 0.80, 0.55]])
    moves = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of left, down, right, up

    def paint(axes: Axes, i: int) -> None:
        axes.imshow(colours[tiles])
        for row, column in np.ndindex(*tiles.shape):
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, ec="white", lw=2))
            axes.text(column - 0.42, row + 0.4, "S HG"[tiles[row, column]], color="#7f919e", fontsize=11)
        row, column = divmod(int(episode.states[i].position), tiles.shape[1])
        axes.plot(column, row, "o", ms=90 / max(tiles.shape), color=ACCENT, mec="white", mew=2)
        if i < len(episode.actions):
            down, right = moves[int(episode.actions[i])]
            style = {"arrowstyle": "-|>", "lw": 3, "color": INK, "mutation_scale": 22}
            axes.annotate("", (column + 0.62 * right, row + 0.62 * down), (column, row), arrowprops=style)
        axes.set(xticks=[], yticks=[])

    return paint


def _cart_pole(env: GymnaxEnv, episode: Episode) -> Paint:
    limit, length = float(env.params.x_threshold), 2 * float(env.params.length)

    def paint(axes: Axes, i: int) -> None:
        state = episode.states[i]
        x, angle = float(state.x), float(state.theta)  # the angle is 0 upright and grows clockwise
        axes.axhline(0, color=SOFT, lw=2, zorder=0)
        for side in (-limit, limit):
            axes.plot([side, side], [-0.15, 0.15], color=SOFT, lw=2)
        axes.add_patch(Rectangle((x - 0.3, -0.15), 0.6, 0.3, color=INK))
        axes.plot([x, x + length * np.sin(angle)], [0.1, 0.1 + length * np.cos(angle)], color=ACCENT, lw=7)
        if i < len(episode.actions):
            push = 1 if episode.actions[i] == 1 else -1
            style = {"arrowstyle": "-|>", "lw": 2, "color": INK}
            axes.annotate("", (x + 0.8 * push, -0.35), (x + 0.2 * push, -0.35), arrowprops=style)
        _square(axes, (-limit - 0.4, limit + 0.4), (-1.0, 1.8))

    return paint


def _pendulum(env: GymnaxEnv, episode: Episode) -> Paint:
    strongest = float(env.params.max_torque)

    def paint(axes: Axes, i: int) -> None:
        angle = float(episode.states[i].theta)  # 0 upright, grows counter-clockwise
        axes.plot([0, -np.sin(angle)], [0, np.cos(angle)], color=ACCENT, lw=12, solid_capstyle="round")
        axes.plot(0, 0, "o", ms=9, color=INK)
        if i < len(episode.actions):
            torque = float(np.clip(np.ravel(episode.actions[i])[0], -strongest, strongest))
            arc = np.linspace(np.pi / 2, np.pi / 2 + 0.9 * np.pi * torque / strongest, 40)
            axes.plot(0.3 * np.cos(arc), 0.3 * np.sin(arc), color=INK, lw=2)
            axes.plot(0.3 * np.cos(arc[-1]), 0.3 * np.sin(arc[-1]), "o", ms=5, color=INK)
        _square(axes, (-1.3, 1.3), (-1.3, 1.3))

    return paint


def _acrobot(env: GymnaxEnv, episode: Episode) -> Paint:
    first, second = float(env.params.link_length_1), 1.0  # the dynamics use 1 for the second link

    def paint(axes: Axes, i: int) -> None:
        state = episode.states[i]
        a = float(state.joint_angle1)  # 0 hangs down
        b = a + float(state.joint_angle2)
        x, y = first * np.sin(a), -first * np.cos(a)
        axes.axhline(1.0, color=SOFT, lw=2, zorder=0)
        axes.plot([0, x], [0, y], color=INK, lw=9, solid_capstyle="round")
        axes.plot([x, x + second * np.sin(b)], [y, y - second * np.cos(b)], color=ACCENT, lw=9, solid_capstyle="round")
        axes.plot([0, x], [0, y], "o", ms=7, color="white")
        _square(axes, (-2.3, 2.3), (-2.3, 2.3))

    return paint


def _mountain_car(env: GymnaxEnv, episode: Episode) -> Paint:
    low, high, goal = (float(getattr(env.params, n)) for n in ("min_position", "max_position", "goal_position"))
    height = lambda x: 0.45 * np.sin(3 * x) + 0.55
    x = np.linspace(low, high, 200)

    def paint(axes: Axes, i: int) -> None:
        at = float(episode.states[i].position)
        axes.fill_between(x, height(x), color=SOFT)
        axes.plot([goal, goal], [height(goal), height(goal) + 0.2], color=INK, lw=2)
        axes.plot(goal + 0.03, height(goal) + 0.17, ">", ms=10, color=ACCENT)
        axes.plot(at, height(at) + 0.04, "o", ms=16, color=ACCENT)
        if i < len(episode.actions):
            action = float(np.ravel(episode.actions[i])[0])
            push = np.clip(action - 1 if episode.env_id == "MountainCar-v0" else action, -1, 1)
            axes.plot([at, at + 0.2 * push], [height(at) + 0.15] * 2, color=INK, lw=3)
        _square(axes, (low, high), (0, 1.3))

    return paint


PAINTERS: dict[str, Callable[[GymnaxEnv, Episode], Paint]] = {
    "FrozenLake-misc": _frozen_lake,
    "CartPole-v1": _cart_pole,
    "Pendulum-v1": _pendulum,
    "Acrobot-v1": _acrobot,
    "MountainCar-v0": _mountain_car,
    "MountainCarContinuous-v0": _mountain_car,
}


def _paint_images(episode: Episode) -> Paint:
    """Any environment with (H, W) or (H, W, C) observations: a colour per channel, the last one that is on wins."""
    images = episode.obs if episode.obs.ndim == 4 else episode.obs[..., None]
    channels = images.shape[-1]
    colours = np.array([(0, 0, 0), *(colormaps["tab20"](c % 20)[:3] for c in range(channels))])

    def paint(axes: Axes, i: int) -> None:
        if channels == 1:
            axes.imshow(images[i, ..., 0], cmap="gray", vmin=images.min(), vmax=max(images.max(), images.min() + 1e-6))
        else:
            axes.imshow(colours[np.max((images[i] > 0) * np.arange(1, channels + 1), axis=-1)])
        axes.set(xticks=[], yticks=[])

    return paint


def _paint_vectors(episode: Episode) -> Paint:
    """Any environment with a vector of observations: a bar per entry, on the episode's own scale."""
    bars = episode.obs.reshape(len(episode.obs), -1)
    size = bars.shape[1]
    low, high = float(np.nanmin(episode.obs)), float(np.nanmax(episode.obs))
    margin = 0.05 * (high - low) or 1.0

    def paint(axes: Axes, i: int) -> None:
        axes.bar(np.arange(size), bars[i], color=ACCENT)
        axes.axhline(0, color=INK, lw=1)
        axes.set(ylim=(min(low, 0) - margin, max(high, 0) + margin), xlabel="observation entry")
        axes.set_xticks(np.arange(size) if size <= 32 else np.arange(0, size, -(-size // 16)))

    return paint
