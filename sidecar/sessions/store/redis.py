"""Lineages in Redis or Valkey, shared by any number of sidecars on any number of machines.

One connection, one round trip at a time: with all that waits in one, more would not be faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, ResponseError

from sidecar.sessions.store.base import LIMIT_S, LONGEST_S, StoreUnavailable

KEY_PREFIX = b"hermes-sidecar:lineage:"


class RedisLineage:
    """A medium. Redis itself lets go of old entries; their number has no bound but that age."""

    kind = "redis"
    is_shared = True

    def __init__(self, url: str, *, longest_s: float = LONGEST_S) -> None:
        self._longest_ms = int(longest_s * 1000)
        self._redis: Redis = Redis.from_url(
            url,
            protocol=2,  # the older one, which every Redis and Valkey speaks
            socket_connect_timeout=LIMIT_S,
            socket_timeout=LIMIT_S,
            # Once more, at once: the connection may have gone stale while nobody spoke.
            retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
        )

    async def open(self) -> None:
        """Looks whether it is there, for the log. A Redis that is not may come back at any time, so it stays in use."""
        try:
            await self._pipeline([("PING",)])
        except StoreUnavailable as exc:
            structlog.get_logger().warning(
                "store_unavailable",
                kind=self.kind,
                doing="opening",
                reason=str(exc),
                instead="memory, until it is back",
            )

    async def read(self, session_ids: Sequence[bytes]) -> Sequence[bytes | None]:
        keys = [KEY_PREFIX + session_id for session_id in session_ids]
        answers = await self._pipeline([("GETEX", key, "PX", self._longest_ms) for key in keys])
        if any(isinstance(answer, ResponseError) for answer in answers):
            # It takes no writes now (its disk is full, or it is a replica), and GETEX renews. It can still be read.
            answers = await self._pipeline([("GET", key) for key in keys])
        _raise_first(answers)
        return answers

    async def write(self, successors: Mapping[bytes, bytes]) -> None:
        _raise_first(
            await self._pipeline(
                [
                    ("SET", KEY_PREFIX + session_id, successor, "PX", self._longest_ms)
                    for session_id, successor in successors.items()
                ]
            )
        )

    async def size(self) -> int:
        """The keys of the whole database. Counting only ours would mean to walk through all of them."""
        answers = await self._pipeline([("DBSIZE",)])
        _raise_first(answers)
        return int(answers[0])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to all `commands`, in one round trip; those that Redis refused as ResponseError."""
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as exc:
            # Only the kind of error: its text names the address.
            raise StoreUnavailable(type(exc).__name__) from exc


def _raise_first(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, RedisError):
            raise StoreUnavailable(type(answer).__name__) from answer
