"""The random-process event loop."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.graph.process import Process


@given(st.lists(st.integers(0, 5)))
def test_events_happen_in_order_of_time_and_then_of_announcement(delays: list[int]) -> None:
    process, history = Process(0), []
    for index, delay in enumerate(delays):
        process.after(delay, lambda i=index: history.append((process.now_s, i)))
    process.run()

    assert history == sorted((float(delay), index) for index, delay in enumerate(delays))
    assert process.num_events == len(delays)


@given(st.lists(st.integers(0, 9)), st.integers(0, 9))
def test_stopping_and_going_on_changes_nothing(delays: list[int], stop: int) -> None:
    def history(stops: list[float]) -> list[float]:
        process, seen = Process(0), []
        for delay in delays:
            process.after(delay, lambda: seen.append(process.now_s))
        for until in stops:
            process.run(until)
            assert process.now_s == until
        process.run()
        return seen

    assert history([stop]) == history([])


def queue(seed: int, arrivals_per_s: float, services_per_s: float, until_s: float) -> tuple[float, float]:
    """Run an M/M/1 queue; return (time-average number present, share of time busy)."""
    process = Process(seed)
    present, area, busy, seen_s = 0, 0.0, 0.0, 0.0

    def settle(change: int) -> None:
        nonlocal present, area, busy, seen_s
        area += present * (process.now_s - seen_s)
        busy += (present > 0) * (process.now_s - seen_s)
        seen_s, present = process.now_s, present + change

    def arrive() -> None:
        settle(+1)
        if present == 1:
            process.after(process.rng("service").exponential(1 / services_per_s), leave)
        process.after(process.rng("arrival").exponential(1 / arrivals_per_s), arrive)

    def leave() -> None:
        settle(-1)
        if present:
            process.after(process.rng("service").exponential(1 / services_per_s), leave)

    process.after(0, arrive)
    process.run(until_s)
    settle(0)
    return area / until_s, busy / until_s


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_a_queue_with_one_place_agrees_with_the_closed_form(load: float) -> None:
    runs = [queue(seed, load, 1.0, 8000.0) for seed in range(5)]
    present = sum(run[0] for run in runs) / len(runs)
    busy = sum(run[1] for run in runs) / len(runs)

    # M/M/1: rho / (1 - rho) present on average, busy a share rho of the time.
    assert present == pytest.approx(load / (1 - load), rel=0.08)
    assert busy == pytest.approx(load, rel=0.03)


def test_one_seed_gives_one_history() -> None:
    assert queue(3, 0.5, 1.0, 100.0) == queue(3, 0.5, 1.0, 100.0) != queue(4, 0.5, 1.0, 100.0)


def test_an_event_that_lies_infinitely_far_never_happens() -> None:
    process = Process(0)
    process.after(math.inf, pytest.fail, "it happened")
    process.run()

    assert process.now_s == 0.0


@pytest.mark.parametrize("delay", [-1.0, math.nan])
def test_an_event_in_the_past_is_refused(delay: float) -> None:
    with pytest.raises(InputError, match=r"an event cannot lie in the past. Pass a number >= 0"):
        Process(0).after(delay, print)


def test_running_backwards_is_refused() -> None:
    process = Process(0)
    process.run(5.0)
    with pytest.raises(InputError, match=r"until_s is 4.0, the clock shows 5.0; pass a later time"):
        process.run(4.0)
