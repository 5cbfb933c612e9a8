"""From a default run of a job that waits for its link to compressed gradients, by the commands that are printed."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import _link
from tests.launching import script
from tests.paths import ROOT, python_path

RATE_MBIT = 200
"""A step exchanges 2 x 4 MB over it, which takes 0.34 s."""

JOB = """
import time
import torch, torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    x = torch.randn(8, 512)
    time.sleep(0.1)  # an accelerator that computes: what is left of a step without its link
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
dist.destroy_process_group()
"""


def typed(folder: Path, command: str, *, code: int = 0) -> str:
    """Return what a command of headway prints in `folder` behind the slow link, without line breaks."""
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(
        _link.throttled(words, RATE_MBIT), cwd=folder, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def next_command(text: str) -> str:
    """Return the command behind 'Next' on a screen."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith("Next ")]
    return line.split("Next", 1)[1].strip()


@pytest.mark.slow  # three runs of two ranks behind a slow link, and a measurement of codecs
@pytest.mark.skipif(not _link.allowed(), reason="this host allows no network namespace with a token bucket")
def test_the_commands_that_are_printed_lead_from_a_default_run_to_compressed_gradients(tmp_path: Path) -> None:
    script(tmp_path, JOB)
    name = next(tmp_path.glob("*.py")).name
    typed(tmp_path, f"headway run --nproc-per-node 2 --windows 0 -- {name}")
    record = next_command(typed(tmp_path, "headway plan"))
    assert "--window-at" in record, record
    typed(tmp_path, record)
    grant = next_command(typed(tmp_path, "headway plan"))
    assert grant.endswith("--allow lossy"), grant
    baseline = Path(shlex.split(grant)[2])
    typed(tmp_path, next_command(typed(tmp_path, grant)))
    newest = max((tmp_path / "headway-runs").iterdir(), key=lambda path: path.stat().st_mtime)
    answer = json.loads(typed(tmp_path, f"headway compare {baseline} {newest} --json"))
    (remedy,) = json.loads((newest / "applied" / "r0.json").read_text())["remedies"]

    assert remedy["name"] in ("comm.compress", "comm.loose")  # the grant admits both
    assert remedy["applied"]
    assert answer["interval"][0] > 1
    assert any(note.startswith("loss after") for note in answer["notes"])
