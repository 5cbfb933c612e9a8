"""Copies past the caches: equal to plain ones at every alignment and length, and nothing beside them is touched."""

import ctypes
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.machine import native as streamed
from headway.core.machine.native import native

ROOM = 2 * streamed.BLOCK_BYTES + 8 * streamed.VECTOR_BYTES


@given(
    at=st.integers(0, 2 * streamed.VECTOR_BYTES),
    source_at=st.integers(0, 2 * streamed.VECTOR_BYTES),
    length=st.one_of(
        st.integers(0, 3 * streamed.TURN_BYTES),
        st.integers(streamed.BLOCK_BYTES - 4 * streamed.VECTOR_BYTES, ROOM - 4 * streamed.VECTOR_BYTES),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_copy_is_equal_and_touches_nothing_beside(at, source_at, length, seed):
    source = np.random.default_rng(seed).integers(0, 256, ROOM, np.uint8)
    target = np.full(ROOM, 77, np.uint8)
    expected = target.copy()
    expected[at : at + length] = source[source_at : source_at + length]

    streamed.copy(target.ctypes.data + at, source.ctypes.data + source_at, length)

    assert np.array_equal(target, expected)


def test_another_thread_sees_the_whole_copy_once_it_is_told():
    size, rounds, wrong = 1 << 20, 50, []
    source, target = np.empty(size, np.uint8), np.zeros(size, np.uint8)
    told, heard = threading.Semaphore(0), threading.Semaphore(0)

    def check():
        for number in range(rounds):
            told.acquire()
            wrong.append(int((target != number).sum()))
            heard.release()

    reader = threading.Thread(target=check)
    reader.start()
    for number in range(rounds):
        source.fill(number)
        streamed.copy(target.ctypes.data, source.ctypes.data, size)
        told.release()
        heard.acquire()
    reader.join()

    assert wrong == [0] * rounds


def test_the_loop_streams_where_the_host_can():
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), opt=2)
    if not machine.triple.startswith("x86_64"):
        pytest.skip(f"{machine.triple} names such stores otherwise")

    code = machine.emit_assembly(llvm.parse_assembly(streamed.assembly()))

    assert "movntps" in code
    assert "mfence" in code or "lock" in code


def test_a_module_that_is_none_is_refused():
    with pytest.raises(RuntimeError, match="expected"):
        native("define void", "run", ctypes.c_void_p)
