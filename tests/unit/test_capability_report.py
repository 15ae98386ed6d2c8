"""The `/capabilities` document: its schema, and what must hold of it whatever was found."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.capabilities.model import (
    CORE,
    ENHANCED,
    Cause,
    DashboardFacts,
    Evidence,
    Finding,
    GatewayFacts,
    Picture,
    is_chat_usable,
    mode_of,
    status_of,
)
from sidecar.capabilities.report import document, timestamp
from sidecar.capabilities.wording import missing_families
from tests.support.capabilities import SCHEMA, conforming

URL = "http://127.0.0.1:8642"
SECRET = b"s3cr3t-Marker"
ALARM = re.compile(r"\b(error|fail(s|ed|ure)?|broken|warning|problem|unfortunately|cannot|invalid)\b", re.IGNORECASE)


def finding(available: bool | None, cause: Cause = Cause.UNPROVEN) -> Finding:
    if available is None:
        return Finding(None, "none", cause, "x", "/x", 401, None, 1.0)
    cause = Cause.PRESENT if available else Cause.NO_ROUTE
    return Finding(available, "probe", cause, "x", "/x", 200, "gateway" if available else None, 1.0)


def every_combination() -> Iterator[tuple[bool | None, ...]]:
    """True, False and None for chat and each enhanced capability."""
    return itertools.product((True, False, None), repeat=1 + len(ENHANCED))


KINDS = ("hermes-agent", "hermes-dashboard", "litellm", "generic", None)


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_booleans_agree_for_any_combination(kind: str | None) -> None:
    for chat, *families in every_combination():
        findings = {name: finding(value) for name, value in zip(ENHANCED, families, strict=True)}
        findings["chatCompletions"] = finding(chat)
        seen = Picture(GatewayFacts(True, kind, findings=findings), probed_at=1.0)

        found = document(seen, URL, 0.0)
        if kind is None:  # once for all kinds: the schema is slow
            conforming(found)

        shown = list(found["enhancedCapabilities"].values())
        assert shown == families
        if chat is not True:
            expected = "disconnected"
        elif all(value is True for value in shown):
            expected = "enhanced"
        else:
            expected = "partial" if True in shown else "connected"
        assert found["status"] == expected
        portable = "enhanced" if found["enhancedCapabilities"]["sessions"] is True else "portable"
        assert found["mode"] == ("disconnected" if chat is not True else portable)
        assert is_chat_usable(seen) is (chat is True)
        assert set(missing_families(seen)) == {
            name for name, value in zip(ENHANCED, families, strict=True) if value is False
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", [Cause.UNPROVEN, Cause.CREDENTIALS, Cause.FAILED])
def test_nothing_sounds_like_an_error_while_chat_works(kind: str | None, unknown: Cause) -> None:
    for families in itertools.product((True, False, None), repeat=len(ENHANCED)):
        findings = {name: finding(value, unknown) for name, value in zip(ENHANCED, families, strict=True)}
        findings["chatCompletions"] = finding(True)
        found = document(Picture(GatewayFacts(True, kind, findings=findings), probed_at=1.0), URL, 0.0)

        sentences = [found["message"], *(detail["message"] for detail in found["details"].values())]
        assert [sentence for sentence in sentences if ALARM.search(sentence)] == []


causes = st.sampled_from(list(Cause))


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    available = draw(st.sampled_from((True, False, None)))
    evidence: Evidence = "none" if available is None else draw(st.sampled_from(("observed", "declared", "probe")))
    return Finding(
        available,
        evidence,
        draw(causes),
        draw(st.text(min_size=1, max_size=20)),
        draw(st.sampled_from((None, "/api/memory"))),
        draw(st.sampled_from((None, 200, 401, 404))),
        "gateway" if available else None,
        draw(st.sampled_from((None, 1.5))),
    )


names = st.sampled_from((*CORE, *ENHANCED))
pictures = st.builds(
    Picture,
    gateway=st.builds(
        GatewayFacts,
        reachable=st.sampled_from((True, False, None)),
        kind=st.sampled_from(KINDS),
        version=st.sampled_from((None, "1.0")),
        trouble=st.sampled_from((None, "A sentence.")),
        failure=st.none(),
        forwards_session_key=st.booleans(),
        findings=st.dictionaries(names, findings()),
        has_api_skills=st.sampled_from((True, False, None)),
    ),
    dashboard=st.builds(
        DashboardFacts,
        url=st.sampled_from((None, "http://127.0.0.1:9119")),
        reachable=st.sampled_from((True, False, None)),
        version=st.none(),
        token=st.just(SECRET),
        trouble=st.sampled_from((None, "A sentence.")),
        findings=st.dictionaries(names, findings()),
    ),
    fill=st.lists(st.sampled_from(ENHANCED), unique=True).map(tuple),
    has_token=st.booleans(),
    probed_at=st.sampled_from((None, 1.5)),
)


@given(pictures)
def test_any_picture_makes_a_document_that_the_schema_knows_and_that_holds_no_secret(seen: Picture) -> None:
    found = document(seen, URL, 0.0)

    conforming(found)
    assert SECRET.decode() not in json.dumps(found) + repr(seen)
    assert (found["status"], found["mode"]) == (status_of(seen), mode_of(seen))
    for name, detail in found["details"].items():
        layer = "coreCapabilities" if name in CORE else "enhancedCapabilities"
        assert detail["available"] is found[layer][name]
        assert detail["available"] is not True or detail["unlock"] is None


def test_document_as_a_whole() -> None:
    seen = Picture(
        GatewayFacts(
            True, "hermes-agent", "0.19.0", findings={"chatCompletions": finding(True), "memory": finding(False)}
        ),
        DashboardFacts("http://127.0.0.1:9119", False),
        fill=("memory",),
        has_token=True,
        probed_at=1_796_028_189.25,
    )

    found = conforming(document(seen, URL, 1_796_028_000.0))

    assert found["gateway"] == {
        "url": URL, "reachable": True, "kind": "hermes-agent", "version": "0.19.0", "token": "set",
    }  # fmt: skip
    assert found["dashboard"] == {"url": "http://127.0.0.1:9119", "reachable": False, "version": None}
    assert (found["sidecar"]["startedAt"], found["probedAt"]) == (
        "2026-11-30T08:40:00.000Z",
        "2026-11-30T08:43:09.250Z",
    )
    assert found["details"]["memory"] == {
        "available": False,
        "evidence": "probe",
        "servedBy": None,
        "path": "/x",
        "httpStatus": 200,
        "checkedAt": "1970-01-01T00:00:01.000Z",
        "reason": "x",
        "message": "Memory browser requires the memory API.",
        "unlock": "Start the dashboard (hermes dashboard): nothing that answers is at dashboard.url.",
    }


def test_before_the_first_probe() -> None:
    found = conforming(document(Picture(), URL, 0.0))

    assert (found["status"], found["probedAt"], found["gateway"]["reachable"]) == ("disconnected", None, None)
    assert {detail["available"] for detail in found["details"].values()} == {None}


def test_timestamp_is_utc_with_milliseconds() -> None:
    assert [timestamp(None), timestamp(0.0019)] == [None, "1970-01-01T00:00:00.001Z"]


def test_schema_is_a_schema_and_strict_at_every_level() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    objects = [
        SCHEMA,
        SCHEMA["$defs"]["detail"],
        *(v for v in SCHEMA["properties"].values() if v.get("type") == "object"),
    ]

    assert [thing["additionalProperties"] for thing in objects] == [False] * len(objects)
    assert [sorted(thing["required"]) == sorted(thing["properties"]) for thing in objects] == [True] * len(objects)


@pytest.mark.parametrize("change", [{"more": 1}, {"status": "fine"}, {"status": "enhanced"}, {"mode": "portable"}])
def test_schema_refuses_what_the_document_never_says(change: dict[str, object]) -> None:
    found = document(Picture(), URL, 0.0) | change

    with pytest.raises(AssertionError):
        conforming(found)
