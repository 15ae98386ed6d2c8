"""The metrics: cells that agree with Prometheus's own client, a text that its parsers read, and closed labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sidecar import __version__, faults
from sidecar.capabilities.model import CORE, ENHANCED, STATUSES, Cause, Finding, GatewayFacts, Picture
from sidecar.faults import Fault, FaultCode
from sidecar.relay.routes import ROUTE_NAMES
from sidecar.telemetry.cells import METHODS, OUTCOMES, STREAM_ENDS, UPSTREAM_ERRORS, Histogram
from sidecar.telemetry.metrics import PROBE_FAILURES, Activity, Metrics
from sidecar.telemetry.record import End, ExchangeRecord

SOURCES = ["client", "header:x-hermes-session-key", "none", "skipped"]
PREFIX = "hermes_sidecar_"
CONTRACT = {
    "requests_total": {"route", "method", "code"},
    "request_duration_seconds": {"route"},
    "time_to_first_byte_seconds": {"route"},
    "time_to_first_token_seconds": set(),
    "inter_event_seconds": set(),
    "active_requests": {"route"},
    "active_streams": set(),
    "relayed_bytes_total": {"direction"},
    "stream_ends_total": {"reason"},
    "upstream_errors_total": {"kind"},
    "session_mappings_total": {"source", "outcome"},
    "session_rotations_total": set(),
    "tokens_total": {"type"},
    "capability": {"name", "layer"},
    "status": {"status"},
    "probe_duration_seconds": set(),
    "probe_failures_total": {"kind"},
    "store_errors_total": set(),
    "build_info": {"version"},
}
"""Every metric that is promised, with its labels."""
BESIDES: dict[str, set[str]] = {"draining": set()}
"""What an alert needs beyond that."""
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)

CHAT = ExchangeRecord(
    method=b"POST",
    route="chat_completions",
    status=200,
    end="complete",
    source="header:x-hermes-session-key",
    session_id=b"s",
    request_id=b"r",
    first_byte_s=0.2,
    duration_s=90.0,
    answer_bytes=1000,
    fault=None,
    is_stream=True,
    first_token_s=7.0,
    request_bytes=50,
    usage={"prompt": 12, "completion": 345},
)


def parse_openmetrics(text: str) -> list[Metric]:
    return list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def metrics() -> Metrics:
    return Metrics(ROUTE_NAMES, SOURCES)


def families(told: Metrics) -> Iterable[Metric]:
    text, _ = told.exposition("")
    found: list[Metric] = list(parse_text(text.decode()))
    return found


def value(told: Metrics, metric: str, /, **labels: str) -> float | None:
    """One sample by its full name; None where there is no such series."""
    for family in families(told):
        for sample in family.samples:
            if sample.name == PREFIX + metric and sample.labels == labels:
                return float(sample.value)
    return None


def after(*records: ExchangeRecord) -> Metrics:
    told = metrics()
    for record in records:
        told.exchange_ended(record)
    return told


# --- Histograms ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.001, 0.5, 1.0, 2.0, 1800.0]) | st.floats(0, 4000), max_size=40),
    st.integers(1, 3),
)
def test_cells_agree_with_prometheus_own_histogram(seconds: list[float], times: int) -> None:
    """For any observations, those on a bucket's very border included: the same samples."""
    bounds = (0.001, 0.5, 1, 2, 1800)
    registry = CollectorRegistry()
    theirs = TheirHistogram("x", "x", registry=registry, buckets=bounds)
    ours = Histogram(bounds)

    for second in seconds:
        ours.observe(second, times)
        for _ in range(times):
            theirs.observe(second)

    (family,) = registry.collect()
    expected = {sample.labels["le"]: sample.value for sample in family.samples if sample.name == "x_bucket"}
    assert dict(ours.buckets()) == expected
    (total,) = [sample.value for sample in family.samples if sample.name == "x_sum"]
    assert ours.total == pytest.approx(total)


@pytest.mark.parametrize(
    "name",
    [name for name in CONTRACT if name.endswith("_seconds")],
    ids=[n for n in CONTRACT if n.endswith("_seconds")],
)
def test_buckets_reach_half_an_hour(name: str) -> None:
    (family,) = [family for family in families(after(CHAT)) if family.name == PREFIX + name]
    bounds = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}

    assert {1800.0, float("inf")} <= bounds
    assert min(bounds) <= 0.005


# --- The text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accept",
    [
        pytest.param("", id="none"),
        pytest.param("*/*", id="anything"),
        pytest.param("text/plain", id="text"),
        pytest.param("text/html,application/xhtml+xml,*/*;q=0.8", id="a-browser"),
    ],
)
def test_text_is_for_all_who_do_not_ask_for_openmetrics(accept: str) -> None:
    text, content_type = after(CHAT).exposition(accept)

    assert content_type.startswith("text/plain; version=0.0.4")
    assert content_type.count("charset=utf-8") == content_type.count("version=") == 1
    assert b"# EOF" not in text
    assert {PREFIX + name.removesuffix("_total") for name in CONTRACT} <= {f.name for f in parse_text(text.decode())}


def test_openmetrics_is_for_those_who_ask() -> None:
    text, content_type = after(CHAT).exposition(PROMETHEUS_ACCEPT)

    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert content_type.count("charset=utf-8") == content_type.count("version=") == 1
    assert text.endswith(b"# EOF\n")
    assert {PREFIX + name.removesuffix("_total") for name in CONTRACT} <= {
        family.name for family in parse_openmetrics(text.decode())
    }


def test_both_texts_hold_the_same_samples() -> None:
    told = after(CHAT, replace(CHAT, end="client_left"))

    def samples(parse: Callable[[str], Iterable[Metric]], accept: str) -> set[tuple[str, str, float]]:
        found = parse(told.exposition(accept)[0].decode())
        return {
            (sample.name, str(sorted(sample.labels.items())), float(sample.value))
            for family in found
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }

    assert samples(parse_text, "") == samples(parse_openmetrics, PROMETHEUS_ACCEPT)


def test_every_metric_that_is_promised_is_there_with_its_labels_and_no_other() -> None:
    found: dict[str, set[str]] = {}
    for family in families(after(CHAT)):
        if family.name.startswith(PREFIX):
            assert family.documentation
            name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
            found[name] = {label for sample in family.samples for label in sample.labels} - {"le"}

    assert found == CONTRACT | BESIDES


def test_metrics_of_the_process_stand_beside_them() -> None:
    names = {family.name for family in families(metrics())}

    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= names


# --- What a record counts as -----------------------------------------------------------------------------------------


def test_one_streamed_chat() -> None:
    told = after(CHAT)

    assert value(told, "requests_total", route="chat_completions", method="POST", code="200") == 1
    assert value(told, "request_duration_seconds_sum", route="chat_completions") == 90.0
    assert value(told, "time_to_first_byte_seconds_sum", route="chat_completions") == 0.2
    assert value(told, "time_to_first_token_seconds_sum") == 7.0
    assert value(told, "stream_ends_total", reason="complete") == 1
    assert value(told, "relayed_bytes_total", direction="upstream") == 50
    assert value(told, "relayed_bytes_total", direction="downstream") == 1000
    assert value(told, "tokens_total", type="prompt") == 12
    assert value(told, "tokens_total", type="completion") == 345
    assert value(told, "session_mappings_total", source="header:x-hermes-session-key", outcome="mapped") == 1


def test_no_answer_at_all_has_a_code_of_its_own_and_no_first_byte() -> None:
    told = after(replace(CHAT, status=0, end="client_left", first_byte_s=None, first_token_s=None, is_stream=False))

    assert value(told, "requests_total", route="chat_completions", method="POST", code="none") == 1
    assert value(told, "time_to_first_byte_seconds_count", route="chat_completions") == 0
    assert value(told, "time_to_first_token_seconds_count") == 0
    assert [value(told, "stream_ends_total", reason=reason) for reason in STREAM_ENDS] == [0] * len(STREAM_ENDS)


UNREACHABLE = faults.upstream_unreachable("http://127.0.0.1:8642", "connection refused")


@pytest.mark.parametrize(
    ("end", "fault", "kind"),
    [
        pytest.param("upstream_broke", UNREACHABLE, "unreachable", id="unreachable"),
        pytest.param("upstream_broke", faults.upstream_protocol_error("it", "why"), "protocol_error", id="rubbish"),
        pytest.param("timeout", faults.upstream_timeout("it", 5.0), "timeout", id="no-answer-in-time"),
        pytest.param("timeout", None, "timeout", id="silent-in-the-middle"),
        pytest.param("upstream_broke", None, "broke", id="broken-in-the-middle"),
        pytest.param("client_left", None, None, id="client-left"),
        pytest.param("refused", faults.host_not_allowed(), None, id="refused"),
        pytest.param("complete", None, None, id="complete"),
    ],
)
def test_upstream_errors_by_kind(end: End, fault: Fault | None, kind: str | None) -> None:
    told = after(replace(CHAT, end=end, fault=fault))

    counts = {known: value(told, "upstream_errors_total", kind=known) for known in UPSTREAM_ERRORS}

    assert counts == {known: int(known == kind) for known in UPSTREAM_ERRORS}


@pytest.mark.parametrize(
    ("changes", "source", "outcome"),
    [
        pytest.param({}, "header:x-hermes-session-key", "mapped", id="mapped"),
        pytest.param({"is_derived": True}, "header:x-hermes-session-key", "derived", id="derived"),
        pytest.param({"is_followed": True}, "header:x-hermes-session-key", "followed", id="followed"),
        pytest.param({"source": "none", "session_id": None}, "none", "none", id="no-key"),
        pytest.param({"source": "skipped", "session_id": None}, "skipped", "none", id="side-task"),
        pytest.param({"source": "none", "session_id": None, "is_unread": True}, "none", "unread", id="body-unread"),
        pytest.param(
            {"end": "refused", "fault": faults.invalid_session_key(), "source": "none", "session_id": None},
            "none",
            "refused",
            id="two-keys-in-one-header",
        ),
    ],
)
def test_mappings_by_source_and_outcome(changes: dict[str, Any], source: str, outcome: str) -> None:
    told = after(replace(CHAT, **changes))

    assert value(told, "session_mappings_total", source=source, outcome=outcome) == 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"end": "refused", "fault": faults.host_not_allowed(), "request_id": b""}, id="stopped-at-the-door"
        ),
        pytest.param({"end": "refused", "fault": faults.expectation_failed()}, id="refused-before-the-mapping"),
        pytest.param({"method": b"OPTIONS", "status": 204, "request_id": b""}, id="preflight"),
        pytest.param({"destination": "own", "route": "own"}, id="own-page"),
        pytest.param({"destination": "dashboard", "route": "memory"}, id="dashboard"),
    ],
)
def test_what_the_mapping_never_saw_is_no_mapping(changes: dict[str, Any]) -> None:
    told = after(replace(CHAT, source="none", session_id=None, **changes))
    counted = [s.value for f in families(told) if "session_mappings" in f.name for s in f.samples]

    assert sum(counted) == 0


def test_own_pages_are_not_relayed() -> None:
    told = after(replace(CHAT, destination="own", route="own"))

    assert value(told, "relayed_bytes_total", direction="downstream") == 0
    assert value(told, "requests_total", route="own", method="POST", code="200") == 1


# --- Now -------------------------------------------------------------------------------------------------------------


def test_gauges_are_what_is_going_on_at_the_scrape() -> None:
    told = metrics()
    now = Activity()
    now.requests.update({"chat_completions": 3, "own": 1})
    now.streams, now.bytes_up, now.bytes_down, now.is_draining = 2, 10, 20, True
    told.activity = lambda: now

    assert value(told, "active_requests", route="chat_completions") == 3
    assert value(told, "active_requests", route="own") is None  # the scrape itself
    assert value(told, "active_streams") == 2
    assert value(told, "draining") == 1
    assert value(told, "relayed_bytes_total", direction="upstream") == 10
    assert value(told, "relayed_bytes_total", direction="downstream") == 20


def found(name: str, available: bool | None) -> tuple[str, Finding]:
    return name, Finding(available, "probe", Cause.PRESENT if available else Cause.NO_ROUTE, "told")


def test_capabilities_and_status_follow_the_picture() -> None:
    told = metrics()
    assert {value(told, "capability", name=name, layer="core") for name in CORE} == {-1}
    assert value(told, "status", status="disconnected") == 1

    facts = GatewayFacts(
        reachable=True,
        kind="hermes-agent",
        findings=dict([found("chatCompletions", True), found("sessions", True), found("memory", False)]),
    )
    told.picture = lambda: replace(Picture(), gateway=facts, probed_at=1.0)

    assert value(told, "capability", name="chatCompletions", layer="core") == 1
    assert value(told, "capability", name="images", layer="core") == -1
    assert {name: value(told, "capability", name=name, layer="enhanced") for name in ENHANCED} == {
        "sessions": 1,
        "skills": -1,
        "memory": 0,
        "config": -1,
        "jobs": -1,
    }
    assert [value(told, "status", status=status) for status in STATUSES] == [0, 1, 0, 0]


def test_probes_and_their_failures() -> None:
    told = metrics()
    told.probe_ended(0.02, None)
    for kind in PROBE_FAILURES:
        told.probe_ended(3.0, kind)

    assert value(told, "probe_duration_seconds_count") == 1 + len(PROBE_FAILURES)
    assert [value(told, "probe_failures_total", kind=kind) for kind in PROBE_FAILURES] == [1] * len(PROBE_FAILURES)


def test_version_is_told() -> None:
    assert value(metrics(), "build_info", version=__version__) == 1


# --- Closed labels ---------------------------------------------------------------------------------------------------

CODES = {"none", "other", *map(str, range(100, 600))}
CLOSED = {
    "route": set(ROUTE_NAMES),
    "method": {*METHODS, "other"},
    "code": CODES,
    "direction": {"upstream", "downstream"},
    "reason": set(STREAM_ENDS),
    "kind": {*UPSTREAM_ERRORS, *PROBE_FAILURES},
    "source": set(SOURCES),
    "outcome": set(OUTCOMES),
    "type": {"prompt", "completion"},
    "name": {*CORE, *ENHANCED},
    "layer": {"core", "enhanced"},
    "status": set(STATUSES),
    "version": {__version__},
}

RECORDS = st.builds(
    ExchangeRecord,
    method=st.binary(max_size=20) | st.sampled_from([method.encode() for method in METHODS]),
    route=st.sampled_from(ROUTE_NAMES),
    status=st.integers(0, 999),
    end=st.sampled_from(get_args(End)),
    source=st.sampled_from(SOURCES),
    session_id=st.none() | st.binary(max_size=20),
    request_id=st.binary(max_size=20),
    first_byte_s=st.none() | st.floats(0, 1e6),
    duration_s=st.floats(0, 1e6),
    answer_bytes=st.integers(0, 2**40),
    fault=st.none() | st.builds(Fault, st.sampled_from(FaultCode), st.just("m"), st.just("h")),
    destination=st.sampled_from(["gateway", "dashboard", "own"]),
    is_derived=st.booleans(),
    is_stream=st.booleans(),
    first_token_s=st.none() | st.floats(0, 1e6),
    request_bytes=st.integers(0, 2**40),
    usage=st.dictionaries(st.sampled_from(["prompt", "completion"]), st.integers(0, 10**12)),
    traceparent=st.none() | st.binary(max_size=60),
    is_followed=st.booleans(),
)


@given(st.lists(RECORDS, max_size=8))
def test_labels_are_closed_whatever_clients_send(records: list[ExchangeRecord]) -> None:
    """For any exchanges: every label value stands in its list, and each request is counted once."""
    told = after(*records)

    counted = 0.0
    for family in families(told):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                for label, said in sample.labels.items():
                    assert label == "le" or said in CLOSED[label], (sample.name, label, said)
            if sample.name == f"{PREFIX}requests_total":
                counted += sample.value
    assert counted == len(records)
