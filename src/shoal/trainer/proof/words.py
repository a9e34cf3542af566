"""What a proof has found, in one plain sentence, with what to write."""

from __future__ import annotations

from shoal.trainer.proof.examine import Finding, Kind

_SEE = "(docs/losses.md)"


def sentence(finding: Finding) -> str:
    """What people should know; empty where all is well, or where nothing is known."""
    off = f"off by {finding.gap:.0e} when the first batch is computed in two parts"
    match finding.kind:
        case Kind.SUM:
            return (
                f"the loss is a sum over the batch, and is taken for a mean ({off}), so that a step depends on how the "
                f"batch is split over workers: return (sum, samples), or a mean {_SEE}"
            )
        case Kind.WEIGHTED:
            return (
                f"the loss is a weighted mean, as with class weights, masked or ignored targets or a ratio of sums "
                f"({off}), and the weights of its parts are not known: return (sum, weight), or, where the weight "
                f"depends on the model as in dice, take the ratio per sample {_SEE}"
            )
        case Kind.COUPLED:
            why = f" by {finding.detail}" if finding.detail else ""
            return (
                f"samples of a batch see each other{why}, as with in-batch negatives, mixup, a root of the mean or a "
                f"clamped divisor ({off}), so that the result depends on how the batch is split: each sample sees what "
                "its worker computes in one forward. Use workers=1 without micro_batch, gather in an own loop, or "
                f"write it per sample {_SEE}"
            )
        case Kind.EITHER:
            return (
                f"the loss of a batch is not made of those of its parts ({off}), and these are too few samples to tell "
                "why: it is a weighted mean (return (sum, weight)), or samples see each other (write it per sample) "
                f"{_SEE}"
            )
        case Kind.UNKEYED:
            return (
                f"a draw of the loss or model is not keyed by sample ({finding.detail}; {off}): it depends on how the "
                f"batch is split. Draw with torch's default generator, in a shape that holds the samples {_SEE}"
            )
        case Kind.STATEFUL:
            what = f"{finding.detail!r}" if finding.detail else "something that the model or the loss remembers"
            return (
                f"the forward changes {what} each time it runs, and it runs once per worker and micro-batch in a step: "
                f"move that into after_step=, or keep it in a buffer {_SEE}"
            )
    return ""


def by_forward(why: str) -> str:
    return (
        f"random numbers are drawn past Shoal ({why}), as by compiled graphs, C++ operators and on GPUs: all draws of "
        "a forward are seeded by its first sample instead, so the result depends on how a batch is split over workers"
    )


def anew() -> str:
    return (
        "this checkpoint was written by an earlier version: random numbers follow another rule from here on, so "
        "dropout and noise are not those that it would have gone on with"
    )


def left(name: str) -> str:
    return (
        f"the first batch was tried in this process, as there is no fork with CUDA, and the forward changed {name!r} "
        f"of the model, which could not be put back {_SEE}"
    )
