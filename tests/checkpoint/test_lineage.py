"""Which run `resume="last"` means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.checkpoint.lineage import Choice, Known, Lineage, choose, model_digest, read_lineage


@pytest.fixture
def here(tmp_path: Path) -> Lineage:
    """What this run is; its script is there."""
    return Lineage(script=script(tmp_path / "here"), model="m", samples=100, batch_size=20, seed=0)


def script(folder: Path) -> str:
    folder.mkdir()
    (folder / "train.py").touch()
    return str(folder / "train.py")


def known(name: str, lineage: Lineage) -> Known:
    return Known(Path("/runs") / name, lineage)


def test_the_newest_run_of_this_script_goes_on_without_a_word(here: Lineage, tmp_path: Path) -> None:
    other = known("other", replace(here, script=script(tmp_path / "there")))
    assert choose(here, [other, known("new", here), known("old", here)]) == Choice(Path("/runs/new"))


def test_a_run_of_another_script_is_named_and_left_alone(here: Lineage, tmp_path: Path) -> None:
    there = script(tmp_path / "there")
    runs = [known(f"run-{number}", replace(here, script=there)) for number in range(5)]
    folder, said = choose(here, runs)
    assert folder is None
    assert f"run-0 of {there}" in said and "and 2 more" in said and "resume='run-0'" in said
    assert choose(here, []) == Choice(None)


def test_a_script_that_was_moved_finds_its_runs_if_they_fit(here: Lineage, tmp_path: Path) -> None:
    gone = replace(here, script=str(tmp_path / "gone" / "train.py"))
    folder, said = choose(here, [known("a", replace(gone, samples=7)), known("b", gone)])
    assert folder == Path("/runs/b") and f"was started from {gone.script}, which is gone" in said
    assert choose(here, [known("a", replace(gone, model="other"))]).folder is None
    # as soon as it has a run under its new path, that is the one
    assert choose(here, [known("b", gone), known("a", here)]) == Choice(Path("/runs/a"))


def test_a_script_that_is_reached_by_another_path_is_the_same(here: Lineage, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "here")
    linked = replace(here, script=str(tmp_path / "link" / "train.py"))
    assert choose(linked, [known("a", here)]) == Choice(Path("/runs/a"))


@pytest.mark.parametrize("change", [{"model": "w"}, {"samples": 9}, {"batch_size": 1}, {"seed": 1}])
def test_of_one_script_the_run_that_fits_is_meant(here: Lineage, change: dict[str, object]) -> None:
    other = replace(here, **change)  # type: ignore[arg-type]
    folder, said = choose(here, [known("new", other), known("old", here)])
    assert folder == Path("/runs/old")
    assert f"new is newer than old, but differs in {next(iter(change))}" in said
    # none fits: what has changed is refused when the newest is restored
    assert choose(here, [known("new", other), known("old", other)]) == Choice(Path("/runs/new"))


def test_a_run_of_this_script_on_other_data_is_named_and_left_alone(here: Lineage) -> None:
    here = replace(here, data=("a", "b", ""))
    other = replace(here, data=("a", "c", "d"))
    folder, said = choose(here, [known("new", other)])
    assert folder is None and said == ("new was trained on other data of the same length; resume='new' goes on with it")
    assert choose(here, [known("new", other), known("old", here)]).folder == Path("/runs/old")
    # what is refused in words is refused
    assert choose(here, [known("new", replace(other, batch_size=1))]) == Choice(Path("/runs/new"))


@pytest.mark.parametrize("data", [None, ("a", "b", "x"), ("a", "", ""), ("x", "y")])
def test_items_that_cannot_be_compared_do_not_differ(here: Lineage, data: tuple[str, ...] | None) -> None:
    here = replace(here, data=("a", "b", ""))
    assert choose(here, [known("new", replace(here, data=data))]) == Choice(Path("/runs/new"))


def test_a_run_of_an_older_version_goes_by_what_it_recorded(here: Lineage) -> None:
    older = read_lineage({"run_id": "x", "name": "train", "batch_size": 20, "seed": 0})
    folder, said = choose(here, [known("old", older)])
    assert folder == Path("/runs/old") and "did not record its script" in said
    folder, said = choose(here, [known("old", replace(older, seed=3))])
    assert folder is None and "old of an older version" in said
    assert choose(here, [known("old", older), known("mine", here)]) == Choice(Path("/runs/mine"))


def test_without_a_script_it_is_the_folder_and_that_is_said(here: Lineage, tmp_path: Path) -> None:
    prompt = replace(here, script=str(tmp_path))
    folder, said = choose(prompt, [known("a", prompt)])
    assert folder == Path("/runs/a") and f"the newest run from the folder {tmp_path}" in said


def test_the_digest_of_a_model_is_of_names_and_shapes() -> None:
    one, same, wider = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 3)
    named = nn.ModuleDict({"layer": nn.Linear(4, 2)})
    digests = [model_digest(net.state_dict()) for net in (one, same, wider, named, nn.BatchNorm1d(2))]
    assert digests[0] == digests[1] and len(set(digests)) == 4
    assert digests[0] == model_digest({"bias": torch.ones(2), "weight": torch.ones(2, 4)})
