"""What every test runs on: the event loop of production, and the modules that are written now."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop

from sidecar import compiled


def pytest_configure() -> None:
    """Ends a run that would test something else than what it seems to."""
    if changed := compiled.stale():
        raise pytest.UsageError(
            f"sidecar/{changed[0]}.py is not what was compiled, and the compiled module would run in its place."
            " `make compiled` compiles it anew, `make pure` removes what is compiled."
        )
    form = "compiled" if compiled.modules() else "pure"
    if {"always": "compiled", "never": "pure"}.get(os.environ.get("SIDECAR_COMPILE", ""), form) != form:
        raise pytest.UsageError(f"SIDECAR_COMPILE asks for the other hot path: this one is {form}. Run `make test`.")


def pytest_report_header() -> str:
    return f"hot path: {'compiled' if compiled.modules() else 'pure Python'}"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop for all async tests: its transports differ from asyncio's in when they report a lost connection."""
    return {"uvloop": uvloop.new_event_loop}
