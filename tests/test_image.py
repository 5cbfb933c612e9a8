"""The image of a rank's file in memory is what torch would have written."""

import io
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.agent.saving import payloads, persist
from headway.checkpoint.saves import image as images
from headway.checkpoint.saves.image import RECORD_BYTES, Image, Part, fits_torch, locate, pickled, plan, template
from headway.core.errors import FormatError, HeadwayError
from headway.core.wire.pace import RateLimiter

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def part(name: str, tensor: torch.Tensor) -> Part:
    return Part(name, tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with arbitrary bits."""
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def stored(tensors: list[torch.Tensor], *, rendered: bool = False) -> tuple[bytes, Image]:
    """Return what is persisted of tensors, and the image."""
    made = Image(plan([part(str(k), t) for k, t in enumerate(tensors)], rendered=rendered), tail_bytes=0)
    for slot, tensor in zip(made.slots, tensors, strict=True):
        slot.copy_(tensor)
    made.render()
    file = io.BytesIO()
    persist(made.memory[: made.plan.num_bytes], payloads(made.plan.slots), file, RateLimiter())
    return file.getvalue(), made


@pytest.mark.slow
@pytest.mark.parametrize("rendered", [False, True], ids=["laid out", "rendered"])
@given(kinds=st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=5))
def test_every_record_loads_bit_for_bit_and_its_checksums_hold(rendered, kinds):
    tensors = [some(dtype, shape) for dtype, shape in kinds]

    data, image = stored(tensors, rendered=rendered)

    for slot, tensor in zip(image.plan.slots, tensors, strict=True):
        record = data[slot.record_offset : slot.record_offset + slot.record_bytes]
        loaded = torch.load(io.BytesIO(record), weights_only=True)
        assert slot.record_offset % RECORD_BYTES == slot.payload_offset % 64 == 0
        assert zipfile.ZipFile(io.BytesIO(record)).testzip() is None
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert pickled(loaded) == pickled(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_record_is_byte_for_byte_what_torch_writes_but_for_torchs_own_serial_number(dtype):
    tensor = some(dtype, (3, 5))
    data, image = stored([tensor])

    ours, theirs = (
        zipfile.ZipFile(io.BytesIO(bytes)) for bytes in (data[: image.plan.slots[0].record_bytes], pickled(tensor))
    )

    assert ours.namelist() == theirs.namelist()
    different = [name for name in ours.namelist() if ours.read(name) != theirs.read(name)]
    assert different == ["archive/.data/serialization_id"]


def test_laying_out_a_tensor_beyond_four_gibibytes_takes_no_memory_for_it():
    laid = plan([Part("w", torch.bfloat16, (3 << 30,), (0,), (3 << 30,))])

    assert laid.slots[0].payload_bytes == 6 << 30
    assert sum(len(piece) for _, piece in template(torch.bfloat16, (3 << 30,)).fragments) < 4096
    assert min(laid.slots[0].crc_offsets) > 6 << 30


def test_the_installed_torch_reads_images_back():
    assert fits_torch()


def test_a_torch_that_writes_otherwise_is_noticed(monkeypatch):
    monkeypatch.setattr(images, "_DESCRIPTOR", b"nope")
    template.cache_clear()

    with pytest.raises(FormatError, match=r"without a data descriptor. Use a torch from 2.6 on"):
        template(torch.float32, (2,))
    assert not fits_torch.__wrapped__()
    with pytest.raises(FormatError, match=r"no zip"):
        locate(io.BytesIO(b"not a zip"))


def test_objects_go_behind_the_slots_as_long_as_there_is_room():
    laid = plan([part("w", torch.ones(3))])
    image = Image(laid, tail_bytes=2 * RECORD_BYTES)

    assert image.place([b"a" * 10, b"b" * 4096]) == [laid.num_bytes, laid.num_bytes + RECORD_BYTES]
    assert bytes(image.memory[laid.num_bytes : laid.num_bytes + 11]) == b"a" * 10 + b"\0"
    assert image.place([b"a" * 10, b"b" * 4097]) is None


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(images.os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))

    with pytest.raises(HeadwayError, match=r"bytes of host memory for a snapshot \(No space left\)"):
        Image(plan([part("w", torch.ones(3))]), tail_bytes=0)


@pytest.mark.parametrize(("code", "calls"), [(0, ["register", "unregister"]), (2, ["register"])])
def test_memory_is_registered_with_cuda_once_and_taken_back_only_where_that_worked(monkeypatch, code, calls):
    seen, host = [], torch.device("cpu")
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *what: seen.append(("register", *what)) or code,
        cudaHostUnregister=lambda *what: seen.append(("unregister", *what)),
    )
    monkeypatch.setattr(images, "_CUDA", SimpleNamespace(device=nullcontext, cudart=lambda: cudart))
    image = Image(plan([Part("w", torch.float32, (5,), (0,), (5,))]), tail_bytes=0, pin=host)
    image.pin()
    start, num_bytes = image.slots[0].data_ptr() - image.plan.slots[0].payload_offset, image.num_bytes
    image.close()

    assert [name for name, *_ in seen] == calls
    assert seen[0][1:] == (start, num_bytes, 0)
    assert all(where == start for _, where, *_ in seen)
