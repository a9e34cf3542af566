"""Train a GAN on scikit-learn's handwritten digits: an own loop with two networks, two optimizers, two phases per step.

    pip install scikit-learn
    python examples/gan.py --workers 2

A step is one batch of all workers together. Its first phase trains the critic to tell real images from made ones, its
second phase trains the maker to deceive the critic. Random numbers in a step's body are keyed by the step and its
samples, not by the worker: the result is the same for any number of workers, up to rounding.
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn.functional import softplus

import shoal

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("This example reads its images from scikit-learn, which is missing: pip install scikit-learn")

parser = argparse.ArgumentParser(description="Train a GAN on handwritten digits.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
args = parser.parse_args()

NOISE, WIDTH = 16, 128
images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1  # 1,797 of 8×8 pixels, −1 to 1


def noisy(pictures):
    """What the critic gets to see; sharp pictures would make its task too easy."""
    return pictures + 0.5 * torch.randn_like(pictures)


def train(session):
    torch.manual_seed(0)
    hidden = [nn.Linear(NOISE, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
    maker = nn.Sequential(*hidden, nn.ReLU(), nn.Linear(WIDTH, 64), nn.Tanh())
    leaky = nn.LeakyReLU(0.2)
    critic = nn.Sequential(nn.Linear(64, WIDTH), leaky, nn.Linear(WIDTH, WIDTH), leaky, nn.Linear(WIDTH, 1))
    make = torch.optim.Adam(maker.named_parameters(), lr=1e-3, betas=(0.5, 0.99))
    judge = torch.optim.Adam(critic.named_parameters(), lr=2e-3, betas=(0.5, 0.99))
    session.track(maker=maker, critic=critic, make=make, judge=judge)
    noise = torch.randn(200, NOISE)
    before = maker(noise)

    for step in session.steps(images, batch_size=60, epochs=1 if args.quick else 60):
        for real in step:
            made = maker(torch.randn(len(real), NOISE)).detach()
            scores, others = critic(noisy(real)), critic(noisy(made))
            step.log(right=((scores > 0).float().mean() + (others < 0).float().mean()) / 2)
            step.backward(softplus(-scores).mean() + softplus(others).mean())
        judged = step.apply(judge)
        for real in step:
            made = maker(torch.randn(len(real), NOISE))
            step.backward(softplus(-critic(noisy(made))).mean())
        step.apply(make)

    return {"before": before, "after": maker(noise), "right": judged.logs["right"]}


def unlike(made):
    """How far made images are from the real one that is most like them: per pixel, 0 is equal and 1 black for white."""
    return torch.cdist(made, images).amin(1).mean() / 16


result = shoal.launch(train, workers=args.workers)[0]
for rows in result["after"][:6].view(6, 8, 8).unbind(1):
    print("  ".join("".join(2 * " .:*#"[int((pixel + 1) * 2.49)] for pixel in image) for image in rows.tolist()))
print(f"made digits differ from the nearest real one by {unlike(result['before']):.2f} before, ", end="")
print(f"{unlike(result['after']):.2f} after; the critic is right about {result['right']:.0%} of the last batch")
