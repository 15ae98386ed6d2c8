"""One request from admission to its end: the file to read first.

The story, in order: `begin` admits the request and decides its session; `_ask` sends it upstream, once; the answer's
head, pieces and end go to the client in the call that brought them; exactly one of `complete`, `client_left`,
`upstream_broke`, `timeout`, `drained` and `refused` ends it.

Law: the usual exchange awaits nothing. What takes time (opening a connection, finding out where a session went on,
holding a body that names it) has a task of its own, and leaving cancels it.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

from sidecar import faults
from sidecar.capabilities.observed import has_image_part
from sidecar.faults import Fault, FaultCode
from sidecar.relay import answers, preparation, wire
from sidecar.relay.admission import admit
from sidecar.relay.answer_heads import AnswerHead
from sidecar.relay.familiar import Admitted
from sidecar.relay.preparation import HeldBody
from sidecar.relay.request import Listener, Request
from sidecar.relay.shared import Client, Relay
from sidecar.relay.silence import SilenceWatch
from sidecar.relay.stream import PayloadObserver, StreamObserver
from sidecar.relay.tunnel import Tunnel
from sidecar.relay.upstream import Receiver, Upstream
from sidecar.relay.wire import CHUNKED, UNTIL_CLOSE, RequestHead
from sidecar.telemetry.record import End, ExchangeRecord

_TELLING_S = 0.25
"""How long an answer waits for the store that tells other sidecars of its new session."""


class Exchange(Receiver):
    """One request and its answer."""

    __slots__ = (
        "_answer_framing",
        "_answer_status",
        "_block",
        "_client",
        "_closes",
        "_connecting",
        "_first_byte_at",
        "_has_ended",
        "_has_image",
        "_has_renewed",
        "_held",
        "_held_answer",
        "_is_admitted",
        "_looks_for_image",
        "_observer",
        "_pool",
        "_relay",
        "_request_is_over",
        "_silence",
        "_started_at",
        "_tunnel",
        "_upstream",
        "_was_asked",
        "_write",
        "answer_bytes",
        "familiar",
        "is_over",
        "request",
        "request_bytes",
    )

    request: Request

    def __init__(self, relay: Relay, client: Client, block: bytes) -> None:
        """`block` is what the client sent as a request's head, up to the end of its last line."""
        self._block = block
        self._relay = relay
        self._client = client
        self._write = client.write
        self._pool = relay.pools["gateway"]
        self._upstream: Upstream | None = None
        self._tunnel: Tunnel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._held = HeldBody()
        self._is_admitted = False
        self._request_is_over = False
        self._answer_status = 0
        self._answer_framing = 0
        self.answer_bytes = 0
        self._closes = False
        self._started_at = client.since
        self._first_byte_at = 0.0
        self._silence: SilenceWatch | None = None
        self.is_over = False
        self._looks_for_image = False
        self._has_image = False
        self._has_renewed = False
        self._was_asked = False
        self._held_answer: bytes | None = None
        self._has_ended = False
        self._observer: PayloadObserver | None = None
        self.request_bytes = 0
        self.familiar: Admitted | None = None
        """What may be said again of the next head, if it is alike."""

    @property
    def is_stream(self) -> bool:
        return isinstance(self._observer, StreamObserver)

    # Admission

    def begin(self, listener: Listener, familiar: Admitted | None, length: int) -> bool:
        """Admits the request, or answers it at once: then it is over, and the answer is False.

        `familiar` is what was said of a head that is alike but for this one's `length`.

        What is there of the body comes next by `request_piece`, and then `ask`. Raises WireError where the block heads
        no request; then nothing has begun.
        """
        relay, peer = self._relay, self._client.peer
        refusal: Fault | None = None
        known = None
        if familiar is not None and not relay.is_draining:
            known = familiar.again(length, relay.rules, relay.lineage.newest)
        if known is not None:
            self.request = request = known
            self.familiar = familiar
            self._is_admitted = True
        else:
            head = wire.parse_request_head(self._block)
            self.request = request = Request(head.method, head.minor, listener)
            try:
                self._admit(head)
                self.familiar = relay.familiar.learn(self._block, peer, listener, relay.rules, request)
            except Fault as fault:
                refusal = fault
        relay.exchanges.add(self)
        self._request_is_over = request.body == 0
        self._closes = request.wants_close
        if refusal is not None:
            self._refuse(refusal)
        elif request.is_preflight:
            self._answer_preflight()
        else:
            chats = request.route in ("chat_completions", "responses")
            self._looks_for_image = chats and relay.observed.wants_images
        return not self.is_over

    # Asking the upstream

    def ask(self) -> None:
        if self.request.expects_continue and not self._held.content():
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = self.request
        session_id = request.session_id
        is_settled = session_id is None or self._relay.lineage.is_settled(session_id)
        if is_settled and not request.waits_for_probe and not request.wants_body:
            self._ask()
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        """Waits for what the request depends on: who serves its family, its body, where its session went on."""
        request, relay = self.request, self._relay
        try:
            body = None
            if request.waits_for_probe:
                await preparation.first_probe(relay.backend.known)
                self._admit_again()
            if request.wants_body:
                body = await self._held.whole(relay.rules.body_limit_bytes, is_chunked=request.body == CHUNKED)
                self._admit_again(body)
            if request.session_id is not None and not relay.lineage.is_settled(request.session_id):
                await relay.lineage.settle(request.session_id)
                self._admit_again(body)
        except Fault as fault:
            self._connecting = None
            self._refuse(fault)
            return
        except Exception as exc:  # a fault of ours: the turn goes on with what is known, nobody must hang on it
            relay.log.failed(exc)
        if request.new_body is not None:
            self._held.replace(request.new_body)
        self._connecting = None
        self._ask()

    async def _ask_with_new_token(self) -> None:
        renewed = await self._relay.backend.renew_dashboard_token(self.request.dashboard_token)
        self._connecting = None
        try:
            if not renewed:
                raise faults.dashboard_refused()
            self._admit_again()
        except Fault as fault:
            self._refuse(fault)
        else:
            self._ask()

    def _admit_again(self, body: bytes | None = None) -> None:
        """Judges the request once more, now that more is known. Raises a Fault."""
        self._admit(wire.parse_request_head(self._block), body)

    def _admit(self, head: RequestHead, body: bytes | None = None) -> None:
        """Judges the request by the rules of this moment. Raises a Fault."""
        relay, request = self._relay, self.request
        admit(
            request,
            head,
            relay.rules,
            peer=self._client.peer,
            is_draining=relay.is_draining and not self._is_admitted,
            newest=relay.lineage.newest,
            body=body,
        )
        self._pool = relay.pools[request.destination]
        self._is_admitted = True

    def _ask(self) -> None:
        upstream = self._pool.take(is_safe=self.request.is_safe)
        if upstream is not None:
            self._send(upstream)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            upstream = await self._pool.connect()
        except Fault as fault:
            self._connecting = None
            self._refuse(fault)
        except Exception as exc:  # a fault of ours: nobody must hang on it
            self._connecting = None
            self._relay.log.failed(exc)
            self._refuse(faults.upstream_unreachable(self._pool.name, "the sidecar failed to open a connection"))
        else:
            self._connecting = None
            self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        request = self.request
        self._upstream = upstream
        self._was_asked = True
        start = request.head + self._held.content()
        if request.destination != "dashboard" or not self._request_is_over:
            self._held.clear()  # nothing is ever sent twice, but for what a refused token kept from being read
        upstream.ask(self, request.method, start, bare=request.is_http_1_0, is_safe=request.is_safe)
        upstream.request_is_sent = self._request_is_over
        if upstream.takes_more:
            self._client.resume_reading()
        if self._relay.idle_timeout_s and request.destination == "gateway":
            if self._silence is None:
                limit_s = self._relay.idle_timeout_s
                self._silence = SilenceWatch(limit_s, lambda: self._waits_for_upstream, self._too_silent)
            self._silence.begin()

    def request_piece(self, piece: bytes) -> None:
        if self.request.is_own:
            return  # no page of ours reads a body
        self.request_bytes += len(piece)
        if self._looks_for_image and has_image_part(piece):
            self._looks_for_image, self._has_image = False, True
        if self._upstream is not None:
            self.heard()
            self._upstream.send(piece)
        elif not self.is_over:
            self._held.add(piece)
            if self._held.is_too_much(self._relay.rules.body_limit_bytes if self.request.wants_body else 0):
                self._client.pause_reading()

    def request_end(self) -> None:
        self._request_is_over = True
        self._held.end()
        self.heard()
        if self._upstream is not None:
            self._upstream.request_is_sent = True

    def request_broke(self, fault: Fault) -> None:
        """The request's body is no longer what its framing promised: the upstream must not see it complete."""
        self._closes = True
        self._refuse(fault)

    def pause_request(self) -> None:
        self._client.pause_reading()

    def resume_request(self) -> None:
        self._client.resume_reading()

    # Relaying the answer

    def observer_of(self, head: AnswerHead) -> PayloadObserver | None:
        if self.request.destination != "gateway":
            return None
        if head.content_type.startswith(b"text/event-stream"):
            self._observer = StreamObserver(self._relay.put_aside)
        elif self.request.route in ("chat_completions", "responses"):
            self._observer = PayloadObserver()
        return self._observer

    def answer_head(self, head: AnswerHead, body: int, piece: bytes) -> None:
        self._first_byte_at = monotonic()
        self.heard()
        self._answer_status = head.status
        self._answer_framing = body
        self.answer_bytes = len(piece)
        if body == UNTIL_CLOSE:
            self._closes = True
        request = self.request
        if request.destination == "gateway":
            observed = self._relay.observed
            if observed.is_curious(request.route, had_image=self._has_image, is_stream=self.is_stream):
                observed.answered(request.route, head, had_image=self._has_image)
        elif head.status == 401 and request.dashboard_token is not None and self._can_be_sent_again:
            self._leave_upstream()
            self._answer_status = self.answer_bytes = 0
            if self._has_renewed:
                self._refuse(faults.dashboard_refused())
            else:
                self._has_renewed = True
                self._connecting = asyncio.get_running_loop().create_task(self._ask_with_new_token())
            return
        # One write for head and piece, for the same reason as in Upstream.ask.
        lines = answers.relayed_head(request, head, body, close=self._closes)
        answered_id = head.session_id
        if answered_id is not None and request.sent_id is not None and request.may_rotate and head.status < 300:
            telling = self._relay.lineage.learn(request.sent_id, answered_id)
            if telling is not None:
                self._hold_answer(lines + piece, telling)
                return
        self._write(lines + piece)

    def _hold_answer(self, start: bytes, telling: asyncio.Task[None]) -> None:
        """Holds the rare answer that names a new session until the other sidecars can know it, a moment at most."""
        self._held_answer = start
        if self._upstream is not None:
            self._upstream.pause_reading()
        self._connecting = asyncio.get_running_loop().create_task(self._release_answer(telling))

    async def _release_answer(self, telling: asyncio.Task[None]) -> None:
        await asyncio.wait([telling], timeout=_TELLING_S)
        self._connecting = None
        start, self._held_answer = self._held_answer, None
        if self.is_over or start is None:
            return
        self._write(start)
        if self._has_ended:
            self.answer_end()
        elif self._upstream is not None:
            self._upstream.resume_reading()

    @property
    def _can_be_sent_again(self) -> bool:
        """Whether all of the request is still held; only a refused token lets it be sent once more."""
        return self._request_is_over and (not self.request.body or bool(self._held.content()))

    def heard(self) -> None:
        if self._silence is not None:
            self._silence.heard_at = monotonic()

    def answer_piece(self, piece: bytes) -> None:
        if self._held_answer is not None:  # what the event loop had read before the pause
            self.answer_bytes += len(piece)
            self._held_answer += piece
            return
        if self._silence is not None:
            self.heard()
        self.answer_bytes += len(piece)
        self._write(piece)

    def answer_end(self) -> None:
        self._upstream = None
        if self._held_answer is not None:
            self._has_ended = True
            return
        self._end("complete")
        self._client.exchange_over(keep_alive=not self._closes)

    def answer_upgrade(self, head: AnswerHead, rest: bytes) -> None:
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        if not self.request.is_upgrade:
            upstream.leave()
            why = "it switched to another protocol without being asked"
            self._refuse(self._protocol_fault(why))
            return
        self._first_byte_at = monotonic()
        self._answer_status = head.status
        self._write(answers.upgraded_head(self.request, head))
        early = self._client.hand_over()
        self._tunnel = Tunnel(self._client.transport, upstream.transport, self._end)
        self._tunnel.begin(early, rest)

    # Backpressure from the client

    def pause_answer(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume_answer(self) -> None:
        if self._upstream is not None:
            self.heard()
            self._upstream.resume_reading()

    # The ends

    def client_left(self) -> None:
        """The client's connection is gone: so is the upstream's at once, whatever phase this is."""
        self._leave_upstream()
        self._end("client_left")

    def upstream_lost(self, why: str, *, answered: bool) -> None:
        upstream, self._upstream = self._upstream, None
        if self._answer_status:
            if self.request.destination == "gateway":
                self._relay.backend.trouble()
            self._break("upstream_broke")
        elif not answered and upstream is not None and upstream.served:
            self._pool.distrust()
            if self.request.is_safe:
                # The connection had gone stale. A safe request may be repeated: once, on a fresh one.
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
            else:
                self._refuse(self._protocol_fault(why))
        else:
            self._refuse(self._protocol_fault(why))

    def _protocol_fault(self, why: str) -> Fault:
        who = "dashboard" if self.request.destination == "dashboard" else "gateway"
        return faults.upstream_protocol_error(self._pool.name, why, who=who)

    def drain(self) -> None:
        """The grace is over: breaks off what is still running."""
        self._leave_upstream()
        if self._tunnel is not None:
            self._tunnel.cut()
        self._break("drained")

    @property
    def _waits_for_upstream(self) -> bool:
        """Whether it is the upstream's turn: the client has sent all, and takes what comes."""
        upstream = self._upstream
        return upstream is not None and upstream.is_reading and (self._request_is_over or not upstream.takes_more)

    def _too_silent(self) -> None:
        if self._answer_status:
            self._leave_upstream()
            self._break("timeout")
        else:
            self._refuse(faults.upstream_timeout(self._pool.name, self._relay.idle_timeout_s))

    def _refuse(self, fault: Fault) -> None:
        """Answers with a fault of ours while no answer has begun; afterwards the connection can only be broken."""
        self._leave_upstream()
        if self._answer_status:
            self._break("refused")
            return
        if fault.code in _END_OF and self.request.destination == "gateway":
            self._relay.backend.trouble()
        # A request that is not valid leaves in doubt where the next one would begin.
        self._closes = self._closes or not self._request_is_over or fault.code is FaultCode.INVALID_REQUEST
        self._answer_status = fault.status
        self._write(answers.fault(fault, self.request, close=self._closes))
        self._end(_END_OF.get(fault.code, "refused"), fault)
        self._client.exchange_over(keep_alive=not self._closes)

    def _break(self, end: End) -> None:
        """Ends an answer that has begun, so that the client sees that it is incomplete: never a short success."""
        if not self.is_over:
            self._end(end)
            self._client.cut(reset=self.request.is_http_1_0 or self._answer_framing == UNTIL_CLOSE)

    def _answer_preflight(self) -> None:
        self._answer_status = 204
        self._write(answers.preflight(self.request))
        self._end("complete")
        self._client.exchange_over(keep_alive=not (self._closes or self.request.body))

    def _leave_upstream(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.leave()

    def _end(self, end: End, fault: Fault | None = None) -> None:
        """Book-keeping, once per exchange."""
        if self.is_over:
            return
        self.is_over = True
        self._relay.exchanges.discard(self)
        if self._tunnel is not None:
            self._client.tunnel_over()
        if self._relay.is_draining:
            self._relay.ended.set()
        if self._silence is not None:
            self._silence.end()
        request = self.request
        # A turn's head tells where its session went on, unless it left before that was known, or never came.
        has_told = end == "complete" and not self.is_stream
        is_open = request.may_rotate and self._was_asked and self._answer_status < 300 and not has_told
        if is_open and request.sent_id is not None:
            self._relay.backend.check_lineage(request.sent_id, request.credentials)
        if self._tunnel is not None:
            self.request_bytes, self.answer_bytes = self._tunnel.passed_bytes
        observer = self._observer
        first_token_at = observer.first_token_at if isinstance(observer, StreamObserver) else None
        first_byte_s = self._first_byte_at - self._started_at if self._first_byte_at else None
        self._relay.log.ended(
            ExchangeRecord(
                request.method,
                request.route,
                self._answer_status,
                end,
                request.source,
                request.session_id,
                request.request_id,
                first_byte_s,
                monotonic() - self._started_at,
                self.answer_bytes,
                fault,
                request.destination,
                request.is_derived,
                self.is_stream,
                None if first_token_at is None else first_token_at - self._started_at,
                self.request_bytes,
                observer.usage if observer is not None and end == "complete" else {},
                request.traceparent,
                request.sent_id != request.session_id,
                request.is_unread,
            )
        )


_END_OF: Final[dict[FaultCode, End]] = {
    FaultCode.UPSTREAM_UNREACHABLE: "upstream_broke",
    FaultCode.UPSTREAM_PROTOCOL_ERROR: "upstream_broke",
    FaultCode.UPSTREAM_TIMEOUT: "timeout",
}
