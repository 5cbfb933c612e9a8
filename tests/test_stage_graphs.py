"""Pipelines whose stages form a graph: GraphPipe's rule and tables, the chain as a case of it, closed forms, files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.sim.pipeline.actions import StageGraph
from headway.sim.pipeline.lower import check, lower
from headway.sim.pipeline.orders import GraphFile, PipelineShape, one_f_one_b
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import costs_of, evaluate, simulate
from tests.launching import json_of

ON_GRAPHS = ("gpipe", "1f1b", "graph_1f1b", "zero_bubble")
"""Orders that place one stage on a rank."""

DIAMOND = StageGraph(((), (0,), (0,), (1, 2)))
BRANCHES = StageGraph(((), (0,), (0,), (0,), (1, 2, 3)))

PUBLISHED = {
    "CANDLE-Uno, sequential": (StageGraph.chain(6), [64] * 6, (384, 320, 256, 192, 128, 64)),
    "CANDLE-Uno": (StageGraph(((),) * 4 + ((0, 1, 2, 3), (4,))), [64] * 6, (192, 192, 192, 192, 128, 64)),
    "DLRM": (StageGraph.chain(3), [128] * 3, (384, 256, 128)),
    "residual network": (StageGraph.chain(8), [2] * 8, (16, 14, 12, 10, 8, 6, 4, 2)),
    "residual network, 2 turns of 1": (StageGraph.chain(7), [2 * 1] * 3 + [1 * 2] * 4, (14, 12, 10, 8, 6, 4, 2)),
}
"""Model -> its stages, k b of each, and the examples in flight that the published strategy files have."""


@st.composite
def stage_graphs(draw: st.DrawFn, most: int = 8) -> StageGraph:
    """A graph with one last stage; several stages may be first."""
    n = draw(st.integers(1, most))
    preds = [draw(st.sets(st.integers(0, s - 1), max_size=3)) if s else set() for s in range(n)]
    for stage in range(n - 1):
        if not any(stage in sources for sources in preds):
            preds[draw(st.integers(stage + 1, n - 1))].add(stage)
    return StageGraph(tuple(tuple(sorted(sources)) for sources in preds))


def times(size: int) -> st.SearchStrategy[list[list[int]]]:
    """Forward, input and weight times of each stage."""
    return st.lists(st.lists(st.integers(1, 40), min_size=size, max_size=size), min_size=3, max_size=3)


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_rule_of_examples_in_flight_gives_the_published_tables(model):
    graph, sizes, in_flight = PUBLISHED[model]

    assert graph.in_flight(sizes) == in_flight


@pytest.mark.slow
@settings(max_examples=50)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "graph_1f1b"])
@given(graph=stage_graphs(), m=st.integers(1, 12), each=st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_equal_stages_idle_for_the_longest_path_less_one_microbatches(name, graph, m, each):
    n, depths = len(graph.preds), graph.in_flight()
    found = evaluate(SCHEDULES[name], PipelineShape.of_graph(graph, m, *([t] * n for t in each)))

    assert found.makespan_ns == (m + max(depths) - 1) * sum(each)
    assert found.bubble_overhead == pytest.approx((max(depths) - 1) / m, rel=1e-12)
    assert list(found.peak_activations) == [m if name == "gpipe" else min(m, depth) for depth in depths]


@pytest.mark.slow
@settings(max_examples=5)
@pytest.mark.parametrize("name", ON_GRAPHS)
@given(data=st.data(), m=st.integers(1, 6), comm_ns=st.integers(0, 20))
def test_every_order_on_any_graph_passes_the_checks_and_does_all_work(name, data, m, comm_ns):
    graph = data.draw(stage_graphs(5))
    shape = PipelineShape.of_graph(graph, m, *data.draw(times(len(graph.preds))), comm_ns=comm_ns)
    program = lower(SCHEDULES[name](shape), graph)

    assert check(program).num_messages == 2 * m * sum(map(len, graph.preds))
    assert simulate(program, costs_of(shape)).busy_ns.tolist() == [m * sum(each) for each in shape.stage_ns or ()]


@pytest.mark.slow
@settings(max_examples=5)
@pytest.mark.parametrize("name", ON_GRAPHS)
@given(p=st.integers(1, 5), m=st.integers(1, 6), each=st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_a_chain_given_as_a_graph_is_the_chain_to_the_nanosecond(name, p, m, each):
    chain = PipelineShape(p, m, 1, *each, comm_ns=3)
    graph = PipelineShape.of_graph(StageGraph.chain(p), m, *([t] * p for t in each), comm_ns=3)

    assert SCHEDULES[name](graph) == SCHEDULES[name](chain)
    assert evaluate(SCHEDULES[name], graph) == evaluate(SCHEDULES[name], chain)


@settings(max_examples=50)
@given(data=st.data(), m=st.integers(1, 9), comm_ns=st.integers(0, 40), cap=st.none() | st.integers(1, 4))
def test_unequal_stages_take_no_longer_than_the_fixed_order_and_stay_within_the_caps(data, m, comm_ns, cap):
    graph = data.draw(stage_graphs())
    shape = PipelineShape.of_graph(graph, m, *data.draw(times(len(graph.preds))), comm_ns=comm_ns, cap=cap)
    found = evaluate(SCHEDULES["graph_1f1b"], shape)

    most = [min(depth, cap or depth) for depth in graph.in_flight()]
    assert all(held <= limit for held, limit in zip(found.peak_activations, most, strict=True))
    if cap is None:
        assert found.makespan_ns <= evaluate(one_f_one_b, shape).makespan_ns


def test_the_verb_simulates_a_file_with_the_keys_of_a_chain(tmp_path):
    rows = [("text", []), ("image", []), ("sound", []), ("join", ["text", 1, "sound"]), ("loss", ["join"])]
    stages = [{"name": name, "preds": preds, "forward_ns": 10, "backward_ns": 20} for name, preds in rows]
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"stages": stages}))
    found = [
        json_of("parallel", "simulate", "--schedule", "graph_1f1b", "--microbatches", "8", "--json", *where)
        for where in (["--graph", file], ["--stages", "3", "--forward-ns", "10", "--backward-ns", "20"])
    ]

    assert found[0].keys() == found[1].keys()
    assert found[0]["makespan_ns"] == found[1]["makespan_ns"] == 300
    assert found[0]["peak_activations"] == [3, 3, 3, 2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"stages": [{"name": "a", "forward_ns": 1, "backward_ns": -1}]}', r"\$.stages\[0\].backward_ns"),
        ('{"stages": [{"name": "a", "forward_ns": 1}]}', "backward_ns"),
        ('{"stage": []}', "unknown field"),
        ('{"stages": []}', "no stages"),
        ('{"stages": [{"name": "a", "forward_ns": 1, "backward_ns": 1, "preds": ["A"]}]}', "Did you mean 'a'"),
        ('{"stages": [{"name": "a", "forward_ns": 1, "backward_ns": 1, "preds": ["a"]}]}', "0 -> 0 feed each other"),
        (json.dumps({"stages": [{"name": n, "forward_ns": 1, "backward_ns": 1} for n in "aa"]}), "two stages called"),
        (
            json.dumps({"stages": [{"name": n, "forward_ns": 1, "backward_ns": 1, "preds": p}
                                   for n, p in (("a", []), ("b", ["a"]), ("c", ["a"]))]}),
            "are all last; the loss needs one",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_graph_of_stages_is_refused(text, message, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(text)

    with pytest.raises((InputError, FormatError), match=message):
        GraphFile.read(file).shape(4)


def test_shapes_that_do_not_fit_their_graph_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.json"):
        GraphFile.read(tmp_path / "nothing.json")
    with pytest.raises(InputError, match="4 stages of a graph on 3 ranks"):
        PipelineShape(3, 4, graph=DIAMOND)
    with pytest.raises(InputError, match="give 4 times"):
        PipelineShape.of_graph(DIAMOND, 4, [1] * 3, [1] * 4, [1] * 4)
    with pytest.raises(InputError, match="needs stages that each feed the next one"):
        SCHEDULES["interleaved"](PipelineShape.of_graph(BRANCHES, 4, [1] * 5, [1] * 5, [1] * 5))
