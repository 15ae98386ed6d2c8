"""Nothing secret goes out: markers in every place that holds a secret, and a search through everything that is said."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from sidecar.telemetry import logs
from sidecar.telemetry.lines import line_of
from sidecar.telemetry.record import ExchangeRecord
from tests.support.raw_client import JSON, ask, raw_client
from tests.support.scripted_upstream import Connection, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess, run
from tests.support.wire import Gone

GATEWAY_KEY = "sesame-gateway-key"
CLIENT_TOKEN = "sesame-client-token"
ROUTE_KEY = "sesame-route-key"
SESSION_ID = "sesame-session-id"
SECRETS = (
    b"Cookie: session=sesame-cookie",
    b"Proxy-Authorization: Basic sesame-proxy",
    b"X-Api-Key: sesame-api-key",
    b"X-Hermes-Session-Key: " + ROUTE_KEY.encode(),
    b"X-Hermes-Friendly-Id: sesame-friendly-id",
    b"User-Agent: sesame-agent",
)
WITH_TOKEN = (f"Authorization: Bearer {CLIENT_TOKEN}".encode(), *SECRETS)
TARGET = "/v1/chat/completions?key=sesame-query"
BODY = b'{"model":"sesame-model","messages":[{"role":"user","content":"sesame-prompt"}]}'


async def gateway(connection: Connection) -> None:
    """Answers as its target says: well, with bytes that are no HTTP, or with half an answer."""
    while True:
        request = await connection.request()
        if b"garbage" in request.target:
            connection.write(b"sesame-garbage of a gateway\r\n\r\n")
        elif b"half" in request.target:
            connection.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nSet-Cookie: sesame-set-cookie\r\n\r\nsesame-half"
            )
            connection.reset()
            return
        else:
            connection.write(
                ok(
                    b'{"sesame-answer":1}',
                    b"Set-Cookie: sesame-set-cookie",
                    b"X-Hermes-Session-Id: " + SESSION_ID.encode(),
                )
            )


async def test_no_marker_in_anything_that_the_sidecar_says(tmp_path: Path) -> None:
    """Every kind of request and refusal, at debug level; then logs, errors, own pages, process title and `check`."""
    (tmp_path / "tokens").write_text(f"sesame-name:{CLIENT_TOKEN}\n")
    settings = {
        "LOG__LEVEL": "debug",
        "GATEWAY__TOKEN": GATEWAY_KEY,
        "LISTEN__TOKENS_FILE": str(tmp_path / "tokens"),
        "LISTEN__HEAD_TIMEOUT_S": "0.3",
        "LISTEN__BODY_TIMEOUT_S": "0.3",
    }
    own: list[tuple[str, bytes]] = []
    """What the sidecar itself has answered, by what was asked."""

    async with (
        scripted_upstream(gateway) as upstream,
        await SidecarProcess.start(_home(tmp_path), upstream.url, settings) as sidecar,
    ):

        async def provoke(code: str | None, method: str, target: str, *fields: bytes, body: bytes = BODY) -> None:
            answer = await ask(sidecar.url, method, target, *fields, body=body)
            assert answer.value("x-hermes-sidecar-error") == code
            if code is not None:
                own.append((code, answer.body))

        async def send(code: str, sent: bytes) -> None:
            async with raw_client(sidecar.url) as client:
                client.write(sent.replace(b"<host>", client.host.encode()))
                answer = await client.answer()
                assert answer.value("x-hermes-sidecar-error") == code
                own.append((code, answer.body))

        await provoke(None, "POST", TARGET, *WITH_TOKEN, JSON)
        await provoke("client_token_required", "POST", TARGET, *SECRETS)
        await provoke("client_token_required", "POST", TARGET, b"Authorization: Bearer sesame-wrong-token", *SECRETS)
        await provoke(
            "client_token_required", "GET", "/metrics", b"Authorization: Basic sesame-wrong", *SECRETS, body=b""
        )
        await provoke("origin_not_allowed", "POST", TARGET, b"Origin: http://sesame-origin.example", *WITH_TOKEN)
        await provoke("expectation_failed", "POST", TARGET, b"Expect: sesame-expectation", *WITH_TOKEN)
        await provoke("invalid_session_key", "POST", TARGET, b"X-Hermes-Session-Key: sesame-b", *WITH_TOKEN)
        await provoke("upstream_protocol_error", "POST", "/garbage" + TARGET, *WITH_TOKEN)
        head = b"POST " + TARGET.encode() + b" HTTP/1.1\r\n" + b"\r\n".join(WITH_TOKEN) + b"\r\n"
        own_host = head + b"Host: <host>\r\n"
        await send("host_not_allowed", head + b"Host: sesame-host.example\r\n\r\n")
        await send("invalid_request", own_host + b"X-Bad : sesame-bad\r\n\r\n")
        await send("invalid_request", own_host + b"Content-Length: sesame-length\r\n\r\n")
        await send("invalid_request", b"SESAME-sesame-line \x00\r\n\r\n")
        await send("header_too_large", own_host + b"X-Big: " + b"sesame-big" * 10_000 + b"\r\n\r\n")
        await send("request_timeout", own_host + b"X-Slow: sesame-slow")
        await send("request_timeout", own_host + b"Content-Length: 99\r\n\r\nsesame-slow-body")
        async with raw_client(sidecar.url) as client:
            client.write(client.request("GET", "/half" + TARGET, *WITH_TOKEN))
            await client.ended()
        for path in ("/healthz", "/readyz", "/metrics", "/capabilities", "/sidecar/", "/sidecar/sesame-page"):
            answer = await ask(sidecar.url, "GET", path + "?key=sesame-query", *WITH_TOKEN)
            own.append((path, answer.body + b"".join(value for _, value in answer.fields)))
        title = Path(f"/proc/{sidecar.pid}/cmdline")
        if title.exists():
            own.append(("process title", title.read_bytes() + title.with_name("comm").read_bytes()))
        stopped = await sidecar.stop()
        own.append(("log", sidecar.log.encode()))
        code, output = await run(_home(tmp_path, "check"), "check", settings={"GATEWAY__URL": upstream.url, **settings})
        own.append(("check", output.encode()))

        assert (stopped, code) == (0, 0)
        assert {what for what, said in own if b"sesame" in said.lower()} == set()
        # It did say something: sessions as short hashes, and each refusal by its code.
        assert hashlib.sha256(ROUTE_KEY.encode()).hexdigest()[:8] in sidecar.log
        assert {code for code, _ in own if f'"{code}"' in sidecar.log} >= {
            "client_token_required",
            "header_too_large",
            "host_not_allowed",
            "invalid_request",
            "origin_not_allowed",
            "request_timeout",
            "upstream_protocol_error",
        }


BROKEN = {
    "admission": ("relay.handler", "admit"),
    "body": ("relay.handler", "Exchange.request_end"),
    "answer": ("relay.answers", "relayed_head"),
    "connect": ("relay.pool", "Pool.connect"),
}
"""Functions of ours that are made to fail: (module, name)."""


UNCOMPILED = """
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
class Sources:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "sidecar":
            found = (FileFinder(at, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name) for at in path or sys.path)
            return next(filter(None, found), None)
sys.meta_path.insert(0, Sources)
"""
"""Imports our modules from their sources: a compiled function calls another without looking it up."""


def broken(home: Path, module: str, name: str) -> dict[str, str]:
    """The environment of a process in which that function does nothing but fail."""
    owner, _, attribute = f"module.{name}".rpartition(".")
    (home / "sitecustomize.py").write_text(
        f"{UNCOMPILED}\n"
        f"from importlib import import_module\n"
        f"def fail(*args, **kwargs):\n    raise RuntimeError('forced')\n"
        f"module = import_module('sidecar.{module}')\n"
        f"setattr({owner}, '{attribute}', fail)\n"
    )
    return {"PYTHONPATH": str(home)}


@pytest.mark.parametrize("where", BROKEN)
async def test_crash_in_a_callback_says_nothing_of_the_request(where: str, tmp_path: Path) -> None:
    """A fault of our own code, made on purpose: the client is not left waiting, and the log has the place alone."""
    home = _home(tmp_path)
    settings = {"LOG__LEVEL": "debug", "GATEWAY__TOKEN": GATEWAY_KEY, "SHUTDOWN__GRACE_S": "0.2"}

    async with scripted_upstream(gateway) as upstream:
        sidecar = await SidecarProcess.start(home, upstream.url, settings, environ=broken(tmp_path, *BROKEN[where]))
        try:
            async with raw_client(sidecar.url) as client:
                client.write(client.request("POST", TARGET, *SECRETS, body=BODY))
                await sidecar.logged("RuntimeError")
                said = await client.some()
        except Gone:
            said = b""  # hung up on, which is an answer as well
        finally:
            await sidecar.stop()

        assert b"sesame" not in said.replace(b"X-Hermes-Session-Key: " + ROUTE_KEY.encode(), b"").replace(
            b"X-Hermes-Friendly-Id: sesame-friendly-id", b""
        )
        assert "sesame" not in sidecar.log.lower()


async def test_crash_at_the_start_says_nothing_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{CLIENT_TOKEN}\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", "serve"),
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(_home(tmp_path)),
            **broken(tmp_path, "server", "start"),
            "HERMES_SIDECAR_LISTEN__PORT": "0",
            "HERMES_SIDECAR_LISTEN__TOKENS_FILE": str(tmp_path / "tokens"),
            "HERMES_SIDECAR_GATEWAY__TOKEN": GATEWAY_KEY,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(20):
        output, _ = await process.communicate()

    assert process.returncode == 1
    assert b"forced" in output
    assert b"sesame" not in output


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_a_client_names_cannot_steer_the_operators_terminal(log_format: Literal["json", "console"]) -> None:
    """0x9B begins a terminal command as ESC [ does. Line breaks cannot come in, but such bytes may stand in a value."""
    written = io.StringIO()
    record = ExchangeRecord(
        b"GET", "models", 200, "complete", "none", None, b"\x9b31mred\x85\xe9\xad", None, 0.1, 10, None
    )

    logs.configure("debug", log_format, written)([line_of(record)])

    said = written.getvalue()
    assert "31mred" in said
    assert [character for character in said if character != "\n" and not character.isprintable()] == []


def _home(path: Path, name: str = "home") -> Path:
    home = path / name
    home.mkdir()
    return home
