"""The reverse proxies' configurations of the docs, in front of a sidecar: accepted, and streams arrive word by word."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web

from sidecar.demo.gateway import DemoGateway
from tests.support.authority import authority
from tests.support.documents import Block, runnable
from tests.support.own_venv import free_port
from tests.support.sidecars import running_sidecar
from tests.support.tools import needed

pytestmark = pytest.mark.e2e

_START_LIMIT_S = 15.0
_NAME = "chat.example.org"
_WORDS, _WORD_DELAY_S = 20, 0.05


def block_of(page: str, language: str) -> Block:
    (block,) = [block for block in runnable(language) if block.page == page]
    return block


def placed(site: str, here: dict[str, str]) -> str:
    """The example with this test's addresses and files in the place of the page's."""
    for theirs, ours in here.items():
        site = site.replace(theirs, ours)
    return site


def certificate_files(folder: Path) -> tuple[Path, Path]:
    certificate: trustme.LeafCert = authority().issue_cert(_NAME)
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(key))
    return chain, key


@asynccontextmanager
async def running(folder: Path, port: int, *command: str) -> AsyncIterator[None]:
    """The proxy in the foreground, once its port is open."""
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/bin"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while not await is_open(port):
                assert process.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.05)  # another process: it can only be asked again
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@asynccontextmanager
async def nginx(folder: Path, port: int, site: str) -> AsyncIterator[None]:
    program = needed("nginx", package="nginx-light")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}\n{site}\n}}\n"
    )
    async with running(folder, port, str(program), "-p", str(folder), "-e", "stderr", "-c", str(conf)):
        yield


@asynccontextmanager
async def caddy(folder: Path, port: int, site: str) -> AsyncIterator[None]:
    program = needed("caddy", package="caddy")
    conf = folder / "Caddyfile"
    conf.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tstorage file_system {folder}\n}}\n{site}\n")
    async with running(folder, port, str(program), "run", "--adapter", "caddyfile", "--config", str(conf)):
        yield


async def words_of_a_stream(
    url: str, headers: dict[str, str], tls: ssl.SSLContext | bool
) -> tuple[list[str], list[float]]:
    """The words of a streamed answer, and the seconds between each and the next."""
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    words: list[str] = []
    came_at: list[float] = []
    timeout = aiohttp.ClientTimeout(total=20)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=tls)) as client,
        client.post(f"{url}/v1/chat/completions", json=body, headers=headers, server_hostname=_NAME) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                if "content" in delta:
                    words.append(delta["content"])
                    came_at.append(time.monotonic())
    return words, [later - earlier for earlier, later in pairwise(came_at)]


@asynccontextmanager
async def plain_gateway() -> AsyncIterator[str]:
    """A gateway that streams slowly, and does not ask proxies for anything: no X-Accel-Buffering, as the demo has it.

    Its words are the session that it was sent, again and again.
    """

    async def chat(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        delta = {"choices": [{"delta": {"content": request.headers["X-Hermes-Session-Id"]}}]}
        for _ in range(_WORDS):
            await answer.write(f"data: {json.dumps(delta)}\n\n".encode())
            await asyncio.sleep(_WORD_DELAY_S)  # a model's pace
        return answer

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("language", ["nginx", "caddy"])
async def test_stream_through_the_proxy_arrives_word_by_word(language: str, tmp_path: Path) -> None:
    site = block_of("docs/how-to/reverse-proxy.md", language).text
    chain, key = certificate_files(tmp_path)
    port = free_port()
    listen = {"allowed_hosts": [_NAME]}
    async with plain_gateway() as gateway, running_sidecar(gateway, listen=listen) as sidecar:
        here = {
            "127.0.0.1:8650": f"127.0.0.1:{sidecar.port}",
            "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
            "/etc/ssl/chat.example.org.pem": str(chain),
            "/etc/ssl/chat.example.org.key": str(key),
            f"\n{_NAME} {{": f"\nhttps://{_NAME}:{port} {{\n\ttls {chain} {key}",
        }
        site = placed(f"\n{site}", here)
        tls = ssl.create_default_context(cadata=authority().cert_pem.bytes().decode())
        async with {"nginx": nginx, "caddy": caddy}[language](tmp_path, port, site):
            headers = {"Host": f"{_NAME}:{port}", "X-Hermes-Session-Key": "proxied"}
            words, gaps = await words_of_a_stream(f"https://127.0.0.1:{port}", headers, tls)

    assert words == ["proxied"] * _WORDS
    # In heaps, most words would come with the one before. A wide margin: on a busy machine some do all the same.
    assert sum(gap > _WORD_DELAY_S / 4 for gap in gaps) > len(gaps) / 2


async def test_port_with_a_fixed_key_makes_one_conversation(tmp_path: Path) -> None:
    site = block_of("docs/how-to/lobechat.md", "nginx").text
    port = free_port()
    demo = await DemoGateway.start(word_delay_s=0)
    async with running_sidecar(demo.url) as sidecar:
        site = placed(site, {"127.0.0.1:8650": f"127.0.0.1:{sidecar.port}", "127.0.0.1:8660": f"127.0.0.1:{port}"})
        async with nginx(tmp_path, port, site):
            await words_of_a_stream(f"http://127.0.0.1:{port}", {}, tls=True)
            words, _ = await words_of_a_stream(f"http://127.0.0.1:{port}", {}, tls=True)
    await demo.stop()

    assert "3 messages of session lobe-my-task" in "".join(words)
