"""What a verification finds out, before anybody judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto


class End(Enum):
    """How one turn ended."""

    COMPLETE = auto()
    REFUSED = auto()  # any status but 200
    UNREACHABLE = auto()  # no connection
    TIMED_OUT = auto()
    BROKE_OFF = auto()  # the connection broke before or inside the answer
    NO_END = auto()  # a stream that closed cleanly, but without saying that it is complete
    NOT_CHAT = auto()  # 200, but not what a chat endpoint answers
    AGENT_FAILED = auto()  # 200, and in it the news that the agent gave up


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What an error's body said. `from_sidecar`: it is the sidecar's own error, not the gateway's."""

    message: str = ""
    code: str = ""
    hint: str = ""
    from_sidecar: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat turn. `mapping`: X-Hermes-Sidecar-Session; `recalled`: the answer named the token of the turn before."""

    name: str
    end: End
    status: int | None = None
    session_id: str | None = None
    mapping: str | None = None
    recalled: bool = False
    error: ErrorAnswer = field(default_factory=ErrorAnswer)
    detail: str = ""


class HistoryState(Enum):
    READ = auto()
    KEY_NEEDED = auto()
    NO_ROUTE = auto()
    UNKNOWN_SESSION = auto()
    UNREADABLE = auto()


@dataclass(frozen=True, slots=True)
class History:
    """What the session's own record showed: whether the messages of the first and second turn stand in it."""

    state: HistoryState
    has_first: bool = False
    has_second: bool = False
    detail: str = ""
    session_id: str | None = None
    """Whose history it is, as the answer says: of a session that was moved, the newest one's."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two turns under one key. `second` and `history` are None where an earlier step failed."""

    key: str
    first: Turn
    second: Turn | None = None
    history: History | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    base_url: str
    limit_s: float
    text: Pair
    image: Pair | None = None


@dataclass(frozen=True, slots=True)
class Leg:
    """Long turns under one key. `tip`: the session that the gateway moved them to; `following`: the turn after that."""

    key: str
    streamed: bool
    turns: tuple[Turn, ...]
    tip: str | None = None
    following: Turn | None = None
    history: History | None = None

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        return self.turns if self.following is None else (*self.turns, self.following)
