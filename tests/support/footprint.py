"""What the sidecar holds in this process: sockets, tasks, and objects of the data path that are still alive."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sidecar.relay.downstream import Downstream
from sidecar.relay.handler import Exchange
from sidecar.relay.tunnel import Tunnel
from sidecar.relay.upstream import Upstream

_LIVING = (Downstream, Exchange, Tunnel, Upstream)
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True)
class Footprint:
    """A moment's count. An object that a forgotten timer still holds counts as alive."""

    sockets: int
    tasks: int
    living: dict[str, int]

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        living = Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, _LIVING))
        return cls(_sockets(), len(asyncio.all_tasks()), dict(living))


def _sockets() -> int:
    """Open sockets only: an event loop opens files of its own when it first listens."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            count += str(link.readlink()).startswith("socket:")
    return count


async def settled(is_so: Callable[[], bool], *, limit_s: float = 5.0) -> bool:
    """Whether `is_so` comes true within the limit: for what no event tells, such as the sockets of a process."""
    try:
        async with asyncio.timeout(limit_s):
            while not is_so():
                await asyncio.sleep(_LOOK_AGAIN_S)
    except TimeoutError:
        return False
    return True
