"""Where lineages are kept: in memory, in a SQLite file, or in Redis. `base` holds what all of them promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog

from sidecar.sessions.store.base import Store, StoreUnavailable
from sidecar.sessions.store.memory import MemoryLineage
from sidecar.sessions.store.rounds import RoundsStore
from sidecar.sessions.store.sqlite import SqliteLineage

__all__ = ["MemoryLineage", "Store", "StoreUnavailable", "open_store", "sqlite_path"]

FILE_NAME = "lineage.sqlite3"


def open_store(url: str, *, workers: int, environ: Mapping[str, str]) -> Store:
    """The store that `store.url` asks for, still to be opened. `workers`: the processes that share it.

    `environ` says where the state directory is.
    """
    if url.startswith("redis://"):
        try:
            from sidecar.sessions.store.redis import RedisLineage
        except ImportError:
            structlog.get_logger().warning(
                "store_unusable",
                kind="redis",
                reason='the Redis client is not installed; install "hermes-sidecar[redis]"',
                instead="memory, until the next start",
            )
            return MemoryLineage()
        return RoundsStore(RedisLineage(url))
    if url == "memory":
        return MemoryLineage()
    return RoundsStore(SqliteLineage(sqlite_path(url, environ), is_shared=workers > 1))


def sqlite_path(url: str, environ: Mapping[str, str]) -> Path | None:
    """The file that `url` means. None: the state directory is asked for, and nothing says where that is.

    Sources: systemd.exec(5), StateDirectory=; the XDG base directory specification, by which relative paths count as
    not set.
    """
    if url.startswith("sqlite:///"):
        return Path("/" + url.removeprefix("sqlite:///").lstrip("/"))
    for directory, below in (
        (environ.get("STATE_DIRECTORY", "").partition(":")[0], ""),
        (environ.get("XDG_STATE_HOME", ""), "hermes-sidecar"),
        (environ.get("HOME", ""), ".local/state/hermes-sidecar"),
    ):
        if directory.startswith("/"):
            return Path(directory, below, FILE_NAME)
    return None
