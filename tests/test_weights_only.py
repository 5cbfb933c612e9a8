"""What torch's `weights_only` loading refuses, held to torch itself."""

import argparse
import collections
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.tensor
from torch._weights_only_unpickler import _get_allowed_globals

from headway.storage.formats.records import is_legacy, read_legacy, read_saved
from headway.storage.formats.safe_pickle import LOADABLE, refused, what_runs
from tests.checkpoints import Caller

OURS = {f"{module}.{name}" for module, names in LOADABLE.items() for name in names}


def test_whatever_torch_allows_is_allowed():
    assert set(_get_allowed_globals()) <= OURS


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the list is of torch 2.13")
def test_nothing_else_is_allowed_but_what_torch_adds_for_sharded_tensors():
    added = {f"{one.__module__}.{one.__name__}" for one in torch.serialization.get_safe_globals()}

    assert set(_get_allowed_globals()) | added >= OURS


VALUES = {
    "tensors": {"w": torch.zeros(2), "h": torch.zeros(2).half(), "p": torch.nn.Parameter(torch.zeros(1))},
    "plain": {"lr": 0.1, "b": b"xy", "s": {1, 2}, "n": None, "c": 1j, "o": collections.OrderedDict(a=1)},
    "torch's own": [torch.Size([2]), torch.float16, torch.device("cpu"), collections.Counter("ab")],
    "a namespace": argparse.Namespace(lr=0.1),
    "a default dict": collections.defaultdict(list, a=[1]),
    "a number of numpy's": np.float64(2.5),
    "a module": torch.nn.Linear(2, 1),
    "a call": Caller(),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_file_is_warned_of_where_torch_refuses_it_and_only_there(value, new):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=new)
    data = file.getvalue()
    read = read_legacy if is_legacy(data) else read_saved
    found = refused(read(data, "x.pt").named)

    if found:
        with pytest.raises(pickle.UnpicklingError):
            torch.load(io.BytesIO(data), weights_only=True)
    else:
        torch.load(io.BytesIO(data), weights_only=True)


def test_all_that_would_run_is_named():
    names = {f"m.f{index}" for index in range(30)} | {"posix.system", "torch.Size"}
    told = what_runs(names, "loading it")

    assert told.startswith("loading it runs m.f0, ")
    assert told.endswith(" and posix.system")
    assert "torch.Size" not in told
    assert what_runs({"torch.Size"}, "loading it") is None
