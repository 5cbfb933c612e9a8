"""What samplers keep under names of their own travels in a state, or is named once in a warning."""

import itertools
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

from headway.core.errors import InputError
from headway.data import DataLoader
from headway.data.loader.sampler_state import MOST_BYTES, changed, values_in, write_back

ITEMS = range(12)


class Held(Sampler):
    """Reads its items in order; holds whatever it is given as `value`, which `step` changes in each pass."""

    def __init__(self, value, step=lambda sampler: None):
        self.value, self.step = value, step

    def __len__(self):
        return len(ITEMS)

    def __iter__(self):
        self.step(self)
        return iter(ITEMS)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (3, lambda held: setattr(held, "value", 4)),
        ([1, [2, 3]], lambda held: held.value[1].append(4)),
        ({"a": {"b": 1.5}}, lambda held: held.value["a"].update(b=2.5)),
        (np.arange(4), lambda held: held.value.sort()),
        (np.arange(4), lambda held: held.value.__setitem__(0, 9)),
        (torch.zeros(3), lambda held: held.value.add_(1)),
        ({3, 4}, lambda held: held.value.add(5)),
        (random.Random(1), lambda held: held.value.random()),
        (None, lambda held: setattr(held, "value", "text")),
    ],
)
def test_a_changed_value_is_written_back_to_its_place(value, change):
    held, fresh = Held(pickle.loads(pickle.dumps(value))), Held(pickle.loads(pickle.dumps(value)))
    before = values_in(held)
    change(held)
    write_back(fresh, changed(before, values_in(held)))

    assert not {path for path in changed(values_in(held), values_in(fresh)) if not isinstance(value, random.Random)}
    assert not isinstance(value, random.Random) or held.value.random() == fresh.value.random()


def test_nothing_travels_of_a_sampler_that_stays_as_it_was():
    loader = DataLoader(ITEMS, 4, sampler=Held(list(range(1000))))
    list(loader)

    assert "hidden" not in loader.state_dict()["between"]
    assert len(pickle.dumps(loader.state_dict())) < 1024


def renew(held):
    held.value = np.ones(MOST_BYTES + 1, np.uint8)


@pytest.mark.parametrize(
    ("value", "step"), [(itertools.count(), lambda held: next(held.value)), (np.zeros(MOST_BYTES + 1, np.uint8), renew)]
)
def test_what_cannot_be_copied_is_named_once_with_the_way_out(value, step):
    loader = DataLoader(ITEMS, 4, sampler=Held(value, step))
    list(loader)
    with pytest.warns(RuntimeWarning, match=r"does not hold Held.value, which cannot be copied.*state_dict\(\)"):
        loader.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.state_dict()


class Shuffling(Held):
    """Shuffles its array where it lies."""

    def __iter__(self):
        np.random.default_rng(len(self.value)).shuffle(self.value)
        return iter(self.value.tolist())


def test_a_sampler_that_shuffles_in_place_goes_on_exactly_through_three_interruptions_of_a_pass():
    def made():
        return DataLoader(ITEMS, 2, sampler=Shuffling(np.arange(12)))

    loader, got = made(), []
    whole = [batch.tolist() for _ in range(4) for batch in loader]
    first = loader.state_dict()
    for number in (8, 1, 2, 13):
        loader, state = made(), loader.state_dict() if got else None
        if state:
            loader.load_state_dict(state)
        while number:
            for batch in loader:
                got.append(batch.tolist())
                number -= 1
                if not number:
                    break

    assert got == whole
    loader.load_state_dict(first)  # in a process that has read it before
    after = [batch.tolist() for batch in loader]
    loader = made()
    loader.load_state_dict(first)
    assert after == [batch.tolist() for batch in loader]


def test_the_first_pass_warns_once_where_the_order_rests_on_what_the_sampler_does_not_hold():
    counter = itertools.count(1).__next__

    class Turning(Held):
        def __iter__(self):
            first = counter()
            return iter([(item + first) % len(ITEMS) for item in ITEMS])

    loader = DataLoader(ITEMS, 4, sampler=Turning(None))
    with pytest.warns(RuntimeWarning, match=r"Turning read again from what state_dict\(\) holds yields other batches"):
        list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)

    assert counter() == 3  # nobody else has counted


def test_a_state_of_another_sampler_is_refused_with_the_place():
    with pytest.raises(InputError, match=r"holds a value of Held\.other\.size, which this sampler does not have"):
        write_back(Held(3), {(("attribute", "other"), ("attribute", "size")): 3})


OUTSIDE = [0]


def test_a_pass_that_is_resumed_in_another_order_says_so():
    """Its order rests on a list of the module's, which no look at the sampler finds."""

    class Turning(Held):
        def __iter__(self):
            OUTSIDE[0] += 1
            return iter([(item + OUTSIDE[0]) % len(ITEMS) for item in ITEMS])

    OUTSIDE[0] = 0
    loader = DataLoader(ITEMS, 4, sampler=Turning(None))
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    OUTSIDE[0] = 0
    again = DataLoader(ITEMS, 4, sampler=Turning(None))
    again.load_state_dict(state)

    with pytest.warns(RuntimeWarning, match="Turning yields other batches than before the interruption"):
        list(again)


def test_a_sampler_that_cannot_be_looked_at_costs_no_state():
    class Closed(Held):
        def __getattr__(self, name):
            raise ValueError(name)

    loader = DataLoader(ITEMS, 4, sampler=Closed(None))
    with pytest.warns(RuntimeWarning, match=r"does not hold Closed \(ValueError"):
        loader.state_dict()
