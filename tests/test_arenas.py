"""The memory of snapshots: which image a save takes, and how seldom one is made."""

import threading
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway
from headway.checkpoint import engine
from headway.checkpoint.saves import image as images
from headway.checkpoint.saves import saver
from headway.checkpoint.saves.arenas import Arenas
from headway.checkpoint.saves.image import Part, pinned_pieces
from tests.test_engine import Every

PARTS = (Part("w", torch.float32, (3,), (0,), (3,)),)


def test_a_save_takes_no_image_that_is_busy_and_the_committed_one_last():
    arenas = Arenas(3)
    taken = [
        arenas.take(PARTS, 0, busy=busy, spare=spare)[0]
        for busy, spare in [(set(), None), ({0}, None), (set(), 0), ({1, 2}, 0), ({0, 1}, 2)]
    ]
    arenas.close()

    assert taken == [0, 1, 1, 0, 2]


def test_objects_that_grow_at_every_save_seldom_need_an_image_anew():
    arenas = Arenas(1)
    images = [arenas.take(PARTS, 70_000 * number, busy=set(), spare=None)[1] for number in range(60)]
    num_made = 1 + sum(earlier is not later for earlier, later in pairwise(images))
    room = images[-1].tail_bytes
    arenas.close()

    assert num_made <= 15
    assert 59 * 70_000 <= room <= 1.5 * 59 * 70_000


def test_an_image_for_other_parts_keeps_the_elements_that_both_have():
    arenas = Arenas(1)
    number, image = arenas.take(PARTS, 0, busy=set(), spare=None)
    image.slots[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
    arenas.untold.clear()
    other = arenas.carry(number, (Part("v", torch.int8, (2,), (0,), (2,)), *PARTS), 0)
    kept = other.slots[1].tolist()
    arenas.close()

    assert (kept, arenas.untold) == ([1.0, 2.0, 3.0], {number})


@given(st.lists(st.integers(1, 40_000), max_size=20), st.sampled_from([4096, 10_000, 50_000]), st.integers(0, 9))
def test_memory_is_registered_in_pieces_that_no_record_lies_across(lengths, most, tail):
    slots, at = [], 0
    for length in lengths:
        slots.append(SimpleNamespace(record_offset=at, record_bytes=length))
        at = images.aligned(at + length)
    pieces = pinned_pieces(slots, at + 4096 * tail, most_bytes=most, page_bytes=4096)
    starts = [offset for offset, _ in pieces]

    assert starts[0] == 0
    assert [offset + length for offset, length in pieces] == [*starts[1:], at + 4096 * tail]
    for slot in slots:
        end = slot.record_offset + slot.record_bytes
        assert any(offset <= slot.record_offset and end <= offset + length for offset, length in pieces)
    for offset, length in pieces[:-1]:
        held = [slot for slot in slots if offset <= slot.record_offset < offset + length]
        assert len(held) == 1 or held[-1].record_offset + held[-1].record_bytes - offset <= most


@pytest.fixture
def registered(monkeypatch):
    """Have memory registered with a made CUDA in pieces of 8 KiB; returns the names of the threads that did it."""
    names = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *_: names.append(threading.current_thread().name) or 0,
        cudaHostUnregister=lambda *_: None,
    )
    monkeypatch.setattr(images, "_CUDA", SimpleNamespace(device=nullcontext, cudart=lambda: cudart))
    monkeypatch.setattr(images, "pinned_pieces", partial(pinned_pieces, most_bytes=8192))
    return names


def test_memory_is_pinned_in_a_thread_that_a_capture_stops_between_two_pieces(registered, monkeypatch):
    parts = tuple(Part(f"w{k}", torch.float32, (2000,), (0,), (2000,)) for k in range(6))
    arenas = Arenas(2, pin=torch.device("cpu"))
    arenas.prepare(parts, 0)
    arenas._thread.join()
    assert arenas.take(parts, 0, busy=set(), spare=None)[1].is_pinned
    num_pieces = len(registered)
    arenas.close()

    assert set(registered) == {"headway-images"}
    halted, append = Arenas(2, pin=torch.device("cpu")), registered.append
    registered.clear()

    def stop(name):
        append(name)
        if len(registered) == 2:
            threading.Thread(target=halted.halt).start()
            halted._is_halted.wait(10)

    cudart = SimpleNamespace(
        cudaHostRegister=lambda *_: stop(threading.current_thread().name) or 0, cudaHostUnregister=lambda *_: None
    )
    monkeypatch.setattr(images, "_CUDA", SimpleNamespace(device=nullcontext, cudart=lambda: cudart))
    halted.prepare(parts, 0)
    if (pinning := halted._thread) is not None:  # else it has ended
        pinning.join()
    assert registered == ["headway-images"] * 2
    taken = [halted.take(parts, 0, busy=set(range(number)), spare=None)[1] for number in range(2)]
    assert [image.is_pinned for image in taken] == [False, False]
    assert registered == ["headway-images"] * 2, "the training thread does not wait for the driver"
    halted.resume()
    if (pinning := halted._thread) is not None:  # else it has ended
        pinning.join()
    halted.close()
    assert registered == ["headway-images"] * num_pieces


@pytest.mark.parametrize("captures", [False, True])
def test_the_memory_of_the_first_save_is_pinned_before_it_is_due(registered, monkeypatch, tmp_path, captures):
    monkeypatch.setattr(saver, "in_use", lambda: True)
    monkeypatch.setattr(saver, "cuda_device_of", lambda tensors: torch.device("cpu"))
    monkeypatch.setattr(engine, "host_has_devices", lambda: True)
    monkeypatch.setattr(torch.cuda.graphs.CUDAGraph, "capture_begin", lambda graph: None)
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), momentum=0.9)
    with headway.Checkpointer(tmp_path, model=model, opt=opt, policy=Every(4)) as ckpt:
        ckpt.attach(opt)
        for _ in range(3):
            model(torch.ones(3)).sum().backward()
            opt.step()
        if captures:
            torch.cuda.graphs.CUDAGraph.capture_begin(None)

            assert ckpt._saver._arenas._thread is None, "the capture began beside the thread"
        else:
            ckpt._saver._arenas._thread.join()
            assert registered
        opt.step()
        ckpt.wait()
        assert ckpt.restore().step == 4
    assert set(registered) <= {"headway-images"}
