"""What every store of lineages promises, asked of all three: in memory, in a SQLite file, in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from redis import Redis

from sidecar.sessions.store.base import LONGEST_ID_BYTES, Store
from sidecar.sessions.store.memory import MemoryLineage
from sidecar.sessions.store.redis import RedisLineage
from sidecar.sessions.store.rounds import RoundsStore
from sidecar.sessions.store.sqlite import SqliteLineage
from tests.support.redis_server import RedisServer, redis_server

PATIENT_S = 5.0  # these tests are about what a store does; the module beside this one is about how long it may take

T = TypeVar("T")
Opener = Callable[[], Store]
"""Makes one more store over the same place, still to be opened."""

KINDS = ["memory", "sqlite", "redis"]
LASTING = ["sqlite", "redis"]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def opener(kind: str, directory: Path, request: pytest.FixtureRequest, *, longest_s: float = 1_000.0) -> Opener:
    """Stores of that kind over one empty place."""
    if kind == "memory":
        return lambda: MemoryLineage(longest_s=longest_s)
    if kind == "sqlite":
        path = directory / "state" / "lineage.sqlite3"
        return lambda: RoundsStore(SqliteLineage(path, longest_s=longest_s), limit_s=PATIENT_S)
    server: RedisServer = request.getfixturevalue("redis")
    with Redis(port=server.port) as client:
        client.flushdb()
    return lambda: RoundsStore(RedisLineage(server.url(), longest_s=longest_s), limit_s=PATIENT_S)


@pytest.fixture(params=KINDS)
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener(request.param, tmp_path, request)


@pytest.fixture(params=LASTING)
def new_lasting_store(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener(request.param, tmp_path, request)


async def opened(new_store: Opener) -> Store:
    store = new_store()
    await store.open()
    return store


# --- Finding what was remembered -------------------------------------------------------------------------------------


async def test_unknown_id_has_no_successor(new_store: Opener) -> None:
    store = await opened(new_store)

    assert [await store.successor(b"nobody"), await store.size()] == [None, 0]
    await store.close()


async def test_last_write_wins(new_store: Opener) -> None:
    store = await opened(new_store)

    await store.remember(b"first", b"second")
    await store.remember(b"first", b"third")

    assert [await store.successor(b"first"), await store.size()] == [b"third", 1]
    await store.close()


async def test_ids_are_bytes_and_none_is_taken_for_another(new_store: Opener) -> None:
    ids = [
        b"",
        b"a",
        b"A",
        b"a ",
        b"a\x00",
        b"\x00a",
        b"caf\xe9",
        b"caf\xe8",
        b"\r\n",
        b"*",
        b"%s",
        b"x" * 256,
        b"'; --",
    ]
    store = await opened(new_store)

    for number, session_id in enumerate(ids):
        await store.remember(session_id, b"tip-%d\xff\x00" % number)

    assert [await store.successor(session_id) for session_id in ids] == [b"tip-%d\xff\x00" % n for n in range(len(ids))]
    await store.close()


async def test_longest_id_is_kept_and_a_longer_one_is_not(new_store: Opener) -> None:
    longest, longer = b"y" * LONGEST_ID_BYTES, b"y" * (LONGEST_ID_BYTES + 1)
    store = await opened(new_store)

    await store.remember(longest, longest)
    await store.remember(longer, b"tip")
    await store.remember(b"tip", longer)

    found = [await store.successor(session_id) for session_id in (longest, longer, b"tip")]
    assert found == [longest, None, None]
    assert await store.size() == 1
    await store.close()


async def test_many_at_once_all_find_their_own(new_store: Opener) -> None:
    store = await opened(new_store)
    ids = [b"id-%d" % number for number in range(2_500)]

    await asyncio.gather(*(store.remember(session_id, session_id + b"-next") for session_id in ids))
    found = await asyncio.gather(*(store.successor(session_id) for session_id in ids))

    assert found == [session_id + b"-next" for session_id in ids]
    assert await store.size() == len(ids)
    await store.close()


async def test_cancelled_calls_leave_all_others_their_own_answers(new_store: Opener) -> None:
    """Turns end at any time. Nobody may get the answer that was meant for one that is gone."""
    store = await opened(new_store)
    ids = [b"id-%d" % number for number in range(200)]
    await asyncio.gather(*(store.remember(session_id, session_id + b"-next") for session_id in ids))

    reads = [asyncio.create_task(store.successor(session_id)) for session_id in ids]
    writes = [asyncio.create_task(store.remember(session_id, session_id + b"-last")) for session_id in ids[:20]]
    await asyncio.sleep(0)
    for task in [*reads[::2], *writes[::2]]:
        task.cancel()
    found = await asyncio.gather(*reads[1::2])
    await asyncio.gather(*writes[1::2])

    assert [answer.removesuffix(b"-next").removesuffix(b"-last") for answer in found if answer] == ids[1::2]
    assert [await store.successor(session_id) for session_id in ids[1:20:2]] == [key + b"-last" for key in ids[1:20:2]]
    assert [await store.successor(session_id) for session_id in ids[20:]] == [key + b"-next" for key in ids[20:]]
    await store.close()


# --- Letting go ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_unused_entry_is_let_go_after_its_time(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """By the real clock, since Redis has its own. Two seconds: a SQLite file counts in whole ones."""
    store = await opened(opener(kind, tmp_path, request, longest_s=2.0))

    await store.remember(b"first", b"second")
    before = await store.successor(b"first")
    async with asyncio.timeout(10.0):
        while await _is_there(store, kind):
            await asyncio.sleep(0.05)

    assert [before, await store.successor(b"first")] == [b"second", None]
    await store.close()


async def _is_there(store: Store, kind: str) -> bool:
    """Looked for in a way that is no use of it, since a use begins its time anew. A SQLite file notes one a day."""
    return await store.successor(b"first") is not None if kind == "sqlite" else await store.size() > 0


# --- Lasting ---------------------------------------------------------------------------------------------------------


async def test_what_was_remembered_is_there_after_a_restart(new_lasting_store: Opener) -> None:
    store = await opened(new_lasting_store)
    await store.remember(b"first", b"second")
    await store.close()

    store = await opened(new_lasting_store)

    assert [await store.successor(b"first"), await store.size()] == [b"second", 1]
    await store.close()


async def test_two_stores_over_one_place_see_each_other_at_once(new_lasting_store: Opener) -> None:
    one, other = await opened(new_lasting_store), await opened(new_lasting_store)

    await one.remember(b"first", b"second")
    seen = await other.successor(b"first")
    await other.remember(b"first", b"third")

    assert [seen, await one.successor(b"first")] == [b"second", b"third"]
    await one.close()
    await other.close()


async def test_memory_begins_empty_each_time() -> None:
    store = MemoryLineage()
    await store.remember(b"first", b"second")
    await store.close()

    assert await store.size() == 0


# --- Against a dict --------------------------------------------------------------------------------------------------

_IDS = st.one_of(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=256))


class AgainstADict(RuleBasedStateMachine):
    """For any calls in any order, cancelled ones and restarts among them, a store answers as a dict would."""

    def __init__(self, new_store: Opener, *, lasts: bool) -> None:
        super().__init__()
        self._new_store = new_store
        self._lasts = lasts
        self._loop = uvloop.new_event_loop()
        self._store = self._run(opened(new_store))
        self._model: dict[bytes, bytes] = {}

    def _run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(doing)

    @rule(session_id=_IDS, successor=_IDS)
    def remember(self, session_id: bytes, successor: bytes) -> None:
        self._run(self._store.remember(session_id, successor))
        self._model[session_id] = successor

    @rule(session_ids=st.lists(_IDS, min_size=2, max_size=6), successor=_IDS)
    def remember_several_at_once(self, session_ids: list[bytes], successor: bytes) -> None:
        async def together() -> None:
            await asyncio.gather(
                *(self._store.remember(key, successor + b"%d" % number) for number, key in enumerate(session_ids))
            )

        self._run(together())
        self._model.update({key: successor + b"%d" % number for number, key in enumerate(session_ids)})

    @rule(session_id=_IDS, successor=_IDS, steps=st.integers(0, 3))
    def remember_but_leave(self, session_id: bytes, successor: bytes, steps: int) -> None:
        async def leave() -> bytes | None:
            task = asyncio.create_task(self._store.remember(session_id, successor))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return await self._store.successor(session_id)

        found = self._run(leave())
        assert found in (self._model.get(session_id), successor)
        if found is not None:
            self._model[session_id] = found

    @rule(session_id=_IDS)
    def find(self, session_id: bytes) -> None:
        assert self._run(self._store.successor(session_id)) == self._model.get(session_id)

    @rule()
    def find_all(self) -> None:
        for session_id, successor in self._model.items():
            assert self._run(self._store.successor(session_id)) == successor

    @rule()
    def count(self) -> None:
        assert self._run(self._store.size()) == len(self._model)

    @rule()
    def restart(self) -> None:
        self._run(self._store.close())
        self._store = self._run(opened(self._new_store))
        if not self._lasts:
            self._model.clear()

    def teardown(self) -> None:
        self._run(self._store.close())
        self._loop.close()


@pytest.mark.parametrize("kind", KINDS)
def test_store_answers_as_a_dict_would(kind: str, request: pytest.FixtureRequest) -> None:
    with TemporaryDirectory() as directory:
        numbers = iter(range(1_000_000))

        class Machine(AgainstADict):
            def __init__(self) -> None:
                place = Path(directory, str(next(numbers)))
                super().__init__(opener(kind, place, request), lasts=kind in LASTING)

        run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
