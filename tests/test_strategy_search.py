"""Plans of compression: the published costs to the last bit, better plans than the published ones, small cases."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.comm.compression.strategy_search import (
    COSTS,
    ModelGradients,
    Pricing,
    PublishedSetup,
    link_table,
    read_models,
    read_setups,
    search,
)
from headway.core.errors import FormatError, InputError, UnknownNameError
from tests.paths import shared

KINDS = ("gpu", "cpu")


def published(kind):
    """Yield (what is published of a setup, its pricing)."""
    models, path = read_models(shared("espresso/models.json")), shared("espresso/setups.json")
    for facts, setup in zip(json.loads(path.read_text()), read_setups(path), strict=True):
        yield facts, COSTS[f"published-{kind}"](models[setup.model], setup)


@pytest.mark.parametrize("kind", KINDS)
def test_published_costs_are_reproduced_exactly(kind):
    for facts, pricing in published(kind):
        num = len(pricing.sizes)
        plans = {
            "raw": [0] * num, "half": [1] * num, "published_gpu": facts["published_gpu_options"],
            "published": facts["published_options"], "random_7": facts[f"random_7_{kind}"],
        }  # fmt: skip
        found = {name: float(pricing.score(np.array([plans[name]]))[0][0]) for name in facts["cost_us"][kind]}

        assert found == facts["cost_us"][kind]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least_gain"), [("gpu", 0.11), ("cpu", 0.20)])
def test_plans_found_cost_no_more_than_the_published_ones(kind, least_gain):
    gains = []
    for facts, pricing in published(kind):
        found = search(pricing)
        known = facts["cost_us"][kind]["published_gpu" if kind == "gpu" else "published"]

        assert found.cost == pricing.cost(found.options) <= min(known, *found.uniform.values())
        gains.append(1 - found.cost / known)

    assert np.mean(gains) >= least_gain


def drawn(rng, num=4):
    """Return a pricing of few tensors."""
    sizes = 2 ** rng.integers(8, 27, num)
    gaps = rng.integers(0, 3000, num).astype(float)
    gradients = ModelGradients(tuple((f"t{i}", int(size)) for i, size in enumerate(sizes)), tuple(gaps))
    setup = PublishedSetup(
        model="drawn", codec=str(rng.choice(["randomk", "dgc", "onebit"])), hosts=int(rng.integers(2, 9)),
        ranks_per_host=int(rng.integers(1, 9)), inside=str(rng.choice(["pcie", "nvlink"])),
        wire_fraction=float(rng.uniform(0.01, 0.2)), two_level=True,
    )  # fmt: skip
    return COSTS[str(rng.choice(list(COSTS)))](gradients, setup)


def test_small_cases_are_within_three_per_cent_of_the_best_plan():
    rng, near = np.random.default_rng(1), 0
    for _ in range(100):
        pricing = drawn(rng)
        every = np.array(list(itertools.product(pricing.options, repeat=len(pricing.sizes))), np.int64)
        near += search(pricing).cost <= 1.03 * pricing.score(every)[0].min()

    assert near >= 95


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(0, 3))
def test_plans_that_begin_alike_cost_what_they_cost_alone(seed, num, alike):
    """What plans begin with is priced once; a raw tensor sent before the last idle gap gains nothing by half."""
    rng = np.random.default_rng(seed)
    pricing = drawn(rng, num)
    plans = rng.choice(pricing.options, (5, num))
    plans[:, :alike] = plans[0, :alike]
    costs, gaps = pricing.score(plans)
    for plan, cost, gap in zip(plans, costs, gaps, strict=True):
        earlier = plan.copy()
        earlier[:gap][earlier[:gap] == 0] = 1

        assert pricing.score(plan[None])[0][0] == cost
        assert pricing.score(earlier[None])[0][0] >= cost


GOOD = ModelGradients((("a", 10), ("b", 20)), (0.0, 5.0))


@pytest.mark.parametrize(
    ("gradients", "setup", "error", "words"),
    [
        (ModelGradients((), ()), {}, InputError, "0 tensors"),
        (ModelGradients((("a", 0),), (0.0,)), {}, InputError, "tensor a has 0 numbers"),
        (ModelGradients((("a", 1),), (-1.0,)), {}, InputError, "gap before a is -1"),
        (GOOD, {"codec": "dgk"}, UnknownNameError, "dgc"),
        (GOOD, {"inside": "pci"}, UnknownNameError, "pcie"),
        (GOOD, {"hosts": 0}, InputError, "hosts is 0"),
        (GOOD, {"wire_fraction": 0.0}, InputError, "wire_fraction is 0"),
    ],
)
def test_invalid_setups_are_named(gradients, setup, error, words):
    values = {"model": "m", "codec": "dgc", "hosts": 2, "ranks_per_host": 2, "inside": "pcie", "wire_fraction": 0.1}

    with pytest.raises(error, match=words):
        link_table(gradients, PublishedSetup(**{**values, "two_level": True, **setup}))


def test_invalid_plans_are_named():
    pricing = COSTS["published-gpu"](GOOD, PublishedSetup("m", "dgc", 2, 2, "pcie", 0.1, False))

    with pytest.raises(InputError, match="3 options for 2 tensors"):
        pricing.cost(np.array([0, 0, 0]))
    with pytest.raises(InputError, match=r"option 1 of the plan is 3; this setup offers 0, 1, 2"):
        pricing.cost(np.array([0, 3]))
    with pytest.raises(InputError, match="0 tensors"):
        search(Pricing(sizes=(), options=(0,), score=pricing.score))


def test_files_of_another_shape_are_named(tmp_path):
    path = tmp_path / "models.json"
    path.write_text('{"m": {"tensors": [["a", "x"]], "gap_us": [0]}}')

    with pytest.raises(FormatError, match=r"models\.json"):
        read_models(path)
