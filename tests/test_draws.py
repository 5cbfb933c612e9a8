"""Draws: every generator in use is seen, none is moved by being looked at, own ones are found where they hide."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.script.draws import drawn, fingerprints, own_generators, restorer
from headway.runtime.script.object_graph import MOST_OBJECTS

DRAWS = {"random": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}


@given(names=st.lists(st.sampled_from(sorted(DRAWS)), max_size=6))
def test_exactly_the_generators_that_were_drawn_from_are_named(names):
    before = fingerprints()
    for name in names:
        DRAWS[name]()

    assert drawn(before, fingerprints()) == sorted(set(names))


def test_looking_moves_no_generator():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    plain = [float(draw()) for draw in DRAWS.values()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    looked = []
    for draw in DRAWS.values():
        fingerprints()
        looked.append(float(draw()))

    assert looked == plain


class Holder:
    def __init__(self, inside):
        self.inside = inside


OWN = {
    "random.Random": (lambda: random.Random(1), lambda g: g.random()),
    "numpy.Generator": (lambda: np.random.default_rng(1), lambda g: g.random()),
    "numpy.MT19937": (lambda: np.random.Generator(np.random.MT19937(1)), lambda g: g.random()),
    "numpy.Philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: g.random()),
    "numpy.PCG64": (lambda: np.random.PCG64(1), lambda g: g.random_raw()),
    "numpy.RandomState": (lambda: np.random.RandomState(1), lambda g: g.rand()),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand(1, generator=g))),
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("place", [lambda g: g, lambda g: [0, Holder(g)], lambda g: {"transforms": (Holder([g]),)}])
def test_own_generators_are_found_in_attributes_seen_to_draw_and_put_back(kind, place):
    make, draw = OWN[kind]
    generator = make()
    own = own_generators(Holder(place(generator)))
    before, restore = fingerprints(own), restorer(own)
    first = draw(generator)
    seen = drawn(before, fingerprints(own))
    restore()

    assert [id(found) for found in own] == [id(generator)]
    assert seen == ["own"]
    assert draw(generator) == first


def test_the_search_ends_in_loops_and_large_containers():
    loop = Holder(None)
    loop.inside = [loop, list(range(10**6)), {k: Holder(k) for k in range(MOST_OBJECTS + 1)}]

    assert own_generators(loop) == []


def test_the_systems_generator_has_no_state_to_compare():
    own = own_generators(Holder(random.SystemRandom()))
    restorer(own)()

    assert drawn(fingerprints(own), fingerprints(own)) == []


AHEAD = {
    "half a word of PCG64": (lambda: np.random.default_rng(1), lambda g: g.integers(0, 9, dtype=np.int32)),
    "three words of Philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: g.random()),
    "the other number of randn": (lambda: np.random.RandomState(1), lambda g: g.randn()),
    "the other number of gauss": (lambda: random.Random(1), lambda g: g.gauss(0, 1)),
    "the other number of torch": (lambda: torch.Generator(), lambda g: torch.randn(1, generator=g)),
}


@pytest.mark.parametrize("kind", AHEAD)
def test_a_draw_from_what_was_drawn_ahead_shows_too(kind):
    make, draw = AHEAD[kind]
    own = [make()]
    for _ in range(9):
        before = fingerprints(own)
        draw(own[0])
        assert drawn(before, fingerprints(own)) == ["own"]


def test_global_generators_show_a_draw_from_what_was_drawn_ahead():
    for draw, name in ((np.random.randn, "numpy"), (lambda: random.gauss(0, 1), "random")):
        for _ in range(3):
            before = fingerprints()
            draw()
            assert drawn(before, fingerprints()) == [name]


IN_GLOBAL = np.random.default_rng(1)


class OfModule:
    SHARED = random.Random(2)

    def __getitem__(self, index):
        return IN_GLOBAL.random()


def of_closure():
    hidden = torch.Generator()

    class Closed:
        transform = staticmethod(lambda: torch.rand(1, generator=hidden))

        def __getitem__(self, index):
            return self.transform()

    return Closed(), hidden


def test_generators_in_globals_classes_and_closures_are_found():
    closed, hidden = of_closure()

    assert {id(found) for found in own_generators(Holder([OfModule()]))} == {id(IN_GLOBAL), id(OfModule.SHARED)}
    assert [id(found) for found in own_generators(closed)] == [id(hidden)]
