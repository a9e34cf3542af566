"""The proof in runs: what is said, when, how often, and what becomes of the run."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.cluster.channel.channel import DirectChannel
from shoal.comm.group import SoloGroup
from shoal.core.events import AnyEvent, Notice, StepDone
from shoal.core.settings import Settings, using
from shoal.proof import rehearse as rehearsals
from shoal.proof.proof import Proof
from shoal.testing import FaultPlan
from shoal.trainer.session import Session
from shoal.trainer.step import Step

_generator = torch.Generator().manual_seed(0)
X = torch.randn(96, 8, generator=_generator)
DATA = TensorDataset(X, X.sum(1, keepdim=True), (X[:, 0] > 0.5).long())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def good(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[2])


def summed(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, :1], batch[1], reduction="sum")


def weighted(model: Any, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[2], reduction="none")
    weights = losses.new_tensor([1.0, 10.0])[batch[2]]
    return (losses * weights).sum() / weights.sum()


def coupled(model: Any, batch: Any) -> Tensor:
    one = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(one @ one.T, torch.arange(len(one)))


def notices(events: list[Any]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


# -- in this process: a worker that is alone, and computes steps in parts ----------------------------------------------


class Alone:
    """A worker's session, and what it tells."""

    def __init__(self, *, strict: bool = False, model: nn.Module | None = None) -> None:
        self.events: list[AnyEvent] = []
        channel = DirectChannel(self.events.append, None)  # type: ignore[arg-type]
        self.session = Session(SoloGroup(), channel, device=torch.device("cpu"), strict=strict)
        self.model = model or net()
        self.optimizer = sgd(self.model.named_parameters())
        self.session.track(model=self.model, optimizer=self.optimizer)

    def steps(self, steps: int = 1, micro_batch: int | None = 24, data: Any = DATA, **options: Any) -> Iterator[Step]:
        yield from self.session.steps(data, 48, steps=steps, micro_batch=micro_batch, **options)

    def train(self, loss: Callable[[Any, Any], Any], steps: int = 1, **options: Any) -> list[str]:
        """As the Trainer does; returns what people are told."""
        self.session.overlap_backward()
        for step in self.steps(steps, **options):
            for batch in step:
                step.compute(loss, self.model, batch)
            step.apply(self.optimizer)
        self.session.close()
        return notices(self.events)


def rejecting(model: Any, batch: Any) -> Tensor:
    """Draws until it likes all numbers, and couples samples."""
    noise = torch.randn_like(batch[0])
    while bool((bad := noise.abs() > 1.0).any()):
        noise = torch.where(bad, torch.randn_like(noise), noise)
    return coupled(model, (batch[0] + 0.1 * noise, *batch[1:]))


def test_a_loss_that_draws_until_it_likes_its_numbers_ends() -> None:
    [text] = Alone().train(rejecting)
    assert "samples of a batch see each other" in text or "is not keyed by sample" in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (summed, ["is a sum over the batch", "return (sum, samples)"]),
        (weighted, ["is a weighted mean", "return (sum, weight)"]),
        (coupled, ["samples of a batch see each other", "write it per sample"]),
    ],
)
def test_what_is_wrong_is_said_once(loss: Callable[[Any, Any], Any], words: list[str]) -> None:
    [text] = Alone().train(loss, steps=4)
    assert all(word in text for word in words)
    worker = Alone(strict=True)
    weights = worker.model[0].weight.detach().clone()  # type: ignore[index, union-attr]
    with pytest.raises(shoal.ConfigError, match=r"strict=True: .*docs/losses\.md"):
        worker.train(loss)
    worker.session.close()
    assert torch.equal(worker.model[0].weight, weights)  # type: ignore[index, arg-type]


def test_nothing_is_said_of_what_is_right() -> None:
    for model in (net(), nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2))):
        assert Alone(strict=True, model=model).train(good, steps=3) == []


@pytest.mark.parametrize("micro_batch", [None, 48, 96])
def test_a_worker_that_computes_whole_batches_says_it_quietly(micro_batch: int | None) -> None:
    worker = Alone(strict=True)
    [text] = worker.train(summed, micro_batch=micro_batch)
    [notice] = [event for event in worker.events if isinstance(event, Notice)]
    assert "is a sum" in text and notice.quiet and worker.session.step == 1


def test_not_more_samples_are_tried_than_a_forward_has(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"

    def loss(model: Any, batch: Any) -> Tensor:
        if rehearsals.playing() is not None:
            with sizes.open("a") as file:
                file.write(f"{len(batch[0])} ")
        return F.mse_loss(model(batch[0])[:, :1], batch[1])

    for limit, expected in ((10, "8 3 5 "), (None, "24 9 15 ")):
        sizes.unlink(missing_ok=True)
        worker = Alone(model=nn.Linear(8, 1))
        assert worker.train(loss, micro_batch=limit) == [] and sizes.read_text() == expected
    many = TensorDataset(X.repeat(3, 1), X.sum(1, keepdim=True).repeat(3, 1))
    sizes.unlink()
    worker = Alone(model=nn.Linear(8, 1))
    worker.session.overlap_backward()
    for step in worker.session.steps(many, 288, steps=1):
        for batch in step:
            step.compute(loss, worker.model, batch)
        step.apply(worker.optimizer)
    worker.session.close()
    assert sizes.read_text() == "64 24 40 "


def test_a_single_sample_and_an_error_in_a_part_prove_nothing_and_training_goes_on() -> None:
    worker = Alone(strict=True)
    [text] = worker.train(summed, micro_batch=1)
    assert "not proven on the first batch: there is a single sample" in text and worker.session.step == 1

    def fixed(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0])[:, 0].view(4, 6), batch[1].view(4, 6))

    worker = Alone(strict=True)
    [text] = worker.train(fixed)
    assert "not proven on the first batch: RuntimeError in a part of the batch: shape '[4, 6]'" in text
    assert all(event.quiet for event in worker.events if isinstance(event, Notice)) and worker.session.step == 1


def test_a_second_look_sees_what_the_first_could_not() -> None:
    """At the start all targets have the same loss, so that it does not matter which of them count."""
    model = nn.Linear(8, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    worker = Alone(strict=True, model=model)
    texts = worker.train(weighted, steps=3)
    assert ["weighted mean" in text for text in texts] == [True] and worker.session.step == 3
    [notice] = [event for event in worker.events if isinstance(event, Notice)]
    assert notice.step == 1 and not notice.quiet  # in the middle of an epoch of two steps


def test_when_the_second_look_is_due() -> None:
    class Course:
        steps_per_epoch = 1000

    def due_at(first: int) -> list[int]:
        worker = Alone()
        proof: Proof = worker.session.proof
        worker.session.close()
        proof.begin(first, Course(), older=False)  # type: ignore[arg-type]
        proof.keyed.proven = True
        assert not any(proof.due(step, again=False) for step in range(first, first + 200))
        return [step for step in range(first, first + 200, 3) if proof.due(step, again=True)]

    assert due_at(0) == [51] and due_at(70) == [121]
    Course.steps_per_epoch = 20
    assert due_at(0) == [12]


def test_items_that_collate_changes_in_place_are_the_same_in_every_part() -> None:
    kept = [[value.clone(), target] for value, target, _ in DATA]

    def collate(items: list[Any]) -> Any:
        for item in items:
            item[0].mul_(2.0)
        return torch.stack([item[0] for item in items]), torch.stack([item[1] for item in items])

    assert Alone(strict=True).train(lambda m, b: F.mse_loss(m(b[0])[:, :1], b[1]), data=kept, collate=collate) == []


# -- own loops ---------------------------------------------------------------------------------------------------------


def test_an_own_loop_is_proven_where_its_first_batch_is(capfd: pytest.CaptureFixture[str]) -> None:
    worker, seen = Alone(), []
    for step in worker.steps(2):
        for batch in step:
            print("a batch")
            seen.append(len(batch[0]))
            step.backward(weighted(worker.model, batch))
        step.apply(worker.optimizer)
    worker.session.close()
    [text] = notices(worker.events)
    assert "weighted mean" in text and seen == [24] * 4 and capfd.readouterr().out == "a batch\n" * 4


def test_an_own_loop_that_uses_a_batch_without_backward_is_told_so() -> None:
    worker = Alone()
    with pytest.raises(shoal.ConfigError, match=r"without step\.backward"):
        for step in worker.steps():
            for _ in step:
                pass
    worker.session.close()


@pytest.mark.parametrize("leaves", ["error", "break"])
def test_a_loop_that_is_left_in_a_part_goes_no_further_in_the_fork(leaves: str, tmp_path: Path) -> None:
    """Whatever catches the error there would save a model, or begin anew."""
    worker, after = Alone(), tmp_path / "after"
    begun = time.monotonic()
    try:
        for step in worker.steps():
            for batch in step:
                if rehearsals.playing() is not None and leaves == "break":
                    break
                step.backward(F.mse_loss(worker.model(batch[0])[:, 0].view(4, 6), batch[1].view(4, 6)))
            step.apply(worker.optimizer)
    except RuntimeError:
        after.touch()
    assert not after.exists() and worker.session.step == 1 and time.monotonic() - begun < 5.0
    worker.session.close()
    [text] = notices(worker.events)
    assert "not proven on the first batch: the loop was left in a part of the batch" in text


def test_a_forward_that_is_computed_again_gets_a_batch_of_its_own() -> None:
    """Something is drawn at a new place in the third step, after the second look, and the loss changes its batch."""
    seen: list[float] = []
    steps = [0]

    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch.pop("x"), batch.pop("y")
        x.mul_(10.0)
        if rehearsals.playing() is None:
            seen.append(float(x.abs().mean()))
        noise = torch.randn_like(x) if steps[0] == 2 else 0.0
        return F.mse_loss(model(x / 10.0 + 0.01 * noise)[:, :1], y)

    here = Alone()
    here.session.overlap_backward()
    data = [{"x": x.clone(), "y": y} for x, y in zip(X, X.sum(1, keepdim=True), strict=True)]
    for step in here.steps(3, micro_batch=None, data=data):
        for batch in step:
            step.compute(loss, here.model, batch)
        step.apply(here.optimizer)
        steps[0] += 1
    assert len(seen) == 4 and seen[2] == seen[3]


def test_an_error_after_the_gap_is_known_does_not_hide_it() -> None:
    """BatchNorm outside of the model: it fails for the single samples that the reason is looked for with."""
    norm = nn.BatchNorm1d(8)
    text = Alone().train(lambda model, batch: F.cross_entropy(model(norm(batch[0])), batch[2]))
    assert "is not made of those of its parts" in text[0]
    with pytest.raises(shoal.ConfigError, match="strict"):
        Alone(strict=True).train(lambda model, batch: F.cross_entropy(model(norm(batch[0])), batch[2]))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.drop = torch.jit.script(nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.drop(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_draws_that_cannot_be_keyed() -> None:
    said = Alone(model=Scripted()).train(good, steps=2)
    assert sum("cannot be keyed by sample" in text for text in said) == 1
    with pytest.raises(shoal.ConfigError, match="cannot be keyed by sample"):
        Alone(strict=True, model=Scripted()).train(good)
    here = Alone(strict=True, model=Scripted())
    here.train(good, micro_batch=None)
    assert [event.quiet for event in here.events if isinstance(event, Notice) and "keyed" in event.text] == [True]


def test_draws_in_a_loop_over_samples_are_not_taken_for_coupling() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        rows = torch.stack([row + 0.1 * torch.randn(8) for row in batch[0]])
        return F.cross_entropy(model(rows), batch[2])

    assert "not keyed by sample (it draws in a loop over samples" in Alone().train(loss)[0]


def test_several_losses_of_a_part_add_up() -> None:
    worker = Alone(strict=True)
    for step in worker.steps():
        for batch in step:
            step.backward(good(worker.model, batch), retain_graph=True)
            step.backward(F.mse_loss(worker.model(batch[0])[:, :1], batch[1]))
        step.apply(worker.optimizer)
    worker.session.close()
    assert notices(worker.events) == []


def test_without_a_fork_an_own_loop_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "_can_fork", lambda: False)
    worker, seen = Alone(model=nn.Linear(8, 2)), []
    for step in worker.steps():
        for batch in step:
            seen.append(len(batch[0]))
            step.backward(summed(worker.model, batch))
        step.apply(worker.optimizer)
    worker.session.close()
    [text] = notices(worker.events)
    assert "not proven" in text and "there is none here" in text and seen == [24, 24]


def test_without_a_fork_the_trainers_loss_is_tried_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "_can_fork", lambda: False)

    def trained(loss: Any, fork: bool) -> tuple[list[str], list[Any]]:
        monkeypatch.setattr(rehearsals, "_can_fork", lambda: fork)
        worker = Alone()
        texts = worker.train(loss, steps=2)
        return texts, [value.tolist() for value in worker.model.state_dict().values()]

    for loss in (good, weighted):
        assert trained(loss, fork=True) == trained(loss, fork=False)

    def keeps(model: Any, batch: Any) -> Tensor:
        model.history.append(1)
        return good(model, batch)

    worker = Alone()
    worker.model.history = []  # type: ignore[assignment]
    [text] = worker.train(keeps)
    assert "'history'" in text and "could not be put back" in text


# -- runs --------------------------------------------------------------------------------------------------------------


@contextmanager
def reading() -> Iterator[io.StringIO]:
    """What is printed."""
    text = io.StringIO()
    with using(Settings(progress="plain", stream=text)):
        yield text


def fit(loss: Any, model: Any = None, steps: int = 2, **options: Any) -> tuple[list[Any], shoal.Trainer]:
    events: list[Any] = []
    given: dict[str, Any] = {"batch_size": 48, "steps": steps, "workers": 2, "callbacks": [events.append]}
    trainer = shoal.Trainer(net() if model is None else model, loss, sgd, DATA, **{**given, **options})
    trainer.fit()
    return events, trainer


@pytest.mark.parametrize("options", [{}, {"sync": "server:mode=bsp"}, {"deterministic": True}], ids=str)
def test_workers_tell_once_what_all_have_found(options: dict[str, Any]) -> None:
    with reading() as printed:
        events, _ = fit(weighted, steps=3, **options)
    assert len([event for event in events if isinstance(event, StepDone)]) == 3
    [notice] = [event for event in events if isinstance(event, Notice)]
    assert "weighted mean" in notice.text and not notice.quiet and notice.step == 0
    assert printed.getvalue().count("the loss is a weighted mean") == 1


@pytest.mark.parametrize("options", [{}, {"sync": "server:mode=bsp"}], ids=str)
def test_strict_refuses_before_any_step_is_applied(options: dict[str, Any]) -> None:
    events: list[Any] = []
    with pytest.raises(shoal.ConfigError, match="strict=True: the loss is a sum over the batch"):
        fit(summed, strict=True, callbacks=[events.append], **options)
    assert not [event for event in events if isinstance(event, StepDone)]


def test_one_worker_has_it_in_its_report_alone(tmp_path: Path) -> None:
    with reading() as printed:
        events, _ = fit(summed, workers=1, strict=True, run_dir=tmp_path / "run")
    [notice] = [event for event in events if isinstance(event, Notice)]
    assert notice.quiet and "is a sum over the batch" in notice.text
    assert "is a sum over the batch" not in printed.getvalue()
    assert "is a sum over the batch" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_that_goes_on_is_proven_anew(tmp_path: Path) -> None:
    events, _ = fit(good, run_dir=tmp_path)
    assert notices(events) == []
    events, _ = fit(summed, steps=4, run_dir=tmp_path, resume="last")
    [text] = notices(events)
    assert "is a sum over the batch" in text
    with pytest.raises(shoal.ConfigError, match="strict=True"):
        fit(summed, steps=6, run_dir=tmp_path, resume="last", strict=True)


@pytest.mark.parametrize("point", ["compute", "exchange"])
def test_a_death_in_the_first_step_loses_nothing_of_it(point: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-0", step=0, at=point).ledger(tmp_path)
    events, _ = fit(weighted, min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2]
    texts = [text for text in notices(events) if "weighted mean" in text]
    assert len(set(texts)) == 1 and len(texts) <= 2  # the one who told may have died with its word on the way


def test_own_loops_of_several_workers(tmp_path: Path) -> None:
    """One that asks the others in its forward is not tried; one that does not, is."""

    def train(session: shoal.Session, gathers: bool) -> list[int]:
        model = net()
        optimizer = sgd(model.named_parameters())
        session.track(model=model, optimizer=optimizer)
        counts = []
        for step in session.steps(DATA, 48, steps=2):
            for batch in step:
                own = F.normalize(model(batch[0]), dim=-1)
                parts = session.gather(own.detach()) if gathers else [own.detach()] * session.workers
                every = torch.cat([*parts[: session.rank], own, *parts[session.rank + 1 :]])
                counts.append(len(every))
                start = sum(len(part) for part in parts[: session.rank])
                step.backward(F.cross_entropy(own @ every.T, torch.arange(start, start + len(own))))
            step.apply(optimizer)
        return counts

    begun = time.monotonic()
    with reading() as printed:
        assert shoal.launch(lambda session: train(session, gathers=True), workers=2) == [[48, 48]] * 2
    assert "see each other" not in printed.getvalue()
    with pytest.raises(shoal.ConfigError, match="samples of a batch see each other"):
        shoal.launch(lambda session: train(session, gathers=False), workers=2, strict=True)
    assert time.monotonic() - begun < 20.0


def test_a_worker_whose_rehearsal_fails_counts_in_the_same_unit(tmp_path: Path) -> None:
    """Weights of workers are added, so they must be in the same unit whatever becomes of the proof on one of them."""
    texts = torch.randint(1, 9, (96, 6), generator=torch.Generator().manual_seed(1))
    here = os.getpid()
    mark = tmp_path / "first"

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

        def forward(self, text: Tensor) -> Tensor:
            return self.head(self.words(text))  # type: ignore[no-any-return]

    def loss(model: Any, batch: Any) -> Tensor:
        if rehearsals.playing() is not None and os.getpid() != here:
            try:
                mark.open("x").close()
                os._exit(1)  # the rehearsal of one of the two workers
            except FileExistsError:
                pass
        return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    def trained(workers: int) -> tuple[dict[str, Any], float]:
        torch.manual_seed(0)
        model, told = Words(), []
        data, watch = TensorDataset(texts), [lambda event: told.append(event) if isinstance(event, StepDone) else None]
        result = shoal.Trainer(model, loss, sgd, data, batch_size=37, workers=workers, callbacks=watch).fit()
        assert result.loss == pytest.approx(sum(done.loss * done.samples for done in told) / len(texts), rel=1e-6)
        return dict(model.state_dict()), result.loss

    mark.touch()
    one, one_loss = trained(1)
    mark.unlink()
    two, two_loss = trained(2)
    assert mark.exists() and two_loss == pytest.approx(one_loss, rel=1e-6)
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=1e-5, atol=1e-7)
