"""Attacks from a raw socket, in one table: what is sent, what the attacker gets, and that the upstream sees nothing.

The table runs against every page of the sidecar's own in the real process, with aiohttp's C parser and with its
pure-Python one, and against the chat path. The rules behind it are tested one by one in tests/conformance
(test_hosts, test_browsers, test_smuggling).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.raw_client import RawClient, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import Received, ScriptedUpstream, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import relayed

CHAT_PATH = "/v1/chat/completions"
OWN_PATHS = (
    *("/healthz", "/readyz", "/metrics", "/sidecar/"),
    *("/capabilities", "/capabilities/events", "/capabilities/refresh"),
)
ALLOWED_ORIGIN = "http://localhost:3000"
FOLLOWER = b"POST /follower HTTP/1.1\r\nHost: <host>\r\nContent-Length: 0\r\n\r\n"
"""Stands behind every attack. Where the connection goes on it is an honest request, elsewhere it must never be read."""

GET = b"GET <path> HTTP/1.1\r\nHost: <host>\r\n"
POST = b"POST <path> HTTP/1.1\r\nHost: <host>\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FORM = b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 5\r\n\r\na=b&c"
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
EVIL = b"Origin: http://evil.example\r\n"
CROSS_SITE = b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n"


class Attack(NamedTuple):
    sent: bytes
    """`<path>` and `<host>` stand for the path under attack and the sidecar's own authority."""
    code: str
    closes: bool
    """The sidecar ends the connection, and reads nothing of what follows."""


def hosts() -> Iterator[tuple[str, Attack]]:
    """Names that are not the sidecar's, or only look as if they were. What follows is judged for itself."""
    for name, host in {
        "rebinding-name": b"evil.example:8650",
        "name-of-another-machine": b"gateway.internal",
        "own-address-as-first-labels": b"127.0.0.1.evil.com",
        "localhost-as-first-label": b"localhost.evil.com",
        "localhost-as-last-label": b"evil.localhost",
        "trailing-dot": b"localhost.",
        "trailing-dot-and-port": b"127.0.0.1.:8650",
        "user-before-localhost": b"user@localhost",
        "evil-before-localhost": b"evil.com@localhost",
        "localhost-as-user": b"localhost@evil.com",
        "localhost-as-password": b"localhost:80@evil.com",
        "path-in-host": b"localhost/evil.com",
        "fragment-in-host": b"evil.com#localhost",
        "list-of-hosts": b"localhost, evil.com",
        "empty": b"",
        "port-alone": b":8650",
        "empty-port": b"localhost:",
        "two-ports": b"localhost:80:80",
        "short-address": b"127.1",
        "hexadecimal-address": b"0x7f.0.0.1",
        "decimal-address": b"2130706433",
        "unspecified-address": b"0.0.0.0:8650",
        "mapped-address": b"[::ffff:127.0.0.1]",
        "other-ipv6-loopback-spelling": b"[0:0:0:0:0:0:0:1]",
        "ipv6-without-brackets": b"::1",
        "ipv6-zone": b"[::1%25lo]",
        "percent-encoded": b"%6cocalhost",
        "full-width-letters": "ｌocalhost".encode(),
    }.items():
        yield f"host-{name}", Attack(b"GET <path> HTTP/1.1\r\nHost: %b\r\n\r\n" % host, "host_not_allowed", False)
    yield "host-missing-in-1.0", Attack(b"GET <path> HTTP/1.0\r\n\r\n", "host_not_allowed", True)
    yield "host-missing", Attack(b"GET <path> HTTP/1.1\r\n\r\n", "invalid_request", True)
    yield "host-twice", Attack(GET + b"Host: <host>\r\n\r\n", "invalid_request", True)
    yield "host-twice-second-evil", Attack(GET + b"hOST: evil.com\r\n\r\n", "invalid_request", True)
    absolute = b"GET http://%b<path> HTTP/1.1\r\nHost: %b\r\n\r\n"
    for name, authority, host in (
        ("evil-target", b"evil.com", b"<host>"),
        ("evil-host", b"<host>", b"evil.com"),
        ("user-in-target", b"<host>@evil.com", b"<host>"),
        ("no-authority", b"", b"<host>"),
    ):
        yield f"absolute-form-{name}", Attack(absolute % (authority, host), "host_not_allowed", False)


def pages() -> Iterator[tuple[str, Attack]]:
    """What a browser sends for a foreign page. A body that nobody reads ends the connection."""
    for name, origin in {
        "foreign": b"http://evil.example",
        "null": b"null",
        "allowed-as-prefix": b"http://localhost:3000.evil.com",
        "allowed-and-a-digit": b"http://localhost:30001",
        "allowed-as-user": b"http://localhost:3000@evil.com",
        "allowed-with-path": b"http://localhost:3000/evil",
        "allowed-name-other-scheme": b"https://localhost:3000",
        "own-name-other-port": b"http://localhost:1",
        "own-name-without-port": b"http://127.0.0.1",
        "own-name-as-prefix": b"http://<host>.evil.com",
        "extension": b"chrome-extension://abcdefghijklmnop",
        "file": b"file://",
        "list": b"http://localhost:3000, http://evil.example",
        "empty": b"",
    }.items():
        yield f"origin-{name}", Attack(GET + b"Origin: %b\r\n\r\n" % origin, "origin_not_allowed", False)
    for name, sent, closes in (
        ("origin-twice", GET + b"Origin: http://localhost:3000\r\nOrigin: http://evil.example\r\n\r\n", False),
        ("form-urlencoded", POST + EVIL + FORM, True),
        ("form-text-plain", POST + EVIL + FORM.replace(b"application/x-www-form-urlencoded", b"text/plain"), True),
        ("form-multipart", POST + EVIL + FORM.replace(b"x-www-form-urlencoded", b"multipart; boundary=x"), True),
        ("form-without-type", POST + EVIL + b"Content-Length: 2\r\n\r\n{}", True),
        ("form-without-origin", POST + CROSS_SITE + FORM, True),
        ("form-without-body", POST + EVIL + b"Content-Length: 0\r\n\r\n", False),
        ("beacon", POST + EVIL + CROSS_SITE + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", True),
        ("image", GET + CROSS_SITE + b"Sec-Fetch-Dest: image\r\n\r\n", False),
        ("metadata-twice", GET + b"Sec-Fetch-Site: same-origin\r\nSec-Fetch-Site: cross-site\r\n\r\n", False),
        (
            "frame",
            GET + b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n\r\n",
            False,
        ),
        ("websocket-foreign", GET + EVIL + WEBSOCKET + b"\r\n", False),
        ("websocket-null", GET + b"Origin: null\r\n" + WEBSOCKET + b"\r\n", False),
        ("websocket-without-origin", GET + CROSS_SITE + WEBSOCKET + b"\r\n", False),
        (
            "preflight",
            b"OPTIONS <path> HTTP/1.1\r\nHost: <host>\r\nAccess-Control-Request-Method: POST\r\n" + EVIL + b"\r\n",
            False,
        ),
    ):
        yield f"page-{name}", Attack(sent, "origin_not_allowed", closes)
    navigation = b"POST <path> HTTP/1.1\r\nHost: <host>\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n"
    yield (
        "page-navigation-by-form",
        Attack(navigation + b"Sec-Fetch-Dest: document\r\n\r\n", "origin_not_allowed", False),
    )


def smuggling() -> Iterator[tuple[str, Attack]]:
    """Bytes that two readers could take in two ways."""
    for name, sent in {
        "length-and-chunked": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "two-lengths": POST + b"Content-Length: 0\r\nContent-Length: 44\r\n\r\n",
        "list-of-lengths": POST + b"Content-Length: 0, 0\r\n\r\n",
        "length-plus": POST + b"Content-Length: +2\r\n\r\nhi",
        "length-hexadecimal": POST + b"Content-Length: 0x2\r\n\r\nhi",
        "length-underscore": POST + b"Content-Length: 2_0\r\n\r\nhi",
        "length-full-width-digit": POST + "Content-Length: ２\r\n\r\nhi".encode(),
        "chunked-twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "chunked-on-two-lines": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "gzip-chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "chunked-in-1.0": POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "obs-fold": POST + b"X-A: b\r\n Content-Length: 44\r\n\r\n",
        "bare-cr": GET + b"X-A: b\rContent-Length: 44\r\n\r\n",
        "bare-cr-in-target": b"GET <path>\r HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "bare-lf": GET + b"X-A: b\nContent-Length: 44\r\n\r\n",
        "all-lines-lf": GET.replace(b"\r\n", b"\n") + b"\n",
        "nul-in-name": GET + b"X-\x00A: b\r\n\r\n",
        "nul-in-value": GET + b"X-A: b\x00\r\n\r\n",
        "nul-in-target": b"GET <path>\x00 HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "blank-before-colon": POST + b"Content-Length : 44\r\n\r\n",
        "line-without-colon": GET + b"X-A\r\n\r\n",
        "chunk-extension-with-lf": CHUNKED + b"0;a\n\r\n\r\n",
        "chunk-size-plus": CHUNKED + b"+2\r\nhi\r\n0\r\n\r\n",
        "chunk-size-hexadecimal-prefix": CHUNKED + b"0x2\r\nhi\r\n0\r\n\r\n",
        "chunk-size-underscore": CHUNKED + b"2_0\r\nhi\r\n0\r\n\r\n",
        "chunk-size-ended-by-lf": CHUNKED + b"2\nhi\r\n0\r\n\r\n",
        "chunk-longer-than-it-says": CHUNKED + b"2\r\nhi there\r\n0\r\n\r\n",
        "trailer-with-lf": CHUNKED + b"0\r\nX-A: b\n\r\nX-B: c\r\n\r\n",
        "connect": b"CONNECT evil.com:443 HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "connect-to-a-path": b"CONNECT <path> HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "connect-to-a-url": b"CONNECT http://<host><path> HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "ftp-url": b"GET ftp://<host><path> HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "http-0.9": b"GET <path>\r\nHost: <host>\r\n\r\n",
        "http-1.2": b"GET <path> HTTP/1.2\r\nHost: <host>\r\n\r\n",
    }.items():
        yield name, Attack(sent, "invalid_request", True)


def sizes() -> Iterator[tuple[str, Attack]]:
    """Blocks over 64 KiB, in every place; the value is never said again."""
    big = b"a" * 100_000
    for name, sent in {
        "cookie-of-100-kB": GET + b"Cookie: " + big + b"\r\n\r\n",
        "name-of-100-kB": GET + big + b": b\r\n\r\n",
        "target-of-100-kB": b"GET <path>?" + big + b" HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "method-of-100-kB": big + b" <path> HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "head-of-100-kB-without-an-end": GET + b"X-A: b\r\n" * 12_500,
        "line-of-100-kB-without-an-end": big,
        "20000-lines": GET + b"a:b\r\n" * 20_000 + b"\r\n",
    }.items():
        yield name, Attack(sent, "header_too_large", True)


def unfinished() -> Iterator[tuple[str, Attack]]:
    """Bytes that never become a head: answered when the limit is over. Nothing can follow them."""
    hello = b"\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03" + bytes(range(32, 64)) + b"\x20" + bytes(range(64, 96))
    yield "tls-hello", Attack(hello, "request_timeout", True)
    yield "silent-head", Attack(GET, "request_timeout", True)


STATUS = {
    "host_not_allowed": 421,
    "origin_not_allowed": 403,
    "invalid_request": 400,
    "header_too_large": 431,
    "request_timeout": 408,
}
ATTACKS: dict[str, Attack] = {**dict(hosts()), **dict(pages()), **dict(smuggling()), **dict(sizes())}
UNFINISHED: dict[str, Attack] = dict(unfinished())
HEAD_TIMEOUT_S = 0.5


class Outcome(NamedTuple):
    status: int
    code: str | None
    closes: bool
    answer: Answer


async def launch(url: str, path: str, attack: Attack, *, follower: bytes = FOLLOWER) -> Outcome:
    """What one attack gets on a connection of its own."""
    async with raw_client(url) as client:
        client.write(_filled_in(attack.sent + follower, path, client))
        answer = await client.answer()
        closes = answer.value("connection") == "close"
        if closes:
            assert await client.to_end() == b"", "something of what followed was answered"
        elif follower:
            assert (await client.answer()).status == 200, "the connection does not go on"
        return Outcome(answer.status, answer.value("x-hermes-sidecar-error"), closes, answer)


def _filled_in(template: bytes, path: str, client: RawClient) -> bytes:
    return template.replace(b"<path>", path.encode()).replace(b"<host>", client.host.encode())


def asked_by_clients(upstream: ScriptedUpstream) -> list[Received]:
    """What reached the upstream, but for the sidecar's own probes; it got no byte that is part of no request."""
    whole = sum(len(request.head) + len(request.wire_body) for request in upstream.requests)
    assert whole == sum(len(connection.received) for connection in upstream.connections)
    return [request for request in upstream.requests if not request.is_probe]


def _says_enough(outcome: Outcome) -> bool:
    """The envelope, with nothing of what was sent in it, and nothing for a page of another origin."""
    error = outcome.answer.json()["error"]
    return (
        (outcome.answer.value("content-type") or "").startswith("application/json")
        and error["code"] == outcome.code
        and bool(error["message"])
        and bool(error["hint"])
        and b"evil" not in outcome.answer.body
        and b"aaaa" not in outcome.answer.body
        and not outcome.answer.values("access-control-allow-origin")
    )


@pytest.mark.parametrize("parser", ["c", "pure-python"])
async def test_attacks_on_own_pages_are_refused_and_the_upstream_hears_of_none(parser: str, tmp_path: Path) -> None:
    wrong: dict[str, object] = {}

    async with scripted_upstream(ok()) as upstream, await _process(tmp_path, upstream.url, parser) as sidecar:
        for name, attack in ATTACKS.items():
            follower = FOLLOWER.replace(b"POST /follower", b"GET /healthz")
            for path in OWN_PATHS if b"<path>" in attack.sent else OWN_PATHS[:1]:
                got = await launch(sidecar.url, path, attack, follower=follower)
                if got[:3] != (STATUS[attack.code], attack.code, attack.closes) or not _says_enough(got):
                    wrong[f"{name} {path}"] = (got[:3], got.answer.body[:200])
        still = await chat(sidecar.url)

        assert wrong == {}
        assert still.status == 200
        assert [request.target for request in asked_by_clients(upstream)] == [CHAT_PATH.encode()]
        assert "Traceback" not in sidecar.log


@pytest.mark.parametrize("name", ATTACKS)
async def test_attack_on_the_chat_path_is_refused_and_never_reaches_the_upstream(name: str) -> None:
    attack = ATTACKS[name]

    async with relayed(ok(), listen={"allowed_origins": [ALLOWED_ORIGIN]}) as (upstream, sidecar):
        got = await launch(sidecar.url, CHAT_PATH, attack)
        last = await ask(sidecar.url, "GET", "/last")

        assert got[:3] == (STATUS[attack.code], attack.code, attack.closes)
        assert _says_enough(got)
        assert last.status == 200
        # What came upstream since is what honest requests sent, on connections that carried nothing else.
        targets = [request.target for request in asked_by_clients(upstream)]
        assert targets == [b"/follower"] * (not attack.closes) + [b"/last"]


@pytest.mark.parametrize("name", UNFINISHED)
async def test_bytes_that_never_become_a_head_are_answered_in_time(name: str) -> None:
    async with relayed(ok(), listen={"head_timeout_s": HEAD_TIMEOUT_S}) as (upstream, sidecar):
        got = await launch(sidecar.url, CHAT_PATH, UNFINISHED[name], follower=b"")

        assert got[:3] == (408, "request_timeout", True)
        assert upstream.connections == []


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"2_0\r\n", id="size"),
        pytest.param(b"2\r\nhi!\r\n", id="chunk-too-long"),
        pytest.param(b"0;a\nb\r\n\r\n", id="lf-in-extension"),
        pytest.param(b"0\r\nX-A: 1\r\n folded\r\n\r\n", id="folded-trailer"),
        pytest.param(b"0\r\n\rX\r\n\r\n", id="bare-cr-for-the-end"),
    ],
)
async def test_chunk_that_goes_wrong_later_never_completes_the_request(rest: bytes) -> None:
    """Here the upstream has the head and a first chunk already: it must see the request break off."""
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(_filled_in(CHUNKED + b"5\r\nhello\r\n", CHAT_PATH, client))
        connection = await upstream.connection()
        while b"hello\r\n" not in connection.received:
            await connection.some()
        client.write(rest + _filled_in(FOLLOWER, CHAT_PATH, client))
        answer = await client.answer()

        assert (answer.status, answer.value("x-hermes-sidecar-error")) == (400, "invalid_request")
        assert await client.to_end() == b""
        await connection.ended()
        assert (len(upstream.connections), upstream.requests) == (1, [])
        assert bytes(connection.received).partition(b"\r\n\r\n")[2] in (b"5\r\nhello\r\n", b"5\r\nhello\r\n2\r\nhi")


async def test_protocols_other_than_websocket_are_not_upgraded_to() -> None:
    """h2c would carry requests past every rule; TLS and made-up ones as well."""
    async with relayed(ok()) as (upstream, sidecar):
        for protocol in (b"h2c", b"TLS/1.3", b"websocket, h2c", b"h2c, websocket", b"evil"):
            fields = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + protocol, b"HTTP2-Settings: AAMAAABk"]
            assert (await ask(sidecar.url, "GET", "/v1/models", *fields)).status == 200

        for request in upstream.requests:
            assert request.names.isdisjoint({b"connection", b"upgrade", b"http2-settings"})


async def test_answer_that_switches_protocols_unasked_is_no_tunnel() -> None:
    """A gateway under attack may say 101 to a request that asked for nothing: what follows stays HTTP of ours."""
    switched = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async with relayed(switched) as (upstream, sidecar), raw_client(sidecar.url) as client:
        answer = await client.ask("POST", CHAT_PATH, body=b"{}")

        assert (answer.status, answer.value("x-hermes-sidecar-error")) == (502, "upstream_protocol_error")
        await (await upstream.connection()).ended()


async def test_connection_cannot_name_what_the_guard_decides() -> None:
    """`Connection` takes fields off; it must not take off what the sidecar adds, nor make it forget what it removed."""
    named = b"Connection: authorization, x-forwarded-for, x-forwarded-host, via, origin"
    environ = {"HERMES_SIDECAR_GATEWAY__TOKEN": "gateway-key"}

    async with relayed(ok(), environ=environ) as (upstream, sidecar):
        answer = await chat(sidecar.url, named, b"Origin: " + sidecar.url.encode())

        request = upstream.only_request
        assert answer.status == 200
        assert request.values("authorization") == [b"Bearer gateway-key"]
        assert request.values("x-forwarded-for") == [b"127.0.0.1"]
        assert request.values("via") == [b"1.1 hermes-sidecar"]
        assert request.names.isdisjoint({b"origin", b"connection"})


SECRET = b"marker-5f1c"


@pytest.mark.parametrize("parser", ["c", "pure-python"])
async def test_own_pages_take_what_the_relay_takes(parser: str, tmp_path: Path) -> None:
    """Heads that are let in reach aiohttp too, whose limits are narrower and whose errors repeat what was sent."""
    odd = {
        "cookie-of-20-kB": b"GET <path> HTTP/1.1\r\nHost: <host>\r\nCookie: " + SECRET * 2000 + b"\r\n\r\n",
        "5000-lines": GET + b"Cookie: " + SECRET + b"\r\n" + b"a:b\r\n" * 5_000 + b"\r\n",
        "query-of-20-kB": b"GET <path>?" + SECRET * 2000 + b" HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "bytes-in-query": b"GET <path>?\xff" + SECRET + b" HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "bytes-in-value": GET + b"X-A: \x80\xff" + SECRET + b"\r\nContent-Type: \xff\r\n\r\n",
        "odd-query": b"GET <path>?[]{}|^`\\%zz" + SECRET + b" HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "absolute-form": b"GET http://<host><path> HTTP/1.1\r\nHost: <host>\r\n\r\n",
        "body-on-get": GET + b"Content-Length: 11\r\n\r\n" + SECRET,
        "chunks-on-get": GET + b"Transfer-Encoding: chunked\r\n\r\nb\r\n" + SECRET + b"\r\n0\r\n\r\n",
        "garbage-as-gzip": GET + b"Content-Encoding: gzip\r\nContent-Length: 11\r\n\r\n" + SECRET,
        "websocket": GET + WEBSOCKET + b"\r\n",
    }
    wrong: dict[str, object] = {}

    async with scripted_upstream(ok()) as upstream, await _process(tmp_path, upstream.url, parser) as sidecar:
        for path in ("/healthz", "/sidecar/", "/capabilities"):
            for name, sent in odd.items():
                answer = (await launch(sidecar.url, path, Attack(sent, "", False), follower=b"")).answer
                if answer.status != 200 or SECRET in answer.body:
                    wrong[f"{name} {path}"] = (answer.status, answer.body[:200])
        assert wrong == {}
        assert asked_by_clients(upstream) == []
        assert SECRET.decode() not in sidecar.log
        assert "Traceback" not in sidecar.log


@pytest.mark.parametrize("parser", ["c", "pure-python"])
async def test_own_pages_name_themselves_when_they_say_no(parser: str, tmp_path: Path) -> None:
    """Methods and paths that no page has: an error of ours, with nothing of the request in it."""
    wrong: dict[str, object] = {}

    async with scripted_upstream(ok()) as upstream, await _process(tmp_path, upstream.url, parser) as sidecar:
        for line in (
            b"POST /healthz",
            b"DELETE /readyz",
            b"marker-5f1c /healthz",
            b"TRACE /sidecar/",
            b"GET /sidecar/marker-5f1c",
            b"GET /sidecar/a/marker-5f1c",
            b"GET /sidecar/../v1/marker-5f1c",
            b"GET /sidecar/%2e%2e/%2e%2e/etc/marker-5f1c",
            b"GET /sidecar//marker-5f1c",
            b"GET /sidecar/%00",
            b"GET /sidecar/\xffmarker-5f1c",
        ):
            sent = line + b" HTTP/1.1\r\nHost: <host>\r\n\r\n"
            answer = (await launch(sidecar.url, "", Attack(sent, "", False), follower=b"")).answer
            code = answer.value("x-hermes-sidecar-error")
            if answer.status not in (400, 404, 405) or code is None or SECRET in answer.body:
                wrong[repr(line)] = (answer.status, code, answer.body[:200])
            assert (await ask(sidecar.url, "GET", "/healthz")).status == 200, line

        assert wrong == {}
        assert asked_by_clients(upstream) == []
        assert SECRET.decode() not in sidecar.log


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_request_in_the_body_for_an_own_page_is_no_request(framing: str) -> None:
    """Nobody reads such bodies; their bytes must not become a request whose answer the next client gets."""
    inner = b"GET /sidecar/ HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)

    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        sent = chunked if framing == "chunked" else b"Content-Length: %d\r\n\r\n%b" % (len(inner), inner)
        for method in (b"GET", b"POST", b"OPTIONS"):
            client.write(method + b" /healthz HTTP/1.1\r\nHost: localhost\r\n" + sent)
            first = await client.answer()
            after = [await ask(sidecar.url, "GET", "/healthz") for _ in range(3)]

            assert first.status == 200 if method == b"GET" else first.status in (404, 405)
            assert [answer.json()["status"] for answer in after] == ["ok"] * 3
        assert upstream.connections == []


async def test_body_for_an_own_page_is_never_decompressed(tmp_path: Path) -> None:
    """256 kB that would inflate to 256 MiB cost next to nothing."""
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    head = b"Content-Encoding: deflate"

    async with scripted_upstream(ok()) as upstream, await SidecarProcess.start(tmp_path, upstream.url) as sidecar:
        process = psutil.Process(sidecar.pid)
        before = _cost(process)
        answer = await ask(sidecar.url, "POST", "/capabilities", head, body=bomb)
        after_s = [(await ask(sidecar.url, "GET", "/healthz")).status for _ in range(20)]
        cpu_s, memory_bytes = _cost(process)

        assert answer.status in (404, 405)
        assert after_s == [200] * 20
        assert cpu_s - before[0] < 0.1
        assert memory_bytes - before[1] < 16 << 20


async def test_thousands_of_tiny_header_lines_hold_nobody_up() -> None:
    """The head is limited by its bytes alone; what the most lines that fit cost must stay small."""
    lines = b"a:\r\n" * 16_000

    async with relayed(ok()) as (upstream, sidecar):
        before = os.times().user
        async with raw_client(sidecar.url) as client:
            client.write(_filled_in(GET, "/v1/models", client) + lines + b"\r\n")
            answer = await client.answer()
        cost_s = os.times().user - before

        assert answer.status == 200
        assert len(upstream.only_request.values("a")) == 16_000
        assert cost_s < 0.5  # measured: 0.015 s; the rest is for slow machines


def _cost(process: psutil.Process) -> tuple[float, int]:
    return process.cpu_times().user, process.memory_info().rss


async def _process(home: Path, gateway_url: str, parser: str) -> SidecarProcess:
    """The real command, with one of aiohttp's two parsers behind its own pages."""
    settings = {"LISTEN__ALLOWED_ORIGINS": f'["{ALLOWED_ORIGIN}"]'}
    environ = {"AIOHTTP_NO_EXTENSIONS": "1"} if parser == "pure-python" else {}
    return await SidecarProcess.start(home, gateway_url, settings, environ=environ)
