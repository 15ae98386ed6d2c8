"""The sentences about turns: what happened, what went wrong, and what to do about it."""

from __future__ import annotations

from typing import assert_never

from sidecar.verify.facts import End, Turn


def progress(turn: Turn) -> str:
    """One line on one turn, as soon as it is over."""
    if turn.end is not End.COMPLETE:
        status = f" (status {turn.status})" if turn.status is not None else ""
        return f"{turn.name}: {turn.end.name.lower().replace('_', ' ')}{status}"
    session = f"session {shown(turn.session_id)}" if turn.session_id else "no session named"
    mapping = f", X-Hermes-Sidecar-Session: {shown(turn.mapping)}" if turn.mapping else ""
    return f"{turn.name}: answered, {session}{mapping}"


def failure(turn: Turn, address: str, limit_s: float) -> str:
    """What went wrong in a turn at `address`, and what to do about it."""
    match turn.end:
        case End.COMPLETE:
            return f"{turn.name} was answered, but nothing followed."
        case End.REFUSED:
            return _refusal(turn)
        case End.UNREACHABLE:
            return (
                f"nothing answers at {address} ({turn.detail}). Start the sidecar (hermes-sidecar serve), or "
                "correct the address."
            )
        case End.TIMED_OUT:
            return (
                f"{turn.name} had no complete answer within {limit_s:g} s. Look at what the gateway is doing; "
                "if its agent is only slow, try again."
            )
        case End.BROKE_OFF:
            return f"the connection broke in {turn.name}, before the answer was complete. Look at the gateway's log."
        case End.NO_END:
            return (
                f"the answer to {turn.name} stopped without an end: neither a finish_reason nor [DONE] came. "
                "Look at the gateway's log."
            )
        case End.NOT_CHAT:
            return f"{turn.name} got status 200, but not a chat answer: {turn.detail}. Correct gateway.url."
        case End.AGENT_FAILED:
            said = f": {turn.error.message}" if turn.error.message else ""
            return _sentence(f"the gateway took {turn.name}, but its agent failed{said}") + (
                " Look at the gateway's log and its model settings."
            )
        case _:
            assert_never(turn.end)


def without_key(first: Turn, second: Turn) -> str:
    """What the two control turns showed. They decide nothing: they show what the sidecar is there for."""
    if first.end is not End.COMPLETE or second.end is not End.COMPLETE:
        return "Without a key: the two control turns did not both get an answer, so there is nothing to compare with."
    ids = (first.session_id, second.session_id)
    if ids == (None, None):
        return "Without a key: the gateway names no session."
    if ids[0] == ids[1]:
        return f"Without a key: both turns landed in session {shown(ids[0] or '')} all the same."
    one, other = (shown(session_id) if session_id else "an unnamed one" for session_id in ids)
    return f"Without a key: two turns, two sessions, {one} and {other}. That is the loss that the key prevents."


def status_and_message(turn: Turn) -> str:
    return f"status {turn.status}" + (f": {turn.error.message}" if turn.error.message else "")


def shown(text: str, limit: int = 300) -> str:
    """Foreign text made fit for one line of a terminal."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else line[:limit] + "…"


def _refusal(turn: Turn) -> str:
    said = status_and_message(turn)
    error = turn.error
    if error.from_sidecar and error.code == "client_token_required":
        return (
            f"the sidecar wants a client token (401 {error.code}): verify has to send one of those in the file that "
            "listen.tokens_file names."
        )
    if error.from_sidecar:
        return f"{turn.name} failed ({turn.status} {error.code}). {_sentence(error.message)} {error.hint}".rstrip()
    match turn.status:
        case 401:
            return (
                f"the gateway wants a key, and got none or a wrong one ({said}): set gateway.token_file to a file that "
                "holds it, or HERMES_SIDECAR_GATEWAY__TOKEN."
            )
        case 403:
            return (
                f"the gateway refused {turn.name} ({said}). An older gateway without a key of its own refuses every "
                "session header: give it one (API_SERVER_KEY), and the sidecar the same by gateway.token_file."
            )
        case 404 | 405:
            return f"there is no chat endpoint behind the sidecar ({said}). Correct gateway.url."
        case 429 | 503:
            return f"the gateway took no turn just now ({said}). Try again in a moment."
        case _:
            return f"{turn.name} was not answered ({said}). Look at the gateway's log."


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else text + "."
