"""From the long turns of `verify --rotation` to its verdict, in words. Nothing here awaits.

What counts as proof: after the gateway has named a new session, the next turn under the old key goes to that one, which
the sidecar says and the gateway's answer and history confirm. A gateway that did not rotate has disproven nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.verify.facts import End, HistoryState, Leg, Turn
from sidecar.verify.judgement import Verdict, no_sidecar
from sidecar.verify.wording import failure, shown


def judge_rotation(legs: Sequence[Leg], address: str, limit_s: float) -> Verdict:
    verdicts = [_judge_leg(leg, address, limit_s) for leg in legs]
    sentence = " Streamed: ".join(verdict.sentence for verdict in verdicts)
    return Verdict(all(verdict.ok for verdict in verdicts), sentence[:1].upper() + sentence[1:], verdicts[0].session_id)


def _judge_leg(leg: Leg, address: str, limit_s: float) -> Verdict:
    failed = next((turn for turn in leg.all_turns if turn.end is not End.COMPLETE), None)
    if failed is not None:
        return Verdict(False, failure(failed, address, limit_s))
    first = leg.turns[0]
    if first.mapping is None:
        return Verdict(False, no_sidecar(address))
    if first.session_id is None:
        return Verdict(True, "nothing to prove here: this backend keeps no sessions, so there is none that could move.")
    if first.session_id.startswith("api-"):
        return Verdict(
            False,
            f"the gateway ignored the id that it was sent, and put the turn into {shown(first.session_id)}. "
            "hermes-sidecar verify tells more.",
        )
    if leg.tip is None or leg.following is None:
        return Verdict(
            True,
            f"nothing to prove here: in {len(leg.turns)} long turns the gateway kept the conversation in session "
            f"{shown(first.session_id)}. hermes-agent moves one only with compression.in_place: false, once the "
            "model's context is filling up.",
            first.session_id,
        )
    return _judge_following(leg, first.session_id, leg.tip, leg.following)


def _judge_following(leg: Leg, begun: str, tip: str, following: Turn) -> Verdict:
    moved = f"the gateway moved the conversation from session {shown(begun)} to {shown(tip)} in {leg.turns[-1].name}"
    words = [word.strip() for word in (following.mapping or "").split(";")]
    if "followed" not in words[1:]:
        return Verdict(
            False,
            f"{moved}, but the sidecar sent {following.name} to the old one (X-Hermes-Sidecar-Session: "
            f"{shown(following.mapping or 'missing')}). session.follow_rotation must be true.",
        )
    if following.session_id in (None, begun):
        named = "no session" if following.session_id is None else "the old one"
        return Verdict(False, f"{moved}, and the sidecar followed, but the answer to {following.name} names {named}.")
    went = f"{moved}, and {following.name} went to {shown(following.session_id or '')}"
    history = leg.history
    assert history is not None, "a following turn that is complete has its history looked at"
    match history.state:
        case HistoryState.READ if history.has_second:
            which = "both messages stand" if history.has_first else "its message stands"
            return Verdict(True, f"{went}: {which} in the history there.", following.session_id)
        case HistoryState.READ | HistoryState.UNKNOWN_SESSION:
            return Verdict(False, f"{went}, but its message is missing in the history there.", following.session_id)
        case HistoryState.KEY_NEEDED | HistoryState.NO_ROUTE | HistoryState.UNREADABLE:
            unread = "Not proven is that its message stands in the history there, which could not be read."
            return Verdict(True, f"{went}. {unread}", following.session_id)
