"""MkDocs hooks: what the pages link to beside docs/ comes into the site, so that no link is dead in either place.

On a forge `../../SECURITY.md` leads to the file; the site has only docs/. So each such file is taken in below
project/, Markdown as a page and everything else as it is, and the links are written anew.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")
_FENCED = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ \t]*$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds what is linked from docs/, and from what was added, until nothing new turns up."""
    waiting = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        for target in _targets(waiting.pop()):
            if target not in seen and not target.startswith("docs/"):
                seen.add(target)
                source = str(ROOT / target)
                files.append(
                    File.generated(config, _site_path(target), abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV)
                )
                if target.endswith(".md"):
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links that cross the border of docs/ to where their targets stand in the site."""
    here = page.file.src_uri
    source = here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}"

    def written_anew(match: re.Match[str]) -> str:
        target = _resolved(source, match[1])
        if target is None:
            return match[1]
        return posixpath.relpath(_site_path(target), posixpath.dirname(here) or ".")

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(written_anew, text) for text in parts[::2]]
    return "".join(parts)


def _targets(source: str) -> Iterator[str]:
    text = "".join(_FENCED.split((ROOT / source).read_text(encoding="utf-8"))[::2])
    for link in _LINK.findall(text):
        target = _resolved(source, link)
        if target is not None:
            yield target


def _resolved(source: str, link: str) -> str | None:
    """The file that `link` in `source` leads to, from the project's root; None where it is none of ours."""
    if re.match(r"[a-z][a-z+.-]*:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if (ROOT / target).is_file() else None


def _site_path(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"project/{target}"
