"""What is known of an exchange at its end: the log, the metrics and the status page are told the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sidecar.faults import Fault

End = Literal["complete", "client_left", "upstream_broke", "timeout", "drained", "refused"]
"""The ends of an exchange, everywhere: log, metric, test."""


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
