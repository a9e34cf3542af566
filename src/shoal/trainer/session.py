"""The session: one worker's part of a run, for people who write their own loop. The Trainer is built on it.

    def train(session):
        net = Net()
        optimizer = torch.optim.AdamW(net.named_parameters())
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(data, batch_size=64, epochs=3):
            for batch in step:
                step.backward(loss(net, batch))
            step.apply(optimizer)

    shoal.launch(train, workers=4)

The body of a step may run again (after a failure, in a rehearsal of the first batch, and when something is drawn in a
new place): keep side effects out of it, or put them after `step.apply`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.saving import Saving
from shoal.cluster.board import Phase, Place
from shoal.cluster.channel.channel import Channel
from shoal.cluster.usage import Times
from shoal.comm.group import Group, SoloGroup
from shoal.core.atoms import Course, StepSpan
from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, Notice, WorkerSeen
from shoal.core.following import STOPPED, Facts, Following, follows
from shoal.core.idle import idle_words
from shoal.core.progress import Progress, Update
from shoal.core.spec import AnyCodec, NoCodec
from shoal.core.traffic import PARAMETER, STATE, Traffic, together
from shoal.data.fetch import Fetcher, check_data
from shoal.data.loader import Loader
from shoal.data.parcel import from_bytes, to_bytes
from shoal.engines.activity import Activity
from shoal.layouts.replica import Replica
from shoal.layouts.restore import refuse_other_course, restore, session_tree
from shoal.layouts.single import Buffers, uses_batch_statistics
from shoal.layouts.soundness import digest_of, is_plain, refuse_different, refuse_not_finite, refuse_parted
from shoal.proof.keyed import Keyed
from shoal.proof.proof import Proof
from shoal.proof.rehearse import Fetch, Rehearsal, playing
from shoal.syncs.encoding import Encoding
from shoal.syncs.private import Private, Totals, as_tree, from_tree, parts
from shoal.syncs.telling import exchange_settled, run_started, worker_seen
from shoal.syncs.trained import Trained, make_trained, take_up
from shoal.syncs.updating import rates_of
from shoal.trainer.arguments import check_functions, check_whole
from shoal.trainer.configure import spelt
from shoal.trainer.inspection import Inspection
from shoal.trainer.same_data import SameData
from shoal.trainer.step import FLAGS, HEAD, Loop, Step
from shoal.trainer.together import likely_together
from shoal.trainer.workers.fixed import Fixed

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded
    from shoal.trainer.workers.standing import Standing

TELL_SECONDS = 1.0
"""How often a worker tells of itself."""


class Session:
    """One worker's part of a run. Made by `shoal.launch` or by the Trainer; used on the thread that got it."""

    def __init__(
        self,
        group: Group,
        channel: Channel,
        *,
        device: torch.device,
        seed: int = 0,
        deterministic: bool = False,
        saving: Saving | None = None,
        loaded: Loaded | None = None,
        spare_cores: float = 0.0,
        starts_equal: bool = True,
        run_id: str = "",
        run_dir: str | None = None,
        standing: Standing | Fixed | None = None,
        codec: AnyCodec | None = None,
        strict: bool = False,
    ) -> None:
        """Without `standing`, members do not change."""
        self.rank = group.rank
        self.workers = group.size
        self.device = device
        self.seed = seed
        self.deterministic = deterministic
        self.step = 0
        """Steps committed so far, in the loop under way."""
        self.stopping: str | None = None
        """Why the run ends early, once all workers have agreed that it does."""
        self.keyed = Keyed(seed)
        self.proof = Proof(self.keyed, channel.emit, strict=strict)
        self.evaluating = False
        """Whether an evaluation is under way, for messages."""
        self.evaluated = -1
        """The last step that was evaluated."""
        self.codec: AnyCodec = NoCodec() if codec is None else codec
        self.private = Private()
        self.asked_others = False
        """Whether the forward under way has asked other workers for something."""
        self.asking = ""
        """What it is that this worker asks all others for, while it does."""
        self.parts_wanted = False
        """Whether this step is to be checkpointed, for which all workers give their parts."""
        self.exchanged_in = 0
        """The term in which the last step was exchanged."""
        self.standing: Standing | Fixed = Fixed(group.rank) if standing is None else standing
        self._place: Place | None = self.standing.place
        self.activity = Activity() if self._place is None else self._place.activity
        """Which of the user's functions this worker is in."""
        self.times = Times()
        self.samples = 0
        """Samples that this worker has computed in steps that were committed."""
        self.channel = channel
        self.buffers = Buffers([])
        self.progress = Progress()
        self.course: Course | None = None
        self._run = run_id, run_dir
        self._group = group
        self._earlier = Traffic()
        self._counted = Traffic()
        self._running: Loop | None = None
        self._own: Callable[[int], range] = range
        """Of the loop under way, or of the last one: an error is told of when it has ended."""
        self._origin = 0
        self._settled_told = False
        self._said_idle = ""
        self._saving = saving or Saving(channel)
        self._loaded = loaded
        self._spare_cores = spare_cores
        self._starts_equal = starts_equal
        self._same_data = SameData(self)
        self._replica = Replica()
        self._trained: dict[int, Trained] = {}
        self._untrained: list[nn.Parameter] | None = None
        self._overlap = False
        self.together: int | None = None
        """Samples that must be computed together; None if that is not known."""
        self._least = 1
        """Samples that a worker computes at least, if any. In deterministic runs each atom is computed alone."""
        self.most_workers = 0
        """As many as there may ever be, where members change."""
        self.inspection = Inspection(self)
        self.compares_untrained = False
        """Whether parameters that no optimizer trains are compared between workers, too: something changes them."""
        self._loop = -1
        self._at: StepSpan | None = None
        self._best = False
        self._best_step = 0
        self._lost_best: int | None = None
        self._older = False
        self._began = self._told = time.monotonic()
        self._resumed: dict[str, Any] | None = None if loaded is None else loaded.trees["session"]
        self._resumed_from = self.resumed_step

    # -- for a user's loop ---------------------------------------------------------------------------------------------

    def track(self, **objects: Any) -> None:
        """Name the state of this run: modules, optimizers, schedulers, anything with state_dict and load_state_dict.

        Tracked modules start equal on every worker and their buffers are kept equal; everything tracked is in the
        checkpoints, and is restored here when the run resumes.
        """
        for name, thing in objects.items():
            if name in self._replica.tracked or name in ("session", "codec"):
                raise ConfigError(f"track: the name {name!r} is taken; use another one")
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ConfigError(f"track: {name}={type(thing).__name__} has no state_dict and load_state_dict")
            self._replica.tracked[name] = thing
            if self._loaded is not None:
                restore(name, thing, self._loaded)
                # a second copy of everything is not needed any longer
                self._loaded.trees[name] = None
            if isinstance(thing, nn.Module):
                self._share(name, thing)
            if isinstance(thing, torch.optim.Optimizer):
                self._read_encoding(self._train(thing))
        self.buffers = Buffers(self._replica.named_modules())
        self._untrained = None

    @spelt
    def steps(
        self,
        data: Any,
        batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        data_workers: int | None = None,
        micro_batch: int | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> Iterator[Step]:
        """Go through `data` in steps of `batch_size` samples over all workers, `steps` of them or `epochs` times over.

        Each step is committed when the loop asks for the next one. A resumed run begins where its checkpoint is.
        `buffers` says of buffers of tracked modules, by name, how they are merged (docs/buffers.md).
        """
        check_whole(1, batch_size=batch_size)
        check_whole(1, optional=True, epochs=epochs, steps=steps, micro_batch=micro_batch)
        check_whole(0, optional=True, data_workers=data_workers)
        check_functions(optional=True, collate=collate)
        self.buffers.use(buffers)
        course = self.course = Course(check_data(data, "data", collate), batch_size)
        total = steps if steps is not None else (1 if epochs is None else epochs) * course.steps_per_epoch
        self._least = 1 if self.deterministic else self.together or likely_together(self._replica.modules())
        start = self._enter_loop(course)
        if start is None or self.stopping is not None:
            return
        self.compare_data(data, "data", batch_size=batch_size, steps=total)
        self._origin = start
        start = self._take_part(total)
        self._tell_start(course, total)
        if self._saving.mine and not self._replica.tracked:
            text = (
                "nothing is tracked, so no checkpoint is written: name what is to be in it before session.steps, as in "
            )
            self.channel.emit(Notice(step=self.step, text=text + "session.track(net=net, optimizer=optimizer)"))
        if self.stopping is not None:
            return
        if start >= total:
            return
        fetcher = Fetcher(data, collate)
        loader = self.loader({"data": fetcher}, data_workers)
        loop = self._running = Loop(
            self, course, fetcher, loader, limit=micro_batch, start=start, total=total, least=self._least
        )
        self._own = loop.own
        self.proof.begin(start, course, older=self._older)
        self.keyed.know(self._replica.modules())
        drawing = self.keyed.within()
        try:
            number = start
            while number < total:
                begun = time.perf_counter()
                step = Step(self, loop, course.step(number))
                self._at = step.span
                self.parts_wanted = False
                yield step
                step.commit()
                number = step.number  # it may have become the next one
                if number == self._origin and self.workers > 1 and not self.standing.redoes:
                    refuse_parted(self._compared(), self._group)
                self._between_steps(last=number + 1 == total)
                self.times.loop += time.perf_counter() - begun
                if self.stopping is not None:
                    return
                number += 1
                if self.standing.due and number < total:
                    self._pool()
                    if self.standing.due:
                        self.standing.regroup(self)
            self._at = None
        finally:
            self.standing.redo(False)
            drawing.__exit__(None, None, None)
            self._running = None
            loop.close()
            loader.close()

    def stop(self) -> None:
        """End the loop after the step in progress, checkpointed. All workers must call it in the same step."""
        self.stopping = self.stopping or STOPPED

    def gather(self, tree: Any) -> list[Any]:
        """Every worker's `tree` of tensors and plain values, in order of rank. All workers must call it."""
        return self.gather_for("session.gather", tree)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all workers. All workers must call it."""
        total = tensor.detach().clone().contiguous()
        phase = Phase.COMPUTE if self._place is None else self._place.sight().phase
        self.gather_for(f"session.sum of {str(total.dtype).removeprefix('torch.')} {tuple(total.shape)}", None)
        with self.waiting(phase):
            self._group.sum(total, STATE).wait()
        return total

    def _ask_others(self, purpose: str) -> None:
        """All workers are about to do the same: a forward in which that happens is not computed again by one alone."""
        self.standing.refuse_alone(purpose)
        self.asked_others = True
        rehearsal = playing()
        if rehearsal is not None:
            rehearsal.give_up("the loop asks other workers in its forward")

    # -- for the Trainer -----------------------------------------------------------------------------------------------

    def gather_for(self, purpose: str, tree: Any) -> list[Any]:
        """`gather`, for what `purpose` says: workers that are in different ones are told both."""
        self._ask_others(purpose)
        mine = to_bytes(tree)
        with self.waiting(Phase.EVALUATE if self.evaluating else Phase.APPLY):
            self.asking = purpose
            told = self._group.gather_bytes(mine, STATE, purpose)
            self.asking = ""
        return [from_bytes(data) for data in told]

    def compare_data(self, data: Any, name: str, **facts: int) -> None:
        """Where each worker has made its data itself, all must have made the same; see `SameData.refuse_other`."""
        if not self._starts_equal and not self.standing.joining:
            self._same_data.refuse_other(data, name, **facts)

    @property
    def group(self) -> Group:
        """What the workers sum and gather with. All of them must call the same operations in the same order."""
        return self._group

    def step_traffic(self) -> Traffic | None:
        """What this worker has sent since this was last asked; None where there is one worker."""
        if self.workers == 1:
            return None
        before, self._counted = self._counted, self._traffic()
        return self._counted.since(before)

    def _traffic(self) -> Traffic:
        """All that this worker has sent, also in groups that are no more."""
        now = self._group.account.now()
        return together([self._earlier, now]) if self._earlier.operations else now

    @property
    def resumed_step(self) -> int:
        """Where the checkpoint is that this run goes on from; −1 for one that starts afresh."""
        return -1 if self._resumed is None else int(self._resumed["step"])

    @property
    def where(self) -> StepSpan | None:
        """The step under way, for messages."""
        return self._at

    def own_of(self, step: StepSpan) -> range:
        """Which positions of a step this worker computes, for messages."""
        return self._own(step.samples)

    def overlap_backward(self) -> None:
        """Let gradients leave during backward: promises one optimizer, and one `Step.backward` per batch."""
        self._overlap = True

    @property
    def overlapped(self) -> bool:
        """Whether gradients may leave during backward."""
        return self._overlap

    def checkpoint_best(self) -> None:
        """The state at this step is the best so far: checkpoint it, and keep that."""
        self._best = True
        self._best_step = self.step

    def enter(self, phase: Phase) -> None:
        """What this worker does from now on, for those who look at the board."""
        if self._place is not None:
            self._place.enter(phase, self.step)

    @contextmanager
    def waiting(self, after: Phase) -> Iterator[None]:
        """Within: it waits for others; then it is in phase `after`."""
        self.enter(Phase.EXCHANGE)
        yield
        self.enter(after)

    def lost_best(self) -> int | None:
        """Once, if the best checkpoint was lost with the worker that saved it: the step of the one there is, or 0."""
        lost, self._lost_best = self._lost_best, None
        return lost

    def finish_saving(self) -> None:
        """Wait until every checkpoint is on disk."""
        begun = time.perf_counter()
        self._saving.finish()
        waited = time.perf_counter() - begun
        self.times.checkpoint += waited
        self.times.loop += waited

    def loader(self, sources: Mapping[str, Fetcher], data_workers: int | None) -> Loader:
        for text in (text for fetcher in sources.values() for text in fetcher.notices):
            self.channel.emit(Notice(step=self.step, text=text))
        return Loader(
            sources,
            processes=data_workers,
            spare_cores=self._spare_cores,
            close_fds=lambda: self._group.descriptors(),
            activity=self.activity,
        )

    def agree_on_stop(self) -> None:
        """All workers learn now, not with the next step, whether any of them was asked to stop."""
        if self.stopping is None:
            told = self.gather_for("the end of an evaluation", self.channel.stop_asked())
            self.stopping = next(filter(None, told), None)

    def close(self) -> None:
        """Let go of the modules, and finish the checkpoint under way: also after a failure it is worth having."""
        for trained in self._trained.values():
            trained.exchange.close()
        self._saving.close()

    # -- where members change ------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How far this worker's state is; see `shoal.cluster.messages.Position`."""
        return 2 * self.step + (self.evaluated == self.step)

    def guard(self, work: Callable[[], Any]) -> Any:
        """What `work`, an operation of all workers, returns; None if members changed meanwhile, which ends it."""
        return self.standing.guard(self, work)

    def farewell(self, last: Callable[[], None]) -> None:
        """Do what is left to do at the end of the run, worker 0's part of which others may have to take over."""
        self.standing.farewell(self, last)

    def save_best_overdue(self) -> None:
        """The same at once, where the state of now is the best: it will be gone with the next step."""
        if self._saving.mine and self._saving.overdue and self.step and self._best_step == self.step:
            self._save()

    def save_overdue(self) -> None:
        """Checkpoint, if the last step is not, or if another worker may have died while it did that."""
        if self.step == self._resumed_from:
            return  # there is nothing that was not checkpointed
        if self._saving.mine and self.step and (self._saving.overdue or self._saving.begun != self.step):
            self._save()

    def confirm(self, step: int | None) -> None:
        """All members have applied this step (None: all there are), so that it may be told."""
        self.standing.confirm(step)

    def compare_replicas(self, number: int) -> None:
        """In the second step, and in the second after members have changed: whether all have the same parameters.

        Where members may change it is part of a step: who repeats the step repeats it, and who skips it skips it.
        """
        if number == self._origin + 1 and self.workers > 1:
            refuse_parted(self._compared(), self._group)

    def rewind(self) -> None:
        """Back to the beginning of the step in progress: the weights are there, buffers may not be."""
        self.buffers.rewind()

    def leave_group(self) -> None:
        for trained in self._trained.values():
            trained.known = trained.exchange.knowledge() or trained.known
            trained.exchange.close(with_group=True)
            for _, param in trained.params:
                param.grad = None  # it may show memory of the group, which the next one can use then
        self._earlier = self._traffic()
        self._group.close()
        self._group = SoloGroup()

    def take_group(self, group: Group) -> None:
        first = self.standing.term == 0
        self._group = group
        self.rank, self.workers = group.rank, group.size
        self._saving.take_on(self.rank == 0, overdue=not first)

    def knowledge(self) -> list[bytes | None]:
        """What is settled about the exchange of each optimizer."""
        return [trained.exchange.knowledge() or trained.known for trained in self._trained.values()]

    def rebuild(self, knowledge: list[bytes | None]) -> None:
        """Make the exchanges anew, over the group of now, and load the data that is now this worker's.

        What a loop does besides its steps may have been done by some and not by others: replicas are compared again.
        """
        self._origin = self.step
        for trained, known in zip(list(self._trained.values()), knowledge, strict=True):
            self._train(trained.optimizer, known)
        if self._running is not None:
            self._running.regrouped(self.step)

    def state(self) -> dict[str, Any]:
        """What a member that is behind needs. The tensors are the live ones."""
        trees = self._trees()
        trees["codec"] = as_tree(self._encodings(), None)
        trees["session"]["evaluated"] = self.evaluated
        trees["session"]["proven"] = self.keyed.proven
        trees["session"]["passing"] = self._replica.passing()
        trees["session"]["trains"] = self._replica.trains()
        trees["session"]["best"] = self._best_step
        return trees

    def load(self, trees: Mapping[str, Any]) -> None:
        """Take over the state of another member."""
        self.before_change()
        told = trees["session"]
        if told["step"] == self.step + 1:
            for encoding in self._encodings():
                # the others could apply the step only with all that this worker had to give to it
                encoding.memory.commit()
                self.private.stands()
        self._replica.load(trees, told["passing"], told["trains"])
        for trained in self._trained.values():
            take_up(trained, self.codec)  # they may have other parameters that require gradients
        for encoding, common in zip(self._encodings(), trees["codec"], strict=True):
            encoding.adopt(common)
        self._best_step = told["best"]
        self._loop = told["loop"]
        self.step = told["step"]
        self.evaluated = told["evaluated"]
        self.progress = Progress(told["logs"], told["epoch"])
        self.buffers.know(told["buffers"], told.get("counts"))
        self.keyed.load(told["draws"], proven=told["proven"])
        self._best = False

    def save_now(self) -> None:
        """Checkpoint what this worker has, and wait until it is on disk: nobody knows how long it will wait."""
        if not self.step:
            return
        before = self._saving.mine
        self._saving.take_on(True)
        if self._saving.mine:
            self._save()
            self.finish_saving()
        self._saving.take_on(before)

    def _take_part(self, total: int) -> int:
        """Come to where the others are; the step to begin with.

        Steps can be done again where one optimizer is applied once in each: then the state of the run is that before
        the step, or that after it.
        """
        self.inspection.begin()

        def signature() -> str:
            course = self.seed, self.deterministic, self.course, total, self._least
            return repr((self._loop, course, self._replica.signature()))

        self.standing.take_part(self, signature if len(self._trained) == 1 else None)
        return self.step

    def cannot_redo(self) -> None:
        """It turns out that steps of this loop have several phases, or several optimizers."""
        self.standing.redo(False)

    # -- for a step ----------------------------------------------------------------------------------------------------

    def all_trained(self) -> list[Trained]:
        return list(self._trained.values())

    def digest(self) -> bytes:
        """Of all parameters: equal where they are bitwise equal."""
        return digest_of(self._compared())

    def trained(self, optimizer: torch.optim.Optimizer) -> Trained | None:
        return self._trained.get(id(optimizer))

    def adopt(self, optimizer: torch.optim.Optimizer, atoms: int) -> Trained:
        """An optimizer at its first `Step.apply`: its gradients are there already and must not be cleared."""
        self.cannot_redo()
        trained = self._train(optimizer)
        grads = [param.grad for _, param in trained.params]
        self._open(trained, atoms)
        for (_, param), grad in zip(trained.params, grads, strict=True):
            param.grad = grad
        return trained

    def _open(self, trained: Trained, atoms: int) -> None:
        departing = self._group.account.departing
        departing.strikes, departing.worker, departing.step = self.standing.faults, self.standing.seat, self.step
        trained.exchange.open(atoms, *self._vectors(trained))

    def open_exchanges(self, atoms: int) -> None:
        """Begin a phase: no parameter has a gradient."""
        for trained in list(self._trained.values()):
            if trained.outdated():
                trained = self._train(trained.optimizer)
            self._open(trained, atoms)
        if self._untrained is None:
            mine = {id(param) for trained in self._trained.values() for _, param in trained.params}
            params = [param for module in self._replica.modules() for param in module.parameters()]
            self._untrained = [param for param in params if id(param) not in mine]
        for param in self._untrained:
            param.grad = None

    def arm(self, *, weighted: bool) -> None:
        """The next backward is this worker's last in the step, of a loss that has a weight of its own or not."""
        if self._overlap:
            for trained in self._trained.values():
                trained.exchange.arm(weighted=weighted)

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor) -> None:
        for trained in self._trained.values():
            trained.exchange.atom_done(atom, sums, doubles)

    def all_params(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for trained in self._trained.values() for pair in trained.params]

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """All that is tracked, and what it is made of."""
        return [pair for prefix, thing in self._replica.named() for pair in thing.named_modules(prefix=prefix)]

    def named_params(self) -> list[tuple[str, nn.Parameter]]:
        """Those of all tracked modules, trained or not."""
        return [pair for prefix, thing in self._replica.named() for pair in thing.named_parameters(prefix=prefix)]

    def _compared(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that must be equal on all workers."""
        trained = self.all_params()
        if not self.compares_untrained:
            return trained
        mine = {id(param) for _, param in trained}
        return trained + [(name, param) for name, param in self.named_params() if id(param) not in mine]

    def rates(self, applied: Mapping[int, list[float]]) -> list[float]:
        """Of all optimizers' groups: those that a step was `applied` with, and the present ones of others."""
        return [
            rate for key, trained in self._trained.items() for rate in applied.get(key) or rates_of(trained.optimizer)
        ]

    def before_change(self) -> None:
        """Tensors are about to change in place: a checkpoint being copied must have them first."""
        self.times.checkpoint += self._saving.wait_copied()

    def committed(
        self, span: StepSpan, update: Update | None, applied: Mapping[int, list[float]], unit: float
    ) -> list[AnyEvent]:
        """What there is to tell of a step; see `rates`, and `Progress.committed`."""
        assert self.course is not None
        self.step = span.step + 1
        traffic = None if update is None else self.step_traffic()
        return self.progress.committed(self.course, span, update, self.rates(applied), traffic, unit)

    # -- the proof -----------------------------------------------------------------------------------------------------

    def rehearsal(
        self, fetch: Fetch, *, at: tuple[int, int], first: int, samples: int, norms: bool = False
    ) -> Rehearsal:
        """An examination of samples of step and phase `at`, from the one at `first` on; `norms`: with BatchNorm."""
        modules, keying = self._replica.modules(), self.keyed.keying
        seed = self.seed, *at
        return Rehearsal(
            modules,
            keying,
            fetch,
            seed=seed,
            first=first,
            samples=samples,
            catches=self._overlap,
            norms=norms,
            thorough=self.proof.strict,
        )

    @property
    def split_is_unseen(self) -> bool:
        """Whether the result is the same however a step is split over workers, as far as the proof tells."""
        if self.deterministic or not self.keyed.held or self.keyed.keying.by_forward:
            return False
        return not any(map(uses_batch_statistics, self._replica.modules()))

    @property
    def alone(self) -> bool:
        """Whether a step is one forward over its whole batch."""
        whole = self._running is None or self._running.whole
        return self.workers == 1 and self.most_workers <= 1 and whole

    # -- inside --------------------------------------------------------------------------------------------------------

    def _share(self, name: str, module: nn.Module) -> None:
        """Where each worker has made a module itself: all get the values of worker 0, in the tensors that they have."""
        if self._starts_equal or refuse_different(name, module, self._group):
            return
        with torch.no_grad():
            for tensor in filter(is_plain, (*module.parameters(), *module.buffers())):
                plain = tensor.detach().contiguous()
                self._group.broadcast(plain, PARAMETER)
                tensor.copy_(plain)

    def _train(self, optimizer: torch.optim.Optimizer, knowledge: bytes | None = None) -> Trained:
        """Make the exchange for an optimizer, anew if other parameters require gradients now, or members changed."""
        former = self._trained.get(id(optimizer))
        trained = make_trained(
            optimizer,
            self._group,
            self.codec,
            by_atom=self.deterministic,
            seed=self.seed,
            knowledge=knowledge,
            former=former,
        )
        self._trained[id(optimizer)] = trained
        self._untrained = None
        return trained

    def _vectors(self, trained: Trained) -> tuple[int, int]:
        sums, doubles = self.sums_size
        return sums + FLAGS + self.workers + len(trained.params), doubles

    @property
    def sums_size(self) -> tuple[int, int]:
        """Elements of a phase's vectors of sums, in single and in double precision."""
        single, double = self.buffers.sizes
        return 2 * len(self.progress.log_names) + single, HEAD + double

    def _enter_loop(self, course: Course) -> int | None:
        """Number this loop, and find the step where it begins; None for one that was complete when checkpointed."""
        self._loop += 1
        self.standing.begins_loop(self._loop)
        self.step = 0
        self.progress = Progress(self.progress.log_names)
        saved = self._resumed
        if saved is None:
            return 0
        if self._loop < saved["loop"]:
            return None
        self._resumed = None
        if not self._replica.tracked:
            raise ConfigError(
                f"resume: the checkpoint is at step {saved['step']}, and nothing is tracked that could have its state; "
                "call session.track(...) before session.steps, or start without resume"
            )
        refuse_other_course(saved, course, self.seed)
        self.step = saved["step"]
        self.progress = Progress(saved["logs"], saved["epoch"])
        self.buffers.resume(saved["buffers"], saved.get("counts"))
        self._older = "draws" not in saved
        if not self._older:
            self.keyed.load(saved["draws"], proven=False)
        return self.step

    def _tell_start(self, course: Course, total: int) -> None:
        run_id, run_dir = self._run
        optimizers = [trained.optimizer for trained in self._trained.values()]
        self.channel.emit(
            run_started(self.step, run_id, run_dir, self.workers, course, total, self._replica.modules(), optimizers)
        )
        most = max(self.workers, self.most_workers)
        text = idle_words(course, self.workers, most, self._least, by_atom=self.deterministic)
        if text and text != self._said_idle:
            self._said_idle = text
            self.channel.emit(Notice(step=self.step, text=text))

    @property
    def number(self) -> int:
        """This worker's number for people: it stays when members change, and its rank does not."""
        return self.standing.seat

    def seen(self) -> WorkerSeen:
        """What this worker has done so far."""
        seconds = self.times.shares(time.monotonic() - self._began)
        return worker_seen(self.step, self.number, self.samples, seconds, self._traffic())

    def _tell_settled(self, *, last: bool) -> None:
        """Once it is known how gradients are exchanged, say so, for the first optimizer."""
        told = exchange_settled(self.step, self._group, next(iter(self._trained.values())).exchange, last=last)
        if told is not None:
            self._settled_told = True
            self.channel.emit(told)

    # -- what encoding keeps -------------------------------------------------------------------------------------------

    def _encodings(self) -> list[Encoding]:
        return [trained.encoding for trained in self._trained.values() if trained.encoding is not None]

    def _read_encoding(self, trained: Trained) -> None:
        """Take what a checkpoint has of it. The sums are shared out when it is known who is there."""
        saved = None if self._loaded is None else self._loaded.trees.get("codec")
        if saved is None or trained.encoding is None:
            return
        place = self._encodings().index(trained.encoding)
        if place < len(saved):
            self.private.read(from_tree(saved[place], trained.encoding))

    def share_private(self, held: Sequence[int]) -> None:
        """Have this worker's part of what was kept as a sum; `held` says what each member of the group has."""
        self.private.share(held, self._encodings())

    def wants_parts(self, step: int) -> bool:
        """Whether this worker is about to checkpoint this step, and needs the others' parts for it."""
        saving = self._saving
        return bool(self._encodings()) and saving.mine and self._follows(step, saving.every, saving.late).save

    def _follows(self, step: int, save_every: int | None, overdue: bool) -> Following:
        """What follows a step of the loop under way, besides an evaluation."""
        assert self._running is not None
        best, stopping = self._best, self.stopping
        facts = Facts(step, self._running.total, save_every=save_every, overdue=overdue, best=best, stopping=stopping)
        return follows(facts)

    def _pool(self) -> Totals | None:
        """The sums over all workers of what they have still to send; None if it cannot be had.

        After a change of members some have been through what led here, and some have its result from another one. So
        it is done only in the term in which the step was exchanged: there all do the same.
        """
        if not self._encodings() or (self.standing.redoes and self.exchanged_in != self.standing.term):
            return None
        return self.guard(lambda: self.private.pool(self._group, self._encodings()))  # type: ignore[no-any-return]

    def _between_steps(self, *, last: bool) -> None:
        if self._trained and not self._settled_told:
            self._tell_settled(last=last)
        now = time.monotonic()
        if now - self._told > TELL_SECONDS:
            self._told = now
            self.channel.emit(self.seen())
        begun = time.perf_counter()
        # where all give their parts, they were asked for them in the step
        wish = (None, self.parts_wanted) if self._encodings() else (self._saving.every, self._saving.late)
        save = self._follows(self.step, *wish).save
        totals = self._pool() if save else None
        if self._saving.mine and self._replica.tracked:
            self._saving.tell()
            if save:
                self._save(totals)
        self.private.forget()
        self.times.checkpoint += time.perf_counter() - begun
        self._best = False

    def _trees(self) -> dict[str, Any]:
        """All state of the run that is the same on every worker."""
        assert self.course is not None
        trees = self._replica.trees()
        trees["session"] = session_tree(self.step, self.course, self.seed, self.progress, self.buffers, self._loop)
        trees["session"]["draws"] = self.keyed.tree()
        return trees

    def _save(self, totals: Totals | None = None) -> None:
        """Without `totals`, which only all workers together have, what this one has itself is kept of it."""
        refuse_not_finite(self.all_params(), self.step)
        self.enter(Phase.CHECKPOINT)
        trees = self._trees()
        if self._encodings():
            trees["codec"] = as_tree(self._encodings(), parts(self._encodings()) if totals is None else totals)
        volatile = [buffer for module in self._replica.modules() for buffer in module.buffers()]
        if not self._overlap:
            volatile += self._replica.changed_by_anyone(trees, {id(param) for _, param in self.all_params()})
        best = self._best
        if self._saving.overdue and self._best_step:
            kept = self._saving.best_step()
            best = best or (self._best_step == self.step and kept != self.step)
            if not best and kept != self._best_step:
                self._lost_best = kept
        self._saving.begin(self.step, trees, volatile=volatile, best=best)
        self.standing.fault("checkpoint", self.step - 1)
