"""What is collated without torch is what torch's default collate function makes; the rest is left to torch."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import default_collate

from headway.data.bytes.packing import collated, pack, unpack
from headway.data.bytes.torch_examples import equal
from headway.data.service.torch_preparers import plain, restored

Point = namedtuple("Point", ["x", "y"])
DTYPES = st.sampled_from([np.uint8, np.int64, np.float32, np.float64, np.bool_, np.complex64])


@st.composite
def shapes_of_examples(draw):
    """Return a function that makes examples of one structure, as a dataset does."""
    kind = draw(st.sampled_from(["int", "float", "bool", "str", "array", "scalar", "tensor", "bfloat16", "more"]))
    if kind == "more":
        parts = draw(st.lists(shapes_of_examples(), min_size=1, max_size=3))
        make = draw(st.sampled_from([list, tuple, dict]))
        if make is dict:
            return lambda k: {f"key{n}": part(k) for n, part in enumerate(parts)}
        return lambda k: make(part(k) for part in parts)
    shape, dtype = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3)), draw(DTYPES)
    return {
        "int": lambda k: k, "float": lambda k: k / 3, "bool": lambda k: k % 2 == 0, "str": str,
        "array": lambda k: np.full(shape, k).astype(dtype), "scalar": lambda k: dtype(k),
        "tensor": lambda k: torch.from_numpy(np.full(shape, k).astype(dtype)),
        "bfloat16": lambda k: torch.full(shape, k, dtype=torch.bfloat16),
    }[kind]  # fmt: skip


def through_a_slot(examples):
    """What a server and its client make of examples."""
    sent = [unpack(pack(plain(example)).to_bytes()) for example in examples]
    tree = collated(sent)
    return None if tree is None else unpack(pack(tree).to_bytes(), marked=restored)


@given(shapes_of_examples(), st.integers(1, 4))
def test_a_batch_is_torchs_own(make, count):
    examples = [make(k) for k in range(count)]

    assert equal(through_a_slot(examples), default_collate(examples))


def test_named_tuples_keep_their_names():
    batch = through_a_slot([Point(k, torch.ones(2)) for k in range(3)])

    assert batch._fields == ("x", "y")
    assert batch.x.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "examples",
    [
        [], [None, None], [1, 2.5], [1 << 70, 1], [torch.zeros(2), torch.zeros(3)],
        [np.zeros(2, np.float32), np.zeros(2)], [np.array("text")], [{"a": 1}, {"b": 1}], [(1, 2), (1,)],
        [torch.zeros(2), np.zeros(2)], [np.zeros(2, np.longdouble)],
    ],
    ids=str,
)  # fmt: skip
def test_what_torch_refuses_or_decides_by_rules_of_its_own_is_left_to_torch(examples):
    assert collated([unpack(pack(plain(example)).to_bytes()) for example in examples]) is None


def test_rows_are_not_copied_before_they_are_written():
    rows = [np.zeros((3, 3)), np.ones((3, 3))]
    parcel = pack(collated(rows))

    assert all(source.rows[k] is rows[k] for _, source in parcel.parts for k in range(2))
