"""Pipelines that run on gloo ranks: every schedule against the same training in one process."""

from __future__ import annotations

import pytest
import torch

from headway.sim.pipeline.schedules import SCHEDULES
from tests.pipelining_rank import M, merged, stale, synchronous, trained
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


@pytest.mark.parametrize(("name", "ranks", "interleave"), FLUSHED)
def test_every_flushed_schedule_trains_as_the_whole_model(name, ranks, interleave):
    answers = on_ranks(trained, ranks, name, "sgd", 3, {"interleave": interleave})

    assert agree(merged(answers), synchronous("sgd", 3), 1e-10)
    assert [versions for *_, versions in answers] == [1] * ranks
    assert sorted(len(losses[0]) for _, losses, _ in answers) == [0] * (ranks - 1) + [M]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_async_1f1b_is_the_oracle_of_stale_weights(optimizer, vertical_sync):
    answers = on_ranks(trained, 4, "async_1f1b", optimizer, 4, {"vertical_sync": vertical_sync})
    lag = (lambda s: 3) if vertical_sync else (lambda s: 3 - s)

    assert agree(merged(answers), stale(optimizer, 4, lambda s, t: t - lag(s), every=1), 1e-12)
    assert [versions for *_, versions in answers] == ([4] * 4 if vertical_sync else [4, 3, 2, 1])


@pytest.mark.parametrize(("steps", "m", "flushes"), [(1, 1, ()), (7, 1, ()), (3, 3, ()), (5, 2, ())])
def test_async_1f1b_is_right_while_it_fills_and_drains(steps, m, flushes):
    answers = on_ranks(trained, 4, "async_1f1b", "sgd", steps, {"num_microbatches": m}, flushes)

    assert agree(merged(answers), stale("sgd", steps, lambda s, t: t - 3 + s, every=1, m=m), 1e-12)


@pytest.mark.parametrize("flushes", [(), (0, 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_buffer_reads_the_weights_of_the_step_before_also_over_a_flush(optimizer, flushes):
    answers = on_ranks(trained, 4, "two_buffer", optimizer, 4, {}, flushes)

    assert agree(merged(answers), stale(optimizer, 4, lambda s, t: t // M - 1, every=M), 1e-12)
    assert [versions for *_, versions in answers] == [2] * 4
