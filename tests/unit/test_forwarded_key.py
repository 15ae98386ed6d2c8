"""The route key on its way to a gateway that wants it, and back: what the client reads is what the client sent."""

from __future__ import annotations

import hashlib

import pytest

from sidecar.relay import answers
from sidecar.relay.admission import admit
from sidecar.relay.answer_heads import read_answer_head
from sidecar.relay.request import Request
from sidecar.relay.wire import parse_request_head
from tests.unit.policies import rules_of

LONG = b"k" * 300
HASHED = b"hs-" + hashlib.sha256(LONG).hexdigest()[:40].encode()


def asked(key: bytes) -> Request:
    block = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Hermes-Session-Key: %b\r\n" % key
    head = parse_request_head(block)
    request = Request(head.method, head.minor)
    admit(request, head, rules_of({"session": {"forward_key": "always"}}), peer=b"127.0.0.1", is_draining=False)
    return request


def keys_in(head: bytes) -> list[bytes]:
    lines = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line]
    return [value for name, value in lines if name.lower() == b"x-hermes-session-key"]


@pytest.mark.parametrize(
    ("key", "forwarded"),
    [
        pytest.param(b"route-1", b"route-1", id="as-it-is"),
        pytest.param(b"k" * 256, b"k" * 256, id="longest"),
        pytest.param(LONG, HASHED, id="too-long-for-the-gateway"),
        pytest.param(b"a/b", b"a/b", id="no-session-id-but-a-key"),
    ],
)
def test_key_is_forwarded_in_a_form_that_the_gateway_takes(key: bytes, forwarded: bytes) -> None:
    request = asked(key)

    assert keys_in(request.head) == [forwarded]


@pytest.mark.parametrize(
    ("key", "answered", "given_back"),
    [
        pytest.param(b"route-1", [b"route-1"], [b"route-1"], id="echo"),
        pytest.param(b"route-1", [], [b"route-1"], id="no-echo"),
        pytest.param(LONG, [HASHED], [LONG], id="echo-of-a-hash"),
        pytest.param(LONG, [b"theirs"], [b"theirs"], id="a-word-of-the-gateways-own"),
    ],
)
def test_client_gets_its_own_key_back_once(key: bytes, answered: list[bytes], given_back: list[bytes]) -> None:
    fields = b"".join([b"X-Hermes-Session-Key: %b\r\n" % value for value in answered])
    head = read_answer_head(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + fields)

    text = answers.relayed_head(asked(key), head, 0, close=False)

    assert keys_in(text) == given_back
