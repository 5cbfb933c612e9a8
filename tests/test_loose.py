"""Loose synchronisation on gloo ranks: what each rule keeps, a travel, a saved state, and bad input."""

import copy
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from headway.comm import LOOSE, SkewController, loose, swap_norm
from headway.comm.remedies import LADDERS, read_rule
from headway.core.errors import InputError
from tests.spawn import on_ranks

RATE, STEPS = 0.1, 7


def network(norm: str = "") -> Any:
    torch.manual_seed(0)
    middle = {"batch": [nn.BatchNorm1d(6)], "group": [nn.GroupNorm(2, 6)], "": []}[norm]
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 3))


def batches(rank: int, steps: int = STEPS) -> list[Any]:
    draws = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(5, 4, generator=draws), torch.randint(3, (5,), generator=draws)) for _ in range(steps)]


def gradients(model: Any, batch: Any) -> list[Any]:
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return list(torch.autograd.grad(loss, list(model.parameters())))


def flat(model: Any) -> Any:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(rule: str, momentum: float = 0.0, update_scale: float = 1.0) -> dict[str, Any]:
    """Train on this rank's batches; return weights after each step, what was not sent, and the bytes."""
    model = loose(network(), rule, update_scale=update_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum, weight_decay=0.01 * (momentum > 0))
    weights, locals_ = [flat(model)], []
    for x, y in batches(dist.get_rank()):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        locals_.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        optimizer.step()
        weights.append(flat(model))
    state = model.get_extra_state()
    vectors = {name: vector.numpy() for name, vector in state["vectors"].items()}
    return {
        "weights": [one.numpy() for one in weights], "locals": [one.numpy() for one in locals_],
        "vectors": vectors, "bytes": state["sent_bytes"],
    }  # fmt: skip


def synchronous(ranks: int, momentum: float = 0.0, share: float | None = None) -> Any:
    """Return the weights after each step of a loop that adds up the gradients of all ranks, times `share`."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum, weight_decay=0.01 * (momentum > 0))
    weights = [flat(model)]
    for row in zip(*(batches(rank) for rank in range(ranks)), strict=True):
        columns = zip(*(gradients(model, batch) for batch in row), strict=True)
        for parameter, column in zip(model.parameters(), columns, strict=True):
            parameter.grad = sum(column) * (1 / ranks if share is None else share)
        optimizer.step()
        weights.append(flat(model))
    return [one.numpy() for one in weights]


@pytest.mark.parametrize(
    ("rule", "momentum", "share"), [("gaia:0", 0.0, 1.0), ("fedavg:1", 0.0, None), ("dgc:1", 0.9, None)]
)
def test_the_tightest_setting_of_a_rule_is_a_synchronous_job(rule, momentum, share):
    rows = on_ranks(trained, 3, rule, momentum)

    for row in rows:
        for weights, expected in zip(row["weights"], synchronous(3, momentum, share), strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


def test_gaia_with_scaled_updates_is_the_mean_that_ddp_gives():
    rows = on_ranks(trained, 2, "gaia:0", 0.0, 0.5)

    np.testing.assert_allclose(rows[1]["weights"][-1], synchronous(2)[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["gaia:0.3", "dgc:0.1"])
def test_what_all_ranks_sent_and_what_they_still_hold_is_the_sum_of_their_updates(rule):
    rows = on_ranks(trained, 3, rule)

    begin, unsent = rows[0]["weights"][0], [row["vectors"]["unsent"] for row in rows]
    if rule.startswith("gaia"):  # a rank has all of its own updates, and what others sent of theirs
        total = sum(-RATE * local for row in rows for local in row["locals"])
        for row, own in zip(rows, unsent, strict=True):
            sent = row["weights"][-1] - begin - own
            np.testing.assert_allclose(sent + sum(unsent), total, rtol=1e-4, atol=1e-5)
    else:  # without momentum, nobody has anything that was not sent
        total = sum(local for row in rows for local in row["locals"])
        sent = (begin - rows[0]["weights"][-1]) / RATE * 3
        np.testing.assert_allclose(sent + sum(unsent), total, rtol=1e-4, atol=1e-4)
    assert all(0 < row["bytes"] < STEPS * 4 * len(begin) for row in rows)
    assert any(np.abs(vector).max() > 0 for vector in unsent)


@pytest.mark.parametrize("rule", ["fedavg:3", "diloco:3", "dgc:0.2"])
def test_replicas_are_the_same_bits_after_an_average(rule):
    rows = on_ranks(trained, 3, rule, 0.9)

    assert all(np.array_equal(row["weights"][6], rows[0]["weights"][6]) for row in rows)
    drifted = not np.array_equal(rows[0]["weights"][7], rows[1]["weights"][7])
    assert drifted == (not rule.startswith("dgc"))


def test_fedavg_gives_the_weights_of_torchs_averager_and_diloco_those_of_torchs_nesterov():
    for peer, rule in ((averaged, "fedavg:3"), (outer, "diloco:3")):
        ours, theirs = on_ranks(trained, 2, rule), on_ranks(peer, 2)

        np.testing.assert_allclose(ours[0]["weights"][6], theirs[0], rtol=1e-6, atol=1e-7)


def averaged() -> Any:
    model, averager = network(), PeriodicModelAverager(period=3, warmup_steps=2)
    for batch in batches(dist.get_rank(), 6):
        for parameter, gradient in zip(model.parameters(), gradients(model, batch), strict=True):
            parameter.data -= RATE * gradient
            parameter.grad = gradient  # it averages parameters that have one
        averager.average_parameters(iter(model.parameters()))
    return flat(model).numpy()


def outer() -> Any:
    model = network()
    anchor = torch.nn.Parameter(flat(model))
    nesterov = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    for step, batch in enumerate(batches(dist.get_rank(), 6), 1):
        for parameter, gradient in zip(model.parameters(), gradients(model, batch), strict=True):
            parameter.data -= RATE * gradient
        if step % 3 == 0:
            mean = flat(model)
            dist.all_reduce(mean.div_(2))
            anchor.grad = anchor.detach() - mean
            nesterov.step()
            torch.nn.utils.vector_to_parameters(anchor.detach().clone(), model.parameters())
    return flat(model).numpy()


def resumed(rule: str, at: int) -> tuple[list[str], list[str], int]:
    """Train with a saved state in the middle; return losses behind it, those of a second job that took it, travels."""
    rows, rank = batches(dist.get_rank(), 40), dist.get_rank()
    options: Any = {"control": True, "probe": batches(10 + rank, 1)[0], "travel_steps": 6}

    def job() -> tuple[Any, Any]:
        model = loose(network("group"), rule, **options)
        return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

    def run(model: Any, optimizer: Any, part: list[Any]) -> list[str]:
        losses = []
        for x, y in part:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        return losses

    model, optimizer = job()
    run(model, optimizer, rows[:at])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = run(model, optimizer, rows[at:])
    travels = len(model.synchronising.travels)
    model.synchronising.close()
    model, optimizer = job()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return expected, run(model, optimizer, rows[at:]), travels


@pytest.mark.parametrize("rule", ["gaia:0.1", "fedavg:5", "dgc:0.25", "diloco:5"])
def test_a_job_that_is_restored_in_the_middle_of_a_travel_interval_has_the_same_losses_bit_for_bit(rule):
    for expected, found, travels in on_ranks(resumed, 2, rule, 15):
        assert found == expected
        assert travels >= 4


@st.composite
def valleys(draw: Any) -> Any:
    """Draw a ladder, and an accuracy loss that rises and a share of bytes that falls along it, both convex."""
    n = draw(st.integers(1, 9))
    steps = st.lists(st.floats(0.0, 0.1), min_size=n - 1, max_size=n - 1)
    losses = [draw(st.floats(-0.02, 0.05)), *sorted(draw(steps))]
    shares = [0.5**rung for rung in range(n)]
    return [float(rung) for rung in range(1, n + 1)], list(itertools.accumulate(losses)), shares


@given(valley=valleys(), start=st.integers(0, 8))
def test_the_controller_stays_on_its_ladder_and_ends_at_the_cheapest_rung(valley, start):
    ladder, losses, shares = valley
    controller, theta, seen = SkewController(ladder), ladder[min(start, len(ladder) - 1)], []
    for _ in range(3 * len(ladder) + 12):
        at = ladder.index(theta)
        theta = controller.next(theta, losses[at], shares[at])
        seen.append(theta)

    costs = [50 * max(0.0, loss - 0.05) + share for loss, share in zip(losses, shares, strict=True)]
    best = [theta for theta, cost in zip(ladder, costs, strict=True) if cost == min(costs)]
    assert set(seen) <= set(ladder)
    assert sum(theta in best for theta in seen[-12:]) >= 10


def test_a_looser_rung_that_seemed_better_than_a_tighter_one_is_forgotten():
    """AL grows along the ladder: where a tighter rung loses more, what the looser one lost is of another time."""
    controller = SkewController((1, 5, 20, 100))

    assert controller.next(20, 0.27, 0.05) == 5
    assert controller.next(5, 0.99, 0.2) == 1


def test_the_controller_follows_a_job_whose_accuracy_loss_changes():
    ladder, shares = LADDERS["fedavg"], [1 / steps for steps in LADDERS["fedavg"]]
    controller, theta = SkewController(ladder), 5.0
    for travel in range(60):
        at = ladder.index(theta)
        theta = controller.next(theta, max(0.0, (at - (2 if travel < 30 else 5)) * 0.2), shares[at])
        if travel == 29:
            assert theta == ladder[2]

    assert theta == ladder[5]


def faults() -> list[tuple[str, str]]:
    """Return what each bad call says, on this rank."""
    rank, found = dist.get_rank(), []
    ten = (torch.zeros(10, 4), torch.zeros(10, dtype=torch.long))
    calls: list[tuple[str, Any]] = [
        ("rung", lambda: loose(network(), "fedavg:7", control=True, probe=ten)),
        ("empty", lambda: loose(network(), "fedavg:5", control=True, probe=(ten[0][:0], ten[1][:0]) if rank else ten)),
        ("unlike", lambda: loose(network(), "fedavg:5" if rank else "fedavg:6")),
        ("buffers", lambda: loose(network("batch"), "fedavg:5", buffers=None)),
        ("adam", lambda: torch.optim.Adam((kept := loose(network(), "dgc:0.1")).parameters()).step() or kept),
        ("batchnorm", lambda: loose(network("batch"), "fedavg:5")),
    ]
    for name, call in calls:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                call()
            except InputError as cause:
                found.append((name, str(cause)))
            else:
                found.append((name, str(said[0].message)))
    return found


def test_bad_input_is_one_clear_error_or_warning_on_every_rank():
    for found in map(dict, on_ranks(faults, 2)):
        assert "no rung of 1, 5, 10" in found["rung"]
        assert "ranks [1] have no example" in found["empty"]
        assert "ranks [1] have another rule" in found["unlike"]
        assert "neither averaged nor left alone" in found["buffers"]
        assert "is Adam" in found["adam"]
        assert "BatchNorm in 1: " in found["batchnorm"]
        assert "headway.comm.swap_norm(model)" in found["batchnorm"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("gaia:1.5", "in \\[0, 1\\]"), ("fedavg:0", "whole number"), ("dgc:0", "1 sends everything"),
     ("diloco", "outer steps"), ("fedavgg:5", "Did you mean 'fedavg'"), (5, "write a name")],
)  # fmt: skip
def test_a_rule_that_is_none_says_what_it_may_be(name, says):
    with pytest.raises(InputError, match=says):
        read_rule(name)


def test_one_rank_is_told_that_nothing_is_done():
    with pytest.warns(UserWarning, match="one rank has nobody to synchronise with"):
        model = loose(network(), "gaia:0.1")

    assert model.state_dict()["module.0.weight"].shape == (6, 4)


def test_every_rule_has_a_ladder_whose_rungs_are_its_own_settings():
    assert set(LOOSE) == set(LADDERS)
    for kind, ladder in LADDERS.items():
        assert [read_rule(f"{kind}:{theta:g}").theta for theta in ladder] == list(ladder)


@given(channels=st.integers(2, 24), groups=st.integers(1, 12))
def test_swapped_norms_keep_weights_and_have_no_group_of_one_channel(channels, groups):
    layer = nn.BatchNorm2d(channels)
    model = swap_norm(nn.ModuleDict({"a": layer, "again": layer}), groups=groups)

    assert isinstance(model["a"], nn.GroupNorm)
    assert model["a"] is model["again"]
    assert model["a"].num_channels // model["a"].num_groups >= 2
    assert model["a"].num_groups <= groups
    assert model["a"].weight is layer.weight


def test_a_norm_of_one_channel_is_not_swapped():
    with pytest.raises(InputError, match=r"1 has 1 channels: a group of one element"):
        swap_norm(nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)))
