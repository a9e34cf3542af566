"""Films: a recommender learns from MovieLens' ratings who likes what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.cli.demos.task import Source, Task

if TYPE_CHECKING:
    from torch import Tensor, nn, optim
    from torch.utils.data import TensorDataset

    from shoal.trainer.result import Result
    from shoal.trainer.trainer import Trainer

SOURCE = Source(
    what="ratings",
    package="recbole",
    module="recbole",
    install="pip install --no-deps recbole==1.2.1",
    note="only its copy of MovieLens-100k is used",
)
USERS, FILMS = 944, 1683
"""One more than there are: they are counted from 1."""
SHOWN_USER = 405
SHOWN = 5
LEAST_RATINGS = 30
"""A film with fewer is not recommended: what the model thinks of it is mostly chance."""
TEST_RATINGS = 10_000
_ARTICLES = (", The", ", A", ", An")


@dataclass(frozen=True)
class Ratings:
    """`rows` has a user, a film and stars from 1 to 5 in each row, in an order that is always the same."""

    rows: Tensor
    titles: dict[int, str]

    def split(self) -> tuple[TensorDataset, TensorDataset]:
        """The training and the test set."""
        from torch.utils.data import TensorDataset

        test, train = self.rows[:TEST_RATINGS], self.rows[TEST_RATINGS:]
        return tuple(TensorDataset(part[:, 0], part[:, 1], part[:, 2].float()) for part in (train, test))  # type: ignore[return-value]

    def favourites(self, user: int) -> list[str]:
        """Films that the user gave five stars."""
        mine = self.rows[(self.rows[:, 0] == user) & (self.rows[:, 2] == 5)]
        return [self.titles[film] for film in sorted(mine[:, 1].tolist())]

    def unseen(self, user: int) -> Tensor:
        """Films that the user has not rated and enough others have."""
        counts = self.rows[:, 1].bincount(minlength=FILMS)
        seen = self.rows[self.rows[:, 0] == user, 1].bincount(minlength=FILMS)
        return ((counts >= LEAST_RATINGS) & (seen == 0)).nonzero().flatten()


def prepare() -> Task:
    """Load MovieLens-100k from the recbole package, which is not imported. Raises ConfigError if it is missing."""
    ratings = load_ratings()
    train, test = ratings.split()
    mean = float(train.tensors[2].mean())
    usual = float((test.tensors[2] - mean).square().mean().sqrt())

    def after(trainer: Trainer, result: Result) -> str:
        films = "\n".join(f"  {title}" for title in recommend(trainer.model, ratings, SHOWN_USER))
        return (
            f"It guesses a rating to within {result.metrics['rmse']:.2f} stars; always saying {mean:.1f} is off by "
            f"{usual:.2f} (root mean square).\n"
            f"User {SHOWN_USER}, who loves {' and '.join(ratings.favourites(SHOWN_USER)[:3])}, should see:\n{films}"
        )

    return Task(
        title="Films",
        about=f"{len(train):,} ratings by 943 users of 1,682 films to train on, {len(test):,} to test with.",
        model="Tastes of users and films",
        arguments={
            "model": lambda: build_net(mean),
            "loss": loss,
            "optimizer": optimizer,
            "data": train,
            "eval_data": test,
            "predict": predict,
            "metrics": ["rmse"],
            "batch_size": 500,
        },
        epochs=10,
        example="recommender.py",
        after=after,
    )


def load_ratings() -> Ratings:
    """All ratings, and the titles by the numbers of the films."""
    import torch

    folder = SOURCE.folder() / "dataset_example" / "ml-100k"
    rated = (folder / "ml-100k.inter").read_text(encoding="utf-8").splitlines()[1:]
    rows = torch.tensor([[int(float(value)) for value in line.split("\t")[:3]] for line in rated])
    films = (folder / "ml-100k.item").read_text(encoding="utf-8").splitlines()[1:]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return Ratings(rows[order], dict(_film(line) for line in films))


def _film(line: str) -> tuple[int, str]:
    """`127<tab>Godfather, The<tab>1972<tab>…` is 127, "The Godfather (1972)"."""
    number, title, year = line.split("\t")[:3]
    for article in _ARTICLES:
        if title.endswith(article):
            title = f"{article[2:]} {title.removesuffix(article)}"
    return int(number), f"{title} ({year})"


def build_net(mean: float, width: int = 16) -> nn.Module:
    """stars = mean + how kind the user is + how good the film is + how well their tastes fit."""
    from torch import nn

    class Taste(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.films = nn.Embedding(USERS, width), nn.Embedding(FILMS, width)
            self.kind, self.good = nn.Embedding(USERS, 1), nn.Embedding(FILMS, 1)
            for table in (self.users, self.films, self.kind, self.good):
                nn.init.normal_(table.weight, std=0.05)

        def forward(self, user: Tensor, film: Tensor) -> Tensor:
            fit = (self.users(user) * self.films(film)).sum(-1)
            stars: Tensor = mean + self.kind(user)[..., 0] + self.good(film)[..., 0] + fit
            return stars

    return Taste()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    from torch.nn import functional

    user, film, stars = batch
    return functional.mse_loss(model(user, film), stars)


def predict(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    user, film, stars = batch
    return model(user, film), stars


def optimizer(params: Any) -> optim.Optimizer:
    """Decay keeps the tastes of those who rated little near zero; kindness can be told from few ratings."""
    from torch.optim import AdamW

    tastes = [(name, param) for name, param in params if name.startswith(("users", "films"))]
    others = [(name, param) for name, param in params if not name.startswith(("users", "films"))]
    return AdamW([{"params": tastes, "weight_decay": 0.8}, {"params": others, "weight_decay": 0.1}], lr=5e-3)


def recommend(model: nn.Module, ratings: Ratings, user: int) -> list[str]:
    """The unseen films that the user would give the most stars, the best first."""
    import torch

    films = ratings.unseen(user)
    with torch.no_grad():
        stars = model(torch.full_like(films, user), films)
    return [ratings.titles[film] for film in films[stars.topk(SHOWN).indices].tolist()]
