"""The words for people: each status word's sentence, each capability's message, each set-up's next step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.capabilities.model import (
    CORE,
    ENHANCED,
    NOT_ASKED,
    Cause,
    DashboardFacts,
    Finding,
    GatewayFacts,
    Picture,
    status_of,
)
from sidecar.capabilities.wording import filled_families, message_of, missing_families, summary_of, unlock_of

YES = Finding(True, "probe", Cause.PRESENT, "there", served_by="gateway")
NO = Finding(False, "probe", Cause.NO_ROUTE, "there is no such route")
LOCKED = Finding(None, "none", Cause.CREDENTIALS, "asks for a key")
UNPROVEN = Finding(None, "none", Cause.UNPROVEN, "shows nothing")
DOWN = Finding(False, "probe", Cause.UNREACHABLE, "refused")

ALONE = {"chatCompletions": YES, "sessions": YES, "skills": YES, "memory": NO, "config": NO, "jobs": YES}
WITHOUT_KEY = {"chatCompletions": YES, "sessions": LOCKED, "skills": LOCKED, "memory": NO, "config": NO, "jobs": LOCKED}
ON_DASHBOARD = {name: replace(YES, served_by="dashboard") for name in ENHANCED}
FILL = ("skills", "memory", "config")


def picture(findings: dict[str, Finding], *, kind: str = "hermes-agent", has_token: bool = True) -> Picture:
    """As after a probe that reached the gateway."""
    gateway = GatewayFacts(True, kind, findings=findings, has_api_skills=False)
    return Picture(gateway, has_token=has_token, probed_at=1.0)


def with_dashboard(facts: DashboardFacts, findings: dict[str, Finding] = ALONE) -> Picture:
    return replace(picture(findings), dashboard=facts, fill=FILL)


URL = "http://127.0.0.1:9119"


# The sentence for the whole


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(Picture(), "Not connected yet: the gateway is being asked for the first time.", id="at-start"),
        pytest.param(
            Picture(GatewayFacts(False, trouble="The gateway could not be reached."), probed_at=1.0),
            "The gateway could not be reached.",
            id="disconnected-in-the-troubles-words",
        ),
        pytest.param(
            picture({}), "No usable chat: the gateway does not answer as a chat backend does.", id="disconnected"
        ),
        pytest.param(
            picture({"chatCompletions": YES, **dict.fromkeys(ENHANCED, NO)}),
            "Connected in portable mode. Chat works; advanced workspace tools are unavailable.",
            id="connected",
        ),
        pytest.param(
            picture({"chatCompletions": YES, **dict.fromkeys(ENHANCED, UNPROVEN)}),
            "Connected in portable mode. Chat works; advanced workspace tools are unavailable.",
            id="connected-nothing-proven",
        ),
        pytest.param(
            picture(WITHOUT_KEY),
            "Connected in portable mode. Chat works; the backend asks for a key before it shows session history, skills"
            " and scheduled jobs.",
            id="connected-without-key",
        ),
        pytest.param(picture(ALONE), "Chat works; memory and config are not available on this backend.", id="partial"),
        pytest.param(
            picture(ALONE | {"memory": YES}), "Chat works; config is not available on this backend.", id="one-missing"
        ),
        pytest.param(
            picture(dict.fromkeys(ENHANCED, YES) | {"chatCompletions": YES, "skills": NO}),
            "Chat works; skills are not available on this backend.",
            id="one-missing-that-is-many",
        ),
        pytest.param(
            picture(ALONE | {"sessions": LOCKED, "skills": UNPROVEN}),
            "Chat works; memory and config are not available on this backend; the backend asks for a key before it"
            " shows session history; whether it has skills is not known yet.",
            id="partial-locked-and-unknown",
        ),
        pytest.param(
            with_dashboard(DashboardFacts(URL, True, findings=ON_DASHBOARD)),
            "Connected with everything: chat, session history, skills, memory, config and scheduled jobs.",
            id="enhanced",
        ),
    ],
)
def test_sentence(seen: Picture, expected: str) -> None:
    assert summary_of(seen) == expected


# The messages


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "sessions",
            "Session history isn't available on this backend yet; the conversation lives in the client and is "
            "temporary.",
        ),
        ("memory", "Memory browser requires the memory API."),
        ("skills", "Skills browser requires the skills API."),
        ("config", "Settings editor requires the config API."),
        ("jobs", "Scheduled jobs require the jobs API."),
    ],
)
def test_message_of_a_missing_family(name: str, sentence: str) -> None:
    assert message_of(name, NO) == sentence


@pytest.mark.parametrize("name", [*CORE, *ENHANCED])
def test_each_capability_has_a_message_for_each_case(name: str) -> None:
    messages = [message_of(name, finding) for finding in (YES, NO, UNPROVEN)]

    assert len(set(messages)) == 3
    assert all(message.endswith(".") for message in messages)


@pytest.mark.parametrize(
    ("finding", "sentence"),
    [
        (NO, "The backend has no health route; chat does not need one."),
        (DOWN, "The backend does not answer."),
        (Finding(False, "probe", Cause.FAILED, "503", "/health", 503), "The backend says that it is not well."),
    ],
    ids=["no-route", "down", "503"],
)
def test_message_of_a_health_that_is_not_there(finding: Finding, sentence: str) -> None:
    assert message_of("health", finding) == sentence


# The next step on this very set-up


START_GATEWAY = "Start the gateway (hermes gateway run), or correct gateway.url."
GIVE_KEY = "Give the sidecar the gateway's key (gateway.token_file)."
WRONG_KEY = "The gateway refuses the key that the sidecar has; put the right one into gateway.token_file."
START_DASHBOARD = "Start the dashboard (hermes dashboard) and set dashboard.url."
HERMES = "Put hermes-agent's gateway behind the sidecar; chat works without it."
TROUBLE = "dashboard.url answers, but not with the Hermes dashboard's page; correct dashboard.url."


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        pytest.param("memory", Picture(GatewayFacts(False), probed_at=1.0), START_GATEWAY, id="gateway-down"),
        pytest.param("chatCompletions", Picture(GatewayFacts(False)), START_GATEWAY, id="gateway-down-chat"),
        pytest.param("memory", picture(ALONE), START_DASHBOARD, id="no-dashboard"),
        pytest.param(
            "memory",
            with_dashboard(DashboardFacts(URL, False)),
            "Start the dashboard (hermes dashboard): nothing that answers is at dashboard.url.",
            id="dashboard-down",
        ),
        pytest.param("memory", with_dashboard(DashboardFacts(URL, True, trouble=TROUBLE)), TROUBLE, id="no-dashboard"),
        pytest.param(
            "memory",
            with_dashboard(DashboardFacts(URL, True, findings={"memory": NO})),
            "Upgrade hermes-agent: this dashboard does not serve it.",
            id="old-dashboard",
        ),
        pytest.param(
            "sessions",
            replace(with_dashboard(DashboardFacts(URL, True, findings=ON_DASHBOARD), ALONE | {"sessions": NO})),
            'The dashboard has it: add "sessions" to dashboard.fill.',
            id="not-filled",
        ),
        pytest.param("sessions", picture(ALONE | {"sessions": NO}), "Upgrade hermes-agent: newer gateways serve it"
                     " themselves.", id="old-gateway"),
        pytest.param("sessions", picture(WITHOUT_KEY, has_token=False), GIVE_KEY, id="no-key"),
        pytest.param("sessions", picture(WITHOUT_KEY, has_token=True), WRONG_KEY, id="wrong-key"),
        pytest.param("models", picture({"models": LOCKED}, has_token=False), GIVE_KEY, id="no-key-for-models"),
        pytest.param("memory", picture({"memory": NO}, kind="ollama"), HERMES, id="another-backend"),
        pytest.param("memory", picture({"memory": LOCKED}, kind="generic", has_token=False), GIVE_KEY, id="C5"),
        pytest.param(
            "sessions",
            picture({"sessions": LOCKED}, kind="hermes-dashboard"),
            "Point gateway.url to the gateway's port (8642), and dashboard.url to this one.",
            id="dashboard-as-gateway",
        ),
        pytest.param("images", picture({"images": NO}), "Use a model that can.", id="images"),
        pytest.param("images", picture({"images": UNPROVEN}), None, id="images-not-known"),
        pytest.param("streaming", picture({}), None, id="streaming-not-known"),
        pytest.param("health", picture({"health": NO}), None, id="health"),
        pytest.param(
            "chatCompletions",
            picture({"chatCompletions": NO}, kind="generic"),
            "Point gateway.url to hermes-agent's gateway or to an OpenAI-compatible backend.",
            id="no-chat",
        ),
    ],
)  # fmt: skip
def test_next_step(name: str, seen: Picture, expected: str | None) -> None:
    assert unlock_of(name, seen) == expected


@pytest.mark.parametrize("name", [*CORE, *ENHANCED])
def test_what_is_there_needs_no_next_step(name: str) -> None:
    assert unlock_of(name, picture({name: YES})) is None


# What the relay answers and where it goes


def test_missing_families_of_a_gateway_alone() -> None:
    assert missing_families(picture(ALONE)) == {
        "memory": (message_of("memory", NO), START_DASHBOARD),
        "config": (message_of("config", NO), START_DASHBOARD),
        "skills": (
            "This gateway serves its skills at /v1/skills, not at /api/skills.",
            "Ask for /v1/skills, or set dashboard.url: the dashboard serves /api/skills.",
        ),
    }


def test_family_that_asks_for_a_key_is_not_missing() -> None:
    """The client may have one: its request goes to the gateway, and the gateway's 401 comes back."""
    assert set(missing_families(picture(WITHOUT_KEY))) == {"memory", "config", "skills"}


def test_nothing_is_missing_on_a_gateway_that_could_not_be_asked() -> None:
    assert missing_families(Picture(GatewayFacts(False, findings={"memory": NO}), probed_at=1.0)) == {}
    assert missing_families(Picture()) == {}


def test_dashboard_fills_what_the_gateway_lacks_and_no_more() -> None:
    seen = with_dashboard(DashboardFacts(URL, True, findings=ON_DASHBOARD))

    assert filled_families(seen) == {"skills", "memory", "config"}
    assert missing_families(seen) == {}
    assert status_of(seen) == "enhanced"
    assert [seen.finding(name).served_by for name in ENHANCED] == [
        "gateway", "gateway", "dashboard", "dashboard", "gateway",
    ]  # fmt: skip


def test_dashboard_fills_nothing_that_only_asks_for_a_key() -> None:
    locked = picture(dict.fromkeys(ENHANCED, LOCKED) | {"chatCompletions": YES}, kind="generic")
    seen = replace(
        locked,
        gateway=replace(locked.gateway, has_api_skills=None),
        dashboard=DashboardFacts(URL, True, findings=ON_DASHBOARD),
        fill=FILL,
    )

    assert filled_families(seen) == frozenset()
    assert [seen.finding(name).available for name in ENHANCED] == [None] * 5


def test_what_was_never_asked_is_neither_missing_nor_filled() -> None:
    seen = replace(picture({}), gateway=GatewayFacts(True), fill=FILL, dashboard=DashboardFacts(URL, findings={}))

    assert (missing_families(seen), filled_families(seen)) == ({}, frozenset())
    assert seen.finding("memory") == NOT_ASKED
