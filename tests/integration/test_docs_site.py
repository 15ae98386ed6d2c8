"""The documentation as a site: it builds without a warning, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import DOCS, ROOT

_LOADED = re.compile(
    r"<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=\"?(https?:)?//"
    r"|<link\b(?=[^>]*\brel=\"?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=\"?(https?:)?//"
    r"|url\(['\"]?(https?:)?//|@import\s+['\"](https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strict, so that each warning is a failure."""
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        # Not --quiet: warnings that nobody hears are not counted as failures either.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_menu(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    home = (site / "index.html").read_text(encoding="utf-8")

    missing = [str(page) for page in pages if page.name != "index" and f'href="{page}/"' not in home]

    assert missing == []


def test_site_loads_nothing_from_another_host(site: Path) -> None:
    foreign = [
        f"{file.relative_to(site)}: {match[0]}"
        for file in sorted(site.rglob("*"))
        if file.suffix in (".html", ".css")
        for match in _LOADED.finditer(file.read_text(encoding="utf-8"))
    ]

    assert foreign == []


def test_files_beside_the_docs_that_pages_link_to_are_in_the_site(site: Path) -> None:
    model = (site / "explanation" / "threat-model" / "index.html").read_text(encoding="utf-8")

    linked = re.findall(r'href="(../../project/[^"#]+)"', model)

    assert linked
    assert [link for link in linked if not (site / "explanation" / "threat-model" / link).exists()] == []
    assert "<h1" in (site / "project" / "SECURITY" / "index.html").read_text(encoding="utf-8")
