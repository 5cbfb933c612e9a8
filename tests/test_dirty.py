"""Which pages were written: every back-end against a plain set, beside racing writers, and what it refuses."""

import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import HeadwayError, InputError, UnknownNameError
from headway.storage.regions import dirty, pagemap
from headway.storage.regions.dirty import BACKENDS, DirtyTracker, pages_of, runs_of, works
from headway.storage.regions.pagemap import PAGE_BYTES
from tests.refusals import refused
from tests.spawn import in_fork

PAGES = 24
here = [
    pytest.param(name, marks=pytest.mark.skipif(bool(works(name)), reason=f"{name} does not work here"))
    for name in BACKENDS
]


def mapped(pages: int = PAGES) -> mmap.mmap:
    return mmap.mmap(-1, pages * PAGE_BYTES)


@given(st.sets(st.integers(0, 40)))
def test_ranges_and_page_numbers_are_two_ways_to_say_the_same(pages):
    numbers = np.array(sorted(pages), np.int64)
    runs = runs_of(numbers)

    assert pages_of(runs).tolist() == sorted(pages)
    assert runs.shape[1] == 2
    assert (runs[1:, 0] > runs[:-1, 1]).all()


@pytest.mark.parametrize("backend", here)
@given(actions=st.lists(st.tuples(st.sampled_from(["write", "peek", "take"]), st.integers(0, PAGES - 3))))
def test_a_tracker_tells_the_pages_written_since_they_were_taken(backend, actions):
    memory, expected = mapped(), set()
    with DirtyTracker(memory, backend) as tracker:
        for number, (action, page) in enumerate(actions, 1):
            if action == "write":  # a range that crosses a page's end, of bytes that were never there
                start = page * PAGE_BYTES + 4000
                with tracker.writing(start, 200):
                    memory[start : start + 200] = number.to_bytes(4, "little") * 50
                expected |= {page, page + 1}
            else:
                found = tracker.peek() if action == "peek" else tracker.take()
                assert pages_of(found).tolist() == sorted(expected)
                expected = set() if action == "take" else expected
        assert pages_of(tracker.peek(4, 9)).tolist() == sorted(expected & set(range(4, 9)))


@pytest.mark.parametrize("backend", here)
def test_no_store_of_a_racing_thread_is_lost(backend):
    memory = mapped(512)
    values = np.frombuffer(memory, np.uint32).reshape(512, -1)[:, 0]
    seen = np.zeros(512, np.uint32)
    with DirtyTracker(memory, backend) as tracker:

        def write() -> None:
            rng = np.random.default_rng(1)
            for number in range(1, 1500):
                page = int(rng.integers(512))
                with tracker.writing(page * PAGE_BYTES, 4):
                    values[page] = number

        writer = threading.Thread(target=write)
        writer.start()
        alive = True
        while alive:
            alive = writer.is_alive()  # asked first, so that the last take comes after the last store
            taken = pages_of(tracker.take())
            seen[taken] = values[taken]
        writer.join()

        assert np.array_equal(seen, values)
        assert not tracker.peek().size


def test_a_page_stays_dirty_while_somebody_writes_there_whoever_takes():
    memory = mapped()
    with DirtyTracker(memory, "explicit") as tracker:
        with tracker.writing(0, 1):
            first, second = tracker.take().tolist(), tracker.take().tolist()
        after = tracker.take().tolist()

        assert (first, second, after) == ([[0, 1]], [[0, 1]], [[0, 1]])
        assert not tracker.take().size


def test_a_mark_covers_every_page_it_touches_and_nothing_of_length_zero():
    with DirtyTracker(mapped(), "explicit") as tracker:
        tracker.mark(PAGE_BYTES - 1, 2)
        tracker.mark(8 * PAGE_BYTES, 0)

        assert tracker.take().tolist() == [[0, 2]]


@pytest.mark.parametrize("backend", ["pagemap_scan", "rehash"])
def test_marks_are_harmless_where_stores_are_seen(backend):
    if works(backend):
        pytest.skip(works(backend))
    with DirtyTracker(mapped(), backend) as tracker:
        tracker.mark(0, PAGE_BYTES)

        assert not tracker.peek().size


def test_rehash_sees_the_stores_of_another_process():
    memory = mapped()
    with DirtyTracker(memory, "rehash") as tracker:
        assert in_fork(lambda: memory.__setitem__(3 * PAGE_BYTES, 1)) == 0

        assert tracker.take().tolist() == [[3, 4]]


@pytest.mark.parametrize("backend", here)
def test_a_forked_child_may_not_ask(backend):
    def ask():
        with pytest.raises(HeadwayError, match="Make one in the process that writes"):
            tracker.take()

    with DirtyTracker(mapped(), backend) as tracker:
        assert in_fork(ask) == 0


def test_memory_cannot_be_unmapped_while_it_is_followed():
    memory = mapped()
    tracker = DirtyTracker(memory, "explicit")
    with pytest.raises(BufferError):
        memory.close()
    tracker.close()
    tracker.close()
    memory.close()

    with pytest.raises(InputError, match="this tracker is closed"):
        tracker.peek()


def no_kernel(monkeypatch):
    reasons = {"anonymous": "", "tmpfs": "", "file": "PAGEMAP_SCAN: Inappropriate ioctl for device"}
    monkeypatch.setattr(dirty, "self_test", lambda: reasons)


def test_a_back_end_that_is_forced_and_fails_is_an_error_with_the_kernels_version(monkeypatch):
    no_kernel(monkeypatch)

    with pytest.raises(InputError, match=rf"Linux {os.uname().release}.*file memory: PAGEMAP_SCAN.*use 'explicit'"):
        DirtyTracker(mapped(), "pagemap_scan")


def test_auto_falls_back_to_rehash_and_says_so(monkeypatch, caplog):
    no_kernel(monkeypatch)
    memory = mapped()
    with DirtyTracker(memory) as tracker:
        memory[0] = 1

        assert tracker.backend == "rehash"
        assert tracker.take().tolist() == [[0, 1]]
        assert "rehash" in caplog.text
        assert "Inappropriate ioctl" in caplog.text


@pytest.mark.skipif(bool(works("pagemap_scan")), reason="the kernel tracks no pages here")
def test_auto_also_falls_back_where_only_this_memory_is_refused():
    memory = mapped()
    holder = pagemap.WrittenPages(np.frombuffer(memory, np.uint8).ctypes.data, PAGES * PAGE_BYTES)
    with DirtyTracker(memory) as tracker:
        assert tracker.backend == "rehash"
    with pytest.raises(InputError, match="UFFDIO_REGISTER"):
        DirtyTracker(memory, "pagemap_scan")
    holder.close()


def test_soft_dirty_is_no_back_end():
    with pytest.raises(UnknownNameError, match="soft_dirty"):
        DirtyTracker(mapped(), "soft_dirty")


test_what_is_not_whole_writable_pages_is_refused = refused(
    (np.zeros(3 * PAGE_BYTES, np.uint8)[16 : 16 + PAGE_BYTES], "page boundaries"),
    (memoryview(mmap.mmap(-1, PAGE_BYTES))[:100], "has 100 bytes"),
    (b"x" * PAGE_BYTES, "read-only"),
    (memoryview(mmap.mmap(-1, PAGE_BYTES))[::2], "not contiguous"),
    (memoryview(mmap.mmap(-1, PAGE_BYTES))[:0], "has 0 bytes"),
    by=lambda buffer: DirtyTracker(buffer, "explicit"),
)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (0, -1), (PAGES * PAGE_BYTES, 1)])
def test_marks_outside_of_the_buffer_are_refused(offset, num_bytes):
    with DirtyTracker(mapped(), "explicit") as tracker, pytest.raises(InputError, match="do not lie in a buffer"):
        tracker.mark(offset, num_bytes)
