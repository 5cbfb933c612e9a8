"""Heads of safetensors files: what the library writes is read, what breaks a rule is refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import save

from headway.core.errors import FormatError
from headway.storage.formats.safetensors import is_safetensors, read_header
from headway.storage.formats.values import FROM_SAFETENSORS


def file_of(header: object, data: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


@pytest.mark.parametrize("kind", sorted({*FROM_SAFETENSORS.values()} - {"float8_e4m3fnuz", "float8_e5m2fnuz"}))
def test_what_the_library_writes_is_read(kind):
    tensor = torch.zeros(3, 4).to(getattr(torch, kind))
    data = save({"a": tensor, "b": torch.arange(2)}, {"note": "x"})

    header = read_header(data, len(data), "x.safetensors")

    assert is_safetensors(data, len(data))
    assert (header.tensors["a"].dtype, header.tensors["a"].shape) == (kind, (3, 4))
    at = header.tensors["b"]
    assert struct.unpack("<2q", data[at.offset : at.offset + at.num_bytes]) == (0, 1)
    assert header.metadata == {"note": "x"}


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "cut short": (file_of({"w": F32}, bytes(7)), "its tensors end at"),
    "left over": (file_of({"w": F32}, bytes(9)), "its tensors end at"),
    "gap": (file_of({"w": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "'w' begins at"),
    "overlap": (file_of({"w": F32, "v": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "where the one before it ends"),
    "size": (file_of({"w": {**F32, "shape": [3]}}, bytes(8)), r"'w' has 8 bytes; F32 \[3\] needs 12"),
    "dtype": (file_of({"w": {**F32, "dtype": "F99"}}, bytes(8)), "dtype 'F99', which headway does not know"),
    "json": (file_of(b"{nonsense"), "header that cannot be read"),
    "no tensors": (file_of([1, 2]), "header that cannot be read"),
    "long": (struct.pack("<Q", 1 << 40) + b"{}", "has a header of 1099511627776 bytes"),
    "empty": (b"", "has a header of -1 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_breaks_a_rule_is_refused_with_the_rule(name):
    data, message = BROKEN[name]

    with pytest.raises(FormatError, match=message):
        read_header(data, len(data), "x.safetensors")
