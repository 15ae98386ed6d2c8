"""What every test runs on: the event loop of production."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop for all async tests: its transports differ from asyncio's in when they report a lost connection."""
    return {"uvloop": uvloop.new_event_loop}
