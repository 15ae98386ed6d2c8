"""A passive observer of an answer's payload: first token, gaps between events, usage. It returns nothing, so it can
change nothing.

Law: the counts are the same however the bytes are cut. Keep-alive comments are no events, and events without data are
none either. Lines end with CRLF, CR or LF. Source: the HTML standard, server-sent events, 9.2.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

from sidecar.relay.chunked import MANY_BYTES, Observer, chunk_of, is_plain_event, unframed
from sidecar.relay.usage import usage_in

_TAIL_BYTES: Final = 4096
"""How much of the payload's end is searched for `usage`: the event that holds it, and `[DONE]` after it."""
_TOKEN: Final = re.compile(rb'"(?:content|reasoning_content|text|delta|arguments)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"[^"]')
"""The beginning of a delta that says something; the first chunk of many servers has an empty one."""
_TOKEN_OVERLAP_BYTES: Final = 64
"""More than the longest match, so that none is lost where the bytes are cut."""
_LINE_START_BYTES: Final = 5
"""How much of an unfinished line is kept: enough to tell whether it is a data line."""
_MOST_WAITING: Final = 64
"""So many chunks at most wait to be looked through."""


class Gaps(Protocol):
    """Where the gaps between events go."""

    def observe(self, seconds: float, times: int = 1) -> None: ...


class PayloadObserver(Observer):
    """Keeps an answer's end, to read its `usage`."""

    __slots__ = ("_newer", "_newer_bytes", "_older")

    def __init__(self) -> None:
        super().__init__()
        self._older: list[bytes] = []
        """Enough for the tail, or all that passed before `_newer`."""
        self._newer: list[bytes] = []
        self._newer_bytes = 0

    def saw(self, payload: bytes) -> None:
        end = _end_of(payload)
        self._keep(end, len(end))

    def _keep(self, piece: bytes, payload_bytes: int) -> None:
        if self._newer_bytes >= _TAIL_BYTES:
            self._older = self._newer
            self._newer = []
            self._newer_bytes = 0
        self._newer.append(piece)
        self._newer_bytes += payload_bytes

    def _end(self) -> bytes:
        if not self._older and len(self._newer) == 1:
            return self._newer[0]
        return _end_of(b"".join(self._older + self._newer))

    @property
    def usage(self) -> dict[str, int]:
        """Token counts by type, as the answer told them last; empty where it did not."""
        return usage_in(self._end())


class PutAside:
    """The chunks of all streams that wait to be looked through, dozens at once.

    A few streams wake a process whose code has left the processor's cache, and the less of it each event needs the
    cheaper it is. One place for all of them: what each stream put aside for itself would leave the cache meanwhile.
    """

    __slots__ = ("_came_at", "_chunks", "_observers", "gaps")

    def __init__(self, gaps: Gaps) -> None:
        self.gaps = gaps
        self._observers: list[StreamObserver] = []
        self._chunks: list[bytes] = []
        self._came_at: list[float] = []

    def put(self, observer: StreamObserver, chunk: bytes, came_at: float) -> None:
        self._observers.append(observer)
        self._chunks.append(chunk)
        self._came_at.append(came_at)
        if len(self._chunks) >= _MOST_WAITING:
            self.look_through()

    def look_through(self) -> None:
        """Counts all of them. Whoever reads the gaps, or a stream's `events`, calls it first."""
        observers, chunks, came_at = self._observers, self._chunks, self._came_at
        if not chunks:
            return
        self._observers, self._chunks, self._came_at = [], [], []
        for place in range(len(chunks)):
            observers[place].look_through(chunks[place], came_at[place])


class StreamObserver(PayloadObserver):
    """Observes a stream of events. What it keeps are chunks, since they come as such and need not be cut then.

    After the first token, a chunk and its time are only put aside.
    """

    __slots__ = (
        "_before_token",
        "_block_has_data",
        "_clock",
        "_is_between_events",
        "_last_event_at",
        "_line_start",
        "_put_aside",
        "_skips_lf",
        "events",
        "first_token_at",
    )

    def __init__(self, put_aside: PutAside, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._put_aside = put_aside
        self._clock = clock
        self._line_start = b""
        self._block_has_data = False
        self._skips_lf = False
        self._is_between_events = True
        """Nothing of what passed matters for what comes."""
        self._last_event_at = 0.0
        self._before_token = b""
        self.events = 0
        self.first_token_at: float | None = None
        """On the monotonic clock."""

    def takes_events(self) -> bool:
        self._put_aside.look_through()
        return self._is_between_events and self.first_token_at is not None

    def saw(self, payload: bytes) -> None:
        self._put_aside.look_through()
        if payload:
            end = _end_of(payload)
            self._keep(chunk_of(end), len(end))
        now = self._clock()
        if self.first_token_at is None:
            self._look_for_token(payload, now)
        self._look_at(payload, now)

    def saw_chunk(self, chunk: bytes, start: int, end: int) -> None:
        """This runs for every token of a stream."""
        if self.first_token_at is None or end - start > _TAIL_BYTES:
            self.saw(chunk[start:end])
        else:
            self._put_aside.put(self, chunk, self._clock())

    def look_through(self, chunk: bytes, came_at: float) -> None:
        """Counts a chunk that was put aside."""
        payload = chunk[chunk.find(b"\n") + 1 : len(chunk) - 2]
        self._keep(chunk, len(payload))
        self._look_at(payload, came_at)

    def saw_events(self, count: int, last: bytes) -> None:
        # More than half of it is payload, since no event is shorter than its framing.
        if len(last) >= MANY_BYTES:
            self._older = []
            self._newer = [last]
            self._newer_bytes = _TAIL_BYTES
        else:
            self._keep(last, len(last) // 2)
        self._count(count, self._clock())

    def _end(self) -> bytes:
        self._put_aside.look_through()
        return _end_of(unframed(b"".join(self._older + self._newer)))

    def _look_at(self, payload: bytes, came_at: float) -> None:
        ended = self._whole_events(payload) or self._ended_events(payload)
        if ended:
            self._count(ended, came_at)

    def _count(self, ended: int, came_at: float) -> None:
        if self.events:
            self._put_aside.gaps.observe(came_at - self._last_event_at)
        if ended > 1:  # they came together
            self._put_aside.gaps.observe(0.0, ended - 1)
        self.events += ended
        self._last_event_at = came_at

    def _look_for_token(self, payload: bytes, now: float) -> None:
        text = self._before_token + payload
        if _TOKEN.search(text) is not None:
            self.first_token_at = now
            self._before_token = b""
        else:
            self._before_token = text[-_TOKEN_OVERLAP_BYTES:]

    def _whole_events(self, payload: bytes) -> int:
        """How many events these are, if they are the usual ones and no others: whole, each beginning with its data."""
        is_plain = self._is_between_events and is_plain_event(payload, 0, len(payload))
        if not is_plain or payload.find(b"\r") >= 0:
            return 0
        if payload.find(b"\n") == len(payload) - 2:
            return 1
        blocks = payload.count(b"\n\n")
        return blocks if payload.count(b"\n\ndata:") == blocks - 1 else 0

    def _ended_events(self, payload: bytes) -> int:
        """How many events with data end in this payload."""
        if not payload:
            return 0
        if self._skips_lf and payload[:1] == b"\n":
            payload = payload[1:]
        self._skips_lf = payload.endswith(b"\r")
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = payload.split(b"\n")
        lines[0] = self._line_start + lines[0]
        self._line_start = lines.pop()[:_LINE_START_BYTES]
        ended = 0
        for line in lines:
            if line:
                if line[:5] in (b"data:", b"data"):
                    self._block_has_data = True
            elif self._block_has_data:
                ended += 1
                self._block_has_data = False
        self._is_between_events = not (self._line_start or self._block_has_data or self._skips_lf)
        return ended


def _end_of(payload: bytes) -> bytes:
    return payload if len(payload) <= _TAIL_BYTES else payload[-_TAIL_BYTES:]
