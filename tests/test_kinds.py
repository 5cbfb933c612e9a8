"""Which types a look reads whole: laws over many types, and what ordinary datasets hold stays readable."""

from __future__ import annotations

import contextvars
import csv
import ctypes
import datetime
import decimal
import enum
import functools
import hashlib
import io
import itertools
import mmap
import multiprocessing
import operator
import queue
import re
import struct
import threading
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headway.data.runtime.aligned import out_of_sight
from headway.data.runtime.contents import contents
from headway.data.runtime.kinds import is_readable, unreadable
from headway.runtime.reach import reached


class Colour(enum.IntEnum):
    RED = 1


@dataclass(slots=True)
class Slotted:
    level: int = 0


class Holder:
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 3


def rows():
    yield 1


ORDINARY = [
    3, "text", b"bytes", None, 2.5, True, Colour.RED, Slotted(), namedtuple("Pair", "a b")(1, 2), {1: 2}, [1],
    (1,), {1}, deque([1]), OrderedDict(), defaultdict(list), Counter("aab"), array("i"), bytearray(2),
    memoryview(b"ab"), range(3), types.MappingProxyType({}), types.SimpleNamespace(a=1), {}.keys(), {}.get, len,
    str.join, rows, Holder, Holder(1), functools.partial(len), functools.lru_cache(len), operator.itemgetter(1),
    re.compile("a"), struct.Struct("i"), datetime.datetime(2020, 1, 1), decimal.Decimal(1), Path("a"),
    io.BytesIO(b"ab"), io.StringIO("ab"), threading.Lock(), threading.RLock(), threading.local(),
    threading.Event(), queue.Queue(), contextvars.ContextVar("level"), ctypes.c_int(3), (ctypes.c_int * 3)(),
    ValueError("a"), Image.new("RGB", (2, 2)), torch.float32, torch.device("cpu"), torch.Size([1]),
    torch.zeros(2), torch.zeros(2, 2).t(), torch.nn.Linear(2, 2), torch.Generator(), torch.relu,
    torch.eye(3).to_sparse(), torch.zeros(2).untyped_storage(), torch.zeros(2).max(0), np.zeros(2),
    np.float32(1), np.dtype("f4"), np.stack, np.add, np.random.default_rng(0), np.random.PCG64(1),
    np.random.RandomState(1), np.ma.zeros(2), np.zeros(2, [("a", "i4")]), torch.nn.functional.relu, print,
]  # fmt: skip


@pytest.mark.parametrize("held", ORDINARY, ids=lambda held: type(held).__name__)
def test_what_ordinary_datasets_hold_can_be_read(held):
    assert out_of_sight(Holder(held)) is None


HIDDEN = {
    "writer": lambda: csv.writer(io.StringIO()),
    "digest": hashlib.sha256,
    "queue": queue.SimpleQueue,
    "iterator": itertools.count,
    "generator": rows,
    "file": lambda: mmap.mmap(-1, 16),
    "shared value": lambda: multiprocessing.Value("i"),
    "shared array": lambda: np.frombuffer(multiprocessing.RawArray("q", 1), np.int64),
    "shared tensor": lambda: torch.zeros(2).share_memory_(),
    "shared queue": multiprocessing.Queue,
    "pointer": lambda: ctypes.pointer(ctypes.c_int(3)),
    "library": lambda: ctypes.CDLL(None),
    "subclass in C": lambda: type("Stream", (itertools.count,), {})(),
}


@pytest.mark.parametrize("deep", [False, True], ids=["near", "in a long list"])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_has_state_of_its_own_in_c_or_elsewhere_is_refused(name, deep):
    held = HIDDEN[name]()

    if deep and isinstance(held, (np.ndarray, torch.Tensor)):
        pytest.skip("entries of long lists are known by what is in them")
    assert out_of_sight(Holder([*range(500), held] if deep else held)) is not None


def test_shared_memory_is_refused():
    memory = SharedMemory(create=True, size=16)
    try:
        assert "cannot be seen" in out_of_sight(Holder(memory))
    finally:
        memory.close()
        memory.unlink()


def test_attributes_and_slots_of_a_class_are_no_memory_of_its_own():
    class Both:
        __slots__ = ("__dict__", "__weakref__", "level")

    class Inside(dict):
        pass

    assert all(map(is_readable, (Both, Inside, Slotted)))


def test_a_type_that_is_not_listed_does_not_count_as_readable():
    assert not [value for value, _ in reached(*ORDINARY) if unreadable(value)]
    assert unreadable(np.frompyfunc(len, 1, 1))
    assert not is_readable(type(iter([])))


def test_a_tokenizer_is_looked_at_by_its_settings():
    tokenizers = pytest.importorskip("tokenizers")
    one = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    found = [contents([one])]
    one.enable_truncation(1)
    found.append(contents([one]))
    one.add_tokens(["c"])
    found.append(contents([one]))

    assert is_readable(type(one))
    assert len({str(each) for each in found}) == 3
    assert contents([one]) == found[-1]
