"""Admission, pure: a request's head to what is sent upstream and what the answer will carry, or a fault.

Law: a fault here costs no upstream work. `admit` fills the `Request` in step by step, so that even a refusal knows
what its answer must carry (CORS fields for an allowed page, the client's route key).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from sidecar import faults
from sidecar.faults import Fault
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy, check_host, check_origin, preflight_fields
from sidecar.guard.isolation import check_scope
from sidecar.relay import fields, wire
from sidecar.relay.destinations import (
    OPEN_PATH,
    DashboardRules,
    Destination,
    Families,
    family_target,
    is_mounted,
    is_own_path,
    mounted_target,
    own_page_head,
)
from sidecar.relay.fields import Watched
from sidecar.relay.routes import FAMILIES, is_family_path, route_of
from sidecar.relay.wire import CHUNKED, UNTIL_CLOSE, Field, Fields, RequestHead, WireError
from sidecar.sessions.mapping import Decision, MappingPolicy, decide, injection
from sidecar.sessions.sources import NO_DOCUMENT, document_of, with_field

_CONTINUED: Final = frozenset((b"via", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-request-id"))
"""Fields that the sidecar continues; one that Connection names was meant for this hop, and begins anew."""
_ROUTE_KEYS: Final = frozenset(fields.ROUTE_KEYS)
_BODY_ROUTES: Final = ("chat_completions", "responses", "runs")
SAFE_METHODS: Final = frozenset((b"GET", b"HEAD", b"OPTIONS"))
_ABSOLUTE_FORM: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)

_ID_PREFIX: Final = os.urandom(6).hex().encode()
_id_counter = itertools.count(1)

Listener = Literal["all", "relay", "admin"]
"""Where a client came in: own pages stand beside the relay, nowhere, or alone."""


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


class Request:
    """A request as far as it has been admitted."""

    __slots__ = (
        "answer_fields",
        "answer_lines",
        "body",
        "cors",
        "credentials",
        "dashboard_token",
        "destination",
        "expects_continue",
        "forwarded_keys",
        "has_own_id",
        "head",
        "head_start",
        "is_derived",
        "is_http_1_0",
        "is_preflight",
        "is_safe",
        "is_unread",
        "is_upgrade",
        "listener",
        "method",
        "new_body",
        "request_id",
        "route",
        "sent_id",
        "session_id",
        "source",
        "traceparent",
        "waits_for_probe",
        "wants_body",
        "wants_close",
    )

    def __init__(self, method: bytes, minor: int = 1, listener: Listener = "all") -> None:
        """`minor` is the 0 or 1 of its HTTP/1.0 or HTTP/1.1."""
        self.listener: Listener = listener
        self.method = method
        self.is_http_1_0 = minor == 0
        self.wants_close = self.is_http_1_0
        self.body = UNTIL_CLOSE
        """A length in bytes, or CHUNKED; UNTIL_CLOSE while it is not known."""
        self.destination: Destination = "gateway"
        self.waits_for_probe = False
        """It asks for a family, and nobody knows yet who serves it."""
        self.is_safe = False
        """It may be sent a second time (RFC 9110, 9.2.1) and has no body."""
        self.is_upgrade = False
        self.is_preflight = False
        self.expects_continue = False
        self.credentials: Fields = []
        """What the gateway is shown."""
        self.dashboard_token: bytes | None = None
        self.cors: tuple[Field, ...] = ()
        """What the answer tells a browser; empty for programs."""
        self.forwarded_keys: list[bytes] = []
        """The route key as the gateway got it, which may echo it."""
        self.answer_fields: Fields = []
        """What the answer gives back to the client."""
        self.answer_lines = b""
        """The same, as they stand in a head."""
        self.sent_id: bytes | None = None
        """The id that goes upstream, which is the session's newest."""
        self.is_derived = False
        self.wants_body = False
        """The session depends on the body, which has not been read."""
        self.is_unread = False
        """Its body might have named the session, but was too long or of another kind."""
        self.new_body: bytes | None = None
        """What takes the body's place."""
        self.source = "none"
        """Where the session id came from."""
        self.session_id: bytes | None = None
        self.route = "none"
        """What is asked for, from a closed list: logs and metrics never see a path."""
        self.request_id = b""
        self.has_own_id = False
        """Its id is the client's."""
        self.traceparent: bytes | None = None
        """The client's own, which passes on and stands in the log line. Source: W3C, Trace Context."""
        self.head = b""
        """The head as the upstream gets it."""
        self.head_start = b""
        """Of that, what does not differ between two requests that are alike: all but its length and its id."""

    def again(self, body: int) -> Request:
        """Another request like this one, which went to the gateway: its body may be of another length."""
        twin = Request(self.method, 0 if self.is_http_1_0 else 1, self.listener)
        twin.wants_close = self.wants_close
        twin.body = body
        twin.is_safe = self.is_safe
        twin.credentials = self.credentials
        twin.cors = self.cors
        twin.forwarded_keys = self.forwarded_keys
        twin.answer_fields = self.answer_fields
        twin.answer_lines = self.answer_lines
        twin.sent_id = self.sent_id
        twin.is_derived = self.is_derived
        twin.source = self.source
        twin.session_id = self.session_id
        twin.route = self.route
        twin.traceparent = self.traceparent
        twin.request_id = new_request_id()
        twin.head_start = self.head_start
        twin.head = self.head_start + _head_end(twin, has_length=body > 0)
        return twin

    @property
    def may_rotate(self) -> bool:
        """Whether its answer can tell that its session goes on under another id: only the chat route's does."""
        return self.route == "chat_completions"

    @property
    def is_own(self) -> bool:
        return self.destination == "own"


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
    request.head = request.head_start + _head_end(request, has_length=b"content-length" in watched)


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


def new_request_id() -> bytes:
    """Unique among all sidecars."""
    return b"%b%012x" % (_ID_PREFIX, next(_id_counter))


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


def _head_end(request: Request, *, has_length: bool) -> bytes:
    """The framing, written anew from what was understood, and the id where it is ours."""
    if request.new_body is not None:
        framing = b"Content-Length: %d\r\n" % len(request.new_body)
    elif request.body == CHUNKED:
        framing = b"Transfer-Encoding: chunked\r\n"
    else:
        framing = b"Content-Length: %d\r\n" % request.body if has_length else b""
    if request.has_own_id:
        return framing + b"\r\n"
    return b"%bX-Request-Id: %b\r\n\r\n" % (framing, request.request_id)
