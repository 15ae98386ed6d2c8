"""The session mapping: which session a request belongs to, what the gateway is told, what the client gets back."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sidecar.capabilities.model import GatewayFacts, Picture
from sidecar.faults import Fault, FaultCode
from sidecar.relay.fields import REQUEST_WATCHED, sort_out
from sidecar.relay.wire import Field
from sidecar.sessions.mapping import Decision, MappingPolicy, decide, legal_id
from sidecar.sessions.sources import HeaderSource, is_usable
from tests.unit.grammar import VALUES, VISIBLE, any_case, bytes_of
from tests.unit.policies import rules_of

DEFAULT = rules_of().mapping
"""What a sidecar without a configuration file obeys: the sources of the reference page, in its order."""
HEADERS = [source for source in DEFAULT.sources if isinstance(source, HeaderSource)]
ALWAYS = rules_of({"session": {"forward_key": "always"}}).mapping

KEY, CLAUDE_KEY = b"X-Hermes-Session-Key", b"X-Claude-Session-Key"
SID, CSID = b"X-Hermes-Session-Id", b"X-Claude-Session-Id"
FRIENDLY, CLAUDE_FRIENDLY = b"X-Hermes-Friendly-Id", b"X-Claude-Friendly-Id"
OPENWEBUI, TASK = b"X-OpenWebUI-Chat-Id", b"X-OpenWebUI-Task"
LIBRECHAT = b"X-LibreChat-Conversation-Id"


def decided(*lines: Field, policy: MappingPolicy = DEFAULT, namespace: bytes = b"") -> Decision:
    _, watched = sort_out([*lines], REQUEST_WATCHED | policy.watched_names())
    return decide(watched, policy, namespace)


def id_of(key: bytes, *, namespace: bytes = b"") -> bytes:
    """The session that a key in X-Hermes-Session-Key leads to."""
    session_id = decided((KEY, key), namespace=namespace).session_id
    assert session_id is not None
    return session_id


def derived_from(text: bytes) -> bytes:
    return b"hs-" + hashlib.sha256(text).hexdigest()[:40].encode()


def is_taken_by_the_gateway(session_id: bytes) -> bool:
    """The rule of hermes-agent 0.19, as its answers show it: 400 for `/`, `\\`, `..`, a drive letter in front, and more
    than 256 characters. And what any server takes as a field value: visible ASCII, not empty."""
    return (
        1 <= len(session_id) <= 256
        and all(0x21 <= byte <= 0x7E for byte in session_id)
        and not any(part in session_id for part in (b"/", b"\\", b".."))
        and not (session_id[1:2] == b":" and session_id[:1].isalpha())
    )


# --- Rule 1: where the id comes from ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "session_id", "source"),
    [
        pytest.param([], None, "none", id="nothing-sent"),
        pytest.param([(SID, b"s1")], b"s1", "client", id="own-id"),
        pytest.param([(CSID, b"s1")], b"s1", "client", id="own-id-in-the-legacy-header"),
        pytest.param([(CSID, b"s2"), (SID, b"s1")], b"s1", "client", id="own-id-before-its-legacy-twin"),
        pytest.param([(SID, b""), (CSID, b"s2")], b"s2", "client", id="legacy-id-where-the-other-is-empty"),
        pytest.param([(SID, b"other"), (KEY, b"k1")], b"other", "client", id="own-id-before-a-key"),
        pytest.param([(CSID, b"other"), (KEY, b"k1")], b"other", "client", id="legacy-id-before-a-key"),
        pytest.param([(SID, b"hs-x/..")], b"hs-x/..", "client", id="own-id-is-left-alone"),
        pytest.param([(KEY, b"k1")], b"k1", "header:x-hermes-session-key", id="key"),
        pytest.param([(b"x-hermes-session-key", b"k1")], b"k1", "header:x-hermes-session-key", id="key-in-lower-case"),
        pytest.param([(b"X-HERMES-SESSION-KEY", b"k1")], b"k1", "header:x-hermes-session-key", id="key-in-capitals"),
        pytest.param([(CLAUDE_KEY, b"k1")], b"k1", "header:x-claude-session-key", id="legacy-key-alone"),
        pytest.param(
            [(CLAUDE_KEY, b"k2"), (KEY, b"k1")], b"k1", "header:x-hermes-session-key", id="key-before-its-legacy-twin"
        ),
        pytest.param(
            [(OPENWEBUI, b"c1")], b"openwebui-c1", "header:x-openwebui-chat-id", id="open-webui-with-its-prefix"
        ),
        pytest.param(
            [(LIBRECHAT, b"c1")], b"librechat-c1", "header:x-librechat-conversation-id", id="librechat-with-its-prefix"
        ),
        pytest.param(
            [(LIBRECHAT, b"c2"), (OPENWEBUI, b"c1"), (CLAUDE_KEY, b"k2")],
            b"k2",
            "header:x-claude-session-key",
            id="sources-in-their-order",
        ),
        pytest.param(
            [(KEY, b"new"), (OPENWEBUI, b"c1")],
            b"openwebui-c1",
            "header:x-openwebui-chat-id",
            id="first-usable-source-not-first-present",
        ),
        pytest.param([(SID, b"new"), (KEY, b"k1")], b"k1", "header:x-hermes-session-key", id="own-id-that-names-none"),
        pytest.param([(FRIENDLY, b"My chat"), (CLAUDE_FRIENDLY, b"x")], None, "none", id="friendly-id-is-no-source"),
        pytest.param([(KEY, b"k1"), (KEY, b"k1")], b"k1", "header:x-hermes-session-key", id="same-key-twice"),
        pytest.param([(SID, b"s1"), (SID, b"s1")], b"s1", "client", id="same-id-twice"),
        pytest.param([(SID, b"s1"), (CSID, b"s2")], b"s1", "client", id="two-headers-that-disagree"),
    ],
)
def test_source_of_the_session(lines: list[Field], session_id: bytes | None, source: str) -> None:
    decision = decided(*lines)

    assert (decision.session_id, decision.source, decision.derived) == (session_id, source, False)


UNUSABLE = [
    pytest.param(b"", id="empty"),
    pytest.param(b"  \t ", id="blanks"),
    pytest.param(b"new", id="new"),
    pytest.param(b"NEW", id="new-in-capitals"),
    pytest.param(b" new ", id="new-with-blanks"),
    pytest.param(b"null", id="null"),
    pytest.param(b"undefined", id="undefined"),
    pytest.param(b"{{LIBRECHAT_BODY_CONVERSATIONID}}", id="librechat-template"),
    pytest.param(b"{{}}", id="empty-template"),
    pytest.param(b"chat-{{id}}-x", id="template-inside"),
    pytest.param(b"${CHAT_ID}", id="shell-template"),
    pytest.param(b"chat:${id}", id="shell-template-inside"),
    pytest.param(b"{{ caf\xe9 }}", id="template-outside-ascii"),
]
USABLE = [
    pytest.param(b"0", id="zero"),
    pytest.param(b"newer", id="word-that-begins-with-new"),
    pytest.param(b"null-1", id="word-that-begins-with-null"),
    pytest.param(b"none", id="none"),
    pytest.param(b"None", id="python-none"),
    pytest.param(b"false", id="false"),
    pytest.param(b"{id}", id="one-brace"),
    pytest.param(b"{{id", id="template-without-end"),
    pytest.param(b"id}}", id="template-without-beginning"),
    pytest.param(b"$id", id="dollar-without-brace"),
    pytest.param(b"%24%7Bid%7D", id="escaped-template"),
    pytest.param(b"\xa0", id="no-break-space-is-a-byte-like-others"),
]


@pytest.mark.parametrize("value", UNUSABLE)
def test_value_that_names_no_conversation(value: bytes) -> None:
    assert not is_usable(value)
    for name in (SID, CSID, KEY, CLAUDE_KEY, OPENWEBUI, LIBRECHAT):
        assert decided((name, value)).session_id is None
        assert decided((name, value)).source == "none"
        assert decided((name, value)).added == ()


@pytest.mark.parametrize("value", USABLE)
def test_value_that_names_a_conversation(value: bytes) -> None:
    assert is_usable(value)
    assert decided((KEY, value)).session_id is not None


@pytest.mark.parametrize(
    ("lines", "session_id", "source"),
    [
        pytest.param([(TASK, b"title_generation"), (OPENWEBUI, b"c1")], None, "skipped", id="task"),
        pytest.param([(b"x-openwebui-task", b"tags"), (KEY, b"k1")], None, "skipped", id="task-in-lower-case"),
        pytest.param([(TASK, b"1"), (SID, b"s1")], None, "skipped", id="task-with-an-id-of-its-own"),
        pytest.param([(TASK, b""), (TASK, b"x"), (KEY, b"k1")], None, "skipped", id="second-line-counts"),
        pytest.param([(TASK, b""), (KEY, b"k1")], b"k1", "header:x-hermes-session-key", id="empty-is-no-task"),
        pytest.param([(TASK, b" \t"), (KEY, b"k1")], b"k1", "header:x-hermes-session-key", id="blanks-are-no-task"),
    ],
)
def test_side_tasks_stay_out_of_the_conversation(lines: list[Field], session_id: bytes | None, source: str) -> None:
    decision = decided(*lines)

    assert (decision.session_id, decision.source) == (session_id, source)
    assert (SID in dict(decision.added)) == (session_id is not None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(SID, id="own-id"),
        pytest.param(CSID, id="legacy-id"),
        pytest.param(KEY, id="key"),
        pytest.param(CLAUDE_KEY, id="legacy-key"),
        pytest.param(OPENWEBUI, id="open-webui"),
        pytest.param(LIBRECHAT, id="librechat"),
    ],
)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param((b"k1", b"k2"), id="two"),
        pytest.param((b"k1", b"K1"), id="differ-in-case"),
        pytest.param((b"caf\xe9", b"caf\xe8"), id="differ-in-one-byte"),
        pytest.param((b"k1", b"k1", b"k2"), id="third-differs"),
    ],
)
def test_one_header_that_names_two_conversations_is_refused(name: bytes, values: tuple[bytes, ...]) -> None:
    with pytest.raises(Fault) as caught:
        decided(*((name, value) for value in values))

    assert caught.value.code is FaultCode.INVALID_SESSION_KEY
    assert caught.value.status == 400


def test_sources_are_what_the_settings_say() -> None:
    policy = rules_of(
        {"session": {"sources": [{"header": "X-Chat", "prefix": "mine."}], "skip_when": [{"header": "X-Side"}]}}
    ).mapping

    assert decided((b"x-chat", b"c"), policy=policy).session_id == b"mine.c"
    assert decided((KEY, b"k1"), policy=policy).session_id is None
    assert decided((b"X-Chat", b"c"), (b"X-Side", b"1"), policy=policy).source == "skipped"
    assert decided((b"X-Chat", b"c"), (TASK, b"1"), policy=policy).source == "header:x-chat"


# --- Rule 2: from a key to an id -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"ws-route-1", id="plain"),
        pytest.param(b"aa:b:c", id="colons"),
        pytest.param(b"Aa:b:c", id="capital"),
        pytest.param(b"a_b_c", id="underscores"),
        pytest.param(b"a%20b%20c", id="escapes"),
        pytest.param(b"agent:main:x", id="word-before-a-colon"),
        pytest.param(b"1:x", id="digit-before-a-colon"),
        pytest.param(b":x", id="colon-in-front"),
        pytest.param(b".a.b.", id="single-dots"),
        pytest.param(b"-", id="one-character"),
        pytest.param(b"hs", id="hs"),
        pytest.param(b"hs_x", id="hs-without-hyphen"),
        pytest.param(b"HS-x", id="hs-in-capitals"),
        pytest.param(b"x-hs-", id="hs-later"),
        pytest.param(b"!\"#$%&'()*+,;<=>?@[]^`{|}~", id="every-punctuation-mark"),
        pytest.param(b"x" * 256, id="256-characters"),
    ],
)
def test_legal_key_is_its_own_id(key: bytes) -> None:
    decision = decided((KEY, key))

    assert (decision.session_id, decision.derived) == (key, False)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"spaces/AAA/threads/B", id="slashes"),
        pytest.param(b"a:b/c", id="one-slash"),
        pytest.param(b"a\\b", id="backslash"),
        pytest.param(b"..", id="two-dots"),
        pytest.param(b"a..b", id="two-dots-inside"),
        pytest.param(b"C:x", id="drive-letter"),
        pytest.param(b"c:", id="small-drive-letter-alone"),
        pytest.param(b"a:b:c", id="drive-letter-of-a-key-with-colons"),
        pytest.param(b"A:b:c", id="drive-letter-of-its-neighbour"),
        pytest.param(b"a b c", id="blanks"),
        pytest.param(b"a\tb", id="tab"),
        pytest.param(b"x" * 257, id="257-characters"),
        pytest.param(b"x" * 60000, id="60000-characters"),
        pytest.param(b"hs-", id="hs-alone"),
        pytest.param(b"hs-x", id="hs-in-front"),
        pytest.param(derived_from(b"a/b"), id="another-keys-derived-id"),
        pytest.param(b"\xe4\xbc\x9a\xe8\xaf\x9d", id="utf-8"),
        pytest.param(b"caf\xe9", id="latin-1"),
        pytest.param(b"caf\xe8", id="latin-1-neighbour"),
        pytest.param(b"\xff", id="no-encoding"),
    ],
)
def test_other_key_becomes_a_hash_of_its_bytes(key: bytes) -> None:
    decision = decided((KEY, key))

    assert (decision.session_id, decision.derived) == (derived_from(key), True)
    assert decision.given_back[-1] == (b"X-Hermes-Sidecar-Session", b"header:x-hermes-session-key; derived")


def test_derived_ids_are_those_of_earlier_releases() -> None:
    """Written out: whoever changes the rule cuts off every conversation that has such an id."""
    assert id_of(b"spaces/AAA/threads/B") == b"hs-d6dd5808632e91e44fc5cab35de5cbbd1656cfa0"
    assert id_of("会话".encode()) == b"hs-a63280253f17d4401f9d5b66220903ea555fbd49"


@pytest.mark.parametrize(
    ("lines", "session_id"),
    [
        pytest.param([(OPENWEBUI, b"C:x")], b"openwebui-C:x", id="no-drive-letter-behind-a-prefix"),
        pytest.param([(OPENWEBUI, b"hs-x")], b"openwebui-hs-x", id="hs-behind-a-prefix"),
        pytest.param([(OPENWEBUI, b"x" * 246)], b"openwebui-" + b"x" * 246, id="256-with-the-prefix"),
        pytest.param([(OPENWEBUI, b"x" * 247)], derived_from(b"openwebui-" + b"x" * 247), id="257-with-the-prefix"),
        pytest.param([(OPENWEBUI, b"a/b")], derived_from(b"openwebui-a/b"), id="hash-covers-the-prefix"),
        pytest.param([(LIBRECHAT, b"a/b")], derived_from(b"librechat-a/b"), id="same-key-of-another-product"),
    ],
)
def test_prefix_is_part_of_what_is_judged(lines: list[Field], session_id: bytes) -> None:
    assert decided(*lines).session_id == session_id


@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        pytest.param(b"a.", b".b", id="two-dots"),
        pytest.param(b"h", b"s-x", id="hs"),
        pytest.param(b"c", b":x", id="drive-letter"),
    ],
)
def test_what_prefix_and_key_make_together_is_judged(prefix: bytes, key: bytes) -> None:
    assert legal_id(prefix, key) == derived_from(prefix + key)


# Bytes that a field value can have, blanks inside included; keys from one alphabet of trouble meet each other often.
KEYS = (VALUES | bytes_of(b"aA:./\\-_ hs%2\xe9\xe8\xff", max_size=6).map(lambda key: key.strip(b" "))).filter(is_usable)
LEGAL_KEYS = bytes_of(bytes(range(0x21, 0x7F)), min_size=1, max_size=256).filter(
    lambda key: is_usable(key) and is_taken_by_the_gateway(key) and not key.startswith(b"hs-")
)


@given(st.lists(KEYS, min_size=2, max_size=8, unique=True))
def test_two_different_keys_never_get_one_id(keys: list[bytes]) -> None:
    """For any keys of one source, as many ids as keys."""
    for source in HEADERS:
        ids = {decided((source.name, key)).session_id for key in keys}

        assert None not in ids
        assert len(ids) == len(keys)


@given(KEYS)
def test_key_that_looks_like_a_derived_id_cannot_meet_one(key: bytes) -> None:
    """For any key, whoever sends the id that was derived from it gets another session."""
    assert id_of(derived_from(key)) != id_of(key)
    assert id_of(derived_from(key)) == derived_from(derived_from(key))


@given(LEGAL_KEYS)
def test_a_legal_value_is_its_own_id(key: bytes) -> None:
    """For any key that the gateway takes and that does not look like a derived id: itself, unmarked."""
    decision = decided((KEY, key))

    assert (decision.session_id, decision.derived) == (key, False)


@given(KEYS, st.sampled_from(HEADERS), st.sampled_from((b"", b"alice-", b"a.b_c-" * 10 + b"d-")))
def test_every_id_made_is_one_the_gateway_takes(key: bytes, source: HeaderSource, namespace: bytes) -> None:
    """For any key, any source and any client's namespace."""
    session_id = decided((source.name, key), namespace=namespace).session_id

    assert session_id is not None
    assert is_taken_by_the_gateway(session_id), session_id


@given(st.binary(min_size=1, max_size=40).filter(is_usable))
def test_derived_is_said_exactly_where_the_id_is_not_the_key(key: bytes) -> None:
    """For any bytes, even those that no field value can have."""
    decision = decided((OPENWEBUI, key))

    assert decision.derived == (decision.session_id != b"openwebui-" + key)


def test_same_key_same_id_after_a_restart() -> None:
    """Another process, with another seed for its hashes, comes to the same ids."""
    keys = [b"a:b:c", b"spaces/AAA/threads/B", b"caf\xe9", b"\xff", b"hs-x", b"x" * 300]
    program = (
        "import sys\n"
        "from sidecar.sessions.mapping import legal_id\n"
        "for line in sys.stdin: print(legal_id(b'openwebui-', bytes.fromhex(line)).decode())\n"
    )

    answer = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(key.hex() for key in keys),
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    assert answer.stdout.split() == [legal_id(b"openwebui-", key).decode() for key in keys]


# --- Rule 4: what the gateway is told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "added"),
    [
        pytest.param([], (), id="nothing-sent-nothing-added"),
        pytest.param([(KEY, b"k1")], ((SID, b"k1"), (CSID, b"k1")), id="key"),
        pytest.param([(SID, b"s1")], ((SID, b"s1"), (CSID, b"s1")), id="own-id"),
        pytest.param([(CSID, b"s1")], ((SID, b"s1"), (CSID, b"s1")), id="legacy-id"),
        pytest.param([(SID, b"s1"), (CSID, b"s2")], ((SID, b"s1"), (CSID, b"s1")), id="two-ids-become-one"),
        pytest.param(
            [(b"x-claude-session-id", b"s"), (CSID, b"s")], ((SID, b"s"), (CSID, b"s")), id="repeats-become-one"
        ),
        pytest.param(
            [(KEY, b"k1"), (CLAUDE_KEY, b"k2"), (FRIENDLY, b"f"), (CLAUDE_FRIENDLY, b"g")],
            ((SID, b"k1"), (CSID, b"k1")),
            id="keys-and-friendly-ids-stay-here",
        ),
        pytest.param([(TASK, b"title"), (KEY, b"k1"), (SID, b"s1")], (), id="side-task"),
    ],
)
def test_upstream_gets_one_line_of_each_session_header(lines: list[Field], added: tuple[Field, ...]) -> None:
    assert decided(*lines).added == added


@pytest.mark.parametrize(
    ("lines", "added"),
    [
        pytest.param([(KEY, b"k1")], ((SID, b"k1"), (CSID, b"k1"), (KEY, b"k1")), id="key"),
        pytest.param(
            [(b"x-hermes-session-key", b"caf\xe9")],
            ((SID, derived_from(b"caf\xe9")), (CSID, derived_from(b"caf\xe9")), (b"x-hermes-session-key", b"caf\xe9")),
            id="key-byte-for-byte-as-sent",
        ),
        pytest.param([(SID, b"s1"), (KEY, b"k1")], ((SID, b"s1"), (CSID, b"s1"), (KEY, b"k1")), id="beside-an-own-id"),
        pytest.param(
            [(CLAUDE_KEY, b"k2"), (FRIENDLY, b"f"), (CLAUDE_FRIENDLY, b"g")],
            ((SID, b"k2"), (CSID, b"k2")),
            id="never-the-twins-and-the-friendly-id",
        ),
        pytest.param([], (), id="never-made-up"),
    ],
)
def test_key_goes_upstream_where_the_settings_say_always(lines: list[Field], added: tuple[Field, ...]) -> None:
    assert decided(*lines, policy=ALWAYS).added == added


DECLARES_THE_HEADER = Picture(gateway=GatewayFacts(forwards_session_key=True))


@pytest.mark.parametrize(
    ("word", "picture", "goes_upstream"),
    [
        pytest.param("auto", Picture(), False, id="auto-while-nothing-is-known"),
        pytest.param("auto", DECLARES_THE_HEADER, True, id="auto-and-the-gateway-declares-the-header"),
        pytest.param("never", DECLARES_THE_HEADER, False, id="never"),
        pytest.param("always", Picture(), True, id="always"),
    ],
)
def test_who_gets_the_key(word: str, picture: Picture, goes_upstream: bool) -> None:
    policy = rules_of({"session": {"forward_key": word}}, picture=picture).mapping

    assert ((KEY, b"k1") in decided((KEY, b"k1"), policy=policy).added) == goes_upstream


# --- Rule 3: under which id a session goes on, as far as it is known -------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "sent_id", "word"),
    [
        pytest.param([(KEY, b"k1")], b"child-2", b"header:x-hermes-session-key; followed", id="key"),
        pytest.param([(SID, b"k1")], b"child-2", b"client; followed", id="own-id"),
        pytest.param([(KEY, b"a/b")], b"child-3", b"header:x-hermes-session-key; followed; derived", id="derived"),
        pytest.param([(KEY, b"k2")], b"k2", b"header:x-hermes-session-key", id="neighbour"),
        pytest.param([], None, b"none", id="nothing-sent"),
        pytest.param([(TASK, b"title"), (KEY, b"k1")], None, b"skipped", id="side-task"),
    ],
)
def test_newest_id_of_a_session_goes_upstream(lines: list[Field], sent_id: bytes | None, word: bytes) -> None:
    _, watched = sort_out([*lines], REQUEST_WATCHED | DEFAULT.watched_names())
    known = {b"k1": b"child-2", derived_from(b"a/b"): b"child-3"}

    decision = decide(watched, DEFAULT, newest=lambda session_id: known.get(session_id, session_id))

    assert decision.session_id == decided(*lines).session_id
    assert decision.sent_id == sent_id
    assert decision.added == (() if sent_id is None else ((SID, sent_id), (CSID, sent_id)))
    assert decision.given_back[-1] == (b"X-Hermes-Sidecar-Session", word)


# --- Rule 5: what the client gets back -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "given_back"),
    [
        pytest.param([], [], id="nothing-sent"),
        pytest.param([(KEY, b"k1")], [(KEY, b"k1")], id="key"),
        pytest.param([(b"x-hermes-session-key", b"k1")], [(KEY, b"k1")], id="in-the-usual-spelling"),
        pytest.param([(KEY, b"caf\xe9 \xff")], [(KEY, b"caf\xe9 \xff")], id="byte-for-byte"),
        pytest.param(
            [(KEY, b"a/b"), (FRIENDLY, b"My chat")], [(KEY, b"a/b"), (FRIENDLY, b"My chat")], id="friendly-id"
        ),
        pytest.param([(SID, b"s1"), (KEY, b"k1")], [(KEY, b"k1")], id="beside-an-own-id"),
        pytest.param([(KEY, b"k1"), (KEY, b"k1")], [(KEY, b"k1")], id="once"),
        pytest.param([(SID, b"s1"), (CSID, b"s2")], [], id="an-id-is-never-given-back"),
        pytest.param([(CLAUDE_KEY, b"k1"), (CLAUDE_FRIENDLY, b"f")], [], id="the-twins-are-not"),
        pytest.param([(TASK, b"title"), (KEY, b"k1")], [(KEY, b"k1")], id="side-task"),
    ],
)
def test_answer_gives_the_route_back(lines: list[Field], given_back: list[Field]) -> None:
    decision = decided(*lines)

    assert [*decision.given_back[:-1]] == given_back
    assert decision.given_back[-1] == (
        b"X-Hermes-Sidecar-Session",
        decision.source.encode() + b"; derived" * decision.derived,
    )


@given(st.lists(st.tuples(st.sampled_from((KEY, CLAUDE_KEY, FRIENDLY, OPENWEBUI)).flatmap(any_case), KEYS), max_size=4))
def test_a_session_id_is_never_made_up_towards_the_client(lines: list[Field]) -> None:
    """For any request, the answer's fields of ours hold what the client sent and a word from a closed list."""
    try:
        decision = decided(*lines)
    except Fault:
        return
    sent = {value for _, value in lines}

    assert {name for name, _ in decision.given_back} <= {KEY, FRIENDLY, b"X-Hermes-Sidecar-Session"}
    assert {value for _, value in decision.given_back[:-1]} <= sent
    assert re.fullmatch(
        rb"none|header:x-(hermes|claude)-session-key(; derived)?|header:x-openwebui-chat-id(; derived)?",
        decision.given_back[-1][1],
    )


# --- Whose request it is does not matter -----------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from((KEY, SID, CSID, OPENWEBUI, TASK, FRIENDLY)), KEYS), max_size=4),
    st.lists(st.binary(max_size=20), max_size=2),
)
def test_the_mapping_does_not_look_at_authorization(lines: list[Field], credentials: list[bytes]) -> None:
    """For any request and any Authorization lines, the same decision as without them."""
    shown = [(b"Authorization", b"Bearer " + credential) for credential in credentials]
    try:
        without = decided(*lines)
    except Fault:
        with pytest.raises(Fault):
            decided(*lines, *shown)
        return

    assert decided(*lines, *shown) == decided(*shown, *lines) == without


# --- Clients kept apart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "session_id", "derived"),
    [
        pytest.param([(KEY, b"k1")], b"alice-k1", False, id="key"),
        pytest.param([(SID, b"s1")], b"alice-s1", False, id="own-id"),
        pytest.param([(SID, b"bob-s1")], b"alice-bob-s1", False, id="own-id-that-names-another-client"),
        pytest.param([(OPENWEBUI, b"c1")], b"alice-openwebui-c1", False, id="prefix"),
        pytest.param([(KEY, b"a/b")], b"alice-" + derived_from(b"a/b"), True, id="derived"),
        pytest.param([(KEY, b"hs-x")], b"alice-" + derived_from(b"hs-x"), True, id="looks-derived"),
        pytest.param([(KEY, b"x" * 250)], b"alice-" + b"x" * 250, False, id="256-with-the-namespace"),
        pytest.param([(KEY, b"x" * 251)], b"alice-" + derived_from(b"x" * 251), True, id="257-with-the-namespace"),
        pytest.param([], None, False, id="nothing-sent"),
    ],
)
def test_namespace_stands_before_every_id(lines: list[Field], session_id: bytes | None, derived: bool) -> None:
    decision = decided(*lines, namespace=b"alice-")

    assert (decision.session_id, decision.derived) == (session_id, derived)
    assert decision.added == (() if session_id is None else ((SID, session_id), (CSID, session_id)))


def test_route_key_that_goes_upstream_has_the_namespace_too() -> None:
    """To the gateway it is a scope of its memory: whoever knew another client's key would read there."""
    decision = decided((KEY, b"k1"), policy=ALWAYS, namespace=b"alice-")

    assert decision.added == ((SID, b"alice-k1"), (CSID, b"alice-k1"), (KEY, b"alice-k1"))
    assert decision.given_back[0] == (KEY, b"k1")


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
ANY_LINE = st.tuples(
    st.sampled_from((SID, CSID, KEY, OPENWEBUI)), KEYS | bytes_of(VISIBLE, min_size=1).filter(is_usable)
)


@given(NAMES, NAMES, ANY_LINE, ANY_LINE)
def test_sessions_of_two_clients_never_meet(one: str, other: str, one_line: Field, other_line: Field) -> None:
    """For any two names that the configuration lets be two clients, and anything either sends: two sessions."""
    one_namespace, other_namespace = f"{one}-".encode(), f"{other}-".encode()
    # The configuration refuses names of which one is the beginning of the other, up to a hyphen.
    assume(not one_namespace.startswith(other_namespace) and not other_namespace.startswith(one_namespace))

    one_id = decided(one_line, namespace=one_namespace).session_id
    other_id = decided(other_line, namespace=other_namespace).session_id

    assert one_id is not None
    assert one_id.startswith(one_namespace)
    assert one_id != other_id
