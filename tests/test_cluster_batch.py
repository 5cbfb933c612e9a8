"""The noise of gradients, another batch size inside a rank, and the command that chooses it."""

import json
import math
import shutil
from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from headway.cluster import NoiseScale
from headway.cluster.adaptive.apply import batch, noise
from headway.cluster.adaptive.recorded import Measured, noise_of
from headway.core.errors import InputError
from headway.runtime.in_rank.remedy import RefusedRemedy
from tests.launching import headway_here, json_of, refusal
from tests.paths import ROOT
from tests.remedy_context import TestContext, applied, apply
from tests.spawn import on_ranks

RUN = ROOT / "tests" / "golden" / "runs" / "before"
DIM, STEPS, BATCH = 100, 400, 32

needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="the extra `cluster` (scipy) is not installed")


@pytest.mark.parametrize("count", [2, 4])
def test_norms_of_known_gradients_give_their_mean_and_variance(count):
    rng = np.random.default_rng(count)
    mean, estimate, per_rank = rng.normal(0.0, 0.2, DIM), NoiseScale(count * 4), 4
    for _ in range(2000):
        gradients = mean + rng.normal(0.0, 1 / math.sqrt(per_rank), (count, DIM))
        local, total = (gradients**2).sum(axis=1).mean(), (gradients.mean(axis=0) ** 2).sum()
        estimate.add(local=local, total=total, count=count, batch_size=count * per_rank)

    assert estimate.sqr == pytest.approx(mean @ mean, rel=0.05)
    assert estimate.noise_scale == pytest.approx(DIM / (mean @ mean), rel=0.05)
    assert 1 <= estimate.gain(64) <= 64 / estimate.initial_batch


def test_steps_that_are_not_finite_are_counted_and_biased_ones_make_way():
    estimate = NoiseScale(8)
    estimate.add(local=9.0, total=5.0, count=2, batch_size=16, biased=True)
    assert estimate.biased
    assert not estimate.add(local=math.nan, total=1.0, count=2, batch_size=16)
    estimate.add(local=3.0, total=2.0, count=2, batch_size=16)
    assert not estimate.add(local=9.0, total=5.0, count=2, batch_size=16, biased=True)

    assert (estimate.skipped, estimate.num_steps, estimate.biased) == (1, 1, False)
    assert estimate.noise_scale == pytest.approx(16.0)
    with pytest.raises(InputError, match=r"1 gradient shows no variance"):
        estimate.add(local=1.0, total=1.0, count=1, batch_size=8)
    with pytest.raises(InputError, match=r"the initial batch is 0; it needs at least 1"):
        NoiseScale(0)


def quadratic(world_size):
    """Return this rank's samples of the loss ||w - x||^2 / 2: Sigma = DIM, and ||G||^2 = DIM / 20 at w^2 = 1/20."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.Linear(1, DIM, bias=False)
    torch.nn.init.constant_(model.weight, math.sqrt(1 / 20))
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer, each = torch.optim.SGD(model.parameters(), lr=0.0), BATCH // world_size
    with applied(noise, {}) as context:
        for _ in range(STEPS):
            x = torch.randn(each, DIM, generator=generator)
            optimizer.zero_grad()
            loss = 0.5 * ((wrapped(torch.ones(each, 1)) - x) ** 2).sum(dim=1).mean()
            loss.backward()
            optimizer.step()
    return context.outcomes[-1].facts["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_noise_scale_of_a_quadratic_is_measured_within_5_percent(tmp_path, world_size):
    found = on_ranks(quadratic, world_size, world_size)
    run = type("Run", (), {"path": tmp_path})()
    each = BATCH // world_size
    for samples in found:
        samples[9][1] = None  # what a gradient that is not finite leaves
    (tmp_path / "applied").mkdir()
    for rank, samples in enumerate(found):
        row = {"name": "cluster.noise", "applied": True, "facts": {"samples": samples}}
        (tmp_path / f"applied/r{rank}.json").write_text(json.dumps({"rank": rank, "remedies": [row]}))
    estimate = noise_of(run, Measured(1, world_size, each, 0, each, BATCH, 0.1, 0.1))

    assert estimate.biased == (world_size == 1)
    assert estimate.num_steps > STEPS / 2
    assert estimate.skipped == 1
    assert estimate.noise_scale == pytest.approx(20, rel=0.05)


def trained(parameters, make=torch.optim.SGD, *, examples=64, **options):
    """Return weights, learning rates of the updates and outcomes of a small job under the remedy."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 5, generator=generator)
    data = TensorDataset(x, x @ torch.arange(5.0)[:, None])
    rates = []
    with applied(batch, parameters, "lossy") if parameters else nullcontext(TestContext()) as context:
        model = torch.nn.Linear(5, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = make(model.parameters(), lr=0.01, **options)
        optimizer.register_step_pre_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
        for features, target in DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            ((model(features) - target) ** 2).mean().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.01
    return model.weight.detach(), rates, context.outcomes


SAME = {"batch_size": 8, "own_batch_size": 8, "accumulation": 0, "initial_batch": 8, "noise_scale": 24.0}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_recorded_batch_changes_nothing_bit_for_bit(make):
    assert torch.equal(trained(SAME, make)[0], trained(None, make)[0])


def test_a_larger_batch_has_the_learning_rate_of_its_gain():
    twice = {**SAME, "batch_size": 16}
    gain = 2 * (24 + 8) / (24 + 16)
    _, rates, outcomes = trained(twice)

    assert rates == pytest.approx([0.01 * gain] * 4)
    assert outcomes[-1].facts["num_loaders"] == 1
    assert trained(twice, torch.optim.AdamW)[1] == pytest.approx([0.01 * math.sqrt(gain)] * 4)


def test_accumulated_batches_are_one_large_batch():
    """Eight batches of 8 in updates of two are four batches of 16."""
    weights, rates, _ = trained({**SAME, "accumulation": 1})
    large, other, _ = trained({**SAME, "batch_size": 16})

    assert rates == other
    assert torch.allclose(weights, large, rtol=1e-5)


def test_a_scheduler_or_no_grant_ends_the_remedy_with_its_reason():
    with applied(batch, {**SAME, "batch_size": 16}, "lossy") as context:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    assert isinstance(context.outcomes[-1], RefusedRemedy)
    assert "the script steps a StepLR" in context.outcomes[-1].reason
    assert "--allow lossy" in apply(batch, SAME, TestContext()).reason
    with pytest.raises(InputError, match=r"batch_size of cluster.batch is 0"):
        apply(batch, {**SAME, "batch_size": 0}, TestContext("lossy"))


@needs_scipy
def test_a_run_without_a_noise_scale_is_ranked_by_throughput_and_its_plan_measures(tmp_path):
    found = json_of("cluster", "batch", RUN, "--out", tmp_path / "plan.json", "--json")

    assert found["noise_scale"] is None
    assert found["basis"].startswith("throughput only")
    assert found["now"]["batch_size"] == 32
    assert found["best"]["num_replicas"] == 2
    assert found["best"] in found["table"]
    assert [row["name"] for row in json.loads((tmp_path / "plan.json").read_text())["remedies"]] == ["cluster.noise"]


@needs_scipy
def test_a_run_under_the_plan_is_judged_by_its_new_batch_beside_what_was_promised(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    meta = json.loads((run / "run.json").read_text())
    facts = {"batch_size": 32, "accumulation": 1, "initial_batch": 32, "predicted_useful": 99.0, "num_loaders": 1}
    samples = [[step, 3.0, 2.0, 2, 0] for step in range(1, 50)]
    rows = [{"name": "cluster.batch", "facts": facts}, {"name": "cluster.noise", "facts": {"samples": samples}}]
    (run / "run.json").write_text(json.dumps({**meta, "applied": rows}))
    (run / "applied").mkdir(exist_ok=True)
    for rank in (0, 1):
        (run / f"applied/r{rank}.json").write_text(json.dumps({"rank": rank, "remedies": rows}))
    now = json_of("cluster", "batch", run, "--json")
    shutil.copytree(RUN, tmp_path / "first")
    for folder, losses in (tmp_path / "first", [[n, 1 / n] for n in range(1, 101)]), (run, [[n, n] for n in range(11)]):
        table = folder / "tables" / "r0.json"
        table.write_text(json.dumps({**json.loads(table.read_text()), "losses": losses}))
    compared = json_of("compare", tmp_path / "first", run, "--json")
    notes = compared["notes"]
    refused = refusal("cluster", "batch", run, "--out", tmp_path / "plan.json")
    headway_here("cluster", "batch", run, "--out", tmp_path / "plan.json", "--allow", "lossy")
    (remedy, _) = json.loads((tmp_path / "plan.json").read_text())["remedies"]

    assert (now["now"]["batch_size"], now["now"]["predicted_useful_examples_per_s"]) == (128, 99.0)
    # Four gradients of 32: sqr = (4 x 2 - 3) / 3, Sigma = (3 - 2) / 3 x 128.
    assert now["noise_scale"] == pytest.approx(128 / 5)
    assert any(note.startswith("batch 32 -> 128: useful examples per second") for note in notes)
    # 1,280 examples are 10 updates of 128 and 40 of 32: steps 9 and 10 beside 36 to 40.
    assert f"loss after 1,280 examples: {1 / 38:.4g} -> 9.5 (median of the last tenth)" in notes
    before, after = compared["useful_examples_per_s"]
    assert compared["verdict"] in ("faster", "inconclusive")
    assert after > before > 0
    assert compared["regressions"] == []
    assert "--allow lossy" in refused
    assert (remedy["name"], remedy["allow"]) == ("cluster.batch", "lossy")
    assert remedy["parameters"]["own_batch_size"] == 16


@needs_scipy
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((RUN, "--largest", 16), "the largest batch is 16, the initial one 32"),
        ((RUN, "--devices", -1), "must not be below 0"),
        ((ROOT,), "is not a run folder"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(words, message):
    assert message in refusal("cluster", "batch", *words)
