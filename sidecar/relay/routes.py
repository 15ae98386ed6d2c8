"""What a request asks for, pure: a word of a closed list, since logs and metrics never see a path."""

from __future__ import annotations

import re
from typing import Final

ROUTES: Final = {
    b"/v1/chat/completions": "chat_completions",
    b"/v1/responses": "responses",
    b"/v1/runs": "runs",
    b"/v1/models": "models",
    b"/v1/capabilities": "capabilities",
    b"/health": "health",
}
FAMILIES: Final = ("sessions", "skills", "memory", "config", "jobs")
ROUTE_NAMES: Final = (*ROUTES.values(), *FAMILIES, "dashboard", "own", "other", "none")
"""Every value that `route` can have."""
_FAMILY_PATH: Final = re.compile(rb"/api/(?:%b)(?:/|$)" % "|".join(FAMILIES).encode())
_FAMILY: Final = re.compile(rb"/(?:api|v1)/(%b)(?:/|$)" % "|".join(FAMILIES).encode())


def route_of(path: bytes) -> str:
    """The name of what a path asks the gateway for: one of a closed list."""
    route = ROUTES.get(path)
    if route is not None:
        return route
    family = _FAMILY.match(path)
    return family[1].decode() if family else "other"


def is_family_path(path: bytes) -> bool:
    """Whether a family is served there. What a gateway has of the same name below /v1 is its own affair."""
    return _FAMILY_PATH.match(path) is not None
