"""The verdict of `verify`, as a table: which facts lead to which exit code, and which words a person needs to read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.verify.answers import Finding, StreamReader, history_markers, read_completion, read_error
from sidecar.verify.facts import End, ErrorAnswer, Facts, History, HistoryState, Leg, Pair, Turn
from sidecar.verify.judgement import judge
from sidecar.verify.rotation_judgement import judge_rotation
from sidecar.verify.wording import progress, shown, without_key

MAPPED = "header:x-hermes-session-key"
READ = History(HistoryState.READ, has_first=True, has_second=True)


def answered(number: int, session_id: str | None, mapping: str | None = MAPPED, *, recalled: bool = False) -> Turn:
    return Turn(f"turn {number}", End.COMPLETE, 200, session_id, mapping, recalled)


def refused(status: int, message: str = "", code: str = "", hint: str = "", *, from_sidecar: bool = False) -> Pair:
    return Pair("k", Turn("turn 1", End.REFUSED, status, error=ErrorAnswer(message, code, hint, from_sidecar)))


def pair(session_id: str | None, history: History = READ, mapping: str | None = MAPPED) -> Pair:
    return Pair("k", answered(1, session_id, mapping), answered(2, session_id, mapping), history)


def ended(end: End, detail: str = "") -> Pair:
    return Pair("k", answered(1, "k"), Turn("turn 2", end, detail=detail))


def facts(text: Pair, image: Pair | None = None) -> Facts:
    return Facts("http://127.0.0.1:8650", 180.0, text, image)


GOOD = pair("verify-a")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(
            facts(GOOD, pair("verify-b")),
            "Both turns landed in session verify-a: both messages stand in its history. "
            "With an image: both turns landed in session verify-b: both messages stand in its history.",
            id="proven-by-the-history",
        ),
        pytest.param(
            facts(pair("verify-a", History(HistoryState.KEY_NEEDED)), pair("verify-b")),
            "Not proven is that both messages stand in its history: reading it takes the gateway's key.",
            id="history-needs-a-key",
        ),
        pytest.param(
            facts(pair("verify-a", History(HistoryState.NO_ROUTE)), pair("verify-b")),
            "this gateway has no route to read it.",
            id="history-has-no-route",
        ),
        pytest.param(
            facts(
                Pair("k", answered(1, "a"), answered(2, "a", recalled=True), History(HistoryState.NO_ROUTE)), pair("b")
            ),
            "The answer to the second turn named the token that only the first one held",
            id="no-history-but-the-answer-remembers",
        ),
        pytest.param(
            facts(pair(None, History(HistoryState.NO_ROUTE)), pair(None, History(HistoryState.NO_ROUTE))),
            "Chat works, and this backend keeps no sessions: its answers name none.",
            id="no-sessions",
        ),
        pytest.param(
            facts(pair(None, History(HistoryState.NO_ROUTE), mapping="none"), None),
            "keeps no sessions",
            id="no-sessions-and-nothing-mapped",
        ),
        pytest.param(
            facts(pair(None), Pair("k2", answered(1, None), answered(2, None), READ)),
            "Both turns landed in session k: the answers name none, but both messages stand in its history.",
            id="session-unnamed-but-readable-under-the-key",
        ),
        pytest.param(
            facts(GOOD, refused(400, "no image input")),
            "The backend refused turn 1 (status 400: no image input), so nothing is proven for turns with images",
            id="model-without-eyes",
        ),
        pytest.param(
            facts(pair("verify-a", mapping=f"{MAPPED}; followed"), pair("verify-b", mapping="body:k; derived")),
            "Both turns landed in session verify-a",
            id="followed-and-derived-are-fine",
        ),
    ],
)
def test_facts_that_prove_continuity(given: Facts, words: str) -> None:
    verdict = judge(given)

    assert verdict.ok
    assert words in verdict.sentence


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(facts(pair("a", mapping=None)), "that is no hermes-sidecar", id="not-a-sidecar"),
        pytest.param(facts(pair("a", mapping="none")), "The sidecar did not map the key of turn 1", id="not-mapped"),
        pytest.param(facts(pair("a", mapping="skipped")), "Look at session.skip_when", id="side-task"),
        pytest.param(
            facts(Pair("k", answered(1, "api-1"), answered(2, "api-2"), READ)),
            "the turns landed in api-1 and api-2. An api- id is the gateway's own",
            id="gateway-ignored-the-id",
        ),
        pytest.param(
            facts(Pair("k", answered(1, "a"), answered(2, "b"), READ)),
            "One key, but two sessions: the turns landed in a and b.",
            id="two-sessions",
        ),
        pytest.param(
            facts(Pair("k", answered(1, "a"), answered(2, None), READ)),
            "The answer to turn 2 names no session",
            id="one-answer-is-silent",
        ),
        pytest.param(
            facts(pair("a", replace(READ, has_first=False))),
            "its history holds only the second message",
            id="history-lacks-the-first",
        ),
        pytest.param(
            facts(pair("a", replace(READ, has_second=False))),
            "its history holds only the first message",
            id="history-lacks-the-second",
        ),
        pytest.param(
            facts(pair("a", History(HistoryState.READ))), "its history holds neither message", id="history-lacks-both"
        ),
        pytest.param(
            facts(pair("a", History(HistoryState.UNKNOWN_SESSION))),
            "the gateway knows no such session",
            id="gateway-does-not-know-its-own-session",
        ),
        pytest.param(
            facts(pair("a", History(HistoryState.UNREADABLE, detail="status 500"))),
            "its history could not be read (status 500), so continuity is not proven.",
            id="history-broken",
        ),
        pytest.param(
            facts(GOOD, pair("verify-a")),
            "Two different keys landed in one session, verify-a: conversations would be mixed.",
            id="everything-in-one-session",
        ),
        pytest.param(
            facts(GOOD, pair(None, History(HistoryState.NO_ROUTE))), "With an image it is different", id="image-unnamed"
        ),
        pytest.param(
            facts(GOOD, Pair("k", answered(1, "a"), answered(2, "b"), READ)),
            "With an image: one key, but two sessions",
            id="image-loses-the-session",
        ),
        pytest.param(facts(GOOD, refused(500)), "With an image: turn 1 was not answered (status 500)", id="image-500"),
        pytest.param(
            facts(GOOD, refused(400, "No.", "invalid_request", from_sidecar=True)),
            "With an image: turn 1 failed (400 invalid_request). No.",
            id="image-refused-by-the-sidecar-itself",
        ),
        pytest.param(
            facts(refused(401, "Invalid API key")),
            "The gateway wants a key, and got none or a wrong one (status 401: Invalid API key): set gateway.token_",
            id="gateway-wants-a-key",
        ),
        pytest.param(
            facts(refused(401, "No.", "client_token_required", from_sidecar=True)),
            "The sidecar wants a client token (401 client_token_required)",
            id="sidecar-wants-a-token",
        ),
        pytest.param(
            facts(refused(502, "It could not be reached", "upstream_unreachable", "Start it.", from_sidecar=True)),
            "Turn 1 failed (502 upstream_unreachable). It could not be reached. Start it.",
            id="gateway-down",
        ),
        pytest.param(facts(refused(403, "requires API key")), "API_SERVER_KEY", id="older-gateway-without-a-key"),
        pytest.param(facts(refused(404)), "There is no chat endpoint behind the sidecar (status 404)", id="no-chat"),
        pytest.param(facts(refused(307)), "Turn 1 was not answered (status 307)", id="redirect"),
        pytest.param(facts(refused(429)), "Try again in a moment", id="busy"),
        pytest.param(
            facts(ended(End.UNREACHABLE, detail="Connection refused")),
            "Nothing answers at http://127.0.0.1:8650 (Connection refused). Start the sidecar",
            id="sidecar-down",
        ),
        pytest.param(facts(ended(End.TIMED_OUT)), "Turn 2 had no complete answer within 180 s", id="no-answer-in-time"),
        pytest.param(facts(ended(End.BROKE_OFF)), "The connection broke in turn 2", id="broke-off"),
        pytest.param(facts(ended(End.NO_END)), "The answer to turn 2 stopped without an end", id="no-end"),
        pytest.param(
            facts(ended(End.NOT_CHAT, detail="text/html came")),
            "Turn 2 got status 200, but not a chat answer: text/html came. Correct gateway.url.",
            id="page-instead-of-chat",
        ),
        pytest.param(
            facts(Pair("k", Turn("turn 1", End.AGENT_FAILED, 200, error=ErrorAnswer("no model")))),
            "The gateway took turn 1, but its agent failed: no model.",
            id="agent-failed",
        ),
    ],
)
def test_facts_that_prove_nothing_or_the_contrary(given: Facts, words: str) -> None:
    verdict = judge(given)

    assert not verdict.ok
    assert words in verdict.sentence


@pytest.mark.parametrize("end", [end for end in End if end is not End.COMPLETE])
def test_every_way_a_turn_can_fail_has_a_sentence_and_a_progress_line(end: End) -> None:
    turn = Turn("turn 1", end, detail="as it was")

    verdict = judge(facts(Pair("k", turn)))

    assert not verdict.ok
    assert verdict.sentence[0].isupper()
    assert verdict.sentence.endswith(".")
    assert progress(turn).startswith("turn 1: ")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param(answered(1, "api-1"), answered(2, "api-2"), "two sessions, api-1 and api-2", id="the-bug"),
        pytest.param(answered(1, "s"), answered(2, "s"), "both turns landed in session s all the same", id="one"),
        pytest.param(answered(1, None), answered(2, None), "the gateway names no session", id="silent"),
        pytest.param(answered(1, "s"), answered(2, None), "s and an unnamed one", id="half-silent"),
        pytest.param(answered(1, "s"), Turn("t", End.TIMED_OUT), "nothing to compare with", id="failed"),
    ],
)
def test_control_turns_are_told_but_decide_nothing(first: Turn, second: Turn, words: str) -> None:
    assert words in without_key(first, second)


def test_foreign_text_cannot_move_the_cursor_or_flood_the_terminal() -> None:
    assert shown("a\x1b[2J\r\nb") == "a [2J b"
    assert shown("x" * 1000) == "x" * 300 + "…"


# What an answer was


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
FAILED = b'data: {"choices":[{"delta":{},"finish_reason":"error"}],"error":{"message":"no model"}}\n\n'
TOOL = b'event: hermes.tool.progress\ndata: {"error":{"message":"not the answer\'s"}}\n\n'


@pytest.mark.parametrize(
    ("stream", "finding"),
    [
        pytest.param(CHUNK % b"a" + CHUNK % b"b" + LAST + b"data: [DONE]\n\n", Finding(End.COMPLETE, "ab"), id="whole"),
        pytest.param(CHUNK % b"a" + LAST, Finding(End.COMPLETE, "a"), id="finish-reason-without-done"),
        pytest.param(CHUNK % b"a" + b"data: [DONE]\n\n", Finding(End.COMPLETE, "a"), id="done-without-finish-reason"),
        pytest.param(CHUNK % b"a", Finding(End.NO_END, "a"), id="neither"),
        pytest.param(CHUNK % b"a" + b"data: [DONE]", Finding(End.NO_END, "a"), id="done-cut-short"),
        pytest.param(b"", Finding(End.NO_END), id="nothing"),
        pytest.param(
            (CHUNK % b"a" + LAST).replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n",
            Finding(End.COMPLETE, "a"),
            id="crlf-and-no-blank",
        ),
        pytest.param(b": keepalive\n\n" + TOOL + LAST, Finding(End.COMPLETE), id="comments-and-named-events"),
        pytest.param(
            FAILED + b"data: [DONE]\n\n", Finding(End.AGENT_FAILED, error=ErrorAnswer("no model")), id="failed"
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_stream_is_read_alike_however_it_is_cut(stream: bytes, finding: Finding, size: int) -> None:
    reader = StreamReader()

    for start in range(0, len(stream), size):
        reader.feed(stream[start : start + size])

    assert reader.finding() == finding


@pytest.mark.parametrize(
    ("kind", "body", "finding"),
    [
        pytest.param(
            "application/json",
            b'{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]}',
            Finding(End.COMPLETE, "ok"),
            id="answer",
        ),
        pytest.param(
            "application/json", b'{"choices":[{"message":{"content":null}}]}', Finding(End.COMPLETE), id="no-text"
        ),
        pytest.param(
            "application/json",
            b'{"error":"no model loaded"}',
            Finding(End.AGENT_FAILED, error=ErrorAnswer("no model loaded")),
            id="error-with-status-200",
        ),
        pytest.param(
            "application/json",
            b'{"choices":[]}',
            Finding(End.NOT_CHAT, detail="the JSON has no choices with a message"),
            id="no-choices",
        ),
        pytest.param(
            "text/html",
            b"<html>",
            Finding(End.NOT_CHAT, detail="text/html came instead of JSON, perhaps the page of a dashboard"),
            id="page",
        ),
    ],
)
def test_plain_answer_is_what_it_holds_not_what_its_status_says(kind: str, body: bytes, finding: Finding) -> None:
    assert read_completion(kind, body) == finding


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param(
            b'{"error":{"message":"m","code":"c","hint":"h"}}', ErrorAnswer("m", "c", "h", True), id="sidecar-shape"
        ),
        pytest.param(b'{"error":"m"}', ErrorAnswer("m", from_sidecar=True), id="text"),
        pytest.param(b'{"detail":"m"}', ErrorAnswer("m", from_sidecar=True), id="fastapi"),
        pytest.param(b'{"error":{"code":17}}', ErrorAnswer(from_sidecar=True), id="code-is-a-number"),
        pytest.param(b"[]", ErrorAnswer(from_sidecar=True), id="list"),
        pytest.param(b"\xff", ErrorAnswer(from_sidecar=True), id="no-text"),
        pytest.param(b"[" * 100_000, ErrorAnswer(from_sidecar=True), id="nested-beyond-reason"),
    ],
)
def test_error_words_are_found_in_every_shape(body: bytes, error: ErrorAnswer) -> None:
    assert read_error(body, from_sidecar=True) == error


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param(
            b'{"data":[{"role":"user","content":"one"},{"role":"user","content":[{"type":"text","text":"two"}]}]}',
            (True, True),
            id="text-and-parts",
        ),
        pytest.param(b'{"data":[{"role":"assistant","content":"one two"}]}', (False, False), id="only-user-messages"),
        pytest.param(b'{"data":[null,{"role":"user"},{"role":"user","content":"two"}]}', (False, True), id="odd-items"),
        pytest.param(b'{"data":[]}', (False, False), id="empty"),
        pytest.param(b'{"messages":[]}', None, id="another-shape"),
        pytest.param(b"<html>", None, id="page"),
    ],
)
def test_history_shows_which_messages_it_holds(body: bytes, found: tuple[bool, bool] | None) -> None:
    assert history_markers(body, ("one", "two")) == found


# Conversations that the gateway moves

FOLLOWED = f"{MAPPED}; followed"


def leg(
    tip: str | None = "child",
    following: Turn | None = None,
    history: History = READ,
    *,
    turns: tuple[Turn, ...] = (answered(1, "k"), answered(2, "k")),
    streamed: bool = False,
) -> Leg:
    return Leg("k", streamed, turns, tip, following or (answered(3, "child", FOLLOWED) if tip else None), history)


MOVED = "The gateway moved the conversation from session k to child in turn 2"


@pytest.mark.parametrize(
    ("legs", "ok", "words"),
    [
        pytest.param(
            [leg()],
            True,
            f"{MOVED}, and turn 3 went to child: both messages stand in the history there.",
            id="followed",
        ),
        pytest.param(
            [leg(), leg(streamed=True)],
            True,
            f"{MOVED}, and turn 3 went to child: both messages stand in the history there. Streamed: the gateway moved",
            id="both-ways",
        ),
        pytest.param(
            [leg(), leg(following=answered(3, "k"), streamed=True)],
            False,
            "Streamed: the gateway moved the conversation from session k to child in turn 2, but the sidecar sent",
            id="streamed-not-followed",
        ),
        pytest.param(
            [leg(history=replace(READ, has_first=False))],
            True,
            "its message stands in the history there.",
            id="turn-before-was-summarised",
        ),
        pytest.param(
            [leg(following=answered(3, "grandchild", FOLLOWED))],
            True,
            "turn 3 went to grandchild:",
            id="moved-once-more",
        ),
        pytest.param([leg(None)], True, "Nothing to prove here: in 2 long turns the gateway kept", id="not-moved"),
        pytest.param(
            [leg(None, turns=(answered(1, None),))], True, "this backend keeps no sessions", id="without-sessions"
        ),
        pytest.param(
            [leg(None, turns=(answered(1, "api-1"),))], False, "The gateway ignored the id", id="id-is-ignored"
        ),
        pytest.param([leg(None, turns=(answered(1, "k", None),))], False, "that is no hermes-sidecar", id="no-sidecar"),
        pytest.param(
            [leg(following=answered(3, "child", MAPPED))],
            False,
            "session.follow_rotation must be true",
            id="not-followed",
        ),
        pytest.param(
            [leg(following=answered(3, "child", None))], False, "(X-Hermes-Sidecar-Session: missing)", id="mute"
        ),
        pytest.param(
            [leg(following=answered(3, "k", FOLLOWED))],
            False,
            "the answer to turn 3 names the old one.",
            id="old-again",
        ),
        pytest.param(
            [leg(following=answered(3, None, FOLLOWED))], False, "the answer to turn 3 names no session.", id="no-name"
        ),
        pytest.param(
            [leg(history=replace(READ, has_second=False))], False, "but its message is missing in the", id="not-stored"
        ),
        pytest.param(
            [leg(history=History(HistoryState.UNKNOWN_SESSION))],
            False,
            "but its message is missing",
            id="no-such-session",
        ),
        pytest.param(
            [leg(history=History(HistoryState.KEY_NEEDED))], True, "Not proven is that its message stands", id="no-key"
        ),
        pytest.param(
            [leg(following=Turn("turn 3", End.TIMED_OUT))],
            False,
            "Turn 3 had no complete answer within 180 s.",
            id="slow",
        ),
    ],
)
def test_verdict_on_conversations_that_were_moved(legs: list[Leg], ok: bool, words: str) -> None:
    verdict = judge_rotation(legs, "http://127.0.0.1:8650", 180.0)

    assert verdict.ok is ok
    assert words in verdict.sentence
