"""Loader workers forked from a process that uses a device: nothing of headway's asks the device for anything there."""

import json
import subprocess
import sys

import pytest

from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.runtime.host.device import PRETEND
from tests.paths import ROOT, python_path
from tests.recorded import environment, rows, run_script

SCRIPT = """
    import os, torch
    from types import SimpleNamespace
    from torch.utils.data import DataLoader, Dataset
    from headway.runtime.host import device

    parent = os.getpid()

    def asked(answer=None):
        def ask(*_):
            if os.getpid() != parent:  # what torch's lazy initialisation says in a forked child
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
            return answer
        return ask

    class Event:
        def __init__(self, *_, **__):
            self.record, self.query, self.elapsed_time = asked(), asked(True), asked(0.1)

    torch.accelerator.current_stream = asked(SimpleNamespace(is_capturing=lambda: False))
    torch.cuda.is_initialized = lambda: os.getpid() == parent  # as torch's: not in a bad fork
    torch.cuda.is_current_stream_capturing, torch.cuda.current_device = asked(False), asked(0)
    torch.cuda.get_device_name, torch.cuda.max_memory_reserved = asked("H100"), asked(1)
    torch.cuda.max_memory_allocated = asked(1)
    torch.cuda.get_device_properties = asked(SimpleNamespace(total_memory=1))
    torch.cuda.default_generators = (SimpleNamespace(get_state=asked(torch.zeros(16, dtype=torch.uint8))),)
    torch.Event = Event
    device.device_of(SimpleNamespace(device=torch.device("cuda", 0)))  # as the first tensor of the device does

    class Rows(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            assert device.seen() == [] and not device.in_use() and not device.capturing()
            assert device.generators() == [] and device.device_type() == "cpu" and device.device_memory() == {}
            assert device.device_of(SimpleNamespace(device=torch.device("cuda", 0))) is None
            return torch.full((4,), index + torch.rand(()).item())

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for batch in DataLoader(Rows(), 4, num_workers=2):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    assert device.in_use() and len(device.seen()) == 1
"""


@pytest.mark.slow
def test_workers_of_a_job_on_a_device_are_recorded_in_silence_with_the_same_losses(tmp_path):
    recorded = run_script(SCRIPT, tmp_path, ranks=1)

    assert (tmp_path / "stderr").read_text() == ""
    assert len(rows(tmp_path / "run", role="loader")["input.load"]) == 6
    assert recorded == run_script(SCRIPT, tmp_path, ranks=1, recorded=False)


TRAIN = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
from tests.accelerator import Accelerator, install

install(Accelerator(), forward_ms=1, backward_ms=2, update_ms=0.2)

class Rows(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), index % 7 / 7.0)

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(Rows(), 4, num_workers=int(sys.argv[1])):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


@pytest.mark.slow  # seven jobs with torch
def test_workers_of_an_emulated_device_are_recorded_and_tuned_in_silence(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    remedy = Remedy("data.workers", {"num_workers": 2}, 1.0, (1.0, 1.0), None)
    write_plan(PlanFile((remedy,), predicted_speedup=1.0, interval=(1.0, 1.0)), tmp_path / "plan.json")
    quiet = {"PYTHONWARNINGS": "ignore:This DataLoader"}
    env = environment(None, **{PRETEND: "device", "PYTHONPATH": python_path(ROOT)}, **quiet)

    def losses(workers: int, *launch: str) -> str:
        command = [sys.executable, *launch, "train.py", str(workers)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    alone, run = losses(0), ["-m", "headway.cli", "run", "--quiet", "--windows", "0", "--out"]

    for workers in (0, 2, 8):
        assert losses(workers, *run, f"recorded-{workers}", "--") == alone
        assert losses(workers, *run, f"applied-{workers}", "--apply", "plan.json", "--") == alone
        [told] = json.loads((tmp_path / f"applied-{workers}" / "applied" / "r0.json").read_text())["remedies"]
        assert (told["name"], told["applied"]) == ("data.workers", True)
        assert told["facts"]["loaders"] == [{"dataset": "Rows", "before": workers, "num_workers": max(workers, 2)}]
