"""What all exchanges share: where they go, the rules they obey, who is there; and what they need of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sidecar.capabilities.observed import Observed
from sidecar.relay.admission import Rules
from sidecar.relay.destinations import Destination
from sidecar.relay.familiar import FamiliarHeads
from sidecar.relay.pool import Pool
from sidecar.relay.request import Request
from sidecar.relay.stream import PutAside
from sidecar.relay.wire import Fields
from sidecar.sessions.lineage import Lineage
from sidecar.telemetry.exchanges import ExchangeLog


class Running(Protocol):
    """An exchange that runs, as the drain and a scrape see it."""

    request: Request
    request_bytes: int
    answer_bytes: int

    @property
    def is_stream(self) -> bool: ...
    def drain(self) -> None: ...


class Client(Protocol):
    """The client's connection, as far as an exchange uses it."""

    transport: asyncio.Transport
    write: Callable[[bytes], None]
    """The transport's own, looked up once."""
    peer: bytes
    since: float
    """When the request began, on the monotonic clock."""

    @property
    def unsent_bytes(self) -> int: ...
    def check_pace(self, now: float) -> None: ...
    def exchange_over(self, *, keep_alive: bool) -> None: ...
    def cut(self, *, reset: bool) -> None: ...
    def hand_over(self) -> bytes: ...
    def tunnel_over(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class Backend(Protocol):
    """What is known of the upstreams, and who wants to hear of them."""

    @property
    def known(self) -> asyncio.Event:
        """Set once it is known who serves which family."""

    def trouble(self) -> None:
        """The gateway could not be used."""

    def check_lineage(self, sent_id: bytes, credentials: Fields) -> None:
        """A streamed turn has its answer: its session may have gone on under another id."""

    async def renew_dashboard_token(self, refused: bytes | None) -> bool:
        """The dashboard refused a token. Whether there is another one now, in the relay's rules."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take, in seconds and connections."""

    head_s: float
    """From a request's first byte to the end of its head."""
    body_s: float
    """Longest silence inside a request's body, while the upstream takes it."""
    idle_s: float
    """Longest a connection may wait between two requests."""
    connections: int


@dataclass(slots=True)
class Relay:
    """What all exchanges share: where they go, the rules they obey, and who is there."""

    rules: Rules
    pools: Mapping[Destination, Pool]
    backend: Backend
    lineage: Lineage
    log: ExchangeLog
    put_aside: PutAside
    observed: Observed
    limits: Limits
    idle_timeout_s: float = 0.0
    """Longest silence of the gateway inside one exchange; 0 = no limit."""
    familiar: FamiliarHeads = field(default_factory=FamiliarHeads)
    is_draining: bool = False
    clients: set[Client] = field(default_factory=set)
    exchanges: set[Running] = field(default_factory=set)
    """Those that run now."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at each end of an exchange while draining."""
