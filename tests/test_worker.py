"""The background worker: bounded, in order, and honest about failures."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import BackgroundError, HeadwayError, InputError
from headway.core.machine.worker import BackgroundWorker


@given(st.lists(st.integers()), st.integers(1, 5))
def test_a_blocking_worker_does_everything_in_order(entries: list[int], capacity: int) -> None:
    done: list[int] = []
    with BackgroundWorker(done.append, capacity=capacity) as worker:
        accepted = [worker.put(entry) for entry in entries]

    assert done == entries
    assert all(accepted)
    assert worker.dropped == 0


@given(st.integers(1, 4), st.integers(0, 9))
def test_a_dropping_worker_counts_what_it_refuses(capacity: int, extra: int) -> None:
    gate, begun, done = threading.Event(), threading.Event(), []

    def work(entry: int) -> None:
        begun.set()
        gate.wait()
        done.append(entry)

    worker = BackgroundWorker(work, capacity=capacity, when_full="drop")
    worker.put(-1)
    begun.wait()
    accepted = [worker.put(entry) for entry in range(capacity + extra)]
    gate.set()
    worker.close()

    assert accepted == [True] * capacity + [False] * extra
    assert worker.dropped == extra
    assert done == [-1, *range(capacity)]


def test_a_full_blocking_worker_holds_the_caller_until_there_is_room() -> None:
    gate, done = threading.Event(), []
    worker = BackgroundWorker(lambda entry: (gate.wait(), done.append(entry)), capacity=1)
    caller = threading.Thread(target=lambda: [worker.put(entry) for entry in range(4)])
    caller.start()
    caller.join(0.05)

    assert caller.is_alive()
    gate.set()
    caller.join()
    worker.close()
    assert done == [0, 1, 2, 3]


def test_a_failure_surfaces_at_every_later_call_with_its_cause() -> None:
    worker = BackgroundWorker(lambda entry: 1 // entry, name="divider")
    worker.put(0)
    with pytest.raises(
        BackgroundError, match=r"divider failed earlier: ZeroDivisionError.*start a new worker"
    ) as caught:
        worker.flush()

    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(BackgroundError):
        worker.put(1)


def test_a_failure_wakes_a_caller_that_waits_for_room() -> None:
    gate, begun = threading.Event(), threading.Event()

    def work(entry: int) -> None:
        begun.set()
        gate.wait()
        raise OSError("disk full")

    worker = BackgroundWorker(work, capacity=1)
    worker.put(1)
    begun.wait()
    worker.put(2)
    opener = threading.Timer(0.02, gate.set)
    opener.start()
    with pytest.raises(BackgroundError, match="disk full"):
        worker.put(3)

    assert worker.dropped == 1
    opener.join()


def test_close_raises_a_failure_nobody_has_seen_and_can_be_repeated() -> None:
    worker = BackgroundWorker(lambda entry: 1 // entry)
    worker.put(0)
    with pytest.raises(BackgroundError):
        worker.close()
    worker.close()


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_worker() -> None:
    with pytest.raises(KeyError), BackgroundWorker(lambda entry: 1 // entry) as worker:  # noqa: PT012 - both must fail inside
        worker.put(0)
        raise KeyError("the caller's own")


def test_flush_gives_up_after_its_time_and_says_what_is_left() -> None:
    gate = threading.Event()
    worker = BackgroundWorker(lambda entry: gate.wait())
    worker.put(1)
    with pytest.raises(BackgroundError, match=r"1 entries are not done after 0.01 s. Wait longer"):
        worker.flush(0.01)
    gate.set()
    worker.close()


def test_a_closed_worker_takes_nothing_more() -> None:
    worker = BackgroundWorker(print)
    worker.close()
    with pytest.raises(InputError, match=r"closed; put entries before close"):
        worker.put(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"capacity": 0}, r"capacity is 0; .*Pass 1 or more"), ({"when_full": "wait"}, r"choose 'block' or 'drop'")],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BackgroundWorker(print, **arguments)


def test_a_forked_child_is_told_that_it_has_no_worker() -> None:
    worker = BackgroundWorker(print)
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        try:
            worker.put(1)
        except HeadwayError as error:
            answers.put(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    message = answers.get()
    process.join()
    worker.close()

    assert "Start one after the fork" in message
