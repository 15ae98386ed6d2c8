"""The project's Markdown: its pages, and the code blocks in them with their marks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>run\b.*?) -->\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>```|~~~)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"run(?:, with (?P<needs>\S+?))?(?:, prints: (?P<prints>.+))?")


@dataclass(frozen=True, slots=True)
class Run:
    """`<!-- run, with NAME, prints: TEXT -->` above a block: tests run it. Both parts may be missing."""

    needs: str | None
    """A library that it needs beside those that the tests have."""
    prints: str | None


@dataclass(frozen=True, slots=True)
class Block:
    """A code block."""

    page: str
    line: int
    language: str
    text: str
    run: Run | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every Markdown file of the project, from its root; those of its tools and caches left out."""
    found = []
    for path in sorted(ROOT.rglob("*.md")):
        inner = path.relative_to(ROOT)
        if not any(part.startswith(".") or part in ("build", "dist", "site") for part in inner.parts):
            found.append(str(inner))
    return found


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(*languages: str) -> list[Block]:
    """The code blocks of all pages in these languages."""
    return [block for page in pages() for block in blocks_of(page, text_of(page)) if block.language in languages]


def runnable(*languages: str) -> list[Block]:
    """Those that are marked to be run."""
    return [block for block in blocks(*languages) if block.run is not None]


def blocks_of(page: str, text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        lines = match["text"].splitlines(keepends=True)
        inner = "".join(line.removeprefix(match["indent"]) for line in lines)
        line = text.count("\n", 0, match.start("fence")) + 1
        found.append(Block(page, line, match["language"], inner, _run(match["mark"], page, line)))
    return found


def _run(mark: str | None, page: str, line: int) -> Run | None:
    if mark is None:
        return None
    match = _MARK.fullmatch(mark)
    assert match is not None, f"{page}:{line}: a mark that nobody understands: {mark}"
    return Run(match["needs"], match["prints"])


def rows_of(text: str) -> list[list[str]]:
    """The cells of every table row in `text`, heads and rules left out."""
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line):
            is_head = number + 1 < len(lines) and re.fullmatch(r"\|[|\-: ]+", lines[number + 1]) is not None
            if not is_head:
                rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows
