"""Logs: structlog, as JSON lines or for a person at a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

import structlog

from sidecar.telemetry.exchanges import Sink, as_json

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, log_format: Literal["auto", "console", "json"], stream: TextIO | None = None) -> Sink:
    """Sets structlog up for the process. The sink for exchange lines writes to the same stream."""
    out = stream or sys.stderr
    as_console = log_format == "console" or (log_format == "auto" and out.isatty())
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    render: structlog.typing.Processor
    if as_console:
        render = structlog.dev.ConsoleRenderer(colors=out.isatty())
    else:
        render = structlog.processors.JSONRenderer(ensure_ascii=False)
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    least = LEVELS[level]

    def sink(line_level: str, line: Mapping[str, object]) -> None:
        if LEVELS[line_level] < least:
            return
        if as_console:
            event = str(line["event"])
            rest = {key: value for key, value in line.items() if key not in ("event", "timestamp")}
            structlog.get_logger().log(LEVELS[line_level], event, **rest)
        else:
            out.write(as_json(line_level, line) + "\n")

    return sink
