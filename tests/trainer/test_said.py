"""What is not as in one process, and cannot be, is said once, with what to write instead; and nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cluster.channel.channel import DirectChannel
from shoal.comm.group import SoloGroup
from shoal.core.events import AnyEvent, Notice
from shoal.trainer.hooks import is_linear
from shoal.trainer.reach import modules_of
from shoal.trainer.session import Session
from shoal.trainer.stale import stale_callbacks, stale_in_loop

X = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.student = nn.Linear(4, 1)
        self.teacher = nn.Linear(4, 1).requires_grad_(False)
        self.drop = nn.Dropout(drop)
        self.calls = 0
        self.width = 0


def plain(net: Any, x: Tensor) -> Tensor:
    net.width = x.shape[1]
    return nn.functional.mse_loss(net.drop(net.student(x)), x.sum(1, keepdim=True))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def said(loss: Callable[..., Any] = plain, **options: Any) -> str:
    """The notices of a run of five steps."""
    texts: list[str] = []

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Notice) and not event.quiet:
            texts.append(event.text)

    options = {"workers": 2} | options
    net = options.pop("net", None) or Net(options.pop("drop", 0.0))
    callbacks = [hear, *options.pop("callbacks", [])]
    shoal.Trainer(net, loss, sgd, X, batch_size=32, steps=5, callbacks=callbacks, **options).fit()
    return "\n".join(texts)


Body = Callable[[Any, Any, Any], None]


def trains(loss: Callable[..., Any] = plain) -> Body:
    def body(step: Any, net: Any, optimizer: Any) -> None:
        for x in step:
            step.backward(loss(net, x))
        step.apply(optimizer)

    return body


def in_loop(body: Body, *, net: Any = None, workers: int = 1, **options: Any) -> str:
    """The notices of an own loop, here; with `workers` its group only says that it has so many."""
    texts: list[str] = []

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Notice) and not event.quiet:
            texts.append(event.text)

    net, micro = net or Net(0.1), options.pop("micro", None)
    session = Session(SoloGroup(), DirectChannel(hear, None), device=torch.device("cpu"), **options)
    optimizer = sgd(net.student.named_parameters())
    session.track(net=net, optimizer=optimizer)
    for step in session.steps(X, 32, steps=4, micro_batch=micro):
        session.workers = workers
        body(step, net, optimizer)
        session.workers = 1
        step.commit()
    session.close()
    return "\n".join(texts)


# -- in a loss ---------------------------------------------------------------------------------------------------------


def with_penalty(net: Any, x: Tensor) -> Tensor:
    net.student.weight.square().sum().backward()
    return plain(net, x)


def following(net: Any, x: Tensor) -> Tensor:
    net.teacher.weight.data.lerp_(net.student.weight.data, 0.1)
    return plain(net, x)


def decaying(net: Any, x: Tensor) -> Tensor:
    net.student.weight.data.mul_(0.99)
    return plain(net, x)


def counting(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return plain(net, x)


IN_A_LOSS = [
    (with_penalty, "the gradient of 'weight' was changed while a loss was computed", "return main + penalty"),
    (following, "'teacher.weight', which no optimizer trains, was changed", "Trainer(after_step=fn(model))"),
    (decaying, "'student.weight', which an optimizer trains, was changed", "Trainer(after_step=fn(model))"),
    (counting, "the forward changes 'calls' each time it runs", "after_step="),
]


@pytest.mark.parametrize(("loss", "what", "instead"), IN_A_LOSS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_loss_that_does_more_than_give_a_loss(loss: Any, what: str, instead: str) -> None:
    """In several forwards of one worker, which needs no second one."""
    text = in_loop(trains(loss), micro=8)
    assert text.count(what) == 1 and instead in text
    # the proof on the first batch sees too that weights which decay make another loss
    assert text.count("\n") == (loss is decaying), "one thing was done, and one is said"
    # in one forward over the whole batch it is all as in one process
    assert in_loop(trains(loss)) == ""


def test_it_is_said_once_for_all_workers() -> None:
    assert said(with_penalty).count("was changed while a loss was computed") == 1
    assert said(following, min_workers=1).count("which no optimizer trains") == 1


def test_it_is_said_with_servers() -> None:
    assert said(with_penalty, micro_batch=4, sync="server").count("was changed while a loss was computed") == 1


def test_nothing_is_said_of_a_plain_loss() -> None:
    assert said(drop=0.1) == ""
    assert said(drop=0.1, deterministic=True, after_step=lambda net: net.teacher.weight.mul_(0.9)) == ""


def test_gradients_from_before() -> None:
    net = Net()
    plain(net, X).backward()
    assert "'student.weight' came with a gradient" in said(net=net, workers=1, min_workers=1)
    text = in_loop(trains(), net=net)
    assert text.count("'weight' came with a gradient") == 1 and "zero_grad() before" in text


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_a_hook_that_is_not_linear() -> None:
    net = Net()
    net.student.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    text = said(net=net)
    assert text.count("'student.weight' has a gradient hook that is not linear") == 1
    assert "register_step_pre_hook" in text
    assert in_loop(trains(), net=net) == "", "in one forward it has the whole gradient"


def test_a_hook_that_is_linear_adds_up() -> None:
    net = Net(0.1)
    net.student.weight.register_hook(lambda gradient: gradient * torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
    assert in_loop(trains(), net=net, micro=8) == ""


def test_a_hook_on_what_was_added_up() -> None:
    net = Net(0.1)
    net.student.bias.register_post_accumulate_grad_hook(lambda param: None)
    assert "'bias' has a gradient hook" in in_loop(trains(), net=net, micro=8)


def test_which_hooks_are_linear() -> None:
    param, mask = torch.randn(5, 3), torch.tensor([1.0, 0.0, 1.0])

    def in_place(gradient: Tensor) -> None:
        gradient.mul_(mask)

    def fails(gradient: Tensor) -> Tensor:
        raise RuntimeError

    state = torch.get_rng_state()
    linear = [lambda g: g * 2, lambda g: g - g.mean(0), lambda g: None, in_place, lambda g: g * 0]
    assert all(is_linear(hook, param) for hook in linear)
    bent = [torch.abs, torch.relu, torch.sign, lambda g: g / g.norm(), lambda g: g + 0.1 * param, fails]
    bent += [lambda g: g + torch.randn_like(g), lambda g: g.clamp(-1e3, 1e3), torch.square]
    assert not any(is_linear(hook, param) for hook in bent)
    assert torch.equal(state, torch.get_rng_state())


# -- in a loop ---------------------------------------------------------------------------------------------------------


def clipping(step: Any, net: Any, optimizer: Any) -> None:
    for x in step:
        step.backward(plain(net, x))
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    step.apply(optimizer)


def clearing(step: Any, net: Any, optimizer: Any) -> None:
    for x in step:
        optimizer.zero_grad()
        step.backward(plain(net, x))
    step.apply(optimizer)


def well_done(step: Any, net: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    for x in step:
        step.backward(plain(net, x))
        step.backward(net.student.weight.square().sum())
    step.apply(optimizer, clip=1.0)
    with torch.no_grad():
        net.teacher.weight.lerp_(net.student.weight, 0.1)
    net.calls += 1


def test_clipping_by_hand() -> None:
    text = in_loop(clipping, workers=2)
    assert text.count("was changed between step.backward and step.apply") == 1
    assert "step.apply(optimizer, clip=1.0)" in text
    assert in_loop(clipping, workers=1) == "", "one worker has the gradient of the step"


def test_clipping_by_hand_in_a_deterministic_run() -> None:
    assert in_loop(clipping, deterministic=True).count("That has no effect") == 1


def test_clearing_between_batches() -> None:
    assert in_loop(clearing, micro=8).count("was cleared between two batches of a step") == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_said_of_a_plain_loop(deterministic: bool) -> None:
    assert in_loop(well_done, micro=8, deterministic=deterministic) == ""


def test_a_callback_that_changes_the_model_of_worker_0() -> None:
    """Where the script runs once per worker."""
    texts: list[str] = []
    net = Net()

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Notice):
            texts.append(event.text)
        if isinstance(event, shoal.StepDone):
            net.teacher.weight.data.add_(1.0)

    session = Session(SoloGroup(), DirectChannel(hear, None), device=torch.device("cpu"))
    optimizer = sgd(net.student.named_parameters())
    session.track(net=net, optimizer=optimizer)
    for step in session.steps(X, 32, steps=3):
        for x in step:
            step.backward(plain(net, x))
        step.apply(optimizer)
        session.workers = 2
        step.commit()
        session.workers = 1
    session.close()
    assert len(texts) == 1 and "'teacher.weight' was changed by a callback" in texts[0]


# -- callbacks ---------------------------------------------------------------------------------------------------------

NET = Net()


def looks(event: AnyEvent) -> None:
    print(NET.student.weight)


def asks_another(event: AnyEvent) -> None:
    looks(event)


def names_it_only(event: Any) -> None:
    print(event.NET)


class Keeper:
    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.seen = 0

    def __call__(self, event: AnyEvent) -> None:
        self.see()

    def see(self) -> None:
        print(self.net)

    def count(self, event: AnyEvent) -> None:
        self.seen += 1


def inner() -> Callable[[AnyEvent], None]:
    part = NET.student
    return lambda event: print(part.weight)


class Experiment:
    def __init__(self) -> None:
        self.net, self.losses = NET, [1.0]

    def callback(self) -> Callable[[AnyEvent], None]:
        return lambda event: print(self.net)

    def other(self) -> Callable[[AnyEvent], None]:
        return lambda event: print(self.losses)


@pytest.mark.parametrize(
    "callback",
    [
        looks,
        asks_another,
        Keeper(NET),
        functools.partial(lambda net, event: None, NET),
        inner(),
        lambda event, nets=(NET,): None,
        Experiment().callback(),
    ],
)
def test_a_callback_that_refers_to_the_model(callback: Any) -> None:
    (text,) = stale_callbacks([print, callback], NET)
    assert text.startswith("callbacks[1], ") and "it stays the untrained one" in text


@pytest.mark.parametrize(
    "callback", [names_it_only, Keeper(NET).count, Experiment().other(), [].append, print, Keeper(Net())]
)
def test_a_callback_that_does_not(callback: Any) -> None:
    assert stale_callbacks([callback], NET) == []


def test_a_callback_that_refers_to_the_trainer() -> None:
    trainer = shoal.Trainer(NET, plain, sgd, X)
    assert stale_callbacks([lambda event: trainer.evaluate()], NET)
    assert not stale_callbacks([lambda event: print(trainer.name)], NET)


def test_a_callback_is_told_that_its_model_is_not_trained() -> None:
    text = said(callbacks=[looks], net=NET)
    assert text.count("callbacks[1], looks, refers to the model") == 1 and "after_step=fn(model)" in text


def test_a_callback_of_an_own_loop() -> None:
    def body(session: Session) -> None:
        session.track(net=NET)

    assert modules_of(body)
    texts: list[str] = []
    told = [looks, lambda event: texts.append(event.text) if isinstance(event, Notice) else None]
    shoal.launch(body, workers=1, callbacks=told)
    assert len(texts) == 1 and texts[0].startswith("callbacks[0], looks, refers to a module that the loop uses")
    assert stale_in_loop([names_it_only], body) == []
