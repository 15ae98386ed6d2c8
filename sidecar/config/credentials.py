"""The secrets, which stand in files of their own: the gateway's key and the clients' tokens.

Law: no message repeats a line of such a file, or its path (a key pasted in the place of a path is a classic).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FILE_LIMIT_BYTES = 1 << 20  # some 20,000 tokens; keeps a path like /dev/zero from filling the memory

_TOKEN = re.compile(rb"[!-~]+\Z")
# What a session id may begin with, since isolate_clients puts `name-` before it.
_NAME = re.compile(r"(?!hs\Z|hs-|.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True)
class ClientToken:
    """One line of the tokens file. The token never shows in a repr."""

    name: str | None
    token: bytes = field(repr=False)


def gateway_token(raw: bytes) -> str:
    """The key as it goes into `Authorization: Bearer`, surrounding white space stripped. Raises ValueError."""
    token = raw.strip()
    if not token:
        raise ValueError("is empty")
    # A line break or a blank inside would let the key's file write further header fields.
    if not _TOKEN.match(token):
        raise ValueError("does not hold one key of visible ASCII characters")
    return token.decode("ascii")


def client_tokens(raw: bytes) -> tuple[ClientToken, ...]:
    """The tokens of a tokens file: `token` or `name:token` a line, blank lines and `#` comments left out.

    Several tokens may share a name: that is how a client's token is renewed. Raises ValueError.
    """
    found: dict[bytes, ClientToken] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        head, colon, rest = text.partition(b":")
        name = head.decode("ascii", "replace").strip() if colon else None
        token = rest.strip() if colon else text
        if name is not None and not _NAME.match(name):
            raise ValueError(
                f"has a line {number} whose name (before the colon) is not made of letters, digits and . _ -"
                " or begins like an id of the sidecar's own (hs)"
            )
        if not _TOKEN.match(token):
            raise ValueError(f"has a line {number} that is not one token of visible ASCII characters")
        if token in found:
            raise ValueError(f"has a line {number} with a token that stands in it already")
        found[token] = ClientToken(name, token)
    if not found:
        raise ValueError("holds no token")
    return tuple(found.values())


def read(path: Path) -> bytes:
    """The file's bytes. Raises ValueError, as all here does, with the end of a sentence."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else "not a path"
        raise ValueError(f"cannot be read ({why})") from exc
    if len(raw) > FILE_LIMIT_BYTES:
        raise ValueError("is too large to be one of keys")
    return raw
