"""The pages on metrics and logs say what the code does: every metric, label value, bucket, key and event."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar import config, faults
from sidecar.capabilities.model import CORE, ENHANCED, STATUSES
from sidecar.relay.routes import ROUTE_NAMES
from sidecar.telemetry.cells import METHODS, OUTCOMES, STREAM_ENDS, UPSTREAM_ERRORS
from sidecar.telemetry.lines import line_of
from sidecar.telemetry.metrics import PROBE_FAILURES, Metrics
from sidecar.telemetry.record import ExchangeRecord
from tests.support.documents import ROOT, pages, rows_of, text_of

PREFIX = "hermes_sidecar_"
METRICS, LOGS = "docs/reference/metrics.md", "docs/reference/logs.md"
RECORD = ExchangeRecord(
    method=b"POST",
    route="chat_completions",
    status=200,
    end="complete",
    source="client",
    session_id=b"s",
    request_id=b"r",
    first_byte_s=0.1,
    duration_s=1.0,
    answer_bytes=1,
    fault=faults.upstream_unreachable("it", "why", detail="errno"),
    is_stream=True,
    first_token_s=0.5,
    traceparent=b"00-0-0-00",
)


def families() -> dict[str, tuple[str, set[str], set[str]]]:
    """Type, labels and bounds of each of the sidecar's metrics, by its name as a query has it."""
    told = Metrics(ROUTE_NAMES, ["client", "none", "skipped"])
    told.exchange_ended(RECORD)
    found = {}
    for family in text_string_to_metric_families(told.exposition("")[0].decode()):
        if family.name.startswith(PREFIX):
            name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels}
            bounds = {sample.labels["le"] for sample in family.samples if "le" in sample.labels} - {"+Inf"}
            found[name] = (family.type, labels - {"le"}, bounds)
    return found


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.+?)(?=^## |\Z)", text_of(page), re.DOTALL | re.MULTILINE)
    assert found is not None, f"{page} has no section {heading}"
    return found[1]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_every_metric_stands_there_with_its_type_and_labels_and_no_other() -> None:
    rows = [row for row in rows_of(text_of(METRICS)) if len(row) == 4]
    told = {names_in(name)[0]: (kind, set(names_in(labels))) for name, kind, labels, _ in rows}

    assert told == {name: (kind, labels) for name, (kind, labels, _) in families().items()}
    assert all(says for _, _, _, says in rows)


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("route", {*ROUTE_NAMES}),
        ("method", {*METHODS, "other"}),
        ("code", {"none", "other"}),
        ("direction", {"upstream", "downstream"}),
        ("reason", {*STREAM_ENDS}),
        ("type", {"prompt", "completion"}),
        ("status", {*STATUSES}),
        ("layer", {"core", "enhanced"}),
        ("name", {*CORE, *ENHANCED}),
        ("kind", {*UPSTREAM_ERRORS, *PROBE_FAILURES}),
        ("source", {"client", "none", "skipped"}),
        ("outcome", {*OUTCOMES}),
    ],
)
def test_every_label_value_stands_there(label: str, values: set[str]) -> None:
    (row,) = [row for row in rows_of(section(METRICS, "Label values")) if names_in(row[0]) == [label]]

    assert values <= set(names_in(row[1]))


def test_every_label_has_its_list() -> None:
    listed = {names_in(row[0])[0] for row in rows_of(section(METRICS, "Label values"))}

    assert listed | {"version"} == {label for _, labels, _ in families().values() for label in labels}


def test_buckets_are_those_of_the_page() -> None:
    told = {
        name: {str(float(bound)) for bound in bounds.split(", ")}
        for names, bounds in rows_of(section(METRICS, "Buckets"))
        for name in names_in(names)
    }

    assert told == {name: bounds for name, (kind, _, bounds) in families().items() if kind == "histogram"}


def test_default_sources_are_such_label_values_as_the_page_says() -> None:
    assert all(re.fullmatch(r"(header|body):\S+", source.place) for source in config.Settings().session.sources)


# --- Logs ------------------------------------------------------------------------------------------------------------


def test_every_key_of_an_exchange_stands_there_and_no_other() -> None:
    rows = rows_of(section(LOGS, "One line for each exchange"))

    assert {name for row in rows for name in names_in(row[0])} == set(line_of(RECORD)) - {"event"}


def events() -> Iterator[str]:
    """The event names in the code: first argument of a log call, or the value of a key `event`."""
    for path in (ROOT / "sidecar").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and node.args and _logs(node.func):
                (name,) = [node.args[0]]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant):
                        yield str(value.value)


def _logs(function: ast.expr) -> bool:
    """`log.info(…)`, `structlog.get_logger().info(…)`, or a choice between two such methods."""
    if isinstance(function, ast.IfExp):
        return _logs(function.body)
    return isinstance(function, ast.Attribute) and function.attr in ("debug", "info", "warning", "error")


def test_every_event_stands_there_and_no_other() -> None:
    listed = {names_in(row[0])[0] for row in rows_of(section(LOGS, "All events"))}

    assert listed == set(events())


# --- Files -----------------------------------------------------------------------------------------------------------


def test_files_to_deploy_that_pages_name_exist() -> None:
    named = {name.rstrip(".") for page in pages() for name in re.findall(r"\bdeploy/[\w./*-]+", text_of(page))}

    assert named
    assert {name for name in named if not list(ROOT.glob(name))} == set()
