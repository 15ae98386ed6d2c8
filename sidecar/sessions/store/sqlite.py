"""Lineages in a SQLite file, asked on a thread of its own: the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sidecar.sessions.store.base import LONGEST_S, MOST_LINEAGES, Unusable
from sidecar.sessions.store.sqlite_file import LineageFile

T = TypeVar("T")


class SqliteLineage:
    """A medium. It survives the end of the process, kill -9 included; workers of one machine may share it."""

    kind = "sqlite"

    def __init__(
        self,
        path: Path | None,
        *,
        is_shared: bool = False,
        most: int = MOST_LINEAGES,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.is_shared = is_shared
        self._file = None if path is None else LineageFile(path, most=most, longest_s=longest_s, clock=clock)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lineage-sqlite")

    async def open(self) -> None:
        if self._file is None:
            raise Unusable("there is no state directory: neither STATE_DIRECTORY nor XDG_STATE_HOME nor HOME is set")
        await self._on_thread(self._file.open)

    async def read(self, session_ids: Sequence[bytes]) -> Sequence[bytes | None]:
        file = self._opened
        found, long_unused = await self._on_thread(lambda: file.read(session_ids))
        if long_unused:
            self._thread.submit(file.renew, long_unused)  # nobody waits for it
        return found

    async def write(self, successors: Mapping[bytes, bytes]) -> None:
        file = self._opened
        await self._on_thread(lambda: file.write(successors))

    async def size(self) -> int:
        return await self._on_thread(self._opened.size)

    async def close(self) -> None:
        try:
            if self._file is not None:
                await self._on_thread(self._file.close)
        finally:
            self._thread.shutdown(wait=False)

    @property
    def _opened(self) -> LineageFile:
        assert self._file is not None, "open() said that it is unusable"
        return self._file

    async def _on_thread(self, doing: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, doing)
