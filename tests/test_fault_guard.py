"""The guard of losses: one decision per training cycle, alike on all ranks, and a way back that is not poisoned."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.guard_jobs import DEFAULT, trial
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.runtime.script.bad_loss import FEWEST, MOST_SPIKES, SPIKE, judge
from tests.launching import headway, script
from tests.spawn import POOL


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULT)
def test_a_guarded_job_is_plain_where_losses_are_good_and_guarded_or_left_alone_where_one_is_not(name):
    assert trial(POOL, name) == []


@given(st.floats(0.1, 10.0), st.floats(SPIKE * 1.01, 1e4), st.integers(0, 3))
def test_a_level_that_stays_is_bad_as_often_as_a_spike_may_be_and_the_rank_is_the_one_that_has_it(usual, factor, rank):
    """Ranks without a loss are counted, so that the one that is named is the one whose loss it is."""
    before, found = [usual] * FEWEST, []
    for _ in range(10):
        found.append(judge([None] * rank + [usual * factor, None], before))
        before.append(usual * factor)

    assert [one is not None for one in found] == [True] * MOST_SPIKES + [False] * (10 - MOST_SPIKES)
    assert {one.ranks for one in found if one} == {(rank,)}


POISONED = """
import os, sys, torch, headway
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
checkpoint = headway.Checkpointer(sys.argv[1], net=net, optimizer=optimizer)
step = checkpoint.restore().step or 0
print("from", step, flush=True)
while step < 60:
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (net(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
    if step == 39 and os.environ["HEADWAY_ATTEMPT"] == "0":
        net.weight.grad[0, 0] = float("nan")
    optimizer.step()
    step += 1
    if step % 5 == 0:
        checkpoint.save(step, block="durable")
checkpoint.close()
print("finite", bool(net.weight.isfinite().all()))
"""


@pytest.mark.slow
def test_a_rollback_passes_over_a_checkpoint_behind_which_no_good_loss_followed(tmp_path):
    plan, job = tmp_path / "plan.json", script(tmp_path, POISONED)
    write_plan(PlanFile((Remedy("fault.guard", {"action": "rollback"}, allow="lossy"),)), plan)
    done = headway("run", "--max-restarts", 3, "--apply", plan, "--out", tmp_path / "run", "--", job, tmp_path / "ckpt")

    assert done.returncode == 0, done.stderr
    assert re.findall(r"from (\d+)", done.stdout) == ["0", "35"]
    assert "finite True" in done.stdout
