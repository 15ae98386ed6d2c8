"""Where lineage is kept."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.sessions.store.base import Store
from sidecar.sessions.store.memory import MemoryLineage


def open_store(url: str, *, workers: int, environ: Mapping[str, str]) -> Store:
    """The store that `url` names."""
    return MemoryLineage()
