"""One log line per exchange, at its end.

Law: ending an exchange costs the data path one append. Lines are rendered and written together, a moment later, since
rendering them one by one would cost a busy sidecar more than relaying does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as _quoted
from pathlib import Path
from typing import Final, Literal

from sidecar.faults import Fault

End = Literal["complete", "client_left", "upstream_broke", "timeout", "drained", "refused"]
"""The ends of an exchange, everywhere: log, metric, test."""

_GATHER_S: Final = 0.05
_MOST_GATHERED: Final = 64
"""More would hold everybody up while they are rendered: a thousand take milliseconds."""


@dataclass(init=False)
class ExchangeRecord:
    """What is known of an exchange at its end.

    Its `__init__` is written out, since the one that `dataclass` makes would not be compiled.
    """

    method: bytes
    route: str
    """A name from a closed list, never a path."""
    status: int
    end: End
    source: str
    """Where the session id came from."""
    session_id: bytes | None
    request_id: bytes
    first_byte_s: float | None
    duration_s: float
    answer_bytes: int
    fault: Fault | None
    destination: str
    is_derived: bool
    is_stream: bool
    first_token_s: float | None
    request_bytes: int
    usage: Mapping[str, int] | None
    traceparent: bytes | None
    is_followed: bool
    """The id that was sent is a later one of the same session."""
    is_unread: bool
    """Its body might have named the session, but was too long or of another kind."""
    ended_at: float
    """Seconds since the epoch, as the log noted it."""

    def __init__(
        self,
        method: bytes,
        route: str,
        status: int,
        end: End,
        source: str,
        session_id: bytes | None,
        request_id: bytes,
        first_byte_s: float | None,
        duration_s: float,
        answer_bytes: int,
        fault: Fault | None,
        destination: str = "gateway",
        is_derived: bool = False,
        is_stream: bool = False,
        first_token_s: float | None = None,
        request_bytes: int = 0,
        usage: Mapping[str, int] | None = None,
        traceparent: bytes | None = None,
        is_followed: bool = False,
        is_unread: bool = False,
        ended_at: float = 0.0,
    ) -> None:
        self.method = method
        self.route = route
        self.status = status
        self.end = end
        self.source = source
        self.session_id = session_id
        self.request_id = request_id
        self.first_byte_s = first_byte_s
        self.duration_s = duration_s
        self.answer_bytes = answer_bytes
        self.fault = fault
        self.destination = destination
        self.is_derived = is_derived
        self.is_stream = is_stream
        self.first_token_s = first_token_s
        self.request_bytes = request_bytes
        self.usage = usage
        self.traceparent = traceparent
        self.is_followed = is_followed
        self.is_unread = is_unread
        self.ended_at = ended_at

    @property
    def level(self) -> str:
        if self.end in ("upstream_broke", "timeout"):
            return "warning"
        # An open status page, a scraper and a load balancer ask every few seconds.
        return "debug" if self.destination == "own" and self.end == "complete" and self.status < 300 else "info"


Line = dict[str, object] | ExchangeRecord
"""A log line; `level` is one of its keys."""
Sink = Callable[[Sequence[Line]], None]
"""Writes lines, all at once: one write a line would cost more than the line."""


class ExchangeLog:
    """Gathers the records of ended exchanges and hands them to a sink as lines."""

    def __init__(self, sink: Sink, counters: Sequence[Callable[[ExchangeRecord], None]] = ()) -> None:
        """The `counters` are told each record as well, when its line is made."""
        self._sink = sink
        self._counters = tuple(counters)
        self._records: list[ExchangeRecord] = []
        self._timer: asyncio.TimerHandle | None = None

    def use(self, sink: Sink) -> None:
        """Writes to another sink from now on."""
        self.flush()
        self._sink = sink

    def ended(self, record: ExchangeRecord) -> None:
        record.ended_at = time.time()
        self._records.append(record)
        if len(self._records) >= _MOST_GATHERED:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.flush)

    def refused(self, fault: Fault) -> None:
        """Bytes that never became a request were refused."""
        line: dict[str, object] = {"event": "bytes_refused", "level": "info", "timestamp": _timestamp(time.time())}
        line |= {"code": fault.code.code, "status": fault.status}
        self._sink([line])

    def failed(self, exc: BaseException) -> None:
        """The sidecar itself failed: the place in its code, without the values that were there."""
        place = traceback.extract_tb(exc.__traceback__)
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in place[-4:]]
        line: dict[str, object] = {"event": "internal_error", "level": "error", "timestamp": _timestamp(time.time())}
        line |= {"error": type(exc).__name__, "where": where}
        self._sink([line])

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        for count in self._counters:
            for record in records:
                count(record)
        if records:
            self._sink(records)


def json_lines(lines: Sequence[Line], prefixes: Mapping[str, str]) -> str:
    """One line of JSON for each, behind the prefix of its level; a level without a prefix is left out."""
    out: list[str] = []
    for line in lines:
        level = line.level if isinstance(line, ExchangeRecord) else str(line["level"])
        prefix = prefixes.get(level)
        if prefix is not None:
            text = json_of(line) if isinstance(line, ExchangeRecord) else json.dumps(line, ensure_ascii=False)
            out.append(f"{prefix}{text}\n")
    return "".join(out)


def line_of(record: ExchangeRecord) -> dict[str, object]:
    """The keys of a record's line. Ids that open a conversation stand in it only as short hashes."""
    line: dict[str, object] = {
        "event": "exchange_ended",
        "level": record.level,
        "timestamp": _timestamp(record.ended_at),
        "outcome": record.end,
        "status": record.status,
        "method": _printable(record.method[:16]),
        "route": record.route,
        "source": record.source,
        "duration_ms": _tenths_of_ms(record.duration_s) / 10,
        "bytes": record.answer_bytes,
        "request_id": _printable(record.request_id[:64]),
    }
    if record.session_id is not None:
        line["session"] = short_hash(record.session_id)
    if record.first_byte_s is not None:
        line["first_byte_ms"] = _tenths_of_ms(record.first_byte_s) / 10
    if record.first_token_s is not None:
        line["first_token_ms"] = _tenths_of_ms(record.first_token_s) / 10
    if record.fault is not None:
        line["code"] = record.fault.code.code
        line["reason"] = record.fault.message
        if record.fault.detail:
            line["detail"] = record.fault.detail
    if record.traceparent is not None:
        line["traceparent"] = _printable(record.traceparent[:64])
    return line


def json_of(record: ExchangeRecord) -> str:
    """The same as `json.dumps(line_of(record), ensure_ascii=False)`, for an eighth of its price.

    Put together by hand: a busy sidecar writes thousands a second.
    """
    at = record.ended_at
    whole = int(at)
    parts = [
        _start(record.level, whole),
        _MILLISECONDS[int((at - whole) * 1000)],
        _shared_keys(record),
        _milliseconds(record.duration_s),
        f', "bytes": {record.answer_bytes}, "request_id": {_quoted(_printable(record.request_id[:64]))}',
    ]
    if record.session_id is not None:
        parts.append(f', "session": "{short_hash(record.session_id)}"')
    if record.first_byte_s is not None:
        parts.append(f', "first_byte_ms": {_milliseconds(record.first_byte_s)}')
    if record.first_token_s is not None:
        parts.append(f', "first_token_ms": {_milliseconds(record.first_token_s)}')
    fault = record.fault
    if fault is not None:
        parts.append(f', "code": "{fault.code.code}", "reason": {_quoted(fault.message)}')
        if fault.detail:
            parts.append(f', "detail": {_quoted(fault.detail)}')
    if record.traceparent is not None:
        parts.append(f', "traceparent": {_quoted(_printable(record.traceparent[:64]))}')
    parts.append("}")
    return "".join(parts)


class _Texts:
    """Texts that many lines have in common, so that each is written once.

    Full, it forgets all of them at once: to know the oldest, as `functools.lru_cache` does, costs more than writing.
    """

    __slots__ = ("_known", "_most")

    def __init__(self, most: int) -> None:
        self._known: dict[object, str] = {}
        self._most = most

    def get(self, key: object) -> str | None:
        return self._known.get(key)

    def keep(self, key: object, text: str) -> str:
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[key] = text
        return text


_starts: Final = _Texts(16)
_shared: Final = _Texts(256)
_hashes: Final = _Texts(1024)


def _start(level: str, whole: int) -> str:
    """Up to the milliseconds of the time stamp."""
    return _starts.get((level, whole)) or _starts.keep(
        (level, whole), f'{{"event": "exchange_ended", "level": "{level}", "timestamp": "{_second(whole)}'
    )


def _shared_keys(record: ExchangeRecord) -> str:
    """From there up to the duration."""
    key = (record.end, record.status, record.method[:16], record.route, record.source)
    return _shared.get(key) or _shared.keep(
        key,
        f'", "outcome": "{record.end}", "status": {record.status}, "method": {_quoted(_printable(key[2]))}, '
        f'"route": "{record.route}", "source": {_quoted(record.source)}, "duration_ms": ',
    )


def _tenths_of_ms(seconds: float) -> int:
    return int(seconds * 10_000 + 0.5)


def _milliseconds(seconds: float) -> str:
    """With one decimal, as json.dumps would write it."""
    tenths = _tenths_of_ms(seconds)
    return f"{tenths // 10}.{tenths % 10}"


_MILLISECONDS: Final = tuple(f".{number:03d}Z" for number in range(1000))


def _timestamp(at: float) -> str:
    whole = int(at)
    return _second(whole) + _MILLISECONDS[int((at - whole) * 1000)]


def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def _printable(value: bytes) -> str:
    """What a client chose, so that no terminal obeys it."""
    return value.decode("ascii", "backslashreplace")


def short_hash(value: bytes) -> str:
    """Enough to find the lines of one conversation, not enough to enter it."""
    return _hashes.get(value) or _hashes.keep(value, hashlib.sha256(value).hexdigest()[:8])
