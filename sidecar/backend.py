"""What is known of the upstreams, kept in the relay's rules: a new picture, setting or token becomes new rules."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sidecar.capabilities.model import NOT_ASKED, GatewayFacts, Picture
from sidecar.capabilities.monitor import Monitor
from sidecar.config import Settings
from sidecar.relay.shared import Relay
from sidecar.relay.wire import Fields
from sidecar.rules import rules
from sidecar.upstreams import Upstreams


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
