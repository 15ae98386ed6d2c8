"""The gateway and the dashboard as the sidecar reaches them: one pool of connections for each, and what to ask them."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import replace

from sidecar.capabilities.asking import Place
from sidecar.capabilities.model import DashboardFacts, Picture
from sidecar.capabilities.probes import probe_dashboard, probe_gateway, read_dashboard_token
from sidecar.config import Settings
from sidecar.config.addresses import BaseUrl
from sidecar.relay.connecting import tcp_connector
from sidecar.relay.pool import Pool


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
