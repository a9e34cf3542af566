"""What users build on: names, signatures, fields of events and results, the words of every `--help`, and exit codes.

All of it is in `public/` as plain text. After a change that is meant,
`SHOAL_NET_WRITE=1 pytest tests/net/test_public.py` writes it anew: read the diff.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shoal
import shoal.testing
from tests.net.processes import ended

pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parent
GOLDEN = HERE / "public"


def assert_golden(name: str, text: str) -> None:
    file, lines = GOLDEN / name, [line.rstrip() for line in text.splitlines()]
    if os.environ.get("SHOAL_NET_WRITE"):
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert lines == file.read_text(encoding="utf-8").splitlines()


# -- in Python ---------------------------------------------------------------------------------------------------------


def test_names() -> None:
    modules = {"shoal": shoal, "shoal.testing": shoal.testing}
    found = [f"{home}.{name}" for home, module in modules.items() for name in sorted(module.__all__)]
    assert_golden("names.txt", "\n".join(found))
    for home, module in modules.items():
        assert all(hasattr(module, name) for name in module.__all__), home


def signature(called: Callable[..., Any]) -> str:
    """Names, kinds and defaults. How arguments are annotated is no promise."""
    found = inspect.signature(called)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    each = [f"    {part}" for part in map(str, plain)]
    for kind, mark in ((inspect.Parameter.KEYWORD_ONLY, "    *"),):
        first = next((place for place, part in enumerate(plain) if part.kind is kind), None)
        if first is not None:
            each.insert(first, mark)
    return "\n".join(each)


def test_signatures() -> None:
    called = {
        "shoal.Trainer": shoal.Trainer,
        "shoal.Trainer.fit": shoal.Trainer.fit,
        "shoal.Trainer.evaluate": shoal.Trainer.evaluate,
        "shoal.Trainer.predict": shoal.Trainer.predict,
        "shoal.launch": shoal.launch,
        "shoal.cross_validate": shoal.cross_validate,
        "shoal.Stop": shoal.Stop,
        "shoal.Scale": shoal.Scale,
        "shoal.testing.audit": shoal.testing.audit,
    }
    for name in ("track", "steps", "stop", "gather", "sum"):
        called[f"shoal.Session.{name}"] = getattr(shoal.Session, name)
    for name in ("kill", "stop", "slow", "cut", "scale", "ledger", "fired"):
        called[f"shoal.testing.FaultPlan.{name}"] = getattr(shoal.testing.FaultPlan, name)
    found = {name: signature(function) for name, function in called.items()}
    assert_golden("signatures.txt", "\n".join(f"{name}\n{text}" for name, text in (found | of_a_step()).items()))


def of_a_step() -> dict[str, str]:
    """A step is met in a loop alone, and so is what its `apply` returns."""

    def loop(session: shoal.Session) -> dict[str, str]:
        weight = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(weight.named_parameters(), lr=0.1)
        session.track(weight=weight, optimizer=optimizer)
        for step in session.steps(torch.ones(2, 1), 2):
            for batch in step:
                step.backward(weight(batch).mean())
            update = step.apply(optimizer)
        return {
            "step.backward": signature(type(step).backward),
            "step.apply": signature(type(step).apply),
            "what step.apply returns": "\n".join(f"    {name}" for name in fields(type(update))),
        }

    (found,) = shoal.launch(loop, workers=1)
    return dict(found)


def fields(kind: type[Any]) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", None) or kind.__struct_fields__)  # type: ignore[attr-defined]


def test_fields_of_events_and_results() -> None:
    kinds = [getattr(shoal, name) for name in sorted(shoal.__all__) if name[0].isupper()]
    values = [kind for kind in kinds if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)]
    assert len(values) > 12
    assert_golden("fields.txt", "\n".join("\n    ".join([kind.__name__, *fields(kind)]) for kind in values))


def test_the_tree_of_errors() -> None:
    kinds = [getattr(shoal, name) for name in sorted(shoal.__all__) if name[0].isupper()]
    errors = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert_golden("errors.txt", "\n".join(f"{each.__name__}({', '.join(map(of, each.__bases__))})" for each in errors))


def of(kind: type) -> str:
    return kind.__name__


# -- the command -------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "fails.py": "raise LookupError('nothing there')",
    "wrong.py": "import shoal; raise shoal.ConfigError('no such thing')",
    "idle.py": "import shoal",
    "seven.py": "import sys; sys.exit(7)",
    "train.py": """
        import os, signal, sys
        import torch
        import shoal

        def loss(model, batch):
            if sys.argv[1] == "fail" and torch.is_grad_enabled():
                raise LookupError("nothing there")
            return model(batch).square().mean()

        def strike(event):
            if isinstance(event, shoal.StepDone) and event.step == 2 and sys.argv[1].startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, sys.argv[1]))

        if sys.argv[1] == "SIGINT":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever it was in the tests
        steps = 100_000 if sys.argv[1].startswith("SIG") else 4
        shoal.Trainer(torch.nn.Linear(2, 1), loss, lambda params: torch.optim.SGD(params, lr=0.01), torch.randn(8, 2),
            batch_size=4, steps=steps, workers=1, run_dir=sys.argv[1], callbacks=[strike]).fit()
        """,
}
LIGHT: dict[str, tuple[list[str], int, str]] = {
    "done": (["--version"], 0, ""),
    "an empty store is one": (["runs"], 0, ""),
    "no arguments": ([], 2, ""),
    "the script fails": (["run", "fails.py"], 1, "LookupError: nothing there"),
    "the script's own code": (["run", "seven.py"], 7, ""),
    "no such command": (["dmo"], 2, "demo"),
    "no such option": (["runs", "--lmit", "3"], 2, "No such option: --lmit"),
    "no such script": (["run", "trian.py"], 2, "train.py"),
    "a setting is wrong": (["run", "wrong.py"], 2, "no such thing"),
    "the script does not train": (["run", "idle.py"], 2, "ended without training"),
    "no such run": (["show", "nobody"], 3, "There are no runs yet"),
}
TRAINING: dict[str, tuple[list[str], int, str]] = {
    "trained": (["run", "train.py", "calm"], 0, "complete"),
    "no run of that name": (["show", "nobody"], 3, "nobody"),
    "a worker fails": (["run", "train.py", "fail"], 1, "LookupError: nothing there"),
    "an option is wrong": (["run", "--sync", "allreduc", "train.py", "calm"], 2, "did you mean 'allreduce'"),
    "SIGTERM": (["run", "train.py", "SIGTERM"], 75, "stopped by SIGTERM at step"),
    "Ctrl-C": (["run", "train.py", "SIGINT"], 130, "at step"),
    "a name that several runs have": (["show", "train"], 3, "by name"),
}


SIGNALS = ("SIGTERM", "SIGINT")


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The help of every command, and what came of those that need no torch."""
    return answered("light", LIGHT, tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of commands that train, and the checkpoints of those that were stopped."""
    folder = tmp_path_factory.mktemp("training")
    found = answered("training", TRAINING, folder)
    saved = {name: sorted(path.name for path in folder.glob(f"{name}/checkpoints/step-*")) for name in SIGNALS}
    return found | {"saved": saved}


def answered(kind: str, cases: dict[str, tuple[list[str], int, str]], folder: Path) -> dict[str, Any]:
    """What `commands.py` tells of all these."""
    for name, text in SCRIPTS.items():
        (folder / name).write_text(inspect.cleandoc(text))
    given = json.dumps({kind: [args for args, _, _ in cases.values()]})
    screen = {"COLUMNS": "100", "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}
    done = ended([sys.executable, str(HERE / "commands.py")], folder, given=given, **screen)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {kind: dict(zip(cases, found[kind], strict=True))}


def test_every_help(light: dict[str, Any]) -> None:
    """Without torch: `commands.py` takes it away."""
    written = {file.stem for file in (GOLDEN / "help").glob("*.txt")}
    if not os.environ.get("SHOAL_NET_WRITE"):
        assert {name.replace(" ", "-") for name in light["help"]} == written
    for name, text in light["help"].items():
        assert_golden(f"help/{name.replace(' ', '-')}.txt", text)


@pytest.mark.parametrize("name", LIGHT)
def test_exit_codes(name: str, light: dict[str, Any]) -> None:
    assert_ended(light["light"][name], *LIGHT[name][1:])


@pytest.mark.parametrize("name", TRAINING)
def test_exit_codes_of_training(name: str, training: dict[str, Any]) -> None:
    assert_ended(training["training"][name], *TRAINING[name][1:])


def assert_ended(found: tuple[int, str, str], code: int, words: str) -> None:
    assert found[0] == code, found
    assert words in found[2], found[2]


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_leaves_a_checkpoint(name: str, training: dict[str, Any]) -> None:
    assert len(training["saved"][name]) == 1


def test_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "shoal.db").write_bytes(b"no database" * 100)
    done = ended([sys.executable, "-m", "shoal.cli", "runs"], tmp_path)
    assert done.returncode == 4, done.stderr
    assert "shoal.db" in done.stderr and "Traceback" not in done.stderr
