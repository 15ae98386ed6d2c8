"""How a fault of the configuration is told: one line, the key first, in words for a person.

Law: pydantic's own texts, addresses and inputs never get out; a refused value is never repeated.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from sidecar.config.models import ConditionSettings, Settings, SourceSettings

ENV_PREFIX = "HERMES_SIDECAR_"

# The models inside lists, for the names of their keys.
_ITEMS: dict[str, type[BaseModel]] = {"sources": SourceSettings, "skip_when": ConditionSettings}

_SENTENCES = {
    "bool_type": "must be true or false",
    "finite_number": "must be a number, not inf or nan",
    "float_type": "must be a number",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "missing": "is missing",
    "model_type": "must be a table of keys and values",
    "path_type": "must be a path in quotes",
    "string_type": "must be text in quotes",
    "tuple_type": "must be a list",
    "value_error": "{error}",
}


class Finding(NamedTuple):
    """One fault. `key` is "section.key", by which later rules know what not to look at."""

    key: str
    reason: str
    within: str = ""  # the place inside the value: "[0].prefix"

    def line(self, from_environment: Collection[str]) -> str:
        """The fault as it is printed. `from_environment`: the keys whose value does not stand in the file."""
        origin = f" (from {variable(self.key)})" if self.key in from_environment else ""
        return f"{self.key}{self.within}: {self.reason}{origin}"


def one_line(text: str) -> str:
    """`text` with what could break a line or a terminal as `?`: a quoted key, or a path, may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def variable(key: str) -> str:
    """The environment variable for "section.key"."""
    return f"{ENV_PREFIX}{key.replace('.', '__')}".upper()


def finding(error: ErrorDetails) -> Finding:
    """What pydantic found, in our words."""
    path = error["loc"]
    key = ".".join(str(part) for part in path[:2])
    within = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[2:])
    if error["type"] == "extra_forbidden":
        return Finding(key, _unknown([str(part) for part in path]), within)
    sentence = _SENTENCES.get(error["type"], "is not what may stand here")
    return Finding(key, sentence.format(**error.get("ctx", {})), within)


def nearest_variable(name: str, known: Iterable[str]) -> str:
    """The environment variable that was probably meant: HERMES_SIDECAR_PORT is listen.port."""
    homes = {**_homes(), "token": "gateway.token"}
    key = name.removeprefix(ENV_PREFIX).lower()
    return variable(homes[key]) if key in homes else _nearest(name.upper(), known)


def sections() -> dict[str, type[BaseModel]]:
    """The model of each section, in the order of the file."""
    found = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: model for name, model in found.items() if isinstance(model, type) and issubclass(model, BaseModel)}


def keys() -> set[str]:
    """Every "section.key" that there is."""
    return {f"{section}.{key}" for section, model in sections().items() for key in model.model_fields}


def _unknown(path: list[str]) -> str:
    """The sentence for a key that does not exist: a slip of the pen, or a key in the wrong section."""
    if path == ["gateway", "token"]:
        return "no key stands in this file; write it into a file of its own and name that in gateway.token_file"
    models, homes = sections(), _homes()
    if len(path) == 1:
        names = {**homes, **{section: section for section in models}}
        return f"there is no such section; the nearest known name is {names[_nearest(path[0], names)]}"
    section, key, *inner = path
    if inner:
        near = _nearest(inner[-1], _ITEMS[key].model_fields)
    else:
        near = homes[key] if key in homes else f"{section}.{_nearest(key, models[section].model_fields)}"
    return f"there is no such key; the nearest known one is {near}"


def _homes() -> dict[str, str]:
    """For each key the first section that has it: "port" is "listen.port"."""
    homes: dict[str, str] = {}
    for section, model in sections().items():
        for key in model.model_fields:
            homes.setdefault(key, f"{section}.{key}")
    return homes


def _nearest(word: str, known: Iterable[str]) -> str:
    # However little they look alike: a poor guess still shows what names look like.
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)[0]
