"""What torch.save files hold, told without torch and held to what torch loads."""

import io
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from headway.core.errors import FormatError
from headway.storage.formats.records import is_legacy, read_legacy, read_saved
from headway.storage.formats.values import ITEM_BYTES

FORMS = {"zip": True, "legacy": False}


def written(value: object, form: str) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=FORMS[form])
    return file.getvalue()


def read(data: bytes):
    return (read_legacy if is_legacy(data) else read_saved)(data, "x.pt")


KINDS = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
NEW = ["uint16", "uint32", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS + NEW)
def test_the_bytes_of_a_tensor_of_any_dtype_are_found(kind, form):
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, kind))
    data = written({"a": [tensor]}, form)

    saved = read(data)
    start, size = saved.place_of(saved.tensors[0])

    expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert [(t.fqn, t.dtype, t.shape, t.strides) for t in saved.tensors] == [("a.0", kind, (4, 6), (6, 1))]
    assert data[start : start + size] == expected
    assert size == 24 * ITEM_BYTES[kind]


def test_item_sizes_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES if hasattr(torch, name)} == {
        name: size for name, size in ITEM_BYTES.items() if hasattr(torch, name)
    }


@pytest.mark.parametrize("form", FORMS)
def test_views_tied_tensors_scalars_and_empty_ones_are_told_as_torch_has_them(form):
    base = torch.arange(12.0).reshape(3, 4)
    state = OrderedDict(
        base=base, turned=base.t(), tail=base[1:], tied=base, one=torch.tensor(2.5), none=torch.zeros(0, 3)
    )
    data = written(state, form)

    saved = read(data)
    found = {t.fqn: t for t in saved.tensors}

    assert {name: (t.shape, t.strides) for name, t in found.items()} == {
        name: (tuple(t.shape), t.stride()) for name, t in state.items()
    }
    assert len({found[name].storage for name in ("base", "turned", "tail", "tied")}) == 1
    start, size = saved.place_of(found["tail"])
    assert np.frombuffer(data[start : start + size], np.float32).tolist() == base[1:].flatten().tolist()
    assert saved.names_of_storages()[found["base"].storage] == "base, turned, tail, tied"
    with pytest.raises(FormatError, match="elements of 'turned' are no row-major run"):
        saved.place_of(found["turned"])


@pytest.mark.parametrize("form", FORMS)
def test_whole_modules_and_parameters_are_named_as_their_state_dict_has_them(form):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    saved = read(written(model, form))

    assert sorted(t.fqn for t in saved.tensors) == sorted(model.state_dict())


def test_a_container_that_holds_itself_ends():
    state: dict = {"w": torch.zeros(2)}
    state["me"] = state

    assert [t.fqn for t in read(written(state, "zip")).tensors] == ["w"]


def test_a_legacy_file_cut_short_or_too_long_is_refused():
    data = written({"w": torch.arange(5.0)}, "legacy")

    for broken in (data[:-1], data[:-25], data + b"x"):
        with pytest.raises(FormatError, match=r"x.pt"):
            read_legacy(broken, "x.pt")


def test_another_programs_zip_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")

    with pytest.raises(FormatError, match=r"not torch.save's: it holds no data.pkl"):
        read_saved(file.getvalue(), "x.pt")


def test_a_legacy_file_whose_storage_has_a_negative_size_is_refused():
    data = bytearray(written({"w": torch.arange(5.0)}, "legacy"))
    data[-5 * 4 - 1] |= 0x80  # the sign of the number of elements, which stands before them

    with pytest.raises(FormatError, match=r"has -\d+ elements"):
        read_legacy(bytes(data), "x.pt")
