"""The SQLite file itself, and what may be wrong with it.

Law: everything here blocks, and runs on the one thread that opened the file.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from sidecar.sessions.store.base import LONGEST_S, MOST_LINEAGES, StoreUnavailable, Unusable

# One step for each version of the schema, in their order; PRAGMA user_version counts those that were taken.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE lineage (session_id BLOB PRIMARY KEY, successor BLOB NOT NULL, used_at INTEGER NOT NULL)"
        " WITHOUT ROWID",
    ),
)
APPLICATION_ID = 0x48534C4E  # "HSLN": tells our file from another program's, whatever its name

RENEW_AFTER_S = 86_400  # a use is noted once a day, so that finding an entry costs no write
LOOK_EVERY = 1_000  # writes between two counts of the entries
BUSY_S = 0.2  # another worker's transaction takes a millisecond; longer than this is over the caller's limit anyway
ALONE_WITHIN_S = 2.0
WAL_KEPT_BYTES = 4 << 20

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class _Damaged(Exception):
    """The file is no database, or one with broken pages."""


class LineageFile:
    """Entries in a file that is ours, in WAL mode, of the schema that we know."""

    def __init__(
        self,
        path: Path,
        *,
        most: int = MOST_LINEAGES,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._most = most
        self._longest_s = longest_s
        self._clock = clock
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._damaged: tuple[int, int] | None = None  # the file in which a call met damage
        self._room = 0  # writes that are left until the entries are counted again

    # --- Reading and writing ------------------------------------------------------------------------------------------

    def read(self, session_ids: Iterable[bytes]) -> tuple[list[bytes | None], list[bytes]]:
        """The successors in the order of `session_ids`, and those ids whose use should be noted with `renew`."""
        now = int(self._clock())
        found: list[bytes | None] = []
        long_unused = []
        with self._asked() as db:
            for session_id in session_ids:
                row = db.execute(
                    "SELECT successor, used_at FROM lineage WHERE session_id = ?", (session_id,)
                ).fetchone()
                is_there = row is not None and row[1] > now - self._longest_s
                found.append(row[0] if is_there else None)
                if is_there and row[1] <= now - RENEW_AFTER_S:
                    long_unused.append(session_id)
        return found, long_unused

    def write(self, successors: Mapping[bytes, bytes]) -> None:
        """All of them in one transaction, so that many cost little more than one."""
        now = int(self._clock())
        rows = [(session_id, successor, now) for session_id, successor in successors.items()]
        with self._asked() as db, _transaction(db):
            db.executemany(
                "INSERT INTO lineage VALUES (?, ?, ?) ON CONFLICT (session_id)"
                " DO UPDATE SET successor = excluded.successor, used_at = excluded.used_at",
                rows,
            )
            self._room -= len(rows)
            if self._room < 0:
                self._let_go(db, now)

    def renew(self, session_ids: Sequence[bytes]) -> None:
        """Notes that these were used. Nobody waits for it, and if it fails, the next use does it."""
        now = int(self._clock())
        with suppress(StoreUnavailable), self._asked() as db, _transaction(db):
            db.executemany("UPDATE lineage SET used_at = ? WHERE session_id = ?", [(now, key) for key in session_ids])

    def size(self) -> int:
        with self._asked() as db:
            return _count(db)

    def close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):  # it may be what was wrong
                self._db.close()
        self._db = None

    def _let_go(self, db: sqlite3.Connection, now: int) -> None:
        """Deletes what is too old, or too many. It reads the whole file, hence only now and then."""
        db.execute("DELETE FROM lineage WHERE used_at <= ?", (now - self._longest_s,))
        count = _count(db)
        if self._most - count < self._most // 200:
            # More than needed, and before it is quite full: a full store would come here at every write.
            spare = count - self._most + self._most // 100
            db.execute(
                "DELETE FROM lineage WHERE session_id IN (SELECT session_id FROM lineage ORDER BY used_at LIMIT ?)",
                (spare,),
            )
            count -= spare
        self._room = min(LOOK_EVERY, self._most - count)

    @contextmanager
    def _asked(self) -> Iterator[sqlite3.Connection]:
        """The connection, and every error inside as StoreUnavailable. After damage, or if somebody has removed the
        file, the next call opens it anew."""
        if self._db is None or self._identity != _identity(self._path):
            try:
                self.open()
            except Unusable as exc:
                raise StoreUnavailable(str(exc)) from exc
        assert self._db is not None
        try:
            yield self._db
        except sqlite3.Error as exc:
            if _is_damage(exc):
                self._damaged = self._identity
                self.close()
            raise StoreUnavailable(_name(exc)) from exc

    # --- Opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Opens the file, makes it if need be, and moves a damaged one aside. Raises Unusable."""
        self.close()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One worker at a time: two that find damage must not move each other's new file aside.
            with _alone(self._path.with_name(f"{self._path.name}.opening")):
                if self._damaged is not None and self._damaged == _identity(self._path):
                    self._move_aside("damage met in use")
                try:
                    self._db = self._connect()
                except _Damaged as exc:
                    self._move_aside(str(exc))
                    self._db = self._connect()
                self._identity = _identity(self._path)
        except sqlite3.Error as exc:
            raise Unusable(f"{self._path}: {_name(exc)}") from exc
        except OSError as exc:
            raise Unusable(f"{self._path}: {exc.strerror or type(exc).__name__}") from exc
        self._room = 0

    def _connect(self) -> sqlite3.Connection:
        """The open file, whole and ours. Raises _Damaged, Unusable, and what SQLite and the system raise."""
        self._make()
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            self._check_owner(db)
            self._tighten()
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise Unusable(f"{self._path}: its file system cannot do write-ahead logging (WAL)")
            # NORMAL: a crash of the process loses nothing, a loss of power perhaps the last entries, never the file.
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise _Damaged("quick_check found damage")
            _migrate(db)
        except BaseException as exc:
            db.close()
            if isinstance(exc, sqlite3.Error) and _is_damage(exc):
                raise _Damaged(_name(exc)) from exc
            raise
        return db

    def _make(self) -> None:
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            return  # not opened: closing a descriptor of it would drop the locks that this process has on it (POSIX)
        # What a removed file has left behind would be played into the new one.
        for path in _beside(self._path):
            path.unlink(missing_ok=True)

    def _tighten(self) -> None:
        for path in (self._path, *_beside(self._path)):
            with suppress(FileNotFoundError):
                if path.stat().st_mode & 0o077:
                    path.chmod(0o600)

    def _check_owner(self, db: sqlite3.Connection) -> None:
        """Raises Unusable for a file that holds something else, or comes from a newer version. It is not touched."""
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION_ID and (tables or version or application):
            raise Unusable(f"{self._path}: it is the database of another program")
        if version > len(MIGRATIONS):
            raise Unusable(f"{self._path}: a newer version of the sidecar wrote it (schema {version})")

    def _move_aside(self, why: str) -> None:
        """One damaged file is kept for whoever wants to look, not one for each time."""
        aside = self._path.with_name(f"{self._path.name}.damaged")
        for kept, gone in zip((self._path, *_beside(self._path)), (aside, *_beside(aside)), strict=True):
            with suppress(FileNotFoundError):
                kept.replace(gone)
        structlog.get_logger().warning("store_moved_aside", kind="sqlite", reason=why, path=str(aside))


def _migrate(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    for number, steps in enumerate(MIGRATIONS[version:], start=version + 1):
        with _transaction(db):
            for step in steps:
                db.execute(step)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite has rolled back by itself after some errors, such as a full disk
            db.execute("ROLLBACK")
        raise


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else who asks for it is in here. The kernel frees the lock of a process that dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + ALONE_WITHIN_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _count(db: sqlite3.Connection) -> int:
    (count,) = db.execute("SELECT count(*) FROM lineage").fetchone()
    return int(count)


def _is_damage(exc: sqlite3.Error) -> bool:
    # The first byte of the code is the kind of error, the rest its particulars.
    return getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGED


def _name(exc: sqlite3.Error) -> str:
    return getattr(exc, "sqlite_errorname", None) or type(exc).__name__
