"""Hosts in reserve: who counts as there, and a host that takes the place of one whose launcher was killed."""

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.runtime.host.reserve import members_of
from headway.runtime.launching.options import LaunchOptions, check
from headway.runtime.launching.rendezvous import answers
from tests.launching import script, start, wait_for
from tests.test_elastic import free_port

SUPERVISOR = "headway.fault.supervise:supervisor"

JOB = """
import sys, time
import torch, torch.distributed as dist
import headway
from torch.nn.parallel import DistributedDataParallel
folder, last = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
checkpoint = headway.Checkpointer(folder + "/ckpt", model=net, optimizer=optimizer)
step = checkpoint.restore().step or 0
while step < last:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    with open(f"{folder}/losses", "a") as file:
        file.write(f"{step} {loss.item().hex()}\\n")
    time.sleep(0.02)
    if step % 10 == 0:
        checkpoint.save(step, block="durable")
checkpoint.close()
dist.destroy_process_group()
"""


def losses(folder: Path) -> dict[int, set[str]]:
    """Return step -> its losses: one, where a step that was done twice gave the same."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def undisturbed(last: int) -> dict[int, set[str]]:
    """Return the losses of the same steps in this process."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), {}
    for step in range(last):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        found[step + 1] = {loss.item().hex()}
    return found


def pair(tmp_path, arguments: list[str]) -> list[subprocess.Popen]:
    """Start a host that keeps the store, and so lets the other come first, and that other one."""
    port = free_port()
    hosts = []
    for name in ("reserve", "active"):
        hosts.append(
            start(
                tmp_path / name, arguments, {"HEADWAY": "", "OMP_NUM_THREADS": "1"}, nnodes=1, standby=1,
                rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_id="one", local_addr="127.0.0.1",
                quiet=False, warm="off", max_restarts=2, supervisor=SUPERVISOR,
                rdzv_conf={"keep_alive_interval": 1, "keep_alive_max_attempt": 2},
            )
        )  # fmt: skip
        wait_for(lambda: answers("127.0.0.1", port))
    return hosts


@given(
    st.lists(st.tuples(st.sampled_from(["trains", "waits", "spare"]), st.sampled_from([0, 49, 51, 90])), max_size=20)
)
def test_hosts_count_as_there_while_they_train_or_are_about_to_and_were_heard_of(rows):
    now = datetime.now(UTC)
    state = SimpleNamespace(
        participants={n: 0 for n, (kind, _) in enumerate(rows) if kind == "trains"}, round=3, closed=False,
        wait_list={n for n, (kind, _) in enumerate(rows) if kind == "waits"},
        last_heartbeats={n: now - timedelta(seconds=age) for n, (_, age) in enumerate(rows)},
    )  # fmt: skip
    seen = members_of(state, expires_s=50.0)

    assert seen.alive == sum(kind != "spare" and age < 50 for kind, age in rows)
    assert members_of(SimpleNamespace(**{**vars(state), "last_heartbeats": {}}), 50.0).alive == 0


@pytest.mark.parametrize(
    "options", [{"standby": -1}, {"standby": 1}, {"standby": 1, "rdzv_backend": "etcd", "rdzv_endpoint": "a:1"}]
)
def test_hosts_in_reserve_need_the_rendezvous_at_which_they_wait(tmp_path, options):
    with pytest.raises(InputError, match=r"--standby is -?1 .*Pass --rdzv-backend c10d"):
        check(LaunchOptions(**options), [script(tmp_path, "pass")])


@pytest.mark.slow
def test_a_host_in_reserve_takes_the_place_of_a_killed_one_and_the_losses_are_those_of_an_undisturbed_run(tmp_path):
    """Reason for its length: two launchers, one of which must be silent for some seconds to be taken for gone."""
    reserve, active = pair(tmp_path, [script(tmp_path, JOB), str(tmp_path), "60"])
    wait_for(lambda: (tmp_path / "losses").exists() and max(losses(tmp_path), default=0) >= 25)
    active.kill()
    _, stderr = reserve.communicate(timeout=90)
    active.communicate(timeout=30)
    facts = json.loads((tmp_path / "reserve" / "run-host1.json").read_text())

    assert reserve.returncode == 0, stderr
    assert "host 1 waits in reserve" in stderr
    assert "host 1 takes the place of a host that is gone" in stderr
    assert losses(tmp_path) == undisturbed(60)
    assert [facts["attempt"], facts["exit"]["class"], facts["ranks"][0]["rank"]] == [1, "ok", 0]


@pytest.mark.slow
def test_a_restart_keeps_its_host_and_a_host_that_is_to_blame_again_leaves_its_place(tmp_path):
    """Reason for its length: two launchers and three attempts."""
    dies = """
    if step == 7 * (int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1) <= 14:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    job = script(tmp_path, "import os, signal" + JOB.replace("    time.sleep(0.02)\n", dies))
    reserve, active = pair(tmp_path, [job, str(tmp_path), "20"])
    ends = [host.communicate(timeout=90)[1] for host in (active, reserve)]
    before, after = (
        json.loads((tmp_path / name).read_text()) for name in ("active/run.json", "reserve/run-host1.json")
    )
    noted = json.loads((tmp_path / "active" / "incidents.json").read_text())["incidents"]

    assert [row["action"] for row in noted] == ["restart", "standby"]
    assert [row["attempt"] for row in before["ranks"]] == [0, 1]
    assert (active.returncode, reserve.returncode, after["attempt"]) == (137, 0, 2), ends
    assert "leaves its place" in ends[0]
    assert losses(tmp_path) == undisturbed(20)


@pytest.mark.slow
def test_a_host_in_reserve_ends_well_with_a_job_that_did_not_need_it(tmp_path):
    reserve, active = pair(tmp_path, [script(tmp_path, "print('done')")])
    ends = [host.communicate(timeout=90)[1] for host in (active, reserve)]

    assert (active.returncode, reserve.returncode) == (0, 0), ends
    assert "was not needed" in ends[1]
    assert not (tmp_path / "reserve").exists()
