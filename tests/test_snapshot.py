"""Copies of the state into an image."""

from __future__ import annotations

import pytest
import torch

from headway.checkpoint.runtime.snapshot import Snapshot

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


@pytest.mark.parametrize("threads", [1, 2])
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
