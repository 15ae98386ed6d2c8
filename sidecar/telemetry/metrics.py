"""Metrics: plain cells that the data path adds to, and a collector that Prometheus's client reads them with.

Law: every label value comes from a closed list. No session id, path, host or word that a client chose is ever one.
What can be counted at a scrape (who is there now) is counted then, so no gauge can be left behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sidecar import __version__
from sidecar.capabilities.model import CORE, ENHANCED, STATUSES, Picture, status_of
from sidecar.faults import FaultCode
from sidecar.telemetry.exchanges import End, ExchangeRecord
from sidecar.telemetry.peers import Peers

_PREFIX = "hermes_sidecar_"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_METHOD_NAMES = {name.encode(): name for name in METHODS}
_CODES = ("none", *["other"] * 99, *map(str, range(100, 600)))
"""By status; 0 is an exchange without an answer."""
STREAM_ENDS = tuple(end for end in get_args(End) if end != "refused")
OUTCOMES = ("mapped", "derived", "followed", "none", "unread", "refused")
UPSTREAM_ERRORS = ("unreachable", "protocol_error", "timeout", "broke")
PROBE_FAILURES = ("unreachable", "timeout", "broken")
# Agents take minutes for a turn: half an hour is the last bucket of whatever waits for one.
_TURN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_PROBE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 1800)


Cells = Mapping[Any, float]
"""Label values, in the order of their names, to a number."""


class Histogram:
    """Counts by bucket; not cumulative until it is read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        running = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound == float("inf") else repr(float(bound)), running))
        return out


class Activity:
    """What is going on at the moment of a scrape."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.streams = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.is_draining = False


class Metrics(Collector):
    """The sidecar's own registry, its cells, and their verbs."""

    def __init__(self, routes: Iterable[str], sources: Iterable[str]) -> None:
        """`routes` and `sources` are the closed lists of label values; both are shown from the start."""
        self._routes = tuple(routes)
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations = {route: Histogram(_TURN_S) for route in self._routes}
        self._first_bytes = {route: Histogram(_TURN_S) for route in self._routes}
        self.first_token = Histogram(_TURN_S)
        self.gaps = Histogram(_GAP_S)
        self._bytes = {"upstream": 0, "downstream": 0}
        self.stream_ends: Counter[str] = Counter(dict.fromkeys(STREAM_ENDS, 0))
        self._upstream_errors: Counter[str] = Counter(dict.fromkeys(UPSTREAM_ERRORS, 0))
        self._mappings: Counter[tuple[str, str]] = Counter({(source, "mapped"): 0 for source in sources})
        self._tokens: Counter[str] = Counter({"prompt": 0, "completion": 0})
        self._probes = Histogram(_PROBE_S)
        self._probe_failures: Counter[str] = Counter(dict.fromkeys(PROBE_FAILURES, 0))
        self.rotations = 0
        self.store_errors = 0
        self.activity: Callable[[], Activity] = Activity
        self.picture: Callable[[], Picture] = Picture
        self.peers: Peers | None = None
        self.before_scrape: Callable[[], None] = lambda: None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # Verbs

    def exchange_ended(self, record: ExchangeRecord) -> None:
        route = record.route if record.route in self._durations else "other"
        code = _CODES[record.status] if record.status < len(_CODES) else "other"
        self._requests[(route, _METHOD_NAMES.get(record.method, "other"), code)] += 1
        self._durations[route].observe(record.duration_s)
        if record.first_byte_s is not None:
            self._first_bytes[route].observe(record.first_byte_s)
        if record.destination != "own":
            self._bytes["upstream"] += record.request_bytes
            self._bytes["downstream"] += record.answer_bytes
        if record.is_stream:
            # A stream that has begun is refused only when its own client's request turns out to be malformed.
            self.stream_ends["client_left" if record.end == "refused" else record.end] += 1
        if record.first_token_s is not None:
            self.first_token.observe(record.first_token_s)
        for kind, count in record.usage.items():
            self._tokens[kind] += count
        error = _upstream_error(record)
        if error is not None:
            self._upstream_errors[error] += 1
        outcome = _outcome(record)
        if outcome is not None:
            self._mappings[(record.source, outcome)] += 1

    def probe_ended(self, seconds: float, failure: str | None) -> None:
        self._probes.observe(seconds)
        if failure is not None:
            self._probe_failures[failure] += 1

    def rotated(self) -> None:
        """A session went on under another id."""
        self.rotations += 1

    def store_failed(self, _reason: str) -> None:
        self.store_errors += 1

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text for a scraper, and its Content-Type; OpenMetrics only where `accept` asks for it."""
        self.before_scrape()
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    async def exposition_of_all(self, accept: str) -> tuple[bytes, str]:
        """The same, with the other workers added up where there are some."""
        if self.peers is None:
            return self.exposition(accept)
        self.before_scrape()
        return await self.peers.exposition(self.registry, accept)

    # Reading

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        now, picture = self.activity(), self.picture()
        yield _counter("requests", "Requests by route, method and status.", ("route", "method", "code"), self._requests)
        yield _histograms("request_duration_seconds", "From a request's head to its end.", self._durations)
        yield _histograms("time_to_first_byte_seconds", "From a request's head to the answer's.", self._first_bytes)
        yield _histogram(
            "time_to_first_token_seconds", "From a request's head to the first content of a stream.", self.first_token
        )
        yield _histogram("inter_event_seconds", "Between the events of a stream, comments left out.", self.gaps)
        # Own pages are left out: every scrape would see itself.
        active = {(route,): now.requests[route] for route in self._routes if route != "own"}
        yield _gauge("active_requests", "Relayed requests that are running.", ("route",), active)
        yield _gauge("active_streams", "Streamed answers that are running.", (), {(): now.streams})
        yield _gauge("draining", "1 while what runs is finished and nothing new taken.", (), {(): now.is_draining})
        relayed = {
            ("upstream",): self._bytes["upstream"] + now.bytes_up,
            ("downstream",): self._bytes["downstream"] + now.bytes_down,
        }
        yield _counter("relayed_bytes", "Body bytes relayed.", ("direction",), relayed)
        yield _counter("stream_ends", "How streams ended.", ("reason",), _keyed(self.stream_ends))
        yield _counter("upstream_errors", "What went wrong upstream.", ("kind",), _keyed(self._upstream_errors))
        yield _counter("session_mappings", "Where session ids came from.", ("source", "outcome"), self._mappings)
        yield _counter("session_rotations", "Sessions that went on under another id.", (), {(): self.rotations})
        yield _counter("tokens", "Tokens, as answers told them.", ("type",), _keyed(self._tokens))
        layers = [(name, "core") for name in CORE] + [(name, "enhanced") for name in ENHANCED]
        known = {(name, layer): _as_number(picture.finding(name).available) for name, layer in layers}
        yield _gauge("capability", "1 there, 0 not there, -1 not known.", ("name", "layer"), known)
        status = status_of(picture)
        yield _gauge(
            "status", "1 for the status word that holds.", ("status",), {(s,): int(s == status) for s in STATUSES}
        )
        yield _histogram("probe_duration_seconds", "How long a probe of the backend took.", self._probes)
        yield _counter("probe_failures", "Probes that got no answer.", ("kind",), _keyed(self._probe_failures))
        yield _counter("store_errors", "Failures of the session store.", (), {(): self.store_errors})
        yield _gauge("build_info", "The sidecar's version.", ("version",), {(__version__,): 1})


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


def _as_number(available: bool | None) -> int:
    return -1 if available is None else int(available)


def _keyed(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def _counter(name: str, text: str, labels: tuple[str, ...], cells: Cells) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, count in cells.items():
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], cells: Cells) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for values, value in cells.items():
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, cell: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(_PREFIX + name, text)
    family.add_metric((), cell.buckets(), cell.total)
    return family


def _histograms(name: str, text: str, cells: Mapping[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(_PREFIX + name, text, labels=("route",))
    for route, cell in cells.items():
        family.add_metric((route,), cell.buckets(), cell.total)
    return family
