"""Where a conversation key may stand in a request, and which values count as none. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_UNFILLED = re.compile(rb"\{\{.*?\}\}|\$\{.*?\}", re.DOTALL)
_PLACEHOLDERS = frozenset((b"", b"new", b"null", b"undefined"))

Document = Mapping[str, Any]
"""A request's JSON body, an object; an empty one stands for every other body."""


@dataclass(frozen=True, slots=True)
class HeaderSource:
    """A request header that names the conversation."""

    name: bytes
    """Lower case."""
    prefix: bytes = b""
    """Stands before every id from this source, so that equal ids of two products never meet."""

    @property
    def label(self) -> str:
        """How answers, logs and metrics name this source."""
        return f"header:{self.name.decode('latin-1')}"


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
    return stripped.lower() not in _PLACEHOLDERS and _UNFILLED.search(stripped) is None


def document_of(body: bytes) -> Document:
    """The JSON object in `body`; an empty one where it is something else."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, a JSON object, with one more field at its beginning; every other byte stays as it was."""
    start = body.index(b"{") + 1
    rest = body[start:]
    comma = b"" if rest.lstrip(b" \t\r\n").startswith(b"}") else b","
    field = json.dumps(name).encode() + b":" + json.dumps(value.decode("latin-1")).encode()
    return body[:start] + field + comma + rest
