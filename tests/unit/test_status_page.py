"""What the status page is made of: the filling of its HTML, the words and numbers, the figures behind them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.capabilities.model import Cause, DashboardFacts, Finding, GatewayFacts, Picture
from sidecar.surface.binding import Page
from sidecar.surface.plots import HEIGHT, WIDTH, bars
from sidecar.surface.view import Facts, address, duration, view
from sidecar.telemetry.figures import SAMPLES, Figures, Window
from sidecar.telemetry.lines import short_hash
from sidecar.telemetry.metrics import Activity, Metrics
from sidecar.telemetry.recent import Conversation, Recent
from sidecar.telemetry.record import ExchangeRecord

INDEX = (Path(__file__).parents[2] / "sidecar" / "surface" / "page" / "index.html").read_text("utf-8")
TEMPLATES = '<template id="row"><li data-attr="title:name"><b data-text="name"></b></li></template>'
CHAT = Finding(True, "observed", Cause.PRESENT, "a chat was answered", "/v1/chat/completions", 200, "gateway", 1.0)
MEMORY = Finding(False, "probe", Cause.NO_ROUTE, "there is no such route", "/api/memory", 404, None, 1.0)
PICTURE = Picture(
    GatewayFacts(True, "hermes-agent", "0.19.0", findings={"chatCompletions": CHAT, "memory": MEMORY}), probed_at=1.0
)
TURN = ExchangeRecord(
    method=b"POST",
    route="chat_completions",
    status=200,
    end="complete",
    source="header:x-hermes-session-key",
    session_id=b"a-chat",
    request_id=b"r",
    first_byte_s=0.1,
    duration_s=1.0,
    answer_bytes=1,
    fault=None,
)


def facts(**changes: Any) -> Facts:
    plain = Facts(
        picture=PICTURE,
        gateway_url="http://127.0.0.1:8642",
        relay_url="http://127.0.0.1:8650",
        has_relay_beside=True,
        workers=1,
        is_draining=False,
        started_at=0.0,
        window=Window([0], [None], None, 0),
        stream_ends={"complete": 0},
        turns_by_source={},
        conversations=[],
    )
    return plain._replace(**changes)


# The filling


@pytest.mark.parametrize(
    ("html", "filled"),
    [
        pytest.param('<p data-text="a.b"></p>', '<p data-text="a.b">&lt;i&gt; &amp; &quot;</p>', id="text-is-escaped"),
        pytest.param('<p data-text="gone"></p>', '<p data-text="gone"></p>', id="missing-text"),
        pytest.param(
            '<p data-text="a.gone" data-empty="none"></p>',
            '<p data-text="a.gone" data-empty="none">none</p>',
            id="empty",
        ),
        pytest.param('<p data-text="zero"></p>', '<p data-text="zero">0</p>', id="zero-is-a-value"),
        pytest.param(
            '<p data-attr="title:a.b lang:zero"></p>',
            '<p data-attr="title:a.b lang:zero" title="&lt;i&gt; &amp; &quot;" lang="0"></p>',
            id="attributes-are-escaped",
        ),
        pytest.param('<p data-when="zero">x</p>', '<p data-when="zero" hidden>x</p>', id="hidden"),
        pytest.param('<p data-when="a">x</p>', '<p data-when="a">x</p>', id="not-hidden"),
        pytest.param('<p id="i"\n  data-text="zero"></p>', '<p id="i"\n  data-text="zero">0</p>', id="over-two-lines"),
        pytest.param(
            '<ul data-each="list:row"></ul>' + TEMPLATES,
            '<ul data-each="list:row">'
            '<li data-attr="title:name" title="&lt;x&gt;"><b data-text="name">&lt;x&gt;</b></li>'
            '<li data-attr="title:name" title="y"><b data-text="name">y</b></li></ul>' + TEMPLATES,
            id="each-item-by-its-own-paths",
        ),
    ],
)
def test_values_go_where_the_page_says(html: str, filled: str) -> None:
    values = {"a": {"b": '<i> & "'}, "zero": 0, "list": [{"name": "<x>"}, {"name": "y"}]}

    assert Page(html).filled(values) == filled


def test_value_that_looks_like_a_place_is_not_filled_again() -> None:
    page = Page('<p data-text="a"></p><p data-text="b"></p>')

    assert '<p data-text="b">2</p>' in (filled := page.filled({"a": '<p data-text="b"></p>', "b": 2}))
    assert filled.count("2") == 1


def paths(html: str) -> set[str]:
    bound = re.findall(r'data-(text|when|each|attr)="([^"]+)"', html)
    found = set()
    for kind, value in bound:
        for part in value.split():
            found.add(part.partition(":")[0] if kind == "each" else part.rpartition(":")[2])
    return found


def exists(path: str, values: Any) -> bool:
    for key in path.split("."):
        if key not in values:
            return False
        values = values[key]
    return True


def test_every_place_on_the_page_has_its_value() -> None:
    conversation = ("0123abcd", Conversation("client", 1, False, 1.0))
    values = view(facts(conversations=[conversation], turns_by_source={"client": 1}))
    body, *templates = INDEX.split("<template")
    items = {"capability": "core.items", "share": "ends", "conversation": "conversations"}

    assert [path for path in sorted(paths(body)) if not exists(path, values)] == []
    for template in templates:
        name = template.split('"')[1]
        if name not in items:
            continue
        item: Any = values
        for key in items[name].split("."):
            item = item[key]
        assert [path for path in sorted(paths(template)) if not exists(path, item[0])] == [], name


def test_page_asks_nobody_else_and_works_below_a_prefix() -> None:
    addresses = re.findall(r'(?:href|src|action)="([^"]*)"', INDEX)

    assert addresses
    assert [address for address in addresses if re.match(r"/|[a-z]+:", address)] == []
    assert re.findall(r"<(?:style|script)>|\sstyle=|\son\w+=", INDEX) == []


# The words


@pytest.mark.parametrize(
    ("changes", "word", "sentence"),
    [
        pytest.param({}, "connected", "Connected in portable mode.", id="connected"),
        pytest.param({"is_draining": True}, "draining", "The sidecar is shutting down", id="draining"),
        pytest.param({"picture": Picture()}, "disconnected", "Not connected yet", id="before-the-first-probe"),
    ],
)
def test_status_word_and_sentence(changes: dict[str, Any], word: str, sentence: str) -> None:
    status = view(facts(**changes))["status"]

    assert (status["word"], status["title"]) == (word, word.capitalize())
    assert status["sentence"].startswith(sentence)


def test_capability_tells_answer_evidence_reason_message_and_next_step() -> None:
    items = {item["name"]: item for layer in ("core", "enhanced") for item in view(facts())[layer]["items"]}

    assert len(items) == 10
    assert items["chatCompletions"] == {
        "name": "chatCompletions",
        "title": "Chat",
        "answer": "yes",
        "words": "Yes",
        "message": "Chat works.",
        "evidence": "Observed: a chat was answered (/v1/chat/completions, status 200).",
        "unlock": None,
    }
    assert items["memory"] == {
        "name": "memory",
        "title": "Memory",
        "answer": "no",
        "words": "No",
        "message": "Memory browser requires the memory API.",
        "evidence": "Probe: there is no such route (/api/memory, status 404).",
        "unlock": "Start the dashboard (hermes dashboard) and set dashboard.url.",
    }
    assert (items["images"]["answer"], items["images"]["words"]) == ("unknown", "Not known")


def test_layer_is_summed_up() -> None:
    assert view(facts())["core"]["summary"] == "1 there, 4 not known"
    assert view(facts())["enhanced"]["summary"] == "1 missing, 4 not known"


def test_dashboard_that_serves_a_family_is_named() -> None:
    on_dashboard = replace(MEMORY, available=True, cause=Cause.PRESENT, served_by="dashboard", reason="it answers")
    dashboard = DashboardFacts("http://127.0.0.1:9119", True, "0.19.0", findings={"memory": on_dashboard})

    shown = view(facts(picture=replace(PICTURE, dashboard=dashboard, fill=("memory",))))

    assert shown["enhanced"]["items"][2]["evidence"].endswith("Served by the dashboard.")
    assert shown["dashboard"]["state"] == "Answers"
    assert shown["dashboard"]["hint"] is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0004, "0 ms"), (0.42, "420 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"), (99.96, "2 min"), (600.0, "10 min")],
)
def test_duration_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("bound", "reachable"),
    [
        ("http://127.0.0.1:8650", "http://127.0.0.1:8650"),
        ("http://0.0.0.0:8650", "http://127.0.0.1:8650"),
        ("http://[::]:8650", "http://[::1]:8650"),
        ("http://10.0.0.0:8650", "http://10.0.0.0:8650"),
        ("unix:/run/s.sock", "http://localhost"),
    ],
)
def test_address_that_a_client_can_use(bound: str, reachable: str) -> None:
    assert address(bound) == reachable


def test_page_apart_from_the_relay_sends_no_turns() -> None:
    apart = Page(INDEX).filled(view(facts(has_relay_beside=False)))
    beside = Page(INDEX).filled(view(facts()))

    assert '<div id="try-box" data-when="page.hasRelay" hidden>' in apart
    assert '<div id="try-box" data-when="page.hasRelay">' in beside


def test_page_of_a_worker_says_that_there_are_others() -> None:
    assert view(facts())["share"] is None
    assert view(facts(workers=4))["share"] == "Of one of 4 workers, the one that answered. /metrics adds them all up."


# The figures


def test_bars_stand_at_the_right_and_the_highest_is_full() -> None:
    assert bars([]) == ""
    assert bars([None, 0, None]) == ""
    assert bars([2, None, 4, 0.001]) == "M116.5 32V16M118.5 32V0M119.5 32V31"


def test_bars_drop_what_does_not_fit() -> None:
    path = bars([1.0] * (WIDTH + 5))

    assert path.count("M") == WIDTH
    assert path.startswith(f"M0.5 {HEIGHT}V0")


def streamed(metrics: Metrics, first_token_s: float | None) -> None:
    metrics.exchange_ended(replace(TURN, is_stream=True, first_token_s=first_token_s))


def test_window_tells_streams_and_first_tokens_since_the_latest_sample() -> None:
    metrics = Metrics(["chat_completions", "other"], ["client"])
    figures = Figures(metrics)
    running = Activity()
    running.streams = 2
    metrics.activity = lambda: running
    for seconds in (0.2, 0.4, None):
        streamed(metrics, seconds)

    window = figures.window()

    assert window.streams == [5]  # three that ended, two that run
    assert window.first_token_s == [pytest.approx(0.3)]
    assert window.mean_first_token_s == pytest.approx(0.3)
    assert window.running_streams == 2


async def test_samples_are_bounded_and_each_interval_has_its_own_streams() -> None:
    metrics = Metrics(["chat_completions", "other"], ["client"])
    figures = Figures(metrics)
    for count in range(SAMPLES + 10):
        for _ in range(count % 3):
            streamed(metrics, None)
        figures._take()
        figures.stop()

    window = figures.window()

    assert len(window.streams) == SAMPLES
    assert window.streams[-4:] == [(SAMPLES + 7) % 3, (SAMPLES + 8) % 3, (SAMPLES + 9) % 3, 0]
    assert window.mean_first_token_s is None


# The last conversations


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"method": b"GET"}, id="no-post"),
        pytest.param({"route": "models"}, id="no-turn"),
        pytest.param({"status": 502, "end": "upstream_broke"}, id="not-taken"),
    ],
)
def test_what_is_no_turn_counts_for_none(change: dict[str, Any]) -> None:
    recent = Recent()

    recent.exchange_ended(replace(TURN, **change))

    assert list(recent.newest_first()) == []
    assert recent.turns_by_source == Counter()


def test_turns_add_up_under_the_short_hash() -> None:
    recent = Recent()
    for record in (
        TURN,
        replace(TURN, session_id=b"another", source="client"),
        replace(TURN, is_followed=True),
        replace(TURN, session_id=None, source="none"),
    ):
        recent.exchange_ended(record)

    (first, followed), (second, plain) = recent.newest_first()

    assert (first, second) == (short_hash(b"a-chat"), short_hash(b"another"))
    assert (followed.turns, followed.is_followed, followed.source) == (2, True, "header:x-hermes-session-key")
    assert (plain.turns, plain.is_followed, plain.source) == (1, False, "client")
    assert recent.turns_by_source == {"header:x-hermes-session-key": 2, "client": 1, "none": 1}


def test_conversations_are_bounded_and_the_longest_unused_goes() -> None:
    recent = Recent(at_most=2)
    for session_id in (b"a", b"b", b"a", b"c"):
        recent.exchange_ended(replace(TURN, session_id=session_id))

    assert [session for session, _ in recent.newest_first()] == [short_hash(b"c"), short_hash(b"a")]
