"""The numbers behind the metrics: plain cells that the end of an exchange adds to. Nobody formats anything here.

Law: every key comes from a closed list. No session id, path, host or word that a client chose is ever one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from sidecar.faults import FaultCode
from sidecar.telemetry.record import End, ExchangeRecord

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_METHOD_NAMES: Final = {name.encode(): name for name in METHODS}
_CODES: Final = ("none", *["other"] * 99, *map(str, range(100, 600)))
"""By status; 0 is an exchange without an answer."""
_OTHER_STATUS: Final = 1
STREAM_ENDS: Final = tuple(end for end in get_args(End) if end != "refused")
OUTCOMES: Final = ("mapped", "derived", "followed", "none", "unread", "refused")
UPSTREAM_ERRORS: Final = ("unreachable", "protocol_error", "timeout", "broke")
# Agents take minutes for a turn: half an hour is the last bucket of whatever waits for one.
TURN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800)
_GAP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Histogram:
    """Counts by bucket; not cumulative until it is read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        bucket = 0
        for bound in self.bounds:  # most fall into the first few, and this is C
            if seconds <= bound:
                break
            bucket += 1
        self.counts[bucket] += times
        self.total += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        running = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound == float("inf") else repr(float(bound)), running))
        return out


class _Count:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Kind(_Count):
    """Exchanges that the counter of requests does not tell apart, and where their times go."""

    __slots__ = ("durations", "first_bytes")

    def __init__(self, durations: Histogram, first_bytes: Histogram) -> None:
        super().__init__()
        self.durations = durations
        self.first_bytes = first_bytes


class Cells:
    """What ended exchanges add up to."""

    __slots__ = (
        "_kinds",
        "_mappings",
        "durations",
        "first_bytes",
        "first_token",
        "gaps",
        "received_bytes",
        "sent_bytes",
        "stream_ends",
        "tokens",
        "upstream_errors",
    )

    def __init__(self, routes: Iterable[str], sources: Iterable[str]) -> None:
        """`routes` and `sources` are the closed lists of label values; both are shown from the start."""
        routes = tuple(routes)
        self._kinds: dict[tuple[str, bytes, int], _Kind] = {}
        """By route, method and status; each of them known, or the one that stands for the others."""
        self.durations = {route: Histogram(TURN_S) for route in routes}
        self.first_bytes = {route: Histogram(TURN_S) for route in routes}
        self.first_token = Histogram(TURN_S)
        self.gaps = Histogram(_GAP_S)
        self.sent_bytes = 0
        """Of request bodies, upstream."""
        self.received_bytes = 0
        """Of answers, which went downstream."""
        self.stream_ends: dict[str, int] = dict.fromkeys(STREAM_ENDS, 0)
        self.upstream_errors: dict[str, int] = dict.fromkeys(UPSTREAM_ERRORS, 0)
        self._mappings = {(source, "mapped"): _Count() for source in sources}
        self.tokens: dict[str, int] = {"prompt": 0, "completion": 0}

    def exchange_ended(self, record: ExchangeRecord) -> None:
        kind = self._kinds.get((record.route, record.method, record.status)) or self._kind_of(record)
        kind.count += 1
        kind.durations.observe(record.duration_s)
        if record.first_byte_s is not None:
            kind.first_bytes.observe(record.first_byte_s)
        if record.destination != "own":
            self.sent_bytes += record.request_bytes
            self.received_bytes += record.answer_bytes
        if record.is_stream:
            # A stream that has begun is refused only when its own client's request turns out to be malformed.
            self.stream_ends["client_left" if record.end == "refused" else record.end] += 1
        if record.first_token_s is not None:
            self.first_token.observe(record.first_token_s)
        if record.usage:
            for kind_of_token, tokens in record.usage.items():
                self.tokens[kind_of_token] += tokens
        error = _upstream_error(record)
        if error is not None:
            self.upstream_errors[error] += 1
        outcome = _outcome(record)
        if outcome is not None:
            mapping = self._mappings.get((record.source, outcome))
            if mapping is None:
                mapping = self._mappings[(record.source, outcome)] = _Count()
            mapping.count += 1

    def _kind_of(self, record: ExchangeRecord) -> _Kind:
        route = record.route if record.route in self.durations else "other"
        method = record.method if record.method in _METHOD_NAMES else b""
        status = record.status if record.status < len(_CODES) else _OTHER_STATUS
        key = (route, method, status)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(self.durations[route], self.first_bytes[route])
        return kind

    @property
    def requests(self) -> dict[tuple[str, str, str], int]:
        """By route, method and status."""
        found: dict[tuple[str, str, str], int] = {}
        for (route, method, status), kind in self._kinds.items():
            key = (route, _METHOD_NAMES.get(method, "other"), _CODES[status])
            found[key] = found.get(key, 0) + kind.count
        return found

    @property
    def mappings(self) -> dict[tuple[str, str], int]:
        """By source and outcome."""
        return {mapping: count.count for mapping, count in self._mappings.items()}


def _upstream_error(record: ExchangeRecord) -> str | None:
    if record.end == "complete":
        return None
    code = record.fault.code if record.fault is not None else None
    if code is FaultCode.UPSTREAM_UNREACHABLE:
        return "unreachable"
    if code is FaultCode.UPSTREAM_PROTOCOL_ERROR:
        return "protocol_error"
    if record.end == "timeout":
        return "timeout"
    return "broke" if record.end == "upstream_broke" else None


def _outcome(record: ExchangeRecord) -> str | None:
    """What the mapping made of a request; None where it was never asked."""
    if record.fault is not None and record.fault.code is FaultCode.INVALID_SESSION_KEY:
        return "refused"
    if record.destination != "gateway" or record.end == "refused" or not record.request_id:
        return None  # a preflight, which is answered before it gets an id, has no session either
    if record.session_id is None:
        return "unread" if record.is_unread else "none"
    if record.is_followed:
        return "followed"
    return "derived" if record.is_derived else "mapped"
