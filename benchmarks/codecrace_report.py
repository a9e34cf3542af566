"""What codecrace.py has measured, as tables: losses, seconds and bytes of a step, time to a loss; what was missed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from curves import Curve

HAND, NONE = "hand", "none"
HOOK = re.compile(r"hook-(\d+)(-default)?")
HOSTS = "4 hosts"

AS_NONE = ("fp16", "bf16", "int8", "powersgd")
NEAR_NONE, NEAR = ("onebit", "topk"), 0.03
TIMES_HAND, TIMES_HOOK = 5.0, 1.0
MOST_BYTES = {"fp16": 0.52, "int8": 0.28, "onebit": 0.05, "topk": 0.05}  # of what `none` sends

Found = Mapping[str, Any]


def curve_of(found: Found, arm: str, seed: int) -> Curve | None:
    """That of a hook with default buckets is that of the hook."""
    kept = found["train"].get(arm.removesuffix("-default"), {}).get(str(seed))
    if kept is None:
        return None
    evals = [(int(step), float(loss)) for step, loss in kept["evals"]]
    return Curve(evals, [(int(step), str(codec)) for step, codec in kept["phases"]])


def seeds_of(found: Found, arm: str) -> list[int]:
    return sorted(int(seed) for seed in found["train"].get(arm.removesuffix("-default"), {}))


# ---- losses


def final_losses(found: Found, arm: str, steps: int) -> list[float]:
    """Smoothed, after so many steps, by seed."""
    curves = [curve_of(found, arm, seed) for seed in seeds_of(found, arm)]
    return [curve.at(steps) for curve in curves if curve is not None and steps in dict(curve.evals)]


def seed_noise(found: Found, steps: int) -> float | None:
    """By how much means over seeds of two arms without a codec differ: twice the standard error of the difference.

    The deviation between seeds is taken from `none` and `hand` together.
    """
    groups = [losses for arm in (NONE, HAND) if len(losses := final_losses(found, arm, steps)) > 1]
    freedom = sum(len(losses) - 1 for losses in groups)
    if not freedom:
        return None
    variance = sum(statistics.variance(losses) * (len(losses) - 1) for losses in groups) / freedom
    return 2 * math.sqrt(2 * variance / min(map(len, groups)))


def base_loss(found: Found, steps: int) -> float | None:
    """The mean of the Trainer's `none`, or else of the hand-written loop."""
    losses = final_losses(found, NONE, steps) or final_losses(found, HAND, steps)
    return statistics.fmean(losses) if losses else None


# ---- times


def timed(found: Found, hosts: str = HOSTS) -> Mapping[str, Any]:
    arms: Mapping[str, Any] = found["time"].get(hosts, {}).get("arms", {})
    return arms


def per_step(found: Found, arm: str) -> dict[str, float]:
    """Median seconds of a step in each phase of an arm; phases that it was not timed in are as other arms' are."""
    own = {codec: statistics.median(values) for codec, values in timed(found)[arm]["seconds"].items() if values}
    others = {
        codec: statistics.median(values)
        for other, measured in timed(found).items()
        for codec, values in measured["seconds"].items()
        if values and codec == other.partition(":")[0]
    }
    if arm == HAND or HOOK.fullmatch(arm):
        others.pop(NONE, None)
        if HAND in timed(found):
            others[NONE] = statistics.median(timed(found)[HAND]["seconds"][NONE])
    return others | own


def seconds_to_loss(found: Found, arm: str, steps: int) -> dict[int, float | None]:
    """By seed, until the loss at which `hand` ends with the same one; None where it was not reached."""
    result: dict[int, float | None] = {}
    if arm not in timed(found):
        return {}
    for seed in seeds_of(found, arm):
        hand, curve = curve_of(found, HAND, seed), curve_of(found, arm, seed)
        if hand is None or curve is None or steps not in dict(hand.evals):
            continue
        reached = steps if arm == HAND else curve.steps_to(hand.at(steps))
        result[seed] = None if reached is None else curve.seconds(reached, per_step(found, arm))
    return result


def best_hook(found: Found, steps: int) -> dict[int, float]:
    """By seed, the least time of a hook, of any rank and with any buckets."""
    best: dict[int, float] = {}
    for arm in filter(HOOK.fullmatch, timed(found)):
        for seed, seconds in seconds_to_loss(found, arm, steps).items():
            if seconds is not None:
                best[seed] = min(seconds, best.get(seed, math.inf))
    return best


def times_faster(found: Found, arm: str, than: Mapping[int, float | None], steps: int) -> list[float]:
    """By seed; 0 where the arm did not reach the loss, and nothing where the other one did not."""
    own = seconds_to_loss(found, arm, steps)
    return [
        other / mine if (mine := own[seed]) else 0.0 for seed, other in sorted(than.items()) if other and seed in own
    ]


def bytes_share(found: Found, arm: str, hosts: str = HOSTS) -> float | None:
    """Of what the Trainer's `none` sends for a step, by kernel counters, in the phase of its own codec."""
    arms = timed(found, hosts)
    if arm not in arms or NONE not in arms or not arms[arm]["bytes"]:
        return None
    sent = arms[arm]["bytes"]
    own = sent.get(own_codec(arm)) or list(sent.values())[-1]
    return statistics.median(own) / statistics.median(arms[NONE]["bytes"][NONE])


def own_codec(arm: str) -> str:
    """What its gradients go by once it has warmed up."""
    return "powersgd" if HOOK.fullmatch(arm) else NONE if arm == HAND else arm.partition(":")[0]


# ---- tables


def show(found: Found, steps: int) -> None:
    show_losses(found, steps)
    for hosts in found["time"]:
        show_times(found, hosts)
    show_time_to_loss(found, steps)


def show_losses(found: Found, steps: int) -> None:
    base, noise = base_loss(found, steps), seed_noise(found, steps)
    if base is None:
        print("no losses yet: python benchmarks/codecrace.py train")
        return
    print(f"\nvalidation loss after {steps} steps, mean of the last three evaluations, trained unshaped")
    if noise is not None:
        print(f"noise (two standard errors of a difference between means over seeds): {noise:.4f}, {noise / base:.2%}")
    print(f"  {'arm':<20}{'seeds':>6}{'mean':>9}{'least .. most':>20}{'against none':>14}")
    for arm in found["train"]:
        if losses := final_losses(found, arm, steps):
            mean, ends = statistics.fmean(losses), f"{min(losses):.4f} .. {max(losses):.4f}"
            print(f"  {arm:<20}{len(losses):>6}{mean:>9.4f}{ends:>20}{mean / base - 1:>+14.2%}")


def show_times(found: Found, hosts: str) -> None:
    run = found["time"][hosts]
    turns = f"{run['rounds']} rounds of {run['steps_per_turn']} steps, arms in turn"
    print(f"\na step on {run['hosts']} lab hosts at {run['rate']}, {turns}; medians")
    print(f"  {'arm':<20}{'codec':<14}{'turns':>6}{'seconds':>9}{'least .. most':>18}{'MB sent':>9}{'of none':>9}")
    for arm, measured in run["arms"].items():
        share = bytes_share(found, arm, hosts)
        for codec, seconds in measured["seconds"].items():
            sent = statistics.median(measured["bytes"].get(codec, [math.nan])) / 1e6
            ends = f"{min(seconds):.3f} .. {max(seconds):.3f}"
            of_none = f"{share:.3f}" if codec == own_codec(arm) and share is not None else ""
            middle = statistics.median(seconds)
            print(f"  {arm:<20}{codec:<14}{len(seconds):>6}{middle:>9.3f}{ends:>18}{sent:>9.3f}{of_none:>9}")
    for arm, failure in run.get("failures", {}).items():
        print(f"  {arm:<20}{failure.splitlines()[0]}")
    others = f"{run['cpu_elsewhere']:.1%}"
    print(f"MB sent: by the busiest host, by kernel counters. Other processes used {others} of the CPU")


def show_time_to_loss(found: Found, steps: int) -> None:
    hand, hook = seconds_to_loss(found, HAND, steps), best_hook(found, steps)
    if not hand:
        print("\nno time to a loss: that needs `train` and `time` of hand")
        return
    print(f"\ntime to the loss at which hand ends ({steps} steps); seconds of a step from the lab, by phase")
    print(f"  {'arm':<20}{'steps':>8}{'seconds':>9}{'times hand':>24}{'times the best hook':>24}")
    for arm in timed(found):
        own = seconds_to_loss(found, arm, steps)
        reached = [seconds for seconds in own.values() if seconds is not None]
        if not reached:
            print(f"  {arm:<20}{'':>8}{'not reached' if own else 'no curve':>12}")
            continue
        needed = statistics.median(_steps_needed(found, arm, steps))
        ratios = [spread(times_faster(found, arm, than, steps)) for than in (hand, hook)]
        print(f"  {arm:<20}{needed:>8.0f}{statistics.median(reached):>9.1f}{ratios[0]:>24}{ratios[1]:>24}")
    print("medians over seeds (least .. most); 0 where a seed did not reach the loss")


def _steps_needed(found: Found, arm: str, steps: int) -> Iterator[float]:
    for seed in seeds_of(found, arm):
        hand, curve = curve_of(found, HAND, seed), curve_of(found, arm, seed)
        if arm == HAND:
            yield steps
        elif hand is not None and curve is not None and (needed := curve.steps_to(hand.at(steps))) is not None:
            yield needed


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})" if values else ""


# ---- figures to be reached


def missed(found: Found, steps: int) -> list[str]:
    return [*_losses_missed(found, steps), *_bytes_missed(found), *_times_missed(found, steps)]


def _losses_missed(found: Found, steps: int) -> Iterator[str]:
    base, noise = base_loss(found, steps), seed_noise(found, steps)
    if base is None or noise is None:
        yield "losses: there are not two seeds of none or hand yet"
        return
    for arm in found["train"]:
        name, losses = arm.partition(":")[0], final_losses(found, arm, steps)
        allowed = noise if name in AS_NONE else NEAR * base if name in NEAR_NONE else math.inf
        if losses and statistics.fmean(losses) - base > allowed:
            excess = statistics.fmean(losses) - base
            yield f"{arm}: its loss is {excess:.4f} above that of none, and {allowed:.4f} is allowed"


def _bytes_missed(found: Found) -> Iterator[str]:
    for arm in timed(found):
        most, share = MOST_BYTES.get(arm.partition(":")[0]), bytes_share(found, arm)
        if most is not None and share is not None and share > most:
            yield f"{arm}: {share:.3f} of the bytes of none, and {most:g} is allowed"


def _times_missed(found: Found, steps: int) -> Iterator[str]:
    hand, hook = seconds_to_loss(found, HAND, steps), best_hook(found, steps)
    codecs = [arm for arm in timed(found) if arm not in (HAND, NONE) and not HOOK.fullmatch(arm)]
    for than, name, least in ((hand, "the hand-written loop", TIMES_HAND), (hook, "the best hook", TIMES_HOOK)):
        if (
            than is hook
            and not hook
            and any(seconds_to_loss(found, arm, steps) for arm in filter(HOOK.fullmatch, timed(found)))
        ):
            continue  # none of them came so far
        found_ratios = {arm: values for arm in codecs if (values := times_faster(found, arm, than, steps))}
        if not found_ratios:
            yield f"time to the loss: there is no codec to compare with {name} yet"
            continue
        best = max(found_ratios, key=lambda arm: statistics.median(found_ratios[arm]))
        if statistics.median(found_ratios[best]) < least:
            ratio = spread(found_ratios[best])
            yield f"time to the loss: the best codec, {best}, is {ratio} times as fast as {name}, not {least:g}"
