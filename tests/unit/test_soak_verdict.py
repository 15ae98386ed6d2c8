"""What half an hour of mixed load has to show before it counts as flat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.soak import Minute, complaints

FLAT = Minute(
    events_ns=[100_000] * 100,
    chats_s=[0.001] * 100,
    memory=80 << 20,
    sockets=60,
    tasks=12,
    objects=20_000,
    series=300,
)
REST = Minute(memory=80 << 20, sockets=4, tasks=8, objects=19_000, series=300)


def growing(**last: object) -> list[Minute]:
    """Thirty minutes, the last ten of which are different."""
    return [FLAT] * 20 + [replace(FLAT, **last)] * 10  # type: ignore[arg-type]


def test_flat_half_hour_has_no_complaint() -> None:
    assert complaints([FLAT] * 30, REST, REST) == []


def test_warm_up_does_not_count_as_growth() -> None:
    cold = replace(FLAT, memory=60 << 20, sockets=10, tasks=2, objects=5_000, series=200, events_ns=[10_000] * 100)

    assert complaints([cold] * 3 + [FLAT] * 27, REST, REST) == []


@pytest.mark.parametrize(
    ("last", "said"),
    [
        pytest.param({"memory": 90 << 20}, "memory grew", id="memory"),
        pytest.param({"sockets": 80}, "sockets grew", id="sockets"),
        pytest.param({"tasks": 20}, "tasks grew", id="tasks"),
        pytest.param({"objects": 30_000}, "objects grew", id="objects"),
        pytest.param({"series": 301}, "series grew", id="series"),
        pytest.param({"events_ns": [300_000] * 100}, "the p99 of events went", id="slower-events"),
        pytest.param({"chats_s": [0.01] * 100}, "the p99 of chats went", id="slower-chats"),
        pytest.param({"errors": ["chat: 502"]}, "1 errors in minute 21: chat: 502", id="errors"),
    ],
)
def test_what_grows_slows_or_fails_is_named(last: dict[str, object], said: str) -> None:
    found = complaints(growing(**last), REST, REST)

    assert found
    assert found[0].startswith(said)


def test_what_stays_behind_when_everybody_has_gone_is_named() -> None:
    assert complaints([FLAT] * 30, REST, replace(REST, tasks=900))[0].startswith("tasks at rest: 8 before, 900 after")
