"""A hook of mkdocs: files outside docs/ that pages link to become pages of the site, and links to them lead there.

In the repository a link from a page to `../examples/gan.py` works as it is. On the site the file is the page
`outside/examples/gan.py.md`: this module adds it and rewrites the link. Whatever is not in `OUTSIDE` stays as written,
and a strict build fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/*")
"""Patterns below the root of the repository."""
FOLDER = "outside"
LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|#|/)([^)\s#]+)", re.IGNORECASE)
FENCE = re.compile(r"^\s*(`{3,}|~{3,})")


def on_files(files: Files, config: Any) -> Files:
    """Add the outside files: Markdown as it is, Python as a page that shows it, anything else to download."""
    for path in outside_files():
        place = place_on_site(path)
        if path.endswith((".md", ".py")):
            files.append(File.generated(config, place, content=page_of(path)))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to and from outside files lead to where these are on the site."""
    here = path_in_repository(page.file.src_uri)
    lines, fence = [], None
    for line in markdown.split("\n"):
        mark = FENCE.match(line)
        if mark and (fence is None or mark[1].startswith(fence)):
            fence = mark[1] if fence is None else None
        lines.append(line if fence or mark else LINK.sub(lambda link: link_on_site(here, link[1]), line))
    return "\n".join(lines)


def outside_files() -> list[str]:
    found = {path for pattern in OUTSIDE for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def page_of(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n````python\n{text}````\n"


def place_on_site(path: str) -> str:
    """Where a file of the repository is, from docs/."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}/{path}.md" if path.endswith(".py") else f"{FOLDER}/{path}"


def path_in_repository(place: str) -> str:
    """The reverse of `place_on_site`, for pages."""
    if not place.startswith(f"{FOLDER}/"):
        return f"docs/{place}"
    path = place.removeprefix(f"{FOLDER}/")
    return path.removesuffix(".md") if path.endswith(".py.md") else path


def link_on_site(here: str, link: str) -> str:
    """`link`, as the file `here` of the repository has it, as its page on the site must have it."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    if here.startswith("docs/") and target.startswith("docs/"):
        return link
    return posixpath.relpath(place_on_site(target), posixpath.dirname(place_on_site(here)) or ".")
