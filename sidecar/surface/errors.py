"""What own pages answer when they do not answer: the sidecar's envelope, never a server's own page or traceback."""

from __future__ import annotations

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from sidecar.faults import Fault, FaultCode


def fault_response(fault: Fault, *, status: int | None = None) -> web.Response:
    return web.Response(
        body=fault.envelope(),
        status=status or fault.status,
        content_type="application/json",
        headers={"X-Hermes-Sidecar-Error": fault.code.code},
    )


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a page raises into the envelope."""
    try:
        return await handler(request)
    except Fault as fault:
        return fault_response(fault)
    except web.HTTPMethodNotAllowed as refusal:
        allowed = ", ".join(sorted(refusal.allowed_methods))
        wrong_method = Fault(
            FaultCode.INVALID_REQUEST, "This page does not answer that method.", f"The page answers {allowed}."
        )
        response = fault_response(wrong_method, status=refusal.status)
        response.headers["Allow"] = allowed
        return response
    except web.HTTPNotFound:
        return fault_response(
            Fault(FaultCode.CAPABILITY_UNAVAILABLE, "The sidecar has no such page.", "The status page is at /sidecar/.")
        )
    except web.HTTPException:
        raise
    except Exception as exc:
        structlog.get_logger().error("page_failed", page=request.path, error=type(exc).__name__, exc_info=exc)
        failed = Fault(
            FaultCode.PAGE_FAILED,
            "The sidecar failed to make this page. Chat does not depend on it.",
            "This is a fault of the sidecar; its log has the details.",
        )
        return fault_response(failed)
