"""Who may import whom: rooms only those above them in `ROOMS`, and no two modules each other; the files show it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "shoal"

ROOMS = (
    "core",
    "wire",
    "store",
    "engines",
    "monitor",
    "cluster",
    "comm",
    "draws",
    "data",
    "proof",
    "metrics",
    "checkpoint",
    "layouts",
    "syncs",
    "trainer",
    "cli",
)
WITHOUT_TORCH = ("core", "wire", "store", "engines", "monitor", "cluster")
IMPORTED_BY_NOBODY = ("cli", "testing")
CYCLES_OF_TYPES = [2, 8]
"""Modules that need each other's names for annotations: a table and its setup, a session and its parts."""
# They run code that they find in what they load.
FORBIDDEN = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


def violations(path: PurePosixPath, source: str) -> list[str]:
    """What `source` imports and should not, as `path:line: reason`. `path` is relative to the package's folder."""
    found = []
    for line, module in imported_modules(path, ast.parse(source, str(path))):
        reason = objection(path, module)
        if reason:
            found.append(f"src/shoal/{path}:{line}: {reason}")
    return found


def imported_modules(path: PurePosixPath, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every import anywhere in the file, also inside functions and `if TYPE_CHECKING`, as (line, full name)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(names=names):
                origin = absolute(path, node.module or "", node.level)
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if is_import_call(function):
                yield node.lineno, name


def is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def absolute(path: PurePosixPath, module: str, level: int) -> str:
    """The full name of what `from ..module import` means in the file at `path`."""
    if level == 0:
        return module
    package = ["shoal", *path.parts[:-1]]
    return ".".join([*package[: len(package) - level + 1], *([module] if module else [])])


def objection(path: PurePosixPath, module: str) -> str | None:
    """Why the file at `path` may not import `module`, or None."""
    room = path.parts[0] if len(path.parts) > 1 else ""
    parts = module.split(".")
    if parts[0] in FORBIDDEN:
        return f"imports {parts[0]}: nothing here is pickled"
    if parts[0] != "shoal":
        if room in WITHOUT_TORCH and "torch" in parts:
            return f"imports {module}: {room} works without torch"
        return None
    return objection_within(room, parts[1] if len(parts) > 1 else "", module)


def objection_within(room: str, target: str, module: str) -> str | None:
    if room == "testing" or target == room:
        return None
    if room == "cli" and target == "testing":
        return None  # `shoal lab` is the lab for people
    if target in IMPORTED_BY_NOBODY:
        return f"imports {module}: nobody imports {target}"
    if target not in ROOMS:
        if room in ("", "cli"):
            return None
        return f"imports {module}: import from the room that defines it"
    if room == "":
        return None
    if ROOMS.index(target) > ROOMS.index(room):
        return f"imports {module}: {target} is below {room} in {', '.join(ROOMS)}"
    return None


def sources() -> list[PurePosixPath]:
    return sorted(PurePosixPath(path.relative_to(SOURCE).as_posix()) for path in SOURCE.rglob("*.py"))


def test_every_room_is_in_the_list() -> None:
    rooms = {path.parts[0] for path in sources() if len(path.parts) > 1}
    assert rooms <= {*ROOMS, "testing"}, "a new room needs a place in ROOMS"


def test_rooms_import_only_from_rooms_above() -> None:
    found = [line for path in sources() for line in violations(path, (SOURCE / path).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def imports_of(path: PurePosixPath, source: str, modules: set[str], *, typing: bool) -> set[str]:
    """Modules of `modules` that this one imports, also inside functions; with `typing`, for types alone too."""
    tree = ast.parse(source, str(path))
    if not typing:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                node.body = [ast.Pass()]
    names = {name for _, name in imported_modules(path, tree)}
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules - {module_of(path)}


def module_of(path: PurePosixPath) -> str:
    return ".".join(("shoal", *path.with_suffix("").parts)).removesuffix(".__init__")


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules in which each one leads to all others."""
    found: list[set[str]] = []
    reached = {module: reach(graph, module) for module in graph}
    for module, those in reached.items():
        if module in those and not any(module in cycle for cycle in found):
            found.append({other for other in those if module in reached[other]})
    return found


def reach(graph: dict[str, set[str]], module: str) -> set[str]:
    seen: set[str] = set()
    ahead = list(graph[module])
    while ahead:
        if (following := ahead.pop()) not in seen:
            seen.add(following)
            ahead += graph[following]
    return seen


def graph_of(*, typing: bool) -> dict[str, set[str]]:
    files = {path: (SOURCE / path).read_text(encoding="utf-8") for path in sources()}
    modules = {module_of(path) for path in files}
    return {module_of(path): imports_of(path, text, modules, typing=typing) for path, text in files.items()}


def test_no_two_modules_import_each_other() -> None:
    assert cycles(graph_of(typing=False)) == []


def test_cycles_for_types_alone_become_fewer() -> None:
    sizes = sorted(len(cycle) for cycle in cycles(graph_of(typing=True)))
    assert sizes == CYCLES_OF_TYPES, "more: mend them. Fewer: say so in CYCLES_OF_TYPES"


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert cycles(graph) == [{"b", "c"}, {"e"}]


@pytest.mark.parametrize(
    ("path", "source", "line"),
    [
        ("core/a.py", "import os\nfrom shoal.wire import frames", 2),
        ("core/a.py", "import shoal.trainer.trainer", 1),
        ("core/a.py", "from shoal import trainer", 1),
        ("core/a.py", "from shoal import Trainer", 1),
        ("core/a.py", "import shoal", 1),
        ("core/a.py", "from ..comm import group", 1),
        ("core/a.py", "from .. import comm", 1),
        ("core/deep/a.py", "from ...comm.group import Group", 1),
        ("core/a.py", "def f():\n    import torch", 2),
        ("core/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor", 3),
        ("wire/a.py", "import torch.distributed as dist", 1),
        ("engines/a.py", "from safetensors.torch import save_file", 1),
        ("engines/a.py", "import importlib\nimportlib.import_module('torch')", 2),
        ("data/a.py", "try:\n    pass\nfinally:\n    from shoal.checkpoint.files import save", 4),
        ("trainer/a.py", "from shoal.cli.main import app", 1),
        ("trainer/a.py", "from shoal.testing.leaks import LeakCheck", 1),
        ("trainer/a.py", "import pickle", 1),
        ("__init__.py", "from shoal.cli.main import app", 1),
        ("testing/a.py", "from pickle import loads", 1),
    ],
)
def test_the_walker_objects(path: str, source: str, line: int) -> None:
    found = violations(PurePosixPath(path), source)
    assert len(found) == 1
    assert found[0].startswith(f"src/shoal/{path}:{line}: ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/a.py", "import os\nfrom shoal.core.errors import ShoalError\nfrom .errors import DataError"),
        ("core/a.py", "text = 'import torch'"),
        ("core/a.py", "import torchlike"),
        ("comm/a.py", "import torch\nfrom shoal.wire import frames\nfrom shoal.core import errors"),
        ("trainer/a.py", "from shoal.syncs.allreduce import AllReduce\nfrom . import session"),
        ("cli/a.py", "from shoal import Trainer, __version__\nfrom shoal.trainer.trainer import Trainer"),
        ("testing/a.py", "from shoal.cli.main import app\nfrom shoal import Trainer"),
        ("__init__.py", "from shoal.trainer.trainer import Trainer"),
    ],
)
def test_the_walker_lets_pass(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) == []
