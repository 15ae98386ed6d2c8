"""How lines are written: JSON by hand is JSON, the console is for people, and journald gets its levels."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, TextIO, get_args

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from sidecar.faults import Fault, FaultCode
from sidecar.relay.routes import ROUTE_NAMES
from sidecar.telemetry import logs
from sidecar.telemetry.lines import json_of, line_of
from sidecar.telemetry.record import End, ExchangeRecord

RECORD = ExchangeRecord(
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
    first_token_s=0.51,
    traceparent=b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)

SECONDS = st.floats(0, 1e6)
WORDS = st.text(st.characters(codec="utf-8"), max_size=30)
RECORDS = st.builds(
    ExchangeRecord,
    method=st.binary(max_size=20),
    route=st.sampled_from(ROUTE_NAMES),
    status=st.integers(0, 999),
    end=st.sampled_from(get_args(End)),
    source=st.sampled_from(["client", "none", "skipped", "header:x-a", 'body:a."b'])
    | WORDS.map(lambda word: f"body:{word}"),
    session_id=st.none() | st.binary(max_size=20),
    request_id=st.binary(max_size=80),
    first_byte_s=st.none() | SECONDS,
    duration_s=SECONDS,
    answer_bytes=st.integers(0, 2**63),
    ended_at=st.floats(0, 4e9),
    fault=st.none() | st.builds(Fault, st.sampled_from(FaultCode), WORDS, WORDS, detail=WORDS),
    is_derived=st.booleans(),
    is_stream=st.booleans(),
    first_token_s=st.none() | SECONDS,
    request_bytes=st.integers(0, 2**63),
    traceparent=st.none() | st.binary(max_size=80),
)


@pytest.fixture(autouse=True)
def structlog_as_it_was() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@contextmanager
def journal(path: Path) -> Iterator[tuple[TextIO, Mapping[str, str]]]:
    """A stream that systemd says is journald's, and the environment that says so."""
    with path.open("w+") as stream:
        there = os.fstat(stream.fileno())
        yield stream, {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}"}


def written_by(log_format: Literal["auto", "console", "json"], level: str = "info") -> str:
    """What a line of each kind looks like on a stream that is no terminal."""
    out = io.StringIO()
    sink = logs.configure(level, log_format, out, {})
    structlog.get_logger().info("listening", url="http://127.0.0.1:8650")
    sink([RECORD, {"event": "bytes_refused", "level": "info", "code": "invalid_request"}])
    return out.getvalue()


# --- JSON ------------------------------------------------------------------------------------------------------------


@given(RECORDS)
def test_json_put_together_by_hand_is_what_json_would_write(record: ExchangeRecord) -> None:
    """For any record: the same text, keys in the same order, and one line."""
    text = json_of(record)

    assert text == json.dumps(line_of(record), ensure_ascii=False)
    assert json.loads(text) == line_of(record)
    assert "\n" not in text


def test_line_says_what_an_operator_asks_for() -> None:
    assert json.loads(json_of(RECORD)) == {
        "event": "exchange_ended",
        "level": "info",
        "timestamp": "1970-01-01T00:00:00.000Z",
        "outcome": "complete",
        "status": 200,
        "method": "POST",
        "route": "chat_completions",
        "source": "header:x-hermes-session-key",
        "session": hashlib.sha256(b"ws-route-1").hexdigest()[:8],
        "first_byte_ms": 41.4,
        "first_token_ms": 510.0,
        "duration_ms": 1830.5,
        "bytes": 1830,
        "request_id": "r1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }


def test_line_costs_microseconds() -> None:
    """About 3 µs where it was written; json.dumps of a dict took 9. The limit allows for a slow machine."""
    count = 20_000
    began = time.process_time()
    for _ in range(count):
        json_of(RECORD)

    assert (time.process_time() - began) / count < 20e-6


def test_elsewhere_than_on_a_terminal_all_is_json() -> None:
    lines = [json.loads(line) for line in written_by("auto").splitlines()]

    assert [line["event"] for line in lines] == ["listening", "exchange_ended", "bytes_refused"]
    assert lines[0]["url"] == "http://127.0.0.1:8650"
    assert all(line["level"] == "info" for line in lines)


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 3), ("warning", 0), ("error", 0)])
def test_level_holds_for_exchange_lines_too(level: str, count: int) -> None:
    assert len(written_by("json", level).splitlines()) == count


def test_upstream_trouble_is_written_at_level_warning() -> None:
    out = io.StringIO()
    sink = logs.configure("warning", "json", out, {})

    sink([RECORD, replace(RECORD, end="upstream_broke")])

    assert [json.loads(line)["outcome"] for line in out.getvalue().splitlines()] == ["upstream_broke"]


# --- For people ------------------------------------------------------------------------------------------------------


def test_console_has_a_line_each_with_the_same_keys() -> None:
    listening, exchange, _ = written_by("console").splitlines()

    assert "listening" in listening
    assert "url=http://127.0.0.1:8650" in listening
    for shown in ("exchange_ended", "outcome=complete", "status=200", "first_byte_ms=41.4", "request_id=r1"):
        assert shown in exchange


# --- journald --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", ["auto", "json", "console"])
def test_journald_gets_the_level_of_each_line(log_format: Literal["auto", "json", "console"], tmp_path: Path) -> None:
    with journal(tmp_path / "journal") as (stream, environ):
        sink = logs.configure("debug", log_format, stream, environ)
        log = structlog.get_logger()
        for level in ("debug", "info", "warning", "error"):
            getattr(log, level)("said")
        sink([RECORD, replace(RECORD, end="timeout")])
        stream.seek(0)
        lines = stream.read().splitlines()

    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<6>", "<4>"]
    if log_format != "console":
        assert [json.loads(line[3:])["event"] for line in lines] == ["said"] * 4 + ["exchange_ended"] * 2


def test_stream_that_the_unit_sent_elsewhere_gets_no_prefix(tmp_path: Path) -> None:
    """systemd.exec(5): the variable may be inherited by whom it does not concern, so device and inode decide."""
    with journal(tmp_path / "journal") as (_, environ), (tmp_path / "file").open("w+") as stream:
        logs.configure("info", "auto", stream, environ)
        structlog.get_logger().info("said")
        stream.seek(0)

        assert re.match(r"\{", stream.read())


def test_stream_without_a_file_is_no_journal() -> None:
    assert logs.is_journal(io.StringIO(), {"JOURNAL_STREAM": "8:1234"}) is False
