"""`hermes-sidecar verify --rotation`: proof that a conversation is followed when the gateway moves it to a new session.

Long turns under one fresh key, until an answer or the session's record names another session; then one turn more, which
must go there. First without streaming, then streamed: those are two ways in which the sidecar learns of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sidecar.verify.caller import Caller
from sidecar.verify.facts import End, History, HistoryState, Leg, Turn
from sidecar.verify.judgement import Verdict
from sidecar.verify.rotation_judgement import judge_rotation
from sidecar.verify.wording import progress, shown

MOST_TURNS = 12
"""With the 40 kB of a turn they fill half of a context of 200,000 tokens: there hermes-agent begins to compress."""
TURN_BYTES = 40_000
_FILLER = "The quick brown fox jumps over the lazy dog. "


async def prove_rotation(caller: Caller, address: str, turn_limit_s: float, say: Callable[[str], None]) -> Verdict:
    """Two legs at most: the streamed one only where the other has shown that this gateway rotates."""
    model = await caller.model()
    legs = [await _leg(caller, model, say, streamed=False)]
    if legs[0].tip is not None and judge_rotation(legs, address, turn_limit_s).ok:
        legs.append(await _leg(caller, model, say, streamed=True))
    return judge_rotation(legs, address, turn_limit_s)


async def _leg(caller: Caller, model: str, say: Callable[[str], None], *, streamed: bool) -> Leg:
    key = f"verify-{secrets.token_hex(6)}"
    turns: list[Turn] = []
    markers: list[str] = []

    async def take_turn() -> Turn:
        markers.append(f"marker-{secrets.token_hex(6)}")
        name = f"turn {len(markers)} ({'streamed' if streamed else 'not streamed'}, long)"
        turn = await caller.turn(name, _body(model, markers[-1], streamed=streamed), key=key)
        say(progress(turn))
        return turn

    while len(turns) < MOST_TURNS:
        turns.append(await take_turn())
        begun, last = turns[0].session_id, turns[-1]
        if last.end is not End.COMPLETE or begun is None or begun.startswith("api-"):
            return Leg(key, streamed, tuple(turns))
        tip = last.session_id
        if tip == begun and streamed:  # its head left before a rotation could be told
            tip = (await caller.history(begun, (markers[-1], markers[-1]))).session_id
        if tip is not None and tip != begun:
            say(f"the gateway moved the conversation from session {shown(begun)} to {shown(tip)}")
            following = await take_turn()
            history = History(HistoryState.UNREADABLE, detail="it was not asked for")
            if following.end is End.COMPLETE:
                history = await caller.history(following.session_id or tip, (markers[-2], markers[-1]))
            return Leg(key, streamed, tuple(turns), tip, following, history)
    return Leg(key, streamed, tuple(turns))


def _body(model: str, marker: str, *, streamed: bool) -> dict[str, object]:
    beginning = f"Connection test, {marker}: answer with one word, and leave out of account the filler that follows.\n"
    text = beginning + _FILLER * (TURN_BYTES // len(_FILLER))
    return {"model": model, "messages": [{"role": "user", "content": text}], "stream": streamed}
