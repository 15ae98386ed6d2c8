"""The rules that production makes of settings, for tests of the pure parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.capabilities.model import Picture
from sidecar.config import from_mapping
from sidecar.relay.admission import Rules
from sidecar.rules import rules


def rules_of(
    values: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, *, picture: Picture | None = None
) -> Rules:
    """What these settings mean for every request; `picture` is what is known of the backend, by default nothing."""
    return rules(from_mapping(values or {}, environ or {}), picture or Picture(), None)
