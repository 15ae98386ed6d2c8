"""The reference says what the code does: every setting with its default, every error, and no dead link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import config
from sidecar.faults import FaultCode

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ROW = re.compile(r"^\| `([a-z_.]+)`[^|]*\| (.+?) \| (.+) \|$", re.MULTILINE)


def pages() -> list[Path]:
    """Every Markdown file of the project, those of its tools and caches left out."""
    found = []
    for path in sorted(ROOT.rglob("*.md")):
        inner = path.relative_to(ROOT)
        if not any(part.startswith(".") or part in ("build", "dist", "site") for part in inner.parts):
            found.append(inner)
    return found


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


def settings_with_defaults() -> Iterator[tuple[str, str]]:
    """Each key of the configuration, as `section.key`, with its default as the settings page writes it."""
    section = ""
    for line in config.describe(config.Settings()).splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        elif given := re.fullmatch(r"(\w+) = (.+)", line):
            yield f"{section}.{given[1]}", f"`{given[2]}`"
        elif absent := re.fullmatch(r"# (\w+) is not set", line):
            yield f"{section}.{absent[1]}", "not set"


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_between_our_pages_lead_somewhere(page: Path) -> None:
    assert dead_links(ROOT, page) == []


def test_dead_file_and_dead_heading_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `word`, and more\n")
    (tmp_path / "page.md").write_text(
        "# Here\n[a](there.md) [b](there.md#a-word-and-more) [c](#here) [d](https://example.org/x#y)\n"
        "[e](gone.md) [f](there.md#gone)\n[g](#gone)\n```\n[h](in-code.md)\n```\n"
    )

    dead = dead_links(tmp_path, Path("page.md"))

    assert dead == ["page.md: gone.md", "page.md: there.md#gone", "page.md: #gone"]


@pytest.mark.parametrize("fault", FaultCode, ids=lambda fault: fault.code)
def test_each_error_has_its_row_and_its_section(fault: FaultCode) -> None:
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {fault.code}\n(.+?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)

    assert f"| [`{fault.code}`](#{fault.code}) | {fault.status} | `{fault.error_type}` |" in text
    assert section is not None
    assert "**When:**" in section[1]
    assert "**Do:**" in section[1]


def test_errors_page_names_no_error_that_does_not_exist() -> None:
    sections = re.findall(r"^### (.+)$", (REFERENCE / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(sections) == sorted(fault.code for fault in FaultCode)


def test_each_setting_stands_in_the_reference_with_its_real_default() -> None:
    rows = {key: default for key, default, _ in _ROW.findall((REFERENCE / "settings.md").read_text(encoding="utf-8"))}
    # Four tables do not fit into a cell: the row links to the page that lists them.
    expected = dict(settings_with_defaults()) | {
        "session.sources": "[four headers](headers.md#which-session-id-is-sent)"
    }

    assert rows == expected


def test_default_sources_stand_in_the_headers_reference_in_their_order() -> None:
    text = (REFERENCE / "headers.md").read_text(encoding="utf-8").replace("\n", " ")
    named = [
        f"`{source.header}` (prefix `{source.prefix}`)" if source.prefix else f"`{source.header}`"
        for source in config.Settings().session.sources
    ]

    assert re.search(r",\s+".join(re.escape(name) for name in named), text)


def test_settings_page_marks_what_the_sidecar_calls_not_built_yet() -> None:
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    everything = config.from_mapping(
        {
            "listen": {"workers": 2},
            "dashboard": {"url": "http://127.0.0.1:9119"},
            "session": {"sources": [{"body": "metadata.chat_id"}], "inject_body": True, "follow_rotation": True},
            "store": {"url": "memory"},
            "probe": {"interval_s": 60.0},
            "admin": {"host": "127.0.0.1", "port": 8651},
        }
    )
    said = tuple(sentence.partition(":")[0] for sentence in config.not_built_yet(everything))
    # Asked for by no feature of their own: they tune one of the others, or have a default that does what it says.
    unsaid = ("session.body_limit_bytes", "session.forward_key", "probe")

    marked = {match[1] for match in _ROW.finditer(text) if "†" in match[0]}

    assert marked == {key for key, _ in settings_with_defaults() if key.startswith(said + unsaid)}
