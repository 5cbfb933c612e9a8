"""What the code of a dataset leads to, and settings that no variable holds, are part of what a look sees."""

import numpy as np
import pytest

from headway.data.guard.picture import Picture
from headway.data.guard.process_state import settings_in_c

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
PAIR, HOLDER = RECORDS[:2], Record()
HOLDER.inside = Record()
HOLDER.inside.now = PAIR[0]

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
        ("PAIR, HOLDER.inside.now.value()", "HOLDER.inside.now = PAIR[1]"),
        ("SCALE", "import builtins; builtins.SCALE = 2.0"),
    ],
)
def test_what_code_leads_to_is_looked_at(reading, change, monkeypatch):
    monkeypatch.setattr("builtins.SCALE", 1.0, raising=False)
    names = script(reading)
    dataset = names["Rows"]()
    before = Picture(dataset).state
    same = Picture(dataset).state
    exec(change, names)

    assert before == same
    assert before != Picture(dataset).state


def test_an_object_of_another_class_is_another_one():
    names = script("self.kept")
    dataset = names["Rows"]()
    dataset.kept = names["Record"]()
    before = Picture(dataset).state
    dataset.kept.__class__ = type("Other", (), {})

    assert before != Picture(dataset).state


def test_settings_that_no_variable_holds_count():
    before = settings_in_c()
    with np.errstate(over="raise"):
        assert settings_in_c() != before
    assert settings_in_c() == before
