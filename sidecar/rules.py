"""The relay's rules, made of the settings and of what is known of the backend. Pure."""

from __future__ import annotations

from sidecar.capabilities.model import Picture
from sidecar.capabilities.wording import filled_families, missing_families
from sidecar.config import ConditionSettings, Settings, SourceSettings
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy
from sidecar.relay.admission import Rules
from sidecar.relay.destinations import DashboardRules, Families
from sidecar.sessions.mapping import MappingPolicy
from sidecar.sessions.sources import BodySource, HeaderSource, PromptCondition, Source


def rules(settings: Settings, picture: Picture, dashboard_token: bytes | None) -> Rules:
    """What the settings and the backend say about every request, as frozen bytes."""
    listen, gateway, session = settings.listen, settings.gateway, settings.session
    tokens = [(token.name, token.token) for token in listen.client_tokens] if listen.client_tokens else None
    forwards_key = session.forward_key == "always" or (
        session.forward_key == "auto" and picture.gateway.forwards_session_key
    )
    base = settings.dashboard.base
    dashboard = None
    if base is not None:
        mount = settings.dashboard.mount.encode()
        dashboard = DashboardRules(base.netloc.encode(), base.path_prefix.encode(), mount, dashboard_token)
    return Rules(
        gateway_netloc=gateway.netloc.encode(),
        gateway_prefix=gateway.path_prefix.encode(),
        door=DoorPolicy.of(
            listen.host, [*listen.allowed_hosts, *filter(None, [settings.admin.host])], listen.allowed_origins
        ),
        mapping=MappingPolicy(
            sources=tuple(_source(source) for source in session.sources),
            skip_when=tuple(_condition(condition) for condition in session.skip_when),
            forward_key="always" if forwards_key else "never",
            inject_body=session.inject_body,
        ),
        credentials=CredentialPolicy.of(
            gateway.token.get_secret_value().encode() if gateway.token else None,
            tokens,
            isolate=listen.isolate_clients,
        ),
        body_limit_bytes=session.body_limit_bytes,
        families=Families(
            is_known=picture.probed_at is not None,
            filled=filled_families(picture),
            missing=missing_families(picture),
        ),
        dashboard=dashboard,
    )


def _source(source: SourceSettings) -> Source:
    prefix = source.prefix.encode()
    if source.header is not None:
        return HeaderSource(source.header.lower().encode(), prefix)
    assert source.body is not None
    return BodySource(tuple(source.body.split(".")), prefix)


def _condition(condition: ConditionSettings) -> bytes | PromptCondition:
    if condition.header is not None:
        return condition.header.lower().encode()
    assert condition.prompt is not None
    return PromptCondition(condition.prompt)
