"""Copies of the state into an image."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from headway.checkpoint.saves import snapshot as snapshots
from headway.checkpoint.saves.image import Image, Part, cuda_device_of, plan
from headway.checkpoint.saves.snapshot import Snapshot
from headway.runtime.torch_state import STREAMED_THREADS

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_tensors_of_the_host_are_copied_on_return_whatever_their_strides():
    source = torch.arange(12.0).reshape(3, 4).t()
    slot = torch.zeros(4, 3)
    snapshot = Snapshot()
    snapshot.copy([(slot, source)], settled=lambda tensor: False)
    expected = source.clone()
    source.zero_()

    assert torch.equal(slot, expected)
    assert snapshot.is_ready()
    snapshot.fence(), snapshot.wait()
    assert snapshot.better_mode() == "host"


def test_a_conjugated_view_is_copied_as_its_value():
    source = torch.tensor([1 + 2j, 3 - 4j])
    slot = torch.zeros(2, dtype=torch.complex64)

    Snapshot().copy([(slot, source.conj())], settled=lambda tensor: True)

    assert slot.tolist() == [1 - 2j, 3 + 4j]


LARGE = (300, 1000)

SOURCES = {
    "plain": lambda: torch.randn(LARGE),
    "rows from the middle": lambda: torch.randn(LARGE)[7:],
    "parameter": lambda: torch.nn.Parameter(torch.randn(LARGE)).detach(),
    "columns": lambda: torch.randn(LARGE)[:, 3:],
    "transposed": lambda: torch.randn(LARGE).t(),
    "conjugated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(LARGE, dtype=torch.bfloat16),
    "bool": lambda: torch.randn(LARGE) > 0,
    "expanded": lambda: torch.randn(300, 1).expand(LARGE),
}


@pytest.mark.parametrize("threads", [1, STREAMED_THREADS + 1])
@pytest.mark.parametrize("kind", SOURCES)
def test_large_tensors_are_copied_bit_for_bit(kind, threads):
    source, before = SOURCES[kind](), torch.get_num_threads()
    slot = torch.zeros(source.numel() + 8, dtype=source.dtype)[3:-5].view(source.shape)

    torch.set_num_threads(threads)
    try:
        Snapshot().copy([(slot, source)], settled=lambda tensor: True)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(slot, source)


class Pool:
    """A pool of a made allocator; the allocator notes which pools are still referred to."""

    alive = 0

    def __init__(self):
        Pool.alive += 1

    def __del__(self):
        Pool.alive -= 1


def test_a_copy_inside_of_a_device_lies_in_a_pool_of_its_own_that_is_gone_after_the_save(monkeypatch):
    inside, taken = [], []

    @contextmanager
    def use_mem_pool(pool, device):
        inside.append(pool)
        yield
        inside.remove(pool)

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000, 10_000))
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: taken.append(len(inside)) or tensor.detach())
    device, event = torch.device("cuda", 0), SimpleNamespace()
    copy = snapshots._DeviceCopy(device, 20, event, event, event, 0.0)
    copy.clones, copy.pool = snapshots._clones([torch.ones(100), torch.ones(100)], device)
    snapshot = Snapshot("device")
    snapshot._copies.append(copy)

    assert (taken, Pool.alive, len(copy.clones)) == ([1, 1], 1, 2)
    snapshot.release()
    assert (Pool.alive, copy.clones) == (0, [])
    assert snapshots._clones([torch.ones(201)], device) == ([], None)  # 2 % of all stay free: no caches are emptied


@pytest.mark.parametrize(("free", "state", "mode"), [(500, 299, "device"), (500, 300, "host"), (200, 1, "host")])
def test_a_device_is_filled_up_to_eighty_percent_where_the_mode_is_chosen(monkeypatch, free, state, mode):
    """By what the driver has free: what torch has reserved, and not allocated between steps, is the next forward's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 1000))
    began = SimpleNamespace(elapsed_time=lambda done: 5000.0)
    copy = snapshots._DeviceCopy(torch.device("cuda", 0), state, began, began, began, 0.0)

    assert snapshots.mode_for(torch.device("cuda", 0), state) == mode
    assert copy.better_mode() == mode


def test_a_state_on_the_host_touches_no_device():
    assert cuda_device_of([torch.ones(1), torch.ones(2)]) is None


@on_gpu
@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_copy_that_nobody_waits_for_has_the_value_of_a_lazy_sign(mode):
    source = torch.randn(1 << 20, dtype=torch.complex64, device="cuda").conj()
    slot = torch.zeros(1 << 20, dtype=torch.complex64).pin_memory()
    snapshot = Snapshot(mode)
    snapshot.copy([(slot, source)], settled=lambda tensor: True)
    snapshot.wait()

    assert torch.equal(slot, source.cpu())


@on_gpu
def test_an_image_is_pinned_for_the_device_of_the_state_until_it_is_closed():
    source = torch.randn(1 << 20, device="cuda")
    image = Image(plan([Part("w", source.dtype, (1 << 20,), (0,), (1 << 20,))]), tail_bytes=0, pin=source.device)
    image.pin()
    snapshot = Snapshot()
    snapshot.copy([(image.slots[0], source)], settled=lambda tensor: True)
    snapshot.wait()

    assert image.slots[0].is_pinned()
    assert torch.equal(image.slots[0], source.cpu())
    image.close()


@on_gpu
@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_device_copies_beside_the_computation_and_later_work_waits_for_it(mode):
    weight, buffer = torch.ones(1 << 22, device="cuda"), torch.ones(1 << 22, device="cuda")
    slots = [torch.zeros(1 << 22).pin_memory() for _ in range(2)]
    snapshot = Snapshot(mode)
    snapshot.copy(list(zip(slots, (weight, buffer), strict=True)), settled=lambda tensor: tensor is weight)
    buffer.add_(1)  # a forward changes it at once
    snapshot.fence()
    weight.add_(1)  # the update
    snapshot.wait()

    assert all(bool((slot == 1).all()) for slot in slots)
    assert snapshot.better_mode() in ("host", "device")
