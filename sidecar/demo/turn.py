"""One answer of the demo gateway, in the two forms that a client can ask for."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Mapping

from aiohttp import web

from sidecar.demo.memory import Session


class Turn:
    """One answer, in the two forms that a client can ask for."""

    def __init__(self, session: Session, text: str, *, prompt_tokens: int, model: str) -> None:
        self.text = text
        self._session = session
        self._envelope = {"id": f"chatcmpl-{uuid.uuid4().hex[:29]}", "created": int(time.time()), "model": model}
        answer_tokens = len(text.split())
        # Words, not tokens: there is no tokenizer here, but clients that add up usage shall have something to add.
        self._usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
        }

    def completion(self) -> dict[str, object]:
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}
        return self._envelope | {"object": "chat.completion", "choices": [choice], "usage": self._usage}

    async def stream(self, request: web.Request, headers: Mapping[str, str], word_delay_s: float) -> web.StreamResponse:
        """Writes the answer word by word. A client that leaves ends it; the session then keeps what had been said."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            | dict(headers)
        )
        await response.prepare(request)
        await response.write(self._chunk({"role": "assistant"}))
        said, end = "", "interrupted"
        try:
            for word in re.findall(r"\S+\s*", self.text):
                await asyncio.sleep(word_delay_s)
                await response.write(self._chunk({"content": word}))
                said += word
            end = "stop"
        finally:
            # Before the last event: a client that has read it may ask for the history at once.
            self._session.add("assistant", said, end)
        await response.write(self._chunk({}, finish_reason="stop") + b"data: [DONE]\n\n")
        return response

    def _chunk(self, delta: Mapping[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        chunk: dict[str, object] = self._envelope | {"object": "chat.completion.chunk", "choices": [choice]}
        if finish_reason is not None:
            chunk["usage"] = self._usage
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"
