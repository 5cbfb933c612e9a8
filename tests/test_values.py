"""Values that are no tensors: told in short, and told apart."""

import argparse
import io
import os
from collections import OrderedDict
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

from headway.core.errors import FormatError
from headway.core.files.inert import StandIn
from headway.storage.formats.records import is_legacy, read_legacy, read_saved
from headway.storage.formats.values import StoredValue
from tests.checkpoints import Caller


def values_of(value: object, new: bool = True) -> dict[str, StoredValue]:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=new)
    data = file.getvalue()
    saved = (read_legacy if is_legacy(data) else read_saved)(data, "x.pt")
    return {one.name: one for one in saved.values}


STATE = {
    "model": {"w": torch.zeros(2)}, "epoch": 7, "lr": 1e-3, "best": float("nan"), "name": "a\n\x1b[31m", "none": None,
    "config": {"layers": [1, 2, 3], "deep": {"flag": True}, "empty": {}}, "groups": [{"lr": 0.1}, {"lr": 0.2}],
    "bytes": b"\0\1", "args": argparse.Namespace(data="/x"), "dtype": torch.float16, "size": torch.Size([2, 3]),
    "path": PurePosixPath("/a/b"), "array": np.arange(3), "ordered": OrderedDict(a=1),
}  # fmt: skip


PARTS = ", ".join(map(repr, PurePosixPath("/a/b").__reduce__()[1]))  # Python 3.13 pickles a path as one text
"""Text of the path in `STATE`."""


@pytest.mark.parametrize("new", [True, False])
def test_values_are_told_by_name_type_and_short_text(new):
    told = {name: (value.kind, value.text) for name, value in values_of(STATE, new).items()}

    assert told == {
        "epoch": ("int", "7"), "lr": ("float", "0.001"), "best": ("float", "nan"),
        "name": ("str", r"'a\n\x1b[31m'"), "none": ("NoneType", "None"), "config.layers": ("list", "[1, 2, 3]"),
        "config.deep.flag": ("bool", "True"), "config.empty": ("dict", "{}"), "groups.0.lr": ("float", "0.1"),
        "groups.1.lr": ("float", "0.2"), "bytes": ("bytes", r"b'\x00\x01'"), "args.data": ("str", "'/x'"),
        "dtype": ("torch.float16", ""), "size": ("torch.Size", "(2, 3)"),
        "path": (f"{PurePosixPath.__module__}.PurePosixPath", PARTS), "array": ("numpy.ndarray", ""),
        "ordered.a": ("int", "1"),
    }  # fmt: skip


def test_long_values_are_cut_on_a_screen_and_whole_where_they_are_compared():
    text, other, data = (
        StoredValue("t", "x" * 100_000),
        StoredValue("t", "x" * 99_999 + "y"),
        StoredValue("b", b"y" * 3000),
    )

    assert len(text.text) < 80
    assert text.digest != other.digest
    assert data.text.endswith("... 3000 bytes")
    assert StoredValue("l", list(range(10_000))).text == "[0, 1, 2, 3, 4, 5, ...]"


def test_numbers_text_and_truth_stay_what_they_are_in_json():
    plain = [7, 0.5, True, None, "text"]

    assert [StoredValue("x", value).to_json()["value"] for value in plain] == plain
    assert StoredValue("x", [1, 2]).to_json() == {"name": "x", "type": "list", "value": "[1, 2]"}


def test_equal_values_are_told_alike_and_unlike_ones_apart():
    whole = [
        value.digest for value in values_of([{3, 1, 2}, {2, 1, 3}, np.arange(3), np.arange(3), np.ones(3)]).values()
    ]

    assert whole[0] == whole[1]
    assert whole[2] == whole[3] != whole[4]


@pytest.mark.parametrize("new", [True, False])
def test_what_a_pickle_would_call_is_told_and_not_called(tmp_path, new):
    value = values_of({"e": Caller(f"touch {tmp_path / 'ran'}")}, new)["e"]

    assert (value.kind, value.value.args) == (f"{os.name}.system", (f"touch {tmp_path / 'ran'}",))
    assert not (tmp_path / "ran").exists()


def test_an_object_that_holds_itself_is_told():
    holder = StandIn()
    holder.args = (holder,)

    assert StoredValue("x", holder).digest == StoredValue("x", holder).digest
    assert StoredValue("x", holder).text == ""


@pytest.mark.slow
def test_containers_in_containers_without_end_are_refused():
    bomb: list = [None, {}]
    for _ in range(40):
        bomb = [bomb, bomb]

    with pytest.raises(FormatError, match="more room than its bytes can fill"):
        values_of(bomb)


def test_a_file_that_is_one_value_tells_it_without_a_name():
    assert list(values_of(5).values()) == [StoredValue("", 5)]
