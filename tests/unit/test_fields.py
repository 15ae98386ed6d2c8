"""The header policy: what crosses, what stays, what is added, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.relay.fields import (
    HOP_BY_HOP,
    REQUEST_WATCHED,
    connection_options,
    list_members,
    sort_out,
    to_downstream,
    to_upstream,
    values,
)
from sidecar.relay.wire import Field, Fields
from tests.unit.grammar import TOKENS, VALUES, any_case, nominated

PEER = b"192.0.2.7"
FORWARDED = (b"X-Forwarded-For", PEER), (b"X-Forwarded-Proto", b"http"), (b"Via", b"1.1 hermes-sidecar")

# Written out from RFC 9110, 7.6.1 (Connection and what it has always named), 11.7 (a proxy's own credentials), and
# the older list of RFC 2616, 13.5.1.
ONE_HOP = (
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
DECIDED_ELSEWHERE = (
    *(b"host", b"content-length", b"expect", b"authorization", b"origin"),
    *(b"access-control-request-method", b"access-control-request-headers", b"access-control-request-private-network"),
    *(b"x-hermes-session-id", b"x-claude-session-id", b"x-hermes-session-key", b"x-claude-session-key"),
    *(b"x-hermes-friendly-id", b"x-claude-friendly-id"),
)
"""Request fields that cross only as some rule writes them anew."""
CROSSING = (b"cookie", b"set-cookie", b"accept", b"user-agent", b"idempotency-key", b"sec-fetch-mode", b"x-request-id")
CORS_ANSWERS = (
    *(b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-expose-headers"),
    *(b"access-control-max-age", b"access-control-allow-methods", b"access-control-allow-headers"),
)


def upstream(lines: Fields, *added: Field, peer: bytes = PEER) -> Fields:
    """What the upstream gets for a request with these lines."""
    passing, watched = sort_out(lines, REQUEST_WATCHED)
    return to_upstream(passing, watched, connection_options(watched), added, peer=peer)


def downstream(lines: Fields) -> Fields:
    return to_downstream(lines)[0]


def in_order_of_names(lines: Fields) -> list[tuple[bytes, bytes, bytes]]:
    """For comparing: order between different names means nothing, order within a name does."""
    return [(name.lower(), name, value) for name, value in sorted(lines, key=lambda line: line[0].lower())]


def lines_of(lines: Fields, name: bytes) -> Fields:
    return [line for line in lines if line[0].lower() == name]


# --- Reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "members"),
    [
        pytest.param([], [], id="no-line"),
        pytest.param([b""], [], id="empty"),
        pytest.param([b"close"], [b"close"], id="one"),
        pytest.param([b"Keep-Alive,X-Foo"], [b"keep-alive", b"x-foo"], id="in-lower-case"),
        pytest.param([b" a \t,\tb ,, ,c"], [b"a", b"b", b"c"], id="blanks-and-empty-members"),
        pytest.param([b"a, b", b"", b"c"], [b"a", b"b", b"c"], id="over-all-lines"),
        pytest.param([b"caf\xe9, \xff"], [b"caf\xe9", b"\xff"], id="bytes-over-0x7f"),
        pytest.param([b"a b, c;q=1"], [b"a b", b"c;q=1"], id="members-that-are-no-names"),
    ],
)
def test_list_members(lines: list[bytes], members: list[bytes]) -> None:
    assert list_members(lines) == members


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        pytest.param([], set(), id="no-connection-field"),
        pytest.param([(b"Connection", b"close")], {b"close"}, id="one"),
        pytest.param([(b"CONNECTION", b"X-Foo , te")], {b"x-foo", b"te"}, id="other-case"),
        pytest.param([(b"Connection", b"a"), (b"B", b"x"), (b"connection", b"b")], {b"a", b"b"}, id="several-lines"),
        pytest.param([(b"Proxy-Connection", b"x-foo")], set(), id="another-field"),
    ],
)
def test_connection_options(lines: Fields, options: set[bytes]) -> None:
    assert connection_options(sort_out(lines, REQUEST_WATCHED)[1]) == options


@given(st.lists(st.tuples(TOKENS | st.sampled_from(sorted(REQUEST_WATCHED)).flatmap(any_case), VALUES)))
def test_every_line_is_sorted_once(lines: Fields) -> None:
    """For any fields: each line passes or is watched, in its spelling, and in the order of its name."""
    passing, watched = sort_out(lines, REQUEST_WATCHED)

    assert passing == [line for line in lines if line[0].lower() not in REQUEST_WATCHED]
    assert watched == {name: lines_of(lines, name) for name in {line[0].lower() for line in lines} & REQUEST_WATCHED}


def test_values_of_a_field_keep_their_order_and_a_missing_field_has_none() -> None:
    watched = sort_out([(b"via", b"1.1 a"), (b"X", b"-"), (b"Via", b"1.0 b")], REQUEST_WATCHED)[1]

    assert values(watched, b"via") == [b"1.1 a", b"1.0 b"]
    assert values(watched, b"te") == []


# --- To the upstream -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([], FORWARDED, id="nothing-sent"),
        pytest.param(
            [(b"Host", b"localhost:8650")],
            (*FORWARDED, (b"X-Forwarded-Host", b"localhost:8650")),
            id="host-is-told-as-forwarded-host",
        ),
        pytest.param(
            [(b"Connection", b"close, X-Foo"), (b"x-foo", b"1"), (b"X-FOO", b"2"), (b"X-Foo-Bar", b"3")],
            (*FORWARDED, (b"X-Foo-Bar", b"3")),
            id="nominated-name-other-case",
        ),
        pytest.param(
            [(b"A", b"1"), (b"Connection", b"a"), (b"B", b"2"), (b"connection", b"b"), (b"C", b"3")],
            (*FORWARDED, (b"C", b"3")),
            id="nominated-over-two-lines-before-and-behind",
        ),
        pytest.param(
            [(b"Connection", b"Via, X-Request-Id, Sec-Fetch-Mode"), (b"Via", b"1.1 a"), (b"Sec-Fetch-Mode", b"cors")],
            FORWARDED,
            id="nominated-fields-that-rules-watch",
        ),
        pytest.param(
            [(b"TE", b"trailers"), (b"Keep-Alive", b"timeout=5"), (b"Proxy-Connection", b"keep-alive")],
            FORWARDED,
            id="hop-by-hop-without-being-named",
        ),
        pytest.param(
            [(b"X-Forwarded-For", b"198.51.100.1"), (b"x-forwarded-for", b"198.51.100.2, 198.51.100.3")],
            (
                (b"X-Forwarded-For", b"198.51.100.1, 198.51.100.2, 198.51.100.3, 192.0.2.7"),
                *FORWARDED[1:],
            ),
            id="forwarded-for-is-continued",
        ),
        pytest.param(
            [
                (b"Host", b"localhost"),
                (b"x-forwarded-proto", b"https"),
                (b"X-Forwarded-Host", b"chat.example"),
                (b"Via", b"1.1 nginx"),
            ],
            (
                FORWARDED[0],
                (b"x-forwarded-proto", b"https"),
                (b"X-Forwarded-Host", b"chat.example"),
                (b"Via", b"1.1 nginx"),
                (b"Via", b"1.1 hermes-sidecar"),
            ),
            id="what-proxies-before-us-wrote-stays",
        ),
        pytest.param(
            [
                (b"Origin", b"http://localhost:3000"),
                (b"Expect", b"100-continue"),
                (b"Authorization", b"Bearer x"),
                (b"Content-Length", b"5"),
                (b"Access-Control-Request-Method", b"POST"),
                (b"X-Hermes-Session-Key", b"k"),
                (b"X-Claude-Session-Id", b"s"),
                (b"X-Claude-Friendly-Id", b"f"),
            ],
            FORWARDED,
            id="decided-elsewhere",
        ),
        pytest.param(
            [(b"X-Caf\xe9", b"1"), (b"cookie", b"caf\xe9; \xff"), (b"Cookie", b"b=2"), (b"X-Empty", b"")],
            (*FORWARDED, (b"X-Caf\xe9", b"1"), (b"cookie", b"caf\xe9; \xff"), (b"Cookie", b"b=2"), (b"X-Empty", b"")),
            id="bytes-and-spelling-as-they-are",
        ),
        pytest.param(
            [(b"X-OpenWebUI-Chat-Id", b"c1"), (b"X-Request-Id", b"r"), (b"Idempotency-Key", b"i")],
            (*FORWARDED, (b"X-OpenWebUI-Chat-Id", b"c1"), (b"X-Request-Id", b"r"), (b"Idempotency-Key", b"i")),
            id="other-products-headers-cross",
        ),
    ],
)
def test_request_fields(lines: Fields, expected: tuple[Field, ...]) -> None:
    assert in_order_of_names(upstream(lines)) == in_order_of_names([*expected])


def test_decided_fields_are_added_as_they_are() -> None:
    added = (b"X-Hermes-Session-Id", b"s"), (b"Authorization", b"Bearer k"), (b"Connection", b"Upgrade")

    lines = upstream([(b"Connection", b"Upgrade, x-hermes-session-id")], *added)

    assert in_order_of_names(lines) == in_order_of_names([*FORWARDED, *added])


def test_input_is_left_as_it_was() -> None:
    lines = [(b"A", b"1"), (b"Via", b"1.1 a")]
    passing, watched = sort_out(lines, REQUEST_WATCHED)

    to_upstream(passing, watched, frozenset(), [(b"B", b"2")], peer=PEER)

    assert (passing, watched) == ([(b"A", b"1")], {b"via": [(b"Via", b"1.1 a")]})


NAMES = TOKENS | st.sampled_from((*ONE_HOP, *DECIDED_ELSEWHERE, *CROSSING, *CORS_ANSWERS, b"x-foo")).flatmap(any_case)
LINES = st.lists(st.tuples(NAMES, VALUES), max_size=12)


@given(LINES)
def test_nothing_hop_by_hop_crosses(lines: Fields) -> None:
    """For any fields, nothing that belongs to one connection crosses, in either direction."""
    assert frozenset(ONE_HOP) == HOP_BY_HOP
    for name, _ in (*upstream(lines), *downstream(lines)):
        assert name.lower() not in ONE_HOP


@given(LINES)
def test_order_within_a_name_and_repeats_survive_upstream(lines: Fields) -> None:
    """For any fields that may cross, the upstream gets each name's lines as often, as spelled and in the order sent."""
    stays = {*ONE_HOP, *DECIDED_ELSEWHERE, *connection_options(sort_out(lines, REQUEST_WATCHED)[1])}
    sent_on = upstream(lines)

    for name in {name.lower() for name, _ in lines} - stays:
        assert lines_of(sent_on, name)[: len(lines_of(lines, name))] == lines_of(lines, name)


@given(LINES)
def test_nothing_is_invented_upstream(lines: Fields) -> None:
    """For any fields, the upstream gets no line that the client did not send but X-Forwarded-* and Via."""
    invented = [line for line in upstream(lines) if line not in lines]

    assert {name for name, _ in invented} <= {b"X-Forwarded-For", b"X-Forwarded-Proto", b"X-Forwarded-Host", b"Via"}


# --- To the client ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([], [], id="nothing-sent"),
        pytest.param(
            [(b"Set-Cookie", b"a=1"), (b"Link", b"<x>"), (b"set-cookie", b"b=2"), (b"Set-Cookie", b"a=1")],
            [(b"Set-Cookie", b"a=1"), (b"Link", b"<x>"), (b"set-cookie", b"b=2"), (b"Set-Cookie", b"a=1")],
            id="repeats",
        ),
        pytest.param(
            [
                (b"Connection", b"keep-alive, X-Foo"),
                (b"Keep-Alive", b"timeout=5"),
                (b"x-foo", b"1"),
                (b"Trailer", b"X-Sum"),
                (b"Transfer-Encoding", b"chunked"),
                (b"Date", b"Mon, 30 Nov 2026 08:41:43 GMT"),
                (b"Server", b"x"),
            ],
            [(b"Date", b"Mon, 30 Nov 2026 08:41:43 GMT"), (b"Server", b"x")],
            id="hop-by-hop-and-nominated",
        ),
        pytest.param(
            [
                (b"Access-Control-Allow-Origin", b"*"),
                (b"ACCESS-CONTROL-EXPOSE-HEADERS", b"X"),
                (b"access-control-allow-credentials", b"true"),
                (b"Access-Control", b"kept"),
                (b"Vary", b"Origin"),
            ],
            [(b"Access-Control", b"kept"), (b"Vary", b"Origin")],
            id="the-upstreams-own-cors",
        ),
        pytest.param(
            [(b"X-Hermes-Session-Id", b"api-1"), (b"X-Hermes-Session-Key", b"k"), (b"X-Request-Id", b"r")],
            [(b"X-Hermes-Session-Id", b"api-1"), (b"X-Hermes-Session-Key", b"k"), (b"X-Request-Id", b"r")],
            id="the-gateways-session-headers",
        ),
        pytest.param([(b"Content-Length", b"5"), (b"ETag", b'"x"')], [(b"ETag", b'"x"')], id="framing-is-written-anew"),
        pytest.param(
            [(b"Retry-After", b"1"), (b"x-ratelimit-remaining", b"0"), (b"Content-Encoding", b"gzip")],
            [(b"Retry-After", b"1"), (b"x-ratelimit-remaining", b"0"), (b"Content-Encoding", b"gzip")],
            id="everything-else",
        ),
    ],
)
def test_answer_fields(lines: Fields, expected: Fields) -> None:
    assert in_order_of_names(downstream(lines)) == in_order_of_names(expected)


@given(nominated(LINES))
def test_nothing_nominated_reaches_the_client(case: tuple[Fields, frozenset[bytes]]) -> None:
    """For any fields, what Connection names might as well not have been sent, whatever its spelling."""
    lines, names = case
    without = [line for line in lines if line[0].lower() not in names]

    assert in_order_of_names(downstream(lines)) == in_order_of_names(downstream(without))


@given(LINES)
def test_only_what_the_upstream_said_reaches_the_client(lines: Fields) -> None:
    """For any answer: hop-by-hop, framing, nominated and CORS fields are gone; all else crosses line by line, with
    repeats, in the order of its name, and nothing is invented."""
    gone = {*ONE_HOP, b"content-length", *connection_options(sort_out(lines, REQUEST_WATCHED)[1])} - {b"close"}
    kept = [
        line for line in lines if line[0].lower() not in gone and not line[0].lower().startswith(b"access-control-")
    ]

    assert in_order_of_names(downstream(lines)) == in_order_of_names(kept)


@given(st.lists(st.tuples(st.sampled_from(CORS_ANSWERS).flatmap(any_case), VALUES)))
def test_no_cors_field_of_the_upstream_crosses(lines: Fields) -> None:
    """For any CORS fields in any spelling: who may read the answer is the sidecar's decision alone."""
    assert downstream(lines) == []
