"""One log line per exchange, at its end.

Law: ending an exchange costs the data path one append. Lines are rendered and written together, a moment later, since
rendering them one by one would cost a busy sidecar more than relaying does.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sidecar.faults import Fault
from sidecar.telemetry.lines import Line, timestamp
from sidecar.telemetry.record import ExchangeRecord

_GATHER_S: Final = 0.05
_MOST_GATHERED: Final = 64
"""More would hold everybody up while they are rendered: a thousand take milliseconds."""

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
        line: dict[str, object] = {"event": "bytes_refused", "level": "info", "timestamp": timestamp(time.time())}
        line |= {"code": fault.code.code, "status": fault.status}
        self._sink([line])

    def failed(self, exc: BaseException) -> None:
        """The sidecar itself failed: the place in its code, without the values that were there."""
        place = traceback.extract_tb(exc.__traceback__)
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in place[-4:]]
        line: dict[str, object] = {"event": "internal_error", "level": "error", "timestamp": timestamp(time.time())}
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
