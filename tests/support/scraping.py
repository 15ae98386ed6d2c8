"""A scrape of the sidecar's metrics, as Prometheus would do it."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.support.raw_client import ask

PREFIX = "hermes_sidecar_"
Series = tuple[str, tuple[tuple[str, str], ...]]
"""A series' name without the common prefix, and its labels in order."""


@dataclass(frozen=True)
class Scrape:
    """What one scrape showed."""

    samples: dict[Series, float]

    def value(self, metric: str, /, **labels: str) -> float:
        """One sample; 0 where there is no such series."""
        return self.samples.get((metric, tuple(sorted(labels.items()))), 0.0)

    def by(self, label: str, metric: str, /) -> dict[str, float]:
        """The sums of a metric's samples by one label; those that are 0 left out."""
        sums: dict[str, float] = {}
        for (name, labels), value in self.samples.items():
            if name == metric and value:
                key = dict(labels)[label]
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def total(self, metric: str, /) -> float:
        return sum(value for (name, _), value in self.samples.items() if name == metric)

    @property
    def words(self) -> set[str]:
        """Every label value there is."""
        return {value for _, labels in self.samples for _, value in labels}


async def scrape(url: str) -> Scrape:
    """The sidecar's own metrics; those of its process are left out."""
    answer = await ask(url, "GET", "/metrics")
    assert answer.status == 200, answer.body
    return scrape_of(answer.body.decode())


def scrape_of(text: str) -> Scrape:
    samples: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                series = (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items())))
                assert series not in samples, f"{series} stands there twice"
                samples[series] = float(sample.value)
    return Scrape(samples)
