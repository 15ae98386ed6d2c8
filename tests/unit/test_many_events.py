"""Events that come by the hundred: counted together, with the same counts as one by one, and nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.relay.chunked import MANY_BYTES, ChunkedBody, unframed
from sidecar.relay.stream import PutAside, StreamObserver
from sidecar.relay.usage import usage_in
from tests.unit.test_stream_observer import Gaps, cut, events_of

WORD = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
USAGE = b'data: {"usage":{"prompt_tokens":12,"completion_tokens":345,"total_tokens":357}}\n\n'
DONE = b"data: [DONE]\n\n"

ODD = [
    *(b": keep-alive\n\n", b"event: x\ndata: y\n\n", b"data: half", b" and half\n\n", WORD + WORD, b"\n", b"\n\n"),
    *(b"data: a\r\rdata: b\n\n", b"data: a\r\n\n", b"data: a\n\ndata: b\n\n", b"data: a\n\n\n\n", b"data:\n\n"),
    *(b"data: a\ndata: b\n\n", b"data\n\n", b"data: a\r\n\r\n", b"x" * 3000, b"data: " + b"y" * 9000 + b"\n\n"),
    *(b"data: c\n\r\rdata: d\n", USAGE, b"data: " + b"u" * 3900 + b"\n\n"),
]
PLAIN = [WORD, USAGE, DONE, b"data: x\n\n", b"data: " + b"z" * 400 + b"\n\n"]
RUNS = st.one_of(
    st.tuples(st.sampled_from(PLAIN), st.integers(1, 400)), st.tuples(st.sampled_from(ODD), st.integers(1, 3))
)
PAYLOADS = st.lists(RUNS, min_size=1, max_size=8).map(
    lambda runs: [payload for payload, times in runs for _ in range(times)]
)


def framed(payload: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(payload), extension, payload)


def observe(*pieces: bytes) -> tuple[StreamObserver, Gaps, bytes]:
    gaps = Gaps()
    put_aside = PutAside(gaps)
    observer = StreamObserver(put_aside)
    body = ChunkedBody(observer=observer)
    passed = b"".join(body.feed(piece) for piece in pieces)
    put_aside.look_through()
    assert body.error is None
    return observer, gaps, passed


def chunks_of(wire: bytes) -> list[bytes]:
    """The payload of each chunk."""
    payloads = []
    while wire:
        size, _, wire = wire.partition(b"\r\n")
        end = int(size.partition(b";")[0], 16)
        payloads.append(wire[:end])
        assert wire[end : end + 2] == b"\r\n"
        wire = wire[end + 2 :]
    return payloads


def ends_of_chunks(wire: bytes) -> set[int]:
    """Where a chunk ends in the payload of them all."""
    return set(itertools.accumulate(map(len, chunks_of(wire))))


def told(payloads: list[bytes]) -> tuple[int, int, bool, dict[str, int]]:
    """Events, gaps, whether there was a token, usage: as whoever reads line by line would tell them."""
    payload = b"".join(payloads)
    events = events_of(payload)
    return events, max(0, events - 1), b'"content":"w' in payload, usage_in(payload[-4096:])


def seen(*pieces: bytes) -> tuple[int, int, bool, dict[str, int]]:
    observer, gaps, _ = observe(*pieces)
    return observer.events, gaps.count, observer.first_token_at is not None, observer.usage


@given(PAYLOADS, st.lists(st.integers(0, 200_000), max_size=6), st.booleans())
@settings(max_examples=300, deadline=None)
def test_counts_and_usage_are_the_same_however_it_comes(payloads: list[bytes], at: list[int], extends: bool) -> None:
    extensions = [b";x" if extends and number % 50 == 49 else b"" for number in range(len(payloads))]
    stream = b"".join(map(framed, payloads, extensions))

    assert seen(*cut(stream, at)) == told(payloads)
    assert seen(*map(framed, payloads)) == told(payloads)
    passed = observe(*cut(stream, at))[2]
    assert unframed(passed) == b"".join(payloads)
    assert ends_of_chunks(passed) <= ends_of_chunks(stream)
    assert len(passed) <= len(stream)


@pytest.mark.parametrize(
    ("before", "between", "behind"),
    [(1, 3, 300), (200, 3, 300), (300, 60, 300), (300, 0, 200), (300, 130, 60), (130, 130, 1)],
)
def test_two_odd_chunks_among_many_plain_ones_change_no_count(before: int, between: int, behind: int) -> None:
    for one in ODD:
        for other in ODD:
            payloads = [*[WORD] * before, one, *[WORD] * between, other, *[WORD] * behind]

            assert seen(framed(WORD), b"".join(map(framed, payloads))) == told([WORD, *payloads]), (
                one[:40],
                other[:40],
            )


def test_odd_chunks_that_come_one_by_one_are_counted_as_what_they_are() -> None:
    for one in ODD:
        for other in ODD:
            payloads = [WORD, one, WORD, other, WORD, b"\n\n"]

            assert seen(*map(framed, payloads)) == told(payloads), (one[:40], other[:40])


@pytest.mark.parametrize("word", [WORD, b"data: x\n\n", b"data:\n\n", b"data: " + b"z" * 3000 + b"\n\n"])
@pytest.mark.parametrize("behind", [b"", b"5\r\ndata:", b"3e", b"7\r\n: hi \n\n\r\n"])
def test_many_events_are_counted_without_being_cut_out(word: bytes, behind: bytes) -> None:
    """After the token was found, all that comes whole is told at once: the observer is shown next to none of it."""
    observer = StreamObserver(PutAside(Gaps()))
    body = ChunkedBody(observer=observer)
    body.feed(framed(WORD))
    body.feed(framed(word) * 2000 + behind)

    kept = [*observer._older, *observer._newer]
    assert observer.events == 2001
    assert MANY_BYTES <= len(kept[0]) <= sum(map(len, kept)) < 3 * MANY_BYTES
    assert len(kept) <= 2


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([[WORD] * 2000 + [USAGE, DONE]], id="among-many"),
        pytest.param([[WORD] * 200 + [USAGE] + [WORD] * 15 + [b"\n"] * 2600], id="shortly-before-small-chunks"),
        pytest.param([[USAGE], [WORD] * 3 + [b"\n"] * 1500], id="before-a-few-and-small-chunks"),
        pytest.param([[WORD] * 300 + [USAGE], [DONE]], id="in-the-piece-before"),
    ],
)
def test_usage_is_found_near_the_end(pieces: list[list[bytes]]) -> None:
    """Where framing is most of what comes, 4 KiB of payload are many bytes on the wire."""
    observer, _, _ = observe(framed(WORD), *(b"".join(map(framed, payloads)) for payloads in pieces))

    assert observer.usage == {"prompt": 12, "completion": 345}


def test_events_before_the_first_token_are_searched_for_it() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'

    observer, _, _ = observe(framed(role) * 500 + framed(WORD) + framed(role) * 500)

    assert observer.events == 1001
    assert observer.first_token_at is not None


@pytest.mark.parametrize(
    ("payloads", "passed"),
    [
        pytest.param([WORD] * 200, [WORD * 200], id="all"),
        pytest.param([WORD, USAGE] * 100 + [DONE], [(WORD + USAGE) * 100 + DONE], id="of-several-sizes"),
        pytest.param([WORD] * 200 + [b"data: half"], [WORD * 200, b"data: half"], id="before-a-part-of-an-event"),
        pytest.param([WORD] * 200 + [b": hi\n\n"] * 3, [WORD * 200, *[b": hi\n\n"] * 3], id="before-comments"),
        pytest.param(
            [WORD] * 200 + [b"event: x\ndata: y\n\n"] + [WORD] * 200,
            [WORD * 200, b"event: x\ndata: y\n\n", WORD * 200],
            id="around-an-event-with-a-name",
        ),
        pytest.param([WORD] * 100, [WORD] * 100, id="none-of-few"),
        pytest.param([WORD + WORD] * 200, [WORD + WORD] * 200, id="none-of-chunks-with-two"),
    ],
)
def test_plain_events_that_come_together_leave_in_one_chunk_and_all_else_in_its_own(
    payloads: list[bytes], passed: list[bytes]
) -> None:
    wire = b"".join(map(framed, payloads))

    assert chunks_of(observe(framed(WORD), wire)[2]) == [WORD, *passed]
    assert ChunkedBody().feed(wire) == wire


def test_events_that_come_one_by_one_leave_one_by_one_however_many_they_are() -> None:
    assert observe(*[framed(WORD)] * 2000)[2] == framed(WORD) * 2000
