"""From files and environment to settings, or to a line for every fault.

Law: every fault is found in one go, and no line repeats a refused value, since it may be a secret in the wrong place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import SecretStr, ValidationError

from sidecar.config import checks, credentials, sources, words
from sidecar.config.models import Settings
from sidecar.config.sources import Source
from sidecar.config.words import Finding

_NOTHING: Mapping[str, str] = MappingProxyType({})


class ConfigFaults(Exception):
    """The configuration cannot be used. `faults`: a line each, made for a person."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = [words.one_line(fault) for fault in faults]
        super().__init__("; ".join(self.faults))


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Environment beats file, file beats systemd's credentials, they beat defaults.

    `path` None: $HERMES_SIDECAR_CONFIG, else the first of the usual files, else defaults alone.
    Raises ConfigFaults with everything that is wrong, not only the first.
    """
    environ = os.environ if environ is None else environ
    said_by = ""
    if path is None and environ.get(sources.ENV_FILE):
        path, said_by = Path(environ[sources.ENV_FILE]), f" (from {sources.ENV_FILE})"
    path = path or sources.default_file(environ)
    file = Source(Settings, {}) if path is None else sources.file_source(Settings, path, said_by)
    return _settings(file, environ, path)


def from_mapping(values: Mapping[str, Any], environ: Mapping[str, str] = _NOTHING) -> Settings:
    """The settings that a TOML file with these values would give. Raises ConfigFaults."""
    return _settings(Source(Settings, values), environ, None)


def _settings(file: Source, environ: Mapping[str, str], path: Path | None) -> Settings:
    environment = sources.environment_source(Settings, environ)
    from_environment = environment.keys() & words.keys()
    settings, findings = _validated((environment, file, sources.credentials_source(Settings, environ)))
    findings = [*environment.faults, *findings]
    findings += _add_secrets(settings, environ)
    settings._source_file = path
    # Without the file, what the rest says cannot be judged as a whole.
    if not file.faults:
        findings += checks.across(settings, {finding.key for finding in findings})
    faults = [finding.line(from_environment) for finding in [*file.faults, *findings]]
    if faults:
        raise ConfigFaults(faults)
    return settings


def _validated(ordered: tuple[Source, ...]) -> tuple[Settings, list[Finding]]:
    """The settings, faulty keys left at their defaults, and the faults of these."""
    try:
        return Settings(_build_sources=(ordered, {})), []  # type: ignore[call-arg]  # of BaseSettings, unseen by mypy
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    for error in errors:
        section, *rest = error["loc"]
        for source in ordered:
            source.discard(str(section), str(rest[0]) if rest else None)
    settings, further = _validated(ordered)
    return settings, [*(words.finding(error) for error in errors), *further]


def _add_secrets(settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """Read the gateway's key and the clients' tokens into `settings`."""
    findings: list[Finding] = []
    key_file, tokens_file = settings.gateway.token_file, settings.listen.tokens_file
    if sources.ENV_TOKEN in environ:
        try:
            key = credentials.gateway_token(environ[sources.ENV_TOKEN].encode(errors="surrogateescape"))
            settings.gateway._token = SecretStr(key)
        except ValueError as exc:
            findings.append(Finding(sources.ENV_TOKEN, str(exc)))
    elif key_file is not None:
        try:
            settings.gateway._token = SecretStr(credentials.gateway_token(credentials.read(key_file)))
        except ValueError as exc:
            findings.append(Finding("gateway.token_file", f"names a file that {exc}"))
    if tokens_file is not None:
        try:
            settings.listen._client_tokens = credentials.client_tokens(credentials.read(tokens_file))
        except ValueError as exc:
            findings.append(Finding("listen.tokens_file", f"names a file that {exc}"))
    return findings
