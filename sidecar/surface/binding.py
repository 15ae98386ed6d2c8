"""Fills a page whose HTML declares where each value goes; `page.js` fills the same places again when values change.

    data-text="path"                  the value becomes the element's text (`data-empty` stands there if it is missing)
    data-when="path"                  the element is hidden while the value is missing or false
    data-attr="name:path other:path"  the values become attributes
    data-each="path:template"         the children are that <template>, once for each item, with paths relative to it

Law: every value is escaped where it goes in. There is no way to mark one as markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

_BOUND = re.compile(r"<(\w+)((?:\s[^<>]*)?\sdata-(?:text|when|attr|each)=[^<>]*)>")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_TEMPLATE = re.compile(r'<template id="([\w-]+)">(.*?)</template>', re.DOTALL)


class Page:
    """One HTML file. Its templates stand at its end, inside `<template>`; elements that get text or items are empty."""

    def __init__(self, html: str) -> None:
        self._html = html
        self._templates = {name: inner.strip() for name, inner in _TEMPLATE.findall(html)}
        self._body_end = match.start() if (match := _TEMPLATE.search(html)) else len(html)

    def filled(self, values: Mapping[str, Any]) -> str:
        return self._fill(self._html[: self._body_end], values) + self._html[self._body_end :]

    def _fill(self, html: str, values: Any) -> str:
        def replaced(match: re.Match[str]) -> str:
            bound = dict(_ATTRIBUTE.findall(match[2]))
            attributes, inside = match[2], ""
            for pair in bound.get("data-attr", "").split():
                name, _, path = pair.partition(":")
                attributes += f' {name}="{_text(_at(values, path))}"'
            if "data-when" in bound and not _at(values, bound["data-when"]):
                attributes += " hidden"
            if "data-text" in bound:
                inside = _text(_at(values, bound["data-text"])) or bound.get("data-empty", "")
            if "data-each" in bound:
                path, _, template = bound["data-each"].partition(":")
                inside = "".join(self._fill(self._templates[template], item) for item in _at(values, path))
            return f"<{match[1]}{attributes}>{inside}"

        return _BOUND.sub(replaced, html)


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _text(value: Any) -> str:
    return "" if value is None else escape(str(value))
