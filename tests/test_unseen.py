"""What a look at a dataset would miss: found by its code, by the entries that an example takes, or looked at now."""

from __future__ import annotations

import codecs
import pickle
import sys

import numpy as np
import pytest
import torch

from headway.data.runtime.circumstances import settings_in_c
from headway.data.runtime.followed_code import unfollowed
from headway.data.runtime.own_entries import takes_more
from headway.data.runtime.surroundings import surroundings

ROWS = 1 << 19
SETTINGS = """
import sys

class Meta(type):
    level = 1.0

class Config(metaclass=Meta):
    pass

class Base: pass

class Deep(Base): pass

class Deeper(Deep):
    level = 1.0

class Record:
    level = 1.0
    def value(self):
        return self.level

def strong(row):
    return LEVEL * row

LEVEL = 1.0
augment = strong
KEYS, FEW, MANY = {strong: 1}, {strong}, [strong] * 500
RECORDS = [Record() for _ in range(500)]

class Rows:
    def __init__(self): self.kept = None
    def __getitem__(self, index): return READING
"""


def script(reading):
    """Return the names of a script whose dataset reads by `reading`."""
    names = {"__name__": "headway_script"}
    exec(SETTINGS.replace("READING", reading), names)
    return names


@pytest.mark.parametrize(
    ("reading", "change"),
    [
        ("augment(index)", "augment = lambda row: 2 * row"),
        ("type(Config).level", "Meta.level = 2.0"),
        ("Base.__subclasses__()[0].__subclasses__()[0].level", "Deeper.level = 2.0"),
        ('getattr(Base, "__subclasses__")()[0].__subclasses__()[0].level', "Deeper.level = 2.0"),
        ("next(iter(KEYS))(index)", "LEVEL = 2.0"),
        ("next(iter(FEW))(index)", "LEVEL = 2.0"),
        ("MANY[index](index)", "LEVEL = 2.0"),
        ("RECORDS[index].value()", "Record.level = 2.0"),
        ("Config", "Config = Record"),
        ("SCALE", "import builtins; builtins.SCALE = 2.0"),
    ],
)
def test_what_code_leads_to_is_looked_at(reading, change, monkeypatch):
    monkeypatch.setattr("builtins.SCALE", 1.0, raising=False)
    names = script(reading)
    dataset = names["Rows"]()
    before = surroundings(dataset)
    same = surroundings(dataset)
    exec(change, names)

    assert before == same
    assert before != surroundings(dataset)


def test_an_object_of_another_class_is_another_one():
    names = script("self.kept")
    dataset = names["Rows"]()
    dataset.kept = names["Record"]()
    before = surroundings(dataset)
    dataset.kept.__class__ = type("Other", (), {})

    assert before != surroundings(dataset)


def _operator(names):
    library = torch.library.Library("headway_test", "FRAGMENT")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", names["strong"], "CompositeExplicitAutograd")
    return lambda: torch.ops.headway_test.scaled(torch.ones(2)), library


def _codec(names):
    exec("def replaced(error): return '1', error.end", names)
    codecs.register_error("headway_test", names["replaced"])
    return lambda: b"\xff".decode("ascii", "headway_test"), None


def _method(names):
    torch.Tensor.headway_test = names["strong"]
    return lambda: torch.ones(2).headway_test(), torch.Tensor


def _pickled(names):
    module = type(sys)("headway_test")
    names["Record"].__module__, module.Record = "headway_test", names["Record"]
    sys.modules["headway_test"] = module
    data = pickle.dumps(names["Record"]())
    return lambda: pickle.loads(data), None


@pytest.mark.parametrize("way", [_operator, _codec, _method, _pickled])
def test_code_that_no_look_finds_is_found_when_it_runs(way):
    names = script("index")
    read, kept = way(names)
    try:
        assert unfollowed([read], read) is not None
        assert unfollowed([read, names["strong"], names.get("replaced"), names["Record"]], read) is None
    finally:
        sys.modules.pop("headway_test", None)
        if kept is torch.Tensor:
            del torch.Tensor.headway_test


class Held:
    """Examples made of what `take` takes of `held`."""

    def __init__(self, held, take, size=ROWS):
        self.held, self.take, self.size = held, take, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.take(self.held, index)


LARGE = {
    "array": lambda: np.ones((ROWS, 8), np.float32) * np.arange(ROWS, dtype=np.float32)[:, None],
    "numbers": lambda: np.arange(4 * ROWS, dtype=np.float64),
    "tensor": lambda: torch.arange(8 * ROWS).reshape(-1, 8) * torch.ones(1, 8),
    "columns": lambda: np.ones((8, 2 * ROWS)).cumsum(axis=1).T,
    "records": lambda: [[float(place)] for place in range(ROWS)],
}


@pytest.mark.parametrize("name", LARGE)
def test_an_example_of_large_data_is_made_of_its_own_entries(name):
    held = LARGE[name]()

    assert takes_more(Held(held, lambda held, index: held[index])) is None
    for other in (1, -1, 600):
        assert "takes more" in takes_more(
            Held(held, lambda held, index, other=other: (held[index], held[index + other]))
        )
    assert "takes more" in takes_more(Held(held, lambda held, index: held[index : index + 2]))


def test_small_and_unchanging_data_may_be_taken_anyhow():
    held = LARGE["array"]()
    held.flags.writeable = False

    assert takes_more(Held(held, lambda held, index: held[index : index + 2])) is None
    assert takes_more(Held(np.zeros(1000), lambda held, index: held[index : index + 2], 1000)) is None


def test_settings_that_no_variable_holds_count():
    before = settings_in_c()
    with np.errstate(over="raise"):
        assert settings_in_c() != before
    assert settings_in_c() == before
