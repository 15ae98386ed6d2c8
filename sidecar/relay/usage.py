"""Reads what an answer says of its `usage`, pure.

Law: what is not understood counts nothing. The usual three counts are read by hand, for a quarter of JSON's price;
everything else is read as JSON.
"""

from __future__ import annotations

import json
import re
from typing import Final

from sidecar.relay.wire import number_at

_USAGE: Final = b'"usage"'
_OBJECT: Final = re.compile(rb'"usage"\s*:\s*\{')
_READER: Final = json.JSONDecoder()
_PROMPT: Final = b'"prompt_tokens"'
_COMPLETION: Final = b'"completion_tokens"'
_TOTAL: Final = b'"total_tokens"'
_COUNTS: Final = {"prompt": ("prompt_tokens", "input_tokens"), "completion": ("completion_tokens", "output_tokens")}
"""Each type's names: chat completions say one, responses the other."""
_MOST_TOKENS: Final = 10**12
"""No answer has more; a number beyond it would only spoil the sum."""
_DIGITS: Final = 12
_BRACE: Final = 123
_END_BRACE: Final = 125
_COMMA: Final = 44
_COLON: Final = 58
"""`{`, `}`, `,` and `:`, as bytes are numbers."""


def usage_in(text: bytes) -> dict[str, int]:
    """Token counts by type (`prompt`, `completion`), as `text` tells them last; empty where it does not."""
    at = len(text)
    while (at := text.rfind(_USAGE, 0, at)) >= 0:
        prompt, completion = _usual_counts(text, at)
        if prompt >= 0:
            return {"prompt": prompt, "completion": completion}
        match = _OBJECT.match(text, at)
        if match is None:
            continue
        try:
            usage, _ = _READER.raw_decode(text[match.end() - 1 :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if counts := _counts(usage):
            return counts
    return {}


def _usual_counts(text: bytes, at: int) -> tuple[int, int]:
    """Prompt and completion of the `"usage": {…}` at `at`, if it is the usual three and nothing else; else -1 twice."""
    at = _past(text, _past_blanks(text, at + len(_USAGE)), _COLON)
    prompt, at = _counted(text, at, _BRACE, _PROMPT)
    completion, at = _counted(text, at, _COMMA, _COMPLETION)
    total, at = _counted(text, at, _COMMA, _TOTAL)
    return (prompt, completion) if total >= 0 and _past(text, at, _END_BRACE) != _nowhere(text) else (-1, -1)


def _counted(text: bytes, at: int, mark: int, name: bytes) -> tuple[int, int]:
    """The number behind `mark`, `name` and a colon, and the place after it and its blanks; else -1 and nowhere."""
    at = _past(text, at, mark)
    named = at + len(name)
    if text[at:named] != name:
        return -1, _nowhere(text)
    start = _past(text, _past_blanks(text, named), _COLON)
    number, at = number_at(text, start, _DIGITS)
    if number < 0 or (text[start] == 48 and at > start + 1):  # JSON has no leading zeros
        return -1, _nowhere(text)
    return number, _past_blanks(text, at)


def _past(text: bytes, at: int, mark: int) -> int:
    """The place after `mark` and the blanks behind it, if it stands at `at`; else nowhere."""
    return _past_blanks(text, at + 1) if at < len(text) and text[at] == mark else _nowhere(text)


def _past_blanks(text: bytes, at: int) -> int:
    end = len(text)
    while at < end and text[at] in (32, 9, 10, 13):
        at += 1
    return at


def _nowhere(text: bytes) -> int:
    """Where nothing stands."""
    return len(text) + 1


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
