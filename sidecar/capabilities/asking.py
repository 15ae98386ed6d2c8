"""Asking one question: a GET over the relay's own connections, so that a probe and a chat always go to the same place.

Law: reads only. No body, no redirect followed, no cookie, no client's credential, at most 64 KiB read, a limit on time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sidecar import __version__
from sidecar.capabilities.judgement import Answer, Failure
from sidecar.faults import Fault
from sidecar.relay.answer_heads import AnswerHead
from sidecar.relay.pool import Pool
from sidecar.relay.upstream import Receiver, Upstream
from sidecar.relay.wire import Fields

_MOST_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Place:
    """A server that can be asked."""

    pool: Pool
    netloc: str
    prefix: str
    timeout_s: float
    fields: Fields = field(default_factory=list, repr=False)
    """Credentials that this server, and no other, gets."""


async def ask(place: Place, path: str) -> Answer:
    """The answer to `GET path`, or what went wrong. Never raises but for cancellation."""
    asked_at = time.time()
    question = _Question(asked_at, path)
    try:
        async with asyncio.timeout(place.timeout_s):
            return await question.put(place)
    except TimeoutError:
        return question.failed("timeout", f"no answer within {place.timeout_s:g} s")
    except Fault as fault:
        return question.failed("unreachable", fault.message)
    finally:
        question.leave()


class _Question(Receiver):
    """One exchange of the sidecar's own."""

    def __init__(self, asked_at: float, path: str) -> None:
        self._asked_at = asked_at
        self._path = path
        self._upstream: Upstream | None = None
        self._head: AnswerHead | None = None
        self._pieces: list[bytes] = []
        self._read_bytes = 0
        self._done: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()

    async def put(self, place: Place) -> Answer:
        lines: Fields = [
            (b"Host", place.netloc.encode()),
            (b"Accept", b"application/json"),
            (b"User-Agent", b"hermes-sidecar-probe/" + __version__.encode()),
            *place.fields,
        ]
        target = f"{place.prefix}{self._path}".encode()
        head = b"GET %b HTTP/1.1\r\n" % target + b"".join([b"%b: %b\r\n" % line for line in lines]) + b"\r\n"
        kept = place.pool.take(is_safe=True)
        answer = await self._ask(kept or await place.pool.connect(), head)
        if answer is None:  # the kept connection had gone stale
            self._done = asyncio.get_running_loop().create_future()
            answer = await self._ask(await place.pool.connect(), head)
        return answer or self.failed("broken", "it closed the connection without an answer")

    async def _ask(self, upstream: Upstream, head: bytes) -> Answer | None:
        self._upstream = upstream
        upstream.ask(self, b"GET", head, bare=True, is_safe=True)
        upstream.request_is_sent = True
        return await self._done

    def leave(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.leave()

    def failed(self, failure: Failure, detail: str) -> Answer:
        return Answer(self._path, failure=failure, detail=detail, asked_at=self._asked_at)

    def _finish(self, answer: Answer | None) -> None:
        if not self._done.done():
            self._done.set_result(answer)

    # What the connection says

    def heard(self) -> None:
        pass

    def observer_of(self, head: AnswerHead) -> None:
        return None

    def answer_head(self, head: AnswerHead, body: int, piece: bytes) -> None:
        self._head = head
        if piece:
            self.answer_piece(piece)

    def answer_piece(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._read_bytes += len(piece)
        if self._read_bytes >= _MOST_BYTES:
            self.leave()
            self._finish(self._answer(is_whole=False))

    def answer_end(self) -> None:
        self._upstream = None
        self._finish(self._answer(is_whole=True))

    def answer_upgrade(self, head: AnswerHead, rest: bytes) -> None:
        self._head = head
        self.leave()
        self._finish(self.failed("broken", "it switched protocols without being asked"))

    def upstream_lost(self, why: str, *, answered: bool) -> None:
        upstream, self._upstream = self._upstream, None
        if not answered and upstream is not None and upstream.served:
            self._finish(None)
        else:
            self._finish(self.failed("broken", why))

    def pause_request(self) -> None:
        pass

    def resume_request(self) -> None:
        pass

    def _answer(self, *, is_whole: bool) -> Answer:
        head = self._head
        assert head is not None
        values = {name.lower(): value.decode("latin-1") for name, value in head.lines}
        return Answer(
            self._path,
            head.status,
            values.get(b"content-type", "").lower(),
            values.get(b"allow", "").upper(),
            values.get(b"server", "").lower(),
            b"".join(self._pieces)[:_MOST_BYTES],
            is_whole,
            asked_at=self._asked_at,
        )
