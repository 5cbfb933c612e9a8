"""A host with devices, pretended: what is installed in the middle of torch's import, and asked of no driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.runtime.calls.patches import PATCHES
from headway.runtime.host.device import PRETEND

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys

def refuse(*_):
    raise AssertionError("a device was asked for")

class Refuses:
    def find_spec(self, name, path=None, target=None):
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and getattr(cuda, "is_available", refuse) is not refuse:
            cuda.device_count = cuda.is_available = cuda._lazy_init = refuse

sys.meta_path.insert(0, Refuses())
import torch
assert torch.cuda.is_available is refuse
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    print(f"{float(model.weight.sum()):.9f}")
"""
"""A script in whose process nothing may ask for a device from the middle of torch's import on."""


def run(tmp_path: Path, *arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *arguments, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **environ})


@pytest.mark.slow
@pytest.mark.parametrize("applied", [False, True])
def test_every_patch_goes_in_and_no_driver_is_asked(tmp_path, applied):
    plan = tmp_path / "plan.json"
    remedy = Remedy("data.workers", {"num_workers": 2, "pin_memory": True}, 1.5, (1.4, 1.6), None)
    write_plan(PlanFile((remedy,), predicted_speedup=1.5, interval=(1.4, 1.6)), plan)
    apply = ["--apply", str(plan)] if applied else []
    plain = run(tmp_path, environ={})
    done = run(tmp_path, "-m", "headway.cli", "run", "--quiet", *apply, "--out", str(tmp_path / "run"), "--",
               environ={PRETEND: "device"})  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "is not recorded" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == plain.stdout
    patches = json.loads((tmp_path / "run" / "tables" / "r0.json").read_text())["patches"]
    assert set(patches.values()) == {"ok"}
    wanted = {name for name, patch in PATCHES.items() if "device" in patch.needs and not patch.optional}
    assert wanted <= set(patches)


COMPILED = """
import torch

def compiled(function):
    return torch.compile(function, backend="eager")

@compiled
def reads(x):
    return x + x.sum().item() + x.tolist()[0]

@compiled
def decides(x):
    return x + 1 if x.sum() > 0 else x - 1

@compiled
def moves(x):
    return (x.cpu() * 2).to(torch.float64).sum()

if __name__ == "__main__":
    found = [function(torch.ones(3)).tolist() for function in (reads, decides, moves) for _ in range(2)]
    counters = torch._dynamo.utils.counters
    print(found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""


@pytest.mark.slow
def test_compiled_regions_have_the_graphs_and_breaks_that_they_have_without_headway(tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    environ = {**os.environ, PRETEND: "device"}
    recorded = ["-m", "headway.cli", "run", "--quiet", "--out", str(tmp_path / "run"), "--"]
    told = [
        subprocess.run([sys.executable, *before, str(script)], capture_output=True, text=True, timeout=120, cwd=ROOT,
                       env=environ).stdout
        for before in ([], recorded)
    ]  # fmt: skip

    assert told[0] == told[1] != ""
