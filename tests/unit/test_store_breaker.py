"""When a store that failed is asked again. The clock stands still unless a test moves it."""

from __future__ import annotations

import pytest

from sidecar.sessions.store.base import StoreUnavailable
from sidecar.sessions.store.breaker import Breaker

LIMIT_S = 0.25


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def is_skipped(breaker: Breaker) -> bool:
    try:
        breaker.enter()
    except StoreUnavailable as exc:
        return exc.is_skipped
    return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(LIMIT_S, clock)


def test_store_that_works_is_asked_by_all(breaker: Breaker) -> None:
    assert [is_skipped(breaker) for _ in range(3)] == [False, False, False]
    assert breaker.succeeded() is False


def test_pauses_double_up_to_half_a_minute(breaker: Breaker, clock: Clock) -> None:
    pauses = []
    for _ in range(8):
        pause_s = breaker.failed(breaker.enter())
        assert pause_s is not None
        pauses.append(pause_s)
        clock.now += pause_s

    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_store_is_skipped_until_the_pause_is_over(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(breaker.enter())

    at_once = is_skipped(breaker)
    clock.now += 0.99
    shortly_before = is_skipped(breaker)
    clock.now += 0.01
    after = is_skipped(breaker)

    assert [at_once, shortly_before, after] == [True, True, False]


def test_many_that_fail_together_are_one_failure(breaker: Breaker) -> None:
    attempts = [breaker.enter() for _ in range(100)]

    assert [breaker.failed(attempt) for attempt in attempts] == [1.0] + [None] * 99


def test_only_one_finds_out_after_a_pause(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(breaker.enter())
    clock.now += 1.0

    assert [is_skipped(breaker) for _ in range(3)] == [False, True, True]


def test_cancelled_attempt_makes_room_for_the_next(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(breaker.enter())
    clock.now += 1.0
    breaker.enter()  # and never heard of again
    clock.now += LIMIT_S

    assert is_skipped(breaker) is False


def test_success_ends_the_pause_and_begins_the_doubling_anew(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(breaker.enter())
    clock.now += 1.0
    breaker.failed(breaker.enter())
    clock.now += 2.0
    breaker.enter()

    assert breaker.succeeded() is True
    assert is_skipped(breaker) is False
    assert breaker.failed(breaker.enter()) == 1.0
