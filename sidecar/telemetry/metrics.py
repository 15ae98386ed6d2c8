"""Metrics: a collector that Prometheus's client reads the cells with, and the cells of whatever is no exchange.

Law: every label value comes from a closed list. No session id, path, host or word that a client chose is ever one.
What can be counted at a scrape (who is there now) is counted then, so no gauge can be left behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sidecar import __version__
from sidecar.capabilities.model import CORE, ENHANCED, STATUSES, Picture, status_of
from sidecar.telemetry.cells import Cells, Histogram
from sidecar.telemetry.peers import Peers

_PREFIX = "hermes_sidecar_"
PROBE_FAILURES = ("unreachable", "timeout", "broken")
_PROBE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 1800)


Series = Mapping[Any, float]
"""Label values, in the order of their names, to a number."""


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
        self.cells = Cells(self._routes, sources)
        self.exchange_ended = self.cells.exchange_ended
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
        now, picture, cells = self.activity(), self.picture(), self.cells
        yield _counter("requests", "Requests by route, method and status.", ("route", "method", "code"), cells.requests)
        yield _histograms("request_duration_seconds", "From a request's first byte to its end.", cells.durations)
        yield _histograms(
            "time_to_first_byte_seconds", "From a request's first byte to the answer's head.", cells.first_bytes
        )
        yield _histogram(
            "time_to_first_token_seconds",
            "From a request's first byte to the first content of a stream.",
            cells.first_token,
        )
        yield _histogram("inter_event_seconds", "Between the events of a stream, comments left out.", cells.gaps)
        # Own pages are left out: every scrape would see itself.
        active = {(route,): now.requests[route] for route in self._routes if route != "own"}
        yield _gauge("active_requests", "Relayed requests that are running.", ("route",), active)
        yield _gauge("active_streams", "Streamed answers that are running.", (), {(): now.streams})
        yield _gauge("draining", "1 while what runs is finished and nothing new taken.", (), {(): now.is_draining})
        relayed = {
            ("upstream",): cells.sent_bytes + now.bytes_up,
            ("downstream",): cells.received_bytes + now.bytes_down,
        }
        yield _counter("relayed_bytes", "Body bytes relayed.", ("direction",), relayed)
        yield _counter("stream_ends", "How streams ended.", ("reason",), _keyed(cells.stream_ends))
        yield _counter("upstream_errors", "What went wrong upstream.", ("kind",), _keyed(cells.upstream_errors))
        yield _counter("session_mappings", "Where session ids came from.", ("source", "outcome"), cells.mappings)
        yield _counter("session_rotations", "Sessions that went on under another id.", (), {(): self.rotations})
        yield _counter("tokens", "Tokens, as answers told them.", ("type",), _keyed(cells.tokens))
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


def _as_number(available: bool | None) -> int:
    return -1 if available is None else int(available)


def _keyed(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def _counter(name: str, text: str, labels: tuple[str, ...], cells: Series) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, count in cells.items():
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], cells: Series) -> GaugeMetricFamily:
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
