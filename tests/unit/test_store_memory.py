"""What the memory store lets go of, and when."""

from __future__ import annotations

from sidecar.sessions.store.memory import MemoryLineage
from tests.unit.test_store_breaker import Clock


async def test_longest_unused_entry_goes_when_there_are_too_many() -> None:
    store = MemoryLineage(most=3)
    for session_id in (b"a", b"b", b"c"):
        await store.remember(session_id, b"tip")
    await store.successor(b"a")

    await store.remember(b"d", b"tip")

    assert [await store.successor(key) for key in (b"a", b"b", b"c", b"d")] == [b"tip", None, b"tip", b"tip"]
    assert await store.size() == 3


async def test_entry_goes_when_it_was_not_used_for_too_long() -> None:
    clock = Clock()
    store = MemoryLineage(longest_s=10.0, clock=clock)
    await store.remember(b"used", b"tip")
    await store.remember(b"unused", b"tip")

    clock.now += 9.0
    await store.successor(b"used")
    clock.now += 1.0

    assert [await store.successor(b"used"), await store.successor(b"unused")] == [b"tip", None]
    assert await store.size() == 1
