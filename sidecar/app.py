"""Composition root: the one place that knows every part."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass

from aiohttp import web

from sidecar.config import Settings
from sidecar.faults import Fault
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy
from sidecar.relay.admission import Rules
from sidecar.relay.handler import Limits, Relay
from sidecar.relay.pool import Pool, tcp_connector
from sidecar.sessions.mapping import MappingPolicy
from sidecar.sessions.sources import HeaderSource
from sidecar.surface import inprocess, pages
from sidecar.telemetry.exchanges import ExchangeLog, Sink

_OWN_PAGES_TIMEOUT_S = 5.0
_CLIENT_IDLE_S = 600.0
"""How long a client may keep a connection between two requests. Longer than the pools of common clients do (5 to 90 s),
so that it is the client who closes, and no request meets a connection on its way out."""
_SLOWEST_LOOK_S = 1.0


@dataclass(slots=True)
class App:
    """The parts that run, wired together."""

    relay: Relay
    pages: web.AppRunner
    _pace_timer: asyncio.TimerHandle | None = None

    def watch_pace(self) -> None:
        """Looks after slow and idle clients from now on, one timer for all."""
        limits = self.relay.limits
        now = time.monotonic()
        for client in list(self.relay.clients):
            client.check_pace(now)
        every_s = min(_SLOWEST_LOOK_S, limits.head_s / 4, limits.body_s / 4)
        self._pace_timer = asyncio.get_running_loop().call_later(every_s, self.watch_pace)

    async def close(self) -> None:
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        await self.relay.gateway.close()
        await self.relay.own_pages.close()
        await self.pages.cleanup()
        self.relay.log.flush()


async def build(settings: Settings, sink: Sink, *, connections_at_most: int) -> App:
    """Wires the parts for the running event loop. Opens no connection yet.

    `connections_at_most` is what the system allows, whatever the settings say.
    """
    gateway_settings = settings.gateway
    gateway = Pool(
        gateway_settings.url,
        tcp_connector(gateway_settings.host, gateway_settings.port, _tls(settings)),
        connect_timeout_s=gateway_settings.connect_timeout_s,
        keeps_spares=gateway_settings.scheme == "https",
    )

    async def gateway_fault() -> Fault | None:
        try:
            (await gateway.connect()).leave()
        except Fault as fault:
            return fault
        return None

    state = pages.State(gateway_settings.url, lambda: relay.is_draining, gateway_fault)
    runner = await inprocess.make_runner(pages.application(state))
    own_pages = Pool(
        "the sidecar itself",
        inprocess.connector(runner),
        connect_timeout_s=_OWN_PAGES_TIMEOUT_S,
        keeps_spares=False,
    )
    listen = settings.listen
    limits = Limits(
        head_s=listen.head_timeout_s,
        body_s=listen.body_timeout_s,
        idle_s=_CLIENT_IDLE_S,
        connections=min(listen.max_connections, connections_at_most),
    )
    relay = Relay(rules(settings), gateway, own_pages, ExchangeLog(sink), limits, gateway_settings.idle_timeout_s)
    return App(relay, runner)


def rules(settings: Settings) -> Rules:
    """What the settings say about every request, as frozen bytes."""
    listen, gateway, session = settings.listen, settings.gateway, settings.session
    sources = [
        HeaderSource(source.header.lower().encode(), source.prefix.encode())
        for source in session.sources
        if source.header is not None
    ]
    tokens = [(token.name, token.token) for token in listen.client_tokens] if listen.client_tokens else None
    return Rules(
        gateway_netloc=gateway.netloc.encode(),
        gateway_prefix=gateway.path_prefix.encode(),
        door=DoorPolicy.of(listen.host, listen.allowed_hosts, listen.allowed_origins),
        mapping=MappingPolicy(
            sources=tuple(sources),
            skip_when=tuple(condition.header.lower().encode() for condition in session.skip_when),
            # "auto" forwards to a gateway that declares session_key_header; until capabilities are known, none has.
            forward_key="always" if session.forward_key == "always" else "never",
        ),
        credentials=CredentialPolicy.of(
            gateway.token.get_secret_value().encode() if gateway.token else None,
            tokens,
            isolate=listen.isolate_clients,
        ),
    )


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.gateway.scheme != "https":
        return None
    context = ssl.create_default_context(cafile=settings.gateway.ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context
