"""Client tokens and the gateway's key, over real sockets: who is let in, whose key goes where, and who reads what."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.demo.gateway import DemoGateway
from tests.support.raw_client import JSON, STREAMED_CHAT, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, answering, chunk, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import Sidecar, relayed, running_sidecar

OK = ok()
GATEWAY_KEY = "gateway-key-1"
ORIGIN = "http://localhost:3000"
OWN_PAGES = ("/readyz", "/metrics", "/capabilities", "/sidecar/", "/sidecar/anything")


def bearer(token: str) -> bytes:
    return f"Authorization: Bearer {token}".encode()


def tokens_file(home: Path, *lines: str) -> str:
    path = home / "client-tokens"
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def is_turned_away(answer: Answer) -> bool:
    return (answer.status, answer.value("x-hermes-sidecar-error"), answer.value("www-authenticate")) == (
        401,
        "client_token_required",
        'Bearer realm="hermes-sidecar"',
    )


# Who is let in


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([], id="none"),
        pytest.param([bearer("wrong")], id="wrong"),
        pytest.param([bearer("client-token-")], id="longer"),
        pytest.param([bearer("client-toke")], id="shorter"),
        pytest.param([bearer("CLIENT-TOKEN")], id="other-case"),
        pytest.param([bearer("client-token client-token")], id="twice-in-a-line"),
        pytest.param([b"Authorization: client-token"], id="without-scheme"),
        pytest.param([b"Authorization: Basic Y2xpZW50LXRva2Vu"], id="basic"),
        pytest.param([b"Authorization: Bearer"], id="scheme-alone"),
        pytest.param([b"Authorization: Bearer  "], id="empty"),
        pytest.param([bearer(GATEWAY_KEY)], id="the-gateways-key"),
        pytest.param([bearer("client-token"), bearer("client-token")], id="two-lines"),
        pytest.param([bearer("client-token"), bearer("wrong")], id="right-and-wrong"),
        pytest.param([b"X-Authorization: Bearer client-token"], id="other-header"),
        pytest.param([b"Cookie: token=client-token"], id="cookie"),
        pytest.param([b"Authorization: Bearer \xe9"], id="byte-outside-ascii"),
    ],
)
async def test_client_without_its_token_is_turned_away_and_nothing_goes_upstream(
    fields: list[bytes], tmp_path: Path
) -> None:
    async with _guarded(tmp_path, "client-token") as (upstream_connections, sidecar):
        answers = [await chat(sidecar.url, *fields), await ask(sidecar.url, "GET", "/v1/models", *fields)]
        # The key may not be tried out in the query either.
        answers.append(await ask(sidecar.url, "GET", "/v1/models?token=client-token&access_token=client-token"))

        assert all(is_turned_away(answer) for answer in answers)
        assert all(b"client-token" not in answer.body.replace(b"listen.tokens_file", b"") for answer in answers)
        assert upstream_connections == []


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
async def test_client_token_is_taken_off_and_the_gateways_key_put_in_its_place(scheme: bytes, tmp_path: Path) -> None:
    async with relayed(
        OK, environ=_key(), listen={"tokens_file": tokens_file(tmp_path, "other-token", "ann:client-token")}
    ) as (upstream, sidecar):
        answer = await chat(sidecar.url, b"Authorization: %b client-token" % scheme)

        assert answer.status == 200
        assert upstream.only_request.values("authorization") == [f"Bearer {GATEWAY_KEY}".encode()]
        assert b"client-token" not in upstream.connections[0].received


async def test_client_token_is_taken_off_where_the_gateway_has_no_key(tmp_path: Path) -> None:
    async with relayed(OK, listen={"tokens_file": tokens_file(tmp_path, "client-token")}) as (upstream, sidecar):
        answer = await chat(sidecar.url, bearer("client-token"))

        assert answer.status == 200
        assert upstream.only_request.values("authorization") == []
        assert b"client-token" not in upstream.connections[0].received


async def test_only_liveness_and_preflights_need_no_token(tmp_path: Path) -> None:
    listen = {"tokens_file": tokens_file(tmp_path, "client-token"), "allowed_origins": [ORIGIN]}
    origin = f"Origin: {ORIGIN}".encode()

    async with relayed(OK, listen=listen) as (upstream, sidecar):
        alive = await ask(sidecar.url, "GET", "/healthz")
        preflight = await ask(sidecar.url, "OPTIONS", "/v1/models", origin, b"Access-Control-Request-Method: GET")
        options = await ask(sidecar.url, "OPTIONS", "/v1/models", origin)
        without = {path: await ask(sidecar.url, "GET", path) for path in (*OWN_PAGES, "/healthz/", "//healthz")}

        assert (alive.status, preflight.status) == (200, 204)
        assert is_turned_away(options)
        assert {path for path, answer in without.items() if not is_turned_away(answer)} == set()
        assert upstream.connections == []


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_open_path_is_open_only_where_it_is_the_sidecars_own(method: str, tmp_path: Path) -> None:
    """With a listener of their own for the sidecar's pages, /healthz on the other one is a path of the gateway's."""
    listen = {"tokens_file": tokens_file(tmp_path, "client-token")}
    admin = {"host": "127.0.0.1", "port": 0}

    async with relayed(OK, environ=_key(), listen=listen, admin=admin) as (upstream, sidecar):
        answer = await ask(sidecar.url, method, "/healthz")

        assert is_turned_away(answer)
        assert upstream.connections == []


async def test_all_own_pages_open_with_a_token(tmp_path: Path) -> None:
    async with relayed(OK, listen={"tokens_file": tokens_file(tmp_path, "client-token")}) as (_, sidecar):
        statuses = {path: (await ask(sidecar.url, "GET", path, bearer("client-token"))).status for path in OWN_PAGES}

        assert 401 not in statuses.values()
        assert (statuses["/readyz"], statuses["/sidecar/"]) == (200, 200)


async def test_websocket_needs_a_token_too(tmp_path: Path) -> None:
    upgrade = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: aaaa")

    async with relayed(OK, listen={"tokens_file": tokens_file(tmp_path, "client-token")}) as (upstream, sidecar):
        assert is_turned_away(await ask(sidecar.url, "GET", "/v1/live", *upgrade))
        assert upstream.connections == []


# Changing the tokens


async def test_sighup_reads_tokens_and_origins_again_and_leaves_running_streams_alone(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def gateway(connection: Connection) -> None:
        while True:
            request = await connection.request()
            if b'"stream":true' not in request.body:
                connection.write(OK)
                continue
            connection.write(STREAM_HEAD + chunk(b"data: one\n\n"))
            await go_on.wait()
            connection.write(chunk(b"data: two\n\n") + LAST_CHUNK)

    settings, file = _configured(tmp_path, "old-token", origins=["http://old.example"])
    async with (
        scripted_upstream(gateway) as upstream,
        await SidecarProcess.start(tmp_path / "home", upstream.url, settings) as sidecar,
        raw_client(sidecar.url) as streaming,
    ):
        streaming.write(
            streaming.request("POST", "/v1/chat/completions", JSON, bearer("old-token"), body=STREAMED_CHAT)
        )
        head = await streaming.head()
        await streaming.until(b"data: one\n\n")
        before = [(await chat(sidecar.url, bearer(token))).status for token in ("old-token", "new-token")]

        tokens_file(tmp_path, "# rotated", "new-token")
        file.write_text('[listen]\nallowed_origins = ["http://new.example"]\n')
        sidecar.send_signal(signal.SIGHUP)
        await sidecar.logged('"reloaded"')
        after = [(await chat(sidecar.url, bearer(token))).status for token in ("old-token", "new-token")]
        pages = [
            (await chat(sidecar.url, bearer("new-token"), f"Origin: {origin}".encode())).status
            for origin in ("http://old.example", "http://new.example")
        ]
        go_on.set()
        rest = await streaming.until(LAST_CHUNK)

        assert (before, after, pages) == ([200, 401], [401, 200], [403, 200])
        assert (head.status, b"data: two\n\n" in rest) == (200, True)
        assert "-token" not in sidecar.log


@pytest.mark.parametrize(
    ("tokens", "configuration", "reason"),
    [
        pytest.param(b"two tokens-in-a-line\n", "", "not one token", id="malformed-tokens"),
        pytest.param(b"", "", "holds no token", id="no-token-left"),
        pytest.param(None, "", "cannot be read", id="file-gone"),
        pytest.param(b"new-token\n", "[listen]\nallowed_origin = []\n", "allowed_origins", id="unknown-key"),
        pytest.param(b"new-token\n", "[listen\n", "TOML", id="broken-toml"),
    ],
)
async def test_broken_file_is_refused_in_words_and_the_old_one_stays(
    tokens: bytes | None, configuration: str, reason: str, tmp_path: Path
) -> None:
    settings, file = _configured(tmp_path, "old-token")
    async with (
        scripted_upstream(answering(OK)) as upstream,
        await SidecarProcess.start(tmp_path / "home", upstream.url, settings) as sidecar,
    ):
        path = Path(settings["LISTEN__TOKENS_FILE"])
        path.unlink() if tokens is None else path.write_bytes(tokens)
        file.write_text(configuration)
        sidecar.send_signal(signal.SIGHUP)
        await sidecar.logged("reload_refused")
        statuses = [(await chat(sidecar.url, bearer(token))).status for token in ("old-token", "new-token")]

        assert statuses == [200, 401]
        assert reason in sidecar.log
        assert '"reloaded"' not in sidecar.log
        assert "Traceback" not in sidecar.log
        assert "tokens-in-a-line" not in sidecar.log


async def test_requests_never_meet_a_moment_without_rules(tmp_path: Path) -> None:
    """Hundreds of requests while the file is read again and again: a client without a token never gets in."""
    settings, _ = _configured(tmp_path, "client-token")
    async with (
        scripted_upstream(answering(OK)) as upstream,
        await SidecarProcess.start(tmp_path / "home", upstream.url, settings) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        statuses = []
        for number in range(200):
            if number % 10 == 0:
                sidecar.send_signal(signal.SIGHUP)
            statuses.append((await client.ask("GET", "/v1/models")).status)

        assert set(statuses) == {401}
        assert [request for request in upstream.requests if not request.is_probe] == []


# The gateway's key


@pytest.mark.parametrize("place", ["file", "environment", "credentials-directory"])
async def test_gateway_key_comes_from_each_of_its_places(place: str, tmp_path: Path) -> None:
    settings: dict[str, str] = {}
    environ: dict[str, str] = {}
    if place == "file":
        (tmp_path / "key").write_text(GATEWAY_KEY + "\n")
        settings["GATEWAY__TOKEN_FILE"] = str(tmp_path / "key")
    elif place == "environment":
        settings["GATEWAY__TOKEN"] = GATEWAY_KEY
    else:
        (tmp_path / "credentials").mkdir()
        (tmp_path / "credentials" / "gateway-token").write_text(GATEWAY_KEY)
        environ["CREDENTIALS_DIRECTORY"] = str(tmp_path / "credentials")

    async with (
        scripted_upstream(OK) as upstream,
        await SidecarProcess.start(_home(tmp_path), upstream.url, settings, environ=environ) as sidecar,
    ):
        answer = await chat(sidecar.url)

        assert answer.status == 200
        (request,) = [request for request in upstream.requests if not request.is_probe]
        assert request.values("authorization") == [f"Bearer {GATEWAY_KEY}".encode()]
        assert GATEWAY_KEY not in sidecar.log
        assert GATEWAY_KEY.encode() not in b"".join(value for _, value in answer.fields) + answer.body


async def test_client_tokens_come_from_the_credentials_directory(tmp_path: Path) -> None:
    (tmp_path / "client-tokens").write_text("client-token\n")
    async with (
        scripted_upstream(OK) as upstream,
        await SidecarProcess.start(
            _home(tmp_path), upstream.url, environ={"CREDENTIALS_DIRECTORY": str(tmp_path)}
        ) as sidecar,
    ):
        statuses = [(await chat(sidecar.url, *fields)).status for fields in ([], [bearer("client-token")])]

        assert statuses == [401, 200]


async def test_key_never_goes_to_the_host_that_a_client_names() -> None:
    """Absolute targets, Host and forwarding fields cannot turn the request to another server."""
    async with scripted_upstream(OK) as elsewhere, relayed(OK, environ=_key()) as (upstream, sidecar):
        there = f"127.0.0.1:{elsewhere.port}"
        answers = [
            await ask(sidecar.url, "GET", f"http://{there}/v1/models"),
            await ask(sidecar.url, "GET", f"//{there}/v1/models"),
            await ask(sidecar.url, "GET", f"/v1/models?url=http://{there}/", f"X-Forwarded-Host: {there}".encode()),
            await ask(sidecar.url, "GET", f"/\\{there}/@{there}", f"Forwarded: host={there}".encode()),
        ]
        async with raw_client(sidecar.url) as client:
            client.host = there
            answers.append(await client.ask("GET", "/v1/models"))

        assert [answer.status for answer in answers] == [200] * 5
        assert elsewhere.connections == []
        assert {value for request in upstream.requests for value in request.values("host")} == {
            f"127.0.0.1:{upstream.port}".encode()
        }


# Clients kept apart

ANN, BOB = "ann-token", "bob-token"


@asynccontextmanager
async def _kept_apart(home: Path, **session: object) -> AsyncIterator[Sidecar]:
    """A gateway that remembers, with a key that neither of the two clients knows."""
    listen = {"tokens_file": tokens_file(home, f"alice:{ANN}", f"bob:{BOB}"), "isolate_clients": True}
    gateway = await DemoGateway.start(key=GATEWAY_KEY, word_delay_s=0)
    try:
        async with running_sidecar(gateway.url, environ=_key(), listen=listen, session=session) as sidecar:
            yield sidecar
    finally:
        await gateway.stop()


def said(what: str) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % what.encode()


async def test_two_clients_with_the_same_key_are_in_two_sessions(tmp_path: Path) -> None:
    async with _kept_apart(tmp_path) as sidecar:
        key = b"X-Hermes-Session-Key: work"
        alice = await chat(sidecar.url, bearer(ANN), key, body=said("my word is marble"))
        bob = await chat(sidecar.url, bearer(BOB), key, body=said("what is my word?"))
        again = await ask(sidecar.url, "GET", "/api/sessions/alice-work/messages", bearer(ANN))

        assert (alice.value("x-hermes-session-id"), bob.value("x-hermes-session-id")) == ("alice-work", "bob-work")
        assert (alice.value("x-hermes-session-key"), bob.value("x-hermes-session-key")) == ("work", "work")
        assert b"marble" not in bob.body
        assert (again.status, b"marble" in again.body, b"what is" in again.body) == (200, True, False)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([b"X-Hermes-Session-Key: work"], id="her-key"),
        pytest.param([b"X-Claude-Session-Key: work"], id="her-key-elsewhere"),
        pytest.param([b"X-Hermes-Session-Id: work"], id="her-own-id"),
        pytest.param([b"X-Hermes-Session-Id: alice-work"], id="her-full-id"),
        pytest.param([b"X-Claude-Session-Id: alice-work"], id="her-full-id-elsewhere"),
        pytest.param([b"X-Hermes-Session-Key: alice-work"], id="her-full-id-as-key"),
        pytest.param([b"X-Hermes-Session-Id: alice-work", b"X-OpenWebUI-Task: title"], id="as-a-side-task"),
        pytest.param([b"x_hermes_session_id: alice-work"], id="underscores"),
        pytest.param([b"X-Hermes-Session-Id: ../alice-work"], id="path"),
        pytest.param([b"Connection: x-hermes-session-id", b"X-Hermes-Session-Id: alice-work"], id="named-hop-by-hop"),
    ],
)
async def test_naming_anothers_session_opens_nothing(fields: list[bytes], tmp_path: Path) -> None:
    async with _kept_apart(tmp_path) as sidecar:
        await chat(sidecar.url, bearer(ANN), b"X-Hermes-Session-Key: work", body=said("my word is marble"))
        bob = await chat(sidecar.url, bearer(BOB), *fields, body=said("what is my word?"))
        hers = await ask(sidecar.url, "GET", "/api/sessions/alice-work/messages", bearer(ANN))

        assert b"marble" not in bob.body
        assert b"what is my word" not in hers.body
        assert (bob.value("x-hermes-session-id") or "") != "alice-work"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/api/sessions/alice-work/messages"),
        ("GET", "/api/sessions/alice-work"),
        ("DELETE", "/api/sessions/alice-work"),
        ("POST", "/api/sessions/alice-work/fork"),
        ("GET", "/api/sessions/%61lice-work/messages"),
        ("GET", "/api/sessions/alice%2Dwork/messages"),
        ("GET", "/api/sessions/bob-%2F..%2Falice-work/messages"),
        ("GET", "/api/sessions/bob-x/../alice-work/messages"),
        ("GET", "/api/sessions/bob-x/%2e%2e/alice-work/messages"),
        ("GET", "/api/sessions/bob-x%2f..%2f..%2fsessions/alice-work/messages"),
        ("GET", "/api/sessions/bob-%252e%252e%252falice-work/messages"),
        ("GET", "/api/sessions/bob-x/..%2falice-work/messages"),
        ("GET", "/api/sessions/./alice-work/messages"),
        ("GET", "//api/sessions/alice-work/messages"),
        ("GET", "/api//sessions/alice-work/messages"),
        ("GET", "/api/sessions//alice-work/messages"),
        ("GET", "/api/sessions/alice-work/messages/"),
        ("GET", "/API/sessions/alice-work/messages"),
        ("GET", "/api/sessions;a=b/alice-work/messages"),
        ("GET", "http://localhost/api/sessions/alice-work/messages"),
        ("GET", "/api/sessions"),
        ("GET", "/api/sessions/"),
        ("GET", "/api/sessions?limit=200"),
        ("GET", "/v1/chat/completions/../../api/sessions/alice-work/messages"),
        ("GET", "/v1/models/../../api/sessions/alice-work/messages"),
        ("GET", "/api/memory"),
        ("POST", "/v1/runs"),
        ("GET", "/v1/runs/run_1"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/sessions/alice-work"),
        ("POST", "/v1/chat/completions/"),
    ],
)
async def test_route_to_anothers_session_is_closed(method: str, target: str, tmp_path: Path) -> None:
    body = b'{"session_id":"alice-work","conversation":"alice-work","input":"hi"}' if method == "POST" else b""
    async with _kept_apart(tmp_path) as sidecar:
        await chat(sidecar.url, bearer(ANN), b"X-Hermes-Session-Key: work", body=said("my word is marble"))
        answer = await ask(sidecar.url, method, target, bearer(BOB), body=body)

        assert (answer.status, answer.value("x-hermes-sidecar-error")) == (404, "capability_unavailable")
        assert b"marble" not in answer.body
        assert b"alice" not in answer.body


async def test_own_session_stays_open_to_its_client(tmp_path: Path) -> None:
    async with _kept_apart(tmp_path) as sidecar:
        await chat(sidecar.url, bearer(BOB), b"X-Hermes-Session-Key: work", body=said("my word is granite"))
        answers = [
            await ask(sidecar.url, "GET", f"/api/sessions/{target}", bearer(BOB))
            for target in ("bob-work", "bob-work/messages", "bob%2Dwork/messages", "bob-work/messages?limit=5")
        ]

        assert [answer.status for answer in answers] == [200, 200, 200, 200]
        assert all(b"granite" in answer.body for answer in answers[1:])


async def test_route_key_crosses_with_the_clients_name(tmp_path: Path) -> None:
    """hermes-agent takes the key for the scope of its long-term memory: that must be the client's own as well."""
    listen = {"tokens_file": tokens_file(tmp_path, f"alice:{ANN}", f"bob:{BOB}"), "isolate_clients": True}

    async with relayed(OK, listen=listen, session={"forward_key": "always"}) as (upstream, sidecar):
        for token in (ANN, BOB):
            await chat(sidecar.url, bearer(token), b"X-Hermes-Session-Key: work")

        keys = [request.values("x-hermes-session-key") for request in upstream.requests]
        assert keys == [[b"alice-work"], [b"bob-work"]]


def _key() -> dict[str, str]:
    return {"HERMES_SIDECAR_GATEWAY__TOKEN": GATEWAY_KEY}


@asynccontextmanager
async def _guarded(home: Path, *tokens: str) -> AsyncIterator[tuple[list[Connection], Sidecar]]:
    async with relayed(OK, environ=_key(), listen={"tokens_file": tokens_file(home, *tokens)}) as (upstream, sidecar):
        yield upstream.connections, sidecar


def _home(path: Path) -> Path:
    home = path / "home"
    home.mkdir()
    return home


def _configured(path: Path, token: str, origins: list[str] | None = None) -> tuple[dict[str, str], Path]:
    """The settings of a process with a tokens file and a configuration file that a test can write anew."""
    home = _home(path)
    file = home / "sidecar.toml"
    if origins is not None:
        file.write_text(f"[listen]\nallowed_origins = {origins}\n")
    return {"LISTEN__TOKENS_FILE": tokens_file(path, token)}, file
