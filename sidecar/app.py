"""Composition root: the one place that knows every part."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from aiohttp import web

from sidecar.config import Settings
from sidecar.faults import Fault
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy
from sidecar.relay.admission import Rules
from sidecar.relay.handler import Relay
from sidecar.relay.pool import Pool, tcp_connector
from sidecar.sessions.mapping import MappingPolicy
from sidecar.sessions.sources import HeaderSource
from sidecar.surface import inprocess, pages
from sidecar.telemetry.exchanges import ExchangeLog, Sink

_OWN_PAGES_TIMEOUT_S = 5.0


@dataclass(slots=True)
class App:
    """The parts that run, wired together."""

    relay: Relay
    pages: web.AppRunner

    async def close(self) -> None:
        await self.relay.gateway.close()
        await self.relay.own_pages.close()
        await self.pages.cleanup()
        self.relay.log.flush()


async def build(settings: Settings, sink: Sink) -> App:
    """Wires the parts for the running event loop. Opens no connection yet."""
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
    relay = Relay(rules(settings), gateway, own_pages, ExchangeLog(sink), gateway_settings.idle_timeout_s)
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
