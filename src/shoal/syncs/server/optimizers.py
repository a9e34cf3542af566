"""The user's optimizer, cut into one optimizer for each shard; and their states, joined into one again.

An optimizer that treats each element by itself does the same to the pieces of a parameter as to the whole, so each
shard has one of the user's class, over its pieces, with the options of the user's groups. Optimizers that look at
whole tensors get whole parameters, in their shape; shards then begin and end between parameters (`cut(whole=True)`).

A *tree* is the state of one shard's optimizer, for copies, journals and checkpoints:

    {"pieces": [state of a piece, or None if there is none yet, …],   in the order of `Shard.pieces`
     "groups": [options of a group, …],                               in the order of the user's groups
     "other": {…}}                                                    state that is of no parameter, if any
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import ConfigError
from shoal.syncs.server.cutting import Piece
from shoal.syncs.server.tables import join_state

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup

ELEMENTS = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax", "NAdam", "RAdam", "ASGD"]
"""Of `torch.optim`: what they do to an element depends on its own history alone."""
TENSORS = ["Adafactor", "Muon"]
"""Of `torch.optim`: they need all of a parameter at once."""
_WHERE = ("capturable", "foreach", "fused")
"""Options that say how to compute, not what: a server may need others than the user's device."""
_OWN = ("params", "param_names")
"""What of a group is not an option."""

Tree = dict[str, Any]


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether it must have whole parameters. Raises ConfigError for one that servers cannot run."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim")
    works_on = getattr(kind, "works_on", None)
    if (known and kind.__name__ in ELEMENTS) or works_on == "elements":
        return False
    if (known and kind.__name__ in TENSORS) or works_on == "tensors":
        return True
    raise ConfigError(_refusal(kind, works_on, known))


def _refusal(kind: type, works_on: object, known: bool) -> str:
    name = kind.__name__
    if known and name == "LBFGS":
        return (
            "sync='server' cannot run LBFGS: it evaluates the whole model several times within a step, and a server "
            "has only a part of it. Use another optimizer, such as AdamW, or train on one worker"
        )
    if known and name == "SparseAdam":
        return (
            "sync='server' runs SparseAdam only for tables, nn.Embedding(sparse=True), and here it has other "
            "parameters. Give these an optimizer such as Adam"
        )
    if works_on is not None:
        return f'{name}.works_on is {works_on!r}; it must be "elements" or "tensors"'
    return (
        f"sync='server' does not know how {name} works, and each server has only a part of the parameters. If it "
        f'treats each element by itself, as SGD and Adam do, set {name}.works_on = "elements"; if it treats each '
        f"parameter by itself, as Muon does, {name}.works_on = \"tensors\"; otherwise use sync='allreduce'"
    )


def make(setup: Setup, shard: int, weights: Tensor) -> Optimizer:
    """The optimizer of a shard whose weights are these bytes, with the state that the run starts from.

    Its parameters are views of `weights`: pieces, flat (a parameter without dimensions has none here too); or whole
    parameters. See `parameters` for which is which. It has all groups of the user's optimizer, some perhaps empty.
    """
    template, whole = setup.optimizer, needs_whole(setup.optimizer)
    views = setup.cut.pieces(weights, shard)
    made = []
    for piece, view in zip(setup.cut.shards[shard].pieces, views, strict=True):
        made.append(nn.Parameter(view.view(_shape(setup, piece, whole))))
    groups = [
        {**_options(group), "params": [made[position] for position in positions]}
        for group, positions in zip(template.param_groups, _members(setup, shard), strict=True)
    ]
    try:
        optimizer = type(template)(groups, **_arguments(template))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{type(template).__name__} cannot be made for the part of the model that a server has: {error}. With "
            "sync='server' its class must take (params, **defaults), with params a list of groups"
        ) from error
    load(optimizer, setup, shard, _split(setup, shard))
    return optimizer


def parameters(optimizer: Optimizer, setup: Setup, shard: int) -> list[Tensor | None]:
    """The optimizer's parameter of each piece of the shard, in the order of `Shard.pieces`.

    None for what the user's optimizer does not have: it stays as it is.
    """
    found: list[Tensor | None] = [None] * len(setup.cut.shards[shard].pieces)
    for group, positions in zip(optimizer.param_groups, _members(setup, shard), strict=True):
        for param, position in zip(group["params"], positions, strict=True):
            found[position] = param
    return found


def state(optimizer: Optimizer, setup: Setup, shard: int) -> Tree:
    """A copy of its state and options, as a tree."""
    params = parameters(optimizer, setup, shard)
    return {
        "pieces": [
            None if param is None or param not in optimizer.state else _copied(optimizer.state[param])
            for param in params
        ],
        "groups": [_options(group) for group in optimizer.param_groups],
        "other": {key: _copied(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
    }


def load(optimizer: Optimizer, setup: Setup, shard: int, tree: Tree) -> None:
    """Make its state and options those of the tree, which is copied."""
    params = parameters(optimizer, setup, shard)
    if len(tree["pieces"]) != len(params) or len(tree["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state of {len(tree['pieces'])} pieces in {len(tree['groups'])} groups is not of shard {shard}, which "
            f"has {len(params)} in {len(optimizer.param_groups)}"
        )
    optimizer.state.clear()
    for param, value in zip(params, tree["pieces"], strict=True):
        if param is not None and value is not None:
            optimizer.state[param] = _copied(value)
    optimizer.state.update(_copied(tree["other"]))
    for group, options in zip(optimizer.param_groups, tree["groups"], strict=True):
        group.update(_options(options))  # the same dict: a schedule may have it


def join(setup: Setup, states: Mapping[int, Tree]) -> dict[str, Any]:
    """The `state_dict()` of the user's optimizer over the whole model, from the trees of all shards."""
    cut, template = setup.cut, setup.optimizer
    if missing := [shard.number for shard in cut.shards if shard.number not in states]:
        raise ValueError(f"the states of shards {', '.join(map(str, missing))} are missing")
    whole = bool(setup.params) and needs_whole(template)
    tables = {id(table.param): table for table in setup.tables}
    pieces: dict[int, list[tuple[Piece, dict[str, Any] | None]]] = {}
    for shard in cut.shards:
        for piece, value in zip(shard.pieces, states[shard.number]["pieces"], strict=True):
            pieces.setdefault(piece.param, []).append((piece, value))
    numbers = _numbers(setup)
    packed: dict[Any, Any] = {}
    groups = []
    index = 0
    first = states[cut.shards[0].number]
    for group, changed in zip(template.param_groups, first["groups"], strict=True):
        kept = {key: _copied(group[key]) for key in _WHERE if key in group}
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        groups.append({**_copied(changed), **kept, **names, "params": []})
        for param in group["params"]:
            if id(param) in numbers:
                value = _joined(setup, pieces[numbers[id(param)]], whole)
            elif id(param) in tables:
                value = join_state(setup, tables[id(param)], states)
            else:
                value = _copied(template.state[param]) if param in template.state else None
            if value is not None:
                packed[index] = value
            groups[-1]["params"].append(index)
            index += 1
    packed.update(_copied(first["other"]))
    return {"state": packed, "param_groups": groups}


def _joined(setup: Setup, pieces: list[tuple[Piece, dict[str, Any] | None]], whole: bool) -> dict[str, Any] | None:
    """The state of a parameter, of those of its pieces, which are in order."""
    piece, first = pieces[0]
    if first is None:
        return None
    if whole or not setup.cut.shapes[piece.param]:
        return dict(_copied(first))
    together = {}
    for key, value in first.items():
        if isinstance(value, Tensor) and value.dim():
            flat = torch.cat([part[key] for _, part in pieces if part is not None])
            together[key] = flat.view(setup.cut.shapes[piece.param])
        else:
            together[key] = _copied(value)
    return together


def _split(setup: Setup, shard: int) -> Tree:
    """The tree of a shard, of the state that the run starts from."""
    template, whole = setup.optimizer, needs_whole(setup.optimizer)
    owners = {number: param for param, number in _owned(setup)}
    flat: dict[int, Tensor] = {}
    pieces: list[dict[str, Any] | None] = []
    for piece in setup.cut.shards[shard].pieces:
        param = owners.get(piece.param)
        if param is None or param not in template.state:
            pieces.append(None)
        else:
            items = template.state[param].items()
            pieces.append({key: _cut_out(setup, piece, key, value, whole, flat) for key, value in items})
    return {
        "pieces": pieces,
        "groups": [_options(group) for group in template.param_groups],
        "other": {key: value for key, value in template.state.items() if not isinstance(key, Tensor)},
    }


def _cut_out(setup: Setup, piece: Piece, key: str, value: Any, whole: bool, flat: dict[int, Tensor]) -> Any:
    """What of a parameter's state is a piece's: its elements, or what is one for all of them.

    `flat` keeps what was laid flat for other pieces: that may have been a copy.
    """
    shape = setup.cut.shapes[piece.param]
    if whole or not shape or not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape != shape:
        kind = type(setup.optimizer).__name__
        raise ConfigError(
            f"{kind} keeps {key!r} of shape {tuple(value.shape)} for {setup.cut.names[piece.param]}, which has "
            f'{shape}: it does not treat each element by itself. Set {kind}.works_on = "tensors"'
        )
    if id(value) not in flat:
        flat[id(value)] = value.detach().reshape(-1)
    return flat[id(value)][piece.start : piece.stop]


def _shape(setup: Setup, piece: Piece, whole: bool) -> tuple[int, ...]:
    """Of the parameter that a server makes for a piece."""
    shape = setup.cut.shapes[piece.param]
    # A state without dimensions may be a count or an element, if its parameter has none: so leave that as it is.
    return shape if whole or not shape else (piece.stop - piece.start,)


def _numbers(setup: Setup) -> dict[int, int]:
    """The number in the cut of each parameter of the user's optimizer that is trained, by its identity."""
    return {id(param): number for param, number in _owned(setup)}


def _owned(setup: Setup) -> list[tuple[Tensor, int]]:
    numbers = {id(param): number for number, (_, param) in enumerate(setup.params)}
    owned = [
        (param, numbers[id(param)])
        for group in setup.optimizer.param_groups
        for param in group["params"]
        if id(param) in numbers
    ]
    if not owned and not setup.tables:
        raise ConfigError(
            "the optimizer has none of the parameters that are trained: nothing would be learned. Build it from "
            "model.parameters()"
        )
    return owned


def _members(setup: Setup, shard: int) -> list[list[int]]:
    """For each group of the user's optimizer, which pieces of the shard are in it; in the group's order."""
    numbers = _numbers(setup)
    positions: dict[int, list[int]] = {}
    for position, piece in enumerate(setup.cut.shards[shard].pieces):
        positions.setdefault(piece.param, []).append(position)
    members = []
    for group in setup.optimizer.param_groups:
        inside = (numbers.get(id(param), -1) for param in group["params"])
        members.append([position for number in inside for position in positions.get(number, ())])
    return members


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's options, as a server computes with them."""
    options = {key: _copied(value) for key, value in group.items() if key not in _OWN}
    if options.get("capturable"):  # for graphs of a GPU; servers compute on the CPU
        options["capturable"] = False
        if "foreach" in options:
            options["foreach"] = None  # which cannot go together with a rate that is a tensor
    return options


def _arguments(template: Optimizer) -> dict[str, Any]:
    """What its class is made with: of the defaults, those that its constructor takes. Groups have all of them."""
    taken = inspect.signature(type(template)).parameters
    defaults = _options(template.defaults)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return defaults
    return {key: value for key, value in defaults.items() if key in taken}


def _copied(value: Any) -> Any:
    """A copy in the memory of this process."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(inner) for inner in value)
    return copy.deepcopy(value)
