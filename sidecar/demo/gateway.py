"""A small gateway without a model, which keeps conversations as hermes-agent 0.19's API server does.

`hermes-sidecar demo` puts the sidecar in front of it, so that continuity can be seen with nothing else installed;
tests use it in place of the real gateway. One difference is wanted: without a key the real one refuses session
headers (and to start at all), while this one takes them.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from sidecar import __version__
from sidecar.demo.memory import Sessions, answer_text
from sidecar.demo.prompt import BadRequestError, checked_session_id, checked_session_key, read_prompt
from sidecar.demo.turn import Turn

MODEL = "hermes-sidecar-demo"
MAX_REQUEST_BYTES = 10_000_000
_STOP_GRACE_S = 0.5

_ENDPOINTS = {
    "health": ("GET", "/health"),
    "models": ("GET", "/v1/models"),
    "chat_completions": ("POST", "/v1/chat/completions"),
    "sessions": ("GET", "/api/sessions"),
    "session": ("GET", "/api/sessions/{session_id}"),
    "session_messages": ("GET", "/api/sessions/{session_id}/messages"),
}


class DemoGateway:
    """A running demo gateway; `url` is where it listens. `start` is the only way to get one, `stop` ends it."""

    def __init__(self, *, key: str | None, word_delay_s: float) -> None:
        self.url = ""
        self._key = key
        self._word_delay_s = word_delay_s
        self._sessions = Sessions()
        app = web.Application(middlewares=[self._admission], client_max_size=MAX_REQUEST_BYTES)
        # HEAD is 405 on the real gateway, too.
        app.router.add_get("/health", self._health, allow_head=False)
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_get("/v1/capabilities", self._capabilities, allow_head=False)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/api/sessions", self._list_sessions, allow_head=False)
        app.router.add_get("/api/sessions/{session_id}", self._one_session, allow_head=False)
        app.router.add_get("/api/sessions/{session_id}/messages", self._messages, allow_head=False)
        # A client that leaves ends its turn at once, also while the next word is waited for.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_GRACE_S)

    @classmethod
    async def start(
        cls, port: int = 0, host: str = "127.0.0.1", *, key: str | None = None, word_delay_s: float = 0.015
    ) -> DemoGateway:
        """Listens on `port` (0: any free one); raises OSError when it is taken. With `key`, clients must send it."""
        gateway = cls(key=key, word_delay_s=word_delay_s)
        await gateway._runner.setup()
        try:
            await web.TCPSite(gateway._runner, host, port).start()
        except OSError:
            await gateway._runner.cleanup()
            raise
        bound_port = gateway._runner.addresses[0][1]
        gateway.url = f"http://[{host}]:{bound_port}" if ":" in host else f"http://{host}:{bound_port}"
        return gateway

    async def stop(self) -> None:
        """Closes the port and breaks off what still runs; calling it twice does no harm."""
        await self._runner.cleanup()

    # Who may come in

    @web.middleware
    async def _admission(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if "Origin" in request.headers or request.method == "OPTIONS":
            return web.Response(status=403)
        routed = request.match_info.http_exception is None
        if routed and request.path != "/health" and not self._has_key(request):
            return _error(401, "Invalid API key", code="invalid_api_key")
        try:
            return await handler(request)
        except BadRequestError as fault:
            return _error(400, fault.message, code=fault.code, param=fault.param)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "Request body too large.", code="body_too_large")

    def _has_key(self, request: web.Request) -> bool:
        if self._key is None:
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Bytes: compare_digest refuses text outside ASCII, and the header is the client's.
        given = token.strip().encode(errors="surrogateescape")
        return scheme == "Bearer" and hmac.compare_digest(given, self._key.encode())

    # What it is

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "platform": "hermes-sidecar-demo", "version": __version__})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "hermes-sidecar"}
        return web.json_response({"object": "list", "data": [model]})

    async def _capabilities(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "object": "hermes.api_server.capabilities",
                "platform": "hermes-sidecar-demo",
                "model": MODEL,
                "auth": {"type": "bearer", "required": self._key is not None},
                "features": {
                    "chat_completions": True,
                    "chat_completions_streaming": True,
                    "responses_api": False,
                    "run_submission": False,
                    "session_resources": True,
                    "session_chat": False,
                    "session_chat_streaming": False,
                    "session_fork": False,
                    "jobs_admin": False,
                    "memory_write_api": False,
                    "skills_api": False,
                    "session_continuity_header": "X-Hermes-Session-Id",
                    "session_key_header": "X-Hermes-Session-Key",
                    "cors": False,
                },
                "endpoints": {name: {"method": method, "path": path} for name, (method, path) in _ENDPOINTS.items()},
            }
        )

    # Chat

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            raise BadRequestError("Invalid JSON in request body") from None
        if not isinstance(body, dict):
            raise BadRequestError("Request body must be a JSON object")
        prompt = read_prompt(body.get("messages"))
        session_key = checked_session_key(request.headers.get("X-Hermes-Session-Key", "").strip())
        named_id = checked_session_id(request.headers.get("X-Hermes-Session-Id", "").strip())

        session = self._sessions.opened(named_id or prompt.derived_id)
        # With a session id, what was said before is the gateway's to know: the body's own history is not looked at.
        earlier = [(message.role, message.text) for message in session.messages] if named_id else prompt.earlier
        session.add("user", prompt.text)
        headers = {"X-Hermes-Session-Id": session.session_id}
        if session_key:
            headers["X-Hermes-Session-Key"] = session_key
        named_model = body.get("model")
        turn = Turn(
            session,
            answer_text(session.session_id, earlier, prompt),
            prompt_tokens=sum(len(text.split()) for _, text in earlier) + len(prompt.text.split()),
            model=named_model if isinstance(named_model, str) else MODEL,
        )
        if body.get("stream") is True:
            return await turn.stream(request, headers, self._word_delay_s)
        session.add("assistant", turn.text, "stop")
        return web.json_response(turn.completion(), headers=headers)

    # Sessions

    async def _list_sessions(self, request: web.Request) -> web.Response:
        limit = _bounded_number(request.query, "limit", default=50, maximum=200)
        offset = _bounded_number(request.query, "offset", default=0, maximum=1_000_000)
        page = self._sessions.newest_first()[offset : offset + limit]
        data = [session.document() for session in page]
        return web.json_response(
            {"object": "list", "data": data, "limit": limit, "offset": offset, "has_more": len(page) == limit}
        )

    async def _one_session(self, request: web.Request) -> web.Response:
        session = self._sessions.known(request.match_info["session_id"])
        if session is None:
            return _session_not_found()
        return web.json_response({"object": "hermes.session", "session": session.document()})

    async def _messages(self, request: web.Request) -> web.Response:
        session = self._sessions.known(request.match_info["session_id"])
        if session is None:
            return _session_not_found()
        data = [message.document(session.session_id) for message in session.messages]
        return web.json_response({"object": "list", "session_id": session.session_id, "data": data})


def _bounded_number(query: Mapping[str, str], name: str, *, default: int, maximum: int) -> int:
    """The query's number, or `default` where it is none: the real gateway does not refuse either."""
    text = query.get(name, "")
    return min(int(text), maximum) if text.isascii() and text.isdigit() and len(text) < 10 else default


def _session_not_found() -> web.Response:
    return _error(404, "Session not found", code="session_not_found")


def _error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return web.json_response({"error": error}, status=status)
