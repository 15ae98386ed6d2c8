"""A store over a medium that is slow, fails, or both. The medium is scripted; the limits are the real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import pytest
from structlog.testing import capture_logs

from sidecar.sessions.store.base import LIMIT_S, StoreUnavailable, Unusable
from sidecar.sessions.store.rounds import ROUND_AT_MOST, RoundsStore
from tests.unit.test_store_breaker import Clock

SLACK_S = 0.5  # on a busy machine


class ScriptedMedium:
    """A dict that can be told to hang or to fail, and that notes what it was asked."""

    kind = "scripted"
    is_shared = True

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.rounds: list[tuple[str, int]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.read_error: Exception | None = None
        self.write_error: Exception | None = None
        self.open_error: Exception | None = None
        self.is_closed = False

    async def open(self) -> None:
        if self.open_error is not None:
            raise self.open_error

    async def read(self, session_ids: Sequence[bytes]) -> Sequence[bytes | None]:
        self.rounds.append(("read", len(session_ids)))
        await self.goes_on.wait()
        if self.read_error is not None:
            raise self.read_error
        return [self.entries.get(session_id) for session_id in session_ids]

    async def write(self, successors: Mapping[bytes, bytes]) -> None:
        self.rounds.append(("write", len(successors)))
        await self.goes_on.wait()
        if self.write_error is not None:
            raise self.write_error
        self.entries.update(successors)

    async def size(self) -> int:
        return len(self.entries)

    async def close(self) -> None:
        self.is_closed = True


async def said(store: RoundsStore) -> str:
    """What a read that has to fail says."""
    with pytest.raises(StoreUnavailable) as caught:
        await store.successor(b"id")
    return str(caught.value)


async def test_what_waits_meanwhile_goes_into_the_next_round_together() -> None:
    medium = ScriptedMedium()
    medium.goes_on.clear()
    store = RoundsStore(medium)

    first = asyncio.create_task(store.remember(b"0", b"tip"))
    await asyncio.sleep(0)  # it is enlisted
    await asyncio.sleep(0)  # its round has begun
    others = [asyncio.create_task(store.remember(b"%d" % number, b"tip")) for number in range(1, 100)]
    reads = [asyncio.create_task(store.successor(b"%d" % number)) for number in range(50)]
    await asyncio.sleep(0)
    medium.goes_on.set()
    found = await asyncio.gather(*reads)
    await asyncio.gather(first, *others)

    assert medium.rounds[0] == ("write", 1)
    assert sorted(medium.rounds[1:]) == [("read", 50), ("write", 99)]
    assert found[0] == b"tip"


async def test_round_has_an_upper_size() -> None:
    medium = ScriptedMedium()
    store = RoundsStore(medium, limit_s=30.0)  # to begin two thousand tasks takes long on a busy machine

    await asyncio.gather(*(store.remember(b"%d" % number, b"tip") for number in range(ROUND_AT_MOST * 2 + 1)))

    assert [size for _, size in medium.rounds] == [ROUND_AT_MOST, ROUND_AT_MOST, 1]


async def test_silent_medium_costs_one_turn_the_limit_and_the_next_nothing() -> None:
    medium = ScriptedMedium()
    medium.goes_on.clear()
    store = RoundsStore(medium)

    began = time.monotonic()
    reason = await said(store)
    first_s = time.monotonic() - began
    with pytest.raises(StoreUnavailable) as caught:
        await store.successor(b"id")
    both_s = time.monotonic() - began

    assert reason == "no answer within 250 ms"
    assert caught.value.is_skipped
    assert LIMIT_S * 0.9 <= first_s <= both_s < LIMIT_S + SLACK_S
    medium.goes_on.set()
    await store.close()


async def test_hundred_turns_before_a_silent_medium_wait_once_together() -> None:
    medium = ScriptedMedium()
    medium.goes_on.clear()
    store = RoundsStore(medium)

    began = time.monotonic()
    with capture_logs() as logged:
        answers = await asyncio.gather(*(store.successor(b"%d" % n) for n in range(100)), return_exceptions=True)
    took_s = time.monotonic() - began

    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert took_s < LIMIT_S + SLACK_S
    assert [line["event"] for line in logged] == ["store_unavailable"]
    medium.goes_on.set()
    await store.close()


async def test_medium_that_comes_back_is_asked_again_after_the_pause_and_the_log_says_both() -> None:
    clock = Clock()
    medium = ScriptedMedium()
    medium.entries[b"id"] = b"tip"
    store = RoundsStore(medium, clock=clock)

    with capture_logs() as logged:
        medium.read_error = StoreUnavailable("it is away")
        reason = await said(store)
        medium.read_error = None
        skipped = await said(store)
        clock.now += 1.0
        found = await store.successor(b"id")

    assert [reason, skipped, found] == ["it is away", "skipped after a failure", b"tip"]
    assert logged == [
        {
            "event": "store_unavailable",
            "kind": "scripted",
            "doing": "reading",
            "reason": "it is away",
            "skipped_for_s": 1.0,
            "log_level": "warning",
        },
        {"event": "store_recovered", "kind": "scripted", "doing": "reading", "log_level": "info"},
    ]


async def test_medium_that_takes_no_writes_is_still_read() -> None:
    medium = ScriptedMedium()
    medium.entries[b"id"] = b"tip"
    medium.write_error = StoreUnavailable("the disk is full")
    store = RoundsStore(medium)

    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await store.remember(b"id", b"other")
        assert await store.successor(b"id") == b"tip"


async def test_mistake_in_a_medium_is_unavailability_with_its_trace_in_the_log() -> None:
    medium = ScriptedMedium()
    medium.read_error = ZeroDivisionError()
    store = RoundsStore(medium)

    with capture_logs() as logged:
        reason = await said(store)

    assert reason == "ZeroDivisionError"
    assert [(line["event"], line.get("exc_info")) for line in logged] == [
        ("store_broken", True),
        ("store_unavailable", None),
    ]


async def test_unusable_medium_leaves_a_memory_store_and_says_so() -> None:
    medium = ScriptedMedium()
    medium.open_error = Unusable("no such place")
    store = RoundsStore(medium)

    with capture_logs() as logged:
        await store.open()
    await store.remember(b"id", b"tip")

    assert [await store.successor(b"id"), await store.size(), store.is_shared] == [b"tip", 1, False]
    assert medium.rounds == []
    assert [(line["event"], line["reason"]) for line in logged] == [("store_unusable", "no such place")]


async def test_closing_waits_for_what_is_being_written() -> None:
    medium = ScriptedMedium()
    medium.goes_on.clear()
    store = RoundsStore(medium)
    write = asyncio.create_task(store.remember(b"id", b"tip"))
    await asyncio.sleep(0)

    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    medium.goes_on.set()
    await asyncio.gather(write, closing)

    assert [medium.entries, medium.is_closed] == [{b"id": b"tip"}, True]


async def test_closing_waits_no_longer_than_the_limit() -> None:
    medium = ScriptedMedium()
    medium.goes_on.clear()
    store = RoundsStore(medium)
    write = asyncio.create_task(store.remember(b"id", b"tip"))
    await asyncio.sleep(0)

    began = time.monotonic()
    await store.close()
    took_s = time.monotonic() - began

    assert took_s < LIMIT_S + SLACK_S
    assert medium.is_closed
    with pytest.raises(StoreUnavailable):
        await write
