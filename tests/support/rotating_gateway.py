"""A scripted gateway that moves conversations to new sessions as hermes-agent does with `compression.in_place: false`.

A turn that comes when its session is full moves the session: a plain answer names the new one, a streamed one the old,
since its head leaves first. A turn that comes for a session that was moved stays there: the wreck that the sidecar is
there to prevent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from tests.support.backends import NO_GET, NOT_FOUND, as_json, hermes_gateway
from tests.support.scripted_upstream import LAST_CHUNK, Connection, Received, chunk

EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
Hold = Callable[[Received], Awaitable[None]]


@dataclass
class Session:
    messages: list[str] = field(default_factory=list)
    child: str | None = None


async def _at_once(_: Received) -> None:
    pass


class RotatingGateway:
    """The script for each connection, and what all of them share."""

    def __init__(self, *, rotates_after: int = 2, key: str | None = None, has_records: bool = True) -> None:
        """`rotates_after`: turns that a session holds; `key`: what its own API wants; `has_records`: it has one."""
        self.rotates_after = rotates_after
        self.sessions: dict[str, Session] = {}
        self.chats: list[str] = []
        """The session ids that turns were sent to, in order."""
        self.records: list[Received] = []
        """The requests for a session's record."""
        self.before_record: Hold = _at_once
        """What a record waits for."""
        self.record_asked = asyncio.Event()
        self.may_end = asyncio.Event()
        """Set: turns are answered at once. Else a streamed answer stays open, and a plain one does not begin."""
        self.may_end.set()
        self._key = key
        self._has_records = has_records
        self._otherwise = hermes_gateway(key)

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=60)
            path = request.target.partition(b"?")[0].decode()
            if request.method == b"POST" and path == "/v1/chat/completions":
                beginning, end = self._chat(request)
                connection.write(beginning)
                await self.may_end.wait()
                connection.write(end)
            elif self._has_records and path.startswith("/api/sessions/"):
                connection.write(await self._record(request, path))
            elif not self._has_records and path != "/v1/models":
                connection.write(NO_GET if path == "/v1/chat/completions" else NOT_FOUND)
            else:
                answer = self._otherwise(request)
                assert isinstance(answer, bytes)
                connection.write(answer)

    def tip(self, session_id: str) -> str:
        """Where the conversation that began as `session_id` goes on."""
        while (child := self.sessions[session_id].child) is not None:
            session_id = child
        return session_id

    def _chat(self, request: Received) -> tuple[bytes, bytes]:
        """The answer's beginning, and the rest of it."""
        (sent,) = request.values("x-hermes-session-id") or [b"api-0123456789abcdef"]
        body = json.loads(request.body)
        session_id = sent.decode()
        self.chats.append(session_id)
        session = self.sessions.setdefault(session_id, Session())
        if len(session.messages) >= self.rotates_after and session.child is None:
            session.child = f"child-{len(self.sessions) + 1}"
            session_id = session.child
            session = self.sessions.setdefault(session_id, Session())
        session.messages.append(str(body["messages"][-1]["content"]))
        if body.get("stream"):
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Hermes-Session-Id: %b\r\n" % sent
            events = b'data: {"choices":[{"delta":{"content":"ok"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT), chunk(events) + LAST_CHUNK
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        return b"", as_json({"choices": [choice]}, b"200 OK", b"X-Hermes-Session-Id: " + session_id.encode())

    async def _record(self, request: Received, path: str) -> bytes:
        self.records.append(request)
        self.record_asked.set()
        await self.before_record(request)
        if self._key is not None and request.values("authorization") != [b"Bearer " + self._key.encode()]:
            return as_json({"error": {"code": "invalid_api_key"}}, b"401 Unauthorized")
        session_id, _, below = path.removeprefix("/api/sessions/").partition("/")
        session_id = unquote(session_id)
        if session_id not in self.sessions:
            return as_json({"error": {"code": "session_not_found"}}, b"404 Not Found")
        if below == "messages":
            tip = self.tip(session_id)
            data = [{"role": "user", "session_id": tip, "content": text} for text in self.sessions[tip].messages]
            return as_json({"object": "list", "session_id": tip, "data": data})
        reason = None if self.sessions[session_id].child is None else "compression"
        return as_json({"object": "session", "session": {"id": session_id, "end_reason": reason}})
