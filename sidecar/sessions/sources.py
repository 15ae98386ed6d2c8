"""Where a conversation key may stand in a request, and which values count as none. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

_TEMPLATES = ((b"{{", b"}}"), (b"${", b"}"))
_PLACEHOLDERS = frozenset((b"", b"new", b"null", b"undefined"))

_LONGEST_REMEMBERED = 256
"""Longer values are judged anew each time: what is remembered must stay small."""

Document = Mapping[str, Any]
"""A request's JSON body, an object."""
NO_DOCUMENT: Document = MappingProxyType({})
"""Stands for every other body."""


@dataclass(frozen=True, slots=True)
class HeaderSource:
    """A request header that names the conversation."""

    name: bytes
    """Lower case."""
    prefix: bytes = b""
    """Stands before every id from this source, so that equal ids of two products never meet."""

    label: str = field(init=False, default="")
    """How answers, logs and metrics name this source."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", f"header:{self.name.decode('latin-1')}")


@dataclass(frozen=True, slots=True)
class BodySource:
    """A field of the JSON body that names the conversation; only a string counts."""

    path: tuple[str, ...]
    prefix: bytes = b""

    @property
    def label(self) -> str:
        return f"body:{'.'.join(self.path)}"

    def value(self, document: Document) -> bytes | None:
        found: Any = document
        for name in self.path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else None


Source = HeaderSource | BodySource


@dataclass(frozen=True, slots=True)
class PromptCondition:
    """Marks a side task by how its last message begins, for frontends that say it nowhere else."""

    beginning: str

    def holds(self, document: Document) -> bool:
        messages = document.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        content = last.get("content") if isinstance(last, Mapping) else None
        if isinstance(content, list):  # parts: the first text counts
            texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
            content = texts[0] if texts else None
        return isinstance(content, str) and content.startswith(self.beginning)


def is_usable(value: bytes) -> bool:
    """Whether `value` names a conversation: not empty, no word for "none yet", no template that nobody filled in.

    Frontends send their templates unfilled on calls that have no conversation, such as the model list.
    """
    stripped = value.strip(b" \t")
    return _is_name(stripped) if len(stripped) <= _LONGEST_REMEMBERED else not _is_unfilled(stripped)


@lru_cache(maxsize=4096)
def _is_name(value: bytes) -> bool:
    return value.lower() not in _PLACEHOLDERS and not _is_unfilled(value)


def _is_unfilled(value: bytes) -> bool:
    # No regular expression: one that looks for the end from every beginning takes seconds for a value full of them.
    for opening, closing in _TEMPLATES:
        start = value.find(opening)
        if start >= 0 and value.find(closing, start + len(opening)) >= 0:
            return True
    return False


def document_of(body: bytes) -> Document:
    """The JSON object in `body`; NO_DOCUMENT where it is something else.

    Only UTF-8 is read, as RFC 8259, 8.1 has it: into another encoding `with_field` could put nothing.
    """
    try:
        document = json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return NO_DOCUMENT
    return document if isinstance(document, dict) else NO_DOCUMENT


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, a JSON object, with one more field at its end; every other byte stays as it was.

    At the end, since of two fields with one name parsers take the last: a `null` that was given loses.
    """
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip(b" \t\r\n").endswith(b"{") else b","
    field = json.dumps(name).encode() + b":" + json.dumps(value.decode("latin-1")).encode()
    return body[:end] + comma + field + body[end:]
