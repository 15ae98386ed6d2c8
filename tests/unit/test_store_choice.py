"""Which store a `store.url` means, and where its file lies."""

from __future__ import annotations

import builtins
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sidecar.sessions.store import MemoryLineage, open_store, sqlite_path
from sidecar.sessions.store.rounds import RoundsStore


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        pytest.param({"STATE_DIRECTORY": "/var/lib/hs", "HOME": "/h"}, "/var/lib/hs/lineage.sqlite3", id="systemd"),
        pytest.param({"STATE_DIRECTORY": "/a:/b"}, "/a/lineage.sqlite3", id="systemd-several"),
        pytest.param({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/hermes-sidecar/lineage.sqlite3", id="xdg-beats-home"),
        pytest.param(
            {"XDG_STATE_HOME": "x", "HOME": "/h"},
            "/h/.local/state/hermes-sidecar/lineage.sqlite3",
            id="relative-xdg-is-none",
        ),
        pytest.param(
            {"STATE_DIRECTORY": "", "XDG_STATE_HOME": "", "HOME": "/h"},
            "/h/.local/state/hermes-sidecar/lineage.sqlite3",
            id="empty-is-not-set",
        ),
        pytest.param({}, None, id="nothing-says-where"),
    ],
)
def test_state_directory_is_found_in_its_order(environ: Mapping[str, str], path: str | None) -> None:
    assert sqlite_path("sqlite", environ) == (None if path is None else Path(path))


@pytest.mark.parametrize("url", ["sqlite:///var/x.db", "sqlite:////var/x.db"])
def test_path_in_the_url_beats_the_state_directory(url: str) -> None:
    assert sqlite_path(url, {"STATE_DIRECTORY": "/a"}) == Path("/var/x.db")


@pytest.mark.parametrize(
    ("url", "workers", "is_shared"),
    [
        pytest.param("memory", 4, False, id="memory"),
        pytest.param("sqlite", 1, False, id="sqlite-of-one-worker"),
        pytest.param("sqlite", 2, True, id="sqlite-of-two-workers"),
        pytest.param("redis://127.0.0.1:1/0", 1, True, id="redis"),
    ],
)
async def test_store_says_whether_others_write_to_it(url: str, workers: int, is_shared: bool, tmp_path: Path) -> None:
    store = open_store(url, workers=workers, environ={"STATE_DIRECTORY": str(tmp_path)})

    assert store.is_shared is is_shared
    await store.close()


async def test_embedded_default_keeps_its_file_for_its_owner_alone(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        store = open_store("sqlite", workers=1, environ={"HOME": str(tmp_path)})
        await store.open()
        await store.remember(b"first", b"second")
    finally:
        os.umask(old_mask)

    directory = tmp_path / ".local" / "state" / "hermes-sidecar"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert modes == {f"lineage.sqlite3{end}": 0o600 for end in ("", "-wal", "-shm", ".opening")}
    await store.close()


async def test_without_any_state_directory_memory_serves_and_the_log_says_so() -> None:
    store = open_store("sqlite", workers=2, environ={})

    with capture_logs() as logged:
        await store.open()
    await store.remember(b"first", b"second")

    assert [await store.successor(b"first"), store.is_shared] == [b"second", False]
    assert [(line["event"], line["kind"]) for line in logged] == [("store_unusable", "sqlite")]
    assert "HOME" in logged[0]["reason"]
    await store.close()


def test_missing_redis_client_leaves_memory_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def no_redis(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "redis":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return true_import(name, *arguments)

    monkeypatch.delitem(sys.modules, "sidecar.sessions.store.redis", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_redis)

    with capture_logs() as logged:
        store = open_store("redis://h:1/0", workers=1, environ={})

    assert isinstance(store, MemoryLineage)
    assert [(line["event"], "hermes-sidecar[redis]" in line["reason"]) for line in logged] == [("store_unusable", True)]


async def test_redis_that_is_away_stays_in_use(unused_tcp_port: int) -> None:
    secret = "pa55word"
    store = open_store(f"redis://:{secret}@127.0.0.1:{unused_tcp_port}/0", workers=1, environ={})

    with capture_logs() as logged:
        await store.open()

    assert isinstance(store, RoundsStore)
    assert store.is_shared
    assert [(line["event"], line["kind"]) for line in logged] == [("store_unavailable", "redis")]
    assert secret not in repr(logged)
    await store.close()
