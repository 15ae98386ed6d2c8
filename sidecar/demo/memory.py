"""What the demo gateway remembers, and what it says about that. Nothing here awaits or knows HTTP."""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.demo.prompt import Prompt

MAX_SESSIONS = 200
MAX_MESSAGES = 200
# The demo's whole memory stays in RAM: with both limits above, this one keeps the worst case in the hundreds of MB.
MAX_TEXT_CHARS = 8_000

_TOKEN = re.compile(r"\btoken-[A-Za-z0-9]{2,64}\b")
_ASKS_FOR_TOKEN = re.compile(r"\btoken\b(?!-)[^?]*\?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Message:
    number: int
    role: str
    text: str
    at: float
    finish_reason: str | None

    def document(self, session_id: str) -> dict[str, object]:
        return {
            "id": self.number,
            "session_id": session_id,
            "role": self.role,
            "content": self.text,
            "timestamp": self.at,
            "finish_reason": self.finish_reason,
        }


@dataclass(slots=True)
class Session:
    """One conversation. The oldest messages go first once there are `MAX_MESSAGES`."""

    session_id: str
    started_at: float = field(default_factory=time.time)
    messages: deque[Message] = field(default_factory=lambda: deque(maxlen=MAX_MESSAGES))
    _number: int = 0

    def add(self, role: str, text: str, finish_reason: str | None = None) -> None:
        self._number += 1
        self.messages.append(Message(self._number, role, text[:MAX_TEXT_CHARS], time.time(), finish_reason))

    def document(self) -> dict[str, object]:
        first = next((message.text for message in self.messages if message.role == "user"), "")
        return {
            "id": self.session_id,
            "source": "api_server",
            "title": None,
            "started_at": self.started_at,
            "ended_at": None,
            "end_reason": None,
            "message_count": len(self.messages),
            "parent_session_id": None,
            "last_active": self.messages[-1].at if self.messages else self.started_at,
            "preview": first[:60],
        }


class Sessions:
    """The sessions of one demo gateway, the least recently used first; that one goes when there are too many."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Session] = OrderedDict()

    def opened(self, session_id: str) -> Session:
        """The session of that id, new if need be, and now the most recently used."""
        session = self._by_id.setdefault(session_id, Session(session_id))
        self._by_id.move_to_end(session_id)
        if len(self._by_id) > MAX_SESSIONS:
            self._by_id.popitem(last=False)
        return session

    def known(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def newest_first(self) -> list[Session]:
        return list(reversed(self._by_id.values()))


def answer_text(session_id: str, earlier: Sequence[tuple[str, str]], prompt: Prompt) -> str:
    """The demo's answer: it shows what is remembered, so that a person sees at a glance whether the session held."""
    seen = len(earlier) + 1
    sentences = [
        f"I am the demo gateway: no model, but a memory. I have seen {seen} message{'s' if seen > 1 else ''} "
        f"of session {session_id}, this one included."
    ]
    if prompt.has_image:
        sentences.append("This one came with an image.")
    remembered = [token for role, text in earlier if role == "user" for token in _TOKEN.findall(text)]
    if remembered:
        sentences.append(f"Earlier in this session you gave me {remembered[-1]}.")
    given_now = _TOKEN.findall(prompt.text)
    if given_now:
        sentences.append(f"I shall remember {given_now[-1]}.")
    elif not remembered and _ASKS_FOR_TOKEN.search(prompt.text):
        sentences.append("You have not given me a token in this session.")
    return " ".join(sentences)
