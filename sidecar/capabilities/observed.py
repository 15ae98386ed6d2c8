"""What real traffic has shown: at no cost per piece, and without keeping anything of what was said."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from sidecar.capabilities.model import ENHANCED, Cause, Finding
from sidecar.relay.answer_heads import AnswerHead

_IMAGE_PART = re.compile(rb'"type"\s*:\s*"(?:image_url|input_image)"')
_CHAT = "/v1/chat/completions"
_PATHS = {"models": "/v1/models", "skills": None}  # skills: below /api or below /v1


class Observed:
    """Findings from traffic; each is made once. `on_news` is called at each new one."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.findings: dict[str, Finding] = {}
        self._on_news = on_news
        self._wanted = {"chatCompletions", "streaming", "images", "models", *ENHANCED}
        self.wants_images = True
        """Whether request bodies are still looked at for image parts."""

    def forget(self, names: set[str] | None = None) -> None:
        """The backend may be another one now, or twice denied what was seen."""
        for name in names if names is not None else set(self.findings):
            self.findings.pop(name, None)
            self._wanted.add(name)
        self.wants_images = "images" in self._wanted

    def is_curious(self, route: str, *, had_image: bool, is_stream: bool) -> bool:
        """Whether an answer on this route could show something new."""
        if route == "chat_completions":
            return had_image or "chatCompletions" in self._wanted or (is_stream and "streaming" in self._wanted)
        return had_image or route in self._wanted

    def answered(self, route: str, head: AnswerHead, *, had_image: bool) -> None:
        """An exchange with the gateway got its answer's head."""
        status = head.status
        if not 200 <= status < 300:
            return
        content_type = head.content_type
        if b"html" in content_type:
            return
        if route == "chat_completions":
            self._saw("chatCompletions", _CHAT, status, "a chat was answered")
            if content_type.startswith(b"text/event-stream"):
                self._saw("streaming", _CHAT, status, "a streamed answer came")
        elif b"json" in content_type:
            self._saw(route, _PATHS.get(route, f"/api/{route}"), status, "a client was answered")
        if had_image:
            self._saw("images", _CHAT, status, "a request with an image was answered")

    def _saw(self, name: str, path: str | None, status: int, reason: str) -> None:
        if name not in self._wanted:
            return
        self._wanted.discard(name)
        if name == "images":
            self.wants_images = False
        self.findings[name] = Finding(True, "observed", Cause.PRESENT, reason, path, status, "gateway", time.time())
        self._on_news()


def has_image_part(piece: bytes) -> bool:
    """Whether a piece of a request body shows the beginning of an image part."""
    # What somebody writes about such a part does not match: quotes inside of text are escaped. An image's own data has
    # no underscore, and to find that there is none takes a fortieth of the time that the word takes.
    return piece.find(b"_") >= 0 and piece.find(b"image") >= 0 and _IMAGE_PART.search(piece) is not None
