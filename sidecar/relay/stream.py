"""A passive observer of an answer's payload: first token, gaps between events, usage. It returns nothing, so it can
change nothing.

Law: the counts are the same however the bytes are cut. Keep-alive comments are no events, and events without data are
none either. Lines end with CRLF, CR or LF. Source: the HTML standard, server-sent events, 9.2.6.
"""

from __future__ import annotations

import json
import re
import time
from typing import Final, Protocol

_TAIL_BYTES: Final = 4096
"""How much of the payload's end is searched for `usage`: the event that holds it, and `[DONE]` after it."""
_TAIL_GROWS_TO_BYTES: Final = 4 * _TAIL_BYTES
"""Shortening it for every piece would cost more than all else here."""
_TOKEN: Final = re.compile(rb'"(?:content|reasoning_content|text|delta|arguments)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"[^"]')
"""The beginning of a delta that says something; the first chunk of many servers has an empty one."""
_TOKEN_OVERLAP_BYTES: Final = 64
"""More than the longest match, so that none is lost where the bytes are cut."""
_FLAT_USAGE: Final = re.compile(
    rb'"usage"%(s)s:%(s)s\{%(s)s"prompt_tokens"%(s)s:%(s)s%(n)s%(s)s,%(s)s"completion_tokens"%(s)s:%(s)s%(n)s%(s)s,'
    rb'%(s)s"total_tokens"%(s)s:%(s)s%(n)s%(s)s\}' % {b"s": rb"[ \t\r\n]*+", b"n": rb"(0|[1-9][0-9]{0,11})"}
)
"""The usual three, and nothing else: reading them so takes a third of what JSON takes."""
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_READER: Final = json.JSONDecoder()
_COUNTS: Final = {"prompt": ("prompt_tokens", "input_tokens"), "completion": ("completion_tokens", "output_tokens")}
"""Each type's names: chat completions say one, responses the other."""
_MOST_TOKENS: Final = 10**12
"""No answer has more; a number beyond it would only spoil the sum."""
_LINE_START_BYTES: Final = 5
"""How much of an unfinished line is kept: enough to tell whether it is a data line."""


class Gaps(Protocol):
    """Where the gaps between events go."""

    def observe(self, seconds: float, times: int = 1) -> None: ...


class PayloadObserver:
    """Keeps an answer's end, to read its `usage`."""

    __slots__ = ("_tail", "_tail_bytes")

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._tail_bytes = 0

    def saw(self, payload: bytes) -> None:
        """Some of the payload passed."""
        self._tail.append(payload)
        self._tail_bytes += len(payload)
        if self._tail_bytes > _TAIL_GROWS_TO_BYTES:
            self._shorten_tail()

    def _shorten_tail(self) -> None:
        end = b"".join(self._tail)[-_TAIL_BYTES:]
        self._tail = [end]
        self._tail_bytes = len(end)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts by type (`prompt`, `completion`), as the answer told them last; empty where it did not."""
        text = b"".join(self._tail)[-_TAIL_BYTES:]
        at = len(text)
        while (at := text.rfind(b'"usage"', 0, at)) >= 0:
            flat = _FLAT_USAGE.match(text, at)
            if flat is not None:
                return {"prompt": int(flat[1]), "completion": int(flat[2])}
            match = _USAGE.match(text, at)
            if match is None:
                continue
            try:
                usage, _ = _READER.raw_decode(text[match.end() - 1 :].decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                continue
            if counts := _counts(usage):
                return counts
        return {}


class StreamObserver(PayloadObserver):
    """Observes a stream of events."""

    __slots__ = (
        "_before_token",
        "_block_has_data",
        "_gaps",
        "_is_between_events",
        "_last_event_at",
        "_line_start",
        "_skips_lf",
        "events",
        "first_token_at",
    )

    def __init__(self, gaps: Gaps) -> None:
        super().__init__()
        self._gaps = gaps
        self._line_start = b""
        self._block_has_data = False
        self._skips_lf = False
        self._is_between_events = True
        """Nothing of what passed matters for what comes."""
        self._last_event_at = 0.0
        self._before_token = b""
        self.events = 0
        self.first_token_at: float | None = None
        """On the monotonic clock."""

    def saw(self, payload: bytes) -> None:
        self._tail.append(payload)  # as above, without the call: this runs for every token
        self._tail_bytes += len(payload)
        if self._tail_bytes > _TAIL_GROWS_TO_BYTES:
            self._shorten_tail()
        if self.first_token_at is None:
            self._look_for_token(payload)
        ended = self._whole_events(payload) or self._ended_events(payload)
        if not ended:
            return
        now = time.monotonic()
        if self.events:
            self._gaps.observe(now - self._last_event_at)
        if ended > 1:  # they came together
            self._gaps.observe(0.0, ended - 1)
        self.events += ended
        self._last_event_at = now

    def _look_for_token(self, payload: bytes) -> None:
        text = self._before_token + payload
        if _TOKEN.search(text) is not None:
            self.first_token_at = time.monotonic()
            self._before_token = b""
        else:
            self._before_token = text[-_TOKEN_OVERLAP_BYTES:]

    def _whole_events(self, payload: bytes) -> int:
        """How many events these are, if they are the usual ones and no others: whole, each beginning with its data."""
        if (
            not self._is_between_events
            or payload[:5] != b"data:"
            or payload[-2:] != b"\n\n"
            or payload.find(b"\r") >= 0
        ):
            return 0
        if payload.find(b"\n") == len(payload) - 2:
            return 1
        blocks = payload.count(b"\n\n")
        return blocks if payload.count(b"\n\ndata:") == blocks - 1 else 0

    def _ended_events(self, payload: bytes) -> int:
        """How many events with data end in this payload."""
        if not payload:
            return 0
        if self._skips_lf and payload[:1] == b"\n":
            payload = payload[1:]
        self._skips_lf = payload.endswith(b"\r")
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = payload.split(b"\n")
        lines[0] = self._line_start + lines[0]
        self._line_start = lines.pop()[:_LINE_START_BYTES]
        ended = 0
        for line in lines:
            if line:
                if line[:5] in (b"data:", b"data"):
                    self._block_has_data = True
            elif self._block_has_data:
                ended += 1
                self._block_has_data = False
        self._is_between_events = not (self._line_start or self._block_has_data or self._skips_lf)
        return ended


def _counts(usage: object) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    found = {}
    for kind, names in _COUNTS.items():
        for name in names:
            value = usage.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKENS:
                found[kind] = value
                break
    return found
