"""Where the values come from: a TOML file, the environment, systemd's credentials directory.

Law: nothing is judged here but whether a value can be read at all; what it may be, the models say.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from sidecar.config import words
from sidecar.config.words import Finding

ENV_FILE = "HERMES_SIDECAR_CONFIG"
ENV_TOKEN = "HERMES_SIDECAR_GATEWAY__TOKEN"  # noqa: S105  (the name of a variable)
SYSTEM_FILE = Path("/etc/hermes-sidecar/sidecar.toml")

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


class Source(PydanticBaseSettingsSource):
    """Values by section and key, and what could not be read on the way to them."""

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, Any]) -> None:
        super().__init__(settings_cls)
        # Two levels are copied: `without` takes keys out, and the caller's mapping must stay as it is.
        self.values = {name: dict(part) if isinstance(part, Mapping) else part for name, part in values.items()}
        self.faults: list[Finding] = []

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.values

    def keys(self) -> set[str]:
        """ "section.key" of everything that stands here, readable or not."""
        there = {f"{name}.{key}" for name, part in self.values.items() if isinstance(part, dict) for key in part}
        return there | {fault.key for fault in self.faults}

    def discard(self, section: str, key: str | None) -> None:
        """Take a faulty key (or a whole section) out, so that the rest can still be judged."""
        part = self.values.get(section)
        if key is None or not isinstance(part, dict):
            self.values.pop(section, None)
        else:
            part.pop(key, None)


def file_source(settings_cls: type[BaseSettings], path: Path, said_by: str = "") -> Source:
    """The values of a TOML file; a file that cannot be read is a fault. `said_by`: who named it, for the message."""
    try:
        return Source(settings_cls, tomllib.loads(path.read_bytes().decode()))
    except OSError as exc:
        why = f"the file cannot be read ({exc.strerror or 'unknown reason'})"
    except UnicodeDecodeError:
        why = "the file is not UTF-8 text"
    except (ValueError, RecursionError) as exc:
        why = f"not valid TOML: {exc}"
    empty = Source(settings_cls, {})
    empty.faults.append(Finding(f"{path}{said_by}", why))
    return empty


def environment_source(settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> Source:
    """The values of `HERMES_SIDECAR_<SECTION>__<KEY>`; lists as JSON, everything else as it stands."""
    source = Source(settings_cls, {})
    known = {
        words.variable(f"{section}.{key}"): (section, key, field)
        for section, model in words.sections().items()
        for key, field in model.model_fields.items()
    }
    for name in sorted(environ):
        if not name.startswith(words.ENV_PREFIX) or name in (ENV_FILE, ENV_TOKEN):
            continue
        if name not in known:
            near = words.nearest_variable(name, [*known, ENV_FILE, ENV_TOKEN])
            source.faults.append(Finding(name, f"there is no such variable; the nearest known one is {near}"))
            continue
        section, key, field = known[name]
        try:
            value = _from_text(environ[name], field)
        except ValueError as exc:
            source.faults.append(Finding(f"{section}.{key}", str(exc)))
            continue
        source.values.setdefault(section, {})[key] = value
    return source


def credentials_source(settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> Source:
    """The files that systemd's LoadCredential= gives, as the last resort for the two files of keys."""
    values: dict[str, dict[str, str]] = {}
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if directory:
        for section, key, name in (
            ("gateway", "token_file", "gateway-token"),
            ("listen", "tokens_file", "client-tokens"),
        ):
            path = Path(directory, name)
            try:
                path.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                pass  # it may be there: reading it says why it cannot be used
            values[section] = {key: str(path)}
    return Source(settings_cls, values)


def default_file(environ: Mapping[str, str]) -> Path | None:
    """The first of the usual files that exists, or that at least cannot be shown not to."""
    configured = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME", "")
    # XDG base directories: a relative path is to be ignored.
    base = Path(configured) if configured.startswith("/") else Path(home, ".config") if home.startswith("/") else None
    candidates = [SYSTEM_FILE] if base is None else [base / "hermes-sidecar" / "sidecar.toml", SYSTEM_FILE]
    for path in candidates:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return path  # it may be there: reading it says why it cannot be used
        return path
    return None


def _from_text(text: str, field: FieldInfo) -> Any:
    """The value that `text` writes. What is no number stays text, for the models to refuse in their own words."""
    kind = _plain_type(field.annotation)
    if kind is tuple:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ValueError('is not valid JSON; a list is written as ["a", "b"]') from exc
    if kind is bool:
        word = text.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else text
    if kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _plain_type(annotation: Any) -> Any:
    """int for `Annotated[int, ...] | None`, tuple for `tuple[str, ...]`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain_type(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return _plain_type(next(part for part in get_args(annotation) if part is not NoneType))
    return origin or annotation
