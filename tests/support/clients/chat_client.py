"""A chat application in Python, written with what its argument names: `openai`, `langchain`, `litellm`, or `curl`.

A job comes in as a line of JSON, and what its user would see goes out as lines: {"piece": …}, {"tool": …}, and at last
{"end": …}. The line "leave" is the user's Stop button. Runs in the library's own venv, so it imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

Job = dict[str, Any]
Seen = dict[str, Any]

_NAME = "hermes-agent"


def messages_of(job: Job) -> list[dict[str, Any]]:
    content: Any = job["prompt"]
    if job["image"]:
        content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": job["image"]}}]
    return [{"role": "user", "content": content}]


def tools_of(job: Job) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": job["tool"]}]} if job["tool"] else {}


async def _read(answer: Any, job: Job) -> AsyncIterator[Seen]:
    """What OpenAI's own objects say, which LiteLLM gives as well."""
    if not job["stream"]:
        message = answer.choices[0].message
        if message.content:
            yield {"piece": message.content}
        for call in message.tool_calls or ():
            yield {"tool": {"name": call.function.name, "arguments": call.function.arguments}}
        return
    name = arguments = ""
    async for chunk in answer:
        # The agent also sends events of its own, about its work; here they are chunks without `choices`.
        for choice in chunk.choices or ():
            if choice.delta.content:
                yield {"piece": choice.delta.content}
            for call in choice.delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    if name:
        yield {"tool": {"name": name, "arguments": arguments}}


def openai_sdk() -> Callable[[Job], AsyncIterator[Seen]]:
    openai: Any = importlib.import_module("openai")

    async def ask(job: Job) -> AsyncIterator[Seen]:
        async with openai.AsyncOpenAI(base_url=job["url"], api_key=job["key"], max_retries=0) as client:
            answer = await client.chat.completions.create(
                model=_NAME,
                messages=messages_of(job),
                stream=job["stream"],
                extra_headers={"X-Hermes-Session-Key": job["session"]},
                **tools_of(job),
            )
            async for seen in _read(answer, job):
                yield seen

    return ask


def litellm_sdk() -> Callable[[Job], AsyncIterator[Seen]]:
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True

    async def ask(job: Job) -> AsyncIterator[Seen]:
        answer = await litellm.acompletion(
            model=f"openai/{_NAME}",
            api_base=job["url"],
            api_key=job["key"],
            messages=messages_of(job),
            stream=job["stream"],
            max_retries=0,
            extra_headers={"X-Hermes-Session-Key": job["session"]},
            **tools_of(job),
        )
        async for seen in _read(answer, job):
            yield seen

    return ask


def langchain_chat() -> Callable[[Job], AsyncIterator[Seen]]:
    chat_openai: Any = importlib.import_module("langchain_openai").ChatOpenAI

    async def ask(job: Job) -> AsyncIterator[Seen]:
        model = chat_openai(base_url=job["url"], api_key=job["key"], model=_NAME, max_retries=0)
        if job["tool"]:
            model = model.bind_tools(tools_of(job)["tools"])
        bound = model.bind(extra_headers={"X-Hermes-Session-Key": job["session"]})
        if job["stream"]:
            whole: Any = None
            async for chunk in bound.astream(messages_of(job)):
                whole = chunk if whole is None else whole + chunk
                if chunk.content:
                    yield {"piece": chunk.content}
        else:
            whole = await bound.ainvoke(messages_of(job))
            if whole.content:
                yield {"piece": whole.content}
        for call in whole.tool_calls:
            yield {"tool": {"name": call["name"], "arguments": json.dumps(call["args"])}}

    return ask


class CurlFailed(Exception):
    """`curl` ended with this code, and what the terminal shows then."""

    def __init__(self, code: int, shown: str) -> None:
        super().__init__(shown)
        self.kind = f"exit {code}"


def curl() -> Callable[[Job], AsyncIterator[Seen]]:
    async def ask(job: Job) -> AsyncIterator[Seen]:
        body = {"model": _NAME, "messages": messages_of(job), "stream": job["stream"], **tools_of(job)}
        fields = (
            f"Authorization: Bearer {job['key']}",
            "Content-Type: application/json",
            f"X-Hermes-Session-Key: {job['session']}",
        )
        program = await asyncio.create_subprocess_exec(
            *("curl", "-q", "--silent", "--show-error", "--no-buffer", "--fail-with-body", "--noproxy", "*"),
            *(option for field in fields for option in ("--header", field)),
            *("--data", json.dumps(body), f"{job['url']}/chat/completions"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert program.stdout is not None
        tool = {"name": "", "arguments": ""}

        def read(document: dict[str, Any]) -> str:
            text = ""
            for choice in document.get("choices", ()):
                message = choice.get("delta") or choice.get("message") or {}
                text += message.get("content") or ""
                for call in message.get("tool_calls") or ():
                    tool["name"] += call["function"].get("name") or ""
                    tool["arguments"] += call["function"].get("arguments") or ""
            return text

        shown = ""
        try:
            while line := (await program.stdout.readline()).decode():
                shown += line
                if line.startswith("data: {") and (piece := read(json.loads(line[6:]))):
                    yield {"piece": piece}
            if code := await program.wait():
                raise CurlFailed(code, shown)
        finally:
            if program.returncode is None:
                program.send_signal(signal.SIGINT)  # Ctrl-C
                await program.wait()
        if not job["stream"] and (text := read(json.loads(shown))):
            yield {"piece": text}
        if tool["name"]:
            yield {"tool": tool}

    return ask


def tell(seen: Seen) -> None:
    print(json.dumps(seen), flush=True)


async def serve(ask: Callable[[Job], AsyncIterator[Seen]]) -> None:
    async def work(job: Job) -> None:
        try:
            async for seen in ask(job):
                tell(seen)
        except asyncio.CancelledError:
            tell({"end": "left"})
            raise
        except Exception as exc:
            status = getattr(exc, "status_code", None)
            kind = getattr(exc, "kind", type(exc).__name__)
            # Of the error object that was answered, OpenAI's exceptions print the message and keep the rest.
            details = json.dumps(getattr(exc, "body", None), ensure_ascii=False)
            tell({"end": "error", "kind": kind, "status": status, "text": str(exc), "details": details})
        else:
            tell({"end": "complete"})

    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tell({"ready": True})
    working: asyncio.Task[None] | None = None
    while line := await lines.readline():
        if (order := json.loads(line)) != "leave":
            working = asyncio.ensure_future(work(order))
        elif working is not None:
            working.cancel()


if __name__ == "__main__":
    ways = {"openai": openai_sdk, "litellm": litellm_sdk, "langchain": langchain_chat, "curl": curl}
    asyncio.run(serve(ways[sys.argv[1]]()))
