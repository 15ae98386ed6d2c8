"""From the facts of a verification to its verdict, in words. Nothing here awaits: facts in, sentences out.

What counts as proof: the gateway names one session in the answers to both turns of a key, and the session's history
holds both messages. A healthy status page proves nothing and is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from sidecar.verify.facts import End, Facts, History, HistoryState, Pair, Turn
from sidecar.verify.wording import failure, shown, status_and_message


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ok` decides the exit code; `sentence` is for a person; `session_id` is where the text turns landed, if known."""

    ok: bool
    sentence: str
    session_id: str | None = None


def judge(facts: Facts) -> Verdict:
    text = judge_pair(facts.text, facts)
    if not text.ok or facts.image is None:
        return Verdict(text.ok, _capitalised(text.sentence), text.session_id)
    refusal = _image_refusal(facts.image)
    if refusal is not None:
        sentence = (
            f"{text.sentence} The backend refused {refusal.name} ({status_and_message(refusal)}), so nothing is "
            "proven for turns with images: that is a matter of its model, not of the session."
        )
        return Verdict(True, _capitalised(sentence), text.session_id)
    image = judge_pair(facts.image, facts)
    if image.ok and text.session_id is not None and image.session_id == text.session_id:
        sentence = (
            f"two different keys landed in one session, {shown(text.session_id)}: conversations would be mixed. "
            "The backend does not keep sessions apart by their id."
        )
        return Verdict(False, _capitalised(sentence), text.session_id)
    if image.ok and (image.session_id is None) != (text.session_id is None):
        sentence = f"{text.sentence} With an image it is different: {image.sentence}"
        return Verdict(False, _capitalised(sentence), text.session_id)
    if image.ok and image.session_id is None:
        return Verdict(True, _capitalised(f"{text.sentence} Turns with an image work, too."))
    sentence = f"{text.sentence} With an image: {image.sentence}"
    return Verdict(image.ok, _capitalised(sentence), text.session_id)


def judge_pair(pair: Pair, facts: Facts) -> Verdict:
    """The verdict on two turns under one key; its sentence begins in lower case, to stand inside another."""
    second = pair.second
    if second is None or pair.first.end is not End.COMPLETE or second.end is not End.COMPLETE:
        failed = pair.first if second is None or pair.first.end is not End.COMPLETE else second
        return Verdict(False, failure(failed, facts.base_url, facts.limit_s))
    if pair.first.mapping is None:
        return Verdict(False, no_sidecar(facts.base_url))
    history = pair.history or History(HistoryState.UNREADABLE, detail="it was not asked for")
    ids = (pair.first.session_id, second.session_id)
    if ids == (None, None):
        return _without_named_session(pair, history)
    if None in ids:
        silent = pair.first if ids[0] is None else second
        return Verdict(False, f"the answer to {silent.name} names no session, while the other turn's does.")
    unmapped = _unmapped(pair.first) or _unmapped(second)
    if unmapped is not None:
        return Verdict(False, unmapped)
    if ids[0] != ids[1]:
        return Verdict(False, _two_sessions(*[shown(session_id or "") for session_id in ids]))
    return _with_history(pair.first.session_id or "", second, history)


# The pieces of a verdict


def no_sidecar(address: str) -> str:
    return (
        f"the answers at {address} carry no X-Hermes-Sidecar-Session: that is no hermes-sidecar, perhaps the gateway "
        "itself. Point verify at the sidecar's address."
    )


def _with_history(session_id: str, second: Turn, history: History) -> Verdict:
    where = f"session {shown(session_id)}"
    recalled = (
        " The answer to the second turn named the token that only the first one held, so the gateway does remember."
        if second.recalled
        else ""
    )
    named = f"both turns landed in {where}: the gateway names it in both answers"
    match history.state:
        case HistoryState.READ if history.has_first and history.has_second:
            return Verdict(True, f"both turns landed in {where}: both messages stand in its history.", session_id)
        case HistoryState.READ:
            lost = (
                "neither message"
                if not (history.has_first or history.has_second)
                else ("only the second message" if history.has_second else "only the first message")
            )
            return Verdict(
                False,
                f"both answers name {where}, but its history holds {lost}. The gateway loses this conversation.",
                session_id,
            )
        case HistoryState.KEY_NEEDED:
            return Verdict(
                True,
                f"{named}. Not proven is that both messages stand in its history: reading it takes the gateway's key. "
                f"Set gateway.token_file to have that checked, too.{recalled}",
                session_id,
            )
        case HistoryState.NO_ROUTE:
            return Verdict(
                True,
                f"{named}. Not proven is that both messages stand in its history: this gateway has no route to read "
                f"it.{recalled}",
                session_id,
            )
        case HistoryState.UNKNOWN_SESSION:
            return Verdict(
                False,
                f"both answers name {where}, but the gateway knows no such session: it loses this conversation.",
                session_id,
            )
        case HistoryState.UNREADABLE:
            return Verdict(
                False,
                f"both answers name {where}, but its history could not be read ({history.detail}), so continuity is "
                f"not proven.{recalled} Look at the gateway's log.",
                session_id,
            )
        case _:
            assert_never(history.state)


def _without_named_session(pair: Pair, history: History) -> Verdict:
    if history.state is HistoryState.READ and history.has_first and history.has_second:
        return Verdict(
            True,
            f"both turns landed in session {shown(pair.key)}: the answers name none, but both messages stand in its "
            "history.",
            pair.key,
        )
    return Verdict(
        True,
        "chat works, and this backend keeps no sessions: its answers name none. The conversation is the history that "
        "the client itself sends with each turn; there is nothing here that the sidecar could keep together.",
    )


def _unmapped(turn: Turn) -> str | None:
    source = (turn.mapping or "").partition(";")[0].strip()
    if source in ("", "none"):
        return (
            f"the sidecar did not map the key of {turn.name} (X-Hermes-Sidecar-Session: none). Put "
            '{header = "X-Hermes-Session-Key"} among session.sources; without it the gateway makes its own guess.'
        )
    if source == "skipped":
        return (
            f"the sidecar took {turn.name} for a side task and did not map its key (X-Hermes-Sidecar-Session: "
            "skipped). Look at session.skip_when."
        )
    return None


def _two_sessions(one: str, other: str) -> str:
    landed = f"one key, but two sessions: the turns landed in {one} and {other}."
    if one.startswith("api-") or other.startswith("api-"):
        return (
            f"{landed} An api- id is the gateway's own, made from the first message: it ignored the id that the "
            "sidecar sent. Update the gateway (hermes-agent 0.19 honours X-Hermes-Session-Id)."
        )
    return f"{landed} If the gateway moves conversations to new sessions, session.follow_rotation must be true."


def _image_refusal(pair: Pair) -> Turn | None:
    """The turn that a backend without eyes refused. 404: some routers say "no model with image input" that way."""
    for turn in (pair.first, pair.second):
        if turn is not None and turn.end is End.REFUSED and not turn.error.from_sidecar:
            return turn if turn.status in (400, 404, 415, 422) else None
    return None


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
