"""Log lines as text: the keys of an exchange's line, and the same as JSON.

Law: ids that open a conversation stand in a line only as short hashes, and nothing that a client chose reaches a
terminal as it is.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring as _quoted
from typing import Final

from sidecar.telemetry.record import ExchangeRecord

Line = dict[str, object] | ExchangeRecord
"""A log line; `level` is one of its keys."""


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
    """The keys of a record's line."""
    line: dict[str, object] = {
        "event": "exchange_ended",
        "level": record.level,
        "timestamp": timestamp(record.ended_at),
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
    parts = [
        _start(record.level, int(at)),
        _fraction(at),
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


def timestamp(at: float) -> str:
    return _second(int(at)) + _fraction(at)


def _fraction(at: float) -> str:
    return _MILLISECONDS[int((at - int(at)) * 1000)]


def _second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def _printable(value: bytes) -> str:
    """What a client chose, so that no terminal obeys it."""
    return value.decode("ascii", "backslashreplace")


def short_hash(value: bytes) -> str:
    """Enough to find the lines of one conversation, not enough to enter it."""
    return _hashes.get(value) or _hashes.keep(value, hashlib.sha256(value).hexdigest()[:8])
