"""What a proof has found, in one plain sentence, with what to write."""

from __future__ import annotations

from shoal.proof.examine import Finding, Kind

_SEE = "(docs/losses.md)"


def sentence(finding: Finding) -> str:
    """What people should know; empty where all is well, or where nothing is known."""
    off = f"off by {finding.gap:.0e} when samples of a batch are computed in two parts"
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
                f"the loss of a batch is not made of those of its parts ({off}), and it cannot be told here why: it is "
                "a weighted mean (return (sum, weight)), or samples see each other, as in BatchNorm (write it per "
                f"sample) {_SEE}"
            )
        case Kind.UNKEYED:
            return (
                f"a draw of the loss or model is not keyed by sample ({finding.detail}; {off}): it depends on how the "
                f"batch is split. Draw with torch's default generator, in a shape that holds the samples {_SEE}"
            )
        case Kind.STATEFUL:
            if not finding.detail:
                return (
                    "the same samples gave another loss when they were computed again: the model or the loss remembers "
                    "something (move that into after_step=, or keep it in a buffer), or draws from a generator of its "
                    f"own (draw from torch's default one) {_SEE}"
                )
            return (
                f"the forward changes {finding.detail!r} each time it runs, and it runs once per worker and "
                f"micro-batch in a step: move that into after_step=, or keep it in a buffer {_SEE}"
            )
    return ""


def by_forward(why: str) -> str:
    return (
        f"random numbers cannot be keyed by sample ({why}): all draws of a forward are seeded by its first sample "
        "instead, so the result depends on how a batch is split over workers (docs/limits.md)"
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
