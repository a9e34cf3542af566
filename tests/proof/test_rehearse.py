"""Real losses and models in a rehearsal: right ones are never accused, wrong ones are, and nothing is left of it."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from shoal.proof import rehearse as rehearsals
from shoal.proof.examine import BOUND, Kind

from .rehearsing import rehearse

COUNT = 32
_generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(COUNT, *shape, generator=_generator)


X, T, SEQUENCES, IMAGES = normal(16), normal(1), normal(12, 8), normal(3, 8, 8)
Y = (X[:, 0] > 0.3).long()
LENGTHS = torch.randint(1, 13, (COUNT,), generator=_generator)
TEXTS = torch.randint(1, 50, (COUNT, 12), generator=_generator) * (torch.arange(12) < LENGTHS[:, None])
WORDS = torch.randint(1, 10, (COUNT, 4), generator=_generator)


def items(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*columns, strict=True))


CLASSES, TARGETS, PICTURES, PADDED = items(X, Y), items(X, T), items(IMAGES, Y), items(TEXTS, LENGTHS, Y)


def mlp(out: int = 2, drop: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, out))


class Text(nn.Module):
    """Attention with dropout and masks."""

    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 16), nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, words)

    def forward(self, text: Tensor, mask: Tensor | None = None) -> Tensor:
        length = text.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1) if mask is None else None
        state = self.words(text) + self.places.weight[:length]
        return self.head(self.blocks(state, mask=causal, src_key_padding_mask=mask))  # type: ignore[no-any-return]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 8, 2, dropout=0.3), nn.Linear(8, 2)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        steps = self.words(text).transpose(0, 1)
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])  # type: ignore[no-any-return]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16), nn.Linear(16, 10)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.lstm(steps.transpose(0, 1))[0]).log_softmax(-1)  # type: ignore[no-any-return]


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        made = self.decode(mean + torch.randn_like(mean) * (log / 2).exp())
        return (made - x).pow(2), -0.5 * (1 + log - mean**2 - log.exp()).sum(1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            of_it = chosen == number
            if of_it.any():
                out[of_it] = expert(x[of_it]) * weights[of_it, None]
        return out


def tokens(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten()


def token_sum(model: Any, batch: Any) -> Any:
    guesses, targets = tokens(model, batch)
    return F.cross_entropy(guesses, targets, ignore_index=0, reduction="sum"), (targets != 0).sum()


def token_mean(model: Any, batch: Any) -> Any:
    guesses, targets = tokens(model, batch)
    return cross_entropy(guesses, targets, ignore_index=0)


def per_text(model: Any, batch: Any) -> Any:
    guesses, targets = tokens(model, batch)
    losses = F.cross_entropy(guesses, targets, reduction="none").view(len(batch[0]), -1)
    counts = (batch[0][:, 1:] != 0).to(losses.dtype)
    return ((losses * counts).sum(1) / counts.sum(1).clamp(min=1)).mean()


def trimmed(some: Sequence[Any]) -> Any:
    """Padded to the longest of its own."""
    longest = max(2, *(int(length) for _, length, _ in some))
    return torch.stack([text[:longest] for text, _, _ in some]), None, None


def ctc(model: Any, batch: Any, **options: Any) -> Any:
    read = model(batch[0])
    count = read.shape[1]
    return F.ctc_loss(read, batch[1], torch.full((count,), 12), torch.full((count,), 4), **options).mean()


def penalty(model: Any, batch: Any) -> Any:
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + ((slope.norm(dim=1) - 1) ** 2).mean()


def two_tasks(model: Any, batch: Any) -> Any:
    out = model(batch[0])
    first = F.cross_entropy(out[:, :2], batch[1])
    return {"loss": first + 0.5 * F.mse_loss(out[:, 2], batch[0][:, 1]), "first": first}


def in_bfloat16(model: Any, batch: Any) -> Any:
    """Off by what half precision is off by, and it cannot be computed in double precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (model(batch[0].float()) + 1).mean().float()


def vae_mean(model: Any, batch: Any) -> Any:
    error, divergence = model(batch[0])
    return {"loss": error.mean() + divergence.mean(), "kl": divergence.mean()}


def dice_per_picture(model: Any, batch: Any) -> Any:
    guess, truth = model(batch[0]).sigmoid().flatten(1), (batch[0][:, :1] > 0).flatten(1).float()
    return (1 - (2 * (guess * truth).sum(1) + 1) / (guess.sum(1) + truth.sum(1) + 1)).mean()


def policy(model: Any, batch: Any) -> Any:
    chances = torch.distributions.Categorical(logits=model(batch[0]))
    return -(chances.log_prob(chances.sample()) * batch[1][:, 0]).mean()


def diffusion(model: Any, batch: Any) -> Any:
    noise, level = torch.randn_like(batch[0]), torch.rand(len(batch[0]), 1)
    return F.mse_loss(model(batch[0] * level + noise * (1 - level)), noise)


def with_decay(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1]) + 1e-3 * sum(param.pow(2).sum() for param in model.parameters())


def classes(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[-1])


def gaussian(model: Any, batch: Any) -> Any:
    mean, log = model(batch[0]).chunk(2, 1)
    return F.gaussian_nll_loss(mean, batch[1], log.exp())


def cnn(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Flatten(), nn.Linear(8 * 6 * 6, 2))


RIGHT: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Sequence[Any]]] = {
    "mse": (lambda: mlp(1), lambda m, b: F.mse_loss(m(b[0]), b[1]), TARGETS),
    "l1": (lambda: mlp(1), lambda m, b: F.l1_loss(m(b[0]), b[1]), TARGETS),
    "huber": (lambda: mlp(1), lambda m, b: F.smooth_l1_loss(m(b[0]), b[1]), TARGETS),
    "bce": (
        lambda: mlp(1),
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0])[:, 0], b[1].to(b[0].dtype)),
        CLASSES,
    ),
    "cross entropy": (mlp, classes, CLASSES),
    "class weights": (
        mlp,
        lambda m, b: cross_entropy(m(b[0]), b[1], m[3].weight.new_tensor([1.0, 7.0]), label_smoothing=0.1),
        CLASSES,
    ),
    "ctc by sample": (Reader, lambda m, b: ctc(m, b, reduction="none"), items(SEQUENCES, WORDS)),
    "ctc": (Reader, ctc, items(SEQUENCES, WORDS)),
    "cosine": (
        lambda: mlp(8),
        lambda m, b: F.cosine_embedding_loss(m(b[0]), m(b[0].flip(1)), b[1] * 2 - 1),
        CLASSES,
    ),
    "triplet": (lambda: mlp(8), lambda m, b: F.triplet_margin_loss(m(b[0]), m(b[0].flip(1)), m(-b[0])), TARGETS),
    "hinge": (lambda: mlp(1), lambda m, b: (1 - m(b[0])[:, 0] * (b[1] * 2 - 1)).clamp(min=0).mean(), CLASSES),
    "kl batchmean": (
        mlp,
        lambda m, b: F.kl_div(m(b[0]).log_softmax(1), F.one_hot(b[1], 2) * 0.8 + 0.1, reduction="batchmean"),
        CLASSES,
    ),
    "gaussian": (mlp, gaussian, TARGETS),
    "gpt, tokens counted": (Text, token_mean, PADDED),
    "gpt, sum and weight": (Text, token_sum, PADDED),
    "gpt, per text": (Text, per_text, PADDED),
    "bert": (
        Text,
        lambda m, b: F.cross_entropy(m(b[0], b[0] == 0)[:, 0], b[2]),
        PADDED,
    ),
    "vae": (Vae, vae_mean, CLASSES),
    "packed lstm": (Packed, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), PADDED),
    "cnn with dropout2d": (lambda: cnn(nn.ReLU(), nn.Dropout2d(0.3)), classes, PICTURES),
    "cnn with batch norm": (lambda: cnn(nn.BatchNorm2d(8), nn.ReLU()), classes, PICTURES),
    "segmentation": (
        lambda: nn.Conv2d(3, 4, 3, padding=1),
        lambda m, b: F.cross_entropy(m(b[0]), (b[0][:, 0] > 0).long()),
        PICTURES,
    ),
    "dice per picture": (lambda: nn.Conv2d(3, 1, 3, padding=1), dice_per_picture, PICTURES),
    "two tasks": (lambda: mlp(3), two_tasks, CLASSES),
    "gradient penalty": (lambda: mlp(1), penalty, TARGETS),
    "near zero": (lambda: mlp(1, 0.0), lambda m, b: m(b[0]).mean() - m(b[0] + 1e-3).mean(), TARGETS),
    "large terms that cancel": (lambda: mlp(1, 0.0), lambda m, b: (m(b[0]) + 1e4).mean() - 1e4, TARGETS),
    "zero": (lambda: mlp(1), lambda m, b: (m(b[0]) * 0).mean(), TARGETS),
    "double precision": (lambda: mlp(1).double(), lambda m, b: F.mse_loss(m(b[0].double()), b[1].double()), TARGETS),
    "bfloat16 by autocast": (mlp, in_bfloat16, CLASSES),
    "bfloat16 model": (
        lambda: mlp().bfloat16(),
        lambda m, b: F.cross_entropy(m(b[0].bfloat16()).float(), b[1]),
        CLASSES,
    ),
    "weight decay in the loss": (lambda: mlp(1), with_decay, TARGETS),
    "diffusion": (lambda: mlp(16, 0.0), diffusion, TARGETS),
    "gumbel": (lambda: mlp(4), lambda m, b: F.gumbel_softmax(m(b[0])).pow(2).sum(1).mean(), TARGETS),
    "sampled actions": (lambda: mlp(4), policy, TARGETS),
    "one random factor": (lambda: mlp(1), lambda m, b: F.mse_loss(m(b[0]) * random.random(), b[1]), TARGETS),
    "experts": (Experts, classes, CLASSES),
    "checkpointed": (mlp, lambda m, b: F.cross_entropy(checkpoint(m, b[0], use_reentrant=False), b[1]), CLASSES),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_not_accused(name: str) -> None:
    model, loss, data = RIGHT[name]
    torch.manual_seed(0)
    for samples in (COUNT,) if name == "checkpointed" else (2, 3, COUNT):  # it imports a lot at its first use
        found = rehearse(model(), loss, data, samples).finding
        assert found is not None and found.kind is Kind.PROVEN, found


@pytest.mark.parametrize("loss", [token_mean, token_sum, per_text])
def test_parts_that_are_padded_apart_are_no_gap(loss: Callable[[Any, Any], Any]) -> None:
    found = rehearse(Text(), loss, PADDED, collate=trimmed).finding
    assert found is not None and found.kind is Kind.PROVEN and found.gap < BOUND


# -- wrong ones --------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(16, 1), 0, 0.0


def annealed(model: Any, batch: Any) -> Any:
    model.calls += 1
    return F.mse_loss(model.layer(batch[0]), batch[1]) * min(1.0, model.calls / 200)


_forwards = [0]


def annealed_outside(model: Any, batch: Any) -> Any:
    _forwards[0] += 1
    return F.mse_loss(model(batch[0]), batch[1]) / _forwards[0]


def weighted(model: Any, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    weights = losses.new_tensor([1.0, 10.0])[batch[1]]
    return (losses * weights).sum() / weights.sum()


def masked(model: Any, batch: Any) -> Any:
    guesses, targets = tokens(model, batch)
    counts = targets != 0
    return (F.cross_entropy(guesses, targets, reduction="none") * counts).sum() / counts.sum()


def dice(model: Any, batch: Any) -> Any:
    chance = model(batch[0]).softmax(1)[:, 1]
    return 1 - (2 * (chance * batch[1]).sum() + 1) / (chance.sum() + batch[1].sum() + 1)


def info_nce(model: Any, batch: Any) -> Any:
    one, other = F.normalize(model(batch[0]), dim=-1), F.normalize(model(batch[0].flip(-1)), dim=-1)
    return cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def mixup(model: Any, batch: Any) -> Any:
    share, other = float(np.random.beta(1.0, 1.0)), torch.randperm(len(batch[0]))
    x, y = (share * part + (1 - share) * part[other] for part in batch)
    return F.mse_loss(model(x), y)


def vae_sum(model: Any, batch: Any) -> Any:
    error, divergence = model(batch[0])
    return error.sum() + divergence.sum()


_own = torch.Generator().manual_seed(3)


def numpy_noise(model: Any, batch: Any) -> Any:
    noise = torch.from_numpy(np.random.standard_normal(tuple(batch[0].shape))).to(batch[0].dtype)
    return F.mse_loss(model(batch[0] + noise), batch[1])


def own_noise(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch[0] + torch.randn(batch[0].shape, generator=_own)), batch[1])


def flat_noise(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch[0] + torch.randn(batch[0].numel() + 1)[1:].view_as(batch[0])), batch[1])


@pytest.mark.parametrize(
    ("model", "loss", "data", "kind", "detail"),
    [
        (lambda: mlp(1), lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum"), TARGETS, Kind.SUM, ""),
        (Vae, vae_sum, CLASSES, Kind.SUM, ""),
        (mlp, weighted, CLASSES, Kind.WEIGHTED, ""),
        (Text, masked, PADDED, Kind.WEIGHTED, ""),
        (mlp, dice, CLASSES, Kind.WEIGHTED, ""),
        (lambda: mlp(8), info_nce, CLASSES, Kind.COUPLED, ""),
        (lambda: mlp(1), mixup, TARGETS, Kind.COUPLED, "torch.randperm"),
        (lambda: mlp(1), own_noise, TARGETS, Kind.UNKEYED, "torch.randn"),
        (lambda: mlp(1), numpy_noise, TARGETS, Kind.UNKEYED, "numpy's generator"),
        (lambda: mlp(1), flat_noise, TARGETS, Kind.UNKEYED, "a draw of shape 513"),
        (Counting, annealed, TARGETS, Kind.STATEFUL, "calls"),
        (lambda: mlp(1), annealed_outside, TARGETS, Kind.STATEFUL, ""),
        (
            lambda: mlp(1).bfloat16(),
            lambda m, b: F.mse_loss(m(b[0].bfloat16()).float(), b[1], reduction="sum"),
            TARGETS,
            Kind.SUM,
            "",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
def test_wrong_losses_are_told_apart(model: Any, loss: Any, data: Any, kind: Kind, detail: str) -> None:
    torch.manual_seed(0)
    found = rehearse(model(), loss, data).finding
    assert found is not None and (found.kind, found.detail[: len(detail)]) == (kind, detail)


# -- where it is played ------------------------------------------------------------------------------------------------


def test_the_fork_says_nothing_and_leaves_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, before = mlp(1), os.listdir("/proc/self/fd")
    pids, seen = tmp_path / "pids", []

    def loss(model: Any, batch: Any) -> Any:
        print("out of the fork")
        print("err of the fork", file=sys.stderr)
        os.system("echo from a shell")
        logging.getLogger().warning("logged in the fork")
        seen.append(batch)
        model[0].weight.data.zero_()
        with pids.open("a") as file:
            file.write(f"{os.getpid()} {torch.get_num_threads()}\n")
        return F.mse_loss(model(batch[0]), batch[1])

    logging.getLogger().addHandler(handler := logging.FileHandler(tmp_path / "log"))
    print("before", end="")
    weights, state = model[0].weight.detach().clone(), torch.get_rng_state()
    assert rehearse(model, loss, TARGETS).finding is not None
    logging.getLogger().removeHandler(handler)
    handler.close()
    assert capfd.readouterr() == ("before", "") and not (tmp_path / "log").read_text()
    assert torch.equal(model[0].weight, weights) and torch.equal(torch.get_rng_state(), state) and not seen
    [line] = set(pids.read_text().splitlines())
    pid, threads = map(int, line.split())
    assert pid != os.getpid() and not Path(f"/proc/{pid}").exists() and threads == 1
    assert sorted(os.listdir("/proc/self/fd")) == sorted(before)


def test_an_error_in_a_part_proves_nothing() -> None:
    def fixed(model: Any, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]).view(COUNT), batch[1].view(COUNT))

    found = rehearse(mlp(1), fixed, TARGETS).finding
    assert found is not None and found.kind is Kind.UNPROVEN and "RuntimeError in a part" in found.detail


@pytest.mark.parametrize("code", [0, 3])
def test_a_fork_that_ends_by_itself_proves_nothing(code: int) -> None:
    found = rehearse(mlp(1), lambda model, batch: os._exit(code), TARGETS).finding
    assert found is not None and found.kind is Kind.UNPROVEN and "its process ended" in found.detail


def test_a_fork_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "_PATIENCE", 0.2)
    held = threading.Lock()

    def loss(model: Any, batch: Any) -> Any:
        held.acquire()
        return F.mse_loss(model(batch[0]), batch[1])

    held.acquire()
    begun = time.monotonic()
    found = rehearse(mlp(1), loss, TARGETS).finding
    assert found is not None and found.kind is Kind.UNPROVEN and "nothing was heard of it" in found.detail
    assert time.monotonic() - begun < 5.0


def test_a_backward_inside_reaches_nobody_who_waits_for_gradients() -> None:
    model, arrived = mlp(1), torch.zeros(1).share_memory_()
    gradient = torch.ones_like(model[0].weight)
    model[0].weight.grad = gradient
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: [None, arrived.add_(1)][0])

    def loss(model: Any, batch: Any) -> Any:
        F.l1_loss(model(batch[0]), batch[1]).backward()
        return F.mse_loss(model(batch[0]), batch[1])

    for fork in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rehearsals, "_can_fork", lambda fork=fork: fork)
            found = rehearse(model, loss, TARGETS).finding
        assert found is not None and found.kind is Kind.PROVEN
        assert model[0].weight.grad is gradient and bool((gradient == 1).all()) and not arrived.item()
    model(X).sum().backward()
    assert arrived.item() == 1
    hook.remove()


def test_items_are_copied_for_each_part() -> None:
    shared = [(x.clone(), t) for x, t in TARGETS]

    def collate(some: list[Any]) -> Any:
        for x, _ in some:
            x.mul_(2)
        return torch.stack([x for x, _ in some]), torch.stack([t for _, t in some])

    # without copies, which `Fetcher.parts` makes, each part is twice the one before
    found = rehearse(mlp(1), lambda m, b: F.mse_loss(m(b[0]), b[1]), shared, collate=collate).finding
    assert found is not None and found.kind is not Kind.PROVEN
    assert torch.equal(shared[0][0], X[0])


# -- without a fork ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "_can_fork", lambda: False)


class Remembering(nn.Module):
    """Changes all that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(16, 1), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.drop.eval()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("last", torch.zeros(16))
        self.calls, self.longest = 0, None
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest = self.fresh = len(x)
        self.mean.add_(x.mean(0))
        self.last = x[0]
        self.train()
        self.layer.weight.data.mul_(1.0)
        self.layer.bias.data.add_(1.0)
        return self.layer(self.norm(x))  # type: ignore[no-any-return]


def everything(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {name: value.tolist() for name, value in model.state_dict().items()}
    for name, part in model.named_modules():
        plain = {key: value for key, value in vars(part).items() if not key.startswith("_")}
        state[f"{name}:"] = plain
    state["generators"] = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    return state


@pytest.mark.usefixtures("_no_fork")
def test_without_a_fork_what_changed_is_put_back() -> None:
    model = Remembering()
    before, enter = everything(model), torch.autocast.__enter__
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]

    def loss(model: Any, batch: Any) -> Any:
        random.random(), np.random.random(), torch.rand(3)
        return F.mse_loss(model(batch[0]), batch[1])

    rehearsal = rehearse(model, loss, TARGETS)
    assert rehearsal.finding is not None and rehearsal.finding.kind is Kind.STATEFUL
    assert everything(model) == before and rehearsal.left == "" and torch.autocast.__enter__ is enter
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == identities

    def keeping(model: Any, batch: Any) -> Any:
        model.history.append(len(batch[0]))
        return F.mse_loss(model.layer(batch[0]), batch[1])

    assert rehearse(model, keeping, TARGETS).left == "history"


@pytest.mark.usefixtures("_no_fork")
@pytest.mark.parametrize("name", ["class weights", "bfloat16 by autocast", "large terms that cancel", "near zero"])
def test_without_a_fork_right_losses_are_not_accused(name: str) -> None:
    model, loss, data = RIGHT[name]
    built = model()
    found = rehearse(built, loss, data).finding
    assert found is not None and found.kind is Kind.PROVEN
    assert {param.dtype for param in built.parameters()} == {torch.float32}


@pytest.mark.usefixtures("_no_fork")
def test_without_a_fork_an_error_in_a_part_proves_nothing() -> None:
    calls = []

    def fixed(model: Any, batch: Any) -> Any:
        calls.append(len(batch[0]))
        return F.mse_loss(model(batch[0]).view(COUNT), batch[1].view(COUNT))

    found = rehearse(mlp(1), fixed, TARGETS).finding
    assert found is not None and found.kind is Kind.UNPROVEN and "RuntimeError in a part" in found.detail
    assert calls == [COUNT, 12]


@pytest.mark.usefixtures("_no_fork")
def test_an_autocast_around_all_of_it_is_seen() -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rehearse(mlp(1), lambda m, b: (m(b[0].float()) + 1).mean().float(), TARGETS).finding
    assert found is not None and found.kind is Kind.PROVEN and found.gap > BOUND
