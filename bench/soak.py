"""`make soak`: half an hour of mixed load, and whether anything grows.

Streams, clients that leave in the middle, uploads, small chats of many conversations, and whoever asks the sidecar how
it is. Each minute is one row. What has grown or become slower from the first minutes to the last ends it with exit
code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import uvloop

from bench import peers, streams
from bench.peers import Cores, Peer
from bench.shapes import CHAT_PATH, Shape, request_fields
from bench.streams import BenchFailure

_STREAMS = 40
_STREAM = Shape(events=250, gap_ms=20)
"""Five seconds of 50 events a second."""
_CHATTERS, _CHAT_PAUSE_S = 8, 0.05
_CONVERSATIONS = 500
_LEAVERS, _LEAVE_PAUSE_S = 4, 0.1
_UPLOAD_PAUSE_S = 5.0
_LOOK_PAUSE_S = 1.0
_OWN_PATHS = ("/healthz", "/readyz", "/capabilities", "/metrics", "/sidecar/")
_WARM_UP_MINUTES = 3
"""Pools fill, and malloc finds its size."""
_GROWTH = 1.02
_GROWTH_BYTES = 2 << 20
_SLOWER = 2.0
"""A p99 on a shared machine says no more."""
_IDLE_CONNECTIONS = 256
"""What a pool keeps, for a minute at most."""
_ANSWER_S = 5.0


@dataclass
class Minute:
    """What a minute showed."""

    events_ns: list[int] = field(default_factory=list)
    chats_s: list[float] = field(default_factory=list)
    uploads: int = 0
    left: int = 0
    looks: int = 0
    errors: list[str] = field(default_factory=list)
    memory: int = 0
    sockets: int = 0
    tasks: int = 0
    objects: int = 0
    series: int = 0

    def p99_us(self) -> float:
        return statistics.quantiles(self.events_ns, n=100)[98] / 1000 if len(self.events_ns) > 1 else 0.0

    def chat_p99_ms(self) -> float:
        return statistics.quantiles(self.chats_s, n=100)[98] * 1000 if len(self.chats_s) > 1 else 0.0

    def row(self, number: int) -> str:
        cells = [number, f"{self.memory / 2**20:.1f}", self.sockets, self.tasks, self.objects, self.series]
        cells += [len(self.events_ns), f"{self.p99_us():.0f}", len(self.chats_s), f"{self.chat_p99_ms():.1f}"]
        cells += [self.left, self.uploads, self.looks, len(self.errors)]
        return "| " + " | ".join(map(str, cells)) + " |"


_COLUMNS = (
    *("minute", "MB", "sockets", "tasks", "objects", "series", "events", "p99 µs"),
    *("chats", "p99 ms", "left", "uploads", "looks", "errors"),
)
HEAD = f"| {' | '.join(_COLUMNS)} |\n|{' ---: |' * len(_COLUMNS)}"


class Soak:
    """The loads, all at once, each again and again until the end."""

    def __init__(self, peer: Peer, process: psutil.Process, told: Path) -> None:
        self._peer = peer
        self._process = process
        self._told = told
        self.now = Minute()

    async def run(self, minutes: int) -> list[Minute]:
        done: list[Minute] = []
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self._peer.port}") as session:
            loads = [self._streams(), self._uploads(), self._looks(session)]
            loads += [self._chats(session, number) for number in range(_CHATTERS)]
            loads += [self._leavers(number) for number in range(_LEAVERS)]
            running = [asyncio.ensure_future(load) for load in loads]
            try:
                for number in range(1, minutes + 1):
                    finished, _ = await asyncio.wait(running, timeout=60, return_when=asyncio.FIRST_COMPLETED)
                    for load in finished:
                        load.result()
                    minute, self.now = self.now, Minute()
                    await self._look_inside(session, minute)
                    done.append(minute)
                    print(minute.row(number), flush=True)
            finally:
                for load in running:
                    load.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        return done

    async def at_rest(self) -> Minute:
        """What is left once everybody has gone."""
        await asyncio.sleep(2)
        rest = Minute()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self._peer.port}") as session:
            await self._look_inside(session, rest)
        return rest

    async def _look_inside(self, session: aiohttp.ClientSession, minute: Minute) -> None:
        minute.memory = self._peer.memory_bytes()
        minute.sockets = len(self._process.net_connections("tcp"))
        self._told.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(_ANSWER_S):
            while not self._told.exists():  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0.02)
        told = json.loads(self._told.read_text())
        minute.tasks, minute.objects = told["tasks"], told["objects"]
        async with session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        minute.series = sum(not line.startswith("#") for line in lines)

    # The loads

    async def _streams(self) -> None:
        while True:
            try:
                delays = await streams.paced(self._peer.port, _STREAMS, _STREAM, "soak-stream")
            except BenchFailure as failure:
                self.now.errors.append(f"streams: {failure}")
                continue
            if len(delays.events_ns) != _STREAMS * _STREAM.events:
                self.now.errors.append(f"streams: {len(delays.events_ns)} events came")
            self.now.events_ns += delays.events_ns

    async def _chats(self, session: aiohttp.ClientSession, number: int) -> None:
        body = json.dumps({"model": "soak", "messages": [{"role": "user", "content": "Hello"}]})
        turn = number
        while True:
            turn += _CHATTERS
            fields = request_fields(f"soak-{turn % _CONVERSATIONS}")
            began_at = time.perf_counter()
            async with session.post(CHAT_PATH, data=body, headers=fields) as answer:
                await answer.read()
                if answer.status != 200:
                    self.now.errors.append(f"chat: {answer.status}")
            self.now.chats_s.append(time.perf_counter() - began_at)
            await asyncio.sleep(_CHAT_PAUSE_S)

    async def _leavers(self, number: int) -> None:
        """Leaves in the middle of the answer: after its first byte, and at once every other time."""
        turn = 0
        while True:
            turn += 1
            await streams.leave(self._peer.port, _STREAM, f"soak-leaver-{number}", waits=turn % 2 == 0)
            self.now.left += 1
            await asyncio.sleep(_LEAVE_PAUSE_S)

    async def _uploads(self) -> None:
        while True:
            try:
                await streams.uploads(self._peer.port, 1, "soak-upload")
                self.now.uploads += 1
            except BenchFailure as failure:
                self.now.errors.append(f"upload: {failure}")
            await asyncio.sleep(_UPLOAD_PAUSE_S)

    async def _looks(self, session: aiohttp.ClientSession) -> None:
        while True:
            for path in _OWN_PATHS:
                async with session.get(path) as answer:
                    await answer.read()
                    if answer.status != 200:
                        self.now.errors.append(f"{path}: {answer.status}")
                self.now.looks += 1
            await asyncio.sleep(_LOOK_PAUSE_S)


def complaints(minutes: list[Minute], before: Minute, rest: Minute) -> list[str]:
    """What grew or became slower, in words. `before` and `rest` are the sidecar with nobody there."""
    found = [
        f"{len(minute.errors)} errors in minute {number}: {minute.errors[0]}"
        for number, minute in enumerate(minutes, 1)
        if minute.errors
    ]
    warm = minutes[_WARM_UP_MINUTES:] or minutes
    first, last = warm[: max(1, len(warm) // 5)], warm[-max(1, len(warm) // 5) :]
    for name in ("memory", "objects", "series", "tasks", "sockets"):
        was = statistics.median(getattr(minute, name) for minute in first)
        now = statistics.median(getattr(minute, name) for minute in last)
        slack = _GROWTH_BYTES if name == "memory" else 0.1 * was if name in ("tasks", "sockets", "objects") else 0
        if now > was * (_GROWTH if name == "memory" else 1) + slack:
            found.append(f"{name} grew from {was:g} to {now:g}")
    for what, p99 in (("events", Minute.p99_us), ("chats", Minute.chat_p99_ms)):
        was, now = (statistics.median(p99(minute) for minute in some) for some in (first, last))
        if now > was * _SLOWER:
            found.append(f"the p99 of {what} went from {was:.1f} to {now:.1f}")
    return found + [
        f"{name} at rest: {getattr(before, name)} before, {getattr(rest, name)} after"
        for name in ("tasks", "sockets")
        if getattr(rest, name) > getattr(before, name) + _IDLE_CONNECTIONS
    ]


async def soak(minutes: int) -> int:
    """The exit code."""
    cores = Cores.of_this_machine()
    if cores.client is not None:
        os.sched_setaffinity(0, {cores.client})
    with tempfile.TemporaryDirectory(prefix="hermes-sidecar-soak-") as scratch:
        directory = Path(scratch)
        told = directory / "told.json"
        async with (
            peers.upstream(cores.upstream, directory) as upstream_port,
            peers.soaked(upstream_port, cores.proxy, directory, told) as (peer, process),
        ):
            run = Soak(peer, process, told)
            before = await run.at_rest()
            print(HEAD)
            print(before.row(0), flush=True)
            done = await run.run(minutes)
            rest = await run.at_rest()
            print(rest.row(minutes + 1))
    found = complaints(done, before, rest)
    print("\n".join(found) or "Nothing grew, nothing became slower, nothing failed.")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=int, default=int(os.environ.get("SOAK_MINUTES", "30")))
    options = parser.parse_args()
    if not 1 <= options.minutes <= 24 * 60:
        parser.error("1 minute to a day")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return uvloop.run(soak(options.minutes))


if __name__ == "__main__":
    sys.exit(main())
