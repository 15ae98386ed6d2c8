"""The proxy that most people write first: aiohttp on both sides, on uvloop.

Run as `python -m bench.plain_proxy PORT UPSTREAM_URL`.
No mapping, no metrics, no log, no rules: what a proxy in Python costs before it does anything.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from multidict import CIMultiDict

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "host")
)
_UPSTREAM = web.AppKey("upstream", str)
_SESSION = web.AppKey("session", ClientSession)


def _passing(headers: object) -> CIMultiDict[str]:
    passing: CIMultiDict[str] = CIMultiDict(headers)  # type: ignore[arg-type]
    for name in _HOP_BY_HOP:
        passing.popall(name, None)
    return passing


async def relay(request: web.Request) -> web.StreamResponse:
    async with request.app[_SESSION].request(
        request.method,
        request.app[_UPSTREAM] + request.path_qs,
        headers=_passing(request.headers),
        data=request.content if request.can_read_body else None,
        allow_redirects=False,
    ) as answer:
        response = web.StreamResponse(status=answer.status, headers=_passing(answer.headers))
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response


async def _session(app: web.Application) -> AsyncIterator[None]:
    # No limit on connections: with the default of 100 every stream after the hundredth would wait.
    connector = TCPConnector(limit=0)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False) as session:
        app[_SESSION] = session
        yield


def main(port: int, upstream: str) -> None:
    app = web.Application(client_max_size=1 << 30)
    app[_UPSTREAM] = upstream
    app.cleanup_ctx.append(_session)
    app.router.add_route("*", "/{tail:.*}", relay)
    web.run_app(
        app, host="127.0.0.1", port=port, access_log=None, print=None, loop=uvloop.new_event_loop(), backlog=4096
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
