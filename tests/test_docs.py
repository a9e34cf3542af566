"""The documentation runs: every Python block, every example, every link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEADLINE = 90
"""Seconds for one page or example."""

NO_RUN = "<!-- no-run -->"
FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is the number of its first line of code, counted from 1."""

    language: str
    line: int
    code: list[str]
    runs: bool


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        at += 1
        if not opening:
            continue
        first = at
        while at < len(lines) and not closes(lines[at], opening["fence"]):
            at += 1
        indent = len(opening["indent"])
        code = [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[first:at]]
        yield Block(opening["language"], first + 1, code, runs=text_before(lines, first - 1) != NO_RUN)
        at += 1


def closes(line: str, fence: str) -> bool:
    return line.strip().startswith(fence) and not line.strip().strip(fence[0])


def text_before(lines: list[str], at: int) -> str:
    """The last line above `at` that is not empty."""
    return next((line.strip() for line in reversed(lines[:at]) if line.strip()), "")


def script_of(text: str) -> str:
    """The Python blocks that run, as one program with every line where the page has it, so tracebacks point there."""
    program: list[str] = []
    for block in blocks(text):
        if block.language == "python" and block.runs:
            program += [""] * (block.line - 1 - len(program)) + block.code
    return "\n".join(program) + "\n"


def run_program(path: Path, *args: str, folder: Path) -> str:
    """Run a program in a folder of its own; its output, or a failure that shows it."""
    environment = {**os.environ, "SHOAL_HOME": str(folder / "home")}
    work = folder / "work"
    work.mkdir()
    finished = subprocess.run(
        [sys.executable, str(path), *args],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert finished.returncode == 0, f"exit code {finished.returncode}\n{finished.stdout}"
    return finished.stdout


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(text):
        if block.language == "python" and not block.runs:
            compile("\n" * (block.line - 1) + "\n".join(block.code), name_of(page), "exec")
    program = script_of(text)
    if program.strip():
        script = tmp_path / f"{page.stem}.py"
        script.write_text(program, encoding="utf-8")
        run_program(script, folder=tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    run_program(example, "--quick", folder=tmp_path)


@pytest.mark.parametrize("page", LINKED_PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in relative_links(page.read_text(encoding="utf-8")) if not resolves(page, link)]
    assert not broken, f"{name_of(page)} links to what is not there: {', '.join(broken)}"


def relative_links(text: str) -> list[str]:
    prose = without_code(text)
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)", prose)
    references = re.findall(r"^\s{0,3}\[[^\]]+\]:\s*<?([^\s>]+)", prose, flags=re.MULTILINE)
    return [link for link in [*inline, *references] if not re.match(r"[a-z][a-z0-9+.-]*:", link, flags=re.IGNORECASE)]


def without_code(text: str) -> str:
    lines = text.splitlines()
    for block in blocks(text):
        for at in range(block.line - 2, min(block.line + len(block.code), len(lines))):
            lines[at] = ""
    return re.sub(r"`[^`\n]*`", "``", "\n".join(lines))


def resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as GitHub and most other renderers make them."""
    code_lines = {at for block in blocks(text) for at in range(block.line, block.line + len(block.code))}
    titles = [
        line.lstrip("#").strip()
        for at, line in enumerate(text.splitlines(), start=1)
        if re.match(r"#{1,6}\s", line) and at not in code_lines
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_project_stands_alone() -> None:
    outside = "../" + "shared"
    found = [name_of(path) for path in project_files() if outside in path.read_text(encoding="utf-8", errors="ignore")]
    assert not found, f"{outside} is mentioned in {', '.join(found)}"


def project_files() -> Iterator[Path]:
    left_out = {".git", "__pycache__", "build", "dist", "node_modules"}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name for name in folders if name not in left_out and not name.startswith(".venv") and "_cache" not in name
        ]
        yield from (Path(folder, name) for name in files if os.path.getsize(Path(folder, name)) < 1_000_000)


PAGE = """\
# A page

```python
x = 1
```

<!-- no-run -->

```python
raise RuntimeError
```

1. In a list:

   ```python
   for i in range(2):
       x += 1
   ```

```sh
# not a heading
```

See [this](#a-page), [that](gone.md "title"), ![image](pictures/one.png) and [far](https://example.org).
Not `[a](link.md)`.

[ref]: other.md#top
"""


def test_blocks_keep_their_lines() -> None:
    lines = script_of(PAGE).splitlines()
    assert lines[3] == "x = 1"
    assert lines[15:17] == ["for i in range(2):", "    x += 1"]
    assert [line for line in lines if line] == ["x = 1", "for i in range(2):", "    x += 1"]


def test_a_block_marked_no_run_is_found_but_does_not_run() -> None:
    assert [(block.language, block.runs) for block in blocks(PAGE)] == [
        ("python", True),
        ("python", False),
        ("python", True),
        ("sh", True),
    ]


def test_links_are_found_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (tmp_path / "other.md").write_text("# Top\n")
    links = relative_links(PAGE)
    assert links == ["#a-page", "gone.md", "pictures/one.png", "other.md#top"]
    assert [resolves(page, link) for link in links] == [True, False, False, True]
    assert not resolves(page, "other.md#bottom")
    assert not resolves(page, "#not-a-heading")


def test_a_program_that_fails_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("print('before')\n1 / 0\n")
    with pytest.raises(AssertionError, match=r"(?s)exit code 1.*before.*line 2.*ZeroDivisionError"):
        run_program(script, folder=tmp_path)
