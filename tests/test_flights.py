"""Preparations under way: one for all who wait, never one tensor twice to a job, in order of need."""

import numpy as np
import pytest

from headway.data.service.batches import Batch, BatchPlace
from headway.data.service.flights import Flights


def place(job="a", index=0):
    items = np.arange(3)
    return BatchPlace(Batch(job, 0, epoch=0, number=0, items=items, everybody=items), index)


def launched(flights, item=1, due=0.0):
    return flights.launch(item, draw=0, start=None, payload=None, due=due)


@pytest.mark.parametrize("random", [False, True])
def test_all_who_wait_get_one_payload_and_who_comes_later_shares_it(random):
    flights, places = Flights(random=random), [place("a"), place("b"), place("c")]
    flight = launched(flights)
    for one in places[:2]:
        flights.board(flights.find(1, one.batch.job), one, 0)
    assert flights.next() is flight
    flights.hold(flights.land(flight.number), b"made")
    flights.share(flights.held(1, "c"), places[2])

    assert [one.batch.payloads[0] for one in places] == [b"made"] * 3
    assert (len(flights), flights.held_bytes) == (0, 4)
    for one in places:
        assert flights.usable(1, "d")
        flights.release(one.batch.held[0])
    assert not flights.usable(1, "d")
    assert flights.held_bytes == 0


def test_a_random_example_is_shared_by_jobs_that_did_not_have_it():
    flights = Flights(random=True)
    flight = launched(flights)
    flights.board(flight, place("a"), 0)
    assert flights.find(1, "a") is None
    assert flights.find(1, "b") is flight
    second = launched(flights)
    assert not second.shared
    flights.hold(flights.land(flight.number), b"made")
    assert flights.held(1, "a") is None
    assert flights.held(1, "b") is not None


def test_a_deterministic_example_may_be_had_again():
    flights = Flights(random=False)
    flight = launched(flights)
    flights.board(flight, place("a"), 0)

    assert flights.find(1, "a") is flight


def test_flights_start_by_need_and_a_more_urgent_place_pulls_one_forward():
    flights = Flights(random=False)
    for item, due in ((1, 5), (2, 3), (3, 4)):
        flights.board(launched(flights, item, due), place(), due)
    flights.board(flights.find(1, "b"), place("b"), 1)

    assert [flights.next().item for _ in range(3)] == [1, 2, 3]
    assert flights.next() is None


def test_flights_that_nobody_waits_for_are_dropped_unless_they_have_started():
    flights, gone = Flights(random=False), []
    flights.watch(lambda item: None, gone.append)
    kept, dropped = place("a"), place("b")
    for item in (1, 2):
        flights.board(launched(flights, item, item), dropped, item)
    flights.board(flights.find(1, "a"), kept, 1)
    flights.board(launched(flights, 3, 0), dropped, 0)
    started = flights.next()
    dropped.batch.wanted = False
    flights.tidy()

    assert sorted(flights) == [1, 3]
    assert started.item == 3
    assert gone == [2]
    flights.hold(flights.land(started.number), b"x")
    assert flights.held_bytes == 0


def test_a_cached_payload_is_held_for_others_but_those_who_had_it():
    flights, made = Flights(random=True), b"cached"
    flights.again(4, memoryview(made), place("b"), had=["a"])

    assert flights.held(4, "a") is None
    assert flights.held(4, "b") is None
    assert flights.held(4, "c").num_places == 1
    flights.again(4, memoryview(made), place("c"), had=["a", "b"])
    assert flights.held(4, "d").num_places == 2


def test_watchers_hear_of_items_that_come_and_may_be_gone():
    flights, came, went = Flights(random=False), [], []
    flights.watch(came.append, went.append)
    one = place()
    flight = launched(flights, 8)
    flights.board(flight, one, 0)
    flights.hold(flights.land(flight.number), b"x")
    flights.release(one.batch.held[0])

    assert (came, went) == ([8], [8])
