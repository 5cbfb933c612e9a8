"""A budget of bytes per second on an injected clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.wire.pace import RateLimiter


@given(st.floats(1, 1e9), st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 2)), max_size=20))
def test_no_stretch_of_time_sees_more_than_the_rate_and_one_request(rate, requests):
    now, sent = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace = RateLimiter(rate, clock=lambda: now[0], sleep=sleep)
    for num_bytes, pause_s in requests:
        now[0] += pause_s
        pace.wait(num_bytes)
        sent.append((now[0], num_bytes))
    for first in range(len(sent)):
        for last in range(first + 1, len(sent)):
            passed_s = sent[last][0] - sent[first][0]

            assert sum(count for _, count in sent[first + 1 : last + 1]) <= rate * passed_s * (1 + 1e-6) + 1e-3


def test_without_a_rate_nobody_sleeps():
    RateLimiter(sleep=lambda seconds: pytest.fail("slept")).wait(10**12)


@pytest.mark.parametrize("rate", [-1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(InputError, match="bytes per second is none"):
        RateLimiter(rate)


def test_a_burst_makes_up_for_lost_time_up_to_its_length():
    now, slept = [0.0], []
    pace = RateLimiter(100.0, clock=lambda: now[0], sleep=slept.append, burst_s=0.25)
    now[0] = 1000.0
    pace.wait(20)
    pace.wait(30)

    assert slept == [pytest.approx(0.25)]
