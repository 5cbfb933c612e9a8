"""A bell for a thread that waits in a selector."""

import os
import selectors
import threading

from headway.core.machine.host import readable
from headway.core.wire.loop import Waker


def test_a_thread_that_waits_is_woken_once_for_many_rings():
    wake, woken, again = Waker(), [], threading.Event()

    def wait():
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            woken.append(len(selector.select(60.0)))
            wake.clear()
            woken.append(len(selector.select(0.0)))
            again.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(1000):
        wake.ring()
        if again.is_set():
            break
    thread.join()

    assert woken[0] == 1
    wake.clear()
    assert not readable(wake.fileno(), 0.0)
    wake.clear()  # nothing to forget
    wake.close()


def test_ringing_after_the_end_touches_nobody_elses_file():
    wake = Waker()
    number = wake.fileno()
    wake.close()
    wake.close()
    reads, writes = os.pipe()
    others = [os.dup(reads) for _ in range(4)]  # one of them has the number that was free
    assert number in (reads, writes, *others)

    wake.ring()

    assert wake.fileno() == -1
    assert not readable(reads, 0.0)
    for fd in (reads, writes, *others):
        os.close(fd)
