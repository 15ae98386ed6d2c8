"""Where a conversation key may stand in a request, and which values count as none. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNFILLED = re.compile(rb"\{\{.*?\}\}|\$\{.*?\}", re.DOTALL)
_PLACEHOLDERS = frozenset((b"", b"new", b"null", b"undefined"))


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


def is_usable(value: bytes) -> bool:
    """Whether `value` names a conversation: not empty, no word for "none yet", no template that nobody filled in.

    Frontends send their templates unfilled on calls that have no conversation, such as the model list.
    """
    stripped = value.strip(b" \t")
    return stripped.lower() not in _PLACEHOLDERS and _UNFILLED.search(stripped) is None
