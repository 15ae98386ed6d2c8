"""The last minutes of a few figures, as a ring of samples of the metrics' cells. Prometheus remembers longer.

Law: nothing is added to the data path; whatever happened between two samples is told by how far the cells have moved.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from sidecar.telemetry.metrics import Metrics

EVERY_S = 5.0
SAMPLES = 120
"""Ten minutes."""


class Sample(NamedTuple):
    running_streams: int
    ended_streams: int
    """Since the start, as the two below."""
    first_tokens: int
    first_tokens_s: float


class Window(NamedTuple):
    """One value for each interval between two samples, the oldest first."""

    streams: list[int]
    """How many streams were there at any time in the interval."""
    first_token_s: list[float | None]
    """The mean time to the first token; None where no stream had one."""
    mean_first_token_s: float | None
    """The mean over the whole window."""
    running_streams: int
    """Now."""


class Figures:
    """Takes a sample every few seconds, from `start` to `stop`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque([self._now()], maxlen=SAMPLES)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._take)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def window(self) -> Window:
        """The samples, and what has happened since the latest one."""
        self._metrics.before_scrape()
        samples = [*self._samples, self._now()]
        streams: list[int] = []
        means: list[float | None] = []
        for before, after in pairwise(samples):
            streams.append(after.running_streams + after.ended_streams - before.ended_streams)
            means.append(_mean_between(before, after))
        return Window(streams, means, _mean_between(samples[0], samples[-1]), samples[-1].running_streams)

    def _take(self) -> None:
        self._samples.append(self._now())
        self.start()

    def _now(self) -> Sample:
        metrics = self._metrics
        first_token, stream_ends = metrics.cells.first_token, metrics.cells.stream_ends
        return Sample(metrics.activity().streams, sum(stream_ends.values()), sum(first_token.counts), first_token.total)


def _mean_between(before: Sample, after: Sample) -> float | None:
    count = after.first_tokens - before.first_tokens
    return (after.first_tokens_s - before.first_tokens_s) / count if count else None
