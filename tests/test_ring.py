"""A ring never gives a slot away while somebody reads it, never loses one, and says so when memory is short."""

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import DamageError, InputError
from headway.core.machine.ring import Ring, RingReader
from headway.core.wire.channel import ChannelClosed, Listener
from tests.paths import ROOT

ACTIONS = st.lists(st.tuples(st.sampled_from(["publish", "release"]), st.integers(0, 7)), max_size=60)


@given(num_slots=st.integers(1, 4), actions=ACTIONS)
def test_a_slot_is_free_exactly_when_nobody_fills_or_reads_it(num_slots, actions):
    """The twin: the slots that are read, and their generations."""
    ring = Ring(num_slots, 64)
    reader = RingReader(ring.fd)
    generation, held = dict.fromkeys(range(num_slots), 0), set()
    for act, number in actions:
        slot = number % num_slots
        if act == "release":
            reader.release(slot, generation[slot])
            held.discard(slot)
        else:
            taken = ring.take()
            assert (taken is None) == (len(held) == num_slots)
            if taken is None:
                continue
            assert taken not in held
            assert not ring.is_free(taken)
            ring.buffer(taken)[:8] = number.to_bytes(8, "little")
            generation[taken] = ring.publish(taken, 8)
            held.add(taken)

        assert [ring.is_free(slot) for slot in generation] == [slot not in held for slot in generation]
        assert ring.num_free == num_slots - len(held)
    ring.close()


def test_what_was_written_is_read_in_place_and_stays_while_it_is_held():
    ring = Ring(2, 10_000)
    reader = RingReader(ring.fd)
    first, second = ring.take(), ring.take()
    ring.buffer(first)[:] = b"a" * 10_000
    ring.buffer(second)[:] = b"b" * 10_000
    tickets = [(first, ring.publish(first, 10_000)), (second, ring.publish(second, 5_000))]

    assert [bytes(reader.view(*t)) for t in tickets] == [b"a" * 10_000, b"b" * 5_000]
    assert ring.take() is None
    reader.release(*tickets[1])
    again = ring.take()
    ring.buffer(again)[:] = b"c" * 10_000
    assert bytes(reader.view(*tickets[0])) == b"a" * 10_000


def test_a_view_outlives_ring_and_reader():
    ring = Ring(1, 100)
    slot = ring.take()
    ring.buffer(slot)[:3] = b"abc"
    view = RingReader(ring.fd).view(slot, ring.publish(slot, 3))
    ring.close()
    del ring

    assert bytes(view) == b"abc"


def test_a_view_is_read_only_unless_it_is_asked_for():
    ring = Ring(1, 100)
    slot = ring.take()
    generation = ring.publish(slot, 3)
    reader = RingReader(ring.fd)

    with pytest.raises(TypeError, match="read-only"):
        reader.view(slot, generation)[0] = 1
    reader.view(slot, generation, writable=True)[0] = 1
    assert reader.view(slot, generation)[0] == 1


def test_reading_after_the_release_is_seen_and_an_old_release_frees_nothing():
    ring = Ring(1, 100)
    reader = RingReader(ring.fd)
    old = ring.publish(ring.take(), 3)
    reader.release(0, old)
    new = ring.publish(ring.take(), 3)
    reader.release(0, old)

    assert not ring.is_free(0)
    with pytest.raises(DamageError, match="holds generation 2, not 1"):
        reader.view(0, old)
    reader.release(0, new)
    reader.release(0, old)
    assert ring.is_free(0)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 5)])
def test_a_ring_without_room_is_refused(sizes):
    with pytest.raises(InputError, match="at least 1 of each"):
        Ring(*sizes)


def test_wrong_use_is_named():
    ring = Ring(2, 100)
    slot = ring.take()

    with pytest.raises(InputError, match="do not fit into a slot of 100"):
        ring.publish(slot, 101)
    with pytest.raises(InputError, match="is not taken"):
        ring.buffer(1 - slot)
    with pytest.raises(InputError, match=r"slot 2 is outside 0..1"):
        ring.is_free(2)


def test_what_is_no_ring_is_damage():
    memory = os.memfd_create("x")
    with pytest.raises(DamageError, match="holds no ring"):
        RingReader(memory)
    os.write(memory, b"x" * 8192)
    with pytest.raises(DamageError, match="holds no ring: its head"):
        RingReader(memory)
    ring = Ring(4, 8192)
    os.ftruncate(ring.fd, 8192)
    with pytest.raises(DamageError, match="whole"):
        RingReader(ring.fd)
    os.close(memory)


def test_too_little_memory_is_an_error_at_creation_and_no_bus_error_later():
    """RLIMIT_FSIZE bounds a memfd as a small memory would."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "from headway.core.machine.ring import Ring; Ring(1, 1000); Ring(4, 1 << 20)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)

    assert "bytes of shared memory for 4 slots are not to be had" in answer.stderr
    assert "Make batches smaller" in answer.stderr


def test_two_processes_share_a_ring_and_what_a_dead_one_held_stays_held(tmp_path):
    told = msgspec.defstruct("Told", [("slot", int), ("generation", int)], tag="Told")
    listener = Listener(tmp_path / "s", types=told)
    code = (
        "import os, signal, msgspec; from headway.core.wire.channel import connect;"
        "from headway.core.machine.ring import RingReader;"
        "Told = msgspec.defstruct('Told', [('slot', int), ('generation', int)], tag='Told');"
        f"channel = connect({str(tmp_path / 's')!r}, types=Told); told, fds = channel.receive();"
        "reader = RingReader(fds[0]); assert bytes(reader.view(told.slot, told.generation)) == b'payload';"
        "reader.release(told.slot, told.generation); channel.send(told); channel.receive();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    channel, ring = listener.accept(20.0), Ring(1, 100)
    slot = ring.take()
    ring.buffer(slot)[:7] = b"payload"
    channel.send(told(slot, ring.publish(slot, 7)), [ring.fd])

    channel.receive(20.0)
    assert ring.is_free(slot)
    ring.take()
    channel.send(told(slot, ring.publish(slot, 7)))
    with pytest.raises(ChannelClosed):
        channel.receive(20.0)
    assert not ring.is_free(slot)
    assert process.wait(20) < 0
    listener.close()
