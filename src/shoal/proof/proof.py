"""The proof of a run: when a loss is examined, and what is said of it, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.core.events import Notice
from shoal.proof.examine import Finding, Kind
from shoal.proof.keyed import Keyed
from shoal.proof.words import anew, by_forward, left, sentence

SECOND_LOOK = 50
"""Steps after which a loss is examined once more, or half of an epoch if that is less: at the start the losses of all
samples are much alike."""

_OPEN = (Kind.PROVEN, Kind.UNPROVEN)
"""There may be more to be seen."""


class Proof:
    """One worker's. `tell` takes notices; those of worker 0 are read."""

    def __init__(self, keyed: Keyed, tell: Callable[[Notice], None], *, strict: bool) -> None:
        self.keyed = keyed
        self.possible = True
        """Whether forwards can be computed in a fork."""
        self._tell = tell
        self.strict = strict
        self._again_at = -1
        self._said_by_forward = False
        self._older = False
        self._alone = False

    def begin(self, start: int, course: Course, *, older: bool) -> None:
        """A loop begins with this step; `older`: from a checkpoint that knows nothing of draws."""
        self._again_at = start + min(SECOND_LOOK, max(1, course.steps_per_epoch // 2))
        self._older = older

    def leave_out(self, why: str) -> None:
        """This loss cannot be tried on parts of a batch."""
        self.possible = False
        self._say(Finding(Kind.UNPROVEN, detail=why), 0, refuses=False, quiet=True)

    def due(self, step: int, *, again: bool) -> bool:
        """Whether the loss is to be examined in this step; `again`: this is who may look once more, and where."""
        if not self.possible or not self.keyed.proven:
            return self.possible
        accused = self.keyed.finding is not None and self.keyed.finding.kind not in _OPEN
        again = again and not accused and 0 <= self._again_at <= step
        self._again_at = -1 if again else self._again_at
        return again

    def examined(self, finding: Finding, step: int, *, counts: bool, alone: bool) -> None:
        """Take in what a rehearsal has found. `counts`: it was of the loss, not only of new draws. `alone`: one worker
        computes whole batches, so that what is found changes nothing.

        Raises ConfigError in strict runs, for what was found on the first batch.
        """
        first = not self.keyed.proven
        self._alone = alone
        self.keyed.found(finding, counts=counts and first)
        if not counts:
            self.keyed.guess()  # where the rehearsal has not been there
        elif first or finding.kind is not Kind.UNPROVEN:
            self._say(finding, step, refuses=first and self.strict and not alone, quiet=alone)
            # it was just said, in other words
            self._said_by_forward = self._said_by_forward or (finding.kind is Kind.UNKEYED and bool(finding.by_forward))
        self.say_of_draws(step)

    def _say(self, finding: Finding, step: int, *, refuses: bool, quiet: bool) -> None:
        text = sentence(finding)
        if text and refuses:
            raise ConfigError(f"strict=True: {text}")
        if finding.kind is Kind.UNPROVEN:
            quiet, text = True, f"the loss was not proven on the first batch: {finding.detail}"
        if text:
            self._tell(Notice(step=step, text=text, quiet=quiet))

    def say_what_is_left(self, name: str, step: int) -> None:
        """`name` was changed by a rehearsal, for good; nothing if it is empty."""
        if name:
            self._tell(Notice(step=step, text=left(name)))

    def agree(self, told: Sequence[Mapping[str, Any]], step: int) -> None:
        """All workers have told what is new to them about draws."""
        self.keyed.agree(told)
        self.say_of_draws(step)

    def say_of_draws(self, step: int) -> None:
        """Raises ConfigError in strict runs, if draws cannot be keyed."""
        why = self.keyed.keying.by_forward
        if why and not self._said_by_forward:
            self._said_by_forward = True
            if self.strict and not self._alone:
                raise ConfigError(f"strict=True: {by_forward(why)}")
            self._tell(Notice(step=step, text=by_forward(why), quiet=self._alone))
        if self._older and self.keyed.draws:
            self._older = False
            self._tell(Notice(step=step, text=anew()))
