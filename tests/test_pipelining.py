"""Pipelines that run on gloo ranks: every schedule against the same training in one process."""

import copy
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headway.parallel import pipeline
from headway.sim.pipeline.actions import PipelineProgram
from headway.sim.pipeline.lower import check
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import evaluate
from headway.sim.pipeline.weight_versions import FLUSH_FREE, rows_of, step_loop, versioned
from tests.made.pool import RankFailedError
from tests.pipelining_rank import (
    GRAPHS,
    OPTIMIZERS,
    M,
    batches,
    merged,
    refused,
    saved_and_resumed,
    stale,
    synchronous,
    synchronous_graph,
    synchronous_tied,
    trained,
    trained_graph,
    trained_often,
    trained_tied,
    with_a_peer_that,
)  # fmt: skip
from tests.spawn import on_ranks

FLUSHED = [
    (name, *({"interleaved": (2, 2), "v": (2, 2)}.get(name, (4, 1))))
    for name in SCHEDULES
    if name not in ("async_1f1b", "two_buffer", "graph_1f1b")
]


def agree(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> bool:
    """Say whether two states have the same names and values."""
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], value.double(), rtol=0, atol=tolerance) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "interleave"), FLUSHED)
def test_every_flushed_schedule_trains_as_the_whole_model(name, ranks, interleave):
    answers = on_ranks(trained, ranks, name, "sgd", 3, {"interleave": interleave})

    assert agree(merged(answers), synchronous("sgd", 3), 1e-10)
    assert [versions for *_, versions in answers] == [1] * ranks
    assert sorted(len(losses[0]) for _, losses, _ in answers) == [0] * (ranks - 1) + [M]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_async_1f1b_is_the_oracle_of_stale_weights(optimizer, vertical_sync):
    answers = on_ranks(trained, 4, "async_1f1b", optimizer, 4, {"vertical_sync": vertical_sync})
    lag = (lambda s: 3) if vertical_sync else (lambda s: 3 - s)

    assert agree(merged(answers), stale(optimizer, 4, lambda s, t: t - lag(s), every=1), 1e-12)
    assert [versions for *_, versions in answers] == ([4] * 4 if vertical_sync else [4, 3, 2, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "m", "flushes"), [(1, 1, ()), (7, 1, ()), (3, 3, ()), (5, 2, ())])
def test_async_1f1b_is_right_while_it_fills_and_drains(steps, m, flushes):
    answers = on_ranks(trained, 4, "async_1f1b", "sgd", steps, {"num_microbatches": m}, flushes)

    assert agree(merged(answers), stale("sgd", steps, lambda s, t: t - 3 + s, every=1, m=m), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("flushes", [(), (0, 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_buffer_reads_the_weights_of_the_step_before_also_over_a_flush(optimizer, flushes):
    answers = on_ranks(trained, 4, "two_buffer", optimizer, 4, {}, flushes)

    assert agree(merged(answers), stale(optimizer, 4, lambda s, t: t // M - 1, every=M), 1e-12)
    assert [versions for *_, versions in answers] == [2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_buffer_is_its_oracle_on_drawn_sizes(ranks):
    draw = random.Random(ranks)
    cases = [(draw.randint(ranks, 2 * ranks + 2), draw.randint(1, 5)) for _ in range(10)]
    answers = on_ranks(trained_often, ranks, "two_buffer", cases)

    for case, (m, steps) in enumerate(cases):
        expected = stale("sgd", steps, lambda s, t, m=m: t // m - 1, every=m, m=m, stages=ranks)
        assert agree(merged([answer[case] for answer in answers]), expected, 1e-12)
        assert all(answer[case][1] == min(2, steps + 1) for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["graph", "gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", GRAPHS)
def test_gradients_on_a_graph_of_stages_are_those_of_the_whole_model(name, schedule):
    answers = on_ranks(trained_graph, 4, name, schedule, 2)

    assert agree(merged(answers), synchronous_graph(name, 2), 1e-10)


@pytest.mark.slow
@given(
    ranks=st.integers(1, 5), m=st.integers(1, 7), steps=st.integers(1, 6), name=st.sampled_from(sorted(FLUSH_FREE)),
    vertical_sync=st.booleans(),
)  # fmt: skip
def test_steps_and_what_is_left_of_a_stream_are_the_stream(ranks, m, steps, name, vertical_sync):
    m = max(m, ranks) if name == "two_buffer" else m
    program = versioned(name, PipelineShape(ranks, m, num_steps=steps), vertical_sync=vertical_sync)
    check(program)

    for rank in range(ranks):
        loop = step_loop(name, PipelineShape(ranks, m), rank, vertical_sync=vertical_sync)
        parts = [*map(loop.step, range(steps)), loop.drain(steps)]
        whole = rows_of(program, rank)
        assert [row for part in parts for row in part.computations] == whole.computations
        assert sum(part.op.size for part in parts) == whole.op.size


@pytest.mark.parametrize("name", sorted(FLUSH_FREE))
def test_without_a_flush_a_step_of_the_steady_state_has_no_bubble(name):
    shape = PipelineShape(16, 16, forward_ns=10, input_ns=10, weight_ns=10)
    found = evaluate(SCHEDULES[name], shape)

    assert found.makespan_ns == 16 * 30
    assert found.bubble_fraction == 0
    assert evaluate(SCHEDULES["gpipe"], shape).makespan_ns / found.makespan_ns >= 1.88
    assert list(found.peak_activations) == list(range(16, 0, -1))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "two_buffer"])
@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_a_checkpoint_of_four_stages_goes_on_as_if_nothing_had_been_on_any_number(tmp_path, ranks, schedule):
    saved = on_ranks(saved_and_resumed, 4, str(tmp_path), schedule, 4, 2)
    resumed = on_ranks(saved_and_resumed, ranks, str(tmp_path), schedule, 4, None, 2)

    assert [step for _, step in resumed] == [2] * ranks
    assert agree(merged(resumed), merged(saved), 1e-12)


@pytest.mark.slow
def test_a_parameter_that_two_stages_share_stays_one():
    answers = on_ranks(trained_tied, 3, 3)

    assert agree(merged([(state,) for state in answers]), synchronous_tied(3), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("few", ["two_buffer has 1 micro-batches for 2 stages.*at least 2"] * 2),
        ("optimizer", ["optimizer is a SGD.*in place while.*Give a function"] * 2),
        ("other parameters", ["other parameters than it got.*Build it over its argument"] * 2),
        ("in place", ["0.weight was changed in place while 2 versions.*after runner.flush"]),
        ("sinks", ["stage 0 is not connected"] * 2),
        ("tied", ["stages 0 and 1 share a parameter: 0.weight is tied to 1.weight"] * 2),
        ("tied and traced", ["are one parameter, and under two_buffer.*such as 1f1b"] * 2),
        ("ragged", [r"stage 0 makes float32 \[2, 4\] for micro-batch 1 and made float32 \[3, 4\] before.*Pad"]),
        ("uneven", ["x has 11 examples, no multiple of 4 micro-batches.*Give 12"] * 2),
        ("listed", ["reads 0.inner.weight past its attributes.*such as 1f1b"]),
        ("name", ["Did you mean 'two_buffer'"] * 2),
        ("modules", ["the Sequential has 1 modules for 2 stages"] * 2),
        ("no input", ["stage 0 reads the input of the model. Pass x"]),
    ],
)
def test_what_cannot_train_is_one_error(case, messages):
    answers = on_ranks(refused, 2, case)

    for answer, message in zip(answers, messages, strict=False):
        assert answer.startswith(("InputError", "UnknownNameError"))
        assert re.search(message, answer)


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "said"), [("dies", "is gone"), ("stalls", "did not answer within 2 s")])
def test_a_peer_that_dies_or_stalls_is_named_with_edge_and_micro_batch(ends, said):
    edge = r"rank 0 receives the gradient of micro-batch \d from stage 1 to 0"

    with pytest.raises(RankFailedError, match=f"{edge}, and rank 1 {said}"):
        on_ranks(with_a_peer_that, 2, ends)


LAYERS = {"norm": lambda: nn.LayerNorm(6), "conv": lambda: nn.Conv1d(6, 6, 1)}


@pytest.mark.parametrize("name", LAYERS)
def test_why_versions_are_leaves_an_update_in_place_raises_and_other_data_is_silently_wrong(name):
    module, x = LAYERS[name](), torch.randn(1, 6, 6, requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), x)[0]

    loss = module(x).square().sum()
    module.weight.data = module.weight.data + 1
    assert not torch.allclose(torch.autograd.grad(loss, x)[0], expected)
    loss = module(x).square().sum()
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_runner_runs_a_program_of_the_users_and_is_switched_between_schedules():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    data = batches(3)
    program = PipelineProgram.from_orders(SCHEDULES["zero_bubble"](PipelineShape(1, M)))
    settings = {"loss": nn.functional.mse_loss, "num_microbatches": M, "optimizer": OPTIMIZERS["adam"]}
    runner = pipeline(copy.deepcopy(model).double(), data[0][0], schedule="graph", **settings)
    plain = pipeline(model.double(), data[0][0], **settings)
    for (x, y), schedule in zip(data, (program, "two_buffer", "gpipe"), strict=True):
        runner.switch(schedule)
        runner.step(x, y)
        plain.step(x, y)

    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in runner.state_dict().items())
