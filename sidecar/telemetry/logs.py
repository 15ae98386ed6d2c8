"""Logs: structlog, as JSON lines or for a person at a terminal; with levels that journald understands under systemd."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal, TextIO

import structlog

from sidecar.telemetry.exchanges import Sink
from sidecar.telemetry.lines import Line, json_lines, line_of
from sidecar.telemetry.record import ExchangeRecord

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_JOURNAL = {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>", "critical": "<2>"}
"""What journald takes off a line's beginning and keeps as its priority. Source: sd-daemon(3)."""
_NO_PREFIX = dict.fromkeys(_JOURNAL, "")


def configure(
    level: str,
    log_format: Literal["auto", "console", "json"],
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Sink:
    """Sets structlog up for the process. The sink for exchange lines writes to the same stream."""
    out = stream or sys.stderr
    as_console = log_format == "console" or (log_format == "auto" and out.isatty())
    prefixes = _JOURNAL if is_journal(out, environ) else _NO_PREFIX
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    render: structlog.typing.Processor
    if as_console:
        render = structlog.dev.ConsoleRenderer(colors=out.isatty())
    else:
        render = structlog.processors.JSONRenderer(ensure_ascii=False)

    def with_prefix(logger: object, name: str, event: structlog.typing.EventDict) -> str:
        prefix = prefixes[str(event["level"])]
        return prefix + str(render(logger, name, event))

    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, with_prefix],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    least = LEVELS[level]
    wanted_prefixes = {said: prefix for said, prefix in prefixes.items() if LEVELS.get(said, logging.CRITICAL) >= least}

    def sink(lines: Sequence[Line]) -> None:
        if not as_console:
            text = json_lines(lines, wanted_prefixes)
            if text:
                out.write(text)
                out.flush()
            return
        log = structlog.get_logger()
        for keys in map(as_dict, lines):
            shown = {key: value for key, value in keys.items() if key not in ("event", "level", "timestamp")}
            log.log(LEVELS[str(keys["level"])], str(keys["event"]), **shown)

    return sink


def as_dict(line: Line) -> dict[str, object]:
    return line_of(line) if isinstance(line, ExchangeRecord) else line


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether what is written to `stream` goes to journald, and not to a file or terminal that a unit chose.

    Source: systemd.exec(5), JOURNAL_STREAM.
    """
    with suppress(OSError, ValueError):  # a stream without a file
        there = os.fstat(stream.fileno())
        return environ.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"
    return False
