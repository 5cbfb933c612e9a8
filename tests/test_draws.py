"""Draws: every generator in use is seen, none is moved by being looked at, own ones are found where they hide."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.draws import MOST_OBJECTS, drawn, fingerprints, own_generators, restorer

DRAWS = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(1),
}


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
