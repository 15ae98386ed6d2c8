"""The metrics of several workers as one: whoever is scraped asks the others, over sockets only this user may open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_ANSWER_S = 1.0
"""How long a scrape waits for a worker; one that is just being replaced is left out."""
_NOT_SUMMED = (
    "hermes_sidecar_capability",
    "hermes_sidecar_status",
    "hermes_sidecar_build_info",
    "process_start_time_seconds",
    "process_max_fds",
)
"""What makes no sense as a sum: the scraped worker's word holds, which for the backend behind all is everybody's."""

Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""Name, help, type and samples (name, labels, value) of a metric."""


class Peers:
    """The sockets of all workers in one directory."""

    def __init__(self, directory: Path, number: int) -> None:
        """`number` is this worker's."""
        self._directory = directory
        self._own = directory / f"{number}.sock"
        self._server: asyncio.Server | None = None

    async def open(self, registry: CollectorRegistry, before_scrape: Callable[[], None] = lambda: None) -> None:
        """Answers the other workers from now on. `before_scrape` brings the figures up to date."""

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            before_scrape()
            with suppress(OSError):
                writer.write(json.dumps(families_of(registry)).encode())
                await writer.drain()
            writer.close()

        with suppress(FileNotFoundError):
            self._own.unlink()  # the worker that this one replaces left it
        self._server = await asyncio.start_unix_server(tell, self._own)

    async def exposition(self, registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
        """The text for a scraper with all workers added up, and its Content-Type."""
        paths = [path for path in sorted(self._directory.glob("*.sock")) if path != self._own]
        others = await asyncio.gather(*(_ask(path) for path in paths))
        together = CollectorRegistry(auto_describe=False)
        together.register(_Sum([families_of(registry), *(families for families in others if families)]))
        encoder, content_type = choose_encoder(accept)
        return encoder(together), content_type

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


async def _ask(path: Path) -> list[Family]:
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                answer: list[Family] = json.loads(await reader.read())
            finally:
                writer.close()
            return answer
    except (OSError, TimeoutError, ValueError):
        return []


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Everything that a registry holds, as plain values."""
    return [
        (
            family.name,
            family.documentation,
            family.type,
            [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in registry.collect()
    ]


class _Sum(Collector):
    def __init__(self, workers: list[list[Family]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        return iter(added_up(self._workers))


def added_up(workers: Iterable[Iterable[Family]]) -> list[Metric]:
    """The workers' families as one: samples of equal name and labels are summed."""
    families: dict[str, tuple[str, str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for worker in workers:
        for name, text, kind, samples in worker:
            cells = families.setdefault(name, (text, kind, {}))[2]
            for sample_name, labels, value in samples:
                key = (sample_name, tuple(labels.items()))
                if key not in cells:
                    cells[key] = value
                elif name not in _NOT_SUMMED:
                    cells[key] += value
    together: list[Metric] = []
    for name, (text, kind, cells) in families.items():
        metric: Any = Metric(name, text, kind)
        for (sample_name, pairs), value in cells.items():
            metric.add_sample(sample_name, dict(pairs), value)
        together.append(metric)
    return together
