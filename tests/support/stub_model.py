"""A stand-in for the language model behind an agent: OpenAI's API, and answers that tell what it was shown.

It answers every turn with the number and the roles of the messages it saw, system messages left out. Whether a
conversation was continued can be read from that answer: the second turn of one is shown three messages.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

MODEL = "stub-model"


@dataclass(frozen=True)
class Behaviour:
    """How the model takes a turn; the default answers at once."""

    calls_tool: bool = False
    """Ask for the `todo` tool first; the answer comes with the call that brings the tool's result."""
    silent_until: asyncio.Event | None = None
    """Say nothing before the answer until this is set; the head of a streamed one is sent, a tool call is not held."""
    gap_s: float = 0.0
    """Silence between two words of a streamed answer."""
    words: int = 0
    """Further words at the end of the answer, to make a stream as long as a test needs it."""


@dataclass
class ModelCall:
    """One request to `/v1/chat/completions`, as the model received it."""

    payload: dict[str, Any]
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """The whole answer is made; of a streamed one, all of it is written."""
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    """The one who asked closed the connection before that."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, without system messages."""
        return [m for m in self.payload.get("messages", []) if m.get("role") != "system"]

    @property
    def roles(self) -> list[str]:
        return [str(message.get("role")) for message in self.messages]

    @property
    def is_turn(self) -> bool:
        """Whether this call is the agent at work, who brings tools, and not a side call of its (a title)."""
        return bool(self.payload.get("tools"))

    @property
    def prompt(self) -> str:
        """The text of the newest user message."""
        for message in reversed(self.messages):
            if message.get("role") == "user":
                return text_of(message.get("content"))
        return ""


class StubModel:
    """The model server. Behaviours and recorded calls are found by a word that the turn's prompt contains."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self._behaviours: dict[str, Behaviour] = {}
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.url = ""

    @classmethod
    async def start(cls) -> StubModel:
        """The server in the running event loop, on a free loopback port."""
        stub = cls()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/v1/models", stub._models)
        app.router.add_post("/v1/chat/completions", stub._chat)
        # Cancellation is how the handler hears that its client left, in silence too.
        stub._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await stub._runner.setup()
        site = web.TCPSite(stub._runner, "127.0.0.1", 0)
        await site.start()
        host, port = stub._runner.addresses[0][:2]
        stub.url = f"http://{host}:{port}"
        return stub

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def behave(self, word: str, behaviour: Behaviour) -> None:
        """From now on, turns whose prompt contains `word` are taken as `behaviour` says."""
        self._behaviours[word] = behaviour

    def turns_about(self, word: str) -> list[ModelCall]:
        """The agent's calls so far whose prompt contains `word`, oldest first."""
        return [call for call in self.calls if call.is_turn and word in call.prompt]

    async def turn_about(self, word: str, *, limit_s: float = 15.0) -> ModelCall:
        """The first such call, as soon as it is there."""
        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(lambda: bool(self.turns_about(word)))
        return self.turns_about(word)[0]

    # Answering

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        call = ModelCall(await request.json())
        async with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        try:
            response = await self._answer(request, call)
        except (asyncio.CancelledError, ConnectionResetError):
            call.client_left.set()
            raise
        call.finished.set()
        return response

    async def _answer(self, request: web.Request, call: ModelCall) -> web.StreamResponse:
        behaviour = self._behaviour_of(call)
        wants_tool = behaviour.calls_tool and call.is_turn and call.roles[-1:] != ["tool"]
        if call.payload.get("stream"):
            return await _streamed(request, call, behaviour, wants_tool=wants_tool)
        if behaviour.silent_until and not wants_tool:
            await behaviour.silent_until.wait()
        message = _tool_message() if wants_tool else {"role": "assistant", "content": _answer_text(call, behaviour)}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if wants_tool else "stop"}
        return web.json_response(_envelope("chat.completion", choice) | {"usage": _USAGE})

    def _behaviour_of(self, call: ModelCall) -> Behaviour:
        if call.is_turn:
            for word, behaviour in self._behaviours.items():
                if word in call.prompt:
                    return behaviour
        return Behaviour()


def text_of(content: object) -> str:
    """The text of a message's content, be it a string or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


async def _streamed(
    request: web.Request, call: ModelCall, behaviour: Behaviour, *, wants_tool: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def send(delta: dict[str, Any], finish_reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        await response.write(_event(_envelope("chat.completion.chunk", choice)))

    if behaviour.silent_until and not wants_tool:
        await behaviour.silent_until.wait()
    await send({"role": "assistant"})
    if wants_tool:
        await send(_tool_message())
        await send({}, "tool_calls")
    else:
        for word in _answer_text(call, behaviour).split(" "):
            await send({"content": word + " "})
            await asyncio.sleep(behaviour.gap_s)  # the model's pace, not a wait for something
        await send({}, "stop")
    await response.write(_event(_envelope("chat.completion.chunk", None) | {"usage": _USAGE}))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _answer_text(call: ModelCall, behaviour: Behaviour) -> str:
    text = f"stub saw {len(call.messages)} non-system messages; roles={call.roles}"
    return text + "".join(f" word{n}" for n in range(behaviour.words))


def _tool_message() -> dict[str, Any]:
    # `todo` only keeps a list in the agent's memory: no file, no network, no approval.
    arguments = json.dumps({"todos": [{"id": "1", "content": "prove it", "status": "in_progress"}]})
    function = {"name": "todo", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}],
    }


_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def _envelope(kind: str, choice: dict[str, Any] | None) -> dict[str, Any]:
    choices = [] if choice is None else [choice]
    return {"id": "stub-1", "object": kind, "created": 1, "model": MODEL, "choices": choices}


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
