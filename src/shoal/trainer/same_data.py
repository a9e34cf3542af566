"""Whether workers that have each made their data set themselves have made the same, before they train on it.

Such workers run one script each, or an own loop. A split that is drawn without a seed, or files in the order in which a
disk gives them, would have each worker train on what others test on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError
from shoal.core.keys import derive
from shoal.data.likeness import UNKNOWN, differing, digests_of, some_indices

if TYPE_CHECKING:
    from shoal.trainer.session import Session

_ADVICE = (
    "each worker has made its own data set, and all must have made the same, of the same items in the same order: "
    "Shoal shares them out itself. Give what is drawn a seed, as in random_split(data, lengths, "
    "generator=torch.Generator().manual_seed(0)); sort what has no order, as in sorted(os.listdir(folder)) and "
    "sorted(set(words)); and give every worker all of the data"
)


class SameData:
    """One worker's part in comparing. Remembers the data that was compared last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: Any = None

    def refuse_other(self, data: Any, name: str, **facts: int) -> None:
        """All workers must have the same `data`, and the same `facts`. Raises `ConfigError` on all of them."""
        size = len(data)
        told = {f"len({name})": size, "seed": self._session.seed, **facts}
        refuse_other_facts(self._session.gather_for(f"the comparison of {name}", told))
        if data is not self._last:
            self._last = data
            self._refuse_other_items(data, name, some_indices(size))

    def _refuse_other_items(self, data: Any, name: str, indices: list[int]) -> None:
        told = self._digests(data, name, indices)
        doubted = sorted(differing(told))
        if doubted:
            indices = [indices[place] for place in doubted]
            told = [[mine[place] for place in doubted] for mine in told]
            refuse_other_items(name, indices, told, self._digests(data, name, indices))

    def _digests(self, data: Any, name: str, indices: Sequence[int]) -> list[list[bytes]]:
        """Of these items, as each worker has them."""
        session = self._session
        key = derive(session.seed, "likeness", name)
        mine = digests_of(
            data, indices, name=name, key=key, close_fds=session.group.descriptors, activity=session.activity
        )
        return session.gather_for(f"the comparison of {name}", mine)


def refuse_other_facts(told: Sequence[Mapping[str, int]]) -> None:
    """From all workers: numbers that must be equal."""
    for name, first in told[0].items():
        for worker, theirs in enumerate(told):
            if theirs[name] != first:
                advice = _ADVICE if name.startswith("len(") else "it must be the same on all workers"
                raise ConfigError(f"{name} is {first} on worker 0 and {theirs[name]} on worker {worker}; {advice}")


def refuse_other_items(
    name: str, indices: Sequence[int], told: Sequence[Sequence[bytes]], again: Sequence[Sequence[bytes]]
) -> None:
    """From all workers: the digests of these items, fetched twice. Those that are others each time say nothing."""
    stable = [
        [one if one == two else UNKNOWN for one, two in zip(first, second, strict=True)]
        for first, second in zip(told, again, strict=True)
    ]
    for place, worker in differing(stable).items():
        raise ConfigError(f"{name}[{indices[place]}] is another item on worker {worker} than on worker 0; {_ADVICE}")
