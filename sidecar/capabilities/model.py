"""Capabilities, pure: their names, what is found out about each, and the words for the whole.

Law: `None` means not known, and stays apart from False. What was not proven is never claimed, either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

CORE = ("health", "chatCompletions", "models", "streaming", "images")
ENHANCED = ("sessions", "skills", "memory", "config", "jobs")

Evidence = Literal["observed", "declared", "probe", "none"]
"""`observed`: real traffic showed it; `declared`: the backend says so; `probe`: the sidecar asked."""
Server = Literal["gateway", "dashboard"]
Status = Literal["enhanced", "partial", "connected", "disconnected"]
STATUSES: tuple[Status, ...] = ("enhanced", "partial", "connected", "disconnected")
Mode = Literal["enhanced", "portable", "disconnected"]


class Cause(Enum):
    """Why a capability is as it is: what the person can do about it depends on this."""

    PRESENT = "present"
    NO_ROUTE = "no route"
    CREDENTIALS = "credentials"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    UNPROVEN = "unproven"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one capability on one server."""

    available: bool | None = None
    evidence: Evidence = "none"
    cause: Cause = Cause.NOT_ASKED
    reason: str = "it has not been asked yet"
    path: str | None = None
    http_status: int | None = None
    served_by: Server | None = None
    checked_at: float | None = None
    """Seconds since the epoch."""


NOT_ASKED = Finding()


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    reachable: bool | None = None
    kind: str | None = None
    version: str | None = None
    trouble: str | None = None
    """A sentence for a person, where chat is not usable and something can be said about why."""
    failure: Literal["unreachable", "timeout", "broken"] | None = None
    """Why it could not be asked at all."""
    forwards_session_key: bool = False
    """It declares `session_key_header`."""
    findings: Mapping[str, Finding] = field(default_factory=dict)
    has_api_skills: bool | None = None
    """Whether `/api/skills` is there; hermes-agent serves skills below /v1."""


@dataclass(frozen=True, slots=True)
class DashboardFacts:
    url: str | None = None
    reachable: bool | None = None
    version: str | None = None
    token: bytes | None = field(default=None, repr=False)
    trouble: str | None = None
    findings: Mapping[str, Finding] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything known at one moment."""

    gateway: GatewayFacts = GatewayFacts()
    dashboard: DashboardFacts = DashboardFacts()
    fill: tuple[str, ...] = ()
    """Families that the dashboard serves where the gateway lacks them."""
    has_token: bool = False
    """The sidecar has the gateway's key."""
    probed_at: float | None = None

    def finding(self, name: str) -> Finding:
        """What holds for the client: the gateway's own, or the dashboard's where it fills in."""
        own = self.gateway.findings.get(name, NOT_ASKED)
        return self.dashboard.findings[name] if own.available is not True and self.is_filled(name) else own

    def is_filled(self, family: str) -> bool:
        """Whether the dashboard serves `/api/<family>` in the gateway's place."""
        own = self.gateway.findings.get(family, NOT_ASKED)
        is_lacking = own.available is False or (family == "skills" and self.gateway.has_api_skills is False)
        return is_lacking and family in self.fill and self.dashboard.findings.get(family, NOT_ASKED).available is True


def undated(picture: Picture) -> Picture:
    """The picture without its times: asking again and finding the same is no news."""

    def without_times(findings: Mapping[str, Finding]) -> dict[str, Finding]:
        return {name: replace(finding, checked_at=None) for name, finding in findings.items()}

    return replace(
        picture,
        gateway=replace(picture.gateway, findings=without_times(picture.gateway.findings)),
        dashboard=replace(picture.dashboard, findings=without_times(picture.dashboard.findings)),
        probed_at=picture.probed_at and 0.0,
    )


def status_of(picture: Picture) -> Status:
    if picture.finding("chatCompletions").available is not True:
        return "disconnected"
    present = sum(picture.finding(name).available is True for name in ENHANCED)
    if present == len(ENHANCED):
        return "enhanced"
    return "partial" if present else "connected"


def mode_of(picture: Picture) -> Mode:
    if status_of(picture) == "disconnected":
        return "disconnected"
    return "enhanced" if picture.finding("sessions").available is True else "portable"


def is_chat_usable(picture: Picture) -> bool:
    return status_of(picture) != "disconnected"
