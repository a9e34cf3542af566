"""Which exchange sums the gradients of a run."""

from __future__ import annotations

from shoal.comm.group import Group
from shoal.core.errors import ConfigError
from shoal.syncs.allreduce import AloneExchange, BucketExchange, Exchange, Params, TreeExchange
from shoal.syncs.encoding import Encoding


def make_exchange(
    group: Group,
    params: Params,
    *,
    by_atom: bool,
    knowledge: bytes | None = None,
    encoding: Encoding | None = None,
    seed: int = 0,
) -> Exchange:
    """`knowledge`, the same bytes on all workers, is what an earlier exchange of the same parameters had settled.

    What does not fit the parameters is measured anew. With `encoding` gradients travel encoded.
    """
    if encoding is not None:
        # here: most runs need none of it
        from shoal.syncs.auto import AutoExchange
        from shoal.syncs.encoded import EncodedExchange

        if by_atom:
            raise ConfigError(
                f"codec={encoding.codec.name!r}: deterministic=True sums the gradients of atoms as they are, so that "
                "weights do not depend on the number of workers; use codec='none', or deterministic=False"
            )
        if encoding.codec.name == "auto":
            return AutoExchange(group, params, encoding, knowledge, seed)
        return EncodedExchange(group, encoding, seed)
    if by_atom:
        return TreeExchange(group, params)
    return AloneExchange(params) if group.size == 1 else BucketExchange(group, params, knowledge)
