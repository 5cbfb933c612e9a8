"""Written pages as the kernel tells them: against a plain set, through reclaim, fork, many ranges, racing stores."""

import ctypes
import faulthandler
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.storage.regions import pagemap
from headway.storage.regions.pagemap import MAPS, PAGE_BYTES, WrittenPages, joined, make_read_only, self_test
from tests.spawn import in_fork

REASON = "; ".join(filter(None, self_test().values()))
kernel = pytest.mark.skipif(bool(REASON), reason=f"the kernel tracks no pages here: {REASON}")
PAGES = 48
PAGEOUT, DONTNEED = 21, 4


def address_of(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def pages(runs: np.ndarray) -> list[int]:
    return [page for first, end in runs.tolist() for page in range(first, end)]


def advise(address: int, num_bytes: int, advice: int) -> int:
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=12))
def test_joined_ranges_cover_the_same_pages_once_in_order(spans):
    runs = np.array([(first, first + length) for first, length in spans], np.int64).reshape(-1, 2)

    covered = pages(joined(runs))

    assert covered == sorted({page for first, length in spans for page in range(first, first + length)})
    assert (np.diff(joined(runs).reshape(-1)) > 0).all()


@kernel
@given(
    kind=st.sampled_from(sorted(MAPS)),
    actions=st.lists(st.tuples(st.sampled_from(["store", "load", "peek", "take", "part"]), st.integers(0, PAGES - 1))),
)
def test_the_kernel_tells_exactly_the_pages_that_were_stored_to(kind, actions):
    memory = MAPS[kind](PAGES * PAGE_BYTES)
    written, expected = WrittenPages(address_of(memory), PAGES * PAGE_BYTES), set()
    for action, page in actions:
        if action == "store":
            memory[page * PAGE_BYTES + page] = 1
            expected.add(page)
        elif action == "load":
            _ = memory[page * PAGE_BYTES]
        elif action == "part":
            assert pages(written.runs(page, clear=False)) == sorted(p for p in expected if p >= page)
        else:
            assert pages(written.runs(clear=action == "take")) == sorted(expected)
            expected = set() if action == "take" else expected

    assert pages(written.runs(clear=True)) == sorted(expected)
    written.close()


@kernel
@pytest.mark.parametrize("kind", ["tmpfs", "file"])
@pytest.mark.parametrize("advice", [PAGEOUT, DONTNEED], ids=["reclaimed", "unmapped"])
def test_no_store_is_forgotten_when_its_page_leaves_memory(kind, advice):
    memory = MAPS[kind](PAGES * PAGE_BYTES)
    memory[: PAGES * PAGE_BYTES] = b"x" * PAGES * PAGE_BYTES
    written = WrittenPages(address_of(memory), PAGES * PAGE_BYTES)
    memory[3 * PAGE_BYTES] = 1
    memory.flush()
    assert advise(address_of(memory), PAGES * PAGE_BYTES, advice) == 0

    while_gone = pages(written.runs(clear=False))
    _ = [memory[page * PAGE_BYTES] for page in range(PAGES)]
    memory[7 * PAGE_BYTES] = 1

    assert while_gone == [3]
    assert pages(written.runs(clear=True)) == [3, 7]


@kernel
def test_more_ranges_than_one_call_returns_come_complete():
    count = 4 * pagemap.RANGES_PER_SCAN + 6
    memory = MAPS["anonymous"](2 * count * PAGE_BYTES)
    bytes_ = np.frombuffer(memory, np.uint8)
    written = WrittenPages(bytes_.ctypes.data, bytes_.size)
    bytes_[:: 2 * PAGE_BYTES] = 1

    assert pages(written.runs(clear=False)) == list(range(0, 2 * count, 2))
    assert pages(written.runs(clear=True)) == list(range(0, 2 * count, 2))
    assert pages(written.runs(clear=True)) == []


@kernel
def test_every_store_of_a_racing_thread_is_in_one_answer_or_a_later_one():
    count, stores = 2048, 60
    memory = MAPS["tmpfs"](count * PAGE_BYTES)
    values = np.frombuffer(memory, np.uint32).reshape(count, -1)[:, 0]
    written = WrittenPages(values.ctypes.data, count * PAGE_BYTES)
    seen, rng = np.zeros(count, np.uint32), np.random.default_rng(0)
    order = [rng.permutation(count)[: count // 2] for _ in range(stores)]

    def write() -> None:
        for number, some in enumerate(order):
            values[some] = number + 1

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        taken = pages(written.runs(clear=True))
        seen[taken] = values[taken]  # clear first, then read
    writer.join()
    taken = pages(written.runs(clear=True))
    seen[taken] = values[taken]

    assert np.array_equal(seen, values)


@kernel
def test_a_fork_costs_the_parent_nothing_and_the_childs_stores_are_its_own():
    memory = MAPS["anonymous"](PAGES * PAGE_BYTES)
    memory[: PAGES * PAGE_BYTES] = b"x" * PAGES * PAGE_BYTES
    written = WrittenPages(address_of(memory), PAGES * PAGE_BYTES)
    memory[2 * PAGE_BYTES] = 1
    assert in_fork(lambda: memory.__setitem__(5 * PAGE_BYTES, 1)) == 0
    memory[9 * PAGE_BYTES] = 1

    assert pages(written.runs(clear=True)) == [2, 9]


@kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_needs_no_privilege():
    memory = MAPS["file"](PAGES * PAGE_BYTES)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its own /proc entries become its own again
        try:
            written = WrittenPages(address_of(memory), PAGES * PAGE_BYTES)
            memory[4 * PAGE_BYTES] = 1
            os._exit(0 if pages(written.runs(clear=True)) == [4] else 1)
        except OSError as refusal:
            os._exit(refusal.errno or 2)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@kernel
def test_after_close_stores_cost_no_fault_and_closing_again_does_nothing():
    memory = MAPS["anonymous"](PAGES * PAGE_BYTES)
    written = WrittenPages(address_of(memory), PAGES * PAGE_BYTES)
    written.close()
    written.close()
    again = WrittenPages(address_of(memory), PAGES * PAGE_BYTES)  # the kernel allows one owner at a time

    assert pages(again.runs(clear=False)) == []


@kernel
def test_memory_that_is_tracked_already_is_refused_with_what_was_asked_of_the_kernel():
    memory = MAPS["anonymous"](PAGES * PAGE_BYTES)
    _first = WrittenPages(address_of(memory), PAGES * PAGE_BYTES)

    with pytest.raises(OSError, match="UFFDIO_REGISTER"):
        WrittenPages(address_of(memory), PAGES * PAGE_BYTES)


def test_the_self_test_notices_a_kernel_that_reports_every_page_as_clean(monkeypatch):
    class Silent:
        def __init__(self, address, num_bytes):
            pass

        def runs(self, first=0, end=None, *, clear):
            return np.empty((0, 2), np.int64)

        def close(self):
            pass

    monkeypatch.setattr(pagemap, "WrittenPages", Silent)

    assert "the kernel reports the written pages" in pagemap._trial(MAPS["anonymous"])


def test_a_processor_without_a_known_system_call_is_named(monkeypatch):
    monkeypatch.setattr(pagemap.platform, "machine", lambda: "vax")

    assert "no known number on vax" in pagemap._trial(MAPS["anonymous"])


def test_a_store_into_read_only_memory_kills_the_process():
    memory = MAPS["tmpfs"](PAGE_BYTES)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        make_read_only(address_of(memory), PAGE_BYTES)
        memory[0] = 1
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11
