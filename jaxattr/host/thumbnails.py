"""Environment states as thumbnails: what `jaxattr report` shows beside a record."""

from __future__ import annotations

import base64
import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageChops

from jaxattr.envs.brax import BraxEnv
from jaxattr.envs.gymnax import GymnaxEnv
from jaxattr.host import render

PICTURE = (248, 168)
"""Pixels of a thumbnail at most."""


class Drawer:
    """Draws environment states as thumbnails; equal pictures are kept once.

    Attributes:
      images: data URIs of the distinct pictures so far.
      why: why this environment cannot be drawn; empty if it can.
    """

    def __init__(self, env: Any, env_id: str):
        self.env, self.env_id = env, env_id
        self.images: list[str] = []
        self.why = ""
        self._known: dict[bytes, int] = {}  # what makes up a picture, or its PNG -> place in `images`

    def __call__(self, states: Sequence[Any], obs: Sequence[np.ndarray], actions: Sequence[Any]) -> list[int | None]:
        """The pictures of some states, with the action chosen there, as places in `images`; None = not drawn."""
        keys = [_identity(s, a) for s, a in zip(states, actions, strict=True)]
        fresh = list({k: i for i, k in enumerate(keys) if k not in self._known}.values())
        if fresh and not self.why:
            episode = render.Episode(
                self.env_id, [states[i] for i in fresh], np.stack([obs[i] for i in fresh]),
                np.stack([actions[i] for i in fresh]), np.zeros(len(fresh)), "",
            )  # fmt: skip
            for i, frame in zip(fresh, self._frames(episode), strict=False):
                content = _thumbnail(frame)
                if content not in self._known:
                    self._known[content] = len(self.images)
                    self.images.append(data_uri(content))
                self._known[keys[i]] = self._known[content]
        return [self._known.get(k) for k in keys]

    def _frames(self, episode: render.Episode) -> list[np.ndarray]:
        env, every = self.env, range(len(episode.states))
        if isinstance(env, GymnaxEnv) and self.env_id in render.GYMNAX_DRAWS:
            return _by_gymnax(env, episode)
        if isinstance(env, BraxEnv):
            try:
                from brax.io import image

                states = [s.env.pipeline_state for s in episode.states]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # GLFW warns; what counts is raised below
                    return list(image.render_array(env.env.sys, states, height=PICTURE[1], width=PICTURE[0]))
            except Exception as error:  # what a missing or broken OpenGL raises depends on the machine
                line = textwrap.shorten(str(error), 90, placeholder=" ...") or type(error).__name__
                self.why = f"pictures of {self.env_id} need OpenGL, which did not work where this was written ({line})"
                return []
        if self.env_id not in render.PAINTERS and episode.obs.ndim not in (3, 4):
            self.why = f"jaxattr has no drawing of {self.env_id}"
            return []
        paint = render.painter(env, episode)
        figure = Figure(figsize=(5.0, 4.0), dpi=56)
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        frames = []
        for i in every:
            axes.clear()
            paint(axes, i)
            axes.spines[:].set_color(render.SOFT)
            if axes.images and axes.texts:  # a grid world: room for an arrow out of it
                (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
                axes.set(xlim=(left - 0.25, right + 0.25), ylim=(bottom + 0.25, top - 0.25))
            frames.append(render.pixels(figure))
        return frames


def _by_gymnax(env: GymnaxEnv, episode: render.Episode) -> list[np.ndarray]:
    """gymnax's own drawings, without the title that `jaxattr render` gives them."""
    from gymnax.visualize import Visualizer
    from matplotlib import pyplot

    drawn, frames = Visualizer(env.env, env.params, episode.states), []
    try:
        drawn.init()
        for i in range(len(episode.states)):
            drawn.update(i)
            drawn.ax.set_title("")
            frames.append(render.pixels(drawn.fig))
    finally:
        pyplot.close(drawn.fig)
    return frames


def _thumbnail(frame: np.ndarray) -> bytes:
    """Without its white margin, small, in few colours, as PNG."""
    image = Image.fromarray(np.ascontiguousarray(frame)).convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    image = image.crop(box) if box else image
    image.thumbnail(PICTURE)
    buffer = io.BytesIO()
    image.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _identity(state: Any, action: Any) -> bytes:
    """The same for states that look the same: without gymnax's step counter."""
    state = state.replace(time=0) if hasattr(state, "time") and hasattr(state, "replace") else state
    return b"".join(np.asarray(x).tobytes() + b"|" for x in [*jax.tree.leaves(state), action])


def data_uri(png: bytes) -> str:
    """PNG bytes as something a page can show without a file."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
