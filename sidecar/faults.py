"""Every error of the sidecar's own: code, status, public sentence, hint, and the one envelope they travel in.

Law: nothing that a client sent, and no secret, goes into `message` or `hint`; what only the operator may
read stands in `detail` and goes to the log.
"""

from __future__ import annotations

import json
from enum import Enum


class FaultCode(Enum):
    """The closed list of codes, with the status each one answers."""

    UPSTREAM_UNREACHABLE = ("upstream_unreachable", 502)
    UPSTREAM_PROTOCOL_ERROR = ("upstream_protocol_error", 502)
    UPSTREAM_TIMEOUT = ("upstream_timeout", 504)
    DRAINING = ("draining", 503)
    HOST_NOT_ALLOWED = ("host_not_allowed", 421)
    ORIGIN_NOT_ALLOWED = ("origin_not_allowed", 403)
    CLIENT_TOKEN_REQUIRED = ("client_token_required", 401)
    REQUEST_TIMEOUT = ("request_timeout", 408)
    TOO_MANY_CONNECTIONS = ("too_many_connections", 503)
    INVALID_SESSION_KEY = ("invalid_session_key", 400)
    INVALID_REQUEST = ("invalid_request", 400)
    HEADER_TOO_LARGE = ("header_too_large", 431)
    EXPECTATION_FAILED = ("expectation_failed", 417)
    CAPABILITY_UNAVAILABLE = ("capability_unavailable", 404)
    PAGE_FAILED = ("page_failed", 500)

    def __init__(self, code: str, status: int) -> None:
        self.code = code
        self.status = status

    @property
    def error_type(self) -> str:
        """The `type` that OpenAI clients map to their exception classes."""
        if self is FaultCode.CLIENT_TOKEN_REQUIRED:
            return "authentication_error"
        if self in (FaultCode.HOST_NOT_ALLOWED, FaultCode.ORIGIN_NOT_ALLOWED):
            return "permission_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


REASON_PHRASES = {
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    408: b"Request Timeout",
    417: b"Expectation Failed",
    421: b"Misdirected Request",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


class Fault(Exception):
    """A failure that the client is told about, in words made for a person.

    `message` says what happened and whose fault it is, `hint` what to do next. `detail` is for the log only.
    """

    def __init__(self, code: FaultCode, message: str, hint: str, *, detail: str = "") -> None:
        super().__init__(code.code)
        self.code = code
        self.message = message
        self.hint = hint
        self.detail = detail

    @property
    def status(self) -> int:
        return self.code.status

    def envelope(self) -> bytes:
        """The JSON body, in the shape that OpenAI clients know, with `hint` beside it."""
        error = {
            "message": self.message,
            "type": self.code.error_type,
            "code": self.code.code,
            "param": None,
            "hint": self.hint,
        }
        return json.dumps({"error": error}, ensure_ascii=False).encode()


def invalid_request(what: str) -> Fault:
    return Fault(
        FaultCode.INVALID_REQUEST,
        f"The request is not valid HTTP that the sidecar can pass on: {what}.",
        "This is a fault of the client or of a proxy before the sidecar. Nothing was sent to the gateway.",
    )


def header_too_large(limit_bytes: int) -> Fault:
    return Fault(
        FaultCode.HEADER_TOO_LARGE,
        f"The request's header block is larger than {limit_bytes // 1024} KiB.",
        "Look for an overgrown cookie or token in the client. Nothing was sent to the gateway.",
    )


def expectation_failed() -> Fault:
    return Fault(
        FaultCode.EXPECTATION_FAILED,
        "The request expects something other than 100-continue, which the sidecar cannot promise.",
        "Leave the Expect header out.",
    )


def invalid_session_key() -> Fault:
    return Fault(
        FaultCode.INVALID_SESSION_KEY,
        "The request names two different conversations in one session header.",
        "Send the header once. Nothing was sent to the gateway.",
    )


def host_not_allowed() -> Fault:
    return Fault(
        FaultCode.HOST_NOT_ALLOWED,
        "The Host of this request is not a name of this sidecar. Only loopback names and the bound address are.",
        "Use http://127.0.0.1 or localhost with the sidecar's port, or add the name to listen.allowed_hosts.",
    )


def origin_not_allowed() -> Fault:
    return Fault(
        FaultCode.ORIGIN_NOT_ALLOWED,
        "A web page from another origin tried to call the sidecar.",
        "If this page is your chat frontend, add its origin to listen.allowed_origins.",
    )


def client_token_required() -> Fault:
    return Fault(
        FaultCode.CLIENT_TOKEN_REQUIRED,
        "The sidecar accepts only clients with one of its tokens.",
        "Send Authorization: Bearer with a token of the file that listen.tokens_file names.",
    )


def draining() -> Fault:
    return Fault(
        FaultCode.DRAINING,
        "The sidecar is shutting down and takes no new requests.",
        "Try again in a moment; running answers are finished first.",
    )


def request_timeout(what: str, limit_s: float) -> Fault:
    return Fault(
        FaultCode.REQUEST_TIMEOUT,
        f"The request's {what} did not arrive within {limit_s:g} s.",
        "The client or the network before the sidecar was too slow. Nothing complete was sent to the gateway.",
    )


def too_many_connections(limit: int) -> Fault:
    return Fault(
        FaultCode.TOO_MANY_CONNECTIONS,
        f"The sidecar has {limit} connections open, the most that listen.max_connections and the system allow.",
        "Close some, or raise listen.max_connections and the process's limit of open files.",
    )


def capability_unavailable(message: str, hint: str) -> Fault:
    return Fault(FaultCode.CAPABILITY_UNAVAILABLE, message, hint)


def dashboard_refused() -> Fault:
    return Fault(
        FaultCode.UPSTREAM_PROTOCOL_ERROR,
        "The dashboard refuses the token that its own page hands out.",
        "Restart the dashboard (hermes dashboard), or look whether dashboard.url is right. Chat does not depend on it.",
    )


_START = {
    "gateway": "Start the gateway (hermes gateway run), or correct gateway.url. "
    "`hermes-sidecar check` shows what is set.",
    "dashboard": "Start the dashboard (hermes dashboard), or correct dashboard.url. Chat does not depend on it.",
}


def upstream_unreachable(address: str, why: str, *, detail: str = "", who: str = "gateway") -> Fault:
    """`who` is `gateway` or `dashboard`."""
    message = f"The {who} at {address} could not be reached: {why}."
    return Fault(FaultCode.UPSTREAM_UNREACHABLE, message, _START[who], detail=detail)


def upstream_protocol_error(address: str, why: str, *, detail: str = "", who: str = "gateway") -> Fault:
    """`who` is `gateway` or `dashboard`."""
    return Fault(
        FaultCode.UPSTREAM_PROTOCOL_ERROR,
        f"The {who} at {address} gave no usable answer: {why}.",
        f"Look at the {who}'s own log. If the address is not that of an HTTP server of its kind, correct {who}.url.",
        detail=detail,
    )


def upstream_timeout(address: str, silence_s: float) -> Fault:
    return Fault(
        FaultCode.UPSTREAM_TIMEOUT,
        f"The gateway at {address} was silent for {silence_s:g} s, the longest that gateway.idle_timeout_s allows.",
        "Raise gateway.idle_timeout_s, or set it to 0 for no limit: agents are silent for minutes while they work.",
    )
