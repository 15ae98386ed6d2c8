"""The words for people, pure: one message and one next step for each capability, one sentence for the whole."""

from __future__ import annotations

from typing import assert_never

from sidecar.capabilities.model import ENHANCED, NOT_ASKED, Cause, Finding, Picture, Status, status_of

_MISSING = {
    "sessions": "Session history isn't available on this backend yet; the conversation lives in the client and is "
    "temporary.",
    "skills": "Skills browser requires the skills API.",
    "memory": "Memory browser requires the memory API.",
    "config": "Settings editor requires the config API.",
    "jobs": "Scheduled jobs require the jobs API.",
    "health": "The backend has no health route; chat does not need one.",
    "chatCompletions": "Chat needs a gateway that answers POST /v1/chat/completions.",
    "models": "The backend lists no models; name one in the client.",
    "streaming": "Answers come as a whole, not word by word.",
    "images": "This backend's models read no images.",
}
_PRESENT = {
    "sessions": "Session history is kept on the server.",
    "skills": "Skills can be browsed.",
    "memory": "Memory can be browsed.",
    "config": "Settings can be read.",
    "jobs": "Scheduled jobs can be managed.",
    "health": "The backend answers.",
    "chatCompletions": "Chat works.",
    "models": "Models are listed.",
    "streaming": "Answers come word by word.",
    "images": "Images can be sent.",
}
_UNKNOWN = {
    "sessions": "Whether this backend keeps session history is not known yet.",
    "skills": "Whether this backend has skills is not known yet.",
    "memory": "Whether this backend has a memory API is not known yet.",
    "config": "Whether this backend has a config API is not known yet.",
    "jobs": "Whether this backend has scheduled jobs is not known yet.",
    "health": "Whether the backend is well is not known yet.",
    "chatCompletions": "Whether chat works is not known yet.",
    "models": "Whether this backend lists models is not known yet.",
    "streaming": "Not known until the first streamed answer; no model is called to find out.",
    "images": "Not known until the first answered image; no model is called to find out.",
}
_WORDS = {
    "sessions": "session history",
    "skills": "skills",
    "memory": "memory",
    "config": "config",
    "jobs": "scheduled jobs",
}


_SINGULAR = ("sessions", "memory", "config")


def message_of(name: str, finding: Finding) -> str:
    """What a person should know about one capability."""
    if finding.available is None:
        return _UNKNOWN[name]
    if name == "health" and finding.available is False and finding.cause is not Cause.NO_ROUTE:
        return "The backend says that it is not well." if finding.http_status else "The backend does not answer."
    return (_PRESENT if finding.available else _MISSING)[name]


def summary_of(picture: Picture) -> str:
    """The sentence below the status word."""
    status: Status = status_of(picture)
    if status == "disconnected":
        if picture.probed_at is None:
            return "Not connected yet: the gateway is being asked for the first time."
        return picture.gateway.trouble or "No usable chat: the gateway does not answer as a chat backend does."
    if status == "enhanced":
        return "Connected with everything: chat, session history, skills, memory, config and scheduled jobs."
    locked = [name for name in ENHANCED if picture.finding(name).cause is Cause.CREDENTIALS]
    asks_for_key = f"the backend asks for a key before it shows {_listed(locked)}" if locked else ""
    if status == "connected":
        rest = asks_for_key or "advanced workspace tools are unavailable"
        return f"Connected in portable mode. Chat works; {rest}."
    if status == "partial":
        missing = [name for name in ENHANCED if picture.finding(name).available is False]
        unknown = [name for name in ENHANCED if picture.finding(name).available is None and name not in locked]
        parts = ["Chat works"]
        if missing:
            are = "is" if len(missing) == 1 and missing[0] in _SINGULAR else "are"
            parts.append(f"{_listed(missing)} {are} not available on this backend")
        if locked:
            parts.append(asks_for_key)
        if unknown:
            parts.append(f"whether it has {_listed(unknown)} is not known yet")
        return "; ".join(parts) + "."
    assert_never(status)


def _listed(names: list[str]) -> str:
    words = [_WORDS[name] for name in names]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def unlock_of(name: str, picture: Picture) -> str | None:
    """The next step on this very set-up that would bring the capability; None where there is nothing to do."""
    finding = picture.finding(name)
    if finding.available is True:
        return None
    gateway = picture.gateway
    if gateway.reachable is False:
        return "Start the gateway (hermes gateway run), or correct gateway.url."
    if gateway.kind == "hermes-dashboard":
        return "Point gateway.url to the gateway's port (8642), and dashboard.url to this one."
    if finding.cause is Cause.CREDENTIALS:
        if picture.has_token:
            return "The gateway refuses the key that the sidecar has; put the right one into gateway.token_file."
        return "Give the sidecar the gateway's key (gateway.token_file)."
    if name in ENHANCED:
        return _unlock_enhanced(name, picture)
    if name in ("streaming", "images"):
        return None if finding.available is None else "Use a model that can."
    if name == "chatCompletions":
        return "Point gateway.url to hermes-agent's gateway or to an OpenAI-compatible backend."
    return None


def _unlock_enhanced(name: str, picture: Picture) -> str | None:
    dashboard = picture.dashboard
    on_dashboard = dashboard.findings.get(name, NOT_ASKED)
    if on_dashboard.available is True:
        if name in picture.fill:
            return None
        return f'The dashboard has it: add "{name}" to dashboard.fill.'
    if picture.gateway.kind != "hermes-agent":
        return "Put hermes-agent's gateway behind the sidecar; chat works without it."
    if name in ("sessions", "jobs"):
        return "Upgrade hermes-agent: newer gateways serve it themselves."
    if dashboard.url is None:
        return "Start the dashboard (hermes dashboard) and set dashboard.url."
    if dashboard.reachable is False:
        return "Start the dashboard (hermes dashboard): nothing that answers is at dashboard.url."
    if dashboard.trouble:
        return dashboard.trouble
    return "Upgrade hermes-agent: this dashboard does not serve it."


def missing_families(picture: Picture) -> dict[str, tuple[str, str]]:
    """Message and next step for each family that neither gateway nor dashboard serves below /api."""
    missing = {}
    for name in ENHANCED:
        own = picture.gateway.findings.get(name, NOT_ASKED)
        if picture.gateway.reachable is not True or picture.is_filled(name):
            continue
        if own.available is False:
            missing[name] = (message_of(name, own), unlock_of(name, picture) or "Chat works without it.")
        elif name == "skills" and picture.gateway.has_api_skills is False:
            hint = "Ask for /v1/skills, or set dashboard.url: the dashboard serves /api/skills."
            missing[name] = ("This gateway serves its skills at /v1/skills, not at /api/skills.", hint)
    return missing


def filled_families(picture: Picture) -> frozenset[str]:
    """The families that the dashboard serves in the gateway's place."""
    return frozenset(name for name in ENHANCED if picture.is_filled(name))
