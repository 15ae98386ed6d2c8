"""What a full store takes: 100,000 lineages, with ids as long as a UUID and as long as they may be.

The figures stand in docs/reference/stores.md; the bounds here are wider, for other machines and versions.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from sidecar.sessions.store.base import MOST_LINEAGES, Store
from sidecar.sessions.store.memory import MemoryLineage
from sidecar.sessions.store.redis import RedisLineage
from sidecar.sessions.store.rounds import Medium, RoundsStore
from sidecar.sessions.store.sqlite import SqliteLineage
from tests.support.redis_server import redis_server

PATIENT_S = 5.0
AT_ONCE = 1_000
TIMED = 500

SHORT, LONG = 36, 256  # bytes of an id
LENGTHS = [pytest.param(SHORT, id="uuid"), pytest.param(LONG, id="longest")]


def entries(length: int) -> Iterator[tuple[bytes, bytes]]:
    for number in range(MOST_LINEAGES):
        yield b"%0*d" % (length, number), b"%0*d" % (length, number + MOST_LINEAGES)


async def fill(medium: Medium, length: int) -> None:
    some: dict[bytes, bytes] = {}
    for session_id, successor in entries(length):
        some[session_id] = successor
        if len(some) == AT_ONCE:
            await medium.write(some)
            some = {}


async def tell(kind: str, store: Store, length: int, total_bytes: int) -> float:
    """Prints a line of figures. Returns the bytes for each lineage."""
    reads, writes = [], []
    for number in range(TIMED):
        began = time.perf_counter()
        await store.successor(b"%0*d" % (length, number * 199))
        reads.append(time.perf_counter() - began)
        began = time.perf_counter()
        await store.remember(b"%0*d" % (length, number * 197), b"tip")
        writes.append(time.perf_counter() - began)
    each = total_bytes / MOST_LINEAGES
    print(f"\n{kind}, ids of {length} bytes: {each:.0f} bytes a lineage, {total_bytes / 1e6:.1f} MB in all", end="")
    for name, took in (("read", sorted(reads)), ("write", sorted(writes))):
        of_100_s = took[TIMED * 99 // 100]
        print(f"; {name} median {took[TIMED // 2] * 1e6:.0f} µs, 99 of 100 within {of_100_s * 1e6:.0f} µs", end="")
    print()
    return each


@pytest.mark.parametrize("length", LENGTHS)
async def test_memory_of_a_full_memory_store(length: int) -> None:
    tracemalloc.start()
    try:
        store = MemoryLineage()
        for session_id, successor in entries(length):
            await store.remember(session_id, successor)
        total_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    each = await tell("memory", store, length, total_bytes)
    assert await store.size() == MOST_LINEAGES
    assert 2 * length < each < 2 * length + 500


@pytest.mark.parametrize("length", LENGTHS)
async def test_disk_of_a_full_sqlite_store(tmp_path: Path, length: int) -> None:
    path = tmp_path / "lineage.sqlite3"
    medium = SqliteLineage(path)
    await medium.open()
    await fill(medium, length)
    log_bytes = path.with_name(f"{path.name}-wal").stat().st_size
    await medium.close()
    total_bytes = path.stat().st_size

    store = RoundsStore(SqliteLineage(path), limit_s=PATIENT_S)
    began = time.perf_counter()
    await store.open()
    opened_s = time.perf_counter() - began
    size = await store.size()
    each = await tell("sqlite", store, length, total_bytes)
    print(
        f"sqlite, ids of {length} bytes: opened and checked in {opened_s * 1000:.0f} ms, log {log_bytes / 1e6:.1f} MB"
    )
    await store.close()

    assert MOST_LINEAGES * 0.98 < size <= MOST_LINEAGES  # it makes room before it is quite full
    assert 2 * length < each < 4 * length + 200
    assert log_bytes < 16e6
    assert opened_s < 3.0


@pytest.mark.parametrize("length", LENGTHS)
async def test_memory_of_redis_with_as_many(length: int) -> None:
    with redis_server("--appendfsync", "no") as server, Redis(port=server.port) as client:
        empty_bytes = client.info("memory")["used_memory"]
        medium = RedisLineage(server.url())
        await fill(medium, length)
        total_bytes = client.info("memory")["used_memory"] - empty_bytes
        store = RoundsStore(medium, limit_s=PATIENT_S)
        size = await store.size()
        each = await tell("redis", store, length, total_bytes)
        await store.close()

    assert size == MOST_LINEAGES
    assert 2 * length < each < 3 * length + 500
