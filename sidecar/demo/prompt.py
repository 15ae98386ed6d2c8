"""What a chat request says, and which ids it may name: the rules of hermes-agent 0.19, so what works here works there.

Nothing here awaits or knows HTTP.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

MAX_HEADER_CHARS = 256

Content = str | list[dict[str, object]]


class BadRequestError(Exception):
    """A request that the real gateway answers with 400; `message` is its sentence."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


# Ids ----------------------------------------------------------------------------------------------------------------


def checked_session_id(raw: str) -> str:
    """`raw` if it may name a session, else `BadRequestError`: an id becomes part of file names in the real gateway."""
    looks_like_path = any(part in raw for part in ("/", "\\", "..")) or (raw[:1].isalpha() and raw[1:2] == ":")
    if looks_like_path or not _fits_a_header(raw):
        raise BadRequestError("Invalid session ID")
    if len(raw) > MAX_HEADER_CHARS:
        raise BadRequestError("Session ID too long")
    return raw


def checked_session_key(raw: str) -> str:
    """`raw` if it can be given back in the answer, else `BadRequestError`."""
    if not _fits_a_header(raw):
        raise BadRequestError("Invalid session key")
    if len(raw) > MAX_HEADER_CHARS:
        raise BadRequestError("Session key too long")
    return raw


def derived_session_id(system_prompt: str | None, first_user_message: Content) -> str:
    """The id of a conversation that named none: two that open alike share it, two that do not never meet again."""
    seed = f"{system_prompt or ''}\n{first_user_message}"
    return "api-" + hashlib.sha256(seed.encode(errors="backslashreplace")).hexdigest()[:16]


def _fits_a_header(value: str) -> bool:
    # Lone surrogates stand for bytes that were not UTF-8; aiohttp could not write them back.
    return not any("\ud800" <= char <= "\udfff" or char in "\r\n\0" for char in value)


# The conversation in a request's body ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat request: the new message, what its body claims went before, and the id that follows from both."""

    text: str
    has_image: bool
    earlier: tuple[tuple[str, str], ...]
    derived_id: str


def read_prompt(messages: object) -> Prompt:
    """The request's `messages` as a `Prompt`, or `BadRequestError` where the real gateway would answer 400."""
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("Missing or invalid 'messages' field")
    system_parts: list[str] = []
    turns: list[tuple[str, Content]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequestError(f"messages[{index}] is not an object")
        role, content = message.get("role"), message.get("content")
        if role == "system":
            system_parts.append(_stored_text(_normalised(content, f"messages[{index}].content")))
        elif role in ("user", "assistant"):
            turns.append((role, _normalised(content, f"messages[{index}].content")))
    newest = turns[-1][1] if turns else ""
    if not _stored_text(newest).strip():
        raise BadRequestError("No user message found in messages")
    first_user: Content = next((content for role, content in turns if role == "user"), "")
    return Prompt(
        text=_stored_text(newest),
        has_image=isinstance(newest, list),
        earlier=tuple((role, _stored_text(content)) for role, content in turns[:-1]),
        derived_id=derived_session_id("\n".join(system_parts) if system_parts else None, first_user),
    )


def _normalised(content: object, param: str) -> Content:
    """Plain text where there is only text, else a list of text and image parts."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else json.dumps(content)
    parts = [part for item in content if (part := _normalised_part(item, param)) is not None]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(str(part["text"]) for part in parts)


def _normalised_part(item: object, param: str) -> dict[str, object] | None:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": str(item.get("text") or "")}
    if kind not in ("image_url", "input_image"):
        raise BadRequestError(
            f"Unsupported content part type {kind!r}. Only text and image_url/input_image parts are supported.",
            code="unsupported_content_type",
            param=param,
        )
    reference = item.get("image_url")
    url = reference.get("url") if isinstance(reference, dict) else reference
    if not isinstance(url, str) or not url.strip():
        raise BadRequestError("Image parts must include a non-empty image URL.", code="invalid_image_url", param=param)
    lowered = url.strip().lower()
    if lowered.startswith("data:"):
        if not lowered.startswith("data:image/") or "," not in lowered:
            raise BadRequestError(
                "Only image data URLs are supported. Non-image data payloads are not supported.",
                code="unsupported_content_type",
                param=param,
            )
    elif not lowered.startswith(("http://", "https://")):
        raise BadRequestError(
            "Image inputs must use http(s) URLs or data:image/... URLs.", code="invalid_image_url", param=param
        )
    return {"type": "image_url", "image_url": {"url": url.strip()}}


def _stored_text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) if part["type"] == "text" else "[screenshot]" for part in content)
