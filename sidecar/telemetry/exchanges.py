"""One log line per exchange, at its end.

Law: ending an exchange costs the data path one append. Lines are rendered and written together, a moment later, since
rendering them one by one would cost a busy sidecar more than relaying does.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from sidecar.faults import Fault

End = Literal["complete", "client_left", "upstream_broke", "timeout", "drained", "refused"]
"""The ends of an exchange, everywhere: log, metric, test."""

_GATHER_S = 0.05

Line = Mapping[str, object]
"""A log line's keys; `level` is one of them."""
Sink = Callable[[Sequence[Line]], None]
"""Writes lines, all at once: one write a line would cost more than the line."""


class ExchangeRecord(NamedTuple):
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
    destination: str = "gateway"
    is_derived: bool = False
    is_stream: bool = False
    first_token_s: float | None = None
    request_bytes: int = 0
    usage: Mapping[str, int] = {}


class ExchangeLog:
    """Gathers the records of ended exchanges and hands them to a sink as lines."""

    def __init__(self, sink: Sink, count: Callable[[ExchangeRecord], None] = lambda _: None) -> None:
        """`count` is told each record as well, when its line is made."""
        self._sink = sink
        self._count = count
        self._records: list[tuple[float, ExchangeRecord]] = []
        self._timer: asyncio.TimerHandle | None = None

    def use(self, sink: Sink) -> None:
        """Writes to another sink from now on."""
        self.flush()
        self._sink = sink

    def ended(self, record: ExchangeRecord) -> None:
        self._records.append((time.time(), record))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.flush)

    def refused(self, fault: Fault) -> None:
        """Bytes that never became a request were refused."""
        line = {"event": "bytes_refused", "level": "info", "timestamp": _timestamp(time.time())}
        self._sink([{**line, "code": fault.code.code, "status": fault.status}])

    def failed(self, exc: BaseException) -> None:
        """The sidecar itself failed: the place in its code, without the values that were there."""
        place = traceback.extract_tb(exc.__traceback__)
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in place[-4:]]
        line = {"event": "internal_error", "level": "error", "timestamp": _timestamp(time.time())}
        self._sink([{**line, "error": type(exc).__name__, "where": where}])

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        for _, record in records:
            self._count(record)
        if records:
            self._sink([line_of(ended_at, record) for ended_at, record in records])


def line_of(ended_at: float, record: ExchangeRecord) -> dict[str, object]:
    """The keys of a record's line. Ids that open a conversation stand in it only as short hashes."""
    line: dict[str, object] = {
        "event": "exchange_ended",
        "level": "warning" if record.end in ("upstream_broke", "timeout") else "info",
        "timestamp": _timestamp(ended_at),
        "outcome": record.end,
        "status": record.status,
        "method": _printable(record.method[:16]),
        "route": record.route,
        "source": record.source,
        "duration_ms": round(record.duration_s * 1000, 1),
        "bytes": record.answer_bytes,
        "request_id": _printable(record.request_id[:64]),
    }
    if record.session_id is not None:
        line["session"] = short_hash(record.session_id)
    if record.first_byte_s is not None:
        line["first_byte_ms"] = round(record.first_byte_s * 1000, 1)
    if record.first_token_s is not None:
        line["first_token_ms"] = round(record.first_token_s * 1000, 1)
    if record.fault is not None:
        line["code"] = record.fault.code.code
        line["reason"] = record.fault.message
        if record.fault.detail:
            line["detail"] = record.fault.detail
    return line


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _printable(value: bytes) -> str:
    """What a client chose, so that no terminal obeys it."""
    return value.decode("ascii", "backslashreplace")


def short_hash(value: bytes) -> str:
    """Enough to find the lines of one conversation, not enough to enter it."""
    return hashlib.sha256(value).hexdigest()[:8]
