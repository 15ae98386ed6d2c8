"""What the status page shows, as words and numbers, pure. The page is filled with it, and `state.json` is it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sidecar import __version__
from sidecar.capabilities.model import CORE, ENHANCED, Evidence, Picture, mode_of, status_of
from sidecar.capabilities.report import timestamp
from sidecar.capabilities.wording import message_of, summary_of, unlock_of
from sidecar.surface.plots import bars
from sidecar.telemetry.figures import Window
from sidecar.telemetry.recent import Conversation

_TITLES = {
    "health": "Health",
    "chatCompletions": "Chat",
    "models": "Models",
    "streaming": "Streaming",
    "images": "Images",
    "sessions": "Session history",
    "skills": "Skills",
    "memory": "Memory",
    "config": "Config",
    "jobs": "Scheduled jobs",
}
_EVIDENCE: dict[Evidence, str] = {
    "observed": "Observed",
    "declared": "Declared",
    "probe": "Probe",
    "none": "No evidence",
}
_MODES = {"enhanced": "Enhanced mode", "portable": "Portable mode", "disconnected": None}
_KINDS = {
    "hermes-agent": "hermes-agent",
    "hermes-dashboard": "hermes-agent's dashboard",
    "generic": "OpenAI-compatible",
}
_ENDS = {
    "complete": "Complete",
    "client_left": "The client left",
    "upstream_broke": "The gateway broke off",
    "timeout": "The gateway fell silent",
    "drained": "Cut by a shutdown",
}
_SOURCES = {"client": "named by the client", "none": "no conversation named", "skipped": "side task"}
_DRAINING = "The sidecar is shutting down: running answers may finish, new requests are told to come again."

_NO_DASHBOARD = "Optional. With dashboard.url set, hermes-agent's dashboard can fill in for what the gateway lacks."


class Facts(NamedTuple):
    """Everything that the page tells about, at one moment."""

    picture: Picture
    gateway_url: str
    relay_url: str
    has_relay_beside: bool
    """The relay answers at the page's own address."""
    workers: int
    is_draining: bool
    started_at: float
    window: Window
    stream_ends: Mapping[str, int]
    turns_by_source: Mapping[str, int]
    conversations: Iterable[tuple[str, Conversation]]


def view(facts: Facts) -> dict[str, Any]:
    picture = facts.picture
    gateway, dashboard = picture.gateway, picture.dashboard
    word = "draining" if facts.is_draining else status_of(picture)
    return {
        "status": {
            "word": word,
            "title": word.capitalize(),
            "document": f"{word.capitalize()} · hermes-sidecar",
            "sentence": _DRAINING if facts.is_draining else summary_of(picture),
            "mode": _MODES[mode_of(picture)],
            "probed": _moment(picture.probed_at),
        },
        "core": _layer(CORE, picture),
        "enhanced": _layer(ENHANCED, picture),
        "gateway": {
            "url": facts.gateway_url,
            "state": _reachable(gateway.reachable),
            "kind": _KINDS.get(gateway.kind or "", gateway.kind),
            "version": gateway.version,
            "key": "the sidecar has one" if picture.has_token else "none here; clients bring their own",
        },
        "dashboard": {
            "url": dashboard.url,
            "state": _reachable(dashboard.reachable) if dashboard.url else "Not set up",
            "version": dashboard.version,
            "hint": dashboard.trouble if dashboard.url else _NO_DASHBOARD,
        },
        "sidecar": {"version": __version__, "started": _moment(facts.started_at), "url": address(facts.relay_url)},
        "page": {"hasRelay": facts.has_relay_beside, "hasNoRelay": not facts.has_relay_beside},
        "share": _share(facts.workers),
        "streams": _streams(facts.window),
        "firstToken": _first_token(facts.window),
        "ends": _shares([(_ENDS.get(end, end), count) for end, count in facts.stream_ends.items()]),
        "sources": _shares([(_source(source), count) for source, count in sorted(facts.turns_by_source.items())]),
        "hasNoSources": not facts.turns_by_source,
        "conversations": (conversations := [_conversation(*entry) for entry in facts.conversations]),
        "hasConversations": bool(conversations),
        "hasNoConversations": not conversations,
    }


def _share(workers: int) -> str | None:
    if workers == 1:
        return None
    return f"Of one of {workers} workers, the one that answered. /metrics adds them all up."


def address(url: str) -> str:
    """Where a program on this machine reaches the relay: nobody can call "any address", or a socket file by a URL."""
    if url.startswith("unix:"):
        return "http://localhost"
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def duration(seconds: float) -> str:
    """For people: three digits at most."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds / 60:.0f} min"


def _layer(names: tuple[str, ...], picture: Picture) -> dict[str, Any]:
    found = [picture.finding(name).available for name in names]
    counts = [(found.count(True), "there"), (found.count(False), "missing"), (found.count(None), "not known")]
    return {
        "summary": ", ".join(f"{count} {word}" for count, word in counts if count),
        "items": [_capability(name, picture) for name in names],
    }


def _capability(name: str, picture: Picture) -> dict[str, Any]:
    finding = picture.finding(name)
    asked = f" ({finding.path}, status {finding.http_status})" if finding.path and finding.http_status else ""
    served = " Served by the dashboard." if finding.served_by == "dashboard" else ""
    return {
        "name": name,
        "title": _TITLES[name],
        "answer": {True: "yes", False: "no", None: "unknown"}[finding.available],
        "words": {True: "Yes", False: "No", None: "Not known"}[finding.available],
        "message": message_of(name, finding),
        "evidence": f"{_EVIDENCE[finding.evidence]}: {finding.reason}{asked}.{served}",
        "unlock": unlock_of(name, picture),
    }


def _reachable(reachable: bool | None) -> str:
    return {True: "Answers", False: "Does not answer", None: "Not asked yet"}[reachable]


def _streams(window: Window) -> dict[str, Any]:
    most = max(window.streams)
    return {
        "now": window.running_streams,
        "path": bars(window.streams),
        "most": f"Peak: {most} in 5 s",
        "label": f"Streams in the last ten minutes: {window.running_streams} now, at most {most} within five seconds.",
    }


def _first_token(window: Window) -> dict[str, Any]:
    means = [mean for mean in window.first_token_s if mean is not None]
    mean = None if window.mean_first_token_s is None else duration(window.mean_first_token_s)
    if mean is None:
        return {"mean": None, "path": "", "most": "No stream yet", "label": "No stream in the last ten minutes."}
    most = duration(max(means))
    return {
        "mean": mean,
        "path": bars(window.first_token_s),
        "most": f"Slowest 5 s: {most}",
        "label": f"Time to the first token in the last ten minutes: {mean} on average, {most} in the slowest moments.",
    }


def _shares(counts: list[tuple[str, int]]) -> list[dict[str, Any]]:
    total = sum(count for _, count in counts)
    return [
        {"words": words, "count": count, "width": f"{100 * count / total if total else 0:.1f}%"}
        for words, count in counts
    ]


def _conversation(session: str, conversation: Conversation) -> dict[str, Any]:
    return {
        "session": session,
        "source": _source(conversation.source),
        "turns": conversation.turns,
        "followed": "Yes" if conversation.is_followed else "No",
        "last": _moment(conversation.last_turn_at),
    }


def _source(source: str) -> str:
    return _SOURCES.get(source, source.removeprefix("header:"))


def _moment(at: float | None) -> dict[str, str] | None:
    """For machines and for people, who get their own time zone from the page."""
    if at is None:
        return None
    return {"iso": timestamp(at) or "", "text": datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")}
