"""Request smuggling: bytes that two readers could take in two ways are refused, and nothing after them is read."""

from __future__ import annotations

import pytest

from tests.support.raw_client import raw_client
from tests.support.scripted_upstream import Connection, answering, ok
from tests.support.sidecars import relayed
from tests.support.wire import Gone

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(
            POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="length-and-chunked"
        ),
        pytest.param(
            POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", id="chunked-and-length"
        ),
        pytest.param(POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", id="two-lengths"),
        pytest.param(POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", id="same-length-twice"),
        pytest.param(POST + b"Content-Length: 5, 5\r\n\r\nhello", id="list-of-lengths"),
        pytest.param(POST + b"Content-Length: 5,6\r\n\r\nhello", id="list-of-different-lengths"),
        pytest.param(POST + b"Content-Length: +2\r\n\r\nhi", id="plus-length"),
        pytest.param(POST + b"Content-Length: -1\r\n\r\nhi", id="negative-length"),
        pytest.param(POST + b"Content-Length: 0x2\r\n\r\nhi", id="hexadecimal-length"),
        pytest.param(POST + b"Content-Length: 1_0\r\n\r\nhi", id="underscored-length"),
        pytest.param(POST + b"Content-Length: 2 2\r\n\r\nhi", id="length-with-blank"),
        pytest.param(POST + b"Content-Length: \r\n\r\nhi", id="empty-length"),
        pytest.param(POST + b"Content-Length: 2\x0b\r\n\r\nhi", id="length-with-vertical-tab"),
        pytest.param(POST + b"Content-Length: \xb2\r\n\r\nhi", id="superscript-length"),
        pytest.param(POST + b"Content-Length: 99999999999999999999\r\n\r\nhi", id="length-beyond-64-bits"),
        pytest.param(POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", id="chunked-twice-in-a-list"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="twice"),
        pytest.param(POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", id="xchunked"),
        pytest.param(POST + b"Transfer-Encoding: identity\r\n\r\n", id="identity"),
        pytest.param(POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="gzip-chunked"),
        pytest.param(POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", id="chunked-identity"),
        pytest.param(POST + b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", id="chunked-with-parameter"),
        pytest.param(POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", id="vertical-tab-chunked"),
        pytest.param(POST + b"Transfer-Encoding:\r\n\r\n", id="empty-coding"),
        pytest.param(POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", id="folded-chunked"),
        pytest.param(POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="blank-before-colon"),
        pytest.param(POST + b"Content-Length\t: 2\r\n\r\nhi", id="tab-before-colon"),
        pytest.param(GET + b"X-A: 1\r\n folded\r\n\r\n", id="folded-line"),
        pytest.param(GET + b"X-A: 1\r\n\tfolded\r\n\r\n", id="line-folded-with-tab"),
        pytest.param(GET + b" X-A: 1\r\n\r\n", id="blank-before-first-field"),
        pytest.param(GET + b"X-A: 1\rX-B: 2\r\n\r\n", id="bare-cr"),
        pytest.param(GET + b"X-A: 1\nX-B: 2\r\n\r\n", id="bare-lf"),
        pytest.param(GET + b"X-A: 1\x00\r\n\r\n", id="nul-in-value"),
        pytest.param(GET + b"X-\x00A: 1\r\n\r\n", id="nul-in-name"),
        pytest.param(GET + b"X-A: 1\x7f\r\n\r\n", id="delete-in-value"),
        pytest.param(GET + b"X-A\r\n\r\n", id="no-colon"),
        pytest.param(GET + b": 1\r\n\r\n", id="no-name"),
        pytest.param(GET + b"X-\xe9: 1\r\n\r\n", id="name-outside-ascii"),
        pytest.param(GET + b"X(A): 1\r\n\r\n", id="name-with-delimiters"),
        pytest.param(GET.replace(b"\r\n", b"\n") + b"\n", id="lf-alone"),
        pytest.param(b"GET  /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", id="two-blanks"),
        pytest.param(b"GET /v1/models  HTTP/1.1\r\nHost: localhost\r\n\r\n", id="two-blanks-after-target"),
        pytest.param(b"GET /v1/models HTTP/1.1 \r\nHost: localhost\r\n\r\n", id="blank-after-version"),
        pytest.param(b"GET\t/v1/models\tHTTP/1.1\r\nHost: localhost\r\n\r\n", id="tabs-in-request-line"),
        pytest.param(b" GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", id="blank-before-method"),
        pytest.param(b"GET /v1/mo dels HTTP/1.1\r\nHost: localhost\r\n\r\n", id="blank-in-target"),
        pytest.param(b"GET /v1/\x01models HTTP/1.1\r\nHost: localhost\r\n\r\n", id="control-in-target"),
        pytest.param(b"GET v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", id="target-without-slash"),
        pytest.param(b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n", id="get-asterisk"),
        pytest.param(b"G(T /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", id="method-with-delimiter"),
        pytest.param(b"GET /v1/models\r\nHost: localhost\r\n\r\n", id="http-0.9"),
        pytest.param(b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n\r\n", id="http-2.0"),
        pytest.param(b"GET /v1/models HTTP/1.10\r\nHost: localhost\r\n\r\n", id="http-1.10"),
        pytest.param(b"GET /v1/models http/1.1\r\nHost: localhost\r\n\r\n", id="lower-case-version"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="http-2-preface"),
        pytest.param(
            b"POST /x HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="http-1.0-chunked"
        ),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", id="tls-hello"),
    ],
)
async def test_ambiguous_head_is_refused_and_nothing_after_it_is_a_request(request_bytes: bytes) -> None:
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(request_bytes + SMUGGLED)
        answer = await client.answer()
        client.write(SMUGGLED)

        assert (answer.status, answer.reason) == (400, b"Bad Request")
        assert answer.value("x-hermes-sidecar-error") == "invalid_request"
        assert answer.value("connection") == "close"
        error = answer.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("invalid_request", "invalid_request_error", None)
        assert await client.to_end() == b""
        assert client.ending == "FIN"
        assert upstream.connections == []


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"2;a\nb\r\nhi\r\n0\r\n\r\n", id="lf-in-extension"),
        pytest.param(b"2;a\rb\r\nhi\r\n0\r\n\r\n", id="cr-in-extension"),
        pytest.param(b"2;a\x00\r\nhi\r\n0\r\n\r\n", id="nul-in-extension"),
        pytest.param(b"2\nhi\r\n0\r\n\r\n", id="size-ended-by-lf"),
        pytest.param(b"2\r\nhi\n0\r\n\r\n", id="chunk-ended-by-lf"),
        pytest.param(b"2\r\nhi!\r\n0\r\n\r\n", id="chunk-too-long"),
        pytest.param(b"+2\r\nhi\r\n0\r\n\r\n", id="plus-size"),
        pytest.param(b"-2\r\nhi\r\n0\r\n\r\n", id="minus-size"),
        pytest.param(b"0x2\r\nhi\r\n0\r\n\r\n", id="hexadecimal-prefix"),
        pytest.param(b" 2\r\nhi\r\n0\r\n\r\n", id="blank-before-size"),
        pytest.param(b"2_0\r\nhi\r\n0\r\n\r\n", id="underscored-size"),
        pytest.param(b"\r\n0\r\n\r\n", id="empty-size"),
        pytest.param(b"g\r\n0\r\n\r\n", id="no-digit"),
        pytest.param(b"fffffffffffffffff\r\nhi\r\n0\r\n\r\n", id="size-beyond-64-bits"),
        pytest.param(b"2\r\nhi\r\n0\r\nbad trailer\r\n\r\n", id="trailer-without-colon"),
        pytest.param(b"2\r\nhi\r\n0\r\nX-A: 1\r\n folded\r\n\r\n", id="folded-trailer"),
        pytest.param(b"2\r\nhi\r\n0\r\nX-A: a\nX-B: b\r\n\r\n", id="lf-in-trailer"),
    ],
)
async def test_malformed_chunk_is_refused_and_never_completes_the_request(body: bytes) -> None:
    async with relayed(answering(ok())) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(CHUNKED + body + SMUGGLED)
        answer = await client.answer()
        client.write(SMUGGLED)

        assert answer.status == 400
        assert answer.value("x-hermes-sidecar-error") == "invalid_request"
        assert answer.value("connection") == "close"
        assert await client.to_end() == b""
        assert client.ending == "FIN"
        for connection in upstream.connections:
            await connection.ended(limit_s=1)
        assert upstream.requests == []
        assert not any(b"smuggled" in connection.received for connection in upstream.connections)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"5\r\nhello\r\n0\r\n\r\n", id="chunked"),
        pytest.param(b"5;ext=1\r\nhello\r\n0;last\r\nX-Trailer: 1\r\n\r\n", id="with-extensions-and-trailer"),
    ],
)
async def test_request_in_a_body_stays_a_body(body: bytes) -> None:
    """The bytes after a body belong to the next request, those inside never do."""
    inner = b"GET /inner HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunked = b"%x\r\n%b\r\n" % (len(inner), inner)

    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(CHUNKED + chunked + body + client.request("GET", "/after"))
        answers = [await client.answer(), await client.answer()]

        assert [answer.status for answer in answers] == [200, 200]
        assert [(r.target, r.body) for r in upstream.requests] == [
            (b"/v1/chat/completions", inner + b"hello"),
            (b"/after", b""),
        ]


async def test_second_answer_of_the_upstream_is_never_given_to_the_next_request() -> None:
    """Response smuggling: what an upstream says beyond its answer must not become the answer to another client."""

    async def talkative(connection: Connection) -> None:
        while True:
            request = await connection.request()
            connection.write(ok(request.target) + (ok(b"poison") if request.target == b"/first" else b""))

    async with relayed(talkative) as (upstream, sidecar), raw_client(sidecar.url) as client:
        first = await client.ask("GET", "/first")
        second = await client.ask("GET", "/second")

        assert (first.body, second.body) == (b"/first", b"/second")
        assert len(upstream.connections) == 2
        assert await upstream.connections[0].ended(limit_s=1) in ("FIN", "RST")


async def test_late_bytes_on_an_idle_upstream_connection_are_never_an_answer() -> None:
    """An upstream that speaks unasked, a moment after its answer, loses the connection."""

    async def talkative(connection: Connection) -> None:
        while True:
            request = await connection.request()
            connection.write(ok(request.target))
            if request.target == b"/first":
                try:
                    await connection.exactly(1, limit_s=0.05)
                except TimeoutError:
                    connection.write(ok(b"poison"))

    async with relayed(talkative) as (upstream, sidecar), raw_client(sidecar.url) as client:
        first = await client.ask("GET", "/first")
        ending = await (await upstream.connection()).ended(limit_s=2)
        second = await client.ask("GET", "/second")

        assert ending in ("FIN", "RST")
        assert (first.body, second.body) == (b"/first", b"/second")


async def test_request_cut_inside_its_head_is_no_request() -> None:
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(POST + b"Content-Le")
        client.finish()

        with pytest.raises(Gone):
            await client.head()
        assert upstream.connections == []
