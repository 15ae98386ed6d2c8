"""The log line of an exchange: its keys for each end, what it never shows, and when it is written."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import faults
from sidecar.telemetry.exchanges import ExchangeLog
from sidecar.telemetry.lines import Line, line_of, short_hash
from sidecar.telemetry.logs import as_dict
from sidecar.telemetry.record import End, ExchangeRecord

AT = datetime.fromisoformat("2026-11-30T08:41:43.125+00:00").timestamp()
ENDS: tuple[End, ...] = get_args(End)

COMPLETE = ExchangeRecord(
    method=b"POST",
    route="chat_completions",
    status=200,
    end="complete",
    source="header:x-hermes-session-key",
    session_id=b"ws-route-1",
    request_id=b"r1",
    first_byte_s=0.0414,
    duration_s=1.83049,
    answer_bytes=1830,
    fault=None,
    ended_at=AT,
)
LINE = {
    "event": "exchange_ended",
    "level": "info",
    "timestamp": "2026-11-30T08:41:43.125Z",
    "outcome": "complete",
    "status": 200,
    "method": "POST",
    "route": "chat_completions",
    "source": "header:x-hermes-session-key",
    "duration_ms": 1830.5,
    "first_byte_ms": 41.4,
    "bytes": 1830,
    "request_id": "r1",
    "session": hashlib.sha256(b"ws-route-1").hexdigest()[:8],
}
UNREACHABLE = faults.upstream_unreachable("http://127.0.0.1:8642", "connection refused", detail="errno 111")


class Sink:
    """Keeps each call's lines."""

    def __init__(self) -> None:
        self.calls: list[list[dict[str, object]]] = []
        self.called = asyncio.Event()

    def __call__(self, lines: Sequence[Line]) -> None:
        self.calls.append([as_dict(line) for line in lines])
        self.called.set()


def without(line: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in line.items() if key not in keys}


# --- A line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "line"),
    [
        pytest.param(COMPLETE, LINE, id="complete"),
        pytest.param(
            replace(COMPLETE, end="client_left", status=0, first_byte_s=None, answer_bytes=0),
            without(LINE | {"outcome": "client_left", "status": 0, "bytes": 0}, "first_byte_ms"),
            id="client-left-before-the-answer",
        ),
        pytest.param(
            replace(COMPLETE, end="client_left"), LINE | {"outcome": "client_left"}, id="client-left-mid-stream"
        ),
        pytest.param(
            replace(COMPLETE, end="upstream_broke"),
            LINE | {"outcome": "upstream_broke", "level": "warning"},
            id="upstream-broke-mid-stream",
        ),
        pytest.param(
            replace(COMPLETE, end="upstream_broke", status=502, first_byte_s=None, answer_bytes=0, fault=UNREACHABLE),
            without(LINE, "first_byte_ms")
            | {
                "outcome": "upstream_broke",
                "level": "warning",
                "status": 502,
                "bytes": 0,
                "code": "upstream_unreachable",
                "reason": UNREACHABLE.message,
                "detail": "errno 111",
            },
            id="upstream-unreachable",
        ),
        pytest.param(
            replace(COMPLETE, end="timeout"), LINE | {"outcome": "timeout", "level": "warning"}, id="timeout-mid-stream"
        ),
        pytest.param(replace(COMPLETE, end="drained"), LINE | {"outcome": "drained"}, id="drained"),
        pytest.param(
            replace(
                COMPLETE,
                end="refused",
                status=421,
                source="none",
                session_id=None,
                first_byte_s=None,
                request_id=b"",
                answer_bytes=0,
                fault=faults.host_not_allowed(),
            ),
            without(LINE, "first_byte_ms", "session")
            | {
                "outcome": "refused",
                "status": 421,
                "source": "none",
                "bytes": 0,
                "request_id": "",
                "code": "host_not_allowed",
                "reason": faults.host_not_allowed().message,
            },
            id="refused",
        ),
    ],
)
def test_line_of_an_exchange(record: ExchangeRecord, line: dict[str, object]) -> None:
    assert line_of(record) == line


@pytest.mark.parametrize("end", ENDS)
def test_only_troubles_of_the_upstream_are_warnings(end: End) -> None:
    level = line_of(replace(COMPLETE, end=end))["level"]

    assert level == ("warning" if end in ("upstream_broke", "timeout") else "info")


def test_ends_are_those_of_the_glossary() -> None:
    assert set(ENDS) == {"complete", "client_left", "upstream_broke", "timeout", "drained", "refused"}


@given(st.binary(min_size=9, max_size=40))
def test_session_id_shows_only_as_a_short_hash(session_id: bytes) -> None:
    """For any id: eight hex digits, the same for the same id, and nowhere the id itself."""
    line = line_of(replace(COMPLETE, session_id=session_id))

    assert line["session"] == short_hash(session_id) == hashlib.sha256(session_id).hexdigest()[:8]
    assert session_id.decode("latin-1") not in json.dumps(line, ensure_ascii=False)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_what_a_client_chose_is_short_and_printable(method: bytes, request_id: bytes) -> None:
    """For any method and X-Request-Id that can be in a head: ASCII, bounded, and a line that JSON can write."""
    allowed = bytes(byte for byte in range(0x20, 0x100) if byte != 0x7F)
    method, request_id = (bytes(byte for byte in value if byte in allowed) for value in (method, request_id))

    line = line_of(replace(COMPLETE, method=method, request_id=request_id))

    for key, limit in (("method", 16), ("request_id", 64)):
        shown = line[key]
        assert isinstance(shown, str)
        assert shown.isascii()
        assert shown.isprintable()
        assert len(shown) <= 4 * limit
    assert json.loads(json.dumps(line)) == line


# --- When lines are written ------------------------------------------------------------------------------------------


async def test_lines_are_gathered_and_written_once_in_order() -> None:
    sink = Sink()
    log = ExchangeLog(sink)

    log.ended(COMPLETE)
    log.ended(replace(COMPLETE, end="client_left"))
    log.ended(replace(COMPLETE, end="refused"))

    assert sink.calls == []  # ending an exchange writes nothing by itself
    async with asyncio.timeout(2):
        await sink.called.wait()
    assert [[line["outcome"] for line in lines] for lines in sink.calls] == [["complete", "client_left", "refused"]]


async def test_each_gathering_begins_anew() -> None:
    sink = Sink()
    log = ExchangeLog(sink)
    for end in ("complete", "drained"):
        sink.called.clear()
        log.ended(replace(COMPLETE, end=end))
        async with asyncio.timeout(2):
            await sink.called.wait()

    assert [[line["outcome"] for line in lines] for lines in sink.calls] == [["complete"], ["drained"]]


async def test_flush_writes_at_once_and_nothing_twice() -> None:
    sink = Sink()
    log = ExchangeLog(sink)
    log.ended(COMPLETE)

    log.flush()
    log.flush()

    assert [len(lines) for lines in sink.calls] == [1]
    log.ended(replace(COMPLETE, end="drained"))  # whose timer comes after that of the first, were it still there
    sink.called.clear()
    async with asyncio.timeout(2):
        await sink.called.wait()
    assert [[line["outcome"] for line in lines] for lines in sink.calls] == [["complete"], ["drained"]]


def test_flush_of_nothing_writes_nothing() -> None:
    sink = Sink()

    ExchangeLog(sink).flush()

    assert sink.calls == []


async def test_line_has_the_time_of_the_end_not_of_the_writing() -> None:
    sink = Sink()
    log = ExchangeLog(sink)
    log.ended(COMPLETE)
    log.ended(COMPLETE)
    log.flush()

    first, second = (datetime.fromisoformat(str(line["timestamp"])) for line in sink.calls[0])
    assert first <= second
    assert abs(datetime.now(first.tzinfo) - first).total_seconds() < 60


async def test_new_sink_takes_over_and_the_old_one_gets_what_was_gathered() -> None:
    old, new = Sink(), Sink()
    log = ExchangeLog(old)
    log.ended(COMPLETE)

    log.use(new)
    log.ended(replace(COMPLETE, end="drained"))
    log.flush()

    assert [[line["outcome"] for line in lines] for lines in (*old.calls, *new.calls)] == [["complete"], ["drained"]]


def test_bytes_that_were_no_request_have_a_line_without_them() -> None:
    sink = Sink()

    ExchangeLog(sink).refused(faults.header_too_large(65536))

    ((line,),) = sink.calls
    assert datetime.fromisoformat(str(line["timestamp"])).tzinfo is not None
    assert without(dict(line), "timestamp") == {
        "event": "bytes_refused",
        "level": "info",
        "code": "header_too_large",
        "status": 431,
    }


def test_failure_of_our_own_is_told_by_its_place_without_values() -> None:
    sink = Sink()
    secret = "s3cr3t-Marker"
    try:
        raise KeyError(secret)
    except KeyError as exc:
        ExchangeLog(sink).failed(exc)

    ((line,),) = sink.calls
    assert (line["event"], line["level"], line["error"]) == ("internal_error", "error", "KeyError")
    assert str(line["where"]).startswith("['test_exchange_lines.py:")
    assert secret not in json.dumps(line)
