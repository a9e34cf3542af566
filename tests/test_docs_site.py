"""The documentation builds as a site, strictly, and the site needs no network."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEADLINE = 60

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="mkdocs is not installed")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stdout
    assert (tmp_path / "outside/examples/gan.py.html").exists()
    foreign = {
        link
        for path in tmp_path.rglob("*")
        if path.suffix in (".html", ".css")
        for link in foreign_assets(path.read_text(encoding="utf-8"))
    }
    assert not foreign, f"loaded from other hosts: {', '.join(sorted(foreign))}"


def test_a_broken_link_or_anchor_or_a_page_without_a_place_fails_the_build(tmp_path: Path) -> None:
    for name in ("docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs/lost.md").write_text("# Lost\n\n[a](gone.md) [b](limits.md#gone) [c](../examples/gone.py)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    for complaint in ("lost.md", "gone.md", "#gone", "outside/examples/gone.py.md"):
        assert re.search(f"WARNING.*{re.escape(complaint)}|^ +- {re.escape(complaint)}", built.stdout, re.MULTILINE), (
            f"nothing about {complaint} in\n{built.stdout}"
        )


def foreign_assets(text: str) -> list[str]:
    """What a page or a style sheet makes a browser load from another host. A link to click on is none."""
    elsewhere = r"((?:https?:)?//[^\"'\s>)]+)"
    tags = re.findall(rf"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?{elsewhere}", text)
    styles = re.findall(rf"(?:url\(|@import)\s*[\"']?{elsewhere}", text)
    return [*tags, *styles]


def test_assets_of_other_hosts_are_found() -> None:
    page = """<a href="https://example.org">far</a> <script async src="//cdn.example.org/x.js"></script>
    <link rel="stylesheet" href='https://fonts.example.org/css'><img src="img/own.png"> @import "http://example.net/a.css";
    """
    assert foreign_assets(page) == [
        "//cdn.example.org/x.js",
        "https://fonts.example.org/css",
        "http://example.net/a.css",
    ]
