"""Partitions into a graph of stages: the tree's laws, brute force, published shapes, memory, bad input, the verb."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import CycleError
from headway.parallel.planning.graph import STATE_COPIES, GraphCluster, GraphPlan, plan_graph
from headway.parallel.planning.hierarchical import Topology, search
from headway.parallel.planning.layers import LayerGraph, Parallel, Series, Tree, decompose, layers_of
from headway.sim.pipeline.actions import StageGraph
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.simulate import evaluate, graph_1f1b
from tests.launching import headway_here, json_of
from tests.made.branched_models import candle_uno, multi_modal
from tests.refusals import refused

US = 1e-6


@st.composite
def layer_graphs(draw: st.DrawFn, most: int = 9, most_preds: int = 3) -> LayerGraph:
    """Layers of 1 to 9 us, each after some before it; one is last."""
    n = draw(st.integers(1, most))
    preds = [draw(st.sets(st.integers(0, b - 1), max_size=most_preds)) if b else set() for b in range(n)]
    for layer in range(n - 1):
        if not any(layer in sources for sources in preds):
            preds[n - 1].add(layer)
    forward, backward = (tuple(draw(st.integers(1, 9)) * US for _ in range(n)) for _ in range(2))
    edges = tuple((source, layer) for layer, sources in enumerate(preds) for source in sorted(sources))
    return LayerGraph(tuple(f"layer{k}" for k in range(n)), forward, backward, (1.0,) * n, (1.0,) * n, edges)


def ordered_by(tree: Tree) -> set[tuple[int, int]]:
    """Return the pairs of layers that a tree orders."""
    if isinstance(tree, int):
        return set()
    inside = set().union(*map(ordered_by, tree.parts))
    if isinstance(tree, Parallel):
        return inside
    pairs = itertools.combinations(map(layers_of, tree.parts), 2)
    return inside | {(a, b) for first, second in pairs for a in first for b in second}


def ordered_in(graph: LayerGraph) -> set[tuple[int, int]]:
    """Return the pairs of layers of which the second needs the first, directly or not."""
    pairs = set(graph.edges)
    while more := {(a, d) for a, b in pairs for c, d in graph.edges if b == c} - pairs:
        pairs |= more
    return pairs


def stage_graph(plan: GraphPlan) -> StageGraph:
    """Return which stages of a plan feed which."""
    return StageGraph(tuple(stage.preds for stage in plan.stages))


@settings(max_examples=60)
@given(layer_graphs(12))
def test_the_tree_has_every_layer_once_and_the_order_of_the_graph_but_for_what_it_says(graph):
    found = decompose(graph)
    added = ordered_by(found.tree) - ordered_in(graph)

    assert sorted(layers_of(found.tree)) == list(range(len(graph.names)))
    assert ordered_in(graph) <= ordered_by(found.tree)
    assert bool(added) == bool(found.merged)
    assert all({(a, b) for a in before for b in behind} <= ordered_by(found.tree) for before, behind in found.merged)


def test_a_graph_that_is_no_tree_is_merged_to_the_nearest_and_says_what_was_added():
    costs = ((1.0,) * 6,) * 4
    cross = LayerGraph(tuple("abcdef"), *costs, edges=((0, 1), (0, 2), (1, 3), (1, 4), (2, 4), (3, 5), (4, 5)))
    all_to_all = LayerGraph(tuple("abcdef"), *costs, edges=((0, 2), (0, 3), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)))

    assert decompose(all_to_all).tree == Series((Parallel((0, 1)), Parallel((2, 3)), 4, 5))
    assert decompose(all_to_all).merged == ()
    assert plan_graph(cross, GraphCluster(3)).merged in (((("b",), ("c",)),), ((("c",), ("d",)),))


def partitions(n: int) -> Iterator[list[list[int]]]:
    """Yield every way to put n layers into groups."""
    if n == 0:
        yield []
        return
    for groups in partitions(n - 1):
        for k in range(len(groups)):
            yield [[*group, n - 1] if k == at else group for at, group in enumerate(groups)]
        yield [*groups, [n - 1]]


def shortest_step_s(graph: LayerGraph, num_devices: int, m: int) -> float:
    """Simulate every partition into stages that do not wait for each other in a circle."""
    best = math.inf
    for groups in partitions(len(graph.names)):
        of = {layer: k for k, group in enumerate(groups) for layer in group}
        preds = tuple(tuple({of[a] for a, b in graph.edges if of[b] == k and of[a] != k}) for k in range(len(groups)))
        try:
            stages = StageGraph(preds)
        except CycleError:
            continue
        sums = [[round(sum(column[layer] for layer in group) * 1e9) for group in groups]
                for column in (graph.forward_s, graph.backward_s)]  # fmt: skip
        if len(groups) <= num_devices:
            found = evaluate(graph_1f1b, PipelineShape.of_graph(stages, m, *sums, [0] * len(groups)))
            best = min(best, found.makespan_ns / 1e9)
    return best


@settings(max_examples=8)
@given(layer_graphs(4, 2), st.integers(2, 4))
def test_a_plan_is_near_the_best_of_all_partitions(graph, num_devices):
    best = shortest_step_s(graph, num_devices, 16)

    assert plan_graph(graph, GraphCluster(num_devices), 16).objective_s <= 1.25 * best


@pytest.mark.slow
@settings(max_examples=15)
@given(layer_graphs(), st.integers(1, 8), st.sampled_from([1, 4, 12]), st.booleans(), st.data())
def test_a_plan_uses_each_layer_once_within_devices_and_memory_and_beats_the_chain(graph, devices, m, replicate, data):
    # With a limit: what one device takes of its even share, and of two layers more.
    share = -(-len(graph.names) // devices) + 2
    memory = data.draw(st.sampled_from([math.inf, share * (STATE_COPIES + min(devices, m)) + 0.5]))
    cluster = GraphCluster(devices, bytes_per_s=1e6, memory_bytes=memory, replicate=replicate)
    plan = plan_graph(graph, cluster, m)
    in_flight = stage_graph(plan).in_flight()

    assert sorted(name for stage in plan.stages for name in stage.layers) == sorted(graph.names)
    assert sum(stage.devices for stage in plan.stages) <= devices
    assert plan.objective_s <= plan.chain_objective_s
    for stage, depth in zip(plan.stages, in_flight, strict=True):
        count = len(stage.layers)
        assert count * (STATE_COPIES + min(depth, m) / stage.devices) <= memory
    if replicate:
        assert plan.objective_s <= plan_graph(graph, replace(cluster, replicate=False), m).objective_s


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 6))
def test_the_slowest_stage_of_a_chain_is_that_of_the_exact_partitioner(times, num_devices):
    costs = {"forward_s": [t * US for t in times], "backward_s": [2 * t * US for t in times]}
    chain = LayerGraph.chain(**costs, output_bytes=[0.0] * len(times), parameter_bytes=[1.0] * len(times))
    # Replicas would never end their all-reduce over such a link.
    exact = min(search(chain, Topology((k,), (1e-9,)), transfers="none").objective_s for k in range(1, num_devices + 1))
    plan = plan_graph(chain, GraphCluster(num_devices), 400)

    assert plan.objective_s == plan.chain_objective_s
    assert 400 * exact <= plan.objective_s * (1 + 1e-9) <= 400 * exact * 1.02


@pytest.mark.parametrize("devices", [16, 32])
@pytest.mark.parametrize(
    "graph",
    [candle_uno(64, joined_width=4192), candle_uno(64).split_by_inputs("top.0"), multi_modal(8)],
    ids=["CANDLE-Uno, branches summed", "CANDLE-Uno, concatenated, split", "multi-modal transformer"],
)
def test_branched_models_gain_a_third_over_the_chain_with_as_many_microbatches_as_devices(graph, devices):
    plan = plan_graph(graph, GraphCluster(devices))

    assert plan.chain_objective_s >= 1.3 * plan.objective_s
    assert max(stage_graph(plan).in_flight()) < len(plan.stages) / 2


def test_a_join_shares_the_device_of_a_branch_or_of_small_branches():
    names = ("text0", "text1", "image0", "image1", "join", "a", "b")
    costs, edges = tuple(t * US for t in (4, 4, 4, 4, 1, 1, 2)), ((0, 1), (2, 3), (1, 4), (3, 4), (5, 4), (6, 4))
    small = LayerGraph(names, costs, costs, (0.0,) * 7, (0.0,) * 7, edges)
    large = LayerGraph(names[:5], costs[:5], costs[:5], (0.0,) * 5, (0.0,) * 5, edges[:4])
    stages = [{stage.layers for stage in plan_graph(graph, GraphCluster(n), 16).stages}
              for graph, n in ((small, 5), (large, 4))]  # fmt: skip

    assert stages[0] == {("text0",), ("text1",), ("image0",), ("image1",), ("a", "b", "join")}
    assert stages[1] in ({("text0",), ("text1",), ("image0",), ("image1", "join")},
                         {("image0",), ("image1",), ("text0",), ("text1", "join")})  # fmt: skip


@given(layer_graphs(), st.data())
def test_a_layer_split_by_its_inputs_keeps_all_costs_and_what_needs_what(graph, data):
    joins = [layer for layer in range(len(graph.names)) if sum(layer == target for _, target in graph.edges) > 1]
    if not joins:
        return
    name = graph.names[data.draw(st.sampled_from(joins))]
    parts = graph.split_by_inputs(name)
    number = {parts.names.index(old): new for new, old in enumerate(graph.names)}

    for column in ("forward_s", "backward_s", "parameter_bytes"):
        assert sum(getattr(parts, column)) == pytest.approx(sum(getattr(graph, column)))
    pairs = {(number[a], number[b]) for a, b in ordered_in(parts) if {a, b} <= number.keys()}
    assert pairs == ordered_in(graph)


def test_a_fixed_cost_per_action_makes_microbatches_larger():
    chain = LayerGraph.chain(forward_s=[US] * 4, backward_s=[US] * 4, output_bytes=[0.0] * 4, parameter_bytes=[0.0] * 4)
    sizes = [plan_graph(chain, GraphCluster(4, overhead_s=s), 32).stages[0].microbatch for s in (0.0, US, 50 * US)]

    assert sizes[0] == 1 < sizes[1] < sizes[2]


def test_the_verb_prints_the_contract_and_what_was_merged(tmp_path):
    edges = {"a": [], "b": ["a"], "c": ["a"], "d": ["b"], "e": ["b", "c"], "f": ["d", "e"]}
    rows = [
        {"name": name, "preds": preds, "forward_ns": 1000, "backward_ns": 2000, "output_bytes": 1}
        for name, preds in edges.items()
    ]
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"layers": rows}))
    words = ("parallel", "plan", "--graph", file, "--devices", "6")
    answer, text = json_of(*words, "--json"), headway_here(*words).stdout

    assert {"stages", "objective_s", "chain_objective_s", "search_s"} <= answer.keys()
    assert all(stage.keys() >= {"layers", "devices", "microbatch"} for stage in answer["stages"])
    assert answer["objective_s"] == pytest.approx((6 + 4 - 1) * 3e-6)
    assert answer["chain_objective_s"] == pytest.approx((6 + 6 - 1) * 3e-6)
    assert "not series-parallel" in " ".join(text.split())
    parts = json_of(*words, "--split-dense", "e,f", "--json")
    assert {"e of b", "e of c", "f of d", "f of e"} < {name for stage in parts["stages"] for name in stage["layers"]}


test_what_cannot_be_planned_is_refused = refused(
    (lambda: GraphCluster(0), "0 devices"),
    (lambda: GraphCluster(2, bytes_per_s=0), "0 bytes/s"),
    (lambda: GraphCluster(2, replicate=True), "link's rate is not known"),
    (lambda: plan_graph(candle_uno(1), GraphCluster(2), 0), "0 microbatches"),
    (lambda: candle_uno(1).split_by_inputs("top.1"), "top.1 takes 1 inputs"),
    (lambda: candle_uno(1).split_by_inputs("top"), "unknown layer 'top'. Did you mean"),
    (lambda: plan_graph(candle_uno(1), GraphCluster(2, memory_bytes=1e6)), "no partition over 2 devices fits 1e"),
    (
        lambda: plan_graph(LayerGraph(tuple("abc"), *((1.0,) * 3,) * 4, edges=((0, 1), (0, 2))), GraphCluster(2)),
        "layers b, c are all last; the loss needs one",
    ),
)
