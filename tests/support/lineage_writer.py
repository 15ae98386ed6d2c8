"""A process that writes lineages into a SQLite file, and says of each when it is written: for tests that kill it.

python -m tests.support.lineage_writer FILE NAME COUNT    writes NAME-0 … and prints each number
python -m tests.support.lineage_writer FILE fill          writes until the disk is full, reads, makes room, goes on
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sidecar.sessions.store.base import StoreUnavailable
from sidecar.sessions.store.rounds import RoundsStore
from sidecar.sessions.store.sqlite import SqliteLineage

PATIENT_S = 5.0


async def write(path: Path, name: str, count: int) -> None:
    store = RoundsStore(SqliteLineage(path, is_shared=True), limit_s=PATIENT_S)
    await store.open()
    print("open", flush=True)
    for number in range(count):
        await store.remember(*entry(name, number))
        print(number, flush=True)
    await store.close()


async def fill(path: Path) -> None:
    """What happens is printed, a fact a line; the test compares them."""
    ballast = path.parent / "ballast"
    ballast.parent.mkdir(exist_ok=True)
    ballast.write_bytes(b"\0" * 150_000)
    store = RoundsStore(SqliteLineage(path), limit_s=PATIENT_S, clock=iter(range(0, 10**9, 60)).__next__)
    await store.open()
    written = 0
    try:
        while True:
            await store.remember(*entry("fill", written))
            written += 1
    except StoreUnavailable as exc:
        print("writing:", exc)
    print("written some:", written > 100)
    found = [await store.successor(entry("fill", number)[0]) for number in range(written)]
    print("all read:", found == [entry("fill", number)[1] for number in range(written)])
    ballast.unlink()
    await store.remember(*entry("fill", written))
    print("after room was made:", await store.successor(entry("fill", written)[0]) == entry("fill", written)[1])
    await store.close()


def entry(name: str, number: int) -> tuple[bytes, bytes]:
    return b"%s-%d" % (name.encode(), number), b"%s-tip-%d" % (name.encode(), number)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    asyncio.run(fill(where) if sys.argv[2] == "fill" else write(where, sys.argv[2], int(sys.argv[3])))
