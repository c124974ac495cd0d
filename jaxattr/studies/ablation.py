"""What each difference between published IIF and its variants does, as data: contrasts of two arms.

A contrast is the gain of an arm over the baseline that shares everything with it but the filter. Arms stand in
`jaxattr.studies.reproduction.ARMS`; all are run in the paper's setting at the published p.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxattr.analysis.compare import NULL

SETTING = "paper"
"""The only setting that is ablated."""
ENVS = ("FrozenLake-misc", "Acrobot-v1", "envpool/MiniGrid-Empty-8x8-v0", "envpool/LunarLander-v3")
PUBLISHED = ("iif", "none")
"""Arm and baseline that every other contrast is held against."""


class Contrast(NamedTuple):
    """gain = AUC(arm) - AUC(base), over seeds."""

    label: str
    arm: str
    base: str
    """Both keys of `ARMS`."""


CONTRASTS = (
    Contrast("IIF as published", *PUBLISHED),
    Contrast("null: no filter, other seeds", NULL, "none"),
    Contrast("random, as many dropped", "random", "none"),
    Contrast("loss side standardised over the buffer", "iif-buffer", "none"),
    Contrast("target standardised", "iif-target", "none"),
    Contrast("both", "iif-norm", "none"),
    Contrast("optimiser steps matched", "iif-matched", "none"),
    Contrast("gradient norm clipped at 0.5, both arms", "iif-clip", "none-clip"),
    Contrast("8 environments x 256 steps, both arms", "iif-8", "none-8"),
    Contrast("episodes cut at each round, both arms", "iif-cut", "none-cut"),
    Contrast("episodes cut in IIF only, as the authors ran it", "iif-cut", "none"),
    Contrast("no filter: norm clipped", "none-clip", "none"),
    Contrast("no filter: 8 environments", "none-8", "none"),
    Contrast("no filter: episodes cut", "none-cut", "none"),
)
ABLATION_ARMS = tuple(dict.fromkeys(name for contrast in CONTRASTS for name in (contrast.base, contrast.arm)))
