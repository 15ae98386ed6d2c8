"""Admission, pure: a request's head to what is sent upstream and what the answer will carry, or a fault.

Law: a fault here costs no upstream work. `admit` fills the `Request` in step by step, so that even a refusal knows
what its answer must carry (CORS fields for an allowed page, the client's route key).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sidecar import faults
from sidecar.faults import Fault
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy, check_host, check_origin, preflight_fields
from sidecar.guard.isolation import check_scope
from sidecar.relay import fields, wire
from sidecar.relay.destinations import (
    OPEN_PATH,
    DashboardRules,
    Families,
    family_target,
    is_mounted,
    is_own_path,
    mounted_target,
    own_page_head,
)
from sidecar.relay.fields import Watched
from sidecar.relay.request import Request, head_end, new_request_id
from sidecar.relay.routes import FAMILIES, is_family_path, route_of
from sidecar.relay.wire import Fields, RequestHead, WireError
from sidecar.sessions.mapping import Decision, MappingPolicy, decide, injection
from sidecar.sessions.sources import NO_DOCUMENT, document_of, with_field

_CONTINUED: Final = frozenset((b"via", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-request-id"))
"""Fields that the sidecar continues; one that Connection names was meant for this hop, and begins anew."""
_ROUTE_KEYS: Final = frozenset(fields.ROUTE_KEYS)
_BODY_ROUTES: Final = ("chat_completions", "responses", "runs")
SAFE_METHODS: Final = frozenset((b"GET", b"HEAD", b"OPTIONS"))
_ABSOLUTE_FORM: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rules:
    """What every request is judged by; replaced as a whole when the configuration is read again."""

    gateway_netloc: bytes
    """The Host that the gateway sees."""
    gateway_prefix: bytes
    """Stands before every target."""
    door: DoorPolicy
    mapping: MappingPolicy
    credentials: CredentialPolicy
    body_limit_bytes: int = 1_048_576
    """Longest body that is read for a session's sake."""
    families: Families = field(default_factory=Families)
    dashboard: DashboardRules | None = None
    watched_names: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "watched_names", fields.REQUEST_WATCHED | self.mapping.watched_names())


def admit(
    request: Request,
    head: RequestHead,
    rules: Rules,
    *,
    peer: bytes,
    is_draining: bool,
    newest: Callable[[bytes], bytes] = lambda session_id: session_id,
    body: bytes | None = None,
) -> None:
    """Fills `request` in. Raises a Fault: nothing has gone upstream then, and nothing may.

    `newest` tells under which id a session was continued. Where `request.wants_body` comes out true, the session
    depends on the body: call again with the whole of it, or with b"" if it is too long to be read.
    """
    method, target, minor, lines = head
    passing, watched = fields.sort_out(lines, rules.watched_names)
    options = fields.connection_options(watched)
    if b"close" in options:
        request.wants_close = True
    for name in options & _CONTINUED:
        watched.pop(name, None)
    framing = _framing(minor, watched)  # known first, told last: a stranger is not told what is wrong with its request
    if not isinstance(framing, Fault):
        request.body = framing
    check_host(watched, None, minor, rules.door)
    authority, target = _origin_form(method, target)
    if authority is not None:
        check_host(watched, authority, minor, rules.door)
    path = target.partition(b"?")[0]
    _set_destination(request, path, rules)
    admission = check_origin(method, path, watched, rules.door)
    request.cors = admission.cors
    if isinstance(framing, Fault):
        raise framing
    if admission.is_preflight:
        request.is_preflight = True
        request.answer_fields = preflight_fields(watched)
        return
    authorization = watched.get(b"authorization", [])
    client = rules.credentials.admit(authorization, is_open=request.is_own and path == OPEN_PATH)
    if is_draining and not request.is_own:
        raise faults.draining()

    added = _upgrade_fields(request, options, watched, minor)
    ids = watched.get(b"x-request-id")
    request.has_own_id = ids is not None
    request.request_id = ids[0][1] if ids else new_request_id()
    request.traceparent = watched[b"traceparent"][0][1] if b"traceparent" in watched else None
    request.is_safe = request.body == 0 and method in SAFE_METHODS and not request.is_upgrade
    if b"expect" in watched and minor >= 1:
        if any(value.lower() != b"100-continue" for value in fields.values(watched, b"expect")):
            raise faults.expectation_failed()
        request.expects_continue = request.body != 0
    if request.is_own:
        request.head = own_page_head(method, path, request.request_id, passing)
        return
    if client.namespace:
        check_scope(path, client.namespace)
    if request.route in rules.families.missing and is_family_path(path):
        raise faults.capability_unavailable(*rules.families.missing[request.route])
    if request.destination == "dashboard":
        dashboard = rules.dashboard
        assert dashboard is not None
        netloc = dashboard.netloc
        if request.route == "dashboard":
            target = mounted_target(target, dashboard, authorization, added, rules.credentials)
        else:
            request.dashboard_token = dashboard.token
            target = family_target(request.route, target, dashboard, passing, added)
    else:
        netloc = rules.gateway_netloc
        decision = _decide(request, watched, rules, client.namespace, body, newest)
        request.session_id, request.sent_id = decision.session_id, decision.sent_id
        request.source, request.is_derived = decision.source, decision.derived
        request.answer_fields = list(decision.given_back)
        request.answer_lines = fields.joined(request.answer_fields)
        request.forwarded_keys = [value for name, value in decision.added if name.lower() == fields.ROUTE_KEYS[0]]
        if options & _ROUTE_KEYS:
            added += [line for line in decision.added if line[0].lower() not in options & _ROUTE_KEYS]
        else:
            added += decision.added
        request.credentials = rules.credentials.to_upstream(authorization)
        added += request.credentials
        if target != b"*":
            target = rules.gateway_prefix + target
    upstream_fields = fields.to_upstream(passing, watched, options, added, peer=peer)
    start = b"%b %b HTTP/1.1\r\nHost: %b\r\n" % (method, target, netloc)
    request.head_start = start + fields.joined(upstream_fields)
    request.head = request.head_start + head_end(request, has_length=b"content-length" in watched)


def _framing(minor: int, watched: Watched) -> int | Fault:
    lengths, codings = fields.values(watched, b"content-length"), fields.values(watched, b"transfer-encoding")
    if not lengths and not codings:
        return 0
    try:
        return wire.request_body(minor, lengths, codings)
    except WireError as error:
        return faults.invalid_request(str(error))


def _origin_form(method: bytes, target: bytes) -> tuple[bytes | None, bytes]:
    """The authority of an absolute-form target, if it is one, and the target in origin form, otherwise untouched."""
    if method == b"CONNECT":
        raise faults.invalid_request("it asks for a tunnel")
    if target[:1] == b"/" or (target == b"*" and method == b"OPTIONS"):
        return None, target
    match = _ABSOLUTE_FORM.fullmatch(target)
    if match is None:
        raise faults.invalid_request("its target is neither a path nor an http URL")
    authority, rest = match.groups()
    return authority, rest if rest[:1] == b"/" else b"/" + rest


def _set_destination(request: Request, path: bytes, rules: Rules) -> None:
    """Whose path it is, and what that asks for."""
    if request.listener == "admin" or (request.listener == "all" and is_own_path(path)):
        request.destination, request.route = "own", "own"
        return
    if rules.dashboard is not None and is_mounted(path, rules.dashboard.mount):
        request.destination, request.route = "dashboard", "dashboard"
        return
    request.destination, request.route = "gateway", route_of(path)
    if request.route in FAMILIES and is_family_path(path):
        request.waits_for_probe = not rules.families.is_known
        if request.route in rules.families.filled:
            request.destination = "dashboard"


def _upgrade_fields(request: Request, options: frozenset[bytes], watched: Watched, minor: int) -> Fields:
    """The one upgrade that may cross."""
    added: Fields = []
    if b"upgrade" in options and minor >= 1 and request.method == b"GET" and request.body == 0:
        protocols = fields.list_members(fields.values(watched, b"upgrade"))
        if protocols == [b"websocket"]:  # h2c must not cross: it would carry requests past every rule here
            request.is_upgrade = True
            added += ((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"))
    return added


def _decide(
    request: Request,
    watched: Watched,
    rules: Rules,
    namespace: bytes,
    body: bytes | None,
    newest: Callable[[bytes], bytes],
) -> Decision:
    """The mapping's decision. Marks a request whose body has to be read first, and gives it its new body if due."""
    policy = rules.mapping
    may_read = request.method == b"POST" and request.body != 0 and request.route in _BODY_ROUTES
    may_read = may_read and b"content-encoding" not in watched and request.body <= rules.body_limit_bytes
    document = None if body is None and may_read else document_of(body) if body else NO_DOCUMENT
    decision = decide(watched, policy, namespace, document=document, newest=newest)
    injects = policy.inject_body and request.route in ("runs", "responses") and may_read
    request.wants_body = decision.needs_body or (injects and body is None and decision.session_id is not None)
    request.is_unread = (
        decision.source == "none"
        and policy.reads_bodies
        and request.method == b"POST"
        and request.route in _BODY_ROUTES
        and request.body != 0
        and (not may_read or (body is not None and document is NO_DOCUMENT))
    )
    if injects and body and document is not None:
        field_and_id = injection(request.route, document, decision.sent_id)
        if field_and_id is not None:
            request.new_body = with_field(body, *field_and_id)
    return decision
