"""A real Prometheus scrapes a running sidecar, and its own tools judge what this project ships for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.prometheus import Prometheus, prometheus
from tests.support.raw_client import JSON, STREAMED_CHAT, ask, raw_client
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    chunk,
    clients_request,
    ok,
    scripted_upstream,
)
from tests.support.sidecar_process import SidecarProcess
from tests.support.tools import needed
from tests.support.wire import Gone

DEPLOY = Path(__file__).parents[2] / "deploy"
EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":345}}\n\n'
RATE_INTERVAL = "4s"
LIMIT_S = 20.0
TOKEN = "a-client-token-of-the-test"
BEARER = f"Authorization: Bearer {TOKEN}".encode()

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


# --- Running --------------------------------------------------------------------------------------------------------


async def gateway(connection: Connection) -> None:
    """Streams, answers, or breaks off, as the client's request says."""
    while True:
        request = await clients_request(connection)
        if request.values("X-Break"):
            connection.write(STREAM_HEAD + chunk(EVENT))
            connection.close()
            return
        if b'"stream":true' in request.body:
            connection.write(STREAM_HEAD + chunk(EVENT))
            await asyncio.sleep(0.01)
            connection.write(chunk(EVENT) + chunk(USAGE) + LAST_CHUNK)
        else:
            connection.write(ok())


async def traffic(url: str) -> None:
    """A little of everything, again and again."""
    number = 0
    while True:
        number += 1
        for fields in (
            (b"X-Hermes-Session-Key: k%d" % number,),
            (b"X-Hermes-Session-Key: a/b",),
            (b"X-Hermes-Session-Id: s",),
            (b"X-OpenWebUI-Task: title",),
            (b"X-Break: 1",),
            (),
        ):
            with suppress(Gone, TimeoutError):
                await ask(url, "POST", "/v1/chat/completions", JSON, BEARER, *fields, body=STREAMED_CHAT)
        await ask(url, "GET", "/v1/models", BEARER)
        async with raw_client(url) as leaving:
            leaving.write(leaving.request("POST", "/v1/chat/completions", JSON, BEARER, body=STREAMED_CHAT))
        await asyncio.sleep(0.02)


def configured(home: Path, sidecar_url: str) -> Path:
    """The configuration that is shipped, for this sidecar, in a hurry, and with a client token."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for before, after in (
        ("127.0.0.1:8650", sidecar_url.removeprefix("http://")),
        ("15s", "200ms"),
        ("rules.yml", str(DEPLOY / "prometheus" / "rules.yml")),
        ("    # authorization:", "    authorization:"),
        ("    #   type: Bearer", "      type: Bearer"),
        ("    #   credentials_file: /etc/prometheus/hermes-sidecar.token", f"      credentials_file: {home / 'token'}"),
    ):
        assert before in text
        text = text.replace(before, after)
    (home / "token").write_text(TOKEN)
    path = home / "prometheus.yml"
    path.write_text(text)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Prometheus, SidecarProcess]]:
    """A Prometheus and the sidecar that it scrapes, while clients of all kinds come and go."""
    home = tmp_path_factory.mktemp("prometheus")
    tokens = home / "client-tokens"
    tokens.write_text(f"prometheus:{TOKEN}\n")
    tokens.chmod(0o600)
    settings = {"LISTEN__TOKENS_FILE": str(tokens), "PROBE__INTERVAL_S": "0.2", "PROBE__RETRY_S": "0.2"}
    async with (
        scripted_upstream(gateway, records=False) as upstream,
        await SidecarProcess.start(home, upstream.url, settings) as sidecar,
        prometheus(home, configured(home, sidecar.url)) as running,
    ):
        clients = asyncio.ensure_future(traffic(sidecar.url))
        yield running, sidecar
        assert not clients.done(), clients.exception()
        clients.cancel()
        await asyncio.gather(clients, return_exceptions=True)


async def until_there(running: Prometheus, expression: str) -> list[dict[str, Any]]:
    """The result of a query once it is not empty; empty when it stays so."""
    result: list[dict[str, Any]] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            while not (result := await running.query(expression)):
                await asyncio.sleep(0.1)
    return result


# --- What is shipped ------------------------------------------------------------------------------------------------


def promtool(*arguments: str | Path, given: bytes = b"") -> tuple[int, str]:
    """Exit code and everything that promtool said."""
    program = needed("promtool", package="prometheus")
    done = subprocess.run(
        [program, *arguments],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=50,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("check", "config", "prometheus.yml"), id="config"),
        pytest.param(("check", "rules", "rules.yml"), id="rules"),
        pytest.param(("test", "rules", "rules_test.yml"), id="unit-tests-of-the-rules"),
    ],
)
async def test_promtool_accepts_what_is_shipped(arguments: tuple[str, str, str]) -> None:
    *verbs, name = arguments
    code, said = promtool(*verbs, DEPLOY / "prometheus" / name)

    assert (code, "SUCCESS" in said, "FAILED" in said) == (0, True, False), said


async def test_promtool_accepts_the_configuration_with_a_token(tmp_path: Path) -> None:
    code, said = promtool("check", "config", configured(tmp_path, "http://127.0.0.1:8650"))

    assert code == 0, said


async def test_every_alert_is_played_through() -> None:
    alerts = {
        line.split(":")[1].strip()
        for line in (DEPLOY / "prometheus" / "rules.yml").read_text().splitlines()
        if "- alert:" in line
    }
    tests = (DEPLOY / "prometheus" / "rules_test.yml").read_text()
    fires = {
        part.split("\n")[0].strip()
        for part in tests.split("alertname:")[1:]
        if "exp_labels" in part.split("eval_time")[0]
    }

    assert fires == alerts
    assert len(alerts) >= 5


async def test_promtool_finds_no_fault_in_the_metrics(watched: tuple[Prometheus, SidecarProcess]) -> None:
    _, sidecar = watched
    scraped = await ask(sidecar.url, "GET", "/metrics", BEARER)

    assert promtool("check", "metrics", given=scraped.body) == (0, "")


# --- What Prometheus sees -------------------------------------------------------------------------------------------


async def test_target_is_up_with_its_token_and_the_series_are_there(watched: tuple[Prometheus, SidecarProcess]) -> None:
    running, sidecar = watched
    up = await until_there(running, 'up{job="hermes-sidecar"} == 1')
    chats = await until_there(running, 'hermes_sidecar_requests_total{route="chat_completions", code="200"} > 0')
    (target,) = (await running.get("targets"))["activeTargets"]

    assert [sample["metric"]["instance"] for sample in up] == [sidecar.url.removeprefix("http://")]
    assert len(chats) == 1
    assert (target["health"], target["lastError"]) == ("up", "")


def queries_of(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for panel in panels:
        for target in panel.get("targets", []):
            yield f"{panel['title']} {target['refId']}", target["expr"]


DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "hermes-sidecar.json").read_text())
QUERIES = dict(queries_of(DASHBOARD["panels"]))


@pytest.mark.parametrize("expression", QUERIES.values(), ids=QUERIES.keys())
async def test_query_of_the_dashboard_returns_data(expression: str, watched: tuple[Prometheus, SidecarProcess]) -> None:
    """Grafana fills in the variables; here the test does."""
    running, _ = watched
    for name, value in (
        ("$job", "hermes-sidecar"),
        ("$instance", ".*"),
        ("$__rate_interval", RATE_INTERVAL),
        ("$__range", "1m"),
    ):
        expression = expression.replace(name, value)
    assert "$" not in expression

    assert await until_there(running, expression)


async def test_dashboard_asks_for_metrics_that_exist_and_shows_all_of_them(
    watched: tuple[Prometheus, SidecarProcess],
) -> None:
    running, _ = watched
    await until_there(running, "hermes_sidecar_build_info")
    known = [name for name in await running.get("label/__name__/values") if name.startswith("hermes_sidecar_")]
    asked = " ".join(QUERIES.values())

    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in known}
    assert {family for family in families if family not in asked} == set()


async def test_rules_run_and_each_expression_is_understood(watched: tuple[Prometheus, SidecarProcess]) -> None:
    running, _ = watched
    async with asyncio.timeout(LIMIT_S):
        while True:
            rules = [rule for group in (await running.get("rules"))["groups"] for rule in group["rules"]]
            if rules and all(rule["health"] != "unknown" for rule in rules):
                break
            await asyncio.sleep(0.1)

    assert {rule["name"]: rule["health"] for rule in rules} == {rule["name"]: "ok" for rule in rules}
    for rule in rules:
        for sample in await running.query(rule["query"]):
            assert sample["metric"]["job"] == "hermes-sidecar"
