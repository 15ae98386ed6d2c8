"""A later turn of a conversation, whose head the sidecar has met before: it passes with a length of its own."""

from __future__ import annotations

import pytest

from tests.support.raw_client import raw_client
from tests.support.scripted_upstream import ok
from tests.support.sidecars import relayed

TURN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Hermes-Session-Key: k\r\n"


def turn(body: bytes, *lines: bytes) -> bytes:
    return TURN + b"".join(line + b"\r\n" for line in (*lines, b"Content-Length: %d" % len(body))) + b"\r\n" + body


async def test_later_turns_pass_with_their_own_lengths_and_ids() -> None:
    bodies = [b"a", b"longer", b"bb", b"", b"a"]
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for body in bodies:
            client.write(turn(body))
            assert (await client.answer()).status == 200

    assert [received.body for received in upstream.requests] == bodies
    assert [received.values("content-length") for received in upstream.requests] == [[b"%d" % len(b)] for b in bodies]
    assert [received.values("x-hermes-session-id") for received in upstream.requests] == [[b"k"]] * len(bodies)
    assert len({received.values("x-request-id")[0] for received in upstream.requests}) == len(bodies)


async def test_later_turn_is_told_from_memory() -> None:
    """A turn's verdict is marked where it is kept; the mark reaches the gateway with the next one, on any connection.

    The first turn does not count: that a chat was answered is news about the backend, and makes new rules.
    """
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for body in (b"first", b"second"):
            client.write(turn(body))
            await client.answer()
        (known,) = sidecar.running._app.relay.familiar._known.values()
        known._request.head_start += b"X-Mark: familiar\r\n"
        client.write(turn(b"the third"))
        await client.answer()
        async with raw_client(sidecar.url) as another:
            another.write(turn(b"and a fourth"))
            await another.answer()

    assert [received.values("x-mark") for received in upstream.requests] == [[], [], [b"familiar"], [b"familiar"]]
    assert [received.body for received in upstream.requests[2:]] == [b"the third", b"and a fourth"]


async def test_a_connection_knows_its_own_last_head_without_a_look_up() -> None:
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for body in (b"first", b"second"):
            client.write(turn(body))
            await client.answer()
        relay = sidecar.running._app.relay
        (known,) = relay.familiar._known.values()
        known._request.head_start += b"X-Mark: familiar\r\n"
        relay.familiar._known.clear()
        answers = relay.pools["gateway"].familiar
        assert answers._latest is not None
        answers._latest.start += b"X-Mark: the latest\r\n"
        answers._known.clear()
        client.write(turn(b"the third"))
        answer = await client.answer()

    assert upstream.requests[-1].values("x-mark") == [b"familiar"]
    assert answer.value("x-mark") == "the latest"


async def test_another_head_on_the_same_connection_is_judged_for_itself() -> None:
    """What a connection sent last is looked at first, and must not stand for anything else."""
    keys = [b"k", b"k", b"other", b"k", b"k2", b"k"]
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for key in keys:
            client.write(turn(b"hello").replace(b"Session-Key: k\r\n", b"Session-Key: %b\r\n" % key))
            assert (await client.answer()).status == 200

    assert [received.values("x-hermes-session-id") for received in upstream.requests] == [[key] for key in keys]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"Content-Length: 5", b"Content-Length: 5"], id="length-twice"),
        pytest.param([b"content-Length: 5", b"Content-Length: 9"], id="oddly-spelled-first"),
        pytest.param([b"Content-Length: 9", b"content-Length: 5"], id="oddly-spelled-second"),
        pytest.param([b"Content-Length: 5", b"Transfer-Encoding: chunked"], id="chunked-too"),
        pytest.param([b"Content-Length: "], id="empty"),
        pytest.param([b"Content-Length: +5"], id="signed"),
    ],
)
@pytest.mark.parametrize("learned", [b"Content-Length: 5", b"content-Length: 5"])
async def test_two_readings_are_refused_however_familiar_the_rest_is(lines: list[bytes], learned: bytes) -> None:
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for _ in range(3):
            client.write(TURN + learned + b"\r\n\r\nhello")
            assert (await client.answer()).status == 200
        client.write(TURN + b"".join(line + b"\r\n" for line in lines) + b"\r\nhello")

        assert (await client.answer()).value("x-hermes-sidecar-error") == "invalid_request"
        assert len(upstream.requests) == 3
