"""The configuration told back to a person: what is in effect, and what this version does not do yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sidecar.config.models import Settings
from sidecar.config.words import one_line, sections


def describe(settings: Settings) -> str:
    """The effective configuration as TOML, secrets only as `set` or `not set`."""
    origin = f"file: {one_line(str(settings.source_file))}" if settings.source_file else "no file: defaults"
    lines = [f"# {origin}, and HERMES_SIDECAR_ variables of the environment"]
    for name in sections():
        section: BaseModel = getattr(settings, name)
        lines += ["", f"[{name}]"]
        for key in type(section).model_fields:
            value = getattr(section, key)
            lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
        if name == "listen":
            lines.append(f"# client tokens: {_set(settings.listen.client_tokens)}")
        if name == "gateway":
            lines.append(f"# token: {_set(settings.gateway.token)}")
        if name == "store" and settings.store.url.startswith("redis://"):
            lines.append(f"# password: {_set(settings.store.has_password)}")
    return "\n".join(lines) + "\n"


def _set(secret: object) -> str:
    return "set" if secret else "not set"


def _toml(value: Any) -> str:
    if isinstance(value, BaseModel):
        pairs = ((key, getattr(value, key)) for key in type(value).model_fields)
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in pairs if part not in (None, "")) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    # JSON and TOML write numbers, booleans and plain strings alike.
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
