"""The passive observer: events, gaps, first token and usage of an answer, the same however its bytes are cut."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.relay.chunked import chunk_of
from sidecar.relay.stream import PayloadObserver, PutAside, StreamObserver


class Gaps:
    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        assert times > 0
        assert seconds >= 0
        self.count += times
        self.total += seconds * times


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def observed(*pieces: bytes, clock: Callable[[], float] = time.monotonic) -> tuple[StreamObserver, Gaps]:
    gaps = Gaps()
    observer = StreamObserver(PutAside(gaps), clock)
    for piece in pieces:
        observer.saw(piece)
    return observer, gaps


def seen(*pieces: bytes) -> tuple[int, int, bool, dict[str, int]]:
    """What does not depend on time: events, gaps, whether there was a token, usage."""
    observer, gaps = observed(*pieces)
    return observer.events, gaps.count, observer.first_token_at is not None, observer.usage


def cut(stream: bytes, at: list[int]) -> Iterator[bytes]:
    places = sorted({0, len(stream), *(place % (len(stream) + 1) for place in at)})
    for begin, end in pairwise(places):
        yield stream[begin:end]


def delta(**content: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": content}]})


ROLE = "data: " + delta(role="assistant", content="")
WORD = "data: " + delta(content="word")
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":345,"total_tokens":357}}'

LINES = st.sampled_from(
    [
        ROLE,
        WORD,
        USAGE,
        "data: [DONE]",
        "data:",
        "data",
        "data : no field of this name",
        "database: neither",
        "dat",
        "event: hermes.tool.progress",
        "id: 7",
        "retry: 100",
        ":",
        ": keepalive",
        ": data: still a comment",
        " data: a blank before it",
        'data: {"text": "ünïcode"}',
        "",
        "",
        "",
    ]
)
LINE_END = st.sampled_from(["\n", "\r\n", "\r"])
STREAMS = st.lists(st.tuples(LINES, LINE_END), max_size=30).map(
    lambda lines: "".join(line + end for line, end in lines).encode()
)


def events_of(stream: bytes) -> int:
    """How many events a browser would be told: the standard's own words, a line at a time (9.2.6)."""
    text = stream.decode()
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    events = data_lines = 0
    for line in lines:
        if line == "":
            events += data_lines > 0
            data_lines = 0
        elif line.partition(":")[0] == "data":
            data_lines += 1
    return events


# --- However the bytes are cut ---------------------------------------------------------------------------------------


@given(STREAMS, st.lists(st.integers(0, 4000), max_size=12))
def test_counts_are_the_same_however_the_bytes_are_cut(stream: bytes, at: list[int]) -> None:
    """For any stream and any cuts: the events that a browser would be told, one gap fewer, the same token and usage."""
    events = events_of(stream)

    whole, in_pieces, byte_by_byte = seen(stream), seen(*cut(stream, at)), seen(*cut(stream, list(range(len(stream)))))

    assert whole == in_pieces == byte_by_byte
    assert whole[:2] == (events, max(0, events - 1))


@given(st.lists(st.sampled_from([WORD, ROLE, USAGE, "data: [DONE]", "data: a\ndata: b", ": c", ""]), max_size=12))
def test_quick_way_and_line_by_line_agree(blocks: list[str]) -> None:
    """For any whole events: what is counted at once is what a stream that never takes the quick way would give."""
    stream = "".join(block + "\n\n" for block in blocks).encode()

    assert seen(stream)[0] == seen(b"\n", stream[:1], stream[1:])[0] == events_of(stream)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_each_line_end_ends_lines(end: str) -> None:
    stream = (end * 2).join([ROLE, WORD, WORD, "data: [DONE]", ""]).encode()

    assert seen(stream)[:3] == (4, 3, True)


def test_cr_at_the_end_of_one_piece_and_lf_at_the_start_of_the_next_are_one_line_end() -> None:
    assert seen(b"data: a\r", b"\n\r", b"\ndata: b\r\n", b"\r\n")[0] == 2
    assert seen(b"data: a\r", b"\n", b"data: b\n\n")[0] == 1  # two data lines of one event


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        pytest.param(b": keepalive\n\n" * 5, 0, id="keep-alive-comments"),
        pytest.param(b":\n\n" * 5, 0, id="empty-comments"),
        pytest.param(b"event: ping\n\nid: 4\n\n", 0, id="events-without-data"),
        pytest.param(b"\n\n\n\n", 0, id="blank-lines"),
        pytest.param(b"data: a\n: in between\ndata: b\n\n", 1, id="comment-inside-an-event"),
        pytest.param(b"data\n\n", 1, id="data-without-a-colon"),
        pytest.param(b"data: a\n\n\n\ndata: b\n\n", 2, id="more-blank-lines-than-needed"),
        pytest.param(b"data: a\n\ndata: b", 1, id="last-event-unfinished"),
    ],
)
def test_what_is_an_event(stream: bytes, events: int) -> None:
    assert seen(stream)[0] == events


CHUNKED = [
    WORD.encode() + b"\n\n",
    USAGE.encode() + b"\n\n",
    b": keepalive\n\n",
    b"data: a\r\n\r\n",
    b"data: half",
    b"data: a\n\ndata: b\n\n",
    b"data: " + b"x" * 5000 + b"\n\n",
]

# --- Gaps ------------------------------------------------------------------------------------------------------------


def test_keep_alive_comment_does_not_divide_a_gap() -> None:
    clock = Clock()
    observer, gaps = observed(WORD.encode() + b"\n\n", clock=clock)
    for _ in range(3):
        clock.now += 10
        observer.saw(b": keepalive\n\n")
    clock.now += 5
    observer.saw(WORD.encode() + b"\n\n")

    assert (gaps.count, gaps.total) == (1, 35.0)


def test_events_that_come_together_have_no_gap_between_them() -> None:
    clock = Clock()
    observer, gaps = observed(b"data: a\n\ndata: b\n\n", clock=clock)
    clock.now += 2
    observer.saw(b"data: c\n\ndata: d\n\ndata: e\n\n")

    assert (observer.events, gaps.count, gaps.total) == (5, 4, 2.0)


def test_gaps_lie_between_arrivals_whenever_they_are_counted() -> None:
    """Chunks are put aside and counted later: with the times at which they came."""
    clock, gaps = Clock(), Gaps()
    put_aside = PutAside(gaps)
    observer = StreamObserver(put_aside, clock)
    observer.saw(WORD.encode() + b"\n\n")
    for gap_s, event in [(1.0, b"data: a\n\n"), (2.0, b": keepalive\n\n"), (4.0, b"data: b\ndata: c\n\n")]:
        clock.now += gap_s
        observer.saw_chunk(chunk_of(event), 3, 3 + len(event))
    assert (observer.events, gaps.count) == (1, 0)
    clock.now += 100
    put_aside.look_through()

    assert (observer.events, gaps.count, gaps.total) == (3, 2, 7.0)
    put_aside.look_through()
    assert (observer.events, gaps.count) == (3, 2)


def test_what_waits_to_be_counted_is_bounded() -> None:
    """For all streams together: what each put aside for itself would add up."""
    put_aside = PutAside(Gaps())
    observers = [StreamObserver(put_aside) for _ in range(100)]
    for observer in observers:
        observer.saw(WORD.encode() + b"\n\n")
    event = b"data: a\n\n"
    for number in range(1000):
        observers[number % 100].saw_chunk(chunk_of(event), 3, 3 + len(event))
        assert sum(observer.events for observer in observers) > 100 + number + 1 - 64


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(CHUNKED)), max_size=200))
def test_streams_that_come_in_turns_are_counted_each_by_itself(turns: list[tuple[int, bytes]]) -> None:
    gaps, gaps_alone = Gaps(), Gaps()
    put_aside = PutAside(gaps)
    together = [StreamObserver(put_aside) for _ in range(3)]
    alone = [StreamObserver(PutAside(gaps_alone)) for _ in range(3)]
    for observer in (*together, *alone):
        observer.saw(WORD.encode() + b"\n\n")
    for which, event in turns:
        chunk = chunk_of(event)
        start = chunk.index(b"\n") + 1
        together[which].saw_chunk(chunk, start, start + len(event))
        alone[which].saw(event)

    assert [observer.usage for observer in together] == [observer.usage for observer in alone]
    assert [observer.events for observer in together] == [observer.events for observer in alone]
    assert gaps.count == gaps_alone.count


# --- The first token -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(WORD, id="content"),
        pytest.param("data: " + delta(reasoning_content="hm"), id="reasoning"),
        pytest.param('data: {"choices":[{"delta" : {"content" : "w"}}]}', id="blanks-around-the-colon"),
        pytest.param('data: {"choices":[{"text":"word"}]}', id="completion"),
        pytest.param('data: {"type":"response.output_text.delta","delta":"word"}', id="responses"),
        pytest.param('data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}', id="tool-call"),
        pytest.param('data: {"choices":[{"delta":{"content":"\\n"}}]}', id="escaped"),
        pytest.param('data: {"choices":[{"delta":{"content":"ü"}}]}', id="beyond-ascii"),
    ],
)
def test_first_delta_that_says_something_is_the_first_token(event: str) -> None:
    clock = Clock()
    observer, _ = observed(ROLE.encode() + b"\n\n", b": keepalive\n\n", clock=clock)
    assert observer.first_token_at is None
    clock.now = 107.0
    observer.saw(event.encode() + b"\n\n")
    clock.now = 109.0
    observer.saw(WORD.encode() + b"\n\n")

    assert observer.first_token_at == 107.0


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(ROLE, id="role-with-empty-content"),
        pytest.param('data: {"choices":[{"delta":{"content":null}}]}', id="null"),
        pytest.param('data: {"choices":[{"delta":{},"finish_reason":"stop"}]}', id="no-content"),
        pytest.param('event: hermes.tool.progress\ndata: {"tool":"terminal","label":"ls"}', id="tool-progress"),
        pytest.param('data: {"type":"response.created","response":{"text":{"format":{"type":"text"}}}}', id="created"),
        pytest.param(USAGE, id="usage"),
        pytest.param("data: [DONE]", id="done"),
    ],
)
def test_what_says_nothing_is_no_token(event: str) -> None:
    assert seen(event.encode() + b"\n\n")[2] is False


# --- Usage -----------------------------------------------------------------------------------------------------------

CHAT = {"object": "chat.completion", "choices": [{"message": {"content": "x" * 9000}}]}


def usage_of(*pieces: bytes) -> dict[str, int]:
    observer = PayloadObserver()
    for piece in pieces:
        observer.saw(piece)
    return observer.usage


@pytest.mark.parametrize("indent", [None, 2], ids=["compact", "pretty"])
@given(prompt=st.integers(0, 10**9), completion=st.integers(0, 10**9), at=st.lists(st.integers(0, 20_000), max_size=8))
def test_usage_of_a_json_answer_is_found_wherever_it_is_cut(
    indent: int | None, prompt: int, completion: int, at: list[int]
) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": 3}}
    body = json.dumps(CHAT | {"usage": usage}, indent=indent).encode()

    assert usage_of(*cut(body, at)) == {"prompt": prompt, "completion": completion}


@given(at=st.lists(st.integers(0, 20_000), max_size=8))
def test_usage_of_a_stream_is_the_last_one_told(at: list[int]) -> None:
    """Some backends tell it with every chunk."""
    running = [f'data: {{"usage":{{"prompt_tokens":12,"completion_tokens":{n}}}}}\n\n'.encode() for n in range(300)]
    stream = b"".join(running) + USAGE.encode() + b"\n\ndata: [DONE]\n\n"

    assert seen(*cut(stream, at))[3] == {"prompt": 12, "completion": 345}


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        pytest.param('{"usage":{"input_tokens":7,"output_tokens":8}}', {"prompt": 7, "completion": 8}, id="responses"),
        pytest.param('{"usage":{"prompt_tokens":7}}', {"prompt": 7}, id="one-of-two"),
        pytest.param('{"usage":null}', {}, id="null"),
        pytest.param('{"usage":{}}', {}, id="empty"),
        pytest.param('{"usage":{"prompt_tokens":"7","completion_tokens":true}}', {}, id="not-numbers"),
        pytest.param('{"usage":{"prompt_tokens":-1,"completion_tokens":1e30}}', {}, id="impossible-numbers"),
        pytest.param('{"usage":{"prompt_tokens":1' + "0" * 5000 + "}}", {}, id="a-number-without-end"),
        pytest.param('{"usage":{"prompt_tokens":7', {}, id="cut-off"),
        pytest.param('{"content":"\\"usage\\": {\\"prompt_tokens\\": 9}"}', {}, id="said-by-the-model"),
        pytest.param('{"usage":{"prompt_tokens":7},"more":{"usage":{"seconds":1}}}', {"prompt": 7}, id="another-usage"),
        pytest.param('{"usage":{"a":' + "[" * 4000, {}, id="nested-without-end"),
        pytest.param('{"usage":{"prompt_tokens":7},"x":"' + "y" * 5000 + '"}', {}, id="not-at-the-end"),
    ],
)
def test_usage_is_taken_only_where_it_is_certain(body: str, usage: dict[str, int]) -> None:
    assert usage_of(body.encode()) == usage


# --- Cost ------------------------------------------------------------------------------------------------------------


def kept_bytes(observer: StreamObserver) -> int:
    names = ("_older", "_newer", "_before_token", "_line_start")
    older, newer, before, start = (getattr(observer, name) for name in names)
    return sum(map(len, older + newer)) + len(before) + len(start)


@pytest.mark.parametrize("size", [64, 16_384], ids=["small-pieces", "large-pieces"])
def test_endless_line_stays_cheap_and_bounded(size: int) -> None:
    """A line of 5 MB, as a tool's output can be: linear in time, and no more than its end is kept."""
    piece = b"x" * size
    observer, _ = observed(b"data: ")
    began = time.process_time()
    for _ in range(5_000_000 // size):
        observer.saw(piece)
        assert kept_bytes(observer) < 20_000 + 2 * size
    spent_s = time.process_time() - began
    observer.saw(b"\n\n")

    assert observer.events == 1
    assert spent_s < 3  # 0.3 s on the slower of the machines it was written on; quadratic would be minutes
