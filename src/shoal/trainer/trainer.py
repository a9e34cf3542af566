"""The Trainer: every argument checked, then the training loop on every worker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shoal.checkpoint.lineage import Lineage, model_digest
from shoal.checkpoint.marks import Marks
from shoal.checkpoint.rundir import (
    RunDir,
    default_name,
    find_checkpoint,
    new_run_id,
    newest_checkpoint,
    read_about,
    runs_root,
)
from shoal.cluster.channel.channel import INTERRUPTED, PREEMPTED, STOPPED, StopSignals
from shoal.cluster.elasticity import Elasticity, EverythingLost
from shoal.cluster.supervisor.watch import Identity, Unwatched, Watch, resume_command
from shoal.core import settings, spec
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError, Interrupted, Preempted, ShoalError, WorkerError
from shoal.core.events import Callback, WorkerSeen
from shoal.core.ordering import items_in_words
from shoal.core.settings import DEFAULT
from shoal.core.traces import trimmed
from shoal.data.fetch import check_data
from shoal.engines.here import is_main_process
from shoal.engines.places import read_lab
from shoal.engines.program import origin
from shoal.layouts.asked import check_buffers
from shoal.layouts.restore import restore
from shoal.metrics.metrics import Metric, make_metrics, needs_loss
from shoal.monitor.wording import counted
from shoal.store.history import History
from shoal.store.home import store_url
from shoal.syncs.applying import Average, averaged
from shoal.syncs.recipe import AfterStep, LossFn, PredictFn, Recipe
from shoal.trainer.arguments import (
    as_path,
    check_builder,
    check_callbacks,
    check_faults,
    check_flag,
    check_functions,
    check_loss,
    check_model,
    check_name,
    check_number,
    check_optimizer,
    check_schedule,
    check_whole,
)
from shoal.trainer.configure import Configured, configured, show_config
from shoal.trainer.evaluate import Evaluator, Part, done_by_all, join, part_of, predict_part
from shoal.trainer.fit import train
from shoal.trainer.landing import Landing
from shoal.trainer.result import Result
from shoal.trainer.session import Session
from shoal.trainer.stale import stale_callbacks
from shoal.trainer.workers.run import run
from shoal.trainer.workers.start import Start, check_workers, default_workers, import_for_training, is_launched, is_spmd

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded


DEFAULT_RESTARTS = 3
"""How often a run whose members may change starts again after it has lost all of them."""


class Trainer(Configured):
    """Trains any `nn.Module` on N workers, exactly as one process would.

    model: an nn.Module, or a function without arguments that builds one.
    loss: fn(model, batch) -> scalar mean over the batch's samples; or (sum, weight), for example summed token losses
        and the number of tokens; or {"loss": either of these, "name": number, ...} to log more.
    optimizer: fn(params) -> torch optimizer, where params is a list of (name, parameter).
    schedule: fn(optimizer, total_steps) -> learning-rate scheduler, stepped once per step. ReduceLROnPlateau is stepped
        on the loss of each evaluation, or of each step without eval_data.
    data, eval_data: map-style data sets. collate: list of items -> batch; None is torch's default.
    data_workers: loader processes per worker; None decides by measuring the first steps.
    predict: fn(model, batch) -> (prediction, target). metrics: names, or objects as in `shoal.Metric`.
    batch_size: samples per step over all workers. epochs: passes over the data (1); steps: exactly so many instead.
    workers: None is one per core. One that dies is replaced while the others go on (docs/elastic.md); with
        replace=False its death ends the run. min_workers: with fewer the run waits (1). max_workers: how many there may
        be when it is scaled (workers). restarts: how often it may start again from its last checkpoint if all workers
        are lost (3). faults: a `shoal.testing.FaultPlan`.
    sync: how workers agree: "allreduce", or "server", where server processes hold the parameters and apply the
        optimizer: "server:mode=bsp", "server:mode=ssp,staleness=4,servers=2", "server:mode=async" (docs/server.md).
    layout, precision, engine: this version has "single", "fp32", "local".
    codec: how gradients travel: "none", "fp16", "bf16", "int8", "powersgd:rank=4", "onebit", "topk:density=0.01", or
        "auto", which finds out what is fastest here (docs/codecs.md).
    collective: how workers sum: "shm" (shared memory), "hierarchical" (that inside hosts, a ring between them), "gloo"
        or "nccl"; "auto" chooses by where the workers are.
    clip: largest norm of the gradient. micro_batch: most samples a worker computes at once. ema: decay of an average of
        the weights, with which evaluation is done. seed: of order, initial weights and everything random.
    after_step: fn(model), called once per step on every worker, after the optimizer: the place for a mean teacher,
        clamping, counters (docs/trainer.md).
    buffers: how buffers that a forward changes are merged, by name, where not as a mean: {"queue": "concat"}, "sum",
        "sum:modulo=64", "sum:decay=0.99", "first" or "mean" (docs/buffers.md).
    deterministic: weights are bitwise equal for any number of workers, at some cost in speed.
    strict: what the proof on the first batch finds wrong with the loss (docs/losses.md) is an error, not a notice.
    name: of the run; by default that of the script. run_dir: its folder; by default a new one in ~/.shoal/runs.
    resume: "last", a run's id, or a path: fit() goes on from there, and evaluate() and predict() have its weights until
        then. checkpoint_every: steps; by default every five minutes. There is always a
        checkpoint at the end, and at the best evaluation. keep: how many of the last ones stay.
    eval_every: steps; by default once per epoch.
    callbacks: functions of an event (`shoal.core.events`); one that returns `shoal.Stop()` ends the run.
    """

    @configured
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: LossFn,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        data: Any,
        *,
        schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        eval_data: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        data_workers: int | None = None,
        predict: PredictFn | None = None,
        metrics: Sequence[str | Metric] = (),
        batch_size: int = 32,
        epochs: int | None = None,
        steps: int | None = None,
        workers: int | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        replace: bool = True,
        layout: str | spec.Single = "single",
        sync: str | spec.AllReduce | spec.Server = "allreduce",
        codec: str | spec.AnyCodec = "none",
        precision: str | spec.Fp32 = "fp32",
        collective: str = "auto",
        clip: float | None = None,
        micro_batch: int | None = None,
        ema: float | None = None,
        after_step: AfterStep | None = None,
        buffers: Mapping[str, str] | None = None,
        seed: int = 0,
        deterministic: bool = False,
        strict: bool = False,
        name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        eval_every: int | None = None,
        engine: str | spec.Local = "local",
        restarts: int | None = None,
        faults: Any | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        for kind, given in (("layout", layout), ("precision", precision)):
            spec.parse(kind, given)
        self.sync: spec.AllReduce | spec.Server = spec.parse("sync", sync)
        self.codec: spec.AnyCodec = spec.parse("codec", codec)
        if deterministic and self.codec != spec.NoCodec():
            raise ConfigError(
                f"codec={codec!r}: deterministic=True sums gradients as they are, so that weights do not depend on the "
                "number of workers; use codec='none', or deterministic=False"
            )
        self.collective = spec.check_collective(collective)
        self.engine: spec.Local = spec.parse("engine", engine)
        self.workers = default_workers(self.engine) if workers is None else check_workers(workers)
        check_flag("replace", replace)
        self.elasticity = _elasticity(self.workers, min_workers, max_workers, restarts, faults, self.engine, replace)
        if isinstance(self.sync, spec.Server):
            _refuse_with_servers(deterministic=bool(deterministic), ema=ema, after_step=after_step, engine=self.engine)
        check_model(model)
        check_optimizer(optimizer)
        check_loss(loss)
        check_schedule(schedule)
        check_functions(optional=True, collate=collate, predict=predict, after_step=after_step)
        size = check_data(data, "data", collate)
        if eval_data is not None:
            check_data(eval_data, "eval_data", collate)
        check_whole(1, batch_size=batch_size, keep=keep)
        check_whole(1, optional=True, epochs=epochs, steps=steps, micro_batch=micro_batch)
        check_whole(1, optional=True, checkpoint_every=checkpoint_every, eval_every=eval_every)
        check_whole(0, optional=True, data_workers=data_workers)
        check_whole(None, seed=seed)
        check_number("clip", clip, "a number above 0", lambda value: 0 < value < float("inf"))
        check_number("ema", ema, "a decay between 0 and 1", lambda value: 0 < value < 1)
        metrics = metrics if not isinstance(metrics, (list, tuple)) else tuple(metrics)
        _check_metrics(metrics, predict)
        check_callbacks(callbacks)
        if resume is not None:
            as_path("resume", resume)

        course = Course(size, batch_size)
        self.model = self._build(model, seed)
        check_buffers(self.model, buffers, self.sync)
        self.seed = seed
        self.deterministic = bool(deterministic)
        self.strict = check_flag("strict", strict)
        self.name = check_name(default_name() if name is None else str(name))
        self.run_dir = None if run_dir is None else as_path("run_dir", run_dir).absolute()
        self.resume = resume
        self.checkpoint_every = checkpoint_every
        self.keep = keep
        self.callbacks = tuple(callbacks)
        self._identity: Identity | None = None
        self._resume_read = False
        """Whether the model has the weights that it is evaluated with: resume= was looked for, or fit() has ended."""
        self.settle(workers=self.workers, name=self.name)
        if steps is None:
            self.settle(epochs=1 if epochs is None else epochs)
        self.average: dict[str, Tensor] | None = None
        """With ema=, after fit() or once resume= has been read: the average of the weights, by name."""
        self.recipe = Recipe(
            loss=loss,
            optimizer=optimizer,
            schedule=schedule,
            data=data,
            eval_data=eval_data,
            collate=collate,
            data_workers=data_workers,
            predict=predict,
            metrics=tuple(metrics),
            batch_size=batch_size,
            exact_steps=steps,
            total_steps=steps if steps is not None else (1 if epochs is None else epochs) * course.steps_per_epoch,
            steps_per_epoch=course.steps_per_epoch,
            clip=clip,
            micro_batch=micro_batch,
            ema=ema,
            eval_every=eval_every,
            after_step=after_step,
            buffers=None if buffers is None else dict(buffers),
            most_workers=self.elasticity.most,
        )

    @staticmethod
    def _build(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
        if not isinstance(model, nn.Module):
            check_builder(model)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model= built {type(model).__name__}; it must be a torch.nn.Module, or a function that returns one"
            )
        if any(
            isinstance(tensor, UninitializedBuffer | UninitializedParameter)
            for tensor in [*model.parameters(), *model.buffers()]
        ):
            raise ConfigError("model= has lazy parameters that have no shape yet; run one batch through it first")
        if not any(True for _ in model.parameters()):
            raise ConfigError(f"model= {type(model).__name__} has no parameters; there is nothing to train")
        if not any(param.requires_grad for param in model.parameters()):
            raise ConfigError("model= has no parameter that requires a gradient; set requires_grad=True on some")
        return model

    # -- fit -----------------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train, and return what came of it. Afterwards the model holds the trained weights.

        SIGTERM and Ctrl-C end the run after the step in progress with a checkpoint: `shoal.Preempted` (exit code 75)
        and `shoal.Interrupted` (130) leave the script. A second Ctrl-C ends it at once.
        """
        show_config(self.config, "Trainer")
        try:
            with StopSignals() as signals:
                result = self._fit(signals)
        except ShoalError as error:
            # Shoal's own frames are not where to look; the worker's traceback is in the error
            raise error.with_traceback(None) from None
        except KeyboardInterrupt as error:
            if signals.asked is None:  # raised by a callback
                raise
            raise self._ended_at_once(getattr(error, "__notes__", ())) from None
        except Exception as error:
            raise error.with_traceback(trimmed(error.__traceback__))  # noqa: B904
        # after the handlers are gone: a signal that came too late to end the run still ends the script
        reason = signals.asked or result.stopped
        if reason in (PREEMPTED, INTERRUPTED):
            raise self._stopped_by_signal(reason, result)
        return result

    def _fit(self, signals: StopSignals) -> Result:
        begun = time.monotonic()
        history, before = History(), self._resume_read
        watch = Watch((*self.callbacks, history), signals)
        marks = Marks(self.recipe.data)
        try:
            loaded, folder = self._find_resumed(watch, "starting from the beginning", marks)
            doubts = self._check_resumed(loaded, watch, marks)
            with _Folder(self, loaded, folder, watch, marks) as place, watch.running(place.identity()):
                if place.continued:
                    history.goes_on(place.run_id, settings.current().store or store_url())
                start = Start(
                    seed=self.seed,
                    deterministic=self.deterministic,
                    strict=self.strict,
                    collective=self.collective,
                    codec=self.codec,
                    run_id=place.run_id,
                    run_dir=place.path,
                    checkpoint_every=self.checkpoint_every,
                    keep=self.keep,
                    meta=place.meta(),
                    loaded=loaded,
                    made_before=not is_spmd(self.engine),
                )
                self._resume_read = True  # a callback that evaluates must not change the model meanwhile
                values = self._train(start, watch, signals, doubts)
                for value in values:
                    watch.saw(msgspec.convert(value["seen"], WorkerSeen))
                return self._finish(values, watch, time.monotonic() - begun, history)
        except BaseException:
            self._resume_read = before
            raise
        finally:
            marks.close()
            watch.close()

    def _find_resumed(
        self, watch: Watch, otherwise: str, marks: Marks | None = None
    ) -> tuple[Loaded | None, Path | None]:
        """With `marks`, those of the data, "last" is no run on other data: one that is to be trained on."""
        if self.resume is None:
            return None, None
        lineage = self._lineage()
        if marks is not None and str(self.resume) == "last":
            lineage = replace(lineage, data=marks.steady)
        return find_checkpoint(
            self.resume,
            run_dir=self.run_dir,
            name=self.name,
            warn=watch.warn,
            progress=watch.read_checkpoint,
            lineage=lineage,
            otherwise=otherwise,
        )

    def _lineage(self) -> Lineage:
        """What tells the runs of this Trainer from others."""
        return Lineage(
            script=str(origin()),
            model=model_digest(self.model.state_dict()),
            samples=check_data(self.recipe.data, "data"),
            batch_size=self.recipe.batch_size,
            seed=self.seed,
        )

    def _check_resumed(self, loaded: Loaded | None, watch: Watch, marks: Marks) -> list[str]:
        """What is to be said of the checkpoint in notices. Raises ConfigError if this run cannot go on from it."""
        if loaded is None:
            return []
        if loaded.trees["session"]["size"] != check_data(self.recipe.data, "data"):
            return []  # it is refused where it is restored, and there is no better reason
        index = marks.other_than(loaded.meta.get("data"))
        other = f"other data (data[{index}] was another item there)"
        if loaded.step > self.recipe.total_steps and index is not None:
            raise ConfigError(
                f"resume: the checkpoint {loaded.path} is of a run on {other}, and at step {loaded.step}, beyond the "
                f"{self.recipe.total_steps} steps of this run; give resume= a run on this data, or leave it out"
            )
        if loaded.step > self.recipe.total_steps:
            raise ConfigError(
                f"resume: the checkpoint {loaded.path} is at step {loaded.step}, and this run has only "
                f"{self.recipe.total_steps} steps; give it the epochs= or steps= that it had, or more"
            )
        self._tell_unused(loaded, watch, schedule=self.recipe.schedule, ema=self.recipe.ema)
        return [] if index is None else [f"{loaded.path} was trained on {other}; the run goes on with this data"]

    def _tell_unused(self, loaded: Loaded, watch: Watch, **given: Any) -> None:
        for argument, value in given.items():
            tree = "average" if argument == "ema" else argument
            if tree in loaded.trees and value is None:
                watch.warn(
                    f"{loaded.path} holds the state of {argument}=, which this run is not given; it goes on without"
                )

    def _train(self, start: Start, watch: Watch, signals: StopSignals, doubts: Sequence[str]) -> list[dict[str, Any]]:
        recipe, model = self._doubted(doubts), self.model
        watch.prepare(f"starting {self.workers} workers" if self.workers > 1 else "starting 1 worker")
        import_for_training()
        if isinstance(self.sync, spec.Server):
            return self._train_with_servers(self.sync, recipe, start, watch, signals)
        state = state_of(model)
        kept: dict[str, Tensor] = {}
        if recipe.ema is not None:
            kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.is_floating_point()}
        landing, landed = None, None
        if not is_launched():
            landing, landed = Landing(state, self._file("model")), Landing(kept, self._file("average"))
            if is_spmd(self.engine) and is_main_process():
                landing.put(state)

        def body(session: Session) -> dict[str, Any]:
            if is_spmd(self.engine) and landing is not None:
                landing.take(state, landing.fitting(state))  # the weights of the process that the user started
            figures, average = train(session, model, recipe)
            averages = average.state_dict() if average is not None else {}
            trained = state_of(model)

            def last() -> None:
                session.finish_saving()
                if landing is not None and landed is not None and session.rank == 0:
                    landing.put(trained)
                    landed.put(averages)

            session.farewell(last)
            if landing is not None:
                figures["landed"] = landing.fitting(trained)
            else:
                for name, value in averages.items():
                    kept[name].copy_(value)
            figures["seen"] = msgspec.to_builtins(session.seen())
            figures["run"] = [start.run_id, str(start.run_dir)]
            return figures

        def attempt(start: Start, elasticity: Elasticity) -> list[dict[str, Any]]:
            return run(
                body,
                start,
                workers=self.workers,
                engine=self.engine,
                watch=watch,
                signals=signals,
                elasticity=elasticity,
            )

        values = self._until_complete(attempt, start, watch)
        if landing is not None and landed is not None:
            landing.take(state_of(model), values[0]["landed"])
            landed.take(kept, kept)
        self.average = kept or None
        return values

    def _doubted(self, doubts: Sequence[str]) -> Recipe:
        """With these, and what is to be said of callbacks. Where a launcher has started the workers, they see what is
        trained.
        """
        if is_launched():
            return replace(self.recipe, doubts=tuple(doubts))
        stale = stale_callbacks(self.callbacks, self.model, servers=isinstance(self.sync, spec.Server))
        return replace(self.recipe, doubts=(*doubts, *stale))

    def _train_with_servers(
        self, sync: spec.Server, recipe: Recipe, start: Start, watch: Watch, signals: StopSignals
    ) -> list[dict[str, Any]]:
        # here, as elsewhere in this package: `from shoal import Trainer` must not take long
        from shoal.trainer.served.served import run_served
        from shoal.trainer.served.setup import Served

        hosts = read_lab(self.engine.lab) if self.engine.lab else ()

        def attempt(start: Start, elasticity: Elasticity) -> list[dict[str, Any]]:
            served = Served(self.model, recipe, sync, self.workers, elasticity)
            return run_served(served, start, watch, signals, hosts)

        return self._until_complete(attempt, start, watch)

    def _until_complete(
        self,
        attempt: Callable[[Start, Elasticity], list[dict[str, Any]]],
        start: Start,
        watch: Watch,
    ) -> list[dict[str, Any]]:
        """Run, and start again from the last checkpoint if its state is lost, as often as `restarts=` allows."""
        elasticity = self.elasticity
        left, reached = elasticity.restarts, -1
        while True:
            try:
                return attempt(start, elasticity)
            except EverythingLost as error:
                again = error.reached is not None and error.reached <= reached
                if again or not left:
                    for_good = error.for_good()
                    for_good.add_note(
                        "The run had come no further when it was lost before, so it is not started again"
                        if again
                        else "The run was started again as often as it may be (restarts=). resume='last' goes on from "
                        "its last checkpoint; with checkpoint_every= there are more of them"
                    )
                    raise for_good from None
                lost, reached = str(error), -1 if error.reached is None else error.reached
                elasticity = replace(elasticity, before=error.term)
            except WorkerError as error:
                self._name_samples(error)
                raise
            left -= 1
            found, _ = find_checkpoint("last", run_dir=start.run_dir, name=self.name, warn=watch.warn)
            loaded = found or start.loaded
            origin = "from the beginning" if loaded is None else f"from step {loaded.step} ({loaded.path})"
            said = f"{lost}; going on {origin}; {counted(left, 'restart')} left"
            watch.restarted(0 if loaded is None else loaded.step, said)
            start = replace(start, loaded=loaded)

    def _name_samples(self, error: WorkerError) -> None:
        """Two workers died of the same samples: which items of the data set these are."""
        if error.positions is None or error.step is None or error.worker is not None:
            return
        course = Course(check_data(self.recipe.data, "data", self.recipe.collate), self.recipe.batch_size)
        first, last = error.positions
        epoch = error.step // course.steps_per_epoch
        items = items_in_words(course, self.seed, epoch, range(first, last + 1), most=20)
        error.add_note(f"\n  these samples are {items}")

    def _finish(self, values: list[dict[str, Any]], watch: Watch, wall: float, history: History) -> Result:
        first, told = values[0], [value["seen"] for value in values]
        run_id, run_dir = first["run"]  # worker 0's: where the script runs once per worker, others have made up theirs
        course = Course(check_data(self.recipe.data, "data", self.recipe.collate), self.recipe.batch_size)
        return Result(
            run_id=run_id,
            run_dir=Path(run_dir),
            steps=first["steps"],
            epochs=first["steps"] // course.steps_per_epoch,
            loss=first["loss"],
            metrics=first["metrics"],
            samples=course.samples_before(first["steps"]),
            workers=len(values),
            wall_seconds=wall,
            bytes_sent=sum(flow["bytes"] for seen in told for flow in seen["traffic"]["flows"]),
            seconds={key: sum(seen["seconds"][key] for seen in told) / len(told) for key in told[0]["seconds"]},
            stopped=watch.stop.reason if watch.stop is not None and first["stopping"] == STOPPED else first["stopping"],
            history=history,
        )

    def _stopped_by_signal(self, reason: str, result: Result) -> Preempted | Interrupted:
        """What leaves the script. That prints no traceback, so the message is printed now."""
        resume = "last" if self.run_dir is not None else result.run_id
        signal = "SIGTERM" if reason == PREEMPTED else "Ctrl-C"
        if result.stopped is None:
            text = f"shoal: {signal} came when the run was complete, at step {result.steps}"
        else:
            how = f" resume={resume!r}"
            if settings.current().command and self._identity is not None:
                how = f": {resume_command(self._identity)}"
            text = (
                f"shoal: stopped by {signal} at step {result.steps}, checkpointed in {result.run_dir}; go on with{how}"
            )
        stopped = Preempted(text) if reason == PREEMPTED else Interrupted(text)
        if is_main_process():
            print(stopped.message, file=sys.stderr, flush=True)
        return stopped

    def _ended_at_once(self, where: Sequence[str]) -> Interrupted:
        newest = newest_checkpoint(None if self._identity is None else self._identity.run_dir)
        how = "it had no checkpoint yet" if newest is None else f"its newest checkpoint is {newest}"
        stopped = Interrupted(f"shoal: ended at once by a second Ctrl-C; {how}")
        for text in where:
            print(f"shoal: {text}", file=sys.stderr)
        print(stopped.message, file=sys.stderr, flush=True)
        return stopped

    # -- after training ------------------------------------------------------------------------------------------------

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and metrics over `data` (default: eval_data), every sample once, on all workers.

        With ema=, the average of the weights is evaluated once there is one, as during training. A Trainer that was
        made with resume= and has not been fitted has the weights of that checkpoint.
        """
        data = self.recipe.eval_data if data is None else data
        if data is None:
            raise ConfigError("evaluate() needs data: pass it, or give the Trainer eval_data=")
        check_data(data, "data", self.recipe.collate)
        recipe, model = self.recipe, self.model

        def body(session: Session) -> dict[str, float]:
            model.to(session.device)
            part = self._part(session, data)
            try:
                evaluator = Evaluator(session, part, recipe.loss, recipe.predict, recipe.metrics)
                with averaged(self._average()):
                    return done_by_all(session, "evaluate", lambda: evaluator.run(model))
            finally:
                part.close()

        figures: dict[str, float] = self._run(body)[0]
        return figures

    def predict(self, data: Any) -> Any:
        """What `predict` returns as prediction for every sample of `data`, in order, computed on all workers.

        The weights are those that `evaluate` has.
        """
        predict = self.recipe.predict
        if predict is None:
            raise ConfigError(
                "predict() needs a function: give the Trainer predict=fn(model, batch) -> (prediction, target)"
            )
        check_data(data, "data", self.recipe.collate)
        model = self.model

        def body(session: Session) -> Any:
            model.to(session.device)
            part = self._part(session, data)
            try:
                with averaged(self._average()):
                    return done_by_all(session, "predict", lambda: predict_part(session, part, model, predict))
            finally:
                part.close()

        # in order of positions: where members have changed, numbers of workers are in another one
        parts = sorted(self._run(body), key=lambda part: part["start"])
        return join([output for part in parts for output in part["outputs"]])

    def _part(self, session: Session, data: Any) -> Part:
        session.compare_data(data, "data")
        return part_of(session, self.recipe, data, "data", session.workers)

    def _average(self) -> Average | None:
        if self.average is None or self.recipe.ema is None:
            return None
        average = Average(self.model, self.recipe.ema)
        average.load_state_dict(self.average)
        return average

    def _run(self, body: Callable[[Session], Any]) -> list[Any]:
        settings.current().entered += 1
        try:
            loaded = self._take_weights()
            forked = not is_spmd(self.engine)
            start = Start(seed=self.seed, collective=self.collective, loaded=loaded, made_before=forked)
            elasticity = replace(self.elasticity, faults=None)
            return run(
                body if forked or is_launched() else self._with_weights(body),
                start,
                workers=self.workers,
                engine=self.engine,
                watch=Unwatched(),
                elasticity=elasticity,
            )
        except ShoalError as error:
            raise error.with_traceback(None) from None

    def _with_weights(self, body: Callable[[Session], Any]) -> Callable[[Session], Any]:
        """`body` on the weights that the model has in the process that the user started."""
        landing = Landing(state_of(self.model), self._file("model"))
        if is_main_process():
            landing.put(state_of(self.model))

        @wraps(body)
        def begun(session: Session) -> Any:
            state = state_of(self.model)
            landing.take(state, landing.fitting(state))
            return body(session)

        return begun

    def _file(self, name: str) -> Path | None:
        """Where workers that are started by script share memory of this name with the process that the user started."""
        if not is_spmd(self.engine):
            return None
        # here, as elsewhere in this package: `from shoal import Trainer` must not take long
        from shoal.trainer.workers.scripted import landing_file

        return landing_file(name)

    def _take_weights(self) -> Loaded | None:
        """Once, before fit(): give the model the weights that resume= means. What was read, but for the weights."""
        if self.resume is None or self._resume_read:
            return None
        watch = Watch()
        try:
            loaded, _ = self._find_resumed(watch, "the model is evaluated as it was given")
            if loaded is not None:
                self._tell_unused(loaded, watch, ema=self.recipe.ema)
                self._load_weights(loaded)
                weights = "weights" if self.average is None else "average of the weights"
                run_id = loaded.meta.get("run_id") or "a run"
                watch.warn(f"resume: using the {weights} of {run_id} at step {loaded.step} ({loaded.path})")
                loaded = replace(loaded, trees={"session": loaded.trees["session"]})
            self._resume_read = True
            return loaded
        finally:
            watch.close()

    def _load_weights(self, loaded: Loaded) -> None:
        if isinstance(self.sync, spec.Server):
            # here, as elsewhere in this package: `from shoal import Trainer` must not take long
            from shoal.syncs.server.embeddings import make_real

            make_real(self.model, loaded)
        restore("model", self.model, loaded)
        if self.recipe.ema is not None:
            average = Average(self.model, self.recipe.ema)
            restore("average", average, loaded)
            self.average = average.state_dict()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and all buffers of a model, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@dataclass
class _Folder:
    """The run's folder while `fit` runs. On workers other than 0 of a script that runs once each, only its path."""

    trainer: Trainer
    loaded: Loaded | None
    resumed: Path | None
    watch: Watch
    marks: Marks

    def __enter__(self) -> _Folder:
        trainer, loaded = self.trainer, self.loaded
        folder = trainer.run_dir
        continued = self.resumed is not None and (folder is None or folder.resolve() == self.resumed.resolve())
        self.continued = continued
        known = str(loaded.meta.get("run_id") or "") if loaded is not None and continued else ""
        self.name = trainer.name
        if continued and trainer.config["name"].origin == DEFAULT and self.resumed is not None:
            # a run keeps its name, also when it goes on under another command
            self.name = str(read_about(self.resumed).get("name") or trainer.name)
        self.run_id = known or new_run_id(trainer.name)
        self.path = trainer.run_dir or (self.resumed if continued and self.resumed else runs_root() / self.run_id)
        self._held: RunDir | None = None
        if is_main_process():
            self._held = RunDir(self.path, self.run_id, keep_checkpoints=continued)
            try:
                self._held.write_about(self._about())
            except BaseException:
                self._held.close()
                raise
        return self

    def identity(self) -> Identity:
        trainer = self.trainer
        trainer._identity = Identity(
            run_id=self.run_id,
            name=self.name,
            workers=trainer.workers,
            run_dir=self.path,
            config=trainer.config,
            resumed=self.continued,
        )
        return trainer._identity

    def meta(self) -> dict[str, Any]:
        """What checkpoints say of this run."""
        data = list(self.marks.first) if is_main_process() else []  # others write none
        return {"run_id": self.run_id, "workers": self.trainer.workers, "data": data}

    def _about(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "run_id": self.run_id,
            "name": self.name,
            "started": time.time(),
            "workers": trainer.workers,
            "total_steps": trainer.recipe.total_steps,
            **asdict(replace(trainer._lineage(), data=self.marks.first)),
            "resumed": None if self.loaded is None else str(self.loaded.path),
        }

    def __exit__(self, *error: object) -> None:
        if self._held is not None:
            if not self.watch.started:
                self._held.take_back_about()
            self._held.close(keep=self.watch.began)


def _elasticity(
    workers: int,
    least: int | None,
    most: int | None,
    restarts: int | None,
    faults: Any | None,
    engine: spec.Local,
    replaces: bool,
) -> Elasticity:
    """How members may change. Under a launcher they do not, whatever this says."""
    check_whole(1, optional=True, min_workers=least, max_workers=most)
    check_whole(0, optional=True, restarts=restarts)
    if faults is not None:
        check_faults(faults)
    if not replaces and (least is not None or most is not None):
        raise ConfigError(
            "replace=False ends the run when a worker is lost, so that it always has its workers: leave out "
            "min_workers and max_workers, or replace=False"
        )
    if least is not None and most is not None and least > most:
        raise ConfigError(f"min_workers={least} is more than max_workers={most}; it must be at most that")
    if least is not None and least > workers:
        raise ConfigError(f"min_workers={least} is more than workers={workers}; the run could not begin: lower it")
    if most is not None and most < workers:
        raise ConfigError(f"max_workers={most} is less than workers={workers}; raise it, or lower workers=")
    if most is not None:
        check_workers(most)
    if is_launched() and not least is most is restarts is faults is None:
        raise ConfigError(
            "min_workers, max_workers, restarts and faults are for workers that fit() starts itself; a launcher has "
            "started this one: leave them out, and let the launcher restart"
        )
    if is_spmd(engine) and faults is not None:
        raise ConfigError(
            "faults are for workers that fit() forks, which share their plan; engine= asks for one script per worker, "
            "as GPUs do: leave them out, or use engine='local:start=fork'"
        )
    return Elasticity(
        workers=workers,
        least=(1 if replaces else workers) if least is None else least,
        most=workers if most is None else most,
        restarts=DEFAULT_RESTARTS if restarts is None else restarts,
        faults=faults,
        replaces=replaces,
    )


def _refuse_with_servers(
    *, deterministic: bool, ema: float | None, after_step: AfterStep | None, engine: spec.Local
) -> None:
    """Raises ConfigError for arguments that do not go with `sync="server"`."""
    if deterministic:
        raise ConfigError(
            "sync='server': deterministic=True needs sums whose order does not depend on who is first, and servers sum "
            "gradients as they arrive; use sync='allreduce', or deterministic=False"
        )
    if ema is not None:
        raise ConfigError("sync='server': ema= is not available with it in this version; use sync='allreduce'")
    if after_step is not None:
        raise ConfigError(
            "sync='server': after_step= changes the whole model after each step, and servers have shards of it; use "
            "sync='allreduce', or leave after_step out"
        )
    if is_spmd(engine):
        raise ConfigError(
            "sync='server' starts its own workers and servers, on the CPU; a launcher has started this one (or engine= "
            "asks for one script per worker, as GPUs do): leave that out, or use sync='allreduce'"
        )


def _check_metrics(metrics: Sequence[str | Metric], predict: PredictFn | None) -> None:
    wanting = [metric.name for metric in make_metrics(metrics) if not needs_loss(metric)]
    if wanting and predict is None:
        raise ConfigError(f"metrics={wanting} need predict=fn(model, batch) -> (prediction, target)")
