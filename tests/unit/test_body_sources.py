"""Conversations named in JSON bodies, side tasks told by their prompt, bodies that get a field; and real frontends."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sidecar.faults import Fault
from sidecar.relay.fields import REQUEST_WATCHED, sort_out
from sidecar.relay.wire import Field
from sidecar.sessions.mapping import UNDECIDED, Decision, MappingPolicy, decide, injection, is_legal, legal_id
from sidecar.sessions.sources import (
    NO_DOCUMENT,
    BodySource,
    HeaderSource,
    PromptCondition,
    document_of,
    is_usable,
    with_field,
)
from tests.unit.policies import rules_of

KEY, SID, TASK = b"X-Hermes-Session-Key", b"X-Hermes-Session-Id", b"X-OpenWebUI-Task"
BODY = BodySource(("metadata", "chat_id"), b"body-")


def decided(body: bytes | None, *lines: Field, policy: MappingPolicy, namespace: bytes = b"") -> Decision:
    """The decision on a request with these fields; None: its body has not been read."""
    _, watched = sort_out([*lines], REQUEST_WATCHED | policy.watched_names())
    return decide(watched, policy, namespace, document=None if body is None else document_of(body))


def policy_of(*sources: Mapping[str, str], skip_when: object = ()) -> MappingPolicy:
    """What production makes of these settings."""
    return rules_of({"session": {"sources": [*sources], "skip_when": skip_when}}).mapping


def of(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


# --- Where a key stands in a body ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "document", "value"),
    [
        pytest.param("chat_id", {"chat_id": "c1"}, b"c1", id="top"),
        pytest.param("metadata.chat_id", {"metadata": {"chat_id": "c1"}}, b"c1", id="dotted"),
        pytest.param("a.b.c.d", {"a": {"b": {"c": {"d": "x"}}}}, b"x", id="deep"),
        pytest.param("metadata.chat_id", {"metadata.chat_id": "c1"}, None, id="a-dot-in-a-name-is-no-path"),
        pytest.param("metadata.chat_id", {"metadata": "c1"}, None, id="path-ends-in-a-text"),
        pytest.param("metadata.chat_id", {"metadata": ["c1"]}, None, id="path-leads-into-a-list"),
        pytest.param("metadata.0", {"metadata": ["c1"]}, None, id="no-indices"),
        pytest.param("metadata.chat_id", {"metadata": None}, None, id="null-on-the-way"),
        pytest.param("Chat_Id", {"chat_id": "c1"}, None, id="case-counts"),
        pytest.param("chat_id", {"chat_id": 7}, None, id="number"),
        pytest.param("chat_id", {"chat_id": 0}, None, id="zero"),
        pytest.param("chat_id", {"chat_id": True}, None, id="true"),
        pytest.param("chat_id", {"chat_id": None}, None, id="null"),
        pytest.param("chat_id", {"chat_id": ["c1"]}, None, id="list"),
        pytest.param("chat_id", {"chat_id": {"id": "c1"}}, None, id="object"),
        pytest.param("chat_id", {}, None, id="missing"),
        pytest.param("chat_id", {"chat_id": "会话"}, "会话".encode(), id="utf-8"),
        pytest.param("chat_id", {"chat_id": ""}, b"", id="empty"),
        pytest.param("get", {"other": 1}, None, id="a-name-that-dicts-have"),
    ],
)
def test_value_at_a_path(path: str, document: dict[str, Any], value: bytes | None) -> None:
    assert BodySource(tuple(path.split("."))).value(document) == value


def test_half_a_character_is_a_key_like_any_other() -> None:
    """JSON can hold a lone surrogate. It has no UTF-8, but must neither fail nor be taken for another key."""
    policy = policy_of({"body": "id"})

    ids = [
        decided(b'{"id":"%b"}' % text, policy=policy).session_id for text in (rb"\ud83d", rb"\ude00", rb"\ud83d\ude00")
    ]

    assert len(set(ids)) == 3
    assert all(session_id is not None and session_id.startswith(b"hs-") for session_id in ids)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no json", id="no-json"),
        pytest.param(b'{"a":1', id="cut"),
        pytest.param(b'{"a":1} x', id="more-behind-it"),
        pytest.param(b"[{}]", id="list"),
        pytest.param(b'"text"', id="text"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[" * 100_000, id="too-deep"),
        pytest.param(b'{"a":' * 100_000, id="too-deep-in-objects"),
        pytest.param(b'{"a":' + b"9" * 5_000 + b"}", id="number-that-python-does-not-read"),
        pytest.param(b'{"a":"\xff"}', id="no-utf-8"),
        pytest.param(b'{"a":"\xed\xa0\xbd"}', id="surrogate-in-utf-8"),
        pytest.param('{"a":1}'.encode("utf-16"), id="utf-16"),
        pytest.param('{"a":1}'.encode("utf-16-le"), id="utf-16-without-mark"),
        pytest.param('{"a":1}'.encode("utf-32"), id="utf-32"),
    ],
)
def test_what_is_no_json_object_in_utf_8_is_no_document(body: bytes) -> None:
    assert document_of(body) is NO_DOCUMENT


def test_object_is_a_document_with_a_byte_order_mark_too() -> None:
    assert document_of(b'\xef\xbb\xbf {"a": 1}\n') == {"a": 1}
    assert document_of(b"{}") == {}
    assert document_of(b"{}") is not NO_DOCUMENT


# --- Sources in their order ------------------------------------------------------------------------------------------

MIXED = policy_of(
    {"header": "X-First"}, {"body": "chat_id", "prefix": "b-"}, {"header": "X-Last"}, {"body": "other", "prefix": "o-"}
)


@pytest.mark.parametrize(
    ("body", "lines", "session_id", "source"),
    [
        pytest.param(None, [(b"X-First", b"1")], b"1", "header:x-first", id="header-before-it-needs-no-body"),
        pytest.param(of({"chat_id": "c"}), [(b"X-First", b"1")], b"1", "header:x-first", id="header-before-it-wins"),
        pytest.param(of({"chat_id": "c"}), [(b"X-Last", b"2")], b"b-c", "body:chat_id", id="it-wins-over-one-after-it"),
        pytest.param(of({"chat_id": "c"}), [(b"X-First", b"new")], b"b-c", "body:chat_id", id="unusable-header-before"),
        pytest.param(of({"chat_id": "new"}), [(b"X-Last", b"2")], b"2", "header:x-last", id="unusable-value"),
        pytest.param(of({"chat_id": 7}), [(b"X-Last", b"2")], b"2", "header:x-last", id="no-text"),
        pytest.param(b"no json", [(b"X-Last", b"2")], b"2", "header:x-last", id="no-document"),
        pytest.param(of({"chat_id": "", "other": "z"}), [], b"o-z", "body:other", id="second-body-source"),
        pytest.param(of({"chat_id": "c"}), [(SID, b"s")], b"s", "client", id="own-id-wins"),
        pytest.param(None, [(SID, b"s")], b"s", "client", id="own-id-needs-no-body"),
        pytest.param(of({}), [], None, "none", id="nothing"),
    ],
)
def test_sources_count_in_their_order(
    body: bytes | None, lines: list[Field], session_id: bytes | None, source: str
) -> None:
    decision = decided(body, *lines, policy=MIXED)

    assert (decision.session_id, decision.source, decision.needs_body) == (session_id, source, False)


@pytest.mark.parametrize("lines", [[], [(b"X-Last", b"2")], [(b"X-First", b"")]])
def test_nothing_is_decided_while_the_body_may_decide(lines: list[Field]) -> None:
    assert decided(None, *lines, policy=MIXED) is UNDECIDED


def test_one_header_with_two_keys_is_refused_where_the_body_decides_nothing() -> None:
    lines = [(b"X-Last", b"1"), (b"X-Last", b"2")]

    assert decided(of({"chat_id": "c"}), *lines, policy=MIXED).session_id == b"b-c"
    with pytest.raises(Fault):
        decided(of({}), *lines, policy=MIXED)


@pytest.mark.parametrize("value", ["", "  ", "new", "NEW", "null", "undefined", "{{CHAT_ID}}", "${id}", "a-{{b}}-c"])
def test_values_that_name_no_conversation(value: str) -> None:
    assert decided(of({"metadata": {"chat_id": value}}), policy=MappingPolicy((BODY,))).source == "none"


@pytest.mark.parametrize("value", ["news", "{{half", "}}{{", "$ {x}", "{x}", "0", "false", "{" * 300, "x" * 300])
def test_values_that_do(value: str) -> None:
    assert (
        decided(of({"metadata": {"chat_id": value}}), policy=MappingPolicy((BODY,))).source == "body:metadata.chat_id"
    )


@pytest.mark.parametrize(
    "value",
    [b"{" * 1_000_000, b"${" * 500_000, b"{{}" * 300_000, b" " * 1_000_000, b"}}" * 500_000 + b"{{"],
    ids=["braces", "dollars", "halves", "blanks", "the-wrong-way-round"],
)
def test_value_of_a_megabyte_is_judged_in_no_time(value: bytes) -> None:
    """A regular expression took seconds for 60 kB of braces, while every other client waited."""
    asked_at = time.perf_counter()
    is_usable(value)
    legal_id(b"", value)

    assert time.perf_counter() - asked_at < 0.2


@given(st.text(), st.text())
def test_two_keys_never_share_an_id(one: str, other: str) -> None:
    policy = MappingPolicy((BodySource(("id",), b"p-"),))
    assume(one != other)

    ids = [decided(of({"id": key}), policy=policy).session_id for key in (one, other)]

    assert ids[0] is None or ids[0] != ids[1]
    assert all(session_id is None or is_legal(session_id) for session_id in ids)


@given(st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x2FF), min_size=1, max_size=300))
def test_a_key_leads_to_one_session_wherever_it_stands(key: str) -> None:
    """As a header's bytes or as a text in JSON, whichever way that spells it."""
    in_header = decided(
        None, (b"X-Key", key.encode()), policy=MappingPolicy((HeaderSource(b"x-key", b"p-"),))
    ).session_id
    by_body = MappingPolicy((BodySource(("id",), b"p-"),))

    assert decided(of({"id": key}), policy=by_body).session_id == in_header
    assert decided(json.dumps({"id": key}).encode(), policy=by_body).session_id == in_header


def test_prefix_and_namespace_stand_before_the_key() -> None:
    policy = MappingPolicy((BODY,))

    short = decided(of({"metadata": {"chat_id": "c1"}}), policy=policy, namespace=b"ann-")
    long = decided(of({"metadata": {"chat_id": "c" * 250}}), policy=policy, namespace=b"ann-")

    assert (short.session_id, short.derived) == (b"ann-body-c1", False)
    assert long.session_id == b"ann-hs-" + hashlib.sha256(b"body-" + b"c" * 250).hexdigest()[:40].encode()


# --- Side tasks ------------------------------------------------------------------------------------------------------

TASK_PROMPT = PromptCondition("### Task:")


def asking(*contents: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("document", "holds"),
    [
        pytest.param(asking("### Task:\nGenerate a title"), True, id="begins-so"),
        pytest.param(asking("hello", "### Task:\nGenerate tags"), True, id="last-message"),
        pytest.param(asking("### Task:\nGenerate a title", "and now?"), False, id="an-earlier-message"),
        pytest.param(asking("my ### Task: is"), False, id="in-the-middle"),
        pytest.param(asking(" ### Task:"), False, id="blank-before-it"),
        pytest.param(asking("### TASK:"), False, id="other-case"),
        pytest.param(asking([{"type": "text", "text": "### Task: x"}]), True, id="in-parts"),
        pytest.param(
            asking([{"type": "image_url", "image_url": {}}, {"type": "text", "text": "### Task: x"}]),
            True,
            id="first-text-after-an-image",
        ),
        pytest.param(
            asking([{"type": "text", "text": "hi"}, {"type": "text", "text": "### Task:"}]), False, id="second"
        ),
        pytest.param(asking([]), False, id="no-parts"),
        pytest.param(asking(["### Task:"]), False, id="parts-of-no-shape"),
        pytest.param(asking([{"type": "text"}]), False, id="part-without-text"),
        pytest.param(asking(None), False, id="null"),
        pytest.param(asking({"text": "### Task:"}), False, id="object"),
        pytest.param({"messages": []}, False, id="no-messages"),
        pytest.param({"messages": "### Task:"}, False, id="messages-of-no-shape"),
        pytest.param({"messages": ["### Task:"]}, False, id="message-of-no-shape"),
        pytest.param({"prompt": "### Task:"}, False, id="elsewhere"),
        pytest.param({}, False, id="nothing"),
    ],
)
def test_prompt_condition(document: dict[str, Any], holds: bool) -> None:
    assert TASK_PROMPT.holds(document) is holds


def test_prompt_condition_needs_the_body_of_every_request_and_beats_an_own_id() -> None:
    policy = policy_of({"header": KEY.decode()}, skip_when=[{"prompt": "### Task:"}])

    assert decided(None, (KEY, b"k1"), policy=policy) is UNDECIDED
    assert decided(of(asking("### Task:")), (SID, b"s1"), (KEY, b"k1"), policy=policy).source == "skipped"
    assert decided(of(asking("hi")), (SID, b"s1"), policy=policy).session_id == b"s1"
    assert decided(b"no json", (KEY, b"k1"), policy=policy).session_id == b"k1"


def test_header_condition_needs_no_body() -> None:
    policy = policy_of({"body": "id"}, skip_when=[{"header": TASK.decode()}, {"prompt": "### Task:"}])

    assert decided(None, (TASK, b"tags_generation"), policy=policy).source == "skipped"
    assert decided(None, (TASK, b""), policy=policy) is UNDECIDED


# --- Bodies that get a field -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "document", "added"),
    [
        pytest.param("runs", {"input": "hi"}, ("session_id", b"k1"), id="runs"),
        pytest.param("runs", {"input": "hi", "conversation": "x"}, ("session_id", b"k1"), id="runs-other-field"),
        pytest.param("runs", {"session_id": "zzz"}, None, id="runs-given"),
        pytest.param("runs", {"session_id": ""}, ("session_id", b"k1"), id="runs-empty"),
        pytest.param("runs", {"session_id": None}, ("session_id", b"k1"), id="runs-null"),
        pytest.param("responses", {"input": "hi"}, ("conversation", b"k1"), id="responses"),
        pytest.param("responses", {"conversation": "zzz"}, None, id="responses-given"),
        pytest.param("responses", {"conversation": {"id": "zzz"}}, None, id="responses-given-as-an-object"),
        pytest.param("responses", {"previous_response_id": "r"}, None, id="responses-that-go-on"),
        pytest.param("responses", {"previous_response_id": None}, ("conversation", b"k1"), id="responses-null"),
        pytest.param("responses", {"session_id": "zzz"}, ("conversation", b"k1"), id="responses-other-field"),
        pytest.param("chat_completions", {"messages": []}, None, id="chat"),
        pytest.param("models", {"input": "hi"}, None, id="another-route"),
        pytest.param("runs", {}, ("session_id", b"k1"), id="empty-object"),
        pytest.param("runs", NO_DOCUMENT, None, id="no-object"),
    ],
)
def test_what_is_injected(route: str, document: dict[str, Any], added: tuple[str, bytes] | None) -> None:
    assert injection(route, document, b"k1") == added
    assert injection(route, document, None) is None


BLANKS = st.text(alphabet=" \t\r\n", max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """JSON objects as anybody may write them: a byte order mark, blanks anywhere, a name twice, any escape."""
    members = draw(st.lists(st.tuples(st.text(max_size=4) | st.just("session_id"), VALUES), max_size=4))
    texts = [
        draw(BLANKS)
        + json.dumps(name, ensure_ascii=draw(st.booleans()))
        + draw(BLANKS)
        + ":"
        + json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, 1))))
        + draw(BLANKS)
        for name, value in members
    ]
    text = draw(BLANKS) + "{" + (",".join(texts) or draw(BLANKS)) + "}" + draw(BLANKS)
    return draw(st.sampled_from((b"", b"\xef\xbb\xbf"))) + text.encode("utf-8", "replace")


@given(objects(), st.binary(min_size=1, max_size=12))
def test_field_is_added_and_every_other_byte_stays(body: bytes, value: bytes) -> None:
    """For any object: it parses to what it was and the field, and without that it is what it was."""
    before = document_of(body)
    assert before is not NO_DOCUMENT

    longer = with_field(body, "session_id", value)

    assert document_of(longer) == {**before, "session_id": value.decode("latin-1")}
    end = body.rindex(b"}")
    assert (longer[:end], longer[len(longer) - len(body) + end :]) == (body[:end], body[end:])


@pytest.mark.parametrize(
    ("body", "longer"),
    [
        pytest.param(b"{}", b'{"f":"v"}', id="empty"),
        pytest.param(b"{ \n }", b'{ \n "f":"v"}', id="blanks"),
        pytest.param(b'{"a":{}}', b'{"a":{},"f":"v"}', id="object-at-the-end"),
        pytest.param(b'{"a":"{"}', b'{"a":"{","f":"v"}', id="brace-in-a-text"),
        pytest.param(b'{"a":"}"} ', b'{"a":"}","f":"v"} ', id="other-brace-in-a-text"),
        pytest.param(b'\xef\xbb\xbf{"a":1,"a":2}', b'\xef\xbb\xbf{"a":1,"a":2,"f":"v"}', id="mark-and-a-name-twice"),
    ],
)
def test_where_the_field_stands(body: bytes, longer: bytes) -> None:
    assert with_field(body, "f", b"v") == longer


# --- Frontends, as their current releases ask ------------------------------------------------------------------------

OPEN_WEBUI_CONNECTION = (  # 0.12, a connection's own headers with {{CHAT_ID}} and {{TASK}}
    (b"Authorization", b"Bearer sk"),
    (b"Content-Type", b"application/json"),
    (b"X-Hermes-Session-Key", b"0b9a6a2e-6d5f-4f0e-9f0f-1d6a8b1f2c3d"),
)
OPEN_WEBUI_FORWARDING = (  # 0.12, ENABLE_FORWARD_USER_INFO_HEADERS
    (b"X-OpenWebUI-User-Name", b"Ada%20Lovelace"),
    (b"X-OpenWebUI-User-Id", b"7d0a8a6e"),
    (b"X-OpenWebUI-User-Email", b"ada@example.org"),
    (b"X-OpenWebUI-User-Role", b"admin"),
    (b"X-OpenWebUI-Chat-Id", b"0b9a6a2e-6d5f-4f0e-9f0f-1d6a8b1f2c3d"),
)
CHAT_ID = b"0b9a6a2e-6d5f-4f0e-9f0f-1d6a8b1f2c3d"
TURN = {"model": "hermes-agent", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
TITLE = {
    "model": "hermes-agent",
    "stream": False,
    "messages": [{"role": "user", "content": "### Task:\nGenerate a concise, 3-5 word title with an emoji."}],
    "max_completion_tokens": 1000,
}
LIBRECHAT_TURN = TURN | {"user": "65f1c0ffee", "temperature": 1}
OPENCODE = (
    (b"User-Agent", b"opencode/1.18.18"),
    (b"x-session-affinity", b"ses_2e5f7a1b9ffe"),
    (b"X-Session-Id", b"ses_2e5f7a1b9ffe"),
)
ZED_TURN = TURN | {"prompt_cache_key": "d3b07384-d9a0-4c9b-8f2e-1b6d1a2c3e4f", "parallel_tool_calls": False}
BY_PROMPT = [{"header": "X-OpenWebUI-Task"}, {"prompt": "### Task:"}]
FOR_OPENCODE = policy_of({"header": KEY.decode()}, {"header": "X-Session-Id", "prefix": "opencode-"})
FOR_ZED = policy_of({"header": KEY.decode()}, {"body": "prompt_cache_key", "prefix": "zed-"})
DEFAULT = rules_of().mapping
WITH_PROMPT = rules_of({"session": {"skip_when": BY_PROMPT}}).mapping
WEBUI_ID = b"openwebui-" + CHAT_ID


@pytest.mark.parametrize(
    ("policy", "lines", "document", "session_id", "source"),
    [
        pytest.param(
            DEFAULT,
            [*OPEN_WEBUI_CONNECTION, (TASK, b"")],
            TURN,
            CHAT_ID,
            "header:x-hermes-session-key",
            id="open-webui-turn",
        ),
        pytest.param(
            DEFAULT,
            [*OPEN_WEBUI_CONNECTION, (TASK, b"title_generation")],
            TITLE,
            None,
            "skipped",
            id="open-webui-title",
        ),
        pytest.param(
            DEFAULT,
            [*OPEN_WEBUI_CONNECTION, (TASK, b"follow_up_generation")],
            TITLE,
            None,
            "skipped",
            id="open-webui-follow-ups",
        ),
        pytest.param(DEFAULT, [(KEY, b""), (TASK, b"")], TURN, None, "none", id="open-webui-temporary-chat"),
        pytest.param(
            DEFAULT, [(KEY, b"{{CHAT_ID}}"), (TASK, b"{{TASK}}")], TURN, None, "none", id="open-webui-before-templates"
        ),
        pytest.param(
            DEFAULT,
            OPEN_WEBUI_FORWARDING,
            TURN,
            WEBUI_ID,
            "header:x-openwebui-chat-id",
            id="open-webui-forwarding-turn",
        ),
        pytest.param(WITH_PROMPT, OPEN_WEBUI_FORWARDING, TITLE, None, "skipped", id="open-webui-forwarding-title"),
        pytest.param(
            WITH_PROMPT,
            OPEN_WEBUI_FORWARDING,
            TURN,
            WEBUI_ID,
            "header:x-openwebui-chat-id",
            id="open-webui-forwarding-turn-with-the-prompt-rule",
        ),
        pytest.param(
            DEFAULT,
            [(b"X-LibreChat-Conversation-Id", b"3c1f0b0e-5f64-4a9e-8d6e-0a1b2c3d4e5f")],
            LIBRECHAT_TURN,
            b"librechat-3c1f0b0e-5f64-4a9e-8d6e-0a1b2c3d4e5f",
            "header:x-librechat-conversation-id",
            id="librechat-turn",
        ),
        pytest.param(
            DEFAULT,
            [(b"X-LibreChat-Conversation-Id", b"{{LIBRECHAT_BODY_CONVERSATIONID}}")],
            LIBRECHAT_TURN,
            None,
            "none",
            id="librechat-unfilled",
        ),
        pytest.param(
            DEFAULT, [(b"X-LibreChat-Conversation-Id", b"new")], LIBRECHAT_TURN, None, "none", id="librechat-new-chat"
        ),
        pytest.param(
            FOR_OPENCODE, OPENCODE, TURN, b"opencode-ses_2e5f7a1b9ffe", "header:x-session-id", id="opencode-turn"
        ),
        pytest.param(DEFAULT, OPENCODE, TURN, None, "none", id="opencode-is-opt-in"),
        pytest.param(
            FOR_ZED,
            [],
            ZED_TURN,
            b"zed-d3b07384-d9a0-4c9b-8f2e-1b6d1a2c3e4f",
            "body:prompt_cache_key",
            id="zed-thread",
        ),
        pytest.param(FOR_ZED, [], TURN, None, "none", id="zed-without-the-capability"),
        pytest.param(DEFAULT, [], ZED_TURN, None, "none", id="zed-is-opt-in"),
        # They name a person or a request: all chats of one person would become one, or no two turns would meet.
        pytest.param(
            DEFAULT,
            [
                (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
                (b"Authorization", b"Bearer sk"),
                (b"X-Request-Id", b"r1"),
                (b"X-OpenWebUI-User-Id", b"u1"),
            ],
            TURN
            | {"user": "u1", "safety_identifier": "u1", "metadata": {"user_id": "u1"}, "previous_response_id": "r"},
            None,
            "none",
            id="persons-and-requests-are-no-conversations",
        ),
    ],
)
def test_frontends(
    policy: MappingPolicy, lines: list[Field], document: dict[str, Any], session_id: bytes | None, source: str
) -> None:
    decision = decided(of(document), *lines, policy=policy)

    assert (decision.session_id, decision.source, decision.derived) == (session_id, source, False)


@pytest.mark.parametrize("policy", [DEFAULT, FOR_OPENCODE], ids=["default", "opencode"])
def test_header_presets_never_need_a_body(policy: MappingPolicy) -> None:
    assert not policy.reads_bodies
    assert decided(None, policy=policy).source == "none"
