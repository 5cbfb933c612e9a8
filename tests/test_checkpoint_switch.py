"""A script's own dcp.save behind its steps: what is loaded is what was saved, and nothing is lost or kept quiet."""

import json
import re
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headway.checkpoint.torch_dcp.switch import Later, behind
from headway.core.errors import HEADER, BackgroundError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.runtime.in_rank.remedy import RefusedRemedy
from headway.storage import verify
from tests.paths import ROOT, python_path
from tests.recorded import environment
from tests.remedy_context import TestContext, applied, apply

ALLOW = "result-equivalent"


def test_a_save_returns_with_the_state_copied_and_a_load_waits_for_it(tmp_path):
    state = {"w": torch.ones(1000), "step": 7}
    with applied(behind, {}, ALLOW) as context:
        done = dcp.save(state, checkpoint_id=tmp_path / "step-7")
        state["w"].zero_()
        found = {"w": torch.zeros(1000), "step": 0}
        dcp.load(found, checkpoint_id=tmp_path / "step-7")

    assert isinstance(done, Later)
    assert set(done.state_dict_metadata) == {"w", "step"}
    assert found["w"].all()
    assert found["step"] == 7
    assert verify(tmp_path / "step-7").status == "good"
    assert context.outcomes[-1].facts["num_saves"] == 1


def test_without_leave_it_is_refused():
    assert isinstance(apply(behind, {}, TestContext()), RefusedRemedy)


class Full:
    """Can be copied and stored by the training thread, and not by the one that writes."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(20, "Not a directory")
        return str, ("full",)


class Fuller(Full):
    """Cannot be stored by the training thread either, once the other one has tried."""

    has_failed = False

    def __reduce__(self):
        self.has_failed |= threading.current_thread() is not threading.main_thread()
        if self.has_failed:
            raise OSError(20, "Not a directory")
        return str, ("full",)


def test_what_only_the_thread_cannot_write_is_saved_in_the_scripts_own_way(tmp_path):
    with applied(behind, {}, ALLOW) as context:
        done = dcp.save({"w": Full(), "v": torch.ones(2)}, checkpoint_id=tmp_path / "step-1")
        found = {"v": torch.zeros(2)}
        dcp.load(found, checkpoint_id=tmp_path / "step-1")

    assert found["v"].all()
    assert set(done.state_dict_metadata) == {"w", "v"}
    assert "saved in the script's own way" in context.outcomes[-1].reason


def test_what_goes_wrong_is_raised_at_the_next_call_and_the_one_after_saves(tmp_path):
    with applied(behind, {}, ALLOW) as context:
        dcp.save({"w": Fuller()}, checkpoint_id=tmp_path / "step-1")
        with pytest.raises(BackgroundError, match=r"step-1 was not written.*Remove the cause"):
            dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-2")
        assert dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-2").state_dict_metadata

    assert (tmp_path / "step-2" / "commit.json").exists()
    assert any("failed" in outcome.facts for outcome in context.outcomes)


@pytest.mark.parametrize("place", ["file/step-1", "step-2"])
def test_what_can_be_known_to_fail_fails_in_the_call_itself_as_it_does_in_torch(tmp_path, place):
    (tmp_path / "file").write_text("")
    state = {"w": torch.ones(2)} if place == "file/step-1" else {"function": lambda: None}
    with applied(behind, {}, ALLOW), pytest.raises(CheckpointException):
        dcp.save(state, checkpoint_id=tmp_path / place)


def test_a_relative_folder_is_that_of_the_call_wherever_the_script_goes_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with applied(behind, {}, ALLOW):
        dcp.save({"w": torch.ones(1 << 16)}, checkpoint_id="step-1")
        monkeypatch.chdir(tmp_path / "elsewhere")
        last = dcp.save({"w": torch.ones(2)}, checkpoint_id="step-2")
        assert last.state_dict_metadata  # this waits

    assert verify(tmp_path / "step-1").status == verify(tmp_path / "elsewhere" / "step-2").status == "good"


def test_calls_of_another_kind_are_left_to_torch_and_said_so(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.txt").write_text("mine")
    with applied(behind, {}, ALLOW) as context:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
        dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "b"))
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "out")
        thread = threading.Thread(target=dcp.save, args=({},), kwargs={"checkpoint_id": tmp_path / "c"})
        thread.start()
        thread.join()

    assert not any((tmp_path / name / "commit.json").exists() for name in ("a", "b", "c", "out"))
    assert all((tmp_path / name / ".metadata").exists() for name in ("a", "b", "c", "out"))
    assert (tmp_path / "out" / "log.txt").exists()
    assert [outcome.reason.split()[-1] for outcome in context.outcomes[:2]] == ["no_dist", "storage_writer"]
    assert "log.txt" in context.outcomes[-1].reason


LAST_FAILS = """
import os, sys, torch
from tests.test_checkpoint_switch import Fuller
import torch.distributed.checkpoint as dcp
if "HEADWAY_RUN" not in os.environ:
    from headway.checkpoint.torch_dcp.switch import behind
    from tests.remedy_context import TestContext
    from tests.remedy_context import apply
    apply(behind, {}, TestContext("result-equivalent"))
for place in sys.argv[2:]:
    dcp.save({"w": torch.ones(2) if place != sys.argv[-1] else Fuller()}, checkpoint_id=place)
print("over", flush=True)
exec(sys.argv[1])
"""


def last_fails(folder, end, *before):
    """Run a script whose last save cannot be written, and that ends with `end`; returns what became of it."""
    (folder / "train.py").write_text(LAST_FAILS)
    places = [str(folder / "step-1"), str(folder / "step-2")]
    return subprocess.run(
        [sys.executable, *before, str(folder / "train.py"), end, *places],
        env=environment(None, PYTHONPATH=python_path(ROOT)), capture_output=True, text=True, timeout=60, cwd=folder,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_that_fails_itself_keeps_the_only_traceback_and_the_lost_save_is_one_line(tmp_path):
    done = last_fails(tmp_path, "raise ValueError('its own')")
    *_, raised, line = done.stderr.splitlines()

    assert (done.returncode, done.stderr.count(HEADER)) == (1, 1)
    assert raised == "ValueError: its own"
    assert re.match(r"headway: the checkpoint .*/step-2 was not written: \[Errno 20\]", line)


@pytest.mark.slow
def test_a_last_save_that_fails_ends_the_job_as_the_raising_call_would_have(tmp_path):
    plan = tmp_path / "plan.json"
    write_plan(PlanFile((Remedy("checkpoint.async", {"every_steps": 4}, 1.1, allow=ALLOW),)), plan)
    run = ["-m", "headway.cli", "run", "--windows", "0", "--quiet", "--out", str(tmp_path / "run")]
    done = last_fails(tmp_path, "pass", *run, "--apply", str(plan), "--")
    told = json.loads((tmp_path / "run" / "run.json").read_text())["exit"]

    assert done.stdout == "over\n"
    assert (done.returncode, told["code"], told["class"], told["first_rank"]) == (1, 1, "user", 0)
    assert "step-2 was not written: [Errno 20]" in told["traceback"]
    assert verify(tmp_path / "step-1").status == "good"


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

joined = "RANK" in os.environ
if joined:
    dist.init_process_group("gloo")
torch.manual_seed(0)
inner = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 4))
model = DistributedDataParallel(inner) if joined else inner
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 13):
    opt.zero_grad()
    loss = model(torch.full((8, 64), step / 12.0)).square().mean()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        state = {"model": inner.state_dict(), "opt": opt.state_dict(), "step": step}
        dcp.save(state, checkpoint_id=f"{sys.argv[1]}/step-{step}")
        before = inner[0].weight.detach().clone()
    if step == 9:
        found = {"model": {name: torch.zeros_like(t) for name, t in inner.state_dict().items()}, "step": 0}
        dcp.load(found, checkpoint_id=f"{sys.argv[1]}/step-8")
        assert torch.equal(found["model"]["0.weight"], before) and found["step"] == 8
print("loss", loss.item().hex(), flush=True)
if joined:
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_real_script_saves_behind_its_steps_with_the_same_losses_and_files(tmp_path):
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    write_plan(PlanFile((Remedy("checkpoint.async", {"every_steps": 4}, 1.1, allow=ALLOW),)), plan)
    command = [sys.executable, "-m", "headway.cli", "run", "--windows", "0", "--nproc-per-node", "2",
               "--out", str(tmp_path / "run"), "--apply", str(plan), "--"]  # fmt: skip
    outputs = []
    for number, before in enumerate(([sys.executable], command)):
        done = subprocess.run(
            [*before, str(script), str(tmp_path / f"ckpt-{number}")],
            env=environment(None, PYTHONPATH=python_path(ROOT)), capture_output=True, text=True, timeout=120,
            cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(re.findall(r"loss (\S+)", done.stdout))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    mine = [row for row in facts["applied"] if row["name"] == "checkpoint.async"]

    assert outputs[1] == outputs[0] * 2  # both ranks see the same examples
    assert [row["reason_not_applied"] for row in mine] == [None]
    assert not (tmp_path / "ckpt-0" / "step-12" / "commit.json").exists()
    stock, ours = ({}, {})
    for step in (4, 8, 12):
        assert verify(tmp_path / "ckpt-1" / f"step-{step}").status == "good"
        assert (tmp_path / "ckpt-1" / f"step-{step}" / "rank-1" / "manifest.json").exists()
        for place, found in (("ckpt-0", stock), ("ckpt-1", ours)):
            found["model"] = {"0.weight": torch.zeros(256, 64), "1.bias": torch.zeros(4)}
            dcp.load(found, checkpoint_id=tmp_path / place / f"step-{step}")
        assert all(torch.equal(stock["model"][name], ours["model"][name]) for name in stock["model"])
