"""Reading what a chat endpoint answered, streamed or not. Nothing here awaits: bytes in, findings out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sidecar.verify.facts import End, ErrorAnswer
from sidecar.verify.wording import shown

# The answer to a one-word question. More than this is something else, and is not read to its end.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_KEPT_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Finding:
    end: End
    text: str = ""
    error: ErrorAnswer = field(default_factory=ErrorAnswer)
    detail: str = ""


def read_completion(content_type: str, body: bytes) -> Finding:
    """An answer that was not streamed: JSON with `choices[0].message`, or what it is instead."""
    document = _json(body)
    if not isinstance(document, dict):
        page = ", perhaps the page of a dashboard" if content_type == "text/html" else ""
        return Finding(End.NOT_CHAT, detail=f"{shown(content_type, 60) or 'something'} came instead of JSON{page}")
    choice = _first_choice(document)
    if choice.get("finish_reason") == "error" or (not choice and "error" in document):
        return Finding(End.AGENT_FAILED, error=read_error(body, from_sidecar=False))
    message = choice.get("message")
    if not isinstance(message, dict):
        return Finding(End.NOT_CHAT, detail="the JSON has no choices with a message")
    return Finding(End.COMPLETE, text=str(message.get("content") or "")[:_MAX_KEPT_CHARS])


def read_error(body: bytes, *, from_sidecar: bool) -> ErrorAnswer:
    """The words of an error's body, in any of the usual shapes; empty where there are none."""
    document = _json(body)
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, str):
        return ErrorAnswer(message=shown(error), from_sidecar=from_sidecar)
    if not isinstance(error, dict):
        detail = document.get("detail") if isinstance(document, dict) else None
        return ErrorAnswer(message=shown(detail) if isinstance(detail, str) else "", from_sidecar=from_sidecar)
    words = {name: shown(value) for name in ("message", "code", "hint") if isinstance(value := error.get(name), str)}
    return ErrorAnswer(**words, from_sidecar=from_sidecar)


class StreamReader:
    """A streamed chat answer, fed as it comes. It is over at `[DONE]`, or with a finish_reason and a clean close."""

    def __init__(self) -> None:
        self.done = False
        self._pending = b""
        self._data: list[bytes] = []
        self._event = b""
        self._text: list[str] = []
        self._kept_chars = 0
        self._finish_reason: str | None = None
        self._error: ErrorAnswer | None = None

    def feed(self, piece: bytes) -> None:
        *lines, self._pending = (self._pending + piece).split(b"\n")
        for line in lines:
            self._line(line.removesuffix(b"\r"))

    def finding(self) -> Finding:
        """What the stream was, now that it has ended."""
        text = "".join(self._text)
        if self._error is not None:
            return Finding(End.AGENT_FAILED, text, self._error)
        if self._finish_reason == "error":
            return Finding(End.AGENT_FAILED, text)
        if not self.done and self._finish_reason is None:
            return Finding(End.NO_END, text)
        return Finding(End.COMPLETE, text)

    def _line(self, line: bytes) -> None:
        if not line:
            data, event = b"\n".join(self._data), self._event
            self._data, self._event = [], b""
            # Named events tell of tools and progress; the answer itself comes in unnamed ones.
            if data and event in (b"", b"message"):
                self._unnamed_event(data)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value

    def _unnamed_event(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self.done = True
            return
        chunk = _json(data)
        if not isinstance(chunk, dict):
            return
        if "error" in chunk:
            self._error = read_error(data, from_sidecar=False)
        choice = _first_choice(chunk)
        delta = choice.get("delta")
        content = delta.get("content") if isinstance(delta, dict) else None
        if isinstance(content, str) and self._kept_chars < _MAX_KEPT_CHARS:
            self._text.append(content)
            self._kept_chars += len(content)
        if isinstance(reason := choice.get("finish_reason"), str):
            self._finish_reason = reason


def history_markers(body: bytes, markers: tuple[str, str]) -> tuple[bool, bool] | None:
    """Whether the user messages of a session's history hold the two markers; None if that is no history."""
    document = _json(body)
    messages = document.get("data") if isinstance(document, dict) else None
    if not isinstance(messages, list):
        return None
    # A message's content is text or a list of parts; as JSON both can be searched alike.
    said = [
        json.dumps(item.get("content")) for item in messages if isinstance(item, dict) and item.get("role") == "user"
    ]
    first, second = (any(marker in text for text in said) for marker in markers)
    return first, second


def history_session(body: bytes) -> str | None:
    """Whose messages a history holds, where it says so."""
    document = _json(body)
    session_id = document.get("session_id") if isinstance(document, dict) else None
    return session_id if isinstance(session_id, str) and session_id else None


def first_model(body: bytes) -> str | None:
    document = _json(body)
    models = document.get("data") if isinstance(document, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) and name else None


def _first_choice(document: dict[str, Any]) -> dict[str, Any]:
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else {}


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
