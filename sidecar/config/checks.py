"""What one setting means for another: rules over several keys, and the files that settings name.

Law: a rule runs only when every key that it looks at was readable, so that one mistake is reported once.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator

from sidecar.config import addresses
from sidecar.config.credentials import ClientToken
from sidecar.config.models import Settings
from sidecar.config.words import Finding

Rule = Callable[[Settings], Iterator[Finding]]
_RULES: list[tuple[frozenset[str], Rule]] = []


def across(settings: Settings, faulty: set[str]) -> list[Finding]:
    """The faults that only show when several settings are looked at together."""
    return [finding for keys, rule in _RULES if not keys & faulty for finding in rule(settings)]


def _looks_at(*keys: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((frozenset(keys), rule))
        return rule

    return register


@_looks_at("listen.host", "listen.tokens_file")
def _open_bind(settings: Settings) -> Iterator[Finding]:
    if not addresses.is_loopback(settings.listen.host) and not settings.listen.client_tokens:
        yield Finding(
            "listen.host",
            "is not a loopback address: whoever reaches it could spend the gateway's key; set listen.tokens_file",
        )


@_looks_at("listen.allowed_origins", "gateway.token_file")
def _any_origin_with_key(settings: Settings) -> Iterator[Finding]:
    if "*" in settings.listen.allowed_origins and settings.gateway.token is not None:
        yield Finding(
            "listen.allowed_origins",
            "\"*\" would let every web page spend the gateway's key; name the origins, or unset the gateway's token",
        )


@_looks_at("listen.isolate_clients", "listen.tokens_file")
def _isolation_needs_names(settings: Settings) -> Iterator[Finding]:
    listen = settings.listen
    if not listen.isolate_clients:
        return
    if not listen.client_tokens:
        yield Finding(
            "listen.isolate_clients", "needs listen.tokens_file: clients are told apart by their token's name"
        )
    elif any(token.name is None for token in listen.client_tokens):
        yield Finding("listen.isolate_clients", "needs a name for every token: write each line as name:token")
    elif _names_overlap(listen.client_tokens):
        yield Finding(
            "listen.isolate_clients",
            "cannot keep two of the clients apart: one's name is the beginning of another's, up to a hyphen",
        )


def _names_overlap(tokens: tuple[ClientToken, ...]) -> bool:
    # Clients `a` and `a-b`: the session `b-x` of the first and `x` of the second would both be `a-b-x`.
    prefixes = {f"{token.name}-" for token in tokens}
    return any(a != b and b.startswith(a) for a in prefixes for b in prefixes)


@_looks_at("listen.host", "listen.port", "gateway.url")
def _gateway_is_self(settings: Settings) -> Iterator[Finding]:
    if _is_own_address(settings, settings.gateway.base):
        yield Finding("gateway.url", "is the address that the sidecar itself listens on; it would call itself")


@_looks_at("listen.host", "listen.port", "dashboard.url")
def _dashboard_is_self(settings: Settings) -> Iterator[Finding]:
    base = settings.dashboard.base
    if base is not None and _is_own_address(settings, base):
        yield Finding("dashboard.url", "is the address that the sidecar itself listens on; it would call itself")


def _is_own_address(settings: Settings, base: addresses.BaseUrl) -> bool:
    return base.port == settings.listen.port and addresses.is_same_listener(base.host, settings.listen.host)


@_looks_at("dashboard.url", "dashboard.mount")
def _mount_needs_dashboard(settings: Settings) -> Iterator[Finding]:
    if settings.dashboard.mount and not settings.dashboard.url:
        yield Finding("dashboard.mount", "needs dashboard.url: there is no dashboard to mount")


@_looks_at("admin.host", "admin.port")
def _admin_both_or_none(settings: Settings) -> Iterator[Finding]:
    if (settings.admin.host is None) != (settings.admin.port is None):
        missing = "host" if settings.admin.host is None else "port"
        yield Finding(f"admin.{missing}", "is missing: admin.host and admin.port are set both or not at all")


@_looks_at("admin.host", "admin.port", "listen.host", "listen.port")
def _admin_beside_listen(settings: Settings) -> Iterator[Finding]:
    admin, listen = settings.admin, settings.listen
    if admin.host is None or admin.port in (None, 0) or admin.port != listen.port:
        return
    if addresses.is_same_listener(admin.host, listen.host):
        yield Finding("admin.port", "is taken by listen.port")


@_looks_at("admin.host", "listen.tokens_file")
def _open_admin(settings: Settings) -> Iterator[Finding]:
    host = settings.admin.host
    if host is not None and not addresses.is_loopback(host) and not settings.listen.client_tokens:
        yield Finding("admin.host", "is not a loopback address; set listen.tokens_file as well")


@_looks_at("gateway.ca_file")
def _authority_is_readable(settings: Settings) -> Iterator[Finding]:
    path = settings.gateway.ca_file
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        yield Finding("gateway.ca_file", "names a file without a certificate in PEM form")
    except OSError as exc:
        yield Finding("gateway.ca_file", f"names a file that cannot be read ({exc.strerror or 'unknown reason'})")
