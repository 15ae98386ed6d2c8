"""The metrics of a running sidecar: what real traffic counts as, and what no traffic can do to them."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from sidecar.demo.gateway import DemoGateway
from tests.support.raw_client import CHAT, JSON, STREAMED_CHAT, RawClient, ask, chat, raw_client
from tests.support.scraping import Scrape, scrape, scrape_of
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, chunk, ok
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import Sidecar, relayed, running_sidecar

EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":345}}\n\n'
DONE = b"data: [DONE]\n\n"
GAUGES = ("active_requests", "active_streams")


def at_rest(shown: Scrape) -> bool:
    return all(shown.total(gauge) == 0 for gauge in GAUGES)


async def begin_stream(client: RawClient, *fields: bytes) -> None:
    """Sends a streamed chat and reads the head of its answer."""
    client.write(client.request("POST", "/v1/chat/completions", JSON, *fields, body=STREAMED_CHAT))
    assert (await client.head()).status == 200


# --- M1: a constant number of series ---------------------------------------------------------------------------------

REQUESTS = 20_000
CONNECTIONS = 16
AHEAD = 25
"""Requests that a client sends before it waits for their answers."""
PATHS = (
    "/v1/chat/completions?{word}",
    "/v1/responses?q={word}",
    "/v1/runs",
    "/v1/runs/{word}/events",
    "/v1/models",
    "/v1/models/{word}",
    "/v1/skills/{word}",
    "/api/sessions/{word}/messages",
    "/api/memory?{word}",
    "/api/jobs/{word}",
    "/health",
    "/{word}",
    "/metrics/{word}",
    "//{word}//",
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "X{word}")
SESSIONS = (
    "X-Hermes-Session-Key: {word}",
    "X-Hermes-Session-Key: {word}/no-id",
    "X-Hermes-Session-Id: {word}",
    "X-OpenWebUI-Chat-Id: {word}",
    "X-LibreChat-Conversation-Id: {word}",
    "X-OpenWebUI-Task: {word}",
    "X-Nothing: {word}",
)
HOSTS = ("127.0.0.1:{port}", "localhost:{port}", "{word}.example:{port}")


def request_of(kind: Sequence[str], word: str) -> bytes:
    """A request with `word` in every place that a client chooses."""
    path, method, session, host = kind
    body = b"" if "example" in host else b'{"model":"%b","stream":false}' % word.encode()
    lines = (
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        session,
        f"User-Agent: {word}/1.0",
        f"X-Request-Id: {word}",
        f"Content-Length: {len(body)}",
    )
    text = "\r\n".join(lines).format(word=word, port=random.randrange(1, 65536))
    return text.encode() + b"\r\n\r\n" + body


class Answering(asyncio.Protocol):
    """An upstream that costs little: each head is answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(ok() * data.count(b"\r\n\r\n"))


class Asking(asyncio.Protocol):
    """A client that only counts its answers."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._tail = b""
        self._answers = 0
        self._more = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        self._answers += seen.count(b"HTTP/1.1 ")
        self._tail = seen[-8:]
        self._more.set()

    async def ask(self, requests: Sequence[bytes]) -> None:
        wanted = self._answers + len(requests)
        self.transport.write(b"".join(requests))
        async with asyncio.timeout(10):
            while self._answers < wanted:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def cheap_upstream() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def send_all(url: str, requests: Sequence[bytes]) -> None:
    address = urlsplit(url)

    async def one_client(share: Sequence[bytes]) -> None:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(Asking, str(address.hostname), int(address.port or 80))
        for begin in range(0, len(share), AHEAD):
            await client.ask(share[begin : begin + AHEAD])
        client.transport.abort()

    await asyncio.gather(*(one_client(requests[number::CONNECTIONS]) for number in range(CONNECTIONS)))


async def test_twenty_thousand_random_requests_leave_the_number_of_series_where_it_was() -> None:
    """Each kind of request once, then thousands with words of their own everywhere: not one series more."""
    kinds = list(product(PATHS, METHODS, SESSIONS[:1], HOSTS)) + list(product(PATHS[:1], METHODS[:2], SESSIONS, HOSTS))
    words = [f"w{secrets.token_hex(6)}" for _ in range(REQUESTS)]
    chosen = [[random.choice(kind) for kind in (PATHS, METHODS, SESSIONS, HOSTS)] for _ in words]
    async with cheap_upstream() as upstream, running_sidecar(upstream) as sidecar:
        await send_all(sidecar.url, [request_of(kind, "first") for kind in kinds])
        await scrape(sidecar.url)  # which is a request of a kind of its own
        before = await scrape(sidecar.url)

        await send_all(sidecar.url, [request_of(kind, word) for kind, word in zip(chosen, words, strict=True)])
        shown = await scrape(sidecar.url)

    assert shown.samples.keys() == before.samples.keys()
    assert shown.total("requests_total") == before.total("requests_total") + REQUESTS + 1
    assert not {said for said in shown.words if "first" in said or any(word in said for word in words[:50])}
    assert at_rest(shown)


# --- M2: gauges that come back ---------------------------------------------------------------------------------------


class Dripping:
    """An upstream that streams slowly and without end, or breaks off where the client's request says so."""

    async def __call__(self, connection: Connection) -> None:
        request = await connection.request(limit_s=60)
        breaks_after = [int(value) for value in request.values("X-Break-After")]
        await asyncio.sleep(random.uniform(0, 0.02))
        connection.write(STREAM_HEAD)
        for number in range(1000):
            if breaks_after == [number]:
                connection.reset() if number % 2 else connection.close()
                return
            await asyncio.sleep(random.uniform(0, 0.01))
            half = random.randrange(len(chunk(EVENT)))
            connection.write(chunk(EVENT)[:half])
            await asyncio.sleep(0)
            connection.write(chunk(EVENT)[half:])
        raise AssertionError("nobody left")


async def test_cancelled_and_broken_streams_leave_no_gauge_up_and_are_counted_once() -> None:
    async def leaves(url: str) -> None:
        async with raw_client(url, records=False) as client:
            client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
            await asyncio.sleep(random.uniform(0, 0.06))
            client.close()
            await client.ended()

    async def is_left(url: str, after: int) -> None:
        async with raw_client(url, records=False) as client:
            await begin_stream(client, b"X-Break-After: %d" % after)
            await client.ended()

    async with relayed(Dripping(), records=False) as (_, sidecar):
        await asyncio.gather(
            *(leaves(sidecar.url) for _ in range(100)), *(is_left(sidecar.url, number) for number in range(20))
        )
        lines = await sidecar.ended_exchanges(120)
        shown = await scrape(sidecar.url)

    outcomes = Counter(str(line["outcome"]) for line in lines)
    assert outcomes == {"client_left": 100, "upstream_broke": 20}
    assert at_rest(shown)
    assert shown.by("route", "requests_total") == {"chat_completions": 120}
    streams = Counter(str(line["outcome"]) for line in lines if "first_byte_ms" in line)
    assert shown.by("reason", "stream_ends_total") == streams
    assert shown.value("upstream_errors_total", kind="broke") == 20
    codes = {"200": streams.total(), "none": 120 - streams.total()}
    assert shown.by("code", "requests_total") == {code: count for code, count in codes.items() if count}


async def test_gauges_show_what_runs_now() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD + chunk(EVENT))
        await go_on.wait()
        connection.write(LAST_CHUNK)

    async with relayed(script) as (_, sidecar), raw_client(sidecar.url) as one, raw_client(sidecar.url) as two:
        await asyncio.gather(begin_stream(one), begin_stream(two))
        meanwhile = await scrape(sidecar.url)
        go_on.set()
        await asyncio.gather(one.until(LAST_CHUNK), two.until(LAST_CHUNK))
        afterwards = await scrape(sidecar.url)

    assert meanwhile.by("route", "active_requests") == {"chat_completions": 2}
    assert meanwhile.value("active_streams") == 2
    assert meanwhile.value("relayed_bytes_total", direction="upstream") == 2 * len(STREAMED_CHAT)
    assert at_rest(afterwards)


async def test_scrape_counts_the_events_that_a_running_stream_has_brought() -> None:
    """They are put aside as they come, and counted for whoever asks."""
    read: asyncio.Queue[int] = asyncio.Queue()

    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD + chunk(EVENT))
        while (number := await read.get()) < 6:
            connection.write(chunk(b"data: %d\n\n" % number))
        connection.write(LAST_CHUNK)

    async with relayed(script) as (_, sidecar), raw_client(sidecar.url) as client:
        await begin_stream(client)
        for number in range(5):
            read.put_nowait(number)
            await client.until(chunk(b"data: %d\n\n" % number))
        meanwhile = await scrape(sidecar.url)
        read.put_nowait(5)
        await client.until(chunk(b"data: 5\n\n"))
        read.put_nowait(6)
        await client.until(LAST_CHUNK)
        afterwards = await scrape(sidecar.url)

    assert meanwhile.value("inter_event_seconds_count") == 5
    assert meanwhile.value("inter_event_seconds_sum") > 0
    assert afterwards.value("inter_event_seconds_count") == 6


# --- M3: what Prometheus asks for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "is_openmetrics"),
    [
        pytest.param((), False, id="none"),
        pytest.param((b"Accept: */*",), False, id="anything"),
        pytest.param(
            (
                b"Accept: application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
                b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            ),
            True,
            id="prometheus",
        ),
    ],
)
async def test_scrape_has_one_content_type_and_is_openmetrics_only_where_asked(
    fields: tuple[bytes, ...], is_openmetrics: bool
) -> None:
    async with relayed(ok()) as (_, sidecar):
        await chat(sidecar.url)
        answer = await ask(sidecar.url, "GET", "/metrics", *fields)

    (content_type,) = answer.values("Content-Type")
    assert content_type.count(b"version=") == content_type.count(b"charset=") == 1
    text = answer.body.decode()
    assert text.endswith("# EOF\n") is is_openmetrics
    if is_openmetrics:
        assert content_type.startswith(b"application/openmetrics-text; version=1.0.0;")
        assert list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    else:
        assert content_type.startswith(b"text/plain; version=0.0.4;")
        assert scrape_of(text).value("requests_total", route="chat_completions", method="POST", code="200") == 1


# --- M4: first byte, first token, duration ---------------------------------------------------------------------------


async def test_first_byte_first_token_and_duration_are_three_things() -> None:
    """The agent answers at once, thinks, says a word, and takes its time to end."""

    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD + chunk(ROLE))
        for _ in range(3):
            await asyncio.sleep(0.1)
            connection.write(chunk(b": keepalive\n\n"))
        connection.write(chunk(EVENT))
        await asyncio.sleep(0.3)
        connection.write(chunk(DONE) + LAST_CHUNK)

    async with relayed(script) as (_, sidecar):
        await chat(sidecar.url, body=STREAMED_CHAT)
        (line,) = await sidecar.ended_exchanges()
        shown = await scrape(sidecar.url)

    first_byte_s = shown.value("time_to_first_byte_seconds_sum", route="chat_completions")
    first_token_s = shown.value("time_to_first_token_seconds_sum")
    duration_s = shown.value("request_duration_seconds_sum", route="chat_completions")
    assert first_byte_s < 0.2 <= first_token_s - 0.05
    assert first_token_s + 0.25 < duration_s < 5
    assert line["first_token_ms"] == pytest.approx(first_token_s * 1000, abs=0.1)
    assert line["first_byte_ms"] == pytest.approx(first_byte_s * 1000, abs=0.1)
    assert line["duration_ms"] == pytest.approx(duration_s * 1000, abs=0.1)
    assert shown.value("inter_event_seconds_count") == 2  # role, word, done: the comments divide nothing
    assert shown.value("inter_event_seconds_sum") == pytest.approx(0.6, abs=0.25)
    for name in ("request_duration_seconds", "time_to_first_byte_seconds"):
        assert shown.value(f"{name}_bucket", route="chat_completions", le="1800.0") == 1


# --- Ends, tokens, bytes ---------------------------------------------------------------------------------------------


async def stream_that(end: str, connection: Connection) -> None:
    connection.write(STREAM_HEAD + chunk(EVENT))
    if end == "complete":
        connection.write(chunk(DONE) + LAST_CHUNK)
    elif end == "upstream_broke":
        connection.close()
    else:
        await connection.ended()


@pytest.mark.parametrize("end", ["complete", "client_left", "upstream_broke", "timeout"])
async def test_stream_ends_by_reason(end: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await stream_that(end, connection)

    idle_timeout_s = 0.2 if end == "timeout" else 0.0
    async with relayed(script, gateway={"idle_timeout_s": idle_timeout_s}) as (_, sidecar):
        async with raw_client(sidecar.url) as client:
            await begin_stream(client)
            await client.exactly(len(chunk(EVENT)))
            if end == "client_left":
                client.close()
            elif end == "complete":
                await client.until(LAST_CHUNK)
            else:
                await client.ended()
        await sidecar.ended_exchanges()
        shown = await scrape(sidecar.url)

    assert shown.by("reason", "stream_ends_total") == {end: 1}
    kinds = {"upstream_broke": "broke", "timeout": "timeout"}
    assert shown.by("kind", "upstream_errors_total") == ({kinds[end]: 1} if end in kinds else {})


PLAIN = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 7, "completion_tokens": 8}})


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        pytest.param(ok(PLAIN.encode()), {"prompt": 7, "completion": 8}, id="json-with-a-length"),
        pytest.param(
            ok().replace(b"Content-Length: 11", b"Transfer-Encoding: chunked").removesuffix(b'{"ok":true}')
            + b"".join(chunk(byte.encode()) for byte in PLAIN)
            + LAST_CHUNK,
            {"prompt": 7, "completion": 8},
            id="json-in-chunks-of-a-byte",
        ),
        pytest.param(
            STREAM_HEAD + chunk(EVENT) + chunk(USAGE) + chunk(DONE) + LAST_CHUNK,
            {"prompt": 12, "completion": 345},
            id="stream",
        ),
        pytest.param(STREAM_HEAD + chunk(EVENT) + chunk(DONE) + LAST_CHUNK, {}, id="not-told"),
    ],
)
async def test_tokens_are_what_usage_says_as_it_passes(answer: bytes, tokens: dict[str, float]) -> None:
    async with relayed(answer) as (_, sidecar):
        for _ in range(3):
            await chat(sidecar.url)
        shown = await scrape(sidecar.url)

    assert shown.by("type", "tokens_total") == {kind: 3 * count for kind, count in tokens.items()}


async def test_relayed_bytes_are_exact_and_own_pages_are_none() -> None:
    answers = [ok(b"x" * 10_000), STREAM_HEAD + chunk(EVENT) + LAST_CHUNK]

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=60)
            connection.write(answers[request.target == b"/stream"])

    async with relayed(script) as (_, sidecar):
        await chat(sidecar.url)
        await ask(sidecar.url, "POST", "/upload", body=b"y" * 5000)
        await ask(sidecar.url, "GET", "/stream")
        for own in ("/capabilities", "/metrics", "/sidecar/"):
            assert (await ask(sidecar.url, "GET", own)).status == 200
        shown = await scrape(sidecar.url)

    assert shown.value("relayed_bytes_total", direction="upstream") == len(CHAT) + 5000
    # As they pass: a chunked body with its framing.
    assert shown.value("relayed_bytes_total", direction="downstream") == 20_000 + len(chunk(EVENT) + LAST_CHUNK)


async def test_unreachable_gateway_counts_as_such() -> None:
    async with running_sidecar("http://127.0.0.1:9") as sidecar:
        assert (await chat(sidecar.url)).status == 502
        shown = await scrape(sidecar.url)

    assert shown.by("kind", "upstream_errors_total") == {"unreachable": 1}
    assert shown.by("code", "requests_total") == {"502": 1}
    assert shown.by("reason", "stream_ends_total") == {}


# --- Sessions, capabilities ------------------------------------------------------------------------------------------


async def test_mappings_by_source_and_outcome() -> None:
    async def asks(sidecar: Sidecar, *fields: bytes) -> None:
        await chat(sidecar.url, *fields)

    async with relayed(ok()) as (_, sidecar):
        await asks(sidecar, b"X-Hermes-Session-Key: k")
        await asks(sidecar, b"X-Hermes-Session-Key: a/b")
        await asks(sidecar, b"X-Hermes-Session-Id: s")
        await asks(sidecar, b"X-OpenWebUI-Chat-Id: c", b"X-OpenWebUI-Task: title_generation")
        await asks(sidecar, b"X-Hermes-Session-Key: a", b"X-Hermes-Session-Key: b")
        await asks(sidecar)
        await ask(sidecar.url, "GET", "/v1/models", b"Origin: http://evil.example")
        shown = await scrape(sidecar.url)

    counted = {labels: value for (name, labels), value in shown.samples.items() if "mappings" in name and value}
    assert {(dict(labels)["source"], dict(labels)["outcome"]): value for labels, value in counted.items()} == {
        ("header:x-hermes-session-key", "mapped"): 1,
        ("header:x-hermes-session-key", "derived"): 1,
        ("client", "mapped"): 1,
        ("skipped", "none"): 1,
        ("none", "refused"): 1,
        ("none", "none"): 1,
    }


async def test_capability_and_status_gauges_follow_the_picture() -> None:
    gateway = await DemoGateway.start()
    async with running_sidecar(gateway.url, probes=True) as sidecar:
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        well = await scrape(sidecar.url)
        await gateway.stop()
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        ill = await scrape(sidecar.url)

    assert well.by("status", "status") == {"partial": 1}
    assert well.value("capability", name="chatCompletions", layer="core") == 1
    assert well.value("capability", name="sessions", layer="enhanced") == 1
    assert well.value("capability", name="memory", layer="enhanced") == 0
    assert well.value("capability", name="images", layer="core") == -1
    assert well.by("kind", "probe_failures_total") == {}
    assert well.value("probe_duration_seconds_count") >= 1
    assert ill.by("status", "status") == {"disconnected": 1}
    assert set(ill.by("kind", "probe_failures_total")) == {"unreachable"}


# --- What logs and metrics share -------------------------------------------------------------------------------------


async def test_request_id_and_traceparent_pass_and_stand_in_the_line() -> None:
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with relayed(ok()) as (upstream, sidecar):
        answer = await chat(sidecar.url, b"X-Request-Id: r-1", b"traceparent: " + trace, b"tracestate: a=b")
        (line,) = await sidecar.ended_exchanges()

    assert upstream.only_request.values("traceparent") == [trace]
    assert upstream.only_request.values("tracestate") == [b"a=b"]
    assert (line["request_id"], line["traceparent"]) == ("r-1", trace.decode())
    assert answer.value("X-Request-Id") == "r-1"


async def test_gateway_that_goes_away_is_one_line_however_many_probes_and_requests_meet_it(tmp_path: Path) -> None:
    """Beside the line that each exchange has anyway; and one more when it is back."""
    gateway = await DemoGateway.start()
    settings = {"PROBE__INTERVAL_S": "0.05", "PROBE__RETRY_S": "0.05"}
    async with await SidecarProcess.start(tmp_path, gateway.url, settings) as sidecar:
        await sidecar.logged('"partial"')
        await gateway.stop()
        assert [(await chat(sidecar.url)).status for _ in range(5)] == [502] * 5
        await sidecar.logged('"disconnected"')
        for _ in range(5):
            await ask(sidecar.url, "POST", "/capabilities/refresh")
        gateway = await DemoGateway.start(urlsplit(gateway.url).port or 0)
        await sidecar.logged('"partial"', count=2)
        await gateway.stop()

    told = [json.loads(line) for line in sidecar.log.splitlines()]
    assert [line["status"] for line in told if line["event"] == "status"][:3] == ["partial", "disconnected", "partial"]
    assert {line["event"] for line in told} == {"listening", "status", "exchange_ended", "draining", "stopped"}


async def test_two_lines_at_the_start_say_what_was_found_and_what_is_missing(tmp_path: Path) -> None:
    gateway = await DemoGateway.start()
    async with await SidecarProcess.start(tmp_path, gateway.url) as sidecar:
        await sidecar.logged('"partial"')
        first, second = (json.loads(line) for line in sidecar.log.splitlines()[:2])
    await gateway.stop()

    assert (first["event"], first["url"], first["gateway"]) == ("listening", sidecar.url, gateway.url)
    assert second["message"].startswith("Chat works; skills, memory, config and scheduled jobs are not available")
