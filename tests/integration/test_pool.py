"""Which of many kept connections a request gets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from sidecar.relay.connecting import Factory
from sidecar.relay.pool import Pool
from sidecar.relay.upstream import Upstream


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    """A pool that opens connections to nobody in particular, and has seen that they answer again."""
    far: list[socket.socket] = []

    async def connect(factory: Factory) -> Upstream:
        near, other = socket.socketpair()
        far.append(other)
        _, upstream = await asyncio.get_running_loop().create_connection(factory, sock=near)
        return upstream

    made = Pool("http://gateway", connect, connect_timeout_s=2.0, keeps_spares=False)
    made.answers_again()
    yield made
    await made.close()
    for sock in far:
        sock.close()


async def test_full_pool_lets_its_oldest_connection_go_and_keeps_the_one_that_just_answered(pool: Pool) -> None:
    kept = [await pool.connect() for _ in range(257)]

    for upstream in kept:
        pool.give_back(upstream)

    assert pool.take(is_safe=False) is kept[-1]
    assert [upstream.is_open for upstream in kept] == [False] + [True] * 256
