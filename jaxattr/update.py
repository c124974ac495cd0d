"""The update step: one round of PPO with influence filtering, as one pure function.

    collect -> advantages -> scores -> filter -> epochs x minibatches

`UpdateStep.update` is what runs, for all lanes; `learn` is the same without collection, for one lane: experience that
comes from elsewhere goes in there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxattr.attribution.estimators import Objective
from jaxattr.attribution.filters import FILTERS
from jaxattr.attribution.influence import influence, mean_gradient, without_own_unit
from jaxattr.attribution.scores import loss_advantage, record_objective
from jaxattr.attribution.targets import OF_OBJECTIVE, TARGETS, Target
from jaxattr.attribution.units import segment_ids
from jaxattr.config import Config, ConfigError
from jaxattr.envs.base import tree_select
from jaxattr.lanes import over_lanes
from jaxattr.metrics import measure
from jaxattr.networks import Networks
from jaxattr.ops import losses, permutation, trees
from jaxattr.ops.returns import gae
from jaxattr.ops.statistics import normalize, scale, standardize, update_stats
from jaxattr.rollout import Collector
from jaxattr.types import (
    Array,
    EpisodeStats,
    Judged,
    Metrics,
    Params,
    PRNGKey,
    Records,
    Rollout,
    RunningStats,
    Settings,
    Terms,
    Training,
    TrainState,
)

ADAM_B2 = 0.999

Shuffle = Callable[[PRNGKey, int, int, "Array | None"], Array]
"""(key, N, epochs E, keep (N,) or None) -> (E, N) visiting orders; see `ops.permutation.orders`."""


class Watch(Protocol):
    """Something that follows the epochs, inside the same compiled loop (`attribution.tracin`)."""

    def init(self, params: Params, n: int) -> Any:
        """What is carried, before the first minibatch."""
        ...

    def see(
        self, carried: Any, params: Params, rows: Array, batch: Records, weights: Array | None, first: Array
    ) -> Any:
        """One minibatch: records `rows` of the round, advantages as the loss has them; `first` of its epoch."""
        ...


def make_optimizer(config: Config, settings: Settings, learning_rate: Array | float) -> optax.GradientTransformation:
    """Norm clip, then SGD or Adam, on the flattened parameter vector; all numbers may be traced."""
    rule = optax.scale_by_adam(b2=ADAM_B2, eps=settings.adam_eps) if config.optimizer == "adam" else optax.identity()
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
        keys = self.split(state)
        env_state, rollout, episodes = self.collector.collect(self.nets, state, keys[:, 1])
        return self.conclude(state, settings, keys, env_state, rollout, episodes)

    def split(self, state: TrainState) -> PRNGKey:
        """(S, 4) keys of a round: the next round's, collection's, learning's, a restart's."""
        return jax.vmap(lambda k: jax.random.split(k, 4))(state.key)

    def conclude(
        self,
        state: TrainState,
        settings: Settings,
        keys: PRNGKey,
        env_state: Any,
        rollout: Rollout,
        episodes: EpisodeStats,
    ) -> tuple[TrainState, Metrics, Judged]:
        """A round after its collection."""
        fresh = self.collector.init(keys[:, 3]) if self.config.on_nonfinite == "skip" else None
        new, metrics, judged = over_lanes(self.learn)(
            state.replace(key=keys[:, 0], env_state=env_state), rollout, episodes, keys[:, 2], settings
        )
        if rollout.env_state is not None:
            judged = judged._replace(rollout=rollout)
        return over_lanes(self._guard)(state, new, metrics, fresh), metrics, judged

    # -- one lane ---------------------------------------------------------------------------------------------
    def learn(
        self, state: TrainState, rollout: Rollout, episodes: EpisodeStats, key: PRNGKey, settings: Settings
    ) -> tuple[TrainState, Metrics, Judged]:
        """A round from its rollout on, for ONE lane (no lane axis). Uses up `key`."""
        key_score, key_filter, key_epochs = jax.random.split(key, 3)
        records, reward_stats, discounted = self.advantages(state, rollout, settings)
        scores, direction_norm = jnp.full(records.valid.shape, jnp.nan), jnp.float32(jnp.nan)
        if self.config.needs_scores:
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
        terms = self.terms(new.params, records, settings)
        metrics = measure(self.config, state, new, rollout, judged, direction_norm, terms, training, episodes, settings)
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
        cut = rollout.truncated | ~rollout.valid  # a row that is no record ends the sums before it

        def estimate(gae_lambda: Array) -> tuple[Array, Array]:
            over_envs = jax.vmap(gae, in_axes=(1, 1, 1, 1, 1, None, None), out_axes=1)
            flags = rollout.terminated, cut
            return over_envs(reward, rollout.value, rollout.next_value, *flags, settings.gamma, gae_lambda)

        advantage, td_error = estimate(settings.gae_lambda)
        mc_advantage = jnp.full_like(advantage, jnp.nan)
        if FILTERS[self.config.filter].monte_carlo:
            mc_advantage, _ = estimate(jnp.ones_like(settings.gae_lambda))
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
            mc_advantage=flat(mc_advantage),
            segment=segment_ids(rollout.terminated | cut),
            terminated=flat(rollout.terminated),
            truncated=flat(rollout.truncated),
            valid=flat(rollout.valid),
        )
        return records, stats, discounted

    def score(
        self,
        state: TrainState,
        records: Records,
        key: PRNGKey,
        settings: Settings,
        *,
        target: str | Target | None = None,
        metric: str | None = None,
        unit_ids: Array | None = None,
    ) -> tuple[Array, Array]:
        """Influence of every record at the round's first parameters: scores (N,) and |direction| ().

        Args:
          state: before the round.
          records: from `advantages`.
          key: used up (the shuffle of chunk normalisation).
          settings: traced numbers.
          target: overrides the filter's and the configuration's.
          metric: overrides the configuration's.
          unit_ids: what `gradient_loo` leaves out together; None = segments.
        """
        c = self.config
        target = (FILTERS[c.filter].target or c.target) if target is None else target
        objective, data = self.objective(records, key, settings)
        gradient = self.target_gradient(target, state.params, records, key, settings)
        weight = self.metric(state, c.score_metric if metric is None else metric, settings)
        scores, size = influence(
            objective, state.params, data, gradient, weight, estimator=c.estimator, chunk_size=c.score_chunk
        )
        if target == "gradient_loo":
            ids = jnp.where(records.valid, records.segment if unit_ids is None else unit_ids, -1)
            scores = without_own_unit(scores, objective, state.params, data, ids, c.num_envs, weight)
        return scores, size

    def target_gradient(
        self, target: str | Target | None, params: Params, records: Records, key: PRNGKey, settings: Settings
    ) -> Params:
        """grad f at any parameters; `None` = the filter's or the configuration's target. See `score`."""
        c = self.config
        target = (FILTERS[c.filter].target or c.target) if target is None else target
        if target in OF_OBJECTIVE:
            objective, data = self.objective(records, key, settings)
            return mean_gradient(objective, params, data, records.valid)
        if c.target_normalize:
            records = records.replace(advantage=standardize(records.advantage, records.valid))
        f = TARGETS[target] if isinstance(target, str) else target
        shape = jax.eval_shape(lambda p: f(self.nets.log_prob, p, records), params)
        if getattr(shape, "shape", None) != ():
            raise ConfigError(f"the target returns {shape}: must return one scalar")
        return jax.grad(lambda p: f(self.nets.log_prob, p, records))(params)

    def objective(self, records: Records, key: PRNGKey, settings: Settings) -> tuple[Objective, Any]:
        """What a step on one record climbs at the round's first parameters, and its data with a leading N axis."""
        c = self.config
        order = self.shuffle(key, records.valid.shape[0], 1, None)[0] if c.score_normalize == "chunk" else None
        entropy_weight = settings.ent_coef
        if c.entropy_scale == "published":
            entropy_weight = entropy_weight / jnp.maximum(jnp.sum(records.valid), 1)
        entropy_fn = self.nets.entropy if c.score_entropy else None
        advantage = loss_advantage(records.advantage, records.valid, c.score_normalize, c.norm_chunk, order=order)
        data = (records.obs, records.action, advantage)
        return record_objective(self.nets.log_prob, entropy_fn, entropy_weight), data

    def metric(self, state: TrainState, name: str, settings: Settings) -> Params | None:
        """The diagonal in which gradients are compared; None = ones.

        `adam`: 1 / (sqrt(v) + eps) with the bias-corrected second moments v that the optimiser holds at the round's
        start, kept fixed and without its momentum, so that a step is linear in the record's gradient. (LESS, arXiv
        2402.04333, also lets the record's own gradient move the moments.) Ones before the first step.
        """
        weight = None
        if name == "adam":
            moments: Any = next(s for s in state.opt_state if isinstance(s, optax.ScaleByAdamState))
            corrected = moments.nu / (1.0 - ADAM_B2 ** jnp.maximum(moments.count, 1))
            diagonal = jnp.where(moments.count > 0, 1.0 / (jnp.sqrt(corrected) + settings.adam_eps), 1.0)
            weight = trees.unflattener(state.params)(diagonal)
        if self.config.score_params != "policy":
            ones = jax.tree.map(jnp.ones_like, state.params) if weight is None else weight
            weight = trees.keep_matching(ones, self.config.score_params)
        return weight

    def filter(self, state: TrainState, records: Records, scores: Array, key: PRNGKey, settings: Settings) -> Array:
        """The rule's weights (N,): 0 = dropped."""
        rule, p = FILTERS[self.config.filter], settings.p
        if rule.gated:
            key, key_halves = jax.random.split(key)
            p = p * self.agreement(state.params, records, key_halves, settings)
        weights = rule(scores, records, key, state.update, p, self.config.minibatch_size)
        if self.config.warmup_rounds:
            weights = jnp.where(state.update < self.config.warmup_rounds, 1.0, weights)
        return jnp.where(records.valid, weights, 0.0)  # whatever a rule of the user's says of rows that are no records

    def agreement(self, params: Params, records: Records, key: PRNGKey, settings: Settings) -> Array:
        """max(0, cosine of grad f on two random halves of the buffer), () in [0, 1]: 0 where the target is noise.

        Ours, not in the paper: while nothing was learned yet, what the scores are measured against is chance.
        """
        key_halves, key = jax.random.split(key)
        rank = permutation.orders(key_halves, records.valid.shape[0], 1, None)[0]
        first = jnp.zeros_like(records.valid).at[rank[: rank.shape[0] // 2]].set(True)

        def half(mask: Array) -> Array:
            part = records.replace(valid=records.valid & mask)
            gradient = self.target_gradient(None, params, part, key, settings)
            if self.config.score_params != "policy":
                gradient = trees.keep_matching(gradient, self.config.score_params)
            return trees.flatten(gradient)

        a, b = half(first), half(~first)
        norms = jnp.linalg.norm(a) * jnp.linalg.norm(b)
        return jnp.where(norms > 0, jnp.maximum(jnp.vdot(a, b) / norms, 0.0), 0.0)

    def optimize(
        self,
        state: TrainState,
        records: Records,
        weights: Array,
        key: PRNGKey,
        settings: Settings,
        *,
        keep: Array | None = None,
        kept: Array | int | None = None,
        watch: Watch | None = None,
    ) -> tuple[Params, Any, Training]:
        """Epochs x minibatches on the records of positive weight, for ONE lane.

        Args:
          state: before the round: parameters, optimiser, schedule.
          records: (N,) of the round.
          weights: (N,) factors of the records' losses; 0 = dropped.
          key: of the visiting orders; used up.
          settings: traced numbers.
          keep: (N,) bool, the records that are visited; None = those of positive weight.
          kept: how many those are, where the caller knows: one number for many lanes keeps their loops in step.
          watch: sees every minibatch before its step.
        """
        c, n = self.config, weights.shape[0]
        everything = c.filter == "none" and self.collector.all_valid
        if not everything:
            keep = weights > 0 if keep is None else keep
            kept = jnp.sum(keep, dtype=jnp.int32) if kept is None else kept
        else:
            keep, kept = None, n
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
        data = (records, weights if FILTERS[c.filter].weighted else None)
        if c.normalize_advantage == "buffer":
            data = (records.replace(advantage=standardize(records.advantage, weights > 0)), data[1])

        def step(j: Array, carry: Any) -> Any:
            flat, opt_state, norms, watched = carry
            epoch, position = j // per_epoch, (j % per_epoch) * c.minibatch_size
            if matched:  # go on through the kept records a second time
                rows = order[epoch, (position + jnp.arange(c.minibatch_size)) % kept]
            else:
                rows = jax.lax.dynamic_slice(order, (epoch, position), (1, c.minibatch_size))[0]
            batch, weight = jax.tree.map(lambda x: x[rows], data)
            if c.normalize_advantage == "minibatch":
                batch = batch.replace(advantage=standardize(batch.advantage))
            if watch is not None:
                watched = watch.see(watched, unflatten(flat), rows, batch, weight, position == 0)
            grads = trees.flatten(jax.grad(self._loss)(unflatten(flat), batch, weight, settings))
            change, opt_state = optimizer.update(grads, opt_state)
            return flat + change, opt_state, norms + jnp.linalg.norm(grads), watched

        watched = None if watch is None else watch.init(state.params, n)
        first = trees.flatten(state.params)
        start = (first, state.opt_state, jnp.zeros((), first.dtype), watched)
        flat, opt_state, norms, watched = jax.lax.fori_loop(0, steps, step, start)
        training = Training(
            leftover=jnp.asarray(kept - jnp.minimum(kept, per_epoch * c.minibatch_size), jnp.int32),
            steps=jnp.asarray(steps, jnp.int32),
            grad_norm=norms / jnp.maximum(steps, 1),
            watched=watched,
        )
        return unflatten(flat), opt_state, training

    def gain(self, settings: Settings) -> Callable[[Params, Records, Array], Array]:
        """(params, record, weight) -> what a step on ONE record climbs: its clipped objective and entropy bonus."""

        def objective(params: Params, record: Records, weight: Array) -> Array:
            terms = self._record_terms(params, record, record.advantage, settings)
            return weight * (settings.ent_coef * terms.entropy - terms.policy_loss)

        return objective

    def _loss(self, params: Params, batch: Records, weights: Array | None, settings: Settings) -> Array:
        """PPO's loss over one minibatch: the mean of the records' losses."""
        terms = jax.vmap(lambda r: self._record_terms(params, r, r.advantage, settings))(batch)
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

    def terms(self, params: Params, records: Records, settings: Settings) -> Terms:
        """The loss's parts over all valid records of a round, averaged; advantages standardised over the buffer."""
        advantage = standardize(records.advantage, records.valid)
        terms = jax.vmap(lambda r, a: self._record_terms(params, r, a, settings))(records, advantage)
        return jax.tree.map(lambda x: jnp.mean(x, where=records.valid), terms)

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

    return jax.tree.map(leaf, rollout.replace(env_state=None))
