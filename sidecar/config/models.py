"""The settings: every key with its default and what it may hold. What each means stands in config/sidecar.toml.

Law: frozen, and nothing here reads a file or the environment. What `load` adds to the keys (secrets, the file's name)
stands in private attributes, so that no file can set it and no repr shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    StrictBool,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from sidecar.config import addresses, rules
from sidecar.config.addresses import BaseUrl
from sidecar.config.credentials import ClientToken

Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Filename = Annotated[Path, BeforeValidator(rules.filename)]
# Strict: `true` is no number. TOML knows inf and nan, a timer does not.
Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Family = Literal["sessions", "skills", "memory", "config", "jobs"]


class _Section(BaseModel):
    # hide_input_in_errors: a refused value may be a secret in the wrong place.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ListenSettings(_Section):
    host: Annotated[str, AfterValidator(addresses.host_name)] = "127.0.0.1"
    port: Port = 8650  # 0: any free port
    unix_socket: Annotated[Path, BeforeValidator(rules.socket_path)] | None = None
    workers: Annotated[int, Field(strict=True, ge=1, le=256)] = 1
    # Compared in lower case, without port and brackets.
    allowed_hosts: tuple[Annotated[str, AfterValidator(addresses.allowed_host)], ...] = ()
    # Spelled as a browser sends them, or "*".
    allowed_origins: tuple[Annotated[str, AfterValidator(addresses.allowed_origin)], ...] = ()
    tokens_file: Filename | None = None
    isolate_clients: StrictBool = False
    max_connections: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 8192
    head_timeout_s: Annotated[Seconds, Field(ge=0.1, le=3600)] = 30.0
    body_timeout_s: Annotated[Seconds, Field(ge=0.1, le=86_400)] = 120.0

    _client_tokens: tuple[ClientToken, ...] = PrivateAttr(default=())

    @property
    def client_tokens(self) -> tuple[ClientToken, ...]:
        """What tokens_file holds; empty where clients need no token."""
        return self._client_tokens


class GatewaySettings(_Section):
    # Without a slash or /v1 at the end, whatever was written.
    url: Annotated[str, AfterValidator(rules.gateway_url)] = "http://127.0.0.1:8642"
    ca_file: Filename | None = None
    token_file: Filename | None = None
    connect_timeout_s: Annotated[Seconds, Field(ge=0.01, le=300)] = 5.0
    # At most a day: longer is "no limit", which is 0.
    idle_timeout_s: Annotated[Seconds, Field(ge=0, le=86_400)] = 0.0

    _token: SecretStr | None = PrivateAttr(default=None)

    @property
    def token(self) -> SecretStr | None:
        """The gateway's key, from the environment or token_file."""
        return self._token

    @property
    def base(self) -> BaseUrl:
        return addresses.gateway_base(self.url)

    @property
    def scheme(self) -> str:
        return self.base.scheme

    @property
    def host(self) -> str:
        return self.base.host

    @property
    def port(self) -> int:
        return self.base.port

    @property
    def path_prefix(self) -> str:
        return self.base.path_prefix

    @property
    def netloc(self) -> str:
        return self.base.netloc


class DashboardSettings(_Section):
    url: Annotated[str, AfterValidator(rules.dashboard_url)] = ""
    fill: Annotated[tuple[Family, ...], AfterValidator(rules.unique)] = ("skills", "memory", "config")
    mount: Annotated[str, AfterValidator(rules.mount)] = ""

    @property
    def base(self) -> BaseUrl | None:
        """The dashboard's address taken apart, or None where there is no dashboard."""
        return addresses.dashboard_base(self.url) if self.url else None


class SourceSettings(_Section):
    """Where a conversation's key may stand: a header, or a field of the JSON body."""

    header: Annotated[str, AfterValidator(rules.source_header)] | None = None
    body: Annotated[str, AfterValidator(rules.body_path)] | None = None
    prefix: Annotated[str, AfterValidator(rules.id_prefix)] = ""

    @model_validator(mode="after")
    def _one_place(self) -> SourceSettings:
        if (self.header is None) == (self.body is None):
            raise ValueError("must name either a header or a body field")
        return self

    @property
    def place(self) -> str:
        """`header:x-name` or `body:path.to.key`: the word for this source in answers and metrics."""
        return f"body:{self.body}" if self.header is None else f"header:{self.header.lower()}"


class ConditionSettings(_Section):
    """What marks a side task: a header with a non-empty value, or how the last message begins."""

    header: Annotated[str, AfterValidator(rules.condition_header)] | None = None
    prompt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _one_mark(self) -> ConditionSettings:
        if (self.header is None) == (self.prompt is None):
            raise ValueError("must name either a header or the beginning of a prompt")
        return self


def _distinct_sources(sources: tuple[SourceSettings, ...]) -> tuple[SourceSettings, ...]:
    if rules.repeated(source.place for source in sources):
        raise ValueError("names the same place twice; the second could never be used")
    return sources


class SessionSettings(_Section):
    sources: Annotated[tuple[SourceSettings, ...], AfterValidator(_distinct_sources)] = (
        SourceSettings(header="X-Hermes-Session-Key"),
        SourceSettings(header="X-Claude-Session-Key"),
        SourceSettings(header="X-OpenWebUI-Chat-Id", prefix="openwebui-"),
        SourceSettings(header="X-LibreChat-Conversation-Id", prefix="librechat-"),
    )
    skip_when: tuple[ConditionSettings, ...] = (ConditionSettings(header="X-OpenWebUI-Task"),)
    forward_key: Literal["auto", "always", "never"] = "auto"
    follow_rotation: StrictBool = True
    inject_body: StrictBool = False
    # Such a body is held in memory as a whole, hence the upper bound.
    body_limit_bytes: Annotated[int, Field(strict=True, ge=1, le=268_435_456)] = 1_048_576


class StoreSettings(_Section):
    # Without user name and password, whatever was written: they stand in `_user_info`.
    url: Annotated[str, AfterValidator(rules.store_url)] = "sqlite"

    _user_info: SecretStr | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _put_the_password_apart(cls, values: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        user_info = ""
        if isinstance(values, dict) and isinstance(values.get("url"), str):
            url, user_info = rules.split_store_url(values["url"])
            values = values | {"url": url}
        made = build(values)
        if user_info:
            made._user_info = SecretStr(user_info)
        return made

    @property
    def has_password(self) -> bool:
        return self._user_info is not None

    @property
    def full_url(self) -> SecretStr:
        """The address to connect to, user name and password included."""
        if self._user_info is None:
            return SecretStr(self.url)
        return SecretStr(f"redis://{self._user_info.get_secret_value()}@{self.url.removeprefix('redis://')}")


class ProbeSettings(_Section):
    # The lower bounds keep a slip of the keyboard from becoming a load on the gateway.
    interval_s: Annotated[Seconds, Field(ge=0.01, le=86_400)] = 120.0
    retry_s: Annotated[Seconds, Field(ge=0.01, le=86_400)] = 5.0
    timeout_s: Annotated[Seconds, Field(ge=0.01, le=300)] = 3.0


class AdminSettings(_Section):
    host: Annotated[str, AfterValidator(addresses.host_name)] | None = None
    port: Port | None = None


class ShutdownSettings(_Section):
    grace_s: Annotated[Seconds, Field(ge=0, le=86_400)] = 30.0


class LogSettings(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Settings(BaseSettings):
    """The whole configuration, checked. `sidecar.config.load` makes it."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # Made anew each time: `load` writes secrets into the private attributes of its own sections only.
    listen: ListenSettings = Field(default_factory=ListenSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    dashboard: DashboardSettings = Field(default_factory=DashboardSettings)
    session: SessionSettings = Field(default_factory=SessionSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    probe: ProbeSettings = Field(default_factory=ProbeSettings)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    shutdown: ShutdownSettings = Field(default_factory=ShutdownSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    _source_file: Path | None = PrivateAttr(default=None)

    @property
    def source_file(self) -> Path | None:
        """The file that was read; None where the defaults and the environment are all."""
        return self._source_file

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """No source of pydantic-settings' own: `load` hands in ours, and a bare `Settings()` is the defaults."""
        return (init_settings,)
