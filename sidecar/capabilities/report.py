"""The `/capabilities` document, pure: a picture in, JSON for machines and people out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sidecar import __version__
from sidecar.capabilities.model import CORE, ENHANCED, Finding, Picture, mode_of, status_of
from sidecar.capabilities.wording import message_of, summary_of, unlock_of


def document(picture: Picture, gateway_url: str, started_at: float) -> dict[str, Any]:
    """The document of `docs/reference/capabilities.schema.json`. Times are seconds since the epoch."""
    gateway, dashboard = picture.gateway, picture.dashboard
    return {
        "status": status_of(picture),
        "mode": mode_of(picture),
        "message": summary_of(picture),
        "coreCapabilities": {name: picture.finding(name).available for name in CORE},
        "enhancedCapabilities": {name: picture.finding(name).available for name in ENHANCED},
        "details": {name: _detail(name, picture) for name in (*CORE, *ENHANCED)},
        "gateway": {
            "url": gateway_url,
            "reachable": gateway.reachable,
            "kind": gateway.kind,
            "version": gateway.version,
            "token": "set" if picture.has_token else "not set",
        },
        "dashboard": {"url": dashboard.url, "reachable": dashboard.reachable, "version": dashboard.version},
        "sidecar": {"version": __version__, "startedAt": timestamp(started_at)},
        "probedAt": timestamp(picture.probed_at),
    }


def _detail(name: str, picture: Picture) -> dict[str, Any]:
    finding: Finding = picture.finding(name)
    return {
        "available": finding.available,
        "evidence": finding.evidence,
        "servedBy": finding.served_by,
        "path": finding.path,
        "httpStatus": finding.http_status,
        "checkedAt": timestamp(finding.checked_at),
        "reason": finding.reason,
        "message": message_of(name, finding),
        "unlock": unlock_of(name, picture),
    }


def timestamp(at: float | None) -> str | None:
    """RFC 3339, UTC, milliseconds."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
