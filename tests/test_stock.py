"""Items of a server: from the cache in the most prepared form, kept in one form, offered no more than finds room."""

import numpy as np
import pytest

from headway.data.bytes.scrutiny import Scrutiny
from headway.data.service.batches import Batch, BatchPlace, JobCounts, PreparationTime, ServerCounts
from headway.data.service.stock import DataServer, ItemStore

ALL = ("encoded", "decoded", "augmented")
MADE = {"encoded": b"e" * 10, "decoded": b"d" * 50, "augmented": b"a" * 30}


def stock(split, *, forms=ALL, num_jobs=1, cache=1000):
    made = ItemStore(20, forms, DataServer(cache_bytes=cache, split=split, threads=1))
    for number in range(num_jobs):
        made.serve(np.ones(20, bool), 1, num_jobs=number + 1, num_ahead=4)
    return made


def asked(made, item, job="a"):
    """Ask for an item; prepare what that takes; return (form it began with, draw, forms kept) or None."""
    items = np.array([item])
    batch = Batch(job, 0, epoch=0, number=0, items=items, everybody=items)
    made.supply(BatchPlace(batch, 0), item, expected=False, due=0)
    work = made.next(0)
    if work is not None:
        made.done(work, {form: MADE[form] for form in (*work.keep, made.forms[-1])}, PreparationTime())
    assert batch.payloads == [MADE[made.forms[-1]]]
    made.give_back(batch)
    return None if work is None else (work.start, work.draw, work.keep)


@pytest.fixture
def never_compared(monkeypatch):
    """Hand out what is found without ever making it anew."""
    monkeypatch.setattr(Scrutiny, "is_due", lambda *_, **__: False)


def test_an_item_is_kept_in_the_most_prepared_form_that_finds_room_and_begins_from_there(never_compared):
    made = stock((0.02, 0.10, 0.0))
    starts = [[asked(made, item)[0] for item in range(5)] for _ in range(2)]

    assert starts[1] == ["decoded", "decoded", "encoded", "encoded", None]
    assert made.cache.used_bytes == {"encoded": 20, "decoded": 100, "augmented": 0}
    assert made.counts.prepared == {"storage": 6, "encoded": 2, "decoded": 2, "augmented": 0}


def test_only_forms_that_the_cache_would_take_are_asked_for():
    made = stock((0.01, 0.05, 0.0))
    assert asked(made, 0)[2] == ("encoded", "decoded")
    assert asked(made, 1)[2] == ("encoded",)
    assert asked(made, 2)[2] == ()
    assert asked(stock((0.0, 0.0, 0.0)), 0)[2] == ()


def test_a_random_example_is_handed_to_each_job_once_and_made_anew_with_another_draw():
    made = stock((0.0, 0.0, 1.0), num_jobs=2)
    first = asked(made, 3, "a")
    assert asked(made, 3, "b") is None
    assert made.counts.hits["augmented"] == 1
    again = asked(made, 3, "a")
    assert again[1] != first[1]
    assert asked(made, 3, "b") is None


def test_a_deterministic_example_is_made_once_for_ever(never_compared):
    made = stock((0.0, 1.0, 0.0), forms=("decoded",))
    assert asked(made, 3, "a") is not None
    assert [asked(made, 3, job) for job in "aab"] == [None] * 3


def test_the_cache_is_divided_when_enough_is_known_and_again_when_jobs_come():
    made = stock("auto")
    for item in range(20):
        assert made.cache.capacity_bytes == dict.fromkeys(ALL, 0)
        assert asked(made, item)[2] == ("encoded", "decoded")
    assert sum(made.cache.capacity_bytes.values()) == 1000
    assert made.cache.capacity_bytes["augmented"] == 0
    made.serve(np.ones(20, bool), 1, num_jobs=2, num_ahead=4)
    assert made.cache.capacity_bytes["augmented"] == 2 * 4 * 30


def test_counts_are_plain_numbers():
    counts, job = ServerCounts(), JobCounts()
    counts.booked(None, PreparationTime(0, 7, 2, 3, 11))

    assert (counts.loads, counts.fetch_ns, counts.prep_ns, counts.read_bytes) == (1, 7, 5, 11)
    assert counts.as_dict()["prepared"]["storage"] == 1
    assert job.as_dict() == {"batches": 0, "examples": 0, "examples_per_s": 0.0, "audit": {}}
