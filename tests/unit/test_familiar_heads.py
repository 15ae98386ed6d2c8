"""Heads met before: what is recalled is what would be said again, and nothing that was refused is ever recalled."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sidecar.faults import Fault
from sidecar.relay import wire
from sidecar.relay.admission import Rules, admit
from sidecar.relay.answer_heads import AnswerHead, FamiliarAnswers, read_answer_head
from sidecar.relay.familiar import FamiliarHeads
from sidecar.relay.repeats import NO_LENGTH, shape_of
from sidecar.relay.request import Listener, Request
from sidecar.relay.wire import WireError
from tests.unit.policies import rules_of
from tests.unit.test_guard_fuzz import blocks, rules

PLAIN = rules_of()
READS_BODIES = rules_of({"session": {"sources": [{"body": "user"}]}})
PEER = b"127.0.0.1"


def same(session_id: bytes) -> bytes:
    return session_id


def chat(*lines: bytes, start: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"".join(line + b"\r\n" for line in (start, b"Host: localhost", b"X-Hermes-Session-Key: k", *lines))


def judged(block: bytes, by: Rules = PLAIN) -> Request | None:
    """How the block is judged by somebody who remembers nothing; None where it is refused."""
    try:
        head = wire.parse_request_head(block)
        request = Request(head.method, head.minor)
        admit(request, head, by, peer=PEER, is_draining=False)
    except (Fault, WireError):
        return None
    return request


def met(memory: FamiliarHeads, block: bytes, by: Rules = PLAIN) -> Request | None:
    """What the memory says of the block; where it says nothing, the block is judged, and learned if admitted."""
    recalled = recall(memory, block, by=by)
    if recalled is None and (request := judged(block, by)) is not None:
        memory.learn(block, PEER, "all", by, request)
    return recalled


def recall(
    memory: FamiliarHeads,
    block: bytes,
    *,
    peer: bytes = PEER,
    listener: Listener = "all",
    by: Rules = PLAIN,
    newest: Callable[[bytes], bytes] = same,
) -> Request | None:
    admitted, length = memory.find(block, peer, listener)
    return None if admitted is None else admitted.again(length, by, newest)


def verdict(request: Request) -> dict[str, object]:
    """All that a request is, but for the id that each has of its own."""
    told = told_by(request)
    del told["request_id"]
    told["head"] = request.head.replace(request.request_id, b"<id>")
    return told


def told_by(thing: Request | AnswerHead) -> dict[str, object]:
    """Its attributes, compiled or not."""
    named = {name: getattr(thing, name) for name in dir(thing) if not name.startswith("_")}
    return {name: value for name, value in named.items() if not callable(value)}


def memory_of(*heads: bytes, by: Rules = PLAIN) -> FamiliarHeads:
    memory = FamiliarHeads()
    for block in heads:
        request = judged(block, by)
        if request is not None:
            memory.learn(block, PEER, "all", by, request)
    return memory


# --- Requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 5"), id="the-same"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 123456"), id="longer"),
        pytest.param(chat(b"content-length: 5"), chat(b"content-length: 0007"), id="leading-zeros"),
        pytest.param(chat(b"Transfer-Encoding: chunked"), chat(b"Transfer-Encoding: chunked"), id="chunked"),
        pytest.param(
            chat(start=b"GET /v1/models HTTP/1.1"), chat(start=b"GET /v1/models HTTP/1.1"), id="without-a-body"
        ),
        pytest.param(
            chat(b"Origin: http://localhost", b"Content-Length: 5"),
            chat(b"Origin: http://localhost", b"Content-Length: 6"),
            id="from-a-page",
        ),
    ],
)
def test_repeated_head_is_familiar_and_says_the_same(before: bytes, now: bytes) -> None:
    recalled = met(memory_of(before), now)

    fresh = judged(now)
    assert recalled is not None
    assert fresh is not None
    assert verdict(recalled) == verdict(fresh)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(chat(b"content-Length: 5"), chat(b"content-Length: 5", b"Content-Length: 7"), id="second-after"),
        pytest.param(chat(b"content-Length: 5"), chat(b"Content-Length: 7", b"content-Length: 5"), id="second-before"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 5", b"Content-Length: 5"), id="twice"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 5", b"content-length: 6"), id="two-spellings"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: "), id="empty"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: +5"), id="signed"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 5 "), id="blank-after"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: \xb2"), id="a-digit-elsewhere"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: " + b"1" * 19), id="too-many-digits"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 5, 5"), id="list"),
        pytest.param(
            chat(b"Content-Length: 5"), chat(b"Content-Length: 5", b"Transfer-Encoding: chunked"), id="chunked-too"
        ),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 0"), id="nothing"),
        pytest.param(chat(b"CONTENT-LENGTH: 5"), chat(b"CONTENT-LENGTH: 5"), id="odd-spelling"),
        pytest.param(chat(b"CONTENT-LENGTH: 0"), chat(b"CONTENT-LENGTH: 0"), id="odd-spelling-of-nothing"),
        pytest.param(chat(b"Content-Length: 5"), chat(), id="without"),
        pytest.param(chat(), chat(b"Content-Length: 5"), id="with"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"content-length: 5"), id="other-spelling"),
        pytest.param(chat(b"Content-Length: 5"), chat(b"Content-Length: 5", b"X-A: b"), id="one-more-field"),
        pytest.param(
            chat(b"Content-Length: 5", b"Expect: 100-continue"),
            chat(b"Content-Length: 5", b"Expect: 100-continue"),
            id="expects",
        ),
        pytest.param(
            chat(b"Content-Length: 5", b"X-Request-Id: r1"),
            chat(b"Content-Length: 5", b"X-Request-Id: r1"),
            id="id-of-its-own",
        ),
        pytest.param(
            chat(start=b"GET /api/sessions HTTP/1.1"), chat(start=b"GET /api/sessions HTTP/1.1"), id="waits-for-a-probe"
        ),
        pytest.param(chat(start=b"GET /healthz HTTP/1.1"), chat(start=b"GET /healthz HTTP/1.1"), id="own-page"),
        pytest.param(chat(b"X: " + b"a" * 5000), chat(b"X: " + b"a" * 5000), id="long"),
    ],
)
def test_anything_else_is_judged_anew(before: bytes, now: bytes) -> None:
    assert met(memory_of(before), now) is None


def test_other_rules_peer_listener_or_tip_make_it_unfamiliar() -> None:
    block = chat(b"Content-Length: 5")
    memory = memory_of(block)

    assert recall(memory, block, peer=b"10.0.0.1") is None
    assert recall(memory, block, listener="relay") is None
    assert recall(memory, block, newest=lambda session_id: session_id + b"-2") is None
    assert recall(memory, block, by=rules_of()) is None
    assert recall(memory, block) is not None


def test_what_other_rules_admitted_is_forgotten_with_them() -> None:
    memory = memory_of(chat(b"Content-Length: 5"), chat(b"Content-Length: 5", b"X-A: b"))
    met(memory, chat(b"Content-Length: 5"), rules_of())

    assert len(memory._known) == 1


def test_what_depends_on_the_body_is_judged_each_time() -> None:
    block = chat(b"Content-Length: 5")

    assert met(memory_of(block, by=READS_BODIES), block, READS_BODIES) is None


def test_memory_keeps_the_latest_and_is_bounded() -> None:
    memory = FamiliarHeads()
    for number in range(1000):
        met(memory, chat(b"Content-Length: 5", b"X-Number: %d" % number))

    assert len(memory._known) <= 256
    assert met(memory, chat(b"Content-Length: 6", b"X-Number: 999")) is not None
    assert met(memory, chat(b"Content-Length: 6", b"X-Number: 1")) is None


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Heads that differ in little: above all in what could be taken for a length."""
    first = draw(blocks())
    heads = [first]
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.sampled_from(heads))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            digits = draw(st.sampled_from([b"0", b"1", b"7", b"12", b"007", b"", b"+1", b"1 ", b"9" * 18, b"9" * 19]))
            block = re.sub(rb"(?i)(content-length: ?)[^\r]*", rb"\g<1>" + digits, block, count=draw(st.integers(0, 1)))
        elif kind == 1:
            line = draw(st.sampled_from([b"Content-Length: 5", b"content-length: 7", b"Content-length: 5", b"X: y"]))
            lines = block.split(b"\r\n")
            lines.insert(draw(st.integers(1, max(1, len(lines) - 1))), line)
            block = b"\r\n".join(lines)
        elif kind == 2:
            block = re.sub(rb"(?i)content-length", draw(st.sampled_from([b"Content-Length", b"content-Length"])), block)
        elif kind == 3:
            lines = block.split(b"\r\n")
            del lines[draw(st.integers(0, len(lines) - 1))]
            block = b"\r\n".join(lines)
        heads.append(block)
    return heads


@given(alike(), st.booleans(), st.booleans())
@settings(max_examples=1500, deadline=None)
def test_whatever_came_before_a_familiar_head_says_what_a_fresh_look_would(
    heads: list[bytes], tokens: bool, forwards_key: bool
) -> None:
    by = rules(tokens=tokens, isolated=tokens, forwards_key=forwards_key)
    memory = memory_of(by=by)
    for block in [*heads, *heads]:
        recalled = met(memory, block, by)
        if recalled is not None:
            event("familiar")
            fresh = judged(block, by)
            assert fresh is not None
            assert verdict(recalled) == verdict(fresh)


@given(alike())
@settings(max_examples=500, deadline=None)
def test_two_heads_of_one_shape_differ_in_one_length_alone(heads: list[bytes]) -> None:
    for one in heads:
        for other in heads:
            if shape_of(one)[0].whole == shape_of(other)[0].whole:
                digits = rb"(\r\n[Cc]ontent-[Ll]ength: )[0-9]+(\r\n)"
                assert re.sub(digits, rb"\1\2", one, count=1) == re.sub(digits, rb"\1\2", other, count=1)


@given(alike(), st.sampled_from([b"", b"\r\n", b"hello", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))
@settings(max_examples=1000, deadline=None)
def test_bytes_begin_with_a_shape_if_their_head_has_it(heads: list[bytes], behind: bytes) -> None:
    """What a connection looks at first is what a look-up by the whole head would find."""
    whole = [block for block in heads if block.endswith(b"\r\n") and b"\r\n\r\n" not in block]
    for one in whole:
        shape, _ = shape_of(one)
        for other in whole:
            others, length = shape_of(other)
            expected = (len(other) + 2, length) if others.whole == shape.whole else (-1, NO_LENGTH)
            assert shape.begins(other + b"\r\n" + behind) == expected
            for end in range(0, len(other) + 2, 7):
                assert shape.begins(other[:end]) == (-1, NO_LENGTH)


# --- Answers ---------------------------------------------------------------------------------------------------------


def answer(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"".join(line + b"\r\n" for line in (start, b"Content-Type: application/json", *lines))


def read_fresh(block: bytes) -> dict[str, object] | str:
    try:
        return told_by(read_answer_head(block))
    except WireError as error:
        return str(error)


def read_by(memory: FamiliarAnswers, block: bytes) -> dict[str, object] | str:
    latest, end = memory.latest(block + b"\r\nbody")
    if latest is not None:
        event("the latest")
        assert end == len(block) + 2
        return told_by(latest)
    try:
        return told_by(memory.read(block))
    except WireError as error:
        return str(error)


LENGTH_LINES = [
    *(b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: 77", b"content-length: 5", b"content-Length: 5"),
    *(b"Content-Length: ", b"Content-Length: x", b"Transfer-Encoding: chunked", b"Connection: close", b"Date: d"),
    *(b"X-Hermes-Session-Id: s", b"Vary: Origin", b"Content-Length: 5, 5", b"Content-Length:5"),
]


@given(st.lists(st.lists(st.sampled_from(LENGTH_LINES), max_size=3), min_size=2, max_size=6))
@settings(max_examples=1500, deadline=None)
def test_whatever_came_before_an_answers_head_is_read_as_a_fresh_look_would(answers: list[list[bytes]]) -> None:
    memory = FamiliarAnswers()
    for lines in [*answers, *answers]:
        block = answer(*lines)
        assert read_by(memory, block) == read_fresh(block)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(
            [b"Content-Length: 5", b"Content-Length: 5"], [b"Content-Length: 7", b"Content-Length: 5"], id="a"
        ),
        pytest.param([b"content-Length: 5"], [b"Content-Length: 7", b"content-Length: 5"], id="odd"),
        pytest.param([b"Content-Length: 5"], [b"Content-Length: 5", b"Transfer-Encoding: chunked"], id="both"),
        pytest.param([b"Content-Length: 5"], [b"Content-Length: "], id="none"),
    ],
)
def test_two_readings_are_refused_whatever_came_before(before: list[bytes], now: list[bytes]) -> None:
    memory = FamiliarAnswers()
    memory.read(answer(*before))

    with pytest.raises(WireError):
        memory.read(answer(*now))


def test_answers_heads_are_read_once_and_kept_in_bounds() -> None:
    memory = FamiliarAnswers()
    first = memory.read(answer(b"Content-Length: 5"))

    assert memory.read(answer(b"Content-Length: 6")).lines is first.lines
    for number in range(1000):
        memory.read(answer(b"Content-Length: 5", b"X-Number: %d" % number))
    assert len(memory._known) <= 256
