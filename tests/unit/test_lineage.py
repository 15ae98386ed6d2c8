"""Which id a session goes on under, held against a model: any rotations in any order, circles and long chains too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from sidecar.sessions import lineage as module
from sidecar.sessions.lineage import Lineage
from sidecar.sessions.store.base import StoreUnavailable
from sidecar.sessions.store.memory import MemoryLineage

T = TypeVar("T")
NAMES = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


def lineage_over(store: MemoryLineage, *, is_on: bool = True) -> tuple[Lineage, list[str]]:
    """A lineage, and what it told: `rotation`, the words of store errors, the names of failures."""
    told: list[str] = []
    return (
        Lineage(
            store,
            is_on=is_on,
            on_rotation=lambda: told.append("rotation"),
            on_store_error=told.append,
            on_failure=lambda exc: told.append(type(exc).__name__),
        ),
        told,
    )


def run(doing: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(doing)


class SharedMemory(MemoryLineage):
    """As a Redis would be: others write to it."""

    is_shared = True


def tip_of(successors: dict[bytes, bytes], session_id: bytes) -> bytes:
    """The model: along the successors to the end; a circle ends at the id it began with."""
    seen = [session_id]
    while seen[-1] in successors:
        seen.append(successors[seen[-1]])
        if seen[-1] in seen[:-1]:
            return session_id
    return seen[-1]


@given(st.lists(st.tuples(NAMES, NAMES), max_size=12))
def test_newest_id_is_what_the_model_says(rotations: list[tuple[bytes, bytes]]) -> None:
    """For any answers in any order, every id leads to the tip of its chain; one that repeats the id is no news."""

    async def learned() -> Lineage:
        lineage, _ = lineage_over(MemoryLineage())
        for sent, answered in rotations:
            lineage.learn(sent, answered)
        await lineage.close()
        return lineage

    lineage = run(learned())
    successors = {sent: answered for sent, answered in rotations if sent != answered}

    for name in (b"a", b"b", b"c", b"d", b"e", b"stranger"):
        assert lineage.newest(name) == tip_of(successors, name)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=10), st.sampled_from([MemoryLineage, SharedMemory]))
def test_another_sidecar_finds_the_same_in_the_store(
    rotations: list[tuple[bytes, bytes]], kind: type[MemoryLineage]
) -> None:
    """One that has nothing but what others wrote knows every id's tip."""

    async def found() -> dict[bytes, bytes]:
        store = kind()
        for sent, answered in rotations:
            if sent != answered:
                await store.remember(sent, answered)
        third, _ = lineage_over(store)
        names = [b"a", b"b", b"c", b"d", b"e"]
        for name in names:
            await third.settle(name)
        return {name: third.newest(name) for name in names}

    successors = {sent: answered for sent, answered in rotations if sent != answered}

    assert run(found()) == {name: tip_of(successors, name) for name in (b"a", b"b", b"c", b"d", b"e")}


async def test_chain_of_hundreds_of_rotations_is_followed_to_its_end() -> None:
    """Five years of a conversation that rotates twice a week; read from the store as well."""
    store = SharedMemory()
    lineage, _ = lineage_over(store)
    for number in range(520):
        lineage.learn(b"s%d" % number, b"s%d" % (number + 1))
    await lineage.close()

    for number in range(520):
        await store.remember(b"s%d" % number, b"s%d" % (number + 1))
    other, told = lineage_over(store)
    await other.settle(b"s0")

    assert [lineage.newest(b"s0"), other.newest(b"s0")] == [b"s520", b"s520"]
    assert told == []


async def test_chain_without_an_end_is_left_after_so_many_steps() -> None:
    lineage, _ = lineage_over(MemoryLineage())
    for number in range(2_000):
        lineage.learn(b"s%d" % number, b"s%d" % (number + 1))

    assert lineage.newest(b"s0") == b"s%d" % (module._LONGEST_CHAIN - 1)
    await lineage.close()


async def test_memory_is_bounded_and_what_fell_out_is_found_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KNOWN", 10)
    store = MemoryLineage()
    lineage, _ = lineage_over(store)
    lineage.learn(b"a", b"b")
    await settled_writes(lineage)
    for number in range(30):
        await lineage.settle(b"other-%d" % number)

    assert len(lineage._known) == 10
    assert lineage.newest(b"a") == b"a"
    assert not lineage.is_settled(b"a")
    await lineage.settle(b"a")
    assert lineage.newest(b"a") == b"b"
    assert lineage.is_settled(b"a")
    await lineage.close()


async def settled_writes(lineage: Lineage) -> None:
    async with asyncio.timeout(5):
        while lineage._unwritten:
            await asyncio.sleep(0)


async def test_own_store_is_asked_once_and_a_shared_one_at_every_turn() -> None:
    own, _ = lineage_over(MemoryLineage())
    shared, _ = lineage_over(SharedMemory())
    before = [own.is_settled(b"a"), shared.is_settled(b"a")]
    await own.settle(b"a")
    await shared.settle(b"a")

    assert before == [False, False]
    assert [own.is_settled(b"a"), shared.is_settled(b"a")] == [True, False]


async def test_switched_off_nothing_is_asked_learned_or_told() -> None:
    lineage, told = lineage_over(SharedMemory(), is_on=False)

    lineage.learn(b"a", b"b")

    assert (lineage.newest(b"a"), lineage.is_settled(b"a"), told) == (b"a", True, [])


async def test_rotation_is_told_once() -> None:
    lineage, told = lineage_over(MemoryLineage())
    for _ in range(3):
        lineage.learn(b"a", b"b")
    await lineage.close()

    assert told == ["rotation"]


class HeldStore(SharedMemory):
    """Answers a question when it may, as it was when the question came."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def successor(self, session_id: bytes) -> bytes | None:
        answer = await super().successor(session_id)
        await self.may_answer.wait()
        return answer


async def test_what_an_answer_tells_while_the_store_is_asked_is_not_forgotten() -> None:
    """Two turns at once: the store's "nothing" is older than what the other turn has just learned."""
    store = HeldStore()
    lineage, _ = lineage_over(store)
    asking = asyncio.ensure_future(lineage.settle(b"a"))
    await asyncio.sleep(0)
    lineage.learn(b"a", b"b")
    store.may_answer.set()
    await asking

    assert lineage.newest(b"a") == b"b"
    await lineage.close()


class AwayStore(SharedMemory):
    """Takes nothing while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = True

    async def remember(self, session_id: bytes, successor: bytes) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
        await super().remember(session_id, successor)


async def test_what_was_learned_while_the_store_was_away_is_written_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WRITE_AGAIN_S", 0.01)
    store = AwayStore()
    lineage, told = lineage_over(store)
    for number in range(1_200):
        lineage.learn(b"k%d" % number, b"child-%d" % number)
    async with asyncio.timeout(5):
        while told.count("away") < 3:
            await asyncio.sleep(0.005)
    store.is_away = False
    await settled_writes(lineage)

    assert await store.size() == 1_200
    assert [await store.successor(b"k%d" % number) for number in (0, 1_199)] == [b"child-0", b"child-1199"]
    await lineage.close()


async def test_what_waits_for_a_store_that_is_away_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_UNWRITTEN", 5)
    lineage, _ = lineage_over(AwayStore())
    for number in range(20):
        lineage.learn(b"k%d" % number, b"child")

    assert list(lineage._unwritten) == [b"k15", b"k16", b"k17", b"k18", b"k19"]
    await lineage.close()


async def test_close_writes_what_the_store_takes_and_gives_up_on_what_it_does_not() -> None:
    refusing = AwayStore()
    written: list[bytes] = []

    class Noting(AwayStore):
        async def remember(self, session_id: bytes, successor: bytes) -> None:
            await super().remember(session_id, successor)
            written.append(session_id)

    taking = Noting()
    taking.is_away = False
    for store in (taking, refusing):
        lineage, _ = lineage_over(store)
        lineage.learn(b"a", b"b")
        async with asyncio.timeout(2):
            await lineage.close()

    assert written == [b"a"]
