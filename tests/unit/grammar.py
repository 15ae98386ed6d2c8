"""HTTP/1.1 as hypothesis strategies: what RFC 9112 lets a peer send, in small and odd examples."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from sidecar.relay.wire import Field, Fields

TOKEN_CHARACTERS = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
VISIBLE = bytes((*range(0x21, 0x7F), *range(0x80, 0x100)))


def bytes_of(alphabet: bytes, *, min_size: int = 0, max_size: int = 20) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(alphabet), min_size=min_size, max_size=max_size).map(bytes)


TOKENS = bytes_of(TOKEN_CHARACTERS, min_size=1)
METHODS = st.sampled_from((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS")) | TOKENS
TARGETS = bytes_of(VISIBLE, min_size=1) | bytes_of(b"/?#%&=.;aZ0", max_size=30).map(lambda rest: b"/" + rest)
VALUES = bytes_of(VISIBLE + b" \t").map(lambda value: value.strip(b" \t"))
"""Field values without the blanks around them: visible bytes, blanks inside, bytes over 0x7f."""
REASONS = bytes_of(VISIBLE + b" \t")
BLANKS = bytes_of(b" \t", max_size=3)


@st.composite
def field_lines(
    draw: st.DrawFn, names: st.SearchStrategy[bytes] = TOKENS, *, max_size: int = 6
) -> list[tuple[Field, bytes]]:
    """Fields, each with a line that spells it."""
    return [
        ((name, value), b"%b:%b%b%b\r\n" % (name, draw(BLANKS), value, draw(BLANKS)))
        for name, value in draw(st.lists(st.tuples(names, VALUES), max_size=max_size))
    ]


def any_case(name: bytes) -> st.SearchStrategy[bytes]:
    """`name` in some mixture of upper and lower case."""
    return st.lists(st.booleans(), min_size=len(name), max_size=len(name)).map(
        lambda uppers: bytes(
            ord(chr(byte).upper() if upper else chr(byte).lower()) for byte, upper in zip(name, uppers, strict=True)
        )
    )


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces, none of them empty: whole, byte by byte, or cut anywhere."""
    how = draw(st.sampled_from(("whole", "bytes", "anywhere")))
    if how == "whole" or not data:
        return [data] if data else []
    if how == "bytes":
        return [data[position : position + 1] for position in range(len(data))]
    inner = draw(st.lists(st.integers(1, len(data)), max_size=8).map(lambda places: sorted({*places})))
    bounds = [0, *(place for place in inner if place < len(data)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


# `close` is an option that names no field; Connection names itself anyway, and no request has a nominated Host.
NOMINABLE = st.sampled_from(
    (
        b"x-foo",
        b"cookie",
        b"via",
        b"vary",
        b"x-request-id",
        b"x-forwarded-for",
        b"x-forwarded-proto",
        b"x-forwarded-host",
        b"sec-fetch-mode",
        b"idempotency-key",
    )
) | TOKENS.filter(lambda name: name.lower() not in (b"close", b"host", b"connection"))


@st.composite
def nominated(draw: st.DrawFn, others: st.SearchStrategy[Fields]) -> tuple[Fields, frozenset[bytes]]:
    """Fields, of which some are named in Connection lines in odd spellings; and these names."""
    names = draw(st.lists(NOMINABLE, min_size=1, max_size=4))
    lines = [line for line in draw(others) if line[0].lower() != b"connection"]
    lines += [(draw(any_case(name)), draw(VALUES)) for name in names for _ in range(draw(st.integers(0, 2)))]
    for name in names:
        members = [draw(any_case(name)), *draw(st.lists(st.sampled_from((b"", b"close", b"keep-alive")), max_size=2))]
        spelled = b",".join([draw(BLANKS) + member + draw(BLANKS) for member in draw(st.permutations(members))])
        lines.append((draw(any_case(b"connection")), spelled.strip(b" \t")))
    return draw(st.permutations(lines)), frozenset(name.lower() for name in names)
