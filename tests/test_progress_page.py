"""The progress page: what the training thread stores is what a reader sees, and nobody else's stores show."""

import math
import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from headway.trace.rings.records import RecordRingReader, read_page
from headway.trace.rings.ring import HEADER, OP, PAGE, PAGE_OFFSET, THREADS_OFFSET, PageWriter, Recorder

small = st.integers(-1, (1 << 31) - 1)
large = st.integers(-(1 << 62), 1 << 62)


@given(op=st.integers(1, 200), group=small, peer=small, seq=large, since_ns=large)
def test_an_open_operation_is_read_as_it_was_written(op, group, peer, seq, since_ns):
    buffer = bytearray(1024)
    page = PageWriter()
    page.bind(buffer)
    page.opened(op, since_ns, group, seq, peer)
    seen = read_page(buffer)

    assert (seen.op, seen.group, seen.peer, seen.seq, seen.since_ns) == (op, group, peer, seq, since_ns)
    page.closed()
    assert read_page(buffer).op == 0


def test_the_page_has_64_bytes_between_the_numbers_of_a_header_and_its_threads():
    assert PAGE.size == 64
    assert HEADER.size <= PAGE_OFFSET
    assert PAGE_OFFSET + PAGE.size <= THREADS_OFFSET


def test_a_fresh_page_says_that_nothing_is_known():
    buffer = bytearray(b"\xff" * 1024)
    PageWriter().bind(buffer)
    seen = read_page(buffer)

    assert (seen.step, seen.progress_ns, seen.op, seen.stack_signal) == (0, 0, 0, 0)
    assert math.isnan(seen.loss)
    assert bytes(buffer[PAGE_OFFSET + PAGE.size :]) == b"\xff" * (1024 - PAGE_OFFSET - PAGE.size)


def test_another_thread_opens_and_closes_nothing():
    buffer = bytearray(1024)
    page = PageWriter()
    page.bind(buffer)
    page.opened(41, 5)
    other = threading.Thread(target=lambda: (page.closed(), page.opened(60, 9)))
    other.start()
    other.join()

    assert read_page(buffer).op == 41
    trainer = threading.Thread(target=lambda: (page.train_here(), page.opened(60, 9)))
    trainer.start()
    trainer.join()
    assert read_page(buffer).op == 60


def test_a_ring_carries_the_page_of_its_process_and_a_forked_child_leaves_it_alone(tmp_path):
    recorder = Recorder(str(tmp_path))
    assert recorder.open()
    recorder.page.opened(41, 5, 0, 12)
    recorder.set_rank(3)  # writes the header anew
    child = os.fork()
    if child == 0:
        recorder.page.cells[0][OP] = 99
        recorder.page.opened(98, 0)
        os._exit(0)
    os.waitpid(child, 0)
    seen = RecordRingReader(recorder.path).page

    assert (seen.op, seen.seq) == (41, 12)


def test_a_loss_and_the_signal_for_stacks_are_kept():
    buffer = bytearray(1024)
    page = PageWriter()
    page.bind(buffer)
    page.seen_loss(0.125)
    page.stacks_by(41)
    seen = read_page(buffer)

    assert (seen.loss, seen.stack_signal) == (0.125, 41)
