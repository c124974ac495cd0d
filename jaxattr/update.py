"""The update step: one round of PPO with influence filtering, as one pure function.

    collect -> advantages -> scores -> filter -> epochs x minibatches

`UpdateStep.update` is what runs, for all lanes; `learn` is the same without collection, for one lane: experience that
comes from elsewhere goes in there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxattr.attribution.filters import FILTERS, UNWEIGHTED
from jaxattr.attribution.scores import loss_advantage, score_records
from jaxattr.attribution.targets import TARGETS
from jaxattr.config import Config
from jaxattr.envs.base import tree_select
from jaxattr.networks import Networks
from jaxattr.ops import losses, permutation, trees
from jaxattr.ops.returns import gae
from jaxattr.ops.statistics import normalize, scale, standardize, update_stats
from jaxattr.rollout import Collector, over_lanes
from jaxattr.types import (
    NONFINITE_FIELDS,
    SCORE_QUANTILES,
    Array,
    EpisodeStats,
    Metrics,
    Params,
    PRNGKey,
    Records,
    Rollout,
    RunningStats,
    Settings,
    TrainState,
)

Shuffle = Callable[[PRNGKey, int, int, "Array | None"], Array]
"""(key, N, epochs E, keep (N,) or None) -> (E, N) visiting orders; see `ops.permutation.orders`."""


class Judged(NamedTuple):
    """A round's records and what influence filtering said about them."""

    records: Records
    scores: Array  # (N,) float32, NaN where not computed
    weights: Array  # (N,) float32, 0 = dropped


class Terms(NamedTuple):
    """Parts of PPO's loss, of one record or averaged."""

    policy_loss: Array
    value_loss: Array
    entropy: Array
    kl: Array
    clipped: Array


class Training(NamedTuple):
    """What the optimisation epochs did."""

    leftover: Array  # () int32, kept records per epoch that fill no minibatch
    steps: Array  # () int32, optimiser steps
    grad_norm: Array  # () mean over minibatches, before clipping


def make_optimizer(config: Config, settings: Settings, learning_rate: Array | float) -> optax.GradientTransformation:
    """Norm clip, then SGD or Adam, on the flattened parameter vector; all numbers may be traced."""
    rule = optax.scale_by_adam(eps=settings.adam_eps) if config.optimizer == "adam" else optax.identity()
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm), rule, optax.scale_by_learning_rate(learning_rate)
    )


@dataclass(frozen=True)
class UpdateStep:
    """The compiled core of training; all methods are pure.

    Attributes:
      config: static choices (its traced numbers are NOT read here: they come in as `settings`).
      nets: policy and value networks.
      collector: where experience comes from.
      shuffle: source of visiting orders, replaceable to replay a recorded round.
    """

    config: Config
    nets: Networks
    collector: Collector
    shuffle: Shuffle = permutation.orders

    # -- whole rounds, all lanes ------------------------------------------------------------------------------
    def update(self, state: TrainState, settings: Settings) -> tuple[TrainState, Metrics]:
        """One round. All leaves have a leading lane axis S."""
        return self.round(state, settings)[:2]

    def round(self, state: TrainState, settings: Settings) -> tuple[TrainState, Metrics, Judged]:
        """One round, and the records it was learned from with their scores and weights."""
        keys = jax.vmap(lambda k: jax.random.split(k, 4))(state.key)
        env_state, rollout, episodes = self.collector.collect(self.nets, state, keys[:, 1])
        fresh = self.collector.init(keys[:, 3]) if self.config.on_nonfinite == "skip" else None
        new, metrics, judged = over_lanes(self.learn)(
            state.replace(key=keys[:, 0], env_state=env_state), rollout, episodes, keys[:, 2], settings
        )
        return over_lanes(self._guard)(state, new, metrics, fresh), metrics, judged

    # -- one lane ---------------------------------------------------------------------------------------------
    def learn(
        self, state: TrainState, rollout: Rollout, episodes: EpisodeStats, key: PRNGKey, settings: Settings
    ) -> tuple[TrainState, Metrics, Judged]:
        """A round from its rollout on, for ONE lane (no lane axis). Uses up `key`."""
        key_score, key_filter, key_epochs = jax.random.split(key, 3)
        records, reward_stats, discounted = self.advantages(state, rollout, settings)
        scores, direction_norm = self.score(state, records, key_score, settings)
        weights = self.filter(state, records, scores, key_filter, settings)
        params, opt_state, training = self.optimize(state, records, weights, key_epochs, settings)

        obs_stats = state.obs_stats
        if self.config.normalize_obs:
            # Only for the next round: acting, scoring and learning of one round all see one snapshot.
            seen = rollout.obs.reshape((-1, *rollout.obs.shape[2:]))
            obs_stats = update_stats(obs_stats, seen, records.valid)
        new = state.replace(
            params=params,
            opt_state=opt_state,
            obs_stats=obs_stats,
            reward_stats=reward_stats,
            discounted_return=discounted,
            update=state.update + 1,
        )
        judged = Judged(records, scores, weights)
        metrics = self._metrics(state, new, rollout, judged, direction_norm, training, episodes, settings)
        return new, metrics, judged

    def advantages(
        self, state: TrainState, rollout: Rollout, settings: Settings
    ) -> tuple[Records, RunningStats, Array]:
        """Rollout -> records with GAE advantages; also the reward statistics after this round."""
        if not self.collector.all_valid:
            rollout = _blank(rollout)
        reward, stats, discounted = rollout.reward, state.reward_stats, state.discounted_return
        if self.config.normalize_reward:
            done = rollout.terminated | rollout.truncated

            def forward(total, row):
                r, d, v = row
                total = jnp.where(v, settings.gamma * total + r, total)
                return jnp.where(d, 0.0, total), total

            discounted, returns = jax.lax.scan(forward, discounted, (reward, done, rollout.valid))
            # Rewards take no part in acting, so their statistics may include this round: the first one counts too.
            stats = update_stats(stats, returns.reshape(-1), rollout.valid.reshape(-1))
            reward = scale(stats, reward)
        advantage, td_error = jax.vmap(gae, in_axes=(1, 1, 1, 1, 1, None, None), out_axes=1)(
            reward,
            rollout.value,
            rollout.next_value,
            rollout.terminated,
            rollout.truncated | ~rollout.valid,  # a row that is no record ends the sums before it
            settings.gamma,
            settings.gae_lambda,
        )
        flat = lambda x: x.reshape((-1, *x.shape[2:]))
        records = Records(
            obs=normalize(state.obs_stats, flat(rollout.obs)),
            action=flat(rollout.action),
            log_prob=flat(rollout.log_prob),
            value=flat(rollout.value),
            reward=flat(reward),
            advantage=flat(advantage),
            return_=flat(advantage + rollout.value),
            td_error=flat(td_error),
            terminated=flat(rollout.terminated),
            truncated=flat(rollout.truncated),
            valid=flat(rollout.valid),
        )
        return records, stats, discounted

    def score(self, state: TrainState, records: Records, key: PRNGKey, settings: Settings) -> tuple[Array, Array]:
        """Influence of every record at the round's first parameters: scores (N,) and |grad target| ()."""
        c, n = self.config, records.advantage.shape[0]
        if not c.needs_scores:
            return jnp.full(n, jnp.nan), jnp.float32(jnp.nan)
        aimed = records
        if c.target_normalize:
            aimed = records.replace(advantage=standardize(records.advantage, records.valid))
        direction = jax.grad(lambda p: TARGETS[c.target](self.nets.log_prob, p, aimed))(state.params)
        if c.score_params != "policy":
            direction = trees.keep_matching(direction, c.score_params)
        order = self.shuffle(key, n, 1, None)[0] if c.score_normalize == "chunk" else None
        entropy_weight = settings.ent_coef
        if c.entropy_scale == "published":
            entropy_weight = entropy_weight / jnp.maximum(jnp.sum(records.valid), 1)
        scores = score_records(
            self.nets.log_prob,
            state.params,
            records.obs,
            records.action,
            loss_advantage(records.advantage, records.valid, c.score_normalize, c.norm_chunk, order=order),
            direction,
            estimator=c.estimator,
            entropy_fn=self.nets.entropy if c.score_entropy else None,
            entropy_weight=entropy_weight,
            chunk_size=c.score_chunk,
        )
        return scores, trees.norm(direction)

    def filter(self, state: TrainState, records: Records, scores: Array, key: PRNGKey, settings: Settings) -> Array:
        """The rule's weights (N,): 0 = dropped."""
        rule = FILTERS[self.config.filter]
        weights = rule(scores, records, key, state.update, settings.p, self.config.minibatch_size)
        return jnp.where(records.valid, weights, 0.0)  # whatever a rule of the user's says of rows that are no records

    def optimize(
        self, state: TrainState, records: Records, weights: Array, key: PRNGKey, settings: Settings
    ) -> tuple[Params, Any, Training]:
        """Epochs x minibatches on the records of positive weight."""
        c, n = self.config, weights.shape[0]
        everything = c.filter == "none" and self.collector.all_valid
        keep = None if everything else weights > 0
        kept = n if keep is None else jnp.sum(keep, dtype=jnp.int32)
        order = self.shuffle(key, n, c.num_epochs, keep)
        matched = c.training == "step_matched" and not everything
        per_epoch: Any = c.minibatches_per_epoch
        if matched:  # a rule that keeps less than one minibatch means no step, here as in compact training
            per_epoch = jnp.where(kept >= c.minibatch_size, per_epoch, 0)
        elif not everything:
            per_epoch = kept // c.minibatch_size
        steps = c.num_epochs * per_epoch

        learning_rate = settings.learning_rate
        if c.lr_schedule == "linear":
            learning_rate = learning_rate * (1.0 - state.update / settings.total_updates)
        optimizer = make_optimizer(c, settings, learning_rate)
        unflatten = trees.unflattener(state.params)
        data = (records, weights if c.filter not in UNWEIGHTED else None)
        if c.normalize_advantage == "buffer":
            data = (records.replace(advantage=standardize(records.advantage, weights > 0)), data[1])

        def step(j: Array, carry: Any) -> Any:
            flat, opt_state, norms = carry
            epoch, position = j // per_epoch, (j % per_epoch) * c.minibatch_size
            if matched:  # go on through the kept records a second time
                rows = order[epoch, (position + jnp.arange(c.minibatch_size)) % kept]
            else:
                rows = jax.lax.dynamic_slice(order, (epoch, position), (1, c.minibatch_size))[0]
            batch = jax.tree.map(lambda x: x[rows], data)
            grads = trees.flatten(jax.grad(self._loss)(unflatten(flat), *batch, settings))
            change, opt_state = optimizer.update(grads, opt_state)
            return flat + change, opt_state, norms + jnp.linalg.norm(grads)

        start = (trees.flatten(state.params), state.opt_state, jnp.float32(0.0))
        flat, opt_state, norms = jax.lax.fori_loop(0, steps, step, start)
        training = Training(
            leftover=jnp.asarray(kept - jnp.minimum(kept, per_epoch * c.minibatch_size), jnp.int32),
            steps=jnp.asarray(steps, jnp.int32),
            grad_norm=norms / jnp.maximum(steps, 1),
        )
        return unflatten(flat), opt_state, training

    def _loss(self, params: Params, batch: Records, weights: Array | None, settings: Settings) -> Array:
        """PPO's loss over one minibatch: the mean of the records' losses."""
        advantage = batch.advantage
        if self.config.normalize_advantage == "minibatch":
            advantage = standardize(advantage)
        terms = jax.vmap(lambda r, a: self._record_terms(params, r, a, settings))(batch, advantage)
        loss = terms.policy_loss + settings.vf_coef * terms.value_loss - settings.ent_coef * terms.entropy
        return jnp.mean(loss if weights is None else loss * weights)

    def _record_terms(self, params: Params, record: Records, advantage: Array, settings: Settings) -> Terms:
        """What ONE record contributes to the loss, and how far its ratio moved."""
        head, value = self.nets.apply(params, record.obs)
        log_ratio = self.nets.distribution.log_prob(head, record.action) - record.log_prob
        policy, kl, clipped = losses.clipped_policy_loss(log_ratio, advantage, settings.clip_range)
        value_clip = None if self.config.value_clip_range is None else settings.value_clip_range
        error = losses.value_loss(value, record.value, record.return_, value_clip)
        return Terms(policy, error, self.nets.distribution.entropy(head, record.action), kl, clipped)

    def _metrics(self, state, new, rollout, judged, direction_norm, training, episodes, settings) -> Metrics:
        records, scores, weights = judged
        valid, count = records.valid, jnp.maximum(episodes.count, 1)
        scored = self.config.needs_scores
        finished = episodes.count > 0
        advantage = standardize(records.advantage, valid)
        terms = jax.vmap(lambda r, a: self._record_terms(new.params, r, a, settings))(records, advantage)
        terms = jax.tree.map(lambda x: jnp.mean(x, where=valid), terms)
        code, index = self._first_nonfinite(rollout, judged, new)
        of_valid = jnp.where(valid, scores, jnp.nan)
        spread = jnp.var(records.return_, where=valid)
        residual = jnp.var(records.return_ - records.value, where=valid)
        scheduled = 1.0 - state.update / settings.total_updates if self.config.lr_schedule == "linear" else 1.0
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

    def _first_nonfinite(self, rollout: Rollout, judged: Judged, new: TrainState) -> tuple[Array, Array]:
        """(1 + index into NONFINITE_FIELDS, record) of the first bad value, or (0, -1)."""
        records, scores, _ = judged
        n = scores.shape[0]
        rows = {
            "observation": jnp.all(jnp.isfinite(rollout.obs.reshape(n, -1)), axis=1),
            "reward": jnp.isfinite(rollout.reward.reshape(n)),
            "log_prob": jnp.isfinite(records.log_prob),
            "value": jnp.isfinite(records.value) & jnp.isfinite(rollout.next_value.reshape(n)),
            "advantage": jnp.isfinite(records.advantage),
            "score": jnp.isfinite(scores) if self.config.needs_scores else jnp.ones(n, bool),
        }
        bad = jnp.stack([~ok & records.valid for ok in rows.values()])  # (fields, N)
        flags = jnp.append(jnp.any(bad, axis=1), ~trees.all_finite((new.params, new.opt_state)))
        assert len(flags) == len(NONFINITE_FIELDS)
        first = jnp.argmax(flags)
        index = jnp.where(first < len(rows), jnp.argmax(bad[jnp.minimum(first, len(rows) - 1)]), -1)
        found = jnp.any(flags)
        return jnp.where(found, first + 1, 0).astype(jnp.int32), jnp.where(found, index, -1).astype(jnp.int32)

    def _guard(self, old: TrainState, new: TrainState, metrics: Metrics, fresh: Any) -> TrainState:
        """Keep the last good state where the round went bad: freeze the lane, or reset its environments and go on."""
        good = (metrics.nonfinite == 0) & old.alive
        if self.config.on_nonfinite == "skip":
            restart = old.replace(
                env_state=fresh,
                key=new.key,
                update=new.update,
                discounted_return=jnp.zeros_like(old.discounted_return),
            )
            return tree_select(good, new, restart)
        return tree_select(good, new, old).replace(alive=good)


def _blank(rollout: Rollout) -> Rollout:
    """Zeros in the rows that are no records: whatever a backend left there (NaN too) reaches no sum and no gradient."""

    def leaf(x: Array) -> Array:
        return jnp.where(rollout.valid.reshape(rollout.valid.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

    return jax.tree.map(leaf, rollout)
