"""Runs training: chunks of updates, evaluations, checkpoints, files, resume. All clocks and I/O are out here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxattr.config import Config, ConfigError, diff
from jaxattr.envs.base import pure
from jaxattr.envs.registry import make
from jaxattr.evaluate import DETERMINISTIC, STOCHASTIC
from jaxattr.host import checkpoint
from jaxattr.host.history import History
from jaxattr.host.outputs import RunFolder, metric_rows
from jaxattr.host.progress import Progress, rounds_per_call
from jaxattr.host.rounds import check_rounds, on_host, save_round, size_of
from jaxattr.host.run import ChunkInfo, Run, Stopped, closing_lines, draw_run
from jaxattr.lanes import lane_devices, place_lanes
from jaxattr.presets import preset as named_preset
from jaxattr.studies.replay import Round, RoundData, round_data
from jaxattr.train import compile_chunk, compile_test, init_state, lane_settings, make_update_step
from jaxattr.types import TrainState
from jaxattr.version import __version__

CHUNK = 256
"""Most rounds per call of the compiled chunk (rows of its metrics buffer)."""


def train(
    env_id: str,
    config: Config | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    preset: str = "tuned",
    out: str | os.PathLike | None = None,
    resume: bool = False,
    init_from: str | os.PathLike | None = None,
    sweep: Mapping[str, Sequence[float]] | None = None,
    network: nn.Module | None = None,
    record_rounds: Sequence[int] = (),
    callback: Callable[[ChunkInfo], bool | None] | None = None,
    quiet: bool = True,
    wandb: bool = False,
) -> Run:
    """Train PPO (with influence filtering, if the config says so) with all seeds in one compiled program.

    Args:
      env_id: see `jaxattr envs`.
      config: settings; None = the preset for this environment.
      seeds: how many (0, 1, ...), or their values.
      preset: used when `config` is None.
      out: folder for files and checkpoints; None = keep everything in memory.
      resume: continue the run in `out` from its last good checkpoint.
      init_from: folder of another run whose weights, optimiser and normaliser to start from.
      sweep: traced setting -> values; every combination with every seed is a lane, all in the same program.
      network: the user's flax module instead of the config's network.
      record_rounds: 1-based rounds to keep whole, for `Run.round` and the studies (the last one's records always are).
      callback: called after every chunk of updates; return True to stop early.
      quiet: no progress on stderr.
      wandb: log to Weights & Biases too.

    Raises:
      ConfigError: anything that can be known before compiling; one line.
      Stopped: every seed met a non-finite value.
    """
    session = Session(
        env_id,
        named_preset(preset, env_id) if config is None else config,
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(int(s) for s in seeds),
        out=None if out is None else Path(out),
        resume=resume,
        init_from=None if init_from is None else Path(init_from),
        sweep=sweep,
        network=network,
        wandb=wandb,
        record_rounds=record_rounds,
    )
    return session.run(callback=callback, quiet=quiet)


class Session:
    """One call of `train`: checks everything, then runs it."""

    def __init__(
        self,
        env_id: str,
        config: Config,
        *,
        seeds: tuple[int, ...],
        out: Path | None = None,
        resume: bool = False,
        init_from: Path | None = None,
        sweep: Mapping[str, Sequence[float]] | None = None,
        network: nn.Module | None = None,
        wandb: bool = False,
        record_rounds: Sequence[int] = (),
    ):
        if not seeds:
            raise ConfigError("seeds: at least one is needed")
        if any(s < 0 or s >= 2**31 for s in seeds):
            raise ConfigError(f"seeds {seeds}: each must be from 0 to 2**31 - 1")
        if sweep:
            seeds, sweep = _grid(seeds, sweep)
        elif len(set(seeds)) < len(seeds):
            raise ConfigError(f"seeds {seeds}: each may occur once")
        self.env_id, self.config, self.seeds, self.sweep = env_id, config, seeds, dict(sweep or {})
        self.env = make(env_id, config.env_args)
        check_rounds(record_rounds, config.total_updates)
        self.record_rounds = tuple(record_rounds)
        self.step = make_update_step(self.env, config, network, keep_states=bool(record_rounds))
        self.settings = lane_settings(config, len(seeds), self.sweep)
        self.folder = None if out is None else RunFolder(out, wandb)
        self.resume, self.init_from = resume, init_from
        self.description = {
            "env": env_id,
            "seeds": list(seeds),
            "sweep": {k: [float(x) for x in v] for k, v in self.sweep.items()},
            "network_module": None if network is None else type(network).__name__,
            "config": config.to_dict(),
        }
        if resume and self.folder is None:
            raise ConfigError("resume needs --out, the folder of the run")
        if self.folder is not None and not resume:
            RunFolder.refuse_foreign(self.folder.path)
        if resume:
            self._check_same_run()
        if init_from is not None and not (init_from / "config.json").exists():
            raise ConfigError(f"--init-from {init_from}: holds no run")
        if wandb and self.folder is None:
            raise ConfigError("--wandb needs --out")

    @property
    def exact_resume(self) -> bool:
        """Whether an interrupted run goes on exactly where it stopped (not if the environment keeps its own state)."""
        return self.step.collector.pure

    def _attempt(self) -> int:
        """A number that differs between a run and its continuation, for environments that start anew."""
        if not self.resume or self.exact_resume or self.folder is None:
            return 0
        return max((int(p.name) for p in self.folder.checkpoints.glob("[0-9]*") if p.name.isdigit()), default=0)

    def _check_same_run(self) -> None:
        assert self.folder is not None
        try:
            saved = json.loads((self.folder.path / "config.json").read_text())
        except FileNotFoundError:
            raise ConfigError(f"--resume {self.folder.path}: holds no run") from None
        old, new = ({**d.pop("config"), **d} for d in (dict(saved), dict(self.description)))
        longer = new["total_steps"] >= old["total_steps"]
        # How often to save or evaluate does not change training, and more steps only prolong it.
        free = {"checkpoint_every", "eval_every", "eval_episodes", "version"} | ({"total_steps"} if longer else set())
        changed = [line for line in diff(old, new) if line.split(":")[0] not in free]
        if changed:
            raise ConfigError(
                f"--resume {self.folder.path}: the run was made with other settings ({'; '.join(changed)}); "
                "keep them, or start a new run with --init-from"
            )

    # -- running ----------------------------------------------------------------------------------------------
    def run(
        self,
        *,
        callback: Callable[[ChunkInfo], bool | None] | None = None,
        quiet: bool = True,
    ) -> Run:
        """Train to the end, or as far as it goes."""
        clock = time.perf_counter()
        lanes, total = len(self.seeds), self.config.total_updates
        title = f"{self.env_id} {self.config.filter}"
        with Progress(title, total, quiet) as progress:
            for line in self.header():
                progress.say(line)
            fresh = init_state(self.step, self.seeds, attempt=self._attempt())
            if self.record_rounds:
                size = size_of(self.step, fresh, self.settings) / 2**20
                where = "in memory" if self.folder is None else f"in {self.folder.path / 'rounds'}"
                progress.say(f"recording {len(self.record_rounds)} whole rounds {where}, {size:.3g} MiB each")
            state, done, history = self._start_state(fresh, progress)
            if self.folder is not None and not self.resume:
                self.folder.write_json("config.json", {**self.description, "version": __version__})
            if self.folder is not None:
                self.folder.start_wandb(self.description)
            state, settings = place_lanes(state, lanes), place_lanes(self.settings, lanes)

            begin = time.perf_counter()
            length = min(CHUNK, total)
            chunk = compile_chunk(self.step, state, settings, length)
            eval_key = jax.random.key(self.config.eval_seed)
            test = last_test = compile_test(self.step, self.env, state, eval_key, self.config.eval_episodes)
            last = self.config.final_eval_episodes
            if last not in (None, self.config.eval_episodes):
                last_test = compile_test(self.step, self.env, state, eval_key, last)
            compile_s = time.perf_counter() - begin
            progress.say(f"compiled in {compile_s:.1f} s; training {total - done} rounds")

            run = Run(self.env_id, self.config, self.seeds, self.env, self.step, state)
            run._replay = lambda r: _replay(chunk, place_lanes(fresh, lanes), settings, r, length)
            if self.resume or self.init_from is not None or not self.exact_resume:
                run._replay = None
            spent = {"train": 0.0, "eval": 0.0, "write": 0.0}
            wanted = {r for r in self.record_rounds if r > done}
            stops = sorted(wanted | {total})
            pace = 0.0  # seconds per round, once known
            resumed_at = done
            progress.begin(done)
            while done < total and bool(np.any(np.asarray(state.alive))):
                count = min(length, self._until_event(done, stops), rounds_per_call(pace))
                before, begin = state, time.perf_counter()
                state, metrics, judged = chunk(state, settings, jnp.int32(count))
                metrics = jax.tree.map(lambda x, n=count: np.asarray(x)[:n], metrics)
                spent["train"] += (took := time.perf_counter() - begin)
                pace, done, run.state = took / count, done + count, state
                history.add(metrics, took)
                for line in history.new_stops(self.seeds, self.config):
                    progress.say(line)
                if done in stops:
                    run._judged[done] = judged = on_host(judged)
                if done in wanted:
                    self._record(run, done, on_host(round_data(settings, before, state, judged)))
                if done == total or (self.config.eval_every and done % self.config.eval_every == 0):
                    begin = time.perf_counter()
                    play = last_test if done == total else test
                    result = jax.tree.map(np.asarray, play(state.params, state.obs_stats, eval_key))
                    spent["eval"] += time.perf_counter() - begin
                    run.evaluations[done] = result.episode_return
                    history.add_evaluation(done, result)
                begin = time.perf_counter()
                run.metrics, run.seconds = history.arrays(), np.array(history.seconds)
                if self.folder is not None and (done % self._checkpoint_every() == 0 or done == total):
                    self._write(run, history, done)
                spent["write"] += time.perf_counter() - begin
                progress.update(done, history.note(pace, lanes * self.config.records_per_round))
                if callback is not None and callback(
                    ChunkInfo(done, total, {k: v[-count:] for k, v in run.metrics.items()}, run)
                ):
                    break
            run.metrics, run.seconds = history.arrays(), np.array(history.seconds)
            if self.folder is not None and history.written < done:
                self._write(run, history, done)
            run.summary = self._summary(run, done, resumed_at, spent, compile_s, time.perf_counter() - clock)
            run.summary["nonfinite"] = history.stop_lines  # which seed, update, field and record
            if self.folder is not None:
                self._finish(run, stops)
            for line in closing_lines(run):
                progress.say(line)
        if not np.any(np.asarray(state.alive)):
            raise Stopped(f"every seed stopped: {history.stop_lines[-1]}", run)
        return run

    def header(self) -> list[str]:
        """What is about to run, in a few lines."""
        c = self.config
        device = jax.devices()[0]
        spread = len(lane_devices(len(self.seeds)))
        precision = jax.config.jax_default_matmul_precision or "default"  # pyright: ignore
        notes = [f"reset {c.reset}", *self.env.spec.notes]
        what = c.filter + (f" p={c.p:g} ({c.training})" if c.filter not in ("none",) else "")
        return [
            f"{self.env_id}: {', '.join(notes)}",
            f"{len(self.seeds)} lanes on {spread} x {device.device_kind} ({device.platform}), "
            f"matmul precision {precision}, jax {jax.__version__}, jaxattr {__version__}",
            f"{c.total_updates} rounds of {c.num_envs} x {c.num_steps} = {c.records_per_round} records, "
            f"{c.num_epochs} epochs of minibatches of {c.minibatch_size}, {c.optimizer} {c.learning_rate:g} "
            f"{c.lr_schedule}; filter {what}",
        ]

    def _start_state(self, fresh: TrainState, progress: Progress) -> tuple[TrainState, int, History]:
        history = History(len(self.seeds))
        if self.resume:
            assert self.folder is not None
            try:
                state, meta, warnings = checkpoint.load_latest(self.folder.checkpoints, fresh)
            except checkpoint.CheckpointError as error:
                if list(self.folder.checkpoints.glob("[0-9]*")):
                    raise ConfigError(str(error)) from None
                state, meta, warnings = fresh, {"update": 0}, [f"{error}: starting from round 0"]
            for line in warnings:
                progress.say(line)
            done = int(meta["update"])
            if not self.exact_resume:
                anew = jnp.zeros_like(fresh.discounted_return)
                state = state.replace(env_state=fresh.env_state, discounted_return=anew)
                progress.say(f"{self.env_id} keeps its state outside JAX: all episodes start anew, so this run will "
                             "differ from one that was never interrupted")  # fmt: skip
            history.load(self.folder.trim_metrics(done), self.folder.read_timing(done), done)
            progress.say(f"resuming after round {done}")
            return state, done, history
        if self.init_from is not None:
            fresh = _borrow(self.init_from, fresh, self.seeds)
            progress.say(f"starting from the weights, optimiser and normaliser of {self.init_from}")
        return fresh, 0, history

    def _checkpoint_every(self) -> int:
        return self.config.checkpoint_every or max(1, -(-self.config.total_updates // 10))

    def _until_event(self, done: int, stops: Sequence[int]) -> int:
        """Rounds until something must happen between two rounds."""
        alone = {r - 1 for r in self.record_rounds}  # a recorded round is a call of its own: its start is kept, too
        ahead = [s - done for s in (*stops, *alone) if s > done]
        if self.config.eval_every:
            ahead.append(self.config.eval_every - done % self.config.eval_every)
        if self.folder is not None:
            every = self._checkpoint_every()
            ahead.append(every - done % every)
        return min(ahead)

    def _record(self, run: Run, number: int, data: RoundData) -> None:
        """Keep a whole round: in the run's folder, or in memory where there is none."""
        if self.folder is not None:
            run.rounds[number] = save_round(self.folder.path, number, data, self.description)
        else:
            whole = jax.tree.map(jnp.asarray, data)
            env = pure(self.env, "be recorded")
            run.rounds[number] = Round(self.env_id, self.config, self.seeds, number, env, self.step, whole)

    def _write(self, run: Run, history: History, done: int) -> None:
        """Metrics first, then the checkpoint that makes them count."""
        assert self.folder is not None
        rows = metric_rows(run.metrics, self.seeds, history.written + 1, done, self.config.records_per_round)
        self.folder.append_metrics(rows)
        self.folder.write_timing(history.seconds)
        history.written = done
        checkpoint.save(self.folder.checkpoints, done, run.state, {"env": self.env_id, "version": __version__})

    def _summary(self, run, done, resumed_at, spent, compile_s, wall) -> dict[str, Any]:
        steps = (done - resumed_at) * self.config.records_per_round * len(self.seeds)
        final = run.evaluations.get(done)
        params = [
            checkpoint.digest(jax.tree.map(lambda x, i=i: np.asarray(x)[i], run.state.params))
            for i in range(len(self.seeds))
        ]
        return {
            "env": self.env_id,
            "seeds": list(self.seeds),
            "updates": done,
            "env_steps": done * self.config.records_per_round * len(self.seeds),
            "env_steps_this_session": steps,
            "wall_s": round(wall, 3),
            "compile_s": round(compile_s, 3),
            "train_s": round(spent["train"], 3),
            "eval_s": round(spent["eval"], 3),
            "write_s": round(spent["write"], 3),
            "env_steps_per_s": round(steps / spent["train"], 1) if spent["train"] else None,
            "final_test_return": _final(final, STOCHASTIC),
            "final_test_return_deterministic": _final(final, DETERMINISTIC),
            "eval_episodes": self.config.eval_episodes if final is None else final.shape[-1],
            "stopped_seeds": [s for s, a in zip(self.seeds, np.asarray(run.state.alive), strict=True) if not a],
            "params_sha256": params,
            "matmul_precision": jax.config.jax_default_matmul_precision or "default",  # pyright: ignore
            "device": f"{jax.devices()[0].device_kind} ({jax.devices()[0].platform}) x "
            f"{len(lane_devices(len(self.seeds)))}",
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "versions": versions(),
        }

    def _finish(self, run: Run, stops: Sequence[int]) -> None:
        assert self.folder is not None
        self.folder.write_json("summary.json", run.summary)
        if self.config.needs_scores:
            # A seed that has stopped, or discarded the round, learned from no records in it.
            unusable = run.metrics["stopped"] | (run.metrics["nonfinite"] != 0)
            rows = [
                row
                for r in stops
                if r in run._judged
                for i in range(len(self.seeds))
                if not unusable[r - 1, i]
                for row in run.records(r, index=i)
            ]
            if rows:
                self.folder.write_table("records.csv", rows)
        draw_run(self.folder.path, run)
        self.folder.close()


def _final(returns: np.ndarray | None, kind: int) -> list[float] | None:
    """Mean test return of every lane (S,), rounded; None where this kind of episode was not played."""
    if returns is None or np.isnan(returns[:, kind]).all():
        return None
    return np.round(returns[:, kind].mean(1), 4).tolist()


def versions() -> dict[str, str]:
    """Of Python and the packages whose numbers may differ."""
    names = ("jaxattr", "jax", "jaxlib", "flax", "optax", "gymnax", "brax", "envpool", "gymnasium", "numpy")
    out = {"python": platform.python_version()}
    for name in names:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = __version__ if name == "jaxattr" else "missing"
    return out


def _grid(
    seeds: tuple[int, ...], sweep: Mapping[str, Sequence[float]]
) -> tuple[tuple[int, ...], dict[str, list[float]]]:
    """Every combination of swept values with every seed, seeds fastest."""
    import itertools

    points = list(itertools.product(*sweep.values()))
    lanes = [(point, seed) for point in points for seed in seeds]
    return tuple(s for _, s in lanes), {n: [p[i] for p, _ in lanes] for i, n in enumerate(sweep)}


def _replay(chunk: Any, state: TrainState, settings: Any, round: int, length: int) -> Any:
    done = 0
    while done < round:
        count = min(length, round - done)
        state, _, judged = chunk(state, settings, jnp.int32(count))
        done += count
    return on_host(judged)


def _borrow(path: Path, fresh: TrainState, seeds: Sequence[int]) -> TrainState:
    """Weights, optimiser and normaliser of another run; everything else from `fresh`."""
    saved = json.loads((path / "config.json").read_text())
    config = Config.from_dict(saved["config"])
    other_step = make_update_step(make(saved["env"], config.env_args), config)
    other = init_state(other_step, saved["seeds"])
    state, _, _ = checkpoint.load_latest(path / "checkpoints", other)
    if len(saved["seeds"]) not in (1, len(seeds)):
        raise ConfigError(
            f"--init-from {path}: has {len(saved['seeds'])} seeds, this run {len(seeds)}; use 1 or as many"
        )
    parts = ("params", "opt_state", "obs_stats", "reward_stats")
    taken = {}
    for name in parts:
        ours, theirs = getattr(fresh, name), getattr(state, name)
        shapes = [[x.shape[1:] for x in jax.tree.leaves(t)] for t in (ours, theirs)]
        if shapes[0] != shapes[1] or jax.tree.structure(ours) != jax.tree.structure(theirs):
            raise ConfigError(f"--init-from {path}: its {name} does not fit this run's network or optimiser")
        taken[name] = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), theirs, ours)
    return fresh.replace(**taken)
