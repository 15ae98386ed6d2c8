"""What `probe`, `verify` and `demo` do: a backend asked, a sidecar found or started, all of it told in plain lines."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import uvloop

from sidecar.capabilities.model import is_chat_usable
from sidecar.capabilities.report import document
from sidecar.config import AdminSettings, DashboardSettings, GatewaySettings, LogSettings, Settings, StoreSettings
from sidecar.demo.gateway import DemoGateway
from sidecar.server import Running, start
from sidecar.surface.terminal import print_capabilities
from sidecar.upstreams import Upstreams
from sidecar.verify import verify as prove

LOOK_LIMIT_S = 2.0  # /healthz is answered from memory; who takes longer is no sidecar worth asking
OK, FAILED, INTERRUPTED = 0, 1, 130  # 130: 128 + SIGINT, as shells have it


def verify(settings: Settings, *, rotation: bool = False) -> int:
    """Prove continuity through the sidecar that runs at the configured address, or through a temporary one."""
    return _run(_verify(settings, rotation=rotation))


def probe(settings: Settings, *, as_json: bool) -> int:
    """Ask the gateway and the dashboard once, directly, what they can do. OK if chat is usable."""
    return _run(_probe(settings, as_json=as_json))


def demo(settings: Settings, *, once: bool) -> int:
    """Serve the sidecar in front of a demo gateway, prove that it works, and go on until a signal unless `once`."""
    return _run(_demo(settings, once=once))


async def _verify(settings: Settings, *, rotation: bool) -> int:
    base_url = _url(settings.listen.host, settings.listen.port)
    if settings.listen.port and await _is_sidecar(base_url):
        _say(f"Using the sidecar that runs at {base_url}")
        return await _proof(base_url, settings, rotation=rotation)
    _say(f"No sidecar answers at {base_url}; starting one for this check.")
    local = _alone(settings, host="127.0.0.1", port=0)
    running = await start(local)
    try:
        return await _proof(_url(local.listen.host, running.port), local, rotation=rotation)
    finally:
        await running.stop()


async def _probe(settings: Settings, *, as_json: bool) -> int:
    started_at = time.time()
    upstreams = Upstreams(settings)
    try:
        picture = await upstreams.probe()
    finally:
        await upstreams.close()
    found = document(picture, settings.gateway.url, started_at)
    if as_json:
        _say(json.dumps(found, indent=2))
    else:
        print_capabilities(found, sys.stdout)
    return OK if is_chat_usable(picture) else FAILED


async def _demo(settings: Settings, *, once: bool) -> int:
    gateway = await DemoGateway.start()
    try:
        in_front = _alone(settings).model_copy(update={"gateway": GatewaySettings(url=gateway.url)})
        running = await _start_somewhere(in_front)
        try:
            base_url = _url(in_front.listen.host, running.port)
            _introduce(base_url, gateway.url, needs_token=bool(in_front.listen.client_tokens))
            code = await _proof(base_url, in_front)
            if not once:
                _say("Serving until Ctrl-C.")
                await _until_signal()
            return code
        finally:
            await running.stop()
    finally:
        await gateway.stop()


# --- The pieces ------------------------------------------------------------------------------------------------------


async def _proof(base_url: str, settings: Settings, *, rotation: bool = False) -> int:
    tokens = settings.listen.client_tokens
    bearer = tokens[0].token.decode() if tokens else None
    verdict = await prove(base_url, bearer=bearer, say=_say, rotation=rotation)
    _say(f"{'OK' if verdict.ok else 'FAILED'}: {verdict.sentence}")
    return OK if verdict.ok else FAILED


async def _is_sidecar(base_url: str) -> bool:
    """Whether what answers at `base_url` says that it is a sidecar."""
    limit = aiohttp.ClientTimeout(total=LOOK_LIMIT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.get(f"{base_url}/healthz", allow_redirects=False) as answer,
        ):
            return "X-Hermes-Sidecar" in answer.headers
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _start_somewhere(settings: Settings) -> Running:
    """Start at the configured address, or on a free port where that one is taken."""
    try:
        return await start(settings)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
    _say(f"Port {settings.listen.port} is taken, so the demo uses a free one.")
    return await start(_alone(settings, port=0))


def _alone(settings: Settings, **listen: Any) -> Settings:
    """The same sidecar as a guest on this machine: no socket file, no store, no admin port that another may hold.

    It logs only what is wrong, unless a level is asked for: the terminal is for the proof.
    """
    log = settings.log
    if "level" not in log.model_fields_set:
        log = LogSettings(level="warning", format=log.format)
    return settings.model_copy(
        update={
            "listen": settings.listen.model_copy(update={"unix_socket": None, "workers": 1, **listen}),
            "dashboard": DashboardSettings(),
            "store": StoreSettings(url="memory"),
            "admin": AdminSettings(),
            "log": log,
        }
    )


def _introduce(base_url: str, gateway_url: str, *, needs_token: bool) -> None:
    authorization = ' -H "Authorization: Bearer $CLIENT_TOKEN"' if needs_token else ""
    body = '{"model":"demo","stream":true,"messages":[{"role":"user","content":"Hello"}]}'
    _say(f"Demo gateway   {gateway_url}")
    _say(f"Sidecar        {base_url}  (the base URL for a chat frontend is {base_url}/v1)")
    _say(f"Status page    {base_url}/sidecar/")
    _say(f"Health         {base_url}/healthz")
    _say("Try it:")
    _say(
        f"  curl -N {base_url}/v1/chat/completions{authorization} -H 'Content-Type: application/json'"
        f" -H 'X-Hermes-Session-Key: my-chat' -d '{body}'"
    )


async def _until_signal() -> None:
    told = asyncio.Event()
    _on_signal(told.set)
    await told.wait()


def _on_signal(action: Callable[[], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, action)


def _run(work: Coroutine[Any, Any, int]) -> int:
    async def interruptible() -> int:
        task = asyncio.ensure_future(work)
        _on_signal(task.cancel)
        return await task

    try:
        # The event loop of production, so that what is proven holds there.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(interruptible())
    except asyncio.CancelledError:
        return INTERRUPTED
    except OSError as exc:
        print(f"hermes-sidecar: cannot listen: {exc.strerror or exc}", file=sys.stderr)
        return FAILED


def _url(host: str, port: int) -> str:
    """Where a program on this machine reaches a socket bound to `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (looked for, not bound)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _say(line: str) -> None:
    print(line, flush=True)
