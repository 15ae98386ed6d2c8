"""Chat turns as a client sends them, and what the client reads from the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support import raw_http

COMPLETIONS = "/v1/chat/completions"
SESSION_ID = "X-Hermes-Session-Id"
SESSION_KEY = "X-Hermes-Session-Key"
SIDECAR_ERROR = "X-Hermes-Sidecar-Error"
SIDECAR_SESSION = "X-Hermes-Sidecar-Session"

# One red pixel.
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True)
class Turn:
    """A turn's answer and the assistant's text in it."""

    answer: raw_http.Answer
    text: str

    @property
    def session_id(self) -> str | None:
        return self.answer.value(SESSION_ID)

    @property
    def sidecar_session(self) -> str | None:
        return self.answer.value(SIDECAR_SESSION)


def body(prompt: str, *, streamed: bool, image: str | None = None) -> bytes:
    """A request with the new turn alone, no history: what the model is shown beyond it, the gateway remembered."""
    content: Any = prompt
    if image is not None:
        content = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": image}}]
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "hermes-agent", "messages": messages, "stream": streamed}).encode()


async def turn(
    url: str, prompt: str, fields: raw_http.Fields = (), *, streamed: bool, image: str | None = None
) -> Turn:
    """One successful turn; fails with the answer's body if it is not a 200."""
    typed: raw_http.Fields = [("Content-Type", "application/json"), *fields]
    answer = await raw_http.ask(url, "POST", COMPLETIONS, typed, body(prompt, streamed=streamed, image=image))
    assert answer.status == 200, f"{answer.status}: {answer.body!r}"
    return Turn(answer, text_of(answer.body, streamed=streamed))


def text_of(answer_body: bytes, *, streamed: bool) -> str:
    """The assistant's text; a stream that does not end with `[DONE]` fails."""
    if not streamed:
        return str(json.loads(answer_body)["choices"][0]["message"]["content"])
    lines = [line for line in answer_body.decode().split("\n") if line.startswith("data: {")]
    assert answer_body.endswith(b"data: [DONE]\n\n"), answer_body[-200:]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line[6:]).get("choices", [])]
    return "".join(delta.get("content") or "" for delta in deltas).strip()


def bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")
