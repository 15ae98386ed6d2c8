"""What an answer to a probe proves: every trap that has fooled a real client, and each kind's fingerprint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sidecar.capabilities import judgement
from sidecar.capabilities.judgement import Answer
from sidecar.capabilities.model import ENHANCED, NOT_ASKED, Cause, Finding

JSON = "application/json"
SPA = Answer("/", 200, "text/html; charset=utf-8", body=b"<!doctype html><title>App</title>", asked_at=5.0)
NO_PATH = Answer("/nowhere", 404, "text/plain", body=b"404: Not Found", asked_at=5.0)
LM_STUDIO = Answer("/nowhere", 200, JSON, body=b'{"error":"Unexpected endpoint or method. (GET /nowhere)"}')
REDIRECT = Answer("/nowhere", 302, asked_at=5.0)
LOCKED = Answer("/nowhere", 401, JSON, body=b'{"detail":"Unauthorized"}', asked_at=5.0)
TIMEOUT = Answer("/x", failure="timeout", detail="no answer within 3 s", asked_at=5.0)

CONTROLS = {"404": NO_PATH, "spa": SPA, "lm-studio": LM_STUDIO, "redirect": REDIRECT, "401": LOCKED}


def ok(document: Any, path: str = "/api/sessions") -> Answer:
    return Answer(path, 200, JSON, body=json.dumps(document).encode(), asked_at=5.0)


def status(code: int, path: str = "/api/sessions", *, allow: str = "") -> Answer:
    return Answer(path, code, JSON, allow, body=b'{"detail":"x"}', asked_at=5.0)


def shown(finding: Finding) -> tuple[bool | None, str, Cause]:
    return finding.available, finding.evidence, finding.cause


PRESENT = (True, "probe", Cause.PRESENT)
ABSENT = (False, "probe", Cause.NO_ROUTE)
LOCKED_AWAY = (None, "none", Cause.CREDENTIALS)
UNPROVEN = (None, "none", Cause.UNPROVEN)
FAILED = (None, "none", Cause.FAILED)


# What a backend answers to everything proves nothing


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize("family", ENHANCED)
def test_no_family_is_there_when_it_is_answered_like_a_path_that_cannot_exist(family: str, control: Answer) -> None:
    answer = replace(control, path=f"/api/{family}", body=control.body.replace(b"/nowhere", b"/api/" + family.encode()))

    finding = judgement.judge_family(family, answer, control)

    assert finding.available is not True
    assert (finding.path, finding.http_status, finding.served_by) == (f"/api/{family}", control.status, None)


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_no_chat_and_no_models_are_there_when_everything_is_answered_alike(control: Answer) -> None:
    models = judgement.judge_models(replace(control, path="/v1/models"), control)
    chat = judgement.judge_chat(replace(control, path="/v1/chat/completions"), control, models, is_declared=False)
    health = judgement.judge_health(replace(control, path="/health"), control, models)

    assert [models.available is True, chat.available is True, health.available is True] == [False] * 3


@pytest.mark.parametrize(
    ("control", "answer"),
    [
        pytest.param(SPA, replace(SPA, body=b"<html>another page"), id="pages-that-differ"),
        pytest.param(ok({"path": "/a"}), ok({"path": "/b"}), id="echo-of-the-path"),
        pytest.param(ok([]), ok([1]), id="lists-for-everything"),
        pytest.param(LM_STUDIO, ok({"error": {"message": "no"}, "more": 1}), id="two-errors"),
        pytest.param(Answer("/", 204), Answer("/x", 204), id="nothing-for-everything"),
        pytest.param(
            Answer("/", 200, JSON, body=b"[1", is_whole=False),
            Answer("/x", 200, JSON, body=b"[2", is_whole=False),
            id="endless-for-everything",
        ),
    ],
)
def test_answers_are_alike(control: Answer, answer: Answer) -> None:
    assert judgement.is_alike(answer, control)


@pytest.mark.parametrize(
    ("control", "answer"),
    [
        pytest.param(NO_PATH, SPA, id="status"),
        pytest.param(SPA, ok([]), id="a-page-and-a-list"),
        pytest.param(LM_STUDIO, ok({"object": "list", "data": []}), id="an-error-and-a-list"),
        pytest.param(TIMEOUT, TIMEOUT, id="no-answers"),
    ],
)
def test_answers_differ(control: Answer, answer: Answer) -> None:
    assert not judgement.is_alike(answer, control)


# Families


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(ok([]), PRESENT, id="empty-list"),
        pytest.param(ok({"object": "list", "data": []}), PRESENT, id="hermes-gateway"),
        pytest.param(ok({"sessions": []}), PRESENT, id="hermes-dashboard"),
        pytest.param(ok({"items": []}), PRESENT, id="items"),
        pytest.param(ok({"data": [], "error": None}), PRESENT, id="no-error-said"),
        pytest.param(ok(None), UNPROVEN, id="null"),
        pytest.param(ok({"error": "x"}), UNPROVEN, id="error"),
        pytest.param(ok({"error": "x", "data": []}), UNPROVEN, id="error-beside-a-list"),
        pytest.param(ok({}), UNPROVEN, id="empty-object"),
        pytest.param(ok("sessions"), UNPROVEN, id="text"),
        pytest.param(replace(ok([]), body=b"[1,"), UNPROVEN, id="invalid-json"),
        pytest.param(replace(ok([]), body=b""), UNPROVEN, id="empty-body"),
        pytest.param(replace(ok([]), body=b"[" * 60_000), UNPROVEN, id="deep-json"),
        pytest.param(replace(ok([]), body=b'{"data":[' + b"1," * 9, is_whole=False), PRESENT, id="50-mb-list"),
        pytest.param(replace(ok([]), body=b' {"error":[' + b"1," * 9, is_whole=False), UNPROVEN, id="50-mb-error"),
        pytest.param(replace(ok([]), body=b"xxxx", is_whole=False), UNPROVEN, id="endless-rubbish"),
        pytest.param(replace(SPA, path="/api/sessions"), UNPROVEN, id="a-page"),
        pytest.param(status(401), LOCKED_AWAY, id="401"),
        pytest.param(status(403), LOCKED_AWAY, id="403"),
        pytest.param(status(404), ABSENT, id="404"),
        pytest.param(status(410), ABSENT, id="410"),
        pytest.param(status(501), ABSENT, id="501"),
        pytest.param(status(405), PRESENT, id="405"),
        pytest.param(status(307), FAILED, id="307-slash"),
        pytest.param(status(429), FAILED, id="429"),
        pytest.param(status(500), FAILED, id="500"),
        pytest.param(status(503), FAILED, id="503"),
        pytest.param(replace(TIMEOUT, path="/api/sessions"), FAILED, id="timeout"),
    ],
)
def test_answer_for_sessions_of_a_backend_that_tells_unknown_paths_apart(
    answer: Answer, expected: tuple[bool | None, str, Cause]
) -> None:
    finding = judgement.judge_family("sessions", answer, NO_PATH)

    assert shown(finding) == expected
    assert (finding.path, finding.http_status, finding.checked_at) == ("/api/sessions", answer.status, 5.0)
    assert finding.served_by == ("gateway" if finding.available else None)


@pytest.mark.parametrize(("family", "expected"), [("config", PRESENT), ("memory", PRESENT), ("sessions", UNPROVEN)])
def test_one_document_is_enough_for_families_that_are_one(
    family: str, expected: tuple[bool | None, str, Cause]
) -> None:
    assert shown(judgement.judge_family(family, ok({"model": "m"}), NO_PATH)) == expected


def test_401_of_a_backend_that_asks_everybody_says_so() -> None:
    everywhere = judgement.judge_family("memory", replace(LOCKED, path="/api/memory"), LOCKED)
    here = judgement.judge_family("memory", status(401, "/api/memory"), NO_PATH)

    assert "every path" in everywhere.reason
    assert "authentication" in here.reason


# Chat


NO_MODELS = Finding(None, "none", Cause.UNPROVEN, "x")
MODELS = Finding(True, "probe", Cause.PRESENT, "x")
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("answer", "control", "expected"),
    [
        pytest.param(status(405, CHAT, allow="POST"), NO_PATH, PRESENT, id="405-allow-post"),
        pytest.param(status(405, CHAT), NO_PATH, PRESENT, id="405-without-allow"),
        pytest.param(status(405, CHAT, allow="DELETE"), NO_PATH, UNPROVEN, id="405-for-something-else"),
        pytest.param(status(405, CHAT, allow="POST"), status(405), PRESENT, id="405-everywhere-allow-only-here"),
        pytest.param(status(405, CHAT, allow="POST"), status(405, allow="POST"), UNPROVEN, id="405-allow-everywhere"),
        pytest.param(status(405, CHAT), status(405), UNPROVEN, id="405-everywhere"),
        pytest.param(status(400, CHAT), NO_PATH, PRESENT, id="400"),
        pytest.param(status(422, CHAT), NO_PATH, PRESENT, id="422"),
        pytest.param(status(400, CHAT), status(400), UNPROVEN, id="400-everywhere"),
        pytest.param(status(401, CHAT), NO_PATH, PRESENT, id="401-here-alone"),
        pytest.param(status(401, CHAT), LOCKED, LOCKED_AWAY, id="401-everywhere"),
        pytest.param(status(403, CHAT), status(403), LOCKED_AWAY, id="403-everywhere"),
        pytest.param(status(404, CHAT), NO_PATH, ABSENT, id="404-everywhere"),
        pytest.param(status(500, CHAT), NO_PATH, UNPROVEN, id="500"),
        pytest.param(replace(SPA, path=CHAT), SPA, (False, "probe", Cause.UNPROVEN), id="page-everywhere"),
        pytest.param(replace(REDIRECT, path=CHAT), REDIRECT, UNPROVEN, id="redirect-everywhere"),
        pytest.param(replace(LM_STUDIO, path=CHAT), LM_STUDIO, UNPROVEN, id="lm-studio"),
        pytest.param(replace(TIMEOUT, path=CHAT), NO_PATH, FAILED, id="timeout"),
    ],
)
def test_get_on_the_chat_route(answer: Answer, control: Answer, expected: tuple[bool | None, str, Cause]) -> None:
    alone = judgement.judge_chat(answer, control, NO_MODELS, is_declared=False)
    with_models = judgement.judge_chat(answer, control, MODELS, is_declared=False)
    declared = judgement.judge_chat(answer, control, NO_MODELS, is_declared=True)

    assert shown(alone) == expected
    assert shown(with_models) == PRESENT
    assert shown(declared) == (True, "declared", Cause.PRESENT)


# Models and health


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(ok({"object": "list", "data": [{"id": "m"}]}), PRESENT, id="openai"),
        pytest.param(ok({"object": "list", "data": []}), PRESENT, id="no-model-yet"),
        pytest.param(ok({"models": [{"name": "m"}]}), PRESENT, id="models"),
        pytest.param(ok([{"id": "m"}]), PRESENT, id="bare-list"),
        pytest.param(replace(ok({}), body=b'{"data":[{"id":"m"', is_whole=False), PRESENT, id="long-list"),
        pytest.param(ok({"detail": ["no"]}), UNPROVEN, id="other-list"),
        pytest.param(ok({"error": "x", "data": []}), UNPROVEN, id="error"),
        pytest.param(ok(None), UNPROVEN, id="null"),
        pytest.param(SPA, UNPROVEN, id="page"),
        pytest.param(status(404), ABSENT, id="404"),
        pytest.param(status(401), LOCKED_AWAY, id="401"),
        pytest.param(status(500), UNPROVEN, id="500"),
        pytest.param(TIMEOUT, FAILED, id="timeout"),
    ],
)
def test_list_of_models(answer: Answer, expected: tuple[bool | None, str, Cause]) -> None:
    assert shown(judgement.judge_models(answer, NO_PATH)) == expected


@pytest.mark.parametrize(
    ("answer", "models", "expected"),
    [
        pytest.param(ok({"status": "ok"}), NO_MODELS, PRESENT, id="200"),
        pytest.param(Answer("/health", 200), NO_MODELS, PRESENT, id="200-empty"),
        pytest.param(status(503), MODELS, (False, "probe", Cause.FAILED), id="503-says-that-it-is-not-well"),
        pytest.param(status(404), MODELS, PRESENT, id="no-route-but-models"),
        pytest.param(status(404), NO_MODELS, ABSENT, id="no-route"),
        pytest.param(status(401), NO_MODELS, UNPROVEN, id="401"),
        pytest.param(TIMEOUT, NO_MODELS, FAILED, id="timeout"),
        pytest.param(SPA, NO_MODELS, UNPROVEN, id="page"),
    ],
)
def test_health(answer: Answer, models: Finding, expected: tuple[bool | None, str, Cause]) -> None:
    assert shown(judgement.judge_health(answer, NO_PATH, models)) == expected


# What may be asked


ALIVE = Answer("/health/liveliness", 200, JSON, body=b'"I\'m alive!"')
OPEN_MODELS = ok({"data": [{"id": "m", "owned_by": "somebody"}]})


@pytest.mark.parametrize(
    ("liveliness", "control", "models", "may_ask"),
    [
        pytest.param(NO_PATH, NO_PATH, OPEN_MODELS, True, id="no-such-route"),
        pytest.param(status(405), NO_PATH, OPEN_MODELS, True, id="405"),
        pytest.param(SPA, SPA, OPEN_MODELS, True, id="page-for-everything"),
        pytest.param(ALIVE, NO_PATH, OPEN_MODELS, False, id="litellm"),
        pytest.param(ok({"x": 1}), NO_PATH, OPEN_MODELS, False, id="something-of-the-kind"),
        pytest.param(LOCKED, LOCKED, OPEN_MODELS, False, id="locked"),
        pytest.param(status(500), NO_PATH, OPEN_MODELS, False, id="broken"),
        pytest.param(TIMEOUT, NO_PATH, OPEN_MODELS, False, id="silent"),
        pytest.param(NO_PATH, NO_PATH, ok({"data": [{"id": "m", "owned_by": "sglang"}]}), False, id="sglang"),
    ],
)
def test_health_is_asked_only_where_it_is_certain_to_be_free(
    liveliness: Answer, control: Answer, models: Answer, may_ask: bool
) -> None:
    assert judgement.may_ask_health(liveliness, control, models) is may_ask


# What the metadata of models says of images


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        pytest.param([{"architecture": {"input_modalities": ["text", "image"]}}], True, id="llama.cpp"),
        pytest.param([{"architecture": {"input_modalities": ["text"]}}], False, id="text-alone"),
        pytest.param([{"type": "llm"}, {"type": "vlm"}], True, id="lm-studio-one-of-two"),
        pytest.param([{"type": "llm"}, {"type": "embeddings"}], False, id="lm-studio-none"),
        pytest.param([{"type": "embeddings"}], None, id="lm-studio-no-chat-model"),
        pytest.param([{"supports_vision": True}], True, id="litellm"),
        pytest.param([{"supports_vision": False}], None, id="litellm-does-not-know"),
        pytest.param([{"id": "m"}], None, id="says-nothing"),
        pytest.param([{"architecture": None}, {"architecture": {"input_modalities": "image"}}, 7], None, id="rubbish"),
        pytest.param([], None, id="no-model"),
    ],
)
def test_images_by_metadata(models: list[Any], expected: bool | None) -> None:
    assert judgement.reads_images(ok({"data": models})) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"data":[{"architecture":{"input_modalities":["text","image"],', True),
        (b'{"data":[{"architecture":{"input_modalities":["text"],', None),
    ],
)
def test_images_in_a_list_that_was_cut(body: bytes, expected: bool | None) -> None:
    """OpenRouter's list is longer than what a probe reads: the rest may hold what its beginning does not."""
    cut = Answer("/v1/models", 200, JSON, body=body, is_whole=False)

    assert judgement.reads_images(cut) is expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [({"modalities": {"vision": True}}, True), ({"modalities": {"vision": False}}, False), ({"modalities": 1}, None)],
)
def test_images_by_llama_cpps_properties(document: Any, expected: bool | None) -> None:
    assert judgement.props_read_images(ok(document, "/props")) is expected


# Small readings


def test_declared_features_are_those_of_a_capabilities_document() -> None:
    features = {"chat_completions": True}

    assert judgement.declared_by(ok({"object": "hermes.api_server.capabilities", "features": features})) == features
    assert judgement.declared_by(ok({"object": "list", "features": features})) is None
    assert judgement.declared_by(ok({"object": "hermes.api_server.capabilities", "features": []})) is None
    assert judgement.declared_by(replace(ok({"features": features}), status=401)) is None
    assert judgement.declared_by(SPA) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0.19.0", "0.19.0"), ("x" * 65, None), ("a\x1b[31m", None), (3, None), (None, None)],
    ids=["text", "long", "control", "number", "null"],
)
def test_words_of_the_backend_are_short_and_printable(value: object, expected: str | None) -> None:
    assert judgement.text(ok({"version": value}), "version") == expected


def test_dashboard_token_is_read_from_its_page() -> None:
    page = b'<!doctype html><script>window.__HERMES_SESSION_TOKEN__="abc-DEF_123";x="y"</script>'

    assert judgement.dashboard_token(replace(SPA, body=page)) == b"abc-DEF_123"
    assert judgement.is_dashboard_page(replace(SPA, body=page))
    assert judgement.dashboard_token(SPA) is None
    assert judgement.dashboard_token(replace(SPA, body=page, status=500)) is None
    assert judgement.dashboard_token(replace(SPA, body=page.replace(b"abc-DEF_123", b"a b\r\nX: y"))) is None


def test_not_asked_is_not_known() -> None:
    assert shown(NOT_ASKED) == (None, "none", Cause.NOT_ASKED)
