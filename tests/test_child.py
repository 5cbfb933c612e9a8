"""What a forked child says: all of it, or nothing; it leaves neither a process nor a descriptor behind."""

import os
import signal
import time
import warnings

import psutil
import pytest

from headway.core.machine.child import detached, said


def raises():
    raise SystemExit("the dataset's own end")


@pytest.mark.parametrize(
    ("work", "answer"),
    [
        (lambda: b"x" * (1 << 20), (b"x" * (1 << 20), 0)), (lambda: b"", (b"", 0)), (raises, (b"", 1)),
        (lambda: os._exit(7), (b"", 7)), (lambda: os.kill(os.getpid(), signal.SIGKILL), (b"", -signal.SIGKILL)),
    ],
    ids=["long", "nothing", "raises", "exits", "killed"],
)  # fmt: skip
def test_the_answer_comes_whole_or_not_at_all_with_how_the_child_ended(work, answer):
    assert said(work) == answer


def test_one_that_hangs_is_ended():
    assert said(lambda: time.sleep(600), timeout_s=0.05) == (b"", -signal.SIGKILL)


def test_a_script_that_has_its_children_waited_for_by_others_gets_its_answer_too():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert said(lambda: b"done") == (b"done", 0)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_nothing_of_the_child_stays():
    process = psutil.Process()
    before = process.num_fds(), process.children()
    for work in (lambda: b"done", raises):
        said(work)

    assert (process.num_fds(), process.children()) == before


@pytest.mark.parametrize("forked", [lambda: said(lambda: b""), lambda: os.close(detached(lambda: b"")[0])])
def test_a_warning_that_is_shown_once_for_its_line_is_not_shown_again_behind_a_fork(forked):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        before = warnings.filters[:]
        for _ in range(2):
            warnings.warn("the script's", UserWarning, stacklevel=1)
            forked()

        assert warnings.filters == before

    assert [str(warning.message) for warning in shown] == ["the script's"]
