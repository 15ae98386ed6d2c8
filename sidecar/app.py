"""Composition root: the one place that knows every part."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from dataclasses import dataclass, field, replace

from aiohttp import web

from sidecar.capabilities.asking import Place
from sidecar.capabilities.model import NOT_ASKED, DashboardFacts, GatewayFacts, Picture
from sidecar.capabilities.monitor import Monitor
from sidecar.capabilities.probes import probe_dashboard, probe_gateway, read_dashboard_token
from sidecar.capabilities.wording import filled_families, missing_families
from sidecar.config import ConditionSettings, Settings, SourceSettings
from sidecar.config.addresses import BaseUrl
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy
from sidecar.relay.admission import ROUTE_NAMES, DashboardRules, Destination, Families, Rules
from sidecar.relay.pool import Pool, tcp_connector
from sidecar.relay.shared import Limits, Relay
from sidecar.relay.wire import Fields
from sidecar.sessions.lineage import Lineage
from sidecar.sessions.mapping import MappingPolicy
from sidecar.sessions.sources import BodySource, HeaderSource, PromptCondition, Source
from sidecar.sessions.store import open_store
from sidecar.surface import inprocess, pages
from sidecar.telemetry.exchanges import ExchangeLog, Sink
from sidecar.telemetry.figures import Figures
from sidecar.telemetry.metrics import Activity, Metrics
from sidecar.telemetry.peers import Peers
from sidecar.telemetry.recent import Recent

_OWN_PAGES_TIMEOUT_S = 5.0
_CLIENT_IDLE_S = 600.0
"""How long a client may keep a connection between two requests. Longer than the pools of common clients do (5 to 90 s),
so that it is the client who closes, and no request meets a connection on its way out."""
_SLOWEST_LOOK_S = 1.0


class Upstreams:
    """The gateway and, where there is one, the dashboard: their connections, and what can be asked of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        gateway, dashboard = settings.gateway, settings.dashboard
        self.gateway = _pool(gateway.base, gateway.url, _tls(settings), gateway.connect_timeout_s)
        # Probes have connections of their own, and leave none behind that a request could meet.
        self._gateway_probes = _pool(gateway.base, gateway.url, _tls(settings), settings.probe.timeout_s, spares=False)
        self.dashboard: Pool | None = None
        if dashboard.base is not None:
            tls = ssl.create_default_context() if dashboard.base.scheme == "https" else None
            self.dashboard = _pool(dashboard.base, dashboard.url, tls, gateway.connect_timeout_s, who="dashboard")

    async def probe(self) -> Picture:
        """Asks both what they are and can do."""
        gateway, dashboard = await asyncio.gather(probe_gateway(self.gateway_place), self._probe_dashboard())
        self._gateway_probes.drop_idle()
        if self._gateway_probes.is_known_to_answer_again:
            self.gateway.answers_again()
        return replace(self.blank_picture(), gateway=gateway, dashboard=dashboard, probed_at=time.time())

    def blank_picture(self) -> Picture:
        """What is known before anything was asked."""
        settings = self._settings
        return Picture(
            dashboard=DashboardFacts(settings.dashboard.url or None),
            fill=tuple(settings.dashboard.fill) if settings.dashboard.url else (),
            has_token=settings.gateway.token is not None,
        )

    async def read_dashboard_token(self) -> bytes | None:
        place = self._dashboard_place
        return None if place is None else await read_dashboard_token(place)

    async def _probe_dashboard(self) -> DashboardFacts:
        place = self._dashboard_place
        return DashboardFacts() if place is None else await probe_dashboard(place, self._settings.dashboard.url)

    @property
    def gateway_place(self) -> Place:
        base, token = self._settings.gateway.base, self._settings.gateway.token
        credentials = [(b"Authorization", b"Bearer " + token.get_secret_value().encode())] if token else []
        return Place(self._gateway_probes, base.netloc, base.path_prefix, self._settings.probe.timeout_s, credentials)

    @property
    def _dashboard_place(self) -> Place | None:
        base = self._settings.dashboard.base
        if base is None or self.dashboard is None:
            return None
        return Place(self.dashboard, base.netloc, base.path_prefix, self._settings.probe.timeout_s)

    def use(self, settings: Settings) -> None:
        """New credentials from now on; addresses stay."""
        self._settings = self._settings.model_copy(update={"gateway": settings.gateway})

    async def close(self) -> None:
        await self.gateway.close()
        await self._gateway_probes.close()
        if self.dashboard is not None:
            await self.dashboard.close()


def _pool(
    base: BaseUrl,
    url: str,
    tls: ssl.SSLContext | None,
    connect_timeout_s: float,
    *,
    spares: bool = True,
    who: str = "gateway",
) -> Pool:
    connector = tcp_connector(base.host, base.port, tls)
    return Pool(url, connector, connect_timeout_s=connect_timeout_s, keeps_spares=spares and tls is not None, who=who)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.gateway.scheme != "https":
        return None
    context = ssl.create_default_context(cafile=settings.gateway.ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


class Backend:
    """What is known of the upstreams, kept in the relay's rules."""

    def __init__(self, settings: Settings, upstreams: Upstreams, monitor: Monitor) -> None:
        self._settings = settings
        self._upstreams = upstreams
        self._monitor = monitor
        self._dashboard_token: bytes | None = None
        self._last_seen = GatewayFacts()
        """What the gateway was when it last answered: one that restarts is still the same."""
        self._renewing: asyncio.Task[bytes | None] | None = None
        self.relay: Relay
        monitor.on_change(self._heard)

    @property
    def known(self) -> asyncio.Event:
        return self._monitor.known

    def trouble(self) -> None:
        self._monitor.trouble()

    def use(self, settings: Settings) -> None:
        """Judges new requests by new settings; addresses stay."""
        self._settings = settings
        self._upstreams.use(settings)
        self._set_rules()
        self._monitor.wake()  # with a new key there may be more to see

    def check_lineage(self, sent_id: bytes, credentials: Fields) -> None:
        picture = self._monitor.picture
        sessions = picture.gateway.findings.get("sessions", NOT_ASKED).available
        # Without a key of its own the sidecar cannot have seen that hermes-agent keeps sessions; the turn's key can.
        if sessions is True or (sessions is None and picture.gateway.kind == "hermes-agent"):
            self.relay.lineage.check(sent_id, self._upstreams.gateway_place, credentials)

    async def renew_dashboard_token(self, refused: bytes | None) -> bool:
        if self._dashboard_token == refused:  # else somebody who was refused earlier has fetched the new one
            if self._renewing is None:
                self._renewing = asyncio.get_running_loop().create_task(self._upstreams.read_dashboard_token())
            try:
                token = await asyncio.shield(self._renewing)
            finally:
                self._renewing = None
            if token is not None and token != self._dashboard_token:
                self._dashboard_token = token
                self._set_rules()
        return self._dashboard_token != refused

    def _heard(self, picture: Picture) -> None:
        self._dashboard_token = picture.dashboard.token or self._dashboard_token
        if picture.gateway.failure is None:
            self._last_seen = picture.gateway
        self._set_rules()

    def _set_rules(self) -> None:
        old = self.relay.rules
        picture = replace(self._monitor.picture, gateway=self._last_seen)
        new = rules(self._settings, picture, self._dashboard_token)
        dashboard = new.dashboard
        if dashboard is not None and old.dashboard is not None:
            dashboard = replace(dashboard, netloc=old.dashboard.netloc, prefix=old.dashboard.prefix)
        self.relay.rules = replace(
            new,
            gateway_netloc=old.gateway_netloc,
            gateway_prefix=old.gateway_prefix,
            dashboard=dashboard if old.dashboard is not None else None,
        )


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
        metrics.cells.gaps,
        monitor.observed,
        limits,
        settings.gateway.idle_timeout_s,
    )
    metrics.activity = lambda: _activity(relay)
    metrics.picture = lambda: monitor.picture
    metrics.before_scrape = log.flush
    if peers is not None:
        await peers.open(metrics.registry, log.flush)
        metrics.peers = peers
    return App(backend.relay, upstreams, backend, monitor, runner, figures, peers)


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


def rules(settings: Settings, picture: Picture, dashboard_token: bytes | None) -> Rules:
    """What the settings and the backend say about every request, as frozen bytes."""
    listen, gateway, session = settings.listen, settings.gateway, settings.session
    tokens = [(token.name, token.token) for token in listen.client_tokens] if listen.client_tokens else None
    forwards_key = session.forward_key == "always" or (
        session.forward_key == "auto" and picture.gateway.forwards_session_key
    )
    base = settings.dashboard.base
    dashboard = None
    if base is not None:
        mount = settings.dashboard.mount.encode()
        dashboard = DashboardRules(base.netloc.encode(), base.path_prefix.encode(), mount, dashboard_token)
    return Rules(
        gateway_netloc=gateway.netloc.encode(),
        gateway_prefix=gateway.path_prefix.encode(),
        door=DoorPolicy.of(
            listen.host, [*listen.allowed_hosts, *filter(None, [settings.admin.host])], listen.allowed_origins
        ),
        mapping=MappingPolicy(
            sources=tuple(_source(source) for source in session.sources),
            skip_when=tuple(_condition(condition) for condition in session.skip_when),
            forward_key="always" if forwards_key else "never",
            inject_body=session.inject_body,
        ),
        credentials=CredentialPolicy.of(
            gateway.token.get_secret_value().encode() if gateway.token else None,
            tokens,
            isolate=listen.isolate_clients,
        ),
        body_limit_bytes=session.body_limit_bytes,
        families=Families(
            is_known=picture.probed_at is not None,
            filled=filled_families(picture),
            missing=missing_families(picture),
        ),
        dashboard=dashboard,
    )


def _source(source: SourceSettings) -> Source:
    prefix = source.prefix.encode()
    if source.header is not None:
        return HeaderSource(source.header.lower().encode(), prefix)
    assert source.body is not None
    return BodySource(tuple(source.body.split(".")), prefix)


def _condition(condition: ConditionSettings) -> bytes | PromptCondition:
    if condition.header is not None:
        return condition.header.lower().encode()
    assert condition.prompt is not None
    return PromptCondition(condition.prompt)
