"""PipeDream's partitioner: the published objectives, an obvious recurrence, brute force, bad input."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.parallel.planning.hierarchical import COMBINE, CROSSING, Topology, search
from headway.parallel.planning.layers import LayerGraph
from tests.launching import headway_here, json_of
from tests.paths import shared

TWO, FLAT16, FLAT8 = Topology((4, 4), (1e10, 1.25e9)), Topology((16,), (1.25e9,)), Topology((8,), (1.25e9,))

PUBLISHED = {
    "alexnet": ("0.0150995", "0.0150995", "0.0150995"),
    "vgg16": ("0.0671340", "0.0547949", "0.1008414"),
    "resnet18": ("0.0234932", "0.0244255", "0.0436013"),
    "gnmt": ("0.0110810", "0.0171250", "0.0192850"),
}
"""Model -> objective of the published optimizer with transfers, for the three topologies."""


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> LayerGraph:
    """A first layer, then layers that each take the output of one or two before them."""
    n = draw(st.integers(1, most))
    edges = {(draw(st.integers(0, b - 1)), b) for b in range(1, n) for _ in range(draw(st.integers(1, 2)))}
    edges |= {(a, n - 1) for a in range(n - 1) if not any(source == a for source, _ in edges)}
    number = st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 3))
    columns = [tuple(draw(number) for _ in range(n)) for _ in range(4)]
    return LayerGraph(tuple(map(str, range(n))), *columns, tuple(sorted(edges)))


topologies = st.lists(st.tuples(st.integers(1, 4), st.floats(0.5, 20)), min_size=1, max_size=2).map(
    lambda levels: Topology(tuple(size for size, _ in levels), tuple(rate for _, rate in levels))
)


def recurrence(graph: LayerGraph, topology: Topology, combine: str = "sum", crossing: str = "published") -> float:
    """The recurrence of the module's head in plain Python, one value at a time."""
    cuts = graph.cuts()
    n, out = len(cuts.inside), CROSSING[crossing](cuts).tolist()
    precedes = cuts.precedes.tolist()
    weights = (cuts.inside @ np.array(graph.parameter_bytes)).tolist()
    total = (cuts.inside @ (np.array(graph.forward_s) + np.array(graph.backward_s))).tolist()
    add = {"sum": lambda a, b: a + b, "overlap": max}[combine]
    starts = {i: [j for j in range(n) if i < 0 or precedes[i][j]] for i in range(-1, n)}
    inner = {(i, j): total[j] - (total[i] if i >= 0 else 0.0) for i in starts for j in starts[i]}
    inner_size = 1
    for size, rate in zip(topology.sizes, topology.bytes_per_s, strict=True):
        best = {}
        for i, ends in starts.items():
            for m in range(1, size + 1):
                for j in ends:
                    w = weights[j] - (weights[i] if i >= 0 else 0.0)
                    least = add(inner[i, j], 4 * (m - 1) * w / (rate * m) / inner_size) / m
                    for k in ends:
                        if not precedes[k][j]:
                            continue
                        for r in range(1, m):
                            sync = 4 * (r - 1) * (weights[j] - weights[k]) / (rate * r)
                            time = max(best[i, k, m - r], add(inner[k, j], sync) / r, 2 * out[k] / (rate * r))
                            if j < n - 1:
                                time = max(time, 2 * out[j] / (rate * r))
                            least = min(least, time)
                    best[i, j, m] = least
        inner = {(i, j): best[i, j, size] for i in starts for j in starts[i]}
        inner_size = size
    return inner[-1, n - 1]


def brute(graph: LayerGraph, topology: Topology) -> float:
    """Try every chain of cuts and every number of replicas of each stage, on one level."""
    cuts, (size,), (rate,) = graph.cuts(), topology.sizes, topology.bytes_per_s
    each, out, last = np.add(graph.forward_s, graph.backward_s), cuts.published_bytes, len(cuts.inside) - 1

    def from_cut(at: int, left: int) -> float:
        best = math.inf
        for j in range(last + 1):
            if at >= 0 and not cuts.precedes[at, j]:
                continue
            layers = cuts.inside[j] & ~cuts.inside[at] if at >= 0 else cuts.inside[j]
            w = float(np.array(graph.parameter_bytes)[layers].sum())
            for r in [left] if j == last else range(1, left):
                time = (float(each[layers].sum()) + 4 * (r - 1) * w / (rate * r)) / r
                sent = [out[at]] if at >= 0 else []
                sent += [out[j]] if j < last and at >= 0 else []
                time = max([time] + [2 * b / (rate * r) for b in sent])
                best = min(best, time if j == last else max(time, from_cut(j, left - r)))
        return best

    return from_cut(-1, size)


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLISHED)
def test_the_published_objectives_to_every_printed_digit(model):
    graph = LayerGraph.from_pipedream(shared(f"pipedream/{model}.txt"))

    assert tuple(f"{search(graph, topology).objective_s:.7f}" for topology in (TWO, FLAT16, FLAT8)) == PUBLISHED[model]


@given(graphs(), topologies, st.sampled_from(sorted(COMBINE)), st.sampled_from(sorted(CROSSING)))
def test_the_objective_is_that_of_the_obvious_recurrence(graph, topology, combine, crossing):
    found = search(graph, topology, allreduce=combine, transfers=crossing)

    assert found.objective_s == pytest.approx(recurrence(graph, topology, combine, crossing), rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(graphs(most=6), st.integers(1, 4), st.floats(0.5, 20))
def test_no_partition_of_one_level_is_better(graph, size, rate):
    topology = Topology((size,), (rate,))

    assert search(graph, topology).objective_s == pytest.approx(brute(graph, topology), rel=1e-9, abs=1e-12)


@given(graphs(), topologies)
def test_a_plan_uses_each_layer_once_and_all_devices_and_is_no_slower_than_data_parallelism(graph, topology):
    found = search(graph, topology)
    faster = search(graph, replace(topology, bytes_per_s=tuple(2 * rate for rate in topology.bytes_per_s)))

    assert sorted(name for stage in found.stages for name in stage.layers) == sorted(graph.names)
    assert sum(stage.replicas for stage in found.stages) == math.prod(topology.sizes)
    assert faster.objective_s <= found.objective_s <= found.data_parallel_s
    assert search(graph, topology, transfers="exact").objective_s <= found.objective_s


def test_the_verb_prints_the_plan_and_advises_against_a_pipeline_that_loses(tmp_path):
    times = "forward_compute_time=1.0, backward_compute_time=2.0"
    line = "node{0} -- Linear -- " + times + ", activation_size={1}, parameter_size=8\n"
    file = tmp_path / "graph.txt"
    file.write_text(line.format(1, "[4e8; 1e8]") + line.format(2, 4.0) + "\tnode1 -- node2\n")
    words = ("parallel", "plan", "--profile", file, "--levels", "2", "--bandwidth", "1e9")
    answer, text = json_of(*words, "--json"), headway_here(*words).stdout

    assert answer["objective_s"] == pytest.approx(0.003, rel=1e-4)
    assert [stage["replicas"] for stage in answer["stages"]] == [2]
    assert "Do not pipeline" in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward_compute_time=nan", "forward_s of layer node2 Linear is nan"),
        ("forward_compute_time=-1", "forward_s of layer node2 Linear is -0.001"),
        ("forward_compute_time=soon", "layer node2 has a cost that is no number"),
    ],
)
def test_a_cost_that_is_no_number_names_its_layer(text, message, tmp_path):
    rest = "backward_compute_time=2.0, activation_size=4, parameter_size=8"
    file = tmp_path / "graph.txt"
    file.write_text(
        f"node1 -- Linear -- forward_compute_time=1, {rest}\nnode2 -- Linear -- {text}, {rest}\n\tnode1 -- node2\n"
    )

    with pytest.raises(InputError, match=message):
        LayerGraph.from_pipedream(file)


def test_graphs_and_topologies_that_cannot_be_are_refused():
    costs = {
        "forward_s": (1.0,) * 3, "backward_s": (1.0,) * 3, "output_bytes": (1.0,) * 3, "parameter_bytes": (9.0,) * 3,
    }  # fmt: skip
    with pytest.raises(InputError, match="layer c has no edge"):
        LayerGraph(("a", "b", "c"), **costs, edges=((0, 1),))
    with pytest.raises(InputError, match="layers a -> b feed each other"):
        LayerGraph(("a", "b", "c"), **costs, edges=((0, 1), (1, 0), (1, 2)))
    with pytest.raises(InputError, match="size 0"):
        Topology((0,), (1.0,))
    chain = LayerGraph.chain(**costs)
    with pytest.raises(InputError, match="no partition over 2 devices fits 1 bytes"):
        search(chain, Topology((2,), (1.0,), memory_bytes=1.0))
    with pytest.raises(InputError, match="unknown allreduce"):
        search(chain, Topology((2,), (1.0,)), allreduce="some")
