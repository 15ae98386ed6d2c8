"""A chunked body as it passes: nothing lost, nothing held back, nothing passed that was not understood."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.relay.chunked import ChunkedBody, chunk_of
from sidecar.relay.stream import PutAside, StreamObserver
from sidecar.telemetry.cells import Histogram
from tests.unit.grammar import TOKENS, VALUES, VISIBLE, bytes_of, cut, field_lines

BAD_SIZE = "a chunk size is malformed"
BAD_CHUNK = "a chunk is longer than it says"
BAD_TRAILER = "a trailer field is malformed"
LONG_TRAILERS = "the trailer section is too long"

EXTENSIONS = st.one_of(
    st.just(b""),
    st.just(b';a="x;y"'),
    bytes_of(VISIBLE + b" \t").map(lambda extension: b";" + extension),
    st.builds(lambda name, value: b" \t; %b = %b" % (name, value), TOKENS, VALUES),
)


@dataclass
class Message:
    """A chunked body as its sender wrote it, and what of it has been understood after each byte.

    A size line is understood when it is complete; payload and the CRLF behind it byte by byte; the end at once, when
    the trailer section is complete.
    """

    wire: bytes = b""
    _understood: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    """(Bytes of the wire needed, bytes to pass on, payload in them)."""

    def write(self, wire: bytes, passes: bytes) -> None:
        self.wire += wire
        self._understood.append((len(self.wire), passes, b""))

    def write_chunk(self, size_line: bytes, extension: bytes, payload: bytes) -> None:
        self.write(size_line + extension + b"\r\n", size_line + b"\r\n")
        start = len(self.wire)
        self.wire += payload + b"\r\n"
        for position in range(len(payload) + 2):
            byte = self.wire[start + position : start + position + 1]
            self._understood.append((start + position + 1, byte, byte if position < len(payload) else b""))

    def passed_after(self, count: int) -> bytes:
        return b"".join([passes for needed, passes, _ in self._understood if needed <= count])

    def payload_after(self, count: int) -> bytes:
        return b"".join([payload for needed, _, payload in self._understood if needed <= count])

    @property
    def payload(self) -> bytes:
        return self.payload_after(len(self.wire))


@st.composite
def size_of(draw: st.DrawFn, size: int) -> bytes:
    """A number as a chunk size: hexadecimal in either case, zeros in front."""
    digits = draw(st.sampled_from((b"%x", b"%X"))) % size
    return b"0" * draw(st.integers(0, 16 - len(digits))) + digits


@st.composite
def chunks(draw: st.DrawFn) -> Message:
    """Some chunks, and no end."""
    message = Message()
    for payload in draw(st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=5)):
        message.write_chunk(draw(size_of(len(payload))), draw(EXTENSIONS), payload)
    return message


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """A whole chunked body, extensions and trailer fields included."""
    message = draw(chunks())
    end = draw(size_of(0)) + draw(EXTENSIONS) + b"\r\n"
    trailers = [line for _, line in draw(field_lines(max_size=3))]
    message.write(end + b"".join(trailers) + b"\r\n", b"0\r\n\r\n")
    return message


@dataclass
class Reading:
    """What a ChunkedBody said, piece for piece."""

    passed: list[bytes]
    unread: bytes
    """Pieces that came after the end, or after the error."""
    body: ChunkedBody

    @property
    def all_passed(self) -> bytes:
        return b"".join(self.passed)


def read(pieces: list[bytes], *, bare: bool = False) -> Reading:
    body = ChunkedBody(bare=bare)
    passed = []
    for number, piece in enumerate(pieces, start=1):
        passed.append(body.feed(piece))
        if body.done or body.error is not None:
            return Reading(passed, b"".join(pieces[number:]), body)
    return Reading(passed, b"", body)


# --- Well-formed bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "passed", "payload"),
    [
        pytest.param(b"0\r\n\r\n", b"0\r\n\r\n", b"", id="nothing"),
        pytest.param(b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"hello", id="one-chunk"),
        pytest.param(
            b"1\r\na\r\n002\r\nbc\r\n000\r\n\r\n",
            b"1\r\na\r\n002\r\nbc\r\n0\r\n\r\n",
            b"abc",
            id="own-spelling-of-sizes",
        ),
        pytest.param(b"A\r\n0123456789\r\n0\r\n\r\n", b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789", id="upper-case"),
        pytest.param(
            b"5;n=v\r\nhello\r\n0;last\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"hello", id="extensions-are-dropped"
        ),
        pytest.param(
            b'5 ; n="v;w" ; x\r\nhello\r\n1;\r\n!\r\n0\r\n\r\n',
            b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
            b"hello!",
            id="extensions-with-blanks",
        ),
        pytest.param(
            b"1\r\na\r\n0\r\nX-Sum: 1\r\nX-Sum:2\r\n\r\n", b"1\r\na\r\n0\r\n\r\n", b"a", id="trailers-are-dropped"
        ),
        pytest.param(
            b"7\r\n0\r\n\r\n5\r\r\n0\r\n\r\n",
            b"7\r\n0\r\n\r\n5\r\r\n0\r\n\r\n",
            b"0\r\n\r\n5\r",
            id="payload-that-looks-like-framing",
        ),
    ],
)
def test_well_formed_body(wire: bytes, passed: bytes, payload: bytes) -> None:
    whole = read([wire + b"GET /next"])
    bare = read([wire + b"GET /next"], bare=True)

    assert (whole.all_passed, whole.body.done, whole.body.rest, whole.body.error) == (passed, True, b"GET /next", None)
    assert (bare.all_passed, bare.body.done, bare.body.rest, bare.body.error) == (payload, True, b"GET /next", None)


@given(messages(), st.binary(max_size=20), st.data())
def test_body_passes_however_it_is_cut(message: Message, after: bytes, data: st.DataObject) -> None:
    """For any payloads, sizes, extensions, trailers and any cutting: the sender's chunks pass, extensions and trailers
    do not, the end is found, and what follows it is left over."""
    reading = read(data.draw(cut(message.wire + after)))

    assert reading.all_passed == message.passed_after(len(message.wire))
    assert reading.body.done
    assert reading.body.error is None
    assert reading.body.rest + reading.unread == after


@given(messages(), st.binary(max_size=20), st.data())
def test_bare_body_is_the_payload_however_it_is_cut(message: Message, after: bytes, data: st.DataObject) -> None:
    """For any chunked body and any cutting: `bare` gives the payload, and the same end."""
    reading = read(data.draw(cut(message.wire + after)), bare=True)

    assert reading.all_passed == message.payload
    assert reading.body.done
    assert reading.body.error is None
    assert reading.body.rest + reading.unread == after


@given(messages(), st.booleans(), st.data())
def test_nothing_is_held_back_and_nothing_is_made(message: Message, bare: bool, data: st.DataObject) -> None:
    """After each feed, what was understood so far has been returned: all payload that came, never more than came."""
    body = ChunkedBody(bare=bare)
    fed, passed = 0, b""
    for piece in data.draw(cut(message.wire)):
        passed += body.feed(piece)
        fed += len(piece)

        assert passed == (message.payload_after(fed) if bare else message.passed_after(fed))
        assert len(passed) <= fed
        assert body.done == (fed == len(message.wire))


def test_a_piece_with_nothing_to_drop_is_passed_without_a_copy() -> None:
    piece = b"5\r\nhello\r\n"

    assert ChunkedBody().feed(piece) is piece


@pytest.mark.parametrize("size", [b"ffffffffffffffff", b"8000000000000000", b"7fffffffffffffff", b"fffffffffffffff"])
@pytest.mark.parametrize("is_observed", [False, True], ids=["unseen", "observed"])
@pytest.mark.parametrize("before", [b"", b"9\r\ndata: x\n\n\r\n" * 2000], ids=["alone", "behind-many-events"])
def test_a_chunk_of_the_largest_size_is_passed_on_as_it_comes(size: bytes, is_observed: bool, before: bytes) -> None:
    """Even where it is more than a machine's integer holds."""
    passed = chunk_of(b"data: x\n\n" * 2000) if before and is_observed else before
    body = ChunkedBody(observer=StreamObserver(PutAside(Histogram((1.0,)))) if is_observed else None)
    body.feed(b'17\r\ndata: {"content":"x"}\n\n\r\n')

    assert body.feed(before + size + b"\r\nhel") == passed + size + b"\r\nhel"
    assert body.feed(b"lo" * 100) == b"lo" * 100
    assert (body.done, body.error) == (False, None)


# --- Malformed bodies ------------------------------------------------------------------------------------------------

MALFORMED_SIZE_LINES = [
    pytest.param(b"\r\n", id="empty-line"),
    pytest.param(b"g\r\n", id="no-digit"),
    pytest.param(b"5g\r\n", id="letter-behind"),
    pytest.param(b"-1\r\n", id="minus"),
    pytest.param(b"+2\r\n", id="plus"),
    pytest.param(b"0x5\r\n", id="0x"),
    pytest.param(b"1_0\r\n", id="underscore"),
    pytest.param(b" 5\r\n", id="blank-in-front"),
    pytest.param(b"5 \r\n", id="blank-behind"),
    pytest.param(b"5\t\r\n", id="tab-behind"),
    pytest.param(b"5 5\r\n", id="two-sizes"),
    pytest.param(b"5,5\r\n", id="list"),
    pytest.param(b";n=v\r\n", id="extension-alone"),
    pytest.param(b"5\n", id="lf-alone"),
    pytest.param(b"\n5\r\n", id="lf-in-front"),
    pytest.param(b"5\r5", id="bare-cr"),
    pytest.param(b"5\r\r\n", id="cr-twice"),
    pytest.param(b"5;n\n", id="lf-ends-an-extension"),
    pytest.param(b"5;a\nb\r\n", id="lf-in-an-extension"),
    pytest.param(b"5;a\rb\r\n", id="bare-cr-in-an-extension"),
    pytest.param(b"5;\x00\r\n", id="nul-in-an-extension"),
    pytest.param(b"5;\x7f\r\n", id="delete-in-an-extension"),
    pytest.param(b"5\x00\r\n", id="nul"),
    pytest.param(b"1" * 17 + b"\r\n", id="17-digits"),
    pytest.param(b"0" * 17 + b"\r\n", id="17-zeros"),
    pytest.param("５\r\n".encode(), id="wide-digit"),
    pytest.param(b"HTTP/1.1 200 OK\r\n", id="another-answer"),
]

MALFORMED_TRAILERS = [
    pytest.param(b" A: b\r\n", id="folded"),
    pytest.param(b"A: b\r\n c\r\n", id="folded-later"),
    pytest.param(b"A\r\n", id="no-colon"),
    pytest.param(b"A : b\r\n", id="blank-before-colon"),
    pytest.param(b": b\r\n", id="no-name"),
    pytest.param(b"A: b\x00\r\n", id="nul"),
    pytest.param(b"A: b\nC: d\r\n", id="bare-lf"),
    pytest.param(b"A: b\rC: d\r\n", id="bare-cr"),
    pytest.param(b"GET / HTTP/1.1\r\n", id="a-request-line"),
]


@pytest.mark.parametrize("bare", [pytest.param(False, id="framed"), pytest.param(True, id="bare")])
@pytest.mark.parametrize("line", MALFORMED_SIZE_LINES)
@settings(max_examples=8)
@given(chunks(), st.data())
def test_malformed_size_is_an_error_wherever_it_stands(
    line: bytes, bare: bool, before: Message, data: st.DataObject
) -> None:
    """After any chunks and for any cutting: the chunks before pass, nothing of the malformed line does."""
    reading = read(data.draw(cut(before.wire + line + b"hello\r\n0\r\n\r\n")), bare=bare)

    assert reading.body.error == BAD_SIZE
    assert not reading.body.done
    assert reading.all_passed == (before.payload if bare else before.passed_after(len(before.wire)))


@pytest.mark.parametrize("bare", [pytest.param(False, id="framed"), pytest.param(True, id="bare")])
@pytest.mark.parametrize("line", MALFORMED_TRAILERS)
@settings(max_examples=8)
@given(chunks(), st.data())
def test_malformed_trailer_is_an_error_and_no_end(
    line: bytes, bare: bool, before: Message, data: st.DataObject
) -> None:
    """After any chunks and for any cutting: the chunks pass, the last chunk does not."""
    reading = read(data.draw(cut(before.wire + b"0\r\n" + line + b"X: y\r\n\r\nGET /")), bare=bare)

    assert reading.body.error == BAD_TRAILER
    assert not reading.body.done
    assert reading.all_passed == (before.payload if bare else before.passed_after(len(before.wire)))


@given(
    chunks(),
    st.binary(min_size=1, max_size=20),
    st.binary(min_size=2, max_size=2).filter(lambda end: end != b"\r\n"),
    st.data(),
)
def test_chunk_longer_than_it_says_is_an_error(
    before: Message, payload: bytes, end: bytes, data: st.DataObject
) -> None:
    """For any two bytes but CRLF behind a chunk and any cutting: all before them passes, and at most the CR of them."""
    bad_chunk = b"%x\r\n%b" % (len(payload), payload)
    pieces = data.draw(cut(before.wire + bad_chunk + end + b"0\r\n\r\n"))
    good = before.passed_after(len(before.wire)) + bad_chunk

    framed, bare = read(pieces), read(pieces, bare=True)

    assert framed.body.error == bare.body.error == BAD_CHUNK
    assert not framed.body.done
    assert not bare.body.done
    assert framed.all_passed in (good, good + b"\r" if end[:1] == b"\r" else good)
    assert bare.all_passed == before.payload + payload


@given(messages(), st.data())
def test_a_body_that_stops_short_has_no_end(message: Message, data: st.DataObject) -> None:
    """For any beginning of a body that is not the whole of it: no end, no error, and nothing left over."""
    stop = data.draw(st.integers(0, len(message.wire) - 1))
    reading = read(data.draw(cut(message.wire[:stop])))

    assert (reading.body.done, reading.body.error, reading.body.rest) == (False, None, b"")


@given(st.lists(st.sampled_from((b"0", b"1", b"a", b";", b" ", b"\r\n", b"\r", b"\n", b"A:", b"\x00"))), st.data())
def test_any_bytes_read_the_same_however_they_are_cut(parts: list[bytes], data: st.DataObject) -> None:
    """For any bytes: whole or in pieces, the same end, the same error, the same bytes left over.

    What passes may differ by the CR of a CRLF that turned out to be none.
    """
    wire = b"".join(parts)
    whole, pieces = read([wire] if wire else []), read(data.draw(cut(wire)))

    assert (pieces.body.done, pieces.body.error) == (whole.body.done, whole.body.error)
    assert pieces.body.rest + pieces.unread == whole.body.rest if whole.body.done else True
    assert pieces.all_passed in (whole.all_passed, whole.all_passed + b"\r" if whole.body.error else whole.all_passed)


# --- Limits ----------------------------------------------------------------------------------------------------------


def in_pieces_of(size: int, data: bytes) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize(
    "size", [pytest.param(1, id="bytes"), pytest.param(99, id="pieces"), pytest.param(1 << 20, id="whole")]
)
@pytest.mark.parametrize(
    ("wire", "error"),
    [
        pytest.param(b"1;%b\r\na\r\n0\r\n\r\n" % (b"x" * 4000), None, id="extension-of-4000-bytes"),
        pytest.param(b"1;%b\r\na\r\n0\r\n\r\n" % (b"x" * 5000), BAD_SIZE, id="extension-of-5000-bytes"),
        pytest.param(b"0\r\nA: %b\r\n\r\n" % (b"x" * 16000), None, id="trailers-of-16000-bytes"),
        pytest.param(b"0\r\nA: %b\r\n\r\n" % (b"x" * 17000), LONG_TRAILERS, id="trailers-of-17000-bytes"),
        pytest.param(b"0\r\n" + b"A: b\r\n" * 3000 + b"\r\n", LONG_TRAILERS, id="3000-trailers"),
        pytest.param(b"1;" + b"x" * 5000, BAD_SIZE, id="extension-without-end"),
        pytest.param(b"0\r\nA: " + b"x" * 17000, LONG_TRAILERS, id="trailers-without-end"),
    ],
)
def test_what_waits_for_its_end_has_a_limit(wire: bytes, error: str | None, size: int) -> None:
    """A size line may have about 4 KiB, a trailer section about 16 KiB, and how the bytes are cut does not matter."""
    reading = read(in_pieces_of(size, wire))

    assert reading.body.error == error
    assert reading.body.done == (error is None)
