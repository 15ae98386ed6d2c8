"""Composition root: the one place that knows every part."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field

from aiohttp import web

from sidecar.backend import Backend
from sidecar.capabilities.monitor import Monitor
from sidecar.config import Settings
from sidecar.relay.destinations import Destination
from sidecar.relay.pool import Pool
from sidecar.relay.routes import ROUTE_NAMES
from sidecar.relay.shared import Limits, Relay
from sidecar.relay.stream import PutAside
from sidecar.rules import rules
from sidecar.sessions.lineage import Lineage
from sidecar.sessions.store import open_store
from sidecar.surface import inprocess, pages
from sidecar.telemetry.exchanges import ExchangeLog, Sink
from sidecar.telemetry.figures import Figures
from sidecar.telemetry.metrics import Activity, Metrics
from sidecar.telemetry.peers import Peers
from sidecar.telemetry.recent import Recent
from sidecar.upstreams import Upstreams

_OWN_PAGES_TIMEOUT_S = 5.0
_CLIENT_IDLE_S = 600.0
"""How long a client may keep a connection between two requests. Longer than the pools of common clients do (5 to 90 s),
so that it is the client who closes, and no request meets a connection on its way out."""
_SLOWEST_LOOK_S = 1.0


@dataclass(slots=True)
class App:
    """The parts that run, wired together."""

    relay: Relay
    upstreams: Upstreams
    backend: Backend
    monitor: Monitor
    pages: web.AppRunner
    figures: Figures
    peers: Peers | None = None
    _pace_timer: asyncio.TimerHandle | None = field(default=None)

    def begin(self) -> None:
        """Starts what runs by itself: the probes, and one timer that looks after slow and idle clients."""
        self.monitor.start()
        self.figures.start()
        self._watch_pace()

    def _watch_pace(self) -> None:
        limits = self.relay.limits
        now = time.monotonic()
        for client in list(self.relay.clients):
            client.check_pace(now)
        every_s = min(_SLOWEST_LOOK_S, limits.head_s / 4, limits.body_s / 4)
        self._pace_timer = asyncio.get_running_loop().call_later(every_s, self._watch_pace)

    async def close(self) -> None:
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        self.figures.stop()
        await self.monitor.stop()
        await self.relay.lineage.close()
        await self.upstreams.close()
        await self.relay.pools["own"].close()
        await self.pages.cleanup()
        if self.peers is not None:
            await self.peers.close()
        self.relay.log.flush()


async def build(
    settings: Settings, sink: Sink, *, url: str, connections_at_most: int, peers: Peers | None = None
) -> App:
    """Wires the parts for the running event loop. Opens no connection yet.

    `url` is where clients find the relay; `connections_at_most` is what the system allows, whatever the settings say;
    `peers` are the other workers.
    """
    sources = [source.place for source in settings.session.sources]
    metrics = Metrics(ROUTE_NAMES, ["client", *sources, "none", "skipped"])
    recent = Recent()

    log = ExchangeLog(sink, (metrics.exchange_ended, recent.exchange_ended))
    figures = Figures(metrics)
    upstreams = Upstreams(settings)
    monitor = Monitor(
        upstreams.probe,
        upstreams.blank_picture(),
        interval_s=settings.probe.interval_s,
        retry_s=settings.probe.retry_s,
        on_failure=log.failed,
        on_probe=metrics.probe_ended,
    )
    backend = Backend(settings, upstreams, monitor)
    runner = await inprocess.make_runner(
        pages.application(
            pages.State(
                settings.gateway.url,
                time.time(),
                monitor,
                metrics,
                figures,
                recent,
                relay_url=url,
                has_relay_beside=settings.admin.host is None,
                workers=settings.listen.workers,
                is_draining=lambda: backend.relay.is_draining,
            )
        )
    )
    own_pages = Pool(
        "the sidecar itself",
        inprocess.connector(runner),
        connect_timeout_s=_OWN_PAGES_TIMEOUT_S,
        keeps_spares=False,
    )
    pools: dict[Destination, Pool] = {"gateway": upstreams.gateway, "own": own_pages}
    if upstreams.dashboard is not None:
        pools["dashboard"] = upstreams.dashboard
    listen = settings.listen
    limits = Limits(
        head_s=listen.head_timeout_s,
        body_s=listen.body_timeout_s,
        idle_s=_CLIENT_IDLE_S,
        connections=min(max(1, listen.max_connections // listen.workers), connections_at_most),
    )
    first_rules = rules(settings, monitor.picture, None)
    store = open_store(settings.store.full_url.get_secret_value(), workers=listen.workers, environ=os.environ)
    await store.open()
    lineage = Lineage(
        store,
        is_on=settings.session.follow_rotation,
        on_rotation=metrics.rotated,
        on_store_error=metrics.store_failed,
        on_failure=log.failed,
    )
    relay = backend.relay = Relay(
        first_rules,
        pools,
        backend,
        lineage,
        log,
        PutAside(metrics.cells.gaps),
        monitor.observed,
        limits,
        settings.gateway.idle_timeout_s,
    )
    metrics.activity = lambda: _activity(relay)
    metrics.picture = lambda: monitor.picture
    metrics.before_scrape = lambda: _before_scrape(relay)
    if peers is not None:
        await peers.open(metrics.registry, metrics.before_scrape)
        metrics.peers = peers
    return App(backend.relay, upstreams, backend, monitor, runner, figures, peers)


def _before_scrape(relay: Relay) -> None:
    relay.put_aside.look_through()
    relay.log.flush()


def _activity(relay: Relay) -> Activity:
    now = Activity()
    now.is_draining = relay.is_draining
    for exchange in relay.exchanges:
        if exchange.request.is_own:  # a scrape must not see itself
            continue
        now.requests[exchange.request.route] += 1
        now.streams += exchange.is_stream
        now.bytes_up += exchange.request_bytes
        now.bytes_down += exchange.answer_bytes
    return now
