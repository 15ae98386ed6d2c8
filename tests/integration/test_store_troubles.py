"""Stores in trouble: killed in the middle of a write, on a full disk, with a server that is slow or away."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.sessions.store import open_store
from sidecar.sessions.store.base import LIMIT_S, Store, StoreUnavailable
from sidecar.sessions.store.redis import KEY_PREFIX, RedisLineage
from sidecar.sessions.store.rounds import RoundsStore
from sidecar.sessions.store.sqlite_file import LineageFile
from tests.support.lineage_writer import entry
from tests.support.redis_server import RedisServer, redis_server
from tests.support.stall import stall_before

ROOT = Path(__file__).parents[2]
WRITER = "tests.support.lineage_writer"
START_LIMIT_S = 20.0
SLACK_S = 0.5  # on a busy machine
COMES_BACK_WITHIN_S = 15.0

# --- SQLite: processes that die, and several at once -----------------------------------------------------------------


@asynccontextmanager
async def writer(path: Path, name: str, count: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", WRITER, str(path), name, str(count), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            assert await line_of(process) == "open"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


def integrity(path: Path) -> str:
    db = sqlite3.connect(path)
    try:
        return str(db.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        db.close()


@pytest.mark.parametrize("after", [1, 137, 500, 901])
async def test_killed_in_the_middle_of_a_thousand_writes_loses_none_that_had_ended(tmp_path: Path, after: int) -> None:
    path = tmp_path / "lineage.sqlite3"

    async with writer(path, "kill", 1_000) as process:
        async with asyncio.timeout(START_LIMIT_S):
            while await line_of(process) != str(after):
                pass
        process.kill()
        rest, _ = await process.communicate()

    last = int(rest.split()[-1]) if rest.split() else after
    file = LineageFile(path)
    file.open()
    written = [entry("kill", number) for number in range(last + 1)]
    assert file.read(session_id for session_id, _ in written)[0] == [tip for _, tip in written]
    assert file.size() in (last + 1, last + 2)  # the last one may have been written without being told
    file.write({b"life": b"goes on"})
    file.close()
    assert [integrity(path), path.with_name("lineage.sqlite3.damaged").exists()] == ["ok", False]


async def test_workers_that_start_and_write_at_once_lose_nothing_and_one_that_dies_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lineage.sqlite3"

    async with (
        writer(path, "a", 200) as first,
        writer(path, "b", 200) as second,
        writer(path, "dies", 100_000) as third,
    ):
        async with asyncio.timeout(START_LIMIT_S):
            while await line_of(third) != "50":
                pass
            third.kill()
            await asyncio.gather(first.communicate(), second.communicate())
        codes = [first.returncode, second.returncode]

    file = LineageFile(path)
    file.open()
    wanted = [*(entry(name, n) for name in "ab" for n in range(200)), *(entry("dies", n) for n in range(51))]
    assert codes == [0, 0]
    assert file.read(session_id for session_id, _ in wanted)[0] == [tip for _, tip in wanted]
    file.close()


async def test_workers_that_find_damage_at_once_agree_on_one_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lineage.sqlite3"
    path.write_bytes(b"no database" * 1_000)
    names = ("a", "b", "c", "d")

    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", WRITER, str(path), name, "20", cwd=ROOT, stdout=subprocess.PIPE
        )
        for name in names
    ]
    async with asyncio.timeout(START_LIMIT_S):
        await asyncio.gather(*(process.communicate() for process in processes))

    file = LineageFile(path)
    file.open()
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert file.size() == 20 * len(names)
    assert path.with_name("lineage.sqlite3.damaged").read_bytes() == b"no database" * 1_000
    file.close()


# --- SQLite: disks ---------------------------------------------------------------------------------------------------


def on_a_small_disk(script: str, *arguments: str) -> str:
    """What the shell script prints, run with an empty file system of 600 kB at $DISK that only it can see."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = [str(shutil.which("unshare")), *as_root, "--mount"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("this environment lets nobody mount a file system of their own")
    done = subprocess.run(
        [*unshare, "sh", "-ec", f'DISK=/mnt; mount -t tmpfs -o size=600k none "$DISK"; {script}', "sh", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_full_disk_stops_writes_only_and_room_on_it_brings_them_back() -> None:
    said = on_a_small_disk(f'"$1" -m {WRITER} "$DISK/state/lineage.sqlite3" fill', sys.executable)

    facts = [line for line in said.splitlines() if not line.startswith("20")]  # without the log's lines
    assert facts == ["writing: SQLITE_FULL", "written some: True", "all read: True", "after room was made: True"]


def test_read_only_disk_leaves_memory_in_service() -> None:
    said = on_a_small_disk(
        f'"$1" -m {WRITER} "$DISK/lineage.sqlite3" old 1; mount -o remount,ro "$DISK";'
        f' "$1" -m {WRITER} "$DISK/lineage.sqlite3" new 3',
        sys.executable,
    )

    assert [word for word in said.split() if word.isdigit()] == ["0", "0", "1", "2"]
    assert "store_unusable" in said
    assert "Read-only file system" in said


def test_disk_that_is_full_at_the_start_leaves_memory_in_service() -> None:
    said = on_a_small_disk(
        f'head -c 1M /dev/zero >"$DISK/ballast" 2>/dev/null || true; "$1" -m {WRITER} "$DISK/lineage.sqlite3" new 3',
        sys.executable,
    )

    assert [word for word in said.split() if word.isdigit()] == ["0", "1", "2"]
    assert "store_unusable" in said


# --- Redis: slow, away, back -----------------------------------------------------------------------------------------


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server("--repl-diskless-sync-delay", "0") as server:
        yield server


async def opened(url: str) -> Store:
    store = open_store(url, workers=1, environ={})
    await store.open()
    return store


async def timed_failure(store: Store) -> tuple[float, StoreUnavailable]:
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        await store.successor(b"first")
    return time.monotonic() - began, caught.value


async def back(store: Store, session_id: bytes) -> bytes | None:
    """What the store finds as soon as it finds anything again."""
    async with asyncio.timeout(COMES_BACK_WITHIN_S):
        while True:
            try:
                return await store.successor(session_id)
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def test_redis_that_falls_silent_costs_a_quarter_second_once_and_mixes_nothing_up(redis: RedisServer) -> None:
    async with stall_before(redis.port) as stall:
        store = await opened(redis.url(port=stall.port))
        ids = [b"id-%d" % number for number in range(50)]
        await asyncio.gather(*(store.remember(session_id, session_id + b"-tip") for session_id in ids))

        stall.stop()
        first_s, first = await timed_failure(store)
        second_s, second = await timed_failure(store)
        stall.go_on()
        await back(store, ids[0])
        found = [await store.successor(session_id) for session_id in ids]

        assert LIMIT_S * 0.9 < first_s < LIMIT_S + SLACK_S
        assert second_s < LIMIT_S / 2
        assert [first.is_skipped, second.is_skipped] == [False, True]
        assert found == [session_id + b"-tip" for session_id in ids]
        await store.close()


async def test_redis_killed_and_started_under_load_is_never_waited_for_and_followed_again(redis: RedisServer) -> None:
    store = await opened(redis.url())
    written: dict[bytes, bytes] = {}
    slowest_s = 0.0
    failures: list[StoreUnavailable] = []
    has_failed = asyncio.Event()
    is_over = False

    async def turns(name: int) -> None:
        nonlocal slowest_s
        number = 0
        while not is_over:
            session_id, tip = b"%d-%d" % (name, number), b"tip-%d" % number
            began = time.monotonic()
            try:
                await store.remember(session_id, tip)
                written[session_id] = tip
                assert await store.successor(session_id) == tip
            except StoreUnavailable as exc:
                failures.append(exc)
                has_failed.set()
            slowest_s = max(slowest_s, time.monotonic() - began)
            number += 1
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as load:
        for name in range(20):
            load.create_task(turns(name))
        async with asyncio.timeout(START_LIMIT_S):
            while len(written) < 100:
                await asyncio.sleep(0.01)
        redis.kill()
        async with asyncio.timeout(START_LIMIT_S):
            await has_failed.wait()
        before = len(written)
        await asyncio.to_thread(redis.start)
        async with asyncio.timeout(COMES_BACK_WITHIN_S):
            while len(written) < before + 100:
                await asyncio.sleep(0.01)
        is_over = True

    assert slowest_s < 2 * (LIMIT_S + SLACK_S)  # a write and a read
    assert {failure.is_skipped for failure in failures} == {False, True}
    assert sum(not failure.is_skipped for failure in failures) <= 100  # the others cost nothing
    assert [await back(store, session_id) for session_id in written] == list(written.values())
    await store.close()


async def test_redis_restarted_while_nobody_spoke_is_not_even_noticed(redis: RedisServer) -> None:
    """The connection that was kept is stale then; that must not cost a turn its lineage."""
    store = await opened(redis.url())
    await store.remember(b"first", b"second")
    await asyncio.to_thread(redis.stop)
    await asyncio.to_thread(redis.start)

    assert await store.successor(b"first") == b"second"
    await store.close()


async def test_redis_that_was_away_at_the_start_is_used_when_it_comes(redis: RedisServer) -> None:
    await asyncio.to_thread(redis.stop)
    store = await opened(redis.url())
    _, failure = await timed_failure(store)
    await asyncio.to_thread(redis.start)

    found = await back(store, b"first")
    async with asyncio.timeout(COMES_BACK_WITHIN_S):
        await store.remember(b"first", b"second")

    assert [failure.is_skipped, found, await store.successor(b"first")] == [False, None, b"second"]
    await store.close()


async def test_redis_that_takes_no_writes_is_still_read(redis: RedisServer) -> None:
    """A replica: `GETEX`, which renews an entry, is a write to it."""
    store = await opened(redis.url())
    await store.remember(b"first", b"second")
    with redis_server("--replicaof", f"127.0.0.1 {redis.port}") as copy:
        reader = RoundsStore(RedisLineage(copy.url()))
        async with asyncio.timeout(START_LIMIT_S):
            while await back(reader, b"first") is None:
                await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable) as caught:
            await reader.remember(b"first", b"third")

        assert str(caught.value) == "ReadOnlyError"
        assert await reader.successor(b"first") == b"second"
        await reader.close()
    await store.close()


async def test_password_opens_and_a_wrong_one_is_told_without_being_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, wrong = "r1ght/@pa55", "wr0ng"
    with redis_server("--requirepass", right) as server:
        store = await opened(server.url(user_info=":r1ght%2F%40pa55@"))
        await store.remember(b"first", b"second")
        found = await store.successor(b"first")
        await store.close()
        shut_out = await opened(server.url(user_info=f":{wrong}@"))
        _, failure = await timed_failure(shut_out)
        await shut_out.close()

    shown = capsys.readouterr()
    assert [found, str(failure)] == [b"second", "AuthenticationError"]
    assert not any(secret in shown.out + shown.err for secret in (right, wrong, "r1ght"))


async def test_keys_carry_the_prefix_and_the_age(redis: RedisServer) -> None:
    from redis import Redis

    store = await opened(redis.url())
    await store.remember(b"first\xff", b"second")

    with Redis(port=redis.port) as client:
        keys = client.keys()
        left_s = client.ttl(keys[0])
        client.expire(keys[0], 60)
        await store.successor(b"first\xff")
        renewed_s = client.ttl(keys[0])

    assert keys == [KEY_PREFIX + b"first\xff"]
    assert [day * 86_400 - 60 < seconds <= day * 86_400 for seconds in (left_s, renewed_s) for day in (90,)] == [
        True
    ] * 2
    await store.close()
