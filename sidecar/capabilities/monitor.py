"""When to probe: at launch, then seldom while chat is usable, often while it is not, at once after trouble.

Law: one probe at a time, whoever asks; and nobody's chat waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sidecar.capabilities.model import ENHANCED, NOT_ASKED, GatewayFacts, Picture, is_chat_usable, undated
from sidecar.capabilities.observed import Observed

_POKE_GAP_S = 1.0
"""Least time between two probes that trouble on the data path calls for."""
_DENIALS = 2
"""How many probes in a row must deny what traffic has shown before it counts as gone."""

Probe = Callable[[], Awaitable[Picture]]
Listener = Callable[[Picture], None]


class Monitor:
    """Keeps the picture of what the backend can do."""

    def __init__(
        self,
        probe: Probe,
        blank: Picture,
        *,
        interval_s: float,
        retry_s: float,
        on_failure: Callable[[BaseException], None],
        on_probe: Callable[[float, str | None], None] = lambda _seconds, _failure: None,
    ) -> None:
        """`blank` is the picture before the first probe.

        `on_failure` hears of faults of ours in a probe, `on_probe` of each probe's seconds and what kept the gateway
        from answering, if anything.
        """
        self._probe = probe
        self._asked = blank
        self._interval_s, self._retry_s = interval_s, retry_s
        self._on_failure = on_failure
        self._on_probe = on_probe
        self._running: asyncio.Task[Picture] | None = None
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._look_again = asyncio.Event()
        """Set whenever the length of the wait may have changed: woken, or a probe has ended."""
        self._probed_at = 0.0
        self._denials: dict[str, int] = {}
        self._was_silent = False
        self._listeners: list[Listener] = []
        self.observed = Observed(self._publish)
        self.picture = blank
        self.known = asyncio.Event()
        """Set once the first probe has ended."""

    def on_change(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each new picture. The answer takes it off again."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        tasks = [task for task in (self._loop, self._running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def trouble(self) -> None:
        """The data path met a gateway that could not be used: look again at once, if that is news."""
        if is_chat_usable(self.picture):
            self.wake()

    def wake(self) -> None:
        """Something has changed: look now."""
        self._wake.set()
        self._look_again.set()

    async def refresh(self) -> Picture:
        """Probes now, or joins the probe that is running."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._probe_once())
        return await asyncio.shield(self._running)

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except asyncio.CancelledError:
                raise
            except Exception as exc:  # the next look may go better; meanwhile what was known stands
                self._on_failure(exc)
            while not self._wake.is_set() and (wait_s := self._next_look_s()) > 0:
                # Somebody else's probe ends this wait as well: what it found decides how long the next one is.
                self._look_again.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._look_again.wait()
            if self._wake.is_set():
                await asyncio.sleep(_POKE_GAP_S - (time.monotonic() - self._probed_at))
            self._wake.clear()

    def _next_look_s(self) -> float:
        """Seconds until the next look is due, counted from the last one, whoever asked for it."""
        is_well = is_chat_usable(self.picture) and not self._was_silent
        return self._probed_at + (self._interval_s if is_well else self._retry_s) - time.monotonic()

    async def _probe_once(self) -> Picture:
        began = time.monotonic()
        try:
            fresh = await self._probe()
            self._on_probe(time.monotonic() - began, fresh.gateway.failure)
            if not self._is_single_silence(fresh.gateway):
                self._compare(fresh)
                self._asked = fresh
        finally:
            self._probed_at = time.monotonic()
            self._running = None
            self.known.set()
        self._publish()
        self._look_again.set()
        return self.picture

    def _is_single_silence(self, gateway: GatewayFacts) -> bool:
        """Whether chat has been seen to work, and this is the first probe since that was not answered.

        One silence disproves nothing: the gateway may be busy. A refused connection is no silence.
        """
        was_silent, self._was_silent = self._was_silent, gateway.failure in ("timeout", "broken")
        return self._was_silent and not was_silent and "chatCompletions" in self.observed.findings

    def _compare(self, fresh: Picture) -> None:
        """Drops what traffic had shown where it cannot hold any longer."""
        before, after = self._asked.gateway, fresh.gateway
        is_another = None not in (before.kind, after.kind) and (before.kind, before.version) != (
            after.kind,
            after.version,
        )
        if after.failure is not None or is_another:
            self.observed.forget()
            self._denials.clear()
            return
        for name in self.observed.findings:
            if after.findings.get(name, NOT_ASKED).available is not False:
                self._denials.pop(name, None)
            elif name in self._denials or before.findings.get(name, NOT_ASKED).available is not False:
                self._denials[name] = self._denials.get(name, 0) + 1
            # else: it was denied when traffic showed it, and that the probe still says so is no news.
        gone = {name for name, count in self._denials.items() if count >= _DENIALS}
        if gone:
            self.observed.forget(gone)
            self._denials = {name: count for name, count in self._denials.items() if name not in gone}

    def _publish(self) -> None:
        gateway = _with_observed(self._asked.gateway, self.observed)
        before, self.picture = self.picture, replace(self._asked, gateway=gateway)
        picture = self.picture
        if undated(picture) == undated(before):
            return
        for listener in list(self._listeners):
            listener(picture)


def _with_observed(gateway: GatewayFacts, observed: Observed) -> GatewayFacts:
    """What traffic has shown weighs more than what a probe could not see.

    A family that a probe denied stays denied: some backends answer unknown paths with 200 as well.
    """
    if not observed.findings:
        return gateway
    findings = dict(gateway.findings)
    for name, seen in observed.findings.items():
        if name not in ENHANCED or findings.get(name, NOT_ASKED).available is None:
            findings[name] = seen
    return replace(gateway, findings=findings)
