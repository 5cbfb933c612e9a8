"""The pipeline planner: orders, costs and slices against brute force, and against the published plans."""

import itertools
import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import CycleError, FormatError, InputError, UnknownNameError
from headway.data.pipeline.operators import ops_text, parse_ops, read_ops, read_stats, stats_text
from headway.data.pipeline.optimize import (
    Op,
    PipelinePlan,
    PipelineProfile,
    Resources,
    cheapest_order,
    local_workers,
    op_costs,
    plan,
)
from tests.launching import headway_here, json_of, refusal
from tests.oracles import legal_orders
from tests.paths import ROOT, shared


@st.composite
def pipelines(draw, most: int = 6):
    """A source and up to `most` operators with random dependencies, fixed places and figures."""
    count = draw(st.integers(1, most))
    ids = [count, *range(count - 1, -1, -1)]
    ops = [Op(count, "source", source=True)]
    for place, op in enumerate(ids[1:], start=1):
        depends = draw(st.sets(st.sampled_from(ids[:place]), max_size=2))
        ops.append(Op(op, f"op{op}", tuple(sorted(depends)), fixed=draw(st.booleans()) and draw(st.booleans()),
                      random=draw(st.booleans())))  # fmt: skip
    number = st.floats(0.01, 100)
    sizes = {op: (draw(number), draw(number)) for op in ids}
    profile = PipelineProfile(
        in_bytes={op: sizes[op][0] for op in ids},
        out_bytes={op: sizes[op][1] for op in ids},
        seconds={op: draw(number) for op in ids},
        examples_per_s=draw(number),
        offloaded={"RAY": {op: draw(number) for op in draw(st.sets(st.sampled_from(ids)))}},
    )
    return tuple(ops), profile


def brute_cost(profile, order):
    """The published cost, in the published form: ms from shares of the throughput."""
    total_ms, size = 0.0, None
    for op in order:
        base = profile.seconds[op] / sum(profile.seconds.values()) * 1000 / profile.examples_per_s
        if size is None:
            total_ms, size = base, profile.out_bytes[op]
            continue
        total_ms += base * size / profile.in_bytes[op]
        size *= profile.out_bytes[op] / profile.in_bytes[op]
    return total_ms


@given(pipelines())
def test_the_cheapest_order_is_the_least_of_a_brute_force(pipeline):
    ops, profile = pipeline
    orders = list(legal_orders(ops))

    order, count = cheapest_order(ops, profile)

    assert order in orders
    assert count == len(orders)
    assert brute_cost(profile, order) == pytest.approx(min(brute_cost(profile, one) for one in orders), rel=1e-9)
    assert 1000 * sum(op_costs(profile, order).values()) == pytest.approx(brute_cost(profile, order), rel=1e-9)


@given(pipelines())
def test_a_plan_never_costs_more_than_what_was_written(pipeline):
    ops, profile = pipeline

    best = plan(ops, profile)

    assert best.planned_s <= best.cost_s * (1 + 1e-9)
    assert best.cost_s <= best.baseline_s * (1 + 1e-9)
    inside = [op for part in best.slices for op in part.ops]
    assert len(inside) == len(set(inside))
    assert set(inside) <= set(profile.offloaded["RAY"])
    assert all(tuple(part.ops) == best.order[(k := best.order.index(part.ops[0])) : k + len(part.ops)]
               for part in best.slices)  # fmt: skip


@given(pipelines())
def test_plans_and_files_survive_a_round_trip(pipeline):
    ops, profile = pipeline
    best = plan(ops, profile)

    assert PipelinePlan.from_json(json.dumps(best.to_json())) == best
    assert parse_ops(ops_text(ops)) == ops


def test_a_profile_survives_its_file(tmp_path):
    profile = PipelineProfile({1: 0.0, 0: 5.0}, {1: 5.0, 0: 2.5}, {1: 0.25, 0: 0.5}, 1.5, {"RAY": {0: 3.0}}, 1e-9)
    (tmp_path / "p.yaml").write_text(stats_text(profile))

    assert read_stats(tmp_path / "p.yaml") == profile


@given(pipelines(), st.integers(1, 100), st.floats(1, 1e4))
def test_nothing_random_is_cached(pipeline, num_examples, free):
    ops, profile = pipeline

    best = plan(ops, profile, Resources(cache_bytes=int(free), num_examples=num_examples))

    if best.cache_after is not None:
        upto = best.order[: best.order.index(best.cache_after) + 1]
        assert not any(op.random for op in ops if op.id in upto)
        assert not set(upto) & {op for part in best.slices for op in part.ops}


def test_a_cache_leaves_what_comes_after_it_and_its_reads():
    ops = (Op(2, "read", source=True), Op(1, "decode"), Op(0, "crop", random=True, depends_on=(1,)))
    profile = PipelineProfile({2: 0, 1: 100, 0: 400}, {2: 100, 1: 400, 0: 50}, {2: 1.0, 1: 2.0, 0: 1.0}, 1.0, {}, 0.001)

    best = plan(ops, profile, Resources(cache_bytes=4000, num_examples=10))
    small = plan(ops, profile, Resources(cache_bytes=3999, num_examples=10))

    assert (best.cache_after, best.planned_s) == (1, pytest.approx(0.25 + 0.4))
    assert (small.cache_after, small.planned_s) == (2, pytest.approx(0.75 + 0.1))


def test_without_other_machines_nothing_is_moved_to_them():
    ops = (Op(1, "read", source=True), Op(0, "decode"))
    profile = PipelineProfile({1: 0, 0: 100}, {1: 100, 0: 400}, {1: 1.0, 0: 9.0}, 1.0, {"RAY": {0: 5.0}})

    assert plan(ops, profile, Resources()).slices
    alone = plan(ops, profile, Resources(slots=0))
    assert (alone.slices, alone.reasons[-1]) == ((), "offload: none, there are no other machines")
    assert plan(ops, profile, Resources(variant="SMP")).slices == ()


def test_workers_follow_the_target_and_stay_within_the_cores():
    assert local_workers(0.01, 10, Resources(cores=4), offloads=False) == 4
    assert local_workers(0.01, 10, Resources(cores=4, target_examples_per_s=200), offloads=False) == 3
    assert local_workers(0.01, 10, Resources(cores=4, target_examples_per_s=9999), offloads=False) == 4
    assert local_workers(0.005, 450_000, Resources(cores=4), offloads=False) == 1
    assert local_workers(0.005, 450_000, Resources(cores=4), offloads=True) == 4


PUBLISHED = {
    "simclrv2/stats/cedar_remote.yaml": (1260, 9.8076, [{8, 3, 6, 2, 5, 4}], [33], [4]),
    "coco/stats/coco_local_stats.yaml": (30, 85.1508, [], [], []),
    "coco/stats/coco_remote_stats.yaml": (30, 78.3188, [{6, 1}], [2], [4]),
    "commonvoice/stats/cedar.yaml": (6, 36.7549, [{6, 5, 4, 2, 1, 3, 0}], [3], [4]),
    "wikitext103/stats/cedar.yaml": (2, 0.5100, [{7, 6, 5, 4, 3}], [500], [32]),
}
"""Profile -> legal orders, published cost, slices, submit batches, actors."""

PLANS = {
    "simclrv2/stats/cedar_remote.yaml": ("simclrv2/configs/eval_ember_remote.yaml", [9]),
    "simclrv2/stats/cedar_stats.yaml": ("simclrv2/configs/eval_ember_local.yaml", [9]),
    "coco/stats/coco_local_stats.yaml": ("coco/configs/cedar_local_plan.yml", [6]),
    "coco/stats/coco_remote_stats.yaml": ("coco/configs/cedar_remote_plan.yml", []),
    "wikitext103/stats/cedar.yaml": ("wikitext103/configs/eval_remote.yaml", [8]),
}
"""Profile -> published plan, and the operators in front of its graph."""


def published_order(path, ids):
    """The operators of a published plan in their order, fused ones in place."""
    graph = yaml.safe_load(shared(f"cedar/{path}").read_text())["physical_plan"]
    after = {op: int(next_op) for op, next_op in graph["graph"].items() if next_op}
    op = next(iter(set(after) - set(after.values())))
    order = []
    while True:
        order += graph["pipes"][op].get("fused_pipes", [op])
        if op not in after:
            return tuple(op for op in order if op in ids)
        op = after[op]


@pytest.mark.parametrize("stats", PUBLISHED)
def test_the_published_plans_are_found(stats):
    ops = ROOT / "benchmarks" / "data" / f"{stats.split('/')[0]}.toml"
    answer = json_of("data", "plan", "--stats", shared(f"cedar/{stats}"), "--ops", ops, "--json")
    num_orders, cost, fused, submit, actors = PUBLISHED[stats]

    assert answer["orders"] == num_orders == len(list(brute_orders_of(ops)))
    assert answer["cost_ms"] == pytest.approx(cost, abs=1e-4)
    assert [set(part) for part in answer["fused"]] == fused
    assert list(answer["submit_batch"].values()) == submit
    assert list(answer["actors"].values()) == actors


def brute_orders_of(path):
    """Legal orders of a file of operators; fixed ones are left out of the permutations, for speed."""
    ops = read_ops(path)
    free = [k for k, op in enumerate(ops) if not (op.fixed or op.source)]
    for picked in itertools.permutations(ops[k].id for k in free):
        order = [op.id for op in ops]
        for k, op in zip(free, picked, strict=True):
            order[k] = op
        if all(order.index(other) < order.index(op.id) for op in ops for other in op.depends_on):
            yield tuple(order)


@pytest.mark.parametrize("stats", sorted({*PUBLISHED, *PLANS}))
def test_the_cost_is_the_least_of_every_legal_order_and_that_of_the_published_plan(stats):
    ops_file = ROOT / "benchmarks" / "data" / f"{stats.split('/')[0]}.toml"
    ops, profile = read_ops(ops_file), read_stats(shared(f"cedar/{stats}"))

    best = plan(ops, profile)

    least = min(brute_cost(profile, order) for order in brute_orders_of(ops_file))
    assert 1000 * best.cost_s == pytest.approx(least, abs=1e-6)
    if stats in PLANS:
        path, _ = PLANS[stats]
        order = published_order(path, {op.id for op in ops})
        assert len(order) == len(ops)
        assert 1000 * best.cost_s == pytest.approx(brute_cost(profile, order), abs=1e-6)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((Op(1, "a", source=True), Op(1, "b")), "both have the id 1"),
        ((Op(1, "a", source=True), Op(0, "b", depends_on=(7,))), "depends on 7, which is not there"),
        ((Op(1, "a"), Op(0, "b")), "begins with its one source"),
        ((Op(2, "a", source=True), Op(1, "b", depends_on=(0,)), Op(0, "c", depends_on=(1,))), "no order is legal"),
        ((Op(2, "a", source=True), Op(5, "other")), "no input size of operator 5 .other."),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(ops, message):
    profile = PipelineProfile({2: 0, 1: 1, 0: 1}, {2: 1, 1: 1, 0: 1}, {2: 1, 1: 1, 0: 1}, 1)

    with pytest.raises(InputError, match=message):
        plan(ops, profile)


def test_a_cycle_is_called_one():
    ops = (Op(2, "a", source=True), Op(1, "b", depends_on=(0,)), Op(0, "c", depends_on=(1,)))

    with pytest.raises(CycleError, match="Drop one of: 1 after 0, 0 after 1"):
        plan(ops, PipelineProfile({2: 0, 1: 1, 0: 1}, {2: 1, 1: 1, 0: 1}, {2: 1, 1: 1, 0: 1}, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_bytes": {1: 0, 0: 0}}, "operator 0 .crop. has an input of 0 bytes"),
        ({"out_bytes": {1: 5}}, "no output size of operator 0"),
        ({"seconds": {1: 1, 0: -1}}, "latency of operator 0 .crop. is -1"),
        ({"seconds": {1: 0, 0: 0}}, "takes any time"),
        ({"examples_per_s": 0}, "throughput is 0"),
        ({"in_bytes": {1: 0, 0: math.nan}}, "input size of operator 0 .crop. is nan"),
    ],
)
def test_a_profile_that_cannot_be_names_the_operator(change, message):
    figures = {"in_bytes": {1: 0, 0: 5}, "out_bytes": {1: 5, 0: 5}, "seconds": {1: 1, 0: 1}, "examples_per_s": 1}

    with pytest.raises(InputError, match=message):
        plan((Op(1, "read", source=True), Op(0, "crop")), PipelineProfile(**{**figures, **change}))


def test_files_that_cannot_be_are_refused(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("baseline: {latencies: [1]}")

    with pytest.raises(FormatError, match="input_sizes"):
        read_stats(bad)
    with pytest.raises(InputError, match="cannot read"):
        read_stats(tmp_path / "absent.yaml")
    with pytest.raises(UnknownNameError, match="Did you mean 'depends_on'"):
        parse_ops('[[op]]\nid = 1\nname = "a"\ndepend_on = [2]')
    with pytest.raises(FormatError, match="has no name"):
        parse_ops("[[op]]\nid = 1")
    with pytest.raises(FormatError, match="id is 'x'"):
        parse_ops('[[op]]\nid = "x"\nname = "a"')
    with pytest.raises(InputError, match="no pipeline plan"):
        PipelinePlan.from_json("{}")


def test_the_command_explains_itself():
    ops = ROOT / "benchmarks" / "data" / "simclrv2.toml"
    stats = shared("cedar/simclrv2/stats/cedar_remote.yaml")

    text = " ".join(headway_here("data", "plan", "--stats", stats, "--ops", ops, "--explain").stdout.split())

    assert "the least of 1260 legal orders" in text
    assert "33 examples per submission" in text
    assert refusal("data", "plan", "--json")
