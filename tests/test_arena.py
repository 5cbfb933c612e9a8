"""The arena: what is put is what is got, across forks, within the budget."""

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.machine.arena import Arena, shared_memory
from tests.refusals import refused


@given(
    puts=st.lists(st.tuples(st.integers(0, 7), st.binary(max_size=40)), max_size=30), capacity_bytes=st.integers(1, 200)
)
def test_the_first_payload_that_fits_stays_and_the_budget_holds(puts, capacity_bytes):
    arena, expected = Arena(8, capacity_bytes), {}
    for slot, payload in puts:
        if arena.put(slot, payload):
            expected.setdefault(slot, payload)

    found = {slot: bytes(view) for slot in range(8) if (view := arena.get(slot)) is not None}

    assert found == expected
    assert arena.used_bytes == sum(map(len, expected.values())) <= capacity_bytes
    assert arena.num_filled == len(expected)


def test_forked_children_fill_it_together():
    arena = Arena(400, 100_000)
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            for slot in range(400):
                arena.put(slot, f"{slot}:".encode() * (slot % 7 + 1))
                if (slot + child) % 50 == 0:
                    os.sched_yield()
            os._exit(0)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]

    payloads = [bytes(arena.get(slot)) for slot in range(400)]

    assert codes == [0] * 4
    assert payloads == [f"{slot}:".encode() * (slot % 7 + 1) for slot in range(400)]


def test_a_view_cannot_be_written():
    arena = Arena(1, 10)
    arena.put(0, b"abc")

    with pytest.raises(TypeError):
        arena.get(0)[0] = 1


@pytest.mark.parametrize(("slots", "capacity"), [(0, 10), (3, 0)])
def test_an_arena_that_holds_nothing_is_refused(slots, capacity):
    with pytest.raises(InputError, match=r"holds nothing.*at least 1"):
        Arena(slots, capacity)


test_a_slot_outside_is_named = refused((lambda: Arena(4, 10).get(4), r"slot 4 is outside 0\.\.3"))


def test_another_process_gets_the_same_memory_by_pickle(tmp_path):
    arena = Arena(4, 100)
    arena.put(1, b"here")
    (tmp_path / "arena").write_bytes(pickle.dumps(arena))
    code = (
        "import pickle, sys; arena = pickle.load(open(sys.argv[1], 'rb')); "
        "assert bytes(arena.get(1)) == b'here'; assert arena.put(2, b'there')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "arena")], check=True, timeout=60)

    assert bytes(arena.get(2)) == b"there"
    assert arena.used_bytes == 9


def test_memory_that_nobody_holds_is_given_back():
    arena, (file, memory) = Arena(num_slots=2, capacity_bytes=100), shared_memory("given back", 4096)
    numbers = [arena._file.fileno(), file.fileno()]
    assert all(os.fstat(number).st_size for number in numbers)

    del arena, file, memory

    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
