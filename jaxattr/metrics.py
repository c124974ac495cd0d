"""What every round reports, and where its first non-finite value is."""

from __future__ import annotations

import jax.numpy as jnp

from jaxattr.config import Config
from jaxattr.ops import trees
from jaxattr.types import (
    NONFINITE_FIELDS,
    SCORE_QUANTILES,
    Array,
    EpisodeStats,
    Judged,
    Metrics,
    Rollout,
    Settings,
    Terms,
    Training,
    TrainState,
)


def measure(
    config: Config,
    state: TrainState,
    new: TrainState,
    rollout: Rollout,
    judged: Judged,
    direction_norm: Array,
    terms: Terms,
    training: Training,
    episodes: EpisodeStats,
    settings: Settings,
) -> Metrics:
    """The metrics of one lane's round.

    Args:
      config: static settings.
      state, new: before and after the round.
      rollout, judged, episodes: what was collected, scored and kept.
      direction_norm: |grad f|.
      terms: of the loss, over all records with the new parameters.
      training: what the epochs did.
      settings: traced numbers.
    """
    records, scores, weights = judged.records, judged.scores, judged.weights
    valid, count = records.valid, jnp.maximum(episodes.count, 1)
    scored = config.needs_scores
    finished = episodes.count > 0
    code, index = first_nonfinite(config, rollout, judged, new)
    of_valid = jnp.where(valid, scores, jnp.nan)
    spread = jnp.var(records.return_, where=valid)
    residual = jnp.var(records.return_ - records.value, where=valid)
    scheduled = 1.0 - state.update / settings.total_updates if config.lr_schedule == "linear" else 1.0
    kept = jnp.sum(weights > 0, dtype=jnp.int32)
    total = jnp.sum(valid, dtype=jnp.int32)
    quantiles = jnp.full(len(SCORE_QUANTILES), jnp.nan)
    return Metrics(
        episodes=episodes.count,
        return_mean=jnp.where(finished, episodes.return_sum / count, jnp.nan),
        length_mean=jnp.where(finished, episodes.length_sum / count, jnp.nan),
        records=total,
        kept=kept,
        dropped=total - kept,
        negative=jnp.sum((scores < 0) & valid, dtype=jnp.int32),
        leftover=training.leftover,
        optimizer_steps=training.steps,
        policy_loss=terms.policy_loss,
        value_loss=terms.value_loss,
        entropy=terms.entropy,
        approx_kl=terms.kl,
        clip_fraction=terms.clipped,
        explained_variance=jnp.where(spread > 0, 1.0 - residual / spread, jnp.nan),
        grad_norm=training.grad_norm,
        score_mean=jnp.nanmean(of_valid) if scored else jnp.float32(jnp.nan),
        score_quantiles=jnp.nanquantile(of_valid, jnp.array(SCORE_QUANTILES)) if scored else quantiles,
        target_grad_norm=direction_norm,
        learning_rate=settings.learning_rate * scheduled,
        nonfinite=code,
        nonfinite_index=index,
    )


def first_nonfinite(config: Config, rollout: Rollout, judged: Judged, new: TrainState) -> tuple[Array, Array]:
    """(1 + index into NONFINITE_FIELDS, record) of the first bad value, or (0, -1)."""
    records, scores = judged.records, judged.scores
    n = scores.shape[0]
    rows = {
        "observation": jnp.all(jnp.isfinite(rollout.obs.reshape(n, -1)), axis=1),
        "reward": jnp.isfinite(rollout.reward.reshape(n)),
        "log_prob": jnp.isfinite(records.log_prob),
        "value": jnp.isfinite(records.value) & jnp.isfinite(rollout.next_value.reshape(n)),
        "advantage": jnp.isfinite(records.advantage),
        "score": jnp.isfinite(scores) if config.needs_scores else jnp.ones(n, bool),
    }
    bad = jnp.stack([~ok & records.valid for ok in rows.values()])  # (fields, N)
    flags = jnp.append(jnp.any(bad, axis=1), ~trees.all_finite((new.params, new.opt_state)))
    assert len(flags) == len(NONFINITE_FIELDS)
    first = jnp.argmax(flags)
    index = jnp.where(first < len(rows), jnp.argmax(bad[jnp.minimum(first, len(rows) - 1)]), -1)
    found = jnp.any(flags)
    return jnp.where(found, first + 1, 0).astype(jnp.int32), jnp.where(found, index, -1).astype(jnp.int32)
