"""Logs: structlog, as JSON lines or for a person at a terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Literal, TextIO

import structlog

from sidecar.telemetry.exchanges import Line, Sink

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

    def sink(lines: Sequence[Line]) -> None:
        wanted = [line for line in lines if LEVELS[str(line["level"])] >= least]
        if as_console:
            log = structlog.get_logger()
            for line in wanted:
                shown = {key: value for key, value in line.items() if key not in ("event", "level", "timestamp")}
                log.log(LEVELS[str(line["level"])], str(line["event"]), **shown)
        elif wanted:
            out.write("".join([json.dumps(line, ensure_ascii=False) + "\n" for line in wanted]))
            out.flush()

    return sink
