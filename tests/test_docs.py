"""The documentation holds: every Python block and example runs, every link leads somewhere, every command exists."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import typer

from tests.warm import Warm

ROOT = Path(__file__).parent.parent
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [README, CHINESE, *sorted((ROOT / "docs").rglob("*.md"))]
LINKED_PAGES = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "benchmarks/README.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEADLINE = 90
"""Seconds for one page or example."""
NOT_YET: frozenset[str] = frozenset()
"""Commands and options of `shoal` that pages speak of before they are there."""

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


def run_warm(warm: Warm, path: Path, *args: str, folder: Path) -> str:
    """The same, in a fork of a process that has imported torch and shoal."""
    work = folder / "work"
    work.mkdir()
    done = warm.run(str(path), *args, folder=work, environment={**os.environ, "SHOAL_HOME": str(folder / "home")})
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Future[str]]:
    """The programs of all pages and examples that are tested, run: most of their time is importing, so one per core."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params for item in here if hasattr(item, "callspec")]
    paths = [path for params in asked for path in (params.get("ran"), params.get("example")) if path is not None]
    free: SimpleQueue[Warm] = SimpleQueue()

    def run(path: Path, folder: Path) -> str:
        if path == README:  # as a user starts it
            return run_page_or_example(path, folder, run_program)
        warm = free.get()
        try:
            return run_page_or_example(path, folder, partial(run_warm, warm))
        finally:
            free.put(warm)

    with ExitStack() as stack:
        crew = min(len(paths), os.cpu_count() or 1)
        for _ in range(crew):
            free.put(stack.enter_context(Warm("sklearn.datasets", deadline=DEADLINE)))
        with ThreadPoolExecutor(crew or 1) as pool:
            return {path: pool.submit(run, path, tmp_path_factory.mktemp(path.stem)) for path in paths}


def run_page_or_example(path: Path, folder: Path, run_program: Callable[..., str]) -> str:
    if path.suffix == ".py":
        return run_program(path, "--quick", folder=folder)
    program = script_of(path.read_text(encoding="utf-8"))
    if not program.strip() or path == CHINESE:  # whose program is that of README.md, as another test says
        return ""
    script = folder / f"{path.stem}.py"
    script.write_text(program, encoding="utf-8")
    return run_program(script, folder=folder)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_that_do_not_run_are_python_all_the_same(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python" and not block.runs:
            compile("\n" * (block.line - 1) + "\n".join(block.code), name_of(page), "exec")


@pytest.mark.timeout(600)  # the first one waits for all
@pytest.mark.parametrize("ran", PAGES, ids=name_of)
def test_python_blocks_run(ran: Path, programs: dict[Path, Future[str]]) -> None:
    programs[ran].result()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_run(example: Path, programs: dict[Path, Future[str]]) -> None:
    programs[example].result()


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
    return re.sub(r"`[^`\n]*`", "``", "\n".join(blank_blocks(text)))


def blank_blocks(text: str) -> list[str]:
    """The lines of a page, those of fenced blocks empty."""
    lines = text.splitlines()
    for block in blocks(text):
        for at in range(block.line - 2, min(block.line + len(block.code), len(lines))):
            lines[at] = ""
    return lines


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


@dataclass(frozen=True)
class Command:
    """A call of `shoal` on a page: `words` are what follows `shoal`."""

    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}: shoal {shlex.join(self.words)}"


def commands(text: str) -> Iterator[Command]:
    """The calls of `shoal` in shell blocks, and those written in the prose as `shoal something`."""
    for block in blocks(text):
        if block.language in ("sh", "bash", "console"):
            code = "\n".join(block.code)
            for whole in re.finditer(r"(?:[^\n]*\\\n)*[^\n]+", code):
                yield from calls(whole[0].replace("\\\n", " "), block.line + code.count("\n", 0, whole.start()))
    for at, line in enumerate(blank_blocks(text), start=1):
        for code in re.findall(r"`(shoal [^`]+)`", line):
            yield from calls(code, at)


def calls(line: str, at: int) -> Iterator[Command]:
    """`shoal` in a line of shell, after variables, in a pipe or a list of commands."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                words.pop(0)
            if words and Path(words[0]).name == "shoal":
                yield Command(at, tuple(words[1:]))
            words = []
        else:
            words.append(word)


def the_command_line() -> Any:
    from shoal.cli.main import app

    return typer.main.get_command(app)


def wrong_in(command: Command, line: Any) -> str | None:
    """What the command line does not know of a command, if anything."""
    name, *rest = command.words or ("--help",)
    if name in NOT_YET:
        return None
    if name.startswith("-"):
        owner, rest = line, [name, *rest]
    elif name in line.commands:
        owner = line.commands[name]
        while rest and rest[0] in getattr(owner, "commands", {}):
            owner, rest = owner.commands[rest[0]], rest[1:]
    else:
        return f"{command}: there is no command {name!r}"
    known = {"-h", "--help"} | {name for each in owner.params for name in [*each.opts, *each.secondary_opts]}
    given = rest[: rest.index("--")] if "--" in rest else rest
    options = [word.partition("=")[0] for word in given if re.match(r"--?[a-zA-Z]", word)]
    unknown = [option for option in options if option not in known]
    return f"{command}: there is no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", LINKED_PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    line = the_command_line()
    wrong = [complaint for each in commands(page.read_text(encoding="utf-8")) if (complaint := wrong_in(each, line))]
    assert not wrong, "\n".join([name_of(page), *wrong])


def test_what_is_not_there_yet_is_not_there() -> None:
    line = the_command_line()
    there = NOT_YET & {*line.commands, *(name for each in line.params for name in each.opts)}
    assert not there, f"take {', '.join(sorted(there))} out of NOT_YET: the pages are to be checked against them"


def test_both_readmes_say_the_same() -> None:
    english, chinese = (page.read_text(encoding="utf-8") for page in (README, CHINESE))
    assert shell_of(english)[:2] == ["make demo", "make test"]
    assert shell_of(english) == shell_of(chinese)
    assert all_links(english) - {CHINESE.name} == all_links(chinese) - {README.name}
    assert CHINESE.name in all_links(english) and README.name in all_links(chinese)
    assert ast.dump(ast.parse(script_of(english))) == ast.dump(ast.parse(script_of(chinese)))
    assert shape(english) == shape(chinese), "headings, items or rows of tables differ"


def shell_of(text: str) -> list[str]:
    """The command lines of the shell blocks, without comments."""
    lines = [line for block in blocks(text) if block.language == "sh" for line in block.code]
    return [code for line in lines if (code := shlex.join(shlex.split(line, comments=True)))]


def all_links(text: str) -> set[str]:
    return set(re.findall(r"\]\(\s*<?([^)\s>]+)", without_code(text)))


def shape(text: str) -> list[str]:
    return [mark[0] for line in blank_blocks(text) if (mark := re.match(r"#+ |- |\|", line))]


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


COMMANDS = """\
Try `shoal demo --workers 2` and `shoal.launch`, or `shoal fly`.

```sh
shoal demo -w 2 --resume=last  # shoal crawl
A=1 .venv/bin/shoal demo \\
    --wings 2 | shoal --version; shoal swim -- --deep
shoal sink
```

```python
text = "shoal dive"
```
"""


def test_commands_are_found_and_judged() -> None:
    found = list(commands(COMMANDS))
    assert [(each.line, " ".join(each.words)) for each in found] == [
        (4, "demo -w 2 --resume=last"),
        (5, "demo --wings 2"),
        (5, "--version"),
        (5, "swim -- --deep"),
        (7, "sink"),
        (1, "demo --workers 2"),
        (1, "fly"),
    ]
    line = the_command_line()
    wrong = [complaint for each in found if (complaint := wrong_in(each, line))]
    assert wrong == [
        "line 5: shoal demo --wings 2: there is no option --wings",
        "line 5: shoal swim -- --deep: there is no command 'swim'",
        "line 7: shoal sink: there is no command 'sink'",
        "line 1: shoal fly: there is no command 'fly'",
    ]
