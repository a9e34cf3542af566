"""Adam's moments where gradients travel encoded: what is held stays, what is applied is what was summed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.syncs import variance as module
from shoal.syncs.variance import STEADY, Variance

LARGE = [(24, 30), (40, 16)]
SMALL = (7,)
WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.8, 0.95), "eps": 1e-4},
]


class Bench:
    """Parameters, their optimizer and what holds its variance; one member."""

    def __init__(self, kind: Any = torch.optim.AdamW, *, carries: bool = True, seed: int = 1, **options: Any) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.large = [nn.Parameter(self.draw(shape)) for shape in LARGE]
        self.small = nn.Parameter(self.draw(SMALL))
        self.sizes = [0.5 + self.draw(shape).abs() for shape in (*LARGE, SMALL)]
        """Of gradients while nothing is held: with these its variance is steady at once."""
        options.setdefault("lr", 0.01)
        self.optimizer = kind([*self.large, self.small], **options)
        self.means: list[Tensor] = [torch.zeros(shape) for shape in (*LARGE, SMALL)]
        """Of gradients, as the optimizer would have them."""
        found = Variance.of(self.optimizer, self.large, [self.small], carries=carries)
        assert found is not None
        self.variance = found

    @property
    def params(self) -> list[nn.Parameter]:
        return [*self.large, self.small]

    def draw(self, shape: tuple[int, ...], size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.random) * size

    def gradients(self, size: float = 1.0) -> list[Tensor]:
        return [self.draw(shape, size) for shape in (*LARGE, SMALL)]

    def group(self, param: nn.Parameter) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(one is param for one in group["params"]))

    def plain(self, size: float = 1.0) -> None:
        """A step of the optimizer alone."""
        for param, mean, sized in zip(self.params, self.means, self.sizes, strict=True):
            param.grad = (self.draw(tuple(param.shape)).sign() * sized * size).to(param.dtype)
            mean.lerp_(param.grad, 1 - self.group(param)["betas"][0])
        self.optimizer.step()

    def hold(self, steps: int = 80) -> int:
        """Steps until it is held, which must be within so many; how many there were."""
        for number in range(steps):
            self.plain()
            if self.variance.observe():
                return number + 1
        raise AssertionError(f"it was not held within {steps} steps")

    def apply(self, grads: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """A step of one member with these gradients; what the large parameters were given."""
        sent = [grad.clone() for grad in grads]
        self.variance.mix(sent[: len(LARGE)], 1)
        for param, grad in zip(self.params, sent, strict=True):
            param.grad = grad.mul_(scale)
        given = [grad.clone() for grad in sent[: len(LARGE)]]
        with self.variance.applying(scale):
            self.optimizer.step()
        return given

    def state(self, param: nn.Parameter) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.optimizer.state[param]
        return found

    def corrected(self, param: nn.Parameter) -> Tensor:
        """What the optimizer divides by, squared."""
        state = self.state(param)
        return state["exp_avg_sq"].double() / (1 - self.group(param)["betas"][1] ** float(state["step"]))


def kept(beta: float, steps: float) -> float:
    """What stays of Adam's first moment, corrected for its start, after so many steps."""
    return beta * (1 - beta**steps) / (1 - beta ** (steps + 1))


def held_update(bench: Bench, param: nn.Parameter, moment: Tensor, variance: Tensor) -> Tensor:
    """A step of Adam with this first moment and this variance, by hand."""
    group, now = bench.group(param), param.detach().double()
    given = -moment.double() if group["maximize"] else moment.double()
    if group["decoupled_weight_decay"]:
        now = now * (1 - group["lr"] * group["weight_decay"])
    else:
        given = given + group["weight_decay"] * now
    return now - group["lr"] * given / (variance.sqrt() + group["eps"])


def close(found: Tensor, expected: Tensor, off: float) -> bool:
    """Relative to each number, or to their mean size where they are smaller."""
    return bool(((found - expected).abs() <= off * expected.abs().clamp(min=float(expected.abs().mean()))).all())


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_what_is_held_stays_whatever_comes_and_updates_are_those_of_a_held_adam(
    kind: Any, settings: dict[str, Any], way: dict[str, Any]
) -> None:
    bench = Bench(kind, **settings, **way)
    bench.hold()
    before = [bench.corrected(param) for param in bench.large]
    for size in (1.0, 0.0, 8.0, 0.1):
        grads = bench.gradients(size)
        expected = []
        for param, grad, variance in zip(bench.large, grads, before, strict=False):
            beta = kept(bench.group(param)["betas"][0], float(bench.state(param)["step"]))
            moment = beta * bench.state(param)["exp_avg"].double() + (1 - beta) * grad.double()
            expected.append((moment, held_update(bench, param, moment, variance)))
        given = bench.apply(grads)
        for param, sent, variance, (moment, weights) in zip(bench.large, given, before, expected, strict=True):
            assert torch.equal(bench.state(param)["exp_avg"], sent)
            assert close(sent.double(), moment, 1e-5)
            assert close(bench.corrected(param), variance, 1e-4)
            assert close(param.detach().double(), weights, 1e-5)
            assert not bench.state(param)["exp_avg_sq"].requires_grad


@pytest.mark.parametrize("settings", [{}, {"maximize": True}], ids=str)
def test_the_first_moment_that_is_carried_on_is_the_mean_of_the_gradients_before(settings: dict[str, Any]) -> None:
    bench = Bench(**settings)
    steps = bench.hold()
    grads = bench.gradients()
    given = bench.apply(grads)
    for mean, grad, sent in zip(bench.means, grads, given, strict=False):
        # what Adam itself makes of them: its mean, corrected for its start
        assert close(sent, (0.1 * grad + 0.9 * mean) / (1 - 0.9 ** (steps + 1)), 1e-3)


def test_groups_of_parameters_have_their_own_betas() -> None:
    bench = Bench()
    first, second = bench.large
    options = [
        {"params": [first], "betas": (0.9, 0.99), "lr": 0.1},
        {"params": [second, bench.small], "betas": (0.5, 0.9), "lr": 0.001, "weight_decay": 0.3},
    ]
    bench.optimizer = torch.optim.AdamW(options)
    bench.variance = Variance(bench.optimizer, bench.large, [bench.small])
    bench.hold()
    before, moments = [bench.corrected(param) for param in bench.large], []
    grads = bench.gradients(3.0)
    for param, grad, beta in zip(bench.large, grads, (0.9, 0.5), strict=False):
        stays = kept(beta, float(bench.state(param)["step"]))
        moments.append(stays * bench.state(param)["exp_avg"] + (1 - stays) * grad)
    expected = [held_update(bench, *each) for each in zip(bench.large, moments, before, strict=True)]
    bench.apply(grads)
    for param, moment, variance, weights in zip(bench.large, moments, before, expected, strict=True):
        assert close(bench.state(param)["exp_avg"], moment, 1e-5)
        assert close(bench.corrected(param), variance, 1e-5)
        assert close(param.detach().double(), weights, 1e-5)
    assert [group["betas"] for group in bench.optimizer.param_groups] == [(0.9, 0.99), (0.5, 0.9)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"maximize": True}),
        (torch.optim.Adam, {}),
    ],
    ids=str,
)
def test_parameters_that_are_not_encoded_are_trained_as_ever(
    kind: Any, settings: dict[str, Any], way: dict[str, Any]
) -> None:
    # so late that the first moment needs no correction any longer
    settings = {"betas": (0.6, 0.99), **settings, **way}
    bench = Bench(kind, **settings)
    twin = nn.Parameter(bench.small.detach().clone())
    alone = kind([twin], lr=0.01, **settings)
    for number in range(200):
        bench.plain()
        twin.grad = bench.small.grad
        alone.step()
        if number >= 50 and bench.variance.observe():
            break
    assert bench.variance.held
    for size in (1.0, 5.0, 0.0, 0.2) * 5:
        grads = bench.gradients(size)
        twin.grad = grads[-1].clone()
        alone.step()
        bench.apply(grads)
        torch.testing.assert_close(bench.small, twin, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            bench.state(bench.small)["exp_avg_sq"], alone.state[twin]["exp_avg_sq"], rtol=1e-4, atol=1e-9
        )


def test_one_that_is_not_encoded_and_has_its_first_gradient_late_begins_as_ever() -> None:
    bench = Bench(torch.optim.AdamW)
    bench.small.requires_grad_(False)
    for _ in range(20):
        for param, sized in zip(bench.large, bench.sizes, strict=False):
            param.grad = bench.draw(tuple(param.shape)).sign() * sized
        bench.optimizer.step()
        if bench.variance.observe():
            break
    assert bench.variance.held
    twin = nn.Parameter(bench.small.detach().clone())
    grads = bench.gradients()
    twin.grad = grads[-1].clone()
    torch.optim.AdamW([twin], lr=0.01).step()
    bench.apply(grads)
    torch.testing.assert_close(bench.small.detach(), twin.detach())


# -- renewal -----------------------------------------------------------------------------------------------------------


def squares_of(members: Sequence[Sequence[Tensor]]) -> Tensor:
    """Of all members' own gradients, of the large parameters one after the other."""
    return torch.cat([sum((one[place].square() for one in members), torch.tensor(0.0)).flatten() for place in (0, 1)])


def test_a_renewal_weighs_what_was_and_what_came_as_a_running_mean_does() -> None:
    bench = Bench(betas=(0.9, 0.9))
    at = bench.hold()
    before = [bench.corrected(param) for param in bench.large]
    total = torch.zeros(sum(param.numel() for param in bench.large))
    for _ in range(5):
        grads = bench.gradients(2.0)
        bench.apply(grads)
        total += squares_of([grads])
    bench.variance.renew(total.clone(), 1)
    parts = total.split([param.numel() for param in bench.large])
    for param, was, part in zip(bench.large, before, parts, strict=True):
        mean = part.view_as(param).double() / 5
        expected = (0.9**5 * (1 - 0.9**at) * was + (1 - 0.9**5) * mean) / (1 - 0.9 ** (at + 5))
        floor = 0.04 * expected.mean()
        assert bool((expected > 1.01 * floor).any())
        assert close(bench.corrected(param), expected.clamp(min=float(floor)), 1e-3)


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_renewals_follow_the_squares_of_what_independent_members_sum_to(common: float) -> None:
    members = 4
    bench = Bench(betas=(0.9, 0.9), lr=0.0)
    bench.hold()
    total = torch.zeros(sum(param.numel() for param in bench.large))
    renewals = 0
    for _ in range(120):
        drawn = [bench.gradients(1.5) for _ in range(members)]
        for one in drawn:
            for grad in one:
                grad.add_(common / members)
        if bench.variance.due():
            bench.variance.renew(total, members)
            total.zero_()
            renewals += 1
        bench.apply([torch.stack(parts).sum(0) for parts in zip(*drawn, strict=True)])
        total += squares_of(drawn)
    assert renewals > 3
    truth = members * 1.5**2 + common**2
    for param in bench.large:
        # the first moment's own noise is (1-β)/(1+β) of what differs between steps
        noise = members * 1.5**2 * (1 - 1 / members) * 0.1 / 1.9
        assert float(bench.corrected(param).mean()) == pytest.approx(truth + noise, rel=0.07)


def test_a_parameter_that_only_some_steps_use_is_renewed_by_its_own_steps() -> None:
    """Here the first one takes part in every step, and the second one in every other."""
    bench = Bench(betas=(0.9, 0.5), lr=0.0)
    for number in range(80):
        for param, sized in zip(bench.params, bench.sizes, strict=True):
            used = number % 2 == 0 or param is not bench.large[1]
            param.grad = bench.draw(tuple(param.shape)).sign() * sized if used else None
        bench.optimizer.step()
        if bench.variance.observe():
            break
    assert bench.variance.held
    total = torch.zeros(sum(param.numel() for param in bench.large))
    for _ in range(12):
        grads = bench.gradients(3.0)
        bench.apply(grads)
        total += squares_of([grads])
    bench.variance.renew(total, 1)
    for param in bench.large:
        assert float(bench.corrected(param).mean()) == pytest.approx(9.0, rel=0.1)


def test_what_changes_is_renewed_more_often_and_what_does_not_more_rarely() -> None:
    bench = Bench(betas=(0.9, 0.9))
    bench.hold()
    intervals = [bench.variance.state()["interval"]]
    for size in (1.0, 1.0, 9.0):
        waited = 0
        total = torch.zeros(sum(param.numel() for param in bench.large))
        while not bench.variance.due():
            bench.apply([torch.full_like(grad, size) for grad in bench.gradients()])
            waited += 1
        assert waited == intervals[-1]
        held = torch.cat([bench.corrected(param).flatten() for param in bench.large]).float()
        total = held * waited * size
        for param in bench.large:
            bench.state(param)["exp_avg"].zero_()
        bench.variance.renew(total, 1)
        intervals.append(bench.variance.state()["interval"])
    assert intervals[1:] == [2 * intervals[0], 4 * intervals[0], 2 * intervals[0]]


def test_where_members_change_squares_are_counted_from_there_on() -> None:
    bench = Bench(betas=(0.9, 0.9), lr=0.0)
    bench.hold()
    interval = int(bench.variance.state()["interval"])
    assert interval > 1
    for _ in range(interval - 1):
        bench.apply(bench.gradients(1.0))
    assert not bench.variance.due()
    bench.variance.begin_anew()
    before = [bench.corrected(param) for param in bench.large]
    total = torch.zeros(sum(param.numel() for param in bench.large))
    for _ in range(interval):
        assert not bench.variance.due()
        grads = bench.gradients(3.0)
        bench.apply(grads)
        total += squares_of([grads])
    assert bench.variance.due()
    for param in bench.large:
        bench.state(param)["exp_avg"].zero_()
    bench.variance.renew(total.clone(), 1)
    parts = total.split([param.numel() for param in bench.large])
    for param, was, part in zip(bench.large, before, parts, strict=True):
        mean, at = part.view_as(param).double() / interval, float(bench.state(param)["step"])
        was = 0.9**interval * (1 - 0.9 ** (at - interval)) * was
        expected = (was + (1 - 0.9**interval) * mean) / (1 - 0.9**at)
        assert close(bench.corrected(param), expected.clamp(min=0.04 * float(expected.mean())), 1e-3)


def test_no_element_is_held_at_next_to_nothing() -> None:
    bench = Bench()
    for sized in bench.sizes[: len(LARGE)]:
        sized[0] = 0.0  # never has a gradient
    bench.hold()
    for param in bench.large:
        found = bench.corrected(param)
        assert float(found[0].min()) == pytest.approx(0.04 * float(found.mean()), rel=0.1)
    assert float(bench.variance.gauge().min()) > 0.1


# -- when it is held ---------------------------------------------------------------------------------------------------


def test_it_is_held_once_it_is_steady_and_not_before() -> None:
    bench = Bench()
    at = bench.hold()
    assert module.FIRST_CHECK < at == bench.variance.held_at
    growing = Bench()
    for number in range(100):
        growing.plain(1.2**number)
        assert not growing.variance.observe()
    assert not growing.variance.held and not growing.variance.due()


def test_looks_compare_what_the_optimizer_divides_by() -> None:
    for factor, held in ((1 + STEADY / 2, True), (1 + 2 * STEADY, False)):
        bench = Bench()
        while int(bench.variance.state()["look_at"]) == module.FIRST_CHECK:
            bench.plain()
            assert not bench.variance.observe()
        look = int(bench.variance.state()["look_at"])
        for param in bench.large:
            bench.state(param)["step"].fill_(look)
        seen = bench.variance.state()["seen"].split([param.numel() for param in bench.large])
        for param, divisor in zip(bench.large, seen, strict=True):
            squares = (divisor.view_as(param) * factor).square() * (1 - 0.999**look)
            bench.state(param)["exp_avg_sq"].copy_(squares)
        assert bench.variance.observe() is held


def test_a_large_parameter_that_has_its_first_gradient_late_begins_as_ever() -> None:
    bench = Bench()
    late = bench.large[1]
    for _ in range(40):
        for param, sized in zip(bench.params, bench.sizes, strict=True):
            param.grad = None if param is late else bench.draw(tuple(param.shape)).sign() * sized
        bench.optimizer.step()
        if bench.variance.observe():
            break
    assert bench.variance.held and bool(torch.isfinite(bench.variance.gauge()).all())
    twin = nn.Parameter(late.detach().clone())
    alone = torch.optim.AdamW([twin], lr=0.01)
    for size in (1.0, 1.0, 4.0, 0.1) * 3:
        grads = bench.gradients(size)
        twin.grad = grads[1].clone()
        alone.step()
        bench.apply(grads)
        torch.testing.assert_close(late.detach(), twin.detach())
        torch.testing.assert_close(bench.corrected(late).float(), _corrected(alone, twin), rtol=1e-4, atol=1e-9)
    # from a renewal on it is held like any other
    bench.variance.renew(torch.full((bench.variance.gauge().numel(),), 12 * 4.0), 1)
    assert float(bench.corrected(late).mean()) == pytest.approx(4.0, rel=0.01)
    before = bench.corrected(late)
    for size in (9.0, 0.0):
        bench.apply(bench.gradients(size))
        assert close(bench.corrected(late), before, 1e-4)


def _corrected(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Tensor:
    state = optimizer.state[param]
    found: Tensor = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
    return found


def test_one_that_had_zeros_only_is_left_to_the_optimizer_until_a_renewal() -> None:
    bench = Bench()
    idle = bench.large[1]
    bench.sizes[1].zero_()
    bench.hold()
    assert bool(torch.isfinite(bench.variance.gauge()).all())
    twin = nn.Parameter(idle.detach().clone())
    alone = torch.optim.AdamW([twin], lr=0.01)
    alone.load_state_dict(
        {"state": {0: copy.deepcopy(bench.state(idle))}, "param_groups": alone.state_dict()["param_groups"]}
    )
    for size in (1.0, 4.0, 0.1):
        grads = bench.gradients(size)
        twin.grad = grads[1].clone()
        alone.step()
        bench.apply(grads)
        torch.testing.assert_close(idle.detach(), twin.detach())
    other = bench.corrected(bench.large[0])
    bench.apply(bench.gradients(5.0))
    assert close(bench.corrected(bench.large[0]), other, 1e-4)


def test_what_has_had_no_gradient_is_gauged_as_the_others_are_on_average() -> None:
    bench = Bench()
    bench.sizes[1].zero_()
    bench.hold()
    known, unknown = bench.variance.gauge().split([param.numel() for param in bench.large])
    torch.testing.assert_close(unknown, torch.full_like(unknown, float(known.mean())))


# -- what travels ------------------------------------------------------------------------------------------------------


def test_parts_of_all_members_add_up_to_the_new_moment() -> None:
    """The one that is carried on is the one that was applied: here half of what was summed."""
    bench = Bench()
    bench.hold()
    bench.apply(bench.gradients(), scale=0.5)
    moments = [bench.state(param)["exp_avg"].clone() for param in bench.large]
    drawn = [bench.gradients()[: len(LARGE)] for _ in range(3)]
    stays = kept(0.9, float(bench.state(bench.large[0])["step"]))
    expected = [
        (1 - stays) * sum((one[place] for one in drawn), torch.tensor(0.0)) + stays * moment
        for place, moment in enumerate(moments)
    ]
    for one in drawn:
        bench.variance.mix(one, 3)
    for place, whole in enumerate(expected):
        torch.testing.assert_close(sum((one[place] for one in drawn), torch.tensor(0.0)), whole)


def test_where_gradients_travel_the_first_moment_is_the_optimizers_own() -> None:
    bench = Bench(carries=False)
    bench.hold()
    assert bench.variance.fresh == 1.0
    before = [bench.corrected(param) for param in bench.large]
    for size in (1.0, 5.0):
        grads = bench.gradients(size)
        moments = [bench.state(param)["exp_avg"].clone() for param in bench.params]
        given = bench.apply(grads)
        assert all(torch.equal(sent, grad) for sent, grad in zip(given, grads, strict=False))
        for param, grad, moment in zip(bench.params, grads, moments, strict=True):
            assert close(bench.state(param)["exp_avg"], moment.lerp(grad, 0.1), 1e-5)
    for param, variance in zip(bench.large, before, strict=True):
        assert close(bench.corrected(param), variance, 1e-4)


def test_carrying_has_a_share_of_the_gradient_in_it() -> None:
    bench = Bench(betas=(0.75, 0.99))
    steps = bench.hold()
    assert bench.variance.fresh == pytest.approx(1 - kept(0.75, steps))


def test_betas_are_as_they_were_after_a_step_that_fails() -> None:
    bench = Bench()
    bench.hold()
    with pytest.raises(RuntimeError, match="on purpose"), bench.variance.applying(1.0):
        assert bench.optimizer.param_groups[0]["betas"] == (0.0, 0.999)
        raise RuntimeError("on purpose")
    assert bench.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [11, 40])
def test_it_goes_on_bit_by_bit_from_its_state(after: int) -> None:
    bench = Bench(betas=(0.9, 0.95))

    def go(bench: Bench, steps: int) -> None:
        for _ in range(steps):
            if bench.variance.held:
                grads = bench.gradients(2.0)
                if bench.variance.due():
                    bench.variance.renew(3 * squares_of([grads]), 2)
                bench.apply(grads, scale=0.75)
            else:
                bench.plain()
                bench.variance.observe()

    go(bench, after)
    assert bench.variance.held == (after > 11)
    other = Bench(betas=(0.9, 0.95))
    for param, value in zip(other.params, bench.params, strict=True):
        param.data.copy_(value)
    other.optimizer.load_state_dict(copy.deepcopy(bench.optimizer.state_dict()))
    other.variance.load(copy.deepcopy(bench.variance.state()))
    other.random.set_state(bench.random.get_state())
    for one in (bench, other):
        one.variance.begin_anew()
    go(bench, 40)
    go(other, 40)
    assert bench.variance.held and bench.variance.held_at == other.variance.held_at
    for mine, same in zip(bench.params, other.params, strict=True):
        assert torch.equal(mine, same)
        for name, value in bench.state(mine).items():
            assert torch.equal(value, other.state(same)[name]), name
    assert torch.equal(bench.variance.gauge(), other.variance.gauge())


def test_an_old_optimizer_is_held_after_one_look_more() -> None:
    bench = Bench()
    bench.plain()
    for param in bench.params:
        assert param.grad is not None
        bench.state(param)["step"].fill_(8000)
        bench.state(param)["exp_avg_sq"].copy_(param.grad.square())
    assert bench.hold() < 60


def test_the_state_of_other_parameters_is_not_taken() -> None:
    bench, other = Bench(), Bench()
    bench.hold()
    state = bench.variance.state() | {"renewed": [1, 2, 3, 4, 5, 6, 7]}
    other.variance.load(state)
    assert not other.variance.held


def test_no_state_is_no_change() -> None:
    bench = Bench()
    at = bench.hold()
    bench.variance.load(None)
    assert bench.variance.held_at == at


def test_whose_variance_cannot_be_held_is_refused_and_who_has_none_has_none() -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    assert Variance.of(torch.optim.SGD([param], lr=0.1, momentum=0.9), [param]) is None
    groups = [{"params": [param]}, {"params": [nn.Parameter(torch.zeros(2))], "amsgrad": True}]
    with pytest.raises(ConfigError, match="amsgrad=False, or another codec"):
        Variance.of(torch.optim.AdamW(groups), [param])


def test_other_dtypes() -> None:
    """The moments have the parameter's, and what is summed is single precision."""
    for dtype, off in ((torch.float64, 1e-5), (torch.bfloat16, 0.05)):
        bench = Bench(betas=(0.9, 0.9))
        bench.large = [nn.Parameter(bench.draw(shape).to(dtype)) for shape in LARGE]
        bench.small = nn.Parameter(bench.draw(SMALL).to(dtype))
        bench.optimizer = torch.optim.AdamW(bench.params, betas=(0.9, 0.9))
        bench.variance = Variance(bench.optimizer, bench.large, [bench.small])
        draw = bench.draw
        bench.draw = lambda shape, size=1.0, draw=draw, dtype=dtype: draw(shape, size).to(dtype)  # type: ignore[method-assign]
        bench.means = [mean.to(dtype) for mean in bench.means]
        bench.hold()
        before = [bench.corrected(param) for param in bench.large]
        grads = bench.gradients()
        parts = [grad.float() for grad in grads]
        bench.variance.mix(parts[:2], 1)
        for param, part in zip(bench.params, parts, strict=True):
            param.grad = part.to(dtype)
        with bench.variance.applying(1.0):
            bench.optimizer.step()
        for param, part, variance in zip(bench.large, parts, before, strict=False):
            assert torch.equal(bench.state(param)["exp_avg"], part.to(dtype))
            assert close(bench.corrected(param), variance, off)
        bench.variance.renew(torch.ones(sum(param.numel() for param in bench.large)), 2)
        assert bench.variance.gauge().dtype == torch.float32
        assert all(bench.state(param)["exp_avg_sq"].dtype == dtype for param in bench.large)
