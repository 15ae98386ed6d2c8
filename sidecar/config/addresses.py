"""What may stand in the configuration as an address: base URLs, host names, browser origins.

Law: pure, and no message repeats the text it refuses, since a mistyped address may hold a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104  (compared with, never bound by default)

_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\Z")
_VISIBLE_ASCII = re.compile(r"[!-~]*\Z")
# RFC 3986, 3.3: pchar and "/". A per cent sign must begin an escape.
_PATH = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|%[0-9A-Fa-f]{2})*\Z")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")
_NO_HOST = "is not a host name or an IP address (without scheme and path)"


@dataclass(frozen=True)
class BaseUrl:
    """Where a server is, taken apart once: nobody else splits or joins its URL."""

    scheme: str
    host: str  # lower case; IPv6 without brackets
    port: int
    path_prefix: str  # "" or "/api": goes before every request target
    netloc: str  # as a Host header says it: the default port left out

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path_prefix}"


@lru_cache(maxsize=64)
def gateway_base(text: str) -> BaseUrl:
    """The gateway's address, whether it was written with or without the trailing `/v1` of an OpenAI base URL.

    Raises ValueError with a reason for a person.
    """
    parts = _http_parts(text)
    path = parts.path.rstrip("/")
    if path.endswith("/chat/completions"):
        raise ValueError("is the address of one route; write it only as far as its /v1")
    if path == "/v1" or path.endswith("/v1"):
        path = path.removesuffix("/v1").rstrip("/")
    return _base(parts, path)


@lru_cache(maxsize=64)
def dashboard_base(text: str) -> BaseUrl:
    """The dashboard's address. It is no OpenAI server, so a `/v1` in it is a real prefix."""
    parts = _http_parts(text)
    return _base(parts, parts.path.rstrip("/"))


def host_name(text: str) -> str:
    """A host as it is compared everywhere: lower case, no brackets, no dot at the end. Raises ValueError."""
    if ":" in text:
        bracketed = text.startswith("[") and text.endswith("]")
        try:
            address = IPv6Address(text[1:-1] if bracketed else text)
        except ValueError as exc:
            raise ValueError(_NO_HOST) from exc
        if address.scope_id is not None:
            raise ValueError("has an IPv6 zone, which means nothing outside one machine")
        return str(address)
    name = text.lower().removesuffix(".")
    if not _NAME.match(name):
        raise ValueError(_NO_HOST)
    return name


def allowed_host(text: str) -> str:
    """One entry of listen.allowed_hosts. A port is tolerated and dropped, since the guard accepts any port."""
    return host_name(re.sub(r"(?<=[^:]):[0-9]{1,5}\Z", "", text) if text.count(":") == 1 or "]" in text else text)


def allowed_origin(text: str) -> str:
    """One entry of listen.allowed_origins, spelled as a browser spells it in `Origin`; "*" stays. Raises ValueError.

    Any scheme may stand here: desktop shells and extensions send origins such as `app://obsidian.md`.
    Source: RFC 6454, 6.2 (the default port is left out).
    """
    if text == "*":
        return text
    if text.lower() == "null":
        raise ValueError("cannot be allowed: every sandboxed page has the origin null")
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower()
    if not separator or not _SCHEME.match(scheme) or not _VISIBLE_ASCII.match(rest):
        raise ValueError('is not an origin; write it as "http://localhost:3000"')
    _refuse_user_info(rest)
    if re.search(r"[/?#\\]", rest):
        raise ValueError("is an origin with something after it; write only scheme, host and port, without a slash")
    host, port = _host_and_port(urlsplit(f"{scheme}://{rest}"))
    return f"{scheme}://{_netloc(scheme, host, port)}"


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost may mean anything, so it is not."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_same_listener(host: str, listen_host: str) -> bool:
    """Whether a connection to `host` arrives at a socket bound to `listen_host`, the port being the same."""
    local = LOOPBACK_NAMES | WILDCARDS  # connecting to 0.0.0.0 reaches this machine
    return host == listen_host or (host in local and listen_host in local)


# --- Taking a URL apart ----------------------------------------------------------------------------------------------


def _http_parts(text: str) -> SplitResult:
    # urlsplit silently drops line breaks and tabs, and takes a backslash for a letter: refused before it sees them.
    if not _VISIBLE_ASCII.match(text) or "\\" in text:
        raise ValueError("holds blanks, backslashes or characters outside ASCII")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in DEFAULT_PORTS:
        raise ValueError("must begin with http:// or https://")
    _refuse_user_info(rest)
    if "?" in rest:
        raise ValueError("must not have a query (the part after ?)")
    if "#" in rest:
        raise ValueError("must not have a fragment (the part after #)")
    try:
        return urlsplit(text)
    except ValueError as exc:
        raise ValueError("has a host that cannot be read") from exc


def _refuse_user_info(rest: str) -> None:
    # Looked for in the whole text, not only before the first "/": a password may hold a slash.
    if "@" in rest:
        raise ValueError("must not hold a user name or a password; put the key into a file, see gateway.token_file")


def _base(parts: SplitResult, path: str) -> BaseUrl:
    if not _PATH.match(path):
        raise ValueError("has a path with characters that cannot stand in a request target")
    segments = path.split("/")[1:]
    if any(segment in ("", ".", "..") for segment in segments):
        raise ValueError("has a path with empty or dot segments")
    host, port = _host_and_port(parts)
    scheme = parts.scheme
    return BaseUrl(scheme, host, port or DEFAULT_PORTS[scheme], path, _netloc(scheme, host, port))


def _host_and_port(parts: SplitResult) -> tuple[str, int | None]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ValueError("has a port that is not a number from 1 to 65535") from exc
    if port == 0:
        raise ValueError("has a port that is not a number from 1 to 65535")
    if not host:
        raise ValueError("has no host")
    try:
        return host_name(host), port
    except ValueError as exc:
        raise ValueError("has a host that is neither a name nor an IP address without a zone") from exc


def _netloc(scheme: str, host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return shown if port in (None, DEFAULT_PORTS.get(scheme)) else f"{shown}:{port}"
