"""Credentials: who may use the sidecar, and which key goes on to the gateway."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.faults import Fault, FaultCode
from sidecar.guard.credentials import ANYONE, Client, CredentialPolicy
from sidecar.relay.wire import Field
from tests.unit.grammar import VALUES, any_case

KEY = b"gateway-key"
TOKENS = [("alice", b"tok-alice"), ("bob", b"tok-bob"), (None, b"tok-nameless")]
OPEN = CredentialPolicy.of(None, None, isolate=False)
OPEN_WITH_KEY = CredentialPolicy.of(KEY, None, isolate=False)
GUARDED = CredentialPolicy.of(KEY, TOKENS, isolate=False)
GUARDED_WITHOUT_KEY = CredentialPolicy.of(None, TOKENS, isolate=False)
ISOLATING = CredentialPolicy.of(KEY, TOKENS[:2], isolate=True)


def lines(*values: bytes) -> list[Field]:
    return [(b"Authorization", value) for value in values]


# --- Who may come in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"Bearer tok-alice", id="first"),
        pytest.param(b"Bearer tok-bob", id="second"),
        pytest.param(b"Bearer tok-nameless", id="without-name"),
        pytest.param(b"bearer tok-alice", id="scheme-in-lower-case"),
        pytest.param(b"BEARER   tok-alice", id="scheme-in-capitals-with-blanks"),
    ],
)
def test_client_with_a_token_comes_in(value: bytes) -> None:
    assert GUARDED.admit(lines(value)) == Client(namespace=b"")


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="missing"),
        pytest.param([b""], id="empty"),
        pytest.param([b"Bearer"], id="bearer-alone"),
        pytest.param([b"Bearer "], id="bearer-with-nothing-behind"),
        pytest.param([b"tok-alice"], id="no-scheme"),
        pytest.param([b"Basic tok-alice"], id="other-scheme"),
        pytest.param([b"Bearertok-alice"], id="no-blank"),
        pytest.param([b"Bearer tok-alicE"], id="other-case"),
        pytest.param([b"Bearer tok-alic"], id="too-short"),
        pytest.param([b"Bearer tok-alice2"], id="too-long"),
        pytest.param([b"Bearer tok-alice tok-bob"], id="two-tokens"),
        pytest.param([b"Bearer tok-alice,"], id="comma"),
        pytest.param([b'Bearer "tok-alice"'], id="quotes"),
        pytest.param([b"Bearer alice:tok-alice"], id="with-its-name"),
        pytest.param([b"Bearer alice"], id="only-its-name"),
        pytest.param([b"Bearer gateway-key"], id="the-gateways-key"),
        pytest.param([b"Bearer tok-alice\xff"], id="byte-over-0x7f"),
        pytest.param([b"Bearer tok-alice", b"Bearer tok-alice"], id="two-lines"),
        pytest.param([b"Bearer tok-alice", b"Bearer wrong"], id="right-then-wrong"),
        pytest.param([b"Bearer wrong", b"Bearer tok-alice"], id="wrong-then-right"),
    ],
)
def test_others_are_refused(values: list[bytes]) -> None:
    with pytest.raises(Fault) as caught:
        GUARDED.admit(lines(*values))

    assert caught.value.code is FaultCode.CLIENT_TOKEN_REQUIRED
    assert caught.value.status == 401
    assert GUARDED.admit(lines(*values), is_open=True) is ANYONE


@given(st.lists(VALUES | VALUES.map(lambda value: b"Bearer " + value), max_size=3))
def test_without_tokens_everybody_comes_in(values: list[bytes]) -> None:
    """For any Authorization: where no token is asked for, none is looked at."""
    assert OPEN.admit(lines(*values)) is ANYONE
    assert OPEN_WITH_KEY.admit(lines(*values)) is ANYONE


@given(VALUES)
def test_only_a_token_of_the_file_opens(token: bytes) -> None:
    """For any credential: let in only if it is one of the tokens, byte for byte."""
    try:
        GUARDED.admit(lines(b"Bearer " + token))
    except Fault:
        assert token not in {known for _, known in TOKENS}
    else:
        assert token in {known for _, known in TOKENS}


@given(any_case(b"bearer"), st.sampled_from(TOKENS))
def test_scheme_has_no_case(scheme: bytes, token: tuple[str | None, bytes]) -> None:
    """For any spelling of Bearer, the same client."""
    assert GUARDED.admit(lines(scheme + b" " + token[1])) == Client()


@pytest.mark.parametrize("shown", [b"tok-alice", b"tok-bob", b"wrong", b""])
def test_every_token_is_compared_and_as_a_hash(shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token must not be answered faster than the last, nor a short one than a long one."""
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        assert len(one) == len(other)
        return compare(one, other)

    monkeypatch.setattr("sidecar.guard.credentials.hmac.compare_digest", counting)
    try:
        GUARDED.admit(lines(b"Bearer " + shown))
    except Fault:
        assert shown in (b"wrong", b"")

    assert compared == [32, 32, 32]


@pytest.mark.parametrize(
    ("policy", "token", "namespace"),
    [
        pytest.param(ISOLATING, b"tok-alice", b"alice-", id="alice"),
        pytest.param(ISOLATING, b"tok-bob", b"bob-", id="bob"),
        pytest.param(GUARDED, b"tok-alice", b"", id="not-isolating"),
        pytest.param(GUARDED, b"tok-nameless", b"", id="nameless"),
    ],
)
def test_clients_that_are_kept_apart_have_a_namespace(policy: CredentialPolicy, token: bytes, namespace: bytes) -> None:
    assert policy.admit(lines(b"Bearer " + token)) == Client(namespace)


def test_two_tokens_of_one_name_are_one_client() -> None:
    """That is how a token is renewed."""
    policy = CredentialPolicy.of(None, [("alice", b"old"), ("alice", b"new")], isolate=True)

    assert policy.admit(lines(b"Bearer old")) == policy.admit(lines(b"Bearer new")) == Client(b"alice-")


# --- Which key goes on -----------------------------------------------------------------------------------------------

INJECTED = [(b"Authorization", b"Bearer gateway-key")]


@pytest.mark.parametrize(
    ("values", "is_a_credential"),
    [
        pytest.param([], False, id="none"),
        pytest.param([b""], False, id="empty"),
        pytest.param([b"Bearer"], False, id="bearer-alone"),
        pytest.param([b"Bearer "], False, id="bearer-with-nothing-behind"),
        pytest.param([b"bearer  \t"], False, id="bearer-with-blanks-behind"),
        pytest.param([b"Basic "], False, id="basic-with-nothing-behind"),
        pytest.param([b"Bearer", b""], False, id="two-empty-lines"),
        pytest.param([b"Bearer other"], True, id="another-key"),
        pytest.param([b"bearer other"], True, id="in-lower-case"),
        pytest.param([b"Bearer gateway-key"], True, id="the-key-itself"),
        pytest.param([b"Bearer None"], True, id="a-word-that-looks-like-none"),
        pytest.param([b"Basic dTpw"], True, id="basic"),
        pytest.param([b"Negotiate"], True, id="a-scheme-without-credential"),
        pytest.param([b"Digest username=x"], True, id="digest"),
        pytest.param([b"key-without-scheme"], True, id="no-scheme"),
        pytest.param([b"Bearer caf\xe9"], True, id="byte-over-0x7f"),
        pytest.param([b"Bearer a", b"Bearer b"], True, id="two-lines"),
        pytest.param([b"Bearer ", b"Bearer b"], True, id="empty-and-another"),
    ],
)
def test_key_is_sent_where_the_client_sends_none(values: list[bytes], is_a_credential: bool) -> None:
    """The client's own lines go on as they are; nothing is ever made of a key that is not set."""
    shown = lines(*values)

    assert OPEN_WITH_KEY.to_upstream(shown) == (shown if is_a_credential else INJECTED)
    assert OPEN.to_upstream(shown) == (shown if is_a_credential else [])


@given(st.lists(VALUES | VALUES.map(lambda value: b"Bearer " + value), max_size=3))
def test_client_tokens_never_reach_the_gateway(values: list[bytes]) -> None:
    """For any Authorization where client tokens are asked for: the gateway gets its own key, or nothing."""
    assert GUARDED.to_upstream(lines(*values)) == INJECTED
    assert GUARDED_WITHOUT_KEY.to_upstream(lines(*values)) == []


@given(st.lists(VALUES | VALUES.map(lambda value: b"Bearer " + value), max_size=3))
def test_key_is_either_ours_or_the_clients(values: list[bytes]) -> None:
    """For any Authorization: the gateway gets the client's lines as they are, or the configured key in one line."""
    assert OPEN_WITH_KEY.to_upstream(lines(*values)) in (lines(*values), INJECTED)


# --- Nothing shows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [OPEN_WITH_KEY, GUARDED, GUARDED_WITHOUT_KEY, ISOLATING])
def test_nothing_secret_shows_in_a_repr(policy: CredentialPolicy) -> None:
    shown = repr(policy) + str(policy)

    for secret in (KEY, *(token for _, token in TOKENS)):
        assert secret.decode() not in shown
    assert not any(token_hash.hex() in shown or repr(token_hash) in shown for token_hash, _ in policy.clients or ())


def test_refusal_shows_nothing_of_what_was_sent() -> None:
    with pytest.raises(Fault) as caught:
        GUARDED.admit(lines(b"Bearer s3cr3t-Marker"))

    fault = caught.value
    assert "s3cr3t-Marker" not in f"{fault!r} {fault} {fault.message} {fault.hint} {fault.detail} {fault.envelope()!r}"
