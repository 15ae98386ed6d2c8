"""What a single value may be, where the type alone does not say it.

Law: pure. Each function gives the value as it is used, or raises ValueError with the end of a sentence that begins
with the key ("listen.unix_socket: is longer than ..."). No message repeats the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sidecar.config import addresses

# RFC 9110, 5.6.2: token.
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_BODY_PATH = re.compile(r"[A-Za-z0-9_$-]+(\.[A-Za-z0-9_$-]+)*\Z")
_PREFIX = re.compile(r"[!-~]{0,64}\Z")
_MOUNT = re.compile(r"(/[A-Za-z0-9._~-]+)+\Z")
_REDIS = re.compile(r"redis://(?P<netloc>[^/?#@]+)(/[0-9]{1,5})?\Z")
# RFC 3986, 3.2.1, by which it is certain where the host begins: "/", "@" and the like stand there as %2F and %40.
_USER_INFO = re.compile(
    r"(?:[\w\-.~!$&'()*+,;=]|%[0-9A-F]{2})*:(?:[\w\-.~!$&'()*+,;=:]|%[0-9A-F]{2})+\Z", re.ASCII | re.I
)

# They name a person or a program. As a conversation key they would pour all of somebody's chats into one session,
# and a secret would become a session id.
_CREDENTIAL_FIELDS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
# They describe the connection or the message, so that they never name a conversation.
_MESSAGE_FIELDS = frozenset(
    {"host", "connection", "content-length", "content-type", "transfer-encoding", "te", "trailer", "upgrade", "expect"}
)
_OWN_ID_FIELDS = frozenset({"x-hermes-session-id", "x-claude-session-id"})

# Served by the sidecar itself, or by the gateway: a dashboard mounted there would hide them.
_TAKEN_PATHS = ("/capabilities", "/metrics", "/healthz", "/readyz", "/sidecar", "/v1", "/api", "/health")

SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its closing NUL; unix(7)


def filename(value: object) -> object:
    """A path with `~` expanded. A relative one counts from the directory that the sidecar is started in."""
    if not isinstance(value, str):
        return value
    if not value or not value.isprintable():
        raise ValueError("is no path; leave the key out for none")
    try:
        return Path(value).expanduser()
    except RuntimeError as exc:
        raise ValueError("begins with ~, and there is no such home directory") from exc


def socket_path(value: object) -> object:
    path = filename(value)
    if isinstance(path, Path) and len(str(path).encode(errors="surrogateescape")) > SOCKET_PATH_BYTES:
        raise ValueError(f"is longer than the {SOCKET_PATH_BYTES} bytes that a socket's path may have")
    return path


def unique(values: tuple[str, ...]) -> tuple[str, ...]:
    if repeated(value.lower() for value in values):
        raise ValueError("names the same thing twice")
    return values


def repeated(values: Iterable[object]) -> bool:
    seen = list(values)
    return len(set(seen)) < len(seen)


def gateway_url(text: str) -> str:
    return str(addresses.gateway_base(text))


def dashboard_url(text: str) -> str:
    return str(addresses.dashboard_base(text)) if text else ""


def mount(text: str) -> str:
    """dashboard.mount: "" or a path without a slash at its end."""
    if not text:
        return text
    if not _MOUNT.match(text):
        raise ValueError('must look like "/dashboard": begin with a slash, end without one, plain characters between')
    if any(segment in (".", "..") for segment in text.split("/")):
        raise ValueError("must not have dot segments")
    if any(text == taken or text.startswith(f"{taken}/") for taken in _TAKEN_PATHS):
        raise ValueError("would hide paths of the sidecar or the gateway; take another, such as /dashboard")
    return text


def split_store_url(text: str) -> tuple[str, str]:
    """store.url without the `:password` or `user:password` in it, which may be shown, and these, or "".

    Where it is not certain which is which, the text comes back as it is, for `store_url` to refuse.
    """
    user_info, at, address = text.removeprefix("redis://").rpartition("@")
    if at and text.startswith("redis://") and _USER_INFO.match(user_info):
        return f"redis://{address}", user_info
    return text, ""


def store_url(text: str) -> str:
    """store.url after `split_store_url`."""
    if text in ("sqlite", "memory"):
        return text
    if text.startswith("sqlite:///") and len(text) > len("sqlite:///") and text.isprintable():
        return text
    redis = _REDIS.match(text)
    if redis:
        addresses.gateway_base(f"http://{redis['netloc']}")  # the same rules for host and port
        return text
    if text.startswith("redis://") and "@" in text:
        raise ValueError(
            'must have "user:password" or ":password" before its "@", and in these nothing but letters, digits and'
            " -._~!$&'()*+,;= (write others as % and two hex digits)"
        )
    raise ValueError('must be "sqlite", "sqlite:///path", "memory" or "redis://host:6379/0"')


def source_header(text: str) -> str:
    name = text.lower()
    if not _FIELD_NAME.match(text):
        raise ValueError("is not the name of a header")
    if name in _CREDENTIAL_FIELDS:
        raise ValueError("names a header that says who somebody is, not which conversation it is")
    if name in _MESSAGE_FIELDS:
        raise ValueError("names a header that describes the message, not a conversation")
    if name in _OWN_ID_FIELDS:
        raise ValueError("names a header that always comes first by itself; leave it out")
    return text


def condition_header(text: str) -> str:
    if not _FIELD_NAME.match(text):
        raise ValueError("is not the name of a header")
    return text


def body_path(text: str) -> str:
    if not _BODY_PATH.match(text):
        raise ValueError('must be a path of names with dots between, such as "metadata.chat_id"')
    return text


def id_prefix(text: str) -> str:
    """What may begin a session id: the gateway refuses the rest, and `hs-` marks ids that the sidecar derived."""
    if not _PREFIX.match(text) or re.search(r"[/\\]|\.\.|\A[A-Za-z]:", text):
        raise ValueError("holds what a session id cannot begin with (at most 64 visible ASCII, no / \\ .. or drive)")
    if text.startswith("hs-"):
        raise ValueError('begins with "hs-", which marks the ids that the sidecar derives')
    return text
