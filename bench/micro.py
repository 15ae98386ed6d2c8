"""`make bench-micro`: what each part of the sidecar costs, in microseconds of Python, without sockets.

Plain functions called in a loop; the least of many short runs, since everything else on a machine only adds.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench import fakes, shapes
from bench.fakes import Bare
from sidecar.capabilities.model import Picture
from sidecar.config import from_mapping
from sidecar.relay import answers, fields
from sidecar.relay.admission import admit
from sidecar.relay.answer_heads import read_answer_head
from sidecar.relay.request import Request
from sidecar.relay.routes import ROUTE_NAMES
from sidecar.relay.stream import PayloadObserver, PutAside, StreamObserver
from sidecar.relay.wire import parse_request_head
from sidecar.rules import rules
from sidecar.sessions.lineage import Lineage
from sidecar.sessions.mapping import decide
from sidecar.sessions.sources import document_of
from sidecar.sessions.store import open_store
from sidecar.telemetry.lines import json_of
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.record import ExchangeRecord

_RUNS, _CALLS = 60, 300
_ASKED = 200
_SERVER_S = 10.0
_RULES = rules(from_mapping(fakes.SETTINGS), Picture(), None)


class Cost(NamedTuple):
    what: str
    us: float


def least_us(function: Callable[[], object], calls: int = _CALLS) -> float:
    """Microseconds a call, in the best of many runs."""
    least = float("inf")
    for _ in range(_RUNS):
        began_at = time.perf_counter()
        for _ in range(calls):
            function()
        least = min(least, time.perf_counter() - began_at)
    return least / calls * 1e6


async def costs() -> AsyncIterator[Cost]:
    bare = await Bare.make()
    try:
        yield Cost("an exchange, whole: small chat, JSON answer", least_us(bare.chat))
        bare.flush()
        for cost in (*_parts_of_a_request(), *_parts_of_an_end()):
            yield cost
        bare.begin_stream()
        with_observer, without = least_us(bare.event), least_us(bare.event_unseen)
        yield Cost("an event of a stream, whole", with_observer)
        yield Cost("… of it the observer", max(0.0, with_observer - without))
    finally:
        await bare.close()
    observer = StreamObserver(PutAside(Metrics(ROUTE_NAMES, []).cells.gaps))
    event = shapes.event(0)
    observer.saw(event)
    yield Cost("… the observer by itself, after the first token", least_us(lambda: observer.saw(event)))
    async for cost in _stores():
        yield cost


def _parts_of_a_request() -> list[Cost]:
    sent = fakes.CHAT[: fakes.CHAT.index(b"\r\n\r\n") + 2]
    head = parse_request_head(sent)

    def admitted() -> Request:
        request = Request(head.method, head.minor)
        admit(request, head, _RULES, peer=b"127.0.0.1", is_draining=False)
        return request

    request = admitted()
    _, watched = fields.sort_out(head.fields, _RULES.watched_names)
    keyless = {name: lines for name, lines in watched.items() if name not in fields.ROUTE_KEYS}
    short = json.loads(fakes.CHAT_BODY)
    long = json.dumps({**short, "messages": short["messages"] * 500}).encode()
    block = fakes.ANSWER_HEAD[:-2]
    answer = read_answer_head(block)
    return [
        Cost("… read the request's head", least_us(lambda: parse_request_head(sent))),
        Cost("… admit it: guard, mapping, fields", least_us(admitted)),
        Cost("   … of it the mapping, key in a header", least_us(lambda: decide(watched, _RULES.mapping))),
        Cost("   … the mapping where nothing names a session", least_us(lambda: decide(keyless, _RULES.mapping))),
        Cost("… read the answer's head", least_us(lambda: read_answer_head(block))),
        Cost("… write it for the client", least_us(lambda: answers.relayed_head(request, answer, 500, close=False))),
        Cost("with a body source: read a body of 64 bytes", least_us(lambda: document_of(fakes.CHAT_BODY))),
        Cost(f"with a body source: read a body of {len(long) // 1000} kB", least_us(lambda: document_of(long), 20)),
    ]


def _parts_of_an_end() -> list[Cost]:
    metrics, recent = Metrics(ROUTE_NAMES, ["header:x-hermes-session-key"]), Recent()
    usage = {"prompt": 9, "completion": 60}
    record = ExchangeRecord(
        b"POST", "chat_completions", 200, "complete", "header:x-hermes-session-key", b"bench", b"5f1d0c",
        0.01, 0.02, 500, None, request_bytes=64, usage=usage,
    )  # fmt: skip
    null = Path("/dev/null").open("w")  # noqa: SIM115  closed below

    def observe() -> dict[str, int]:
        observer = PayloadObserver()
        observer.saw(fakes.ANSWER_BODY)
        return observer.usage

    try:
        return [
            Cost("… observe a JSON answer, read its usage", least_us(observe)),
            Cost("… metrics", least_us(lambda: metrics.exchange_ended(record))),
            Cost("… table of recent conversations", least_us(lambda: recent.exchange_ended(record))),
            Cost("… log line", least_us(lambda: null.write(json_of(record) + "\n"))),
        ]
    finally:
        null.close()


async def _stores() -> AsyncIterator[Cost]:
    """What a turn waits for, from asking the store to its answer; a hundred turns at once share a round."""
    with tempfile.TemporaryDirectory(prefix="hermes-sidecar-bench-") as scratch:
        directory = Path(scratch)
        yield Cost("store memory: known session", await _known_us("memory"))
        url = f"sqlite://{directory / 'lineage.sqlite3'}"
        yield Cost("store sqlite, one worker: known session", await _known_us(url))
        for at_once in (1, 100):
            asked = await _asked_us(url, at_once)
            yield Cost(f"store sqlite, several workers: {at_once} at once, for each", asked)
        async with _redis(directory) as redis_url:
            if redis_url is None:
                print("(store redis left out: apt-get install redis-server)", file=sys.stderr)
                return
            for at_once in (1, 100):
                yield Cost(f"store redis: {at_once} at once, for each", await _asked_us(redis_url, at_once))


async def _lineage(url: str, workers: int) -> Lineage:
    store = open_store(url, workers=workers, environ={})
    await store.open()

    def fail(reason: object) -> None:
        raise RuntimeError(f"{url} failed: {reason}")

    return Lineage(store, is_on=True, on_rotation=lambda: None, on_store_error=fail, on_failure=fail)


async def _known_us(url: str) -> float:
    lineage = await _lineage(url, workers=1)
    try:
        await lineage.settle(b"bench")
        return least_us(lambda: lineage.is_settled(b"bench") and lineage.newest(b"bench"))
    finally:
        await lineage.close()


async def _asked_us(url: str, at_once: int) -> float:
    lineage = await _lineage(url, workers=2)
    try:
        least = float("inf")
        for _ in range(max(10, _ASKED // at_once)):
            began_at = time.perf_counter()
            await asyncio.gather(*(lineage.settle(b"bench-%d" % number) for number in range(at_once)))
            least = min(least, time.perf_counter() - began_at)
        return least / at_once * 1e6
    finally:
        await lineage.close()


@asynccontextmanager
async def _redis(directory: Path) -> AsyncIterator[str | None]:
    """The URL of a Redis of our own, on a free loopback port, or None where there is none on this machine."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", ""]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # noqa: S603, ASYNC220
    try:
        await _answers(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, _SERVER_S)


async def _answers(port: int) -> None:
    async with asyncio.timeout(_SERVER_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


async def main() -> None:
    print(f"Python {platform.python_version()}, least of {_RUNS} runs\n\n| what | µs |\n| --- | ---: |")
    async for cost in costs():
        print(f"| {cost.what} | {cost.us:.2f} |", flush=True)


if __name__ == "__main__":
    uvloop.run(main())
