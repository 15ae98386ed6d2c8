"""The HTTP side of a verification: chat turns and history reads, each ending in a finding, never in an exception."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from urllib.parse import quote

import aiohttp
from yarl import URL

from sidecar.verify.answers import (
    MAX_ANSWER_BYTES,
    Finding,
    StreamReader,
    first_model,
    history_markers,
    history_session,
    read_completion,
    read_error,
)
from sidecar.verify.facts import End, ErrorAnswer, History, HistoryState, Turn
from sidecar.verify.wording import shown

_READ_LIMIT_S = 30.0
_MODELS_LIMIT_S = 10.0
# After [DONE] only the end of the body is left. Reading it keeps us from looking like a client that left.
_TAIL_LIMIT_S = 2.0


class Caller:
    """Calls one sidecar. `turn_limit_s` is for a whole turn, from the connection to the answer's last byte."""

    def __init__(self, base_url: str, *, bearer: str | None, turn_limit_s: float) -> None:
        self._base_url = base_url
        self._turn_limit_s = turn_limit_s
        self._bearer = bearer
        headers = {"User-Agent": "hermes-sidecar-verify", "Accept-Encoding": "identity"}
        if bearer is not None:
            headers["Authorization"] = f"Bearer {bearer}"
        self._http = aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            # Our own limits say which step was too slow; the library's would only say that one was.
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def model(self) -> str:
        """The first model that the gateway lists, or the name that hermes-agent gives itself."""
        body = b""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_MODELS_LIMIT_S), self._get("/v1/models") as answer:
                body = await _bounded(answer)
        return first_model(body) or "hermes-agent"

    async def turn(
        self, name: str, body: Mapping[str, object], *, key: str | None, expected_token: str | None = None
    ) -> Turn:
        """One chat turn under `key`. `expected_token`: what an answer names if the gateway remembers."""
        turn = Turn(name, End.BROKE_OFF)
        headers = {"Content-Type": "application/json"} | ({"X-Hermes-Session-Key": key} if key else {})
        try:
            async with (
                asyncio.timeout(self._turn_limit_s),
                self._http.post(
                    self._url("/v1/chat/completions"),
                    data=json.dumps(body).encode(),
                    headers=headers,
                    allow_redirects=False,
                ) as answer,
            ):
                turn = replace(
                    turn,
                    status=answer.status,
                    session_id=answer.headers.get("X-Hermes-Session-Id") or None,
                    mapping=answer.headers.get("X-Hermes-Sidecar-Session"),
                )
                found = await _finding(answer, streamed=body.get("stream") is True)
        except TimeoutError:
            return replace(turn, end=End.TIMED_OUT)
        except aiohttp.ClientConnectorError as error:
            return replace(turn, end=End.UNREACHABLE, detail=_why_no_connection(error.os_error))
        except ValueError:
            # A host like "a..b" passes as a URL, and only the resolver finds that it is no name.
            return replace(turn, end=End.UNREACHABLE, detail="no such name can exist")
        except (aiohttp.ClientError, OSError):
            return turn
        recalled = expected_token is not None and expected_token in found.text
        return replace(turn, end=found.end, error=self._masked(found.error), detail=found.detail, recalled=recalled)

    async def history(self, session_id: str, markers: tuple[str, str]) -> History:
        """Whether the session's user messages hold both markers."""
        try:
            async with (
                asyncio.timeout(_READ_LIMIT_S),
                self._get(f"/api/sessions/{quote(session_id, safe='')}/messages") as answer,
            ):
                body = await _bounded(answer)
        except TimeoutError:
            return History(HistoryState.UNREADABLE, detail=f"no answer within {_READ_LIMIT_S:g} s")
        except (aiohttp.ClientError, OSError):
            return History(HistoryState.UNREADABLE, detail="the connection broke")
        match answer.status:
            case 200:
                found = history_markers(body, markers)
                if found is None:
                    return History(HistoryState.UNREADABLE, detail="the answer is not a list of messages")
                return History(HistoryState.READ, *found, session_id=history_session(body))
            case 401 | 403:
                return History(HistoryState.KEY_NEEDED)
            case 404 if read_error(body, from_sidecar=False).code == "session_not_found":
                return History(HistoryState.UNKNOWN_SESSION)
            case 404 | 405 | 501:
                return History(HistoryState.NO_ROUTE)
            case status:
                return History(HistoryState.UNREADABLE, detail=f"status {status}")

    def _masked(self, error: ErrorAnswer) -> ErrorAnswer:
        """Some servers quote the key that they refuse; what we print shall not."""
        if self._bearer is None:
            return error
        return replace(error, message=error.message.replace(self._bearer, "[the token]"))

    def _get(self, path: str) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._http.get(self._url(path), allow_redirects=False)

    def _url(self, path: str) -> URL:
        # encoded: a session id with %2F in it must not come out as one with a slash.
        return URL(self._base_url + path, encoded=True)


def _why_no_connection(error: OSError) -> str:
    # The event loop's own text repeats the address; the system's is the plain reason. Negative: the resolver's errors.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return shown(error.strerror or "no connection")


async def _finding(answer: aiohttp.ClientResponse, *, streamed: bool) -> Finding:
    if answer.status != 200:
        from_sidecar = "X-Hermes-Sidecar-Error" in answer.headers
        return Finding(End.REFUSED, error=read_error(await _bounded(answer), from_sidecar=from_sidecar))
    if not streamed:
        return read_completion(answer.content_type, await _bounded(answer))
    if answer.content_type != "text/event-stream":
        kind = shown(answer.content_type, 60)
        return Finding(End.NOT_CHAT, detail=f"a stream was asked for, and {kind} came")
    return await _streamed(answer)


async def _streamed(answer: aiohttp.ClientResponse) -> Finding:
    reader = StreamReader()
    read_bytes = 0
    async for piece in answer.content.iter_any():
        reader.feed(piece)
        read_bytes += len(piece)
        if read_bytes > MAX_ANSWER_BYTES:
            return Finding(End.NOT_CHAT, detail=f"more than {MAX_ANSWER_BYTES} bytes came")
        if reader.done:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_TAIL_LIMIT_S):
                    await answer.content.readany()
            break
    return reader.finding()


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """The body, up to the limit; what is longer comes cut, and is then no JSON any more."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            break
    return bytes(body)
