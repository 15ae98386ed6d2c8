"""No link between our pages is dead, in the repository or in the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, pages

_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def links(text: str) -> list[str]:
    """The targets of all links outside code blocks that lead to something of ours."""
    return [link for link in _LINK.findall(_FENCED.sub("", text)) if not re.match(r"[a-z][a-z+.-]*:", link)]


def anchors(text: str) -> set[str]:
    """What the headings of a page can be linked as, in GitHub's spelling."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_FENCED.sub("", text)))
    return {words.replace(" ", "-") for words in plain}


def dead_links(root: Path, page: Path) -> list[str]:
    """The links of `page`, which is relative to `root`, whose file or heading does not exist."""
    dead = []
    for link in links((root / page).read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (root / page.parent / name) if name else root / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(f"{page}: {link}")
    return dead


@pytest.mark.parametrize("page", pages())
def test_links_between_our_pages_lead_somewhere(page: str) -> None:
    assert dead_links(ROOT, Path(page)) == []


def test_dead_file_and_dead_heading_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `word`, and more\n")
    (tmp_path / "page.md").write_text(
        "# Here\n[a](there.md) [b](there.md#a-word-and-more) [c](#here) [d](https://example.org/x#y)\n"
        "[e](gone.md) [f](there.md#gone)\n[g](#gone)\n```\n[h](in-code.md)\n```\n"
    )

    dead = dead_links(tmp_path, Path("page.md"))

    assert dead == ["page.md: gone.md", "page.md: there.md#gone", "page.md: #gone"]
