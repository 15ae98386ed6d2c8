"""Every error of the sidecar's own: codes, statuses and types that clients rely on, and the shape they come in."""

from __future__ import annotations

import json

import pytest

from sidecar.faults import REASON_PHRASES, Fault, FaultCode, invalid_session_key, upstream_unreachable

# Written out from the reference page: clients match on these.
PROMISED = {
    "upstream_unreachable": 502,
    "upstream_protocol_error": 502,
    "upstream_timeout": 504,
    "draining": 503,
    "host_not_allowed": 421,
    "origin_not_allowed": 403,
    "client_token_required": 401,
    "invalid_session_key": 400,
    "invalid_request": 400,
    "header_too_large": 431,
    "expectation_failed": 417,
    "capability_unavailable": 404,
}
BESIDES = {"request_timeout": 408, "too_many_connections": 503, "page_failed": 500}
"""What can happen as well: a client that is too slow, a process that is full, a page that fails."""

# What the OpenAI SDKs make an exception class of, by status.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    417: "invalid_request_error",
    421: "permission_error",
    431: "invalid_request_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
    504: "server_error",
}


def test_codes_and_statuses() -> None:
    assert {code.code: code.status for code in FaultCode} == PROMISED | BESIDES


@pytest.mark.parametrize("code", FaultCode, ids=lambda code: str(code.code))
def test_type_follows_from_the_status(code: FaultCode) -> None:
    assert code.error_type == TYPES[code.status]


@pytest.mark.parametrize("code", FaultCode, ids=lambda code: str(code.code))
def test_every_status_has_a_reason_phrase(code: FaultCode) -> None:
    assert REASON_PHRASES[code.status].decode("ascii").istitle()


@pytest.mark.parametrize("code", FaultCode, ids=lambda code: str(code.code))
def test_envelope(code: FaultCode) -> None:
    fault = Fault(code, 'What happened, with "quotes" and 会话.', "What to do.", detail="s3cr3t-Marker")

    assert json.loads(fault.envelope()) == {
        "error": {
            "message": 'What happened, with "quotes" and 会话.',
            "type": code.error_type,
            "code": code.code,
            "param": None,
            "hint": "What to do.",
        }
    }
    assert "会话".encode() in fault.envelope()
    assert fault.status == code.status


def test_detail_is_for_the_log_alone() -> None:
    fault = upstream_unreachable("http://127.0.0.1:8642", "connection refused", detail="s3cr3t-Marker")

    assert fault.detail == "s3cr3t-Marker"
    assert b"s3cr3t-Marker" not in fault.envelope()
    assert "s3cr3t-Marker" not in f"{fault} {fault!r}"


def test_fault_is_an_exception_with_its_code_as_text() -> None:
    with pytest.raises(Fault, match=r"\Ainvalid_session_key\Z"):
        raise invalid_session_key()
