"""`headway comm options` and `comm strategy`, and plans of stages: fronts, offloads, small cases in full."""

import itertools
import json

import numpy as np
import pytest

from headway.comm.compression.options import CPU, INSIDE, OPTIONS, StageChains, front, option_stages, stages
from headway.comm.compression.strategy_search import CODECS_US, ModelGradients, Pricing, PublishedSetup, search
from headway.core.errors import UnknownNameError
from tests.launching import headway_here, json_of

SETUP = PublishedSetup("m", "dgc", hosts=4, ranks_per_host=8, inside="pcie", wire_fraction=0.02, two_level=True)


def priced(chains, **more):
    """Return the pricing of chains."""

    def score(plans):
        ns, gap = chains.score(plans)
        return ns.astype(float), gap

    options = tuple(range(chains.lane.shape[1]))
    return Pricing(sizes=(1,) * chains.segment_ns.size, options=options, score=score, **more)


def every_plan(options, num):
    return np.array(list(itertools.product(options, repeat=num)), np.int64)


def test_small_cases_of_stages_are_within_three_per_cent_of_the_best_plan():
    rng, near = np.random.default_rng(5), 0
    for _ in range(40):
        options = int(rng.integers(2, 9))
        lanes = rng.integers(0, 4, (4, options, 4))
        lanes[np.arange(4)[None, None] >= rng.integers(1, 5, (4, options, 1))] = -1
        pricing = priced(StageChains(rng.integers(0, 3000, 4), lanes, rng.integers(1, 3000, lanes.shape)))
        near += search(pricing).cost <= 1.03 * pricing.score(every_plan(pricing.options, 4))[0].min()

    assert near >= 38


def test_alike_tensors_go_to_the_cpu_from_one_end():
    """By brute force over all subsets: where encoding on the device delays backward, the first q are the best q."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        encode, link, cpu = rng.integers(1, 1000, 3)
        lanes = np.tile(np.array([[0, 3], [CPU, 3]]), (6, 1, 1))
        times = np.tile(np.array([[encode, link], [cpu, link]]), (6, 1, 1))
        pricing = priced(StageChains(np.full(6, 1000), lanes, times), offload={0: 1})
        plans = every_plan((0, 1), 6)
        costs = pricing.score(plans)[0]
        for count in range(7):
            first = np.repeat([1, 0], [count, 6 - count])

            assert pricing.cost(first) == costs[plans.sum(1) == count].min()
        assert search(pricing).cost == costs.min()


def test_options_off_the_front_gain_nothing_on_a_sample():
    """The order of stages does not count for the front: drawn options from the whole tree are no better than it."""
    rng = np.random.default_rng(2)
    gradients = ModelGradients((("a", 2**22), ("b", 2**20), ("c", 2**12)), (0.0, 2000.0, 500.0))
    best = search(stages(gradients, SETUP)).cost
    lanes, durations = option_stages(np.array([2**22, 2**20, 2**12]), SETUP, CODECS_US)
    chains = StageChains(np.array([0, 2_000_000, 500_000]), np.broadcast_to(lanes, durations.shape), durations)
    drawn, _ = chains.score(rng.integers(0, len(OPTIONS), (20_000, 3)))

    assert best <= 1.0001 * drawn.min() / 1000
    assert 1 < len(front(lanes, durations[0])) < 200


def test_without_other_ranks_nothing_is_sent():
    lone = stages(ModelGradients((("a", 100),), (7.0,)), PublishedSetup("m", "dgc", 1, 1, "pcie", 0.1, two_level=False))

    assert search(lone).cost == 7.0


def test_any_option_of_the_tree_can_be_priced():
    dear = next(option for option in OPTIONS if option.endswith("cpu.decode cpu.encode inside.broadcast cpu.decode"))
    gradients = ModelGradients((("a", 2**22),), (0.0,))
    pricing = stages(gradients, SETUP, also=[dear])

    assert pricing.cost(np.array([pricing.names.index(dear)])) >= search(stages(gradients, SETUP)).cost
    with pytest.raises(UnknownNameError, match="headway comm options"):
        stages(gradients, SETUP, also=["inside.all_gather"])


def test_more_bytes_inside_take_longer():
    lanes, durations = option_stages(np.array([2**20, 2**22]), SETUP, CODECS_US)
    inside = (durations * (lanes == INSIDE)).sum(2)

    assert (inside[1] >= inside[0]).all()
    assert (inside[:, [option.startswith("flat") or "flat." in option for option in OPTIONS]] == 0).all()


@pytest.fixture
def files(tmp_path):
    """Write a model and its setup; return the command."""
    models = {"m": {"tensors": [["b", 4096], ["w", 2**22], ["v", 2**22]], "gap_us": [0, 900, 800]}}
    setup = {"model": "m", "codec": "randomk", "hosts": 4, "ranks_per_host": 8, "inside": "pcie",
             "wire_fraction": 0.02, "two_level": True, "published_options": [0, 4, 3]}  # fmt: skip
    for name, content in (("models", models), ("setups", [setup])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return ["comm", "strategy", "--models", f"{tmp_path}/models.json", "--setups", f"{tmp_path}/setups.json"]


@pytest.mark.parametrize("cost", ["published-gpu", "published-cpu", "stages"])
def test_a_plan_found_is_priced_as_found(files, tmp_path, cost):
    words = (*files, "--model", "m", "--cost", cost)
    answer = json_of(*words, "--json")
    (tmp_path / "plan.json").write_text(json.dumps(answer))
    again = json_of(*words, "--options", tmp_path / "plan.json", "--json")

    assert answer["schema"] == "headway.comm-strategy/1"
    assert len(answer["options"]) == 3
    assert again | {"search_s": 0} == answer | {"search_s": 0}
    assert answer["cost_us"] <= answer["uniform_us"] <= answer["raw_us"]
    assert "Simulated" in headway_here(*words).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "n", "--cost", "stages"), "Choose one of: m"),
        (("--model", "m", "--cost", "stage"), "Did you mean 'stages'?"),
        (("--model", "m", "--cost", "stages", "--options", "PLAN"), "2 options for 3 tensors"),
        (("--model", "m", "--cost", "published-gpu", "--options", "PLAN"), "take the numbers [0, 1, 2, 3]"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, words, said):
    (tmp_path / "plan").write_text('["flat.all_reduce", "flat.all_reduce"]')
    words = [str(tmp_path / "plan") if word == "PLAN" else word for word in words]

    done = headway_here(*files, *words)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_options_are_listed():
    answer, few = (json_of("comm", "options", *words, "--json") for words in ((), ("--devices", "gpu")))

    assert (answer["schema"], answer["count"], len(answer["options"])) == ("headway.comm-options/1", 4341, 4341)
    assert few["count"] == 174
    assert set(few["options"]) < set(answer["options"])
