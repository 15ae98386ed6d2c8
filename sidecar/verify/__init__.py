"""`hermes-sidecar verify`: proof of continuity on the real chat path, in words.

Two turns under one fresh route key, the first not streamed and the second streamed; the same again with an image,
under a second key; then two without any key, to show the difference. What is said in turn 1 and asked for in turn 2
is a token that nobody has used before, so that the session's history cannot hold it by chance.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable

from yarl import URL

from sidecar.verify.caller import Caller
from sidecar.verify.facts import End, Facts, History, HistoryState, Pair, Turn
from sidecar.verify.judgement import Verdict, judge
from sidecar.verify.rotation import prove_rotation
from sidecar.verify.wording import progress, shown, without_key

__all__ = ["Verdict", "verify"]

# Agents think, and call tools: minutes are normal. Beyond this a person at a terminal wants to be told.
TURN_LIMIT_S = 180.0


async def verify(
    base_url: str,
    *,
    bearer: str | None,
    say: Callable[[str], None],
    turn_limit_s: float = TURN_LIMIT_S,
    rotation: bool = False,
) -> Verdict:
    """Verifies the sidecar at `base_url` and tells of each step through `say`.

    `rotation` proves instead that a conversation is followed which the gateway moves to another session. `bearer` goes
    out as `Authorization: Bearer`: a client token where the sidecar wants one, or the gateway's key.
    Everything that can go wrong on the other side ends in a Verdict; nothing is raised but cancellation.
    The turns are real ones: an agent behind the gateway answers them, and the sessions stay there.
    """
    address = base_url.rstrip("/").removesuffix("/v1")
    token = (bearer or "").strip() or None
    if token is not None and not token.isprintable():
        return Verdict(False, "The token holds a line break or another character that no header can carry.")
    if not _is_http(address):
        return Verdict(False, f"{shown(address)} is not an http address.")
    async with Caller(address, bearer=token, turn_limit_s=turn_limit_s) as caller:
        if rotation:
            return await prove_rotation(caller, shown(address), turn_limit_s, say)
        model = await caller.model()
        text = await _pair(caller, model, "text", say)
        facts = Facts(shown(address), turn_limit_s, text)
        if not judge(facts).ok:
            return judge(facts)
        image = await _pair(caller, model, "image", say)
        say(without_key(*[await _control_turn(caller, model, number, say) for number in ("first", "second")]))
        return judge(Facts(shown(address), turn_limit_s, text, image))


async def _pair(caller: Caller, model: str, kind: str, say: Callable[[str], None]) -> Pair:
    """Two turns under one fresh key, then the history; it stops at the first turn that fails."""
    key, token, question = (f"{word}-{secrets.token_hex(6)}" for word in ("verify", "token", "question"))
    with_image = kind == "image"
    first = await caller.turn(
        f"turn 1 ({kind}, not streamed)",
        _body(model, f"Connection test: remember {token}, and answer with one word.", image=with_image, stream=False),
        key=key,
    )
    say(progress(first))
    if first.end is not End.COMPLETE:
        return Pair(key, first)
    second = await caller.turn(
        f"turn 2 ({kind}, streamed)",
        _body(
            model,
            f"Connection test, {question}: which token did I give you? Answer with the token alone.",
            image=with_image,
            stream=True,
        ),
        key=key,
        expected_token=token,
    )
    say(progress(second))
    if second.end is not End.COMPLETE:
        return Pair(key, first, second)
    # A gateway that names no session may still keep one: by the sidecar's rules this key is then its id.
    history = await caller.history(second.session_id or key, (token, question))
    if second.session_id is not None:
        say(f"history of session {shown(second.session_id)}: {_history_words(history)}")
    return Pair(key, first, second, history)


async def _control_turn(caller: Caller, model: str, number: str, say: Callable[[str], None]) -> Turn:
    # The two must open with different words: gateways that name no session tell conversations apart by them.
    text = f"Connection test without a session, {number} message, {secrets.token_hex(6)}: answer with one word."
    turn = await caller.turn(
        f"control turn, {number} (no key)", _body(model, text, image=False, stream=False), key=None
    )
    say(progress(turn))
    return turn


def _body(model: str, text: str, *, image: bool, stream: bool) -> dict[str, object]:
    content: object = text
    if image:
        url = "data:image/png;base64," + b64encode(_small_png()).decode()
        content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    # Only the new message, no history: if the gateway remembers the first turn, then by its session.
    return {"model": model, "messages": [{"role": "user", "content": content}], "stream": stream}


def _small_png(side: int = 32) -> bytes:
    """A plain grey square. Some vision models refuse images of a few pixels, so it is a little larger than needed."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = (b"\0" + b"\x80" * side) * side
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _is_http(address: str) -> bool:
    try:
        url = URL(address)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.host) and not url.query_string and not url.fragment


def _history_words(history: History) -> str:
    if history.state is HistoryState.READ:
        return f"first message {_there(history.has_first)}, second message {_there(history.has_second)}"
    return history.detail or history.state.name.lower().replace("_", " ")


def _there(found: bool) -> str:
    return "there" if found else "missing"
