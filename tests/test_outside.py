"""What a dataset goes by, wherever it is kept: where a training loop sets something, a look before and after differ."""

import ctypes
import io
import sys
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Subset
from torch.utils.flop_counter import FlopCounterMode

from headway.data.guard.picture import outside
from headway.data.guard.process_state import listens
from headway.data.workers.apply import workers
from tests.loaders_made import Squares
from tests.remedy_context import applied

STRENGTH = 0
EDITED, EDITED_ARRAY = {"a": 1}, np.arange(3)
package_made = ModuleType("package_made")
package_made.settings_made = ModuleType("settings_made")
package_made.settings_made.LEVEL = 0


class Holder(Squares):
    """A dataset that has something, and reads through it where it can."""

    def __init__(self, held):
        super().__init__(20)
        self.held = held

    def __getitem__(self, index):
        return self.held(index) if callable(self.held) else index


@dataclass(slots=True)
class Slotted:
    level: int = 0


class Several:
    """Transforms, one after the other."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, value):
        for part in self.parts:
            value = part(value)
        return value


class Level:
    def __init__(self, now):
        self.now = now

    def set(self, now):
        self.now = now


class Scale:
    strength = 0

    def __call__(self, value):
        return value * (self.strength + STRENGTH)


class Named(NamedTuple):
    inside: SimpleNamespace


class Configured(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def by_its_attribute(value):
    return value * by_its_attribute.level


def by_an_import(value):
    from settings_made import LEVEL

    return value * LEVEL


def by_a_module_inside(value):
    return value * package_made.settings_made.LEVEL


def added_to_twice(numbers):
    for _ in range(2):
        numbers[777] += 0.25


def set_attribute(name):
    return lambda held: setattr(held, name, 1)


def set_level(_):
    package_made.settings_made.LEVEL += 1


PLACES = {
    "slot": (Slotted, set_attribute("level")),
    "default dict": (lambda: defaultdict(int, level=0), lambda held: held.update(level=1)),
    "dict of attributes": (lambda: Configured(level=0), set_attribute("level")),
    "entry of 100": (lambda: dict.fromkeys(range(100), 0.5), lambda held: held.update({90: 0.25})),
    "entry of 128": (lambda: [0.5] * 128, lambda held: held.__setitem__(77, 0.25)),
    "named tuple": (lambda: Named(SimpleNamespace(level=0)), lambda held: setattr(held.inside, "level", 1)),
    "transform inside": (
        lambda: Several([Several([Scale()])]), lambda held: setattr(held.parts[0].parts[0], "strength", 1)
    ),
    "global of a transform": (lambda: Several([Scale()]), lambda _: globals().update(STRENGTH=STRENGTH + 1)),
    "function's attribute": (lambda: by_its_attribute, lambda held: setattr(held, "level", object())),
    "import in a function": (lambda: by_an_import, set_level),
    "module in a module": (lambda: by_a_module_inside, set_level),
    "list's tuple": (lambda: [(torch.zeros(2), n) for n in range(1000)], lambda held: held[777][0].add_(1)),
    "list's dict": (lambda: [{"x": torch.zeros(2)} for _ in range(1000)], lambda held: held[777]["x"].add_(1)),
    "number twice": (lambda: [0.1 * n for n in range(1000)], added_to_twice),
    "value of C": (lambda: ctypes.c_int(0), set_attribute("value")),
    "file in memory": (lambda: io.BytesIO(b"abc"), lambda held: held.seek(1)),
    "large tensor": (lambda: torch.zeros(3 << 20), lambda held: held.numpy().fill(1)),
    "conjugated": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), lambda held: held.conj().numpy().fill(1)),
    "permuted tensor": (lambda: torch.zeros(2, 3, 4).permute(2, 0, 1), lambda held: held.numpy().fill(1)),
    "rows of a large tensor": (lambda: torch.zeros(9, 1 << 20)[::8], lambda held: held.numpy().fill(1)),
    "sparse tensor": (lambda: torch.eye(3).to_sparse(), lambda held: held._values().numpy().fill(2)),
    "storage": (lambda: torch.zeros(3).untyped_storage(), lambda held: held.fill_(1)),
    "bytes of a file in memory": (lambda: io.BytesIO(b"abc"), lambda held: held.getbuffer().__setitem__(0, 7)),
    "list's file in memory": (lambda: [io.BytesIO() for _ in range(100)], lambda held: held[77].write(b"a")),
    "image": (lambda: Image.new("L", (2, 2)), lambda held: held.putpixel((0, 0), 3)),
    "column": (lambda: pyarrow.array(EDITED_ARRAY), lambda _: EDITED_ARRAY.__iadd__(1)),
    "lock": (threading.Lock, lambda held: held.acquire()),
    "keyword of a partial": (lambda: partial(abs, a=1), lambda held: held.keywords.update(a=2)),
    "object of a method": (lambda: Level(1).set, lambda held: held(2)),
    "dictionary of a method": (lambda: {"a": 1}.get, lambda held: held.__self__.update(a=2)),
    "view of a dictionary": (lambda: EDITED.values(), lambda held: EDITED.update(a=EDITED["a"] + 1)),
    "type of a number": (lambda: SimpleNamespace(level=1), lambda held: setattr(held, "level", 1.0)),
    "order of entries": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_look_differs_after_a_change_and_only_then(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "settings_made", package_made.settings_made)
    by_its_attribute.level = 0
    make, change = PLACES[place]
    held = make()
    read = Subset(Holder(held), range(3)), DataLoader(range(1)).collate_fn
    before = outside(read)

    assert outside(read) == before
    change(held)
    assert outside(read) != before


@pytest.mark.parametrize("kept", [False, True], ids=["within a pass", "between passes"])
def test_workers_do_not_read_what_a_transform_of_a_subset_was_set_to_before(kept):
    def batches():
        scale, seen = Scale(), []
        loader = DataLoader(Subset(Holder(Several([Several([scale])])), range(20)), 2)
        for epoch in range(3):
            scale.strength = epoch
            for step, batch in enumerate(loader):
                seen.append(batch.tolist())
                scale.strength = epoch if kept else step
        return seen

    plain = batches()
    with applied(workers, {"num_workers": 2}):
        assert batches() == plain


def test_a_global_that_only_shares_its_name_with_an_attribute_says_nothing(monkeypatch):
    read = Holder(Scale()), print
    before = outside(read)
    monkeypatch.setitem(globals(), "strength", 5)  # as `for images, labels in loader` sets globals of a script
    monkeypatch.setitem(globals(), "held", 5)

    assert outside(read) == before


def test_a_look_at_what_does_not_like_to_be_looked_at_is_equal_to_no_other():
    class Shy:
        @property
        def __dict__(self):
            raise RuntimeError("not now")

    read = Holder(Shy()), print

    assert outside(read) != outside(read)


class Seeing(TorchFunctionMode):
    pass


@pytest.mark.parametrize("make", [Seeing, lambda: FlopCounterMode(display=False)], ids=["functions", "operators"])
def test_modes_of_torch_that_see_what_runs_listen_and_a_default_device_does_not(make):
    with torch.device("cpu"):
        assert not listens()
    with make():
        assert listens()
    assert not listens()


def test_a_function_that_python_calls_for_each_call_listens():
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        assert listens()
    finally:
        sys.setprofile(before)
