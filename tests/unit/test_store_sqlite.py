"""The SQLite file: its schema, its bounds, and whatever may be wrong with it or its directory."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sidecar.sessions.store import sqlite_file
from sidecar.sessions.store.base import StoreUnavailable, Unusable
from sidecar.sessions.store.rounds import RoundsStore
from sidecar.sessions.store.sqlite import SqliteLineage
from sidecar.sessions.store.sqlite_file import MIGRATIONS, RENEW_AFTER_S, LineageFile
from tests.unit.test_store_breaker import Clock

DAY_S = 86_400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "lineage.sqlite3"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(path: Path, clock: Clock) -> Iterator[LineageFile]:
    opened = LineageFile(path, clock=clock)
    opened.open()
    yield opened
    opened.close()


def found(file: LineageFile, *session_ids: bytes) -> list[bytes | None]:
    return file.read(session_ids)[0]


def pragma(path: Path, name: str) -> object:
    db = sqlite3.connect(path)
    try:
        return db.execute(f"PRAGMA {name}").fetchone()[0]
    finally:
        db.close()


def unusable(path: Path) -> str:
    """Why that file cannot be opened."""
    with pytest.raises(Unusable) as caught:
        LineageFile(path).open()
    return str(caught.value)


# --- The schema ------------------------------------------------------------------------------------------------------


def test_file_is_in_wal_mode_and_carries_its_version(file: LineageFile, path: Path) -> None:
    assert pragma(path, "journal_mode") == "wal"
    assert pragma(path, "user_version") == len(MIGRATIONS)


def test_file_of_an_older_version_is_brought_up_to_date_with_its_entries(
    file: LineageFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write({b"first": b"second"})
    file.close()
    steps = (*MIGRATIONS, ("ALTER TABLE lineage ADD COLUMN more TEXT", "CREATE TABLE extra (x)"))
    monkeypatch.setattr(sqlite_file, "MIGRATIONS", steps)

    file.open()

    assert found(file, b"first") == [b"second"]
    assert pragma(path, "user_version") == len(steps)
    assert pragma(path, "table_info(extra)") == 0


def test_migration_that_fails_leaves_the_file_as_it_was(
    file: LineageFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write({b"first": b"second"})
    file.close()
    monkeypatch.setattr(
        sqlite_file, "MIGRATIONS", (*MIGRATIONS, ("CREATE TABLE extra (x)", "CREATE TABLE lineage (x)"))
    )

    reason = unusable(path)
    monkeypatch.setattr(sqlite_file, "MIGRATIONS", MIGRATIONS)
    file.open()

    assert reason == f"{path}: SQLITE_ERROR"
    assert found(file, b"first") == [b"second"]
    assert pragma(path, "user_version") == len(MIGRATIONS)


async def test_file_of_a_newer_version_is_left_alone_and_memory_serves(file: LineageFile, path: Path) -> None:
    file.close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    before = path.read_bytes()
    store = RoundsStore(SqliteLineage(path))

    with capture_logs() as logged:
        await store.open()
    await store.remember(b"first", b"second")

    assert await store.successor(b"first") == b"second"
    assert ["newer version" in line["reason"] for line in logged] == [True]
    assert path.read_bytes() == before
    await store.close()


def test_database_of_another_program_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE bookmarks (url TEXT)")
    db.close()
    path.chmod(0o644)
    before = path.read_bytes()

    assert unusable(path) == f"{path}: it is the database of another program"
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_file_system_without_wal_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_connect = sqlite3.connect

    def without_shared_memory(target: Path, timeout: float, isolation_level: None) -> sqlite3.Connection:
        # This one of SQLite's own ways to lock has no shared memory, as network file systems have none.
        return true_connect(f"file:{target}?vfs=unix-dotfile", timeout=timeout, isolation_level=None, uri=True)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)

    assert unusable(path) == f"{path}: its file system cannot do write-ahead logging (WAL)"


# --- Bounds ----------------------------------------------------------------------------------------------------------


def test_longest_unused_entries_go_when_there_are_too_many(path: Path, clock: Clock) -> None:
    file = LineageFile(path, most=10, clock=clock)
    file.open()
    for number in range(10):
        clock.now += 1
        file.write({b"%d" % number: b"tip"})
    clock.now += RENEW_AFTER_S
    file.renew(file.read([b"0"])[1])

    clock.now += 1
    file.write({b"10": b"tip", b"11": b"tip"})

    there = [session_id for session_id in (b"%d" % number for number in range(12)) if found(file, session_id)[0]]
    assert there == [b"%d" % number for number in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11)]
    assert file.size() == 10
    file.close()


def test_never_more_than_the_bound_and_not_much_less(path: Path) -> None:
    file = LineageFile(path, most=2_000)
    file.open()
    sizes = []
    for number in range(60):
        file.write({b"%d-%d" % (number, part): b"tip" for part in range(100)})
        sizes.append(file.size())
    file.close()

    assert max(sizes) <= 2_000
    assert min(sizes[20:]) >= 1_800


def test_full_store_does_not_count_at_every_write(path: Path) -> None:
    """Counting reads the whole file: 30 ms at the bound, where a write takes a tenth of one."""
    file = LineageFile(path, most=20_000)
    file.open()
    file.write({b"%d" % number: b"tip" for number in range(20_000)})
    assert file._db is not None
    asked: list[str] = []
    file._db.set_trace_callback(asked.append)

    for number in range(1_000):
        file.write({b"%d" % (19_999 - number): b"other"})

    assert sum("count(*)" in statement for statement in asked) <= 10
    file.close()


def test_use_is_noted_once_a_day_and_keeps_an_entry(file: LineageFile, clock: Clock) -> None:
    file.write({b"used": b"tip", b"unused": b"tip"})

    for _ in range(100):
        clock.now += DAY_S
        long_unused = file.read([b"used"])[1]
        assert long_unused == [b"used"]
        file.renew(long_unused)
        assert file.read([b"used"])[1] == []

    assert found(file, b"used", b"unused") == [b"tip", None]


def test_old_entries_leave_the_file_at_the_first_write_after_a_start(file: LineageFile, clock: Clock) -> None:
    file.write({b"old": b"tip"})
    clock.now += 91 * DAY_S
    file.open()

    file.write({b"new": b"tip"})

    assert [file.size(), *found(file, b"old", b"new")] == [1, None, b"tip"]


async def test_store_notes_the_use_of_what_it_finds(path: Path, clock: Clock) -> None:
    store = RoundsStore(SqliteLineage(path, clock=clock), limit_s=5.0)
    await store.open()
    await store.remember(b"first", b"second")
    clock.now += 89 * DAY_S
    await store.successor(b"first")

    clock.now += 89 * DAY_S
    seen = await store.successor(b"first")

    assert seen == b"second"
    await store.close()


# --- A file that is damaged, removed or blocked ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"this is no database" * 1000, id="text"),
        pytest.param(b"\x00" * 8192, id="zeros"),
        pytest.param(b"SQLite format 3\x00" + b"\xff" * 8176, id="broken-header"),
    ],
)
def test_file_that_is_no_database_is_moved_aside(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    file = LineageFile(path)

    with capture_logs() as logged:
        file.open()
    file.write({b"first": b"second"})

    aside = path.with_name("lineage.sqlite3.damaged")
    assert found(file, b"first") == [b"second"]
    assert aside.read_bytes() == content
    assert [(line["event"], line["path"]) for line in logged] == [("store_moved_aside", str(aside))]
    file.close()


def test_broken_pages_are_found_at_the_start_and_the_file_moved_aside(file: LineageFile, path: Path) -> None:
    file.write({b"%d" % number: b"tip" for number in range(5_000)})
    file.close()
    overwrite(path, start=4096 * 2)

    file.open()

    assert file.size() == 0
    assert path.with_name("lineage.sqlite3.damaged").exists()


def test_damage_met_in_use_is_unavailability_once_and_then_a_new_file(file: LineageFile, path: Path) -> None:
    """More entries than SQLite keeps pages of in memory, so that it has to look at the disk again."""
    ids = [b"%d" % number for number in range(60_000)]
    file.write(dict.fromkeys(ids, b"x" * 36))
    file.close()
    file.open()
    overwrite(path, start=4096)

    with pytest.raises(StoreUnavailable) as caught:
        file.read(ids)
    after = found(file, ids[0])
    file.write({b"first": b"second"})

    assert str(caught.value) == "SQLITE_CORRUPT"
    assert after == [None]
    assert [file.size(), *found(file, b"first")] == [1, b"second"]


def test_second_damaged_file_takes_the_place_of_the_first(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"one" * 1000, b"two" * 1000):
        path.write_bytes(content)
        file = LineageFile(path)
        file.open()
        file.close()

    names = sorted(entry.name for entry in path.parent.iterdir())
    assert names == ["lineage.sqlite3", "lineage.sqlite3.damaged", "lineage.sqlite3.opening"]
    assert path.with_name("lineage.sqlite3.damaged").read_bytes() == b"two" * 1000


def test_file_removed_in_use_is_made_anew(file: LineageFile, path: Path) -> None:
    file.write({b"first": b"second"})
    path.unlink()

    file.write({b"third": b"fourth"})

    assert found(file, b"first", b"third") == [None, b"fourth"]
    assert pragma(path, "quick_check") == "ok"


def test_directory_removed_in_use_is_made_anew(file: LineageFile, path: Path) -> None:
    for entry in path.parent.iterdir():
        entry.unlink()
    path.parent.rmdir()

    file.write({b"first": b"second"})

    assert found(file, b"first") == [b"second"]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_file_that_others_could_read_is_closed_to_them(file: LineageFile, path: Path) -> None:
    file.close()
    path.chmod(0o666)

    file.open()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        pytest.param("file/state/x.sqlite3", "Not a directory", id="below-a-file"),
        pytest.param("directory", "SQLITE_CANTOPEN", id="a-directory"),
        pytest.param("n" * 300, "File name too long", id="name-too-long"),
    ],
)
def test_place_that_cannot_be_is_unusable_with_a_reason(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()

    assert unusable(tmp_path / place) == f"{tmp_path / place}: {reason}"


def test_writer_that_holds_the_file_blocks_writes_for_a_moment_and_reads_not_at_all(
    file: LineageFile, path: Path
) -> None:
    file.write({b"first": b"second"})
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreUnavailable) as caught:
        file.write({b"first": b"third"})
    meanwhile = found(file, b"first")
    other.execute("ROLLBACK")
    other.close()
    file.write({b"first": b"fourth"})

    assert str(caught.value) == "SQLITE_BUSY"
    assert [meanwhile, found(file, b"first")] == [[b"second"], [b"fourth"]]


def test_full_database_takes_no_writes_and_is_read_on(file: LineageFile, path: Path) -> None:
    file.write({b"first": b"second"})
    assert file._db is not None
    file._db.execute("PRAGMA max_page_count = 1")  # SQLite then answers as it does on a full disk

    with pytest.raises(StoreUnavailable) as caught:
        file.write({b"%d" % number: b"x" * 200 for number in range(1_000)})

    assert str(caught.value) == "SQLITE_FULL"
    assert [file.size(), *found(file, b"first", b"0")] == [1, b"second", None]


def overwrite(path: Path, *, start: int) -> None:
    """Noise from `start` to the end of the file."""
    with path.open("r+b") as raw:
        size = path.stat().st_size
        raw.seek(start)
        raw.write(b"\xa5" * (size - start))
