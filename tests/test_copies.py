"""What copies of a batch lack: each loss is found where it is made, and plain batches have none."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.data.runtime.copies import lacking

KEPT, KEPT_TENSOR, KEPT_ARRAY, KEPT_RECORD = object(), torch.zeros(3), np.zeros(6), {"a": 1}
Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Record:
    x: object = None
    more: list = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    x: object = None


def weighted():
    row = torch.zeros(3)
    row.weight = 2
    return row


def read_only():
    row = np.zeros(3)
    row.flags.writeable = False
    return row


def two_views():
    row = np.zeros(6)
    return [row[:3], row[3:]]


def hooked():
    row = torch.zeros(3, requires_grad=True)
    row.register_hook(print)
    return row


LEAVES = (torch.zeros, np.zeros, Record, Slotted, lambda n: n, lambda n: "a" * n, lambda n: Colour.RED, np.float32)
fresh = st.recursive(
    st.tuples(st.sampled_from(LEAVES), st.integers(0, 3)).map(lambda pair: lambda: pair[0](pair[1])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda makes: lambda: [make() for make in makes]),
        st.lists(inner, max_size=3).map(lambda makes: lambda: tuple(make() for make in makes)),
        st.lists(inner, max_size=3).map(lambda makes: lambda: {k: make() for k, make in enumerate(makes)}),
        st.tuples(inner, inner).map(lambda makes: lambda: Pair(makes[0](), makes[1]())),
        inner.map(lambda make: lambda: Record(make())),
        inner.map(lambda make: lambda: Slotted(make())),
    ),
    max_leaves=12,
)
"""Functions that make a batch to which nobody else refers."""


@given(fresh)
def test_copies_of_what_nobody_else_refers_to_lack_nothing(make):
    assert lacking([make()]) is None


@given(fresh, st.sampled_from([KEPT, KEPT_TENSOR, KEPT_ARRAY, KEPT_RECORD]))
def test_what_was_there_before_is_found_beside_any_batch(make, kept):
    assert lacking([[make(), {"row": [kept]}]]) is not None


LOST = {
    "attribute": weighted,
    "hook": hooked,
    "history": lambda: torch.zeros(3, requires_grad=True) * 2,
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "read-only": read_only,
    "views": two_views,
    "view of what is kept": lambda: KEPT_ARRAY[:3],
    "array and tensor": lambda: (lambda row: [row, torch.from_numpy(row)])(np.zeros(3)),
    "gaps": lambda: np.zeros((4, 4))[:, ::2],
    "lock": lambda: Record(threading.Lock()),
}


@pytest.mark.parametrize("name", LOST)
def test_each_loss_is_found(name):
    assert lacking([[torch.zeros(2), LOST[name]()]]) is not None


def test_an_object_that_comes_twice_stays_one_and_is_no_loss():
    def twice():
        row = torch.zeros(3)
        return [row, {"again": row}]

    assert lacking([twice()]) is None


@pytest.mark.parametrize("value", [Ellipsis, NotImplemented, OrderedDict, len, np.dtype("f4"), torch.float32])
def test_what_pickling_has_by_its_name_may_be_kept_by_others(value):
    assert lacking([[value]]) is None


def test_a_class_with_pickling_of_its_own_is_copied_to_see():
    class Odd:
        def __reduce__(self):
            raise TypeError("not this one")

    assert lacking([Odd()]) is not None
    assert lacking([defaultdict(int, a=1)]) is None
