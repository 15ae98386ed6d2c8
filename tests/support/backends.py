"""Backends in bytes, as the real ones answer a prober: hermes-agent, its dashboard, and others with the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.support.scripted_upstream import Connection, Received, Script, ok

Answer = bytes | Callable[[Connection], Awaitable[None]]
Answerer = Callable[[Received], Answer]


def answering_by(answerer: Answerer) -> Script:
    """A script for every connection: each request gets what `answerer` says, bytes or something to do."""

    async def script(connection: Connection) -> None:
        while True:
            answer = answerer(await connection.request(limit_s=60))
            if isinstance(answer, bytes):
                connection.write(answer)
            else:
                await answer(connection)

    return script


def as_json(document: Any, status: bytes = b"200 OK", *fields: bytes) -> bytes:
    return ok(json.dumps(document).encode(), *fields, status=status)


def as_text(body: bytes, content_type: bytes = b"text/plain", status: bytes = b"200 OK", *fields: bytes) -> bytes:
    lines = b"".join(field + b"\r\n" for field in (b"Content-Type: " + content_type, *fields))
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, lines, len(body), body)


NOT_FOUND = as_text(b"404: Not Found", status=b"404 Not Found")
NOT_FOUND_JSON = as_json({"detail": "Not Found"}, b"404 Not Found")
NO_GET = as_text(b"405: Method Not Allowed", b"text/plain", b"405 Method Not Allowed", b"Allow: POST")
UNAUTHORIZED = as_json({"error": {"message": "Invalid API key", "code": "invalid_api_key"}}, b"401 Unauthorized")
COMPLETION = as_json({"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "hi"}}]})
STREAM = as_text(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n', b"text/event-stream")


def by_path(routes: Mapping[str, Answer], otherwise: Answer = NOT_FOUND_JSON, chat: Answer = COMPLETION) -> Answerer:
    """GETs by their path without query; POSTs to the chat route get `chat`."""

    def answer(request: Received) -> Answer:
        path = request.target.partition(b"?")[0].decode()
        if request.method == b"POST" and path.endswith("/v1/chat/completions"):
            return chat
        return routes.get(path, otherwise)

    return answer


def models(*listed: Mapping[str, Any]) -> bytes:
    return as_json({"object": "list", "data": listed or [{"id": "m", "object": "model", "owned_by": "somebody"}]})


# hermes-agent

FEATURES: dict[str, Any] = {
    "chat_completions": True,
    "chat_completions_streaming": True,
    "session_resources": True,
    "skills_api": True,
    "jobs_admin": False,
    "memory_write_api": False,
    "session_continuity_header": "X-Hermes-Session-Id",
    "session_key_header": "X-Hermes-Session-Key",
}
CHAT = "/v1/chat/completions"
LIST = as_json({"object": "list", "data": []})
HERMES_OPEN: dict[str, Answer] = {
    "/health": as_json({"status": "ok", "platform": "hermes-agent", "version": "0.19.0"}),
    CHAT: NO_GET,
}
HERMES_LOCKED: dict[str, Answer] = {
    "/v1/models": models({"id": "hermes-agent", "object": "model", "owned_by": "hermes"}),
    "/v1/capabilities": as_json(
        {"object": "hermes.api_server.capabilities", "platform": "hermes-agent", "features": FEATURES}
    ),
    "/v1/skills": LIST,
    "/api/sessions": LIST,
    "/api/jobs": as_json({"jobs": []}),
}
HERMES: dict[str, Answer] = HERMES_OPEN | HERMES_LOCKED


def hermes_gateway(key: str | None = None, routes: Mapping[str, Answer] = HERMES) -> Answerer:
    """As version 0.19 answers, with `key` to whoever shows it; a path that it does not know is 404 to everybody."""
    answer = by_path(routes, NOT_FOUND)

    def guarded(request: Received) -> Answer:
        is_known = request.target.partition(b"?")[0].decode() in routes and request.target not in (b"/health",)
        is_open = request.method == b"GET" and request.target.decode() in HERMES_OPEN
        has_key = key is None or request.values("authorization") == [b"Bearer " + key.encode()]
        return UNAUTHORIZED if is_known and not is_open and not has_key else answer(request)

    return guarded


class HermesDashboard:
    """As version 0.19's dashboard answers. `restart` gives it another token, as a restart does."""

    def __init__(self, token: str = "first-Token-0123456789") -> None:
        self.token = token
        self.handed_out: str | None = None
        """What its page says instead of the token that holds."""

    def restart(self, token: str = "second-Token-0123456789") -> None:
        self.token = token

    def __call__(self, request: Received) -> Answer:
        path = request.target.partition(b"?")[0].decode()
        if path == "/api/status":
            return as_json({"status": "ok", "version": "0.19.0"})
        if not path.startswith("/api/"):
            script = f'<script>window.__HERMES_SESSION_TOKEN__="{self.handed_out or self.token}";</script>'
            return as_text(b"<!doctype html><html>" + script.encode(), b"text/html; charset=utf-8")
        if request.values("x-hermes-session-token") != [self.token.encode()]:
            return as_json({"detail": "Unauthorized"}, b"401 Unauthorized")
        if request.method == b"POST":
            return as_json({"path": path, "body": request.body.decode()})
        answers: dict[str, Any] = {
            "/api/sessions": {"sessions": []},
            "/api/skills": [],
            "/api/memory": {"active": "", "providers": []},
            "/api/config": {"model": "m"},
            "/api/cron/jobs": [],
        }
        if path in answers:
            return as_json(answers[path])
        return as_json({"detail": f"No such API endpoint: {path}"}, b"404 Not Found")


# Others

OLLAMA = by_path(
    {
        "/": as_text(b"Ollama is running"),
        "/api/version": as_json({"version": "0.14.2"}),
        "/v1/models": models({"id": "llama3", "object": "model", "owned_by": "library"}),
        CHAT: as_text(b"405 method not allowed", b"text/plain", b"405 Method Not Allowed"),
    },
    as_text(b"404 page not found", status=b"404 Not Found"),
)


def llama_cpp(*modalities: str, vision: bool | None = None) -> Answerer:
    """`modalities` as newer versions say them in the model list, `vision` as all say it in /props."""
    architecture = {"architecture": {"input_modalities": list(modalities)}} if modalities else {}
    routes: dict[str, Answer] = {
        "/health": as_json({"status": "ok"}),
        "/v1/models": models({"id": "m", "owned_by": "llamacpp", **architecture}),
    }
    if vision is not None:
        routes["/props"] = as_json({"modalities": {"vision": vision, "audio": False}})
    return by_path(routes, as_json({"error": {"code": 404}}, b"404 Not Found", b"Server: llama.cpp"))


VLLM = by_path(
    {
        "/health": as_text(b""),
        "/version": as_json({"version": "0.21.0"}),
        "/v1/models": models({"id": "m", "owned_by": "vllm", "max_model_len": 4096}),
        CHAT: as_json({"detail": "Method Not Allowed"}, b"405 Method Not Allowed", b"Allow: POST"),
    }
)
SGLANG = by_path(
    {
        "/health": as_text(b""),  # it generates a token
        "/health_generate": as_text(b""),
        "/v1/models": models({"id": "m", "owned_by": "sglang"}),
        CHAT: as_json({"detail": "Method Not Allowed"}, b"405 Method Not Allowed", b"Allow: POST"),
    }
)


def lm_studio(*types: str) -> Answerer:
    """It answers unknown paths with 200 and an error."""
    routes: dict[str, Answer] = {
        "/v1/models": models({"id": "m", "object": "model", "owned_by": "organization_owner"}),
        "/api/v0/models": as_json({"object": "list", "data": [{"id": "m", "type": kind} for kind in types]}),
    }

    def answer(request: Received) -> Answer:
        path = request.target.decode()
        unknown = as_json({"error": f"Unexpected endpoint or method. ({request.method.decode()} {path})"})
        return by_path(routes, unknown)(request)

    return answer


LITELLM = by_path(
    {
        "/health/liveliness": as_json("I'm alive!"),
        "/health": as_json({"healthy_endpoints": []}),  # it calls every model
        "/": as_text(b"<!doctype html><title>LiteLLM API</title>", b"text/html"),
        "/v1/models": models({"id": "m", "object": "model", "owned_by": "openai"}),
        "/model_group/info": as_json({"data": [{"model_group": "m", "supports_vision": True}]}),
        CHAT: as_json({"detail": "Method Not Allowed"}, b"405 Method Not Allowed", b"Allow: POST"),
    }
)
_OPENROUTER_MODEL = {
    "id": "vendor/model",
    "architecture": {"input_modalities": ["text", "image"], "output_modalities": ["text"]},
    "supported_parameters": ["max_tokens"],
    "description": "x" * 900,
}
OPENROUTER = by_path(
    {"/api/v1/models": as_json({"data": [_OPENROUTER_MODEL] * 400}), "/api/v1/chat/completions": NOT_FOUND_JSON},
    as_text(b"<!doctype html><title>404</title>", b"text/html", b"404 Not Found"),
)
WITHOUT_MODELS = by_path({CHAT: NO_GET}, NOT_FOUND)

PAGE = as_text(b"<!doctype html><html><title>Some app</title></html>", b"text/html; charset=utf-8")


def single_page_app(request: Received) -> Answer:
    return PAGE if request.method == b"GET" else as_text(b"no", b"text/plain", b"405 Method Not Allowed")


def locked(_: Received) -> Answer:
    return UNAUTHORIZED


def redirecting(request: Received) -> Answer:
    return as_text(b"", b"text/plain", b"302 Found", b"Location: /login?from=" + request.target)


def echoing(request: Received) -> Answer:
    return as_json({"path": request.target.decode(), "items": [1], "method": request.method.decode()})
