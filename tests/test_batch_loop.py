"""From a run whose steps hardly grow with the batch to one with another batch, by the commands that are printed."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launching import script
from tests.test_cluster_loop import next_commands, typed

JOB = """
import time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

class Computes(nn.Module):
    def forward(self, features):
        time.sleep(0.0005 * len(features))  # an accelerator that computes
        return features

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(1536, 256)
data = TensorDataset(x, x + torch.randn(1536, 256))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Sequential(Computes(), *[nn.Linear(256, 256) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for features, target in loader:
    time.sleep(0.02)  # what a step takes whatever its batch is
    loss = (model(features) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
dist.destroy_process_group()
"""


@pytest.mark.slow  # three runs of two ranks
@pytest.mark.skipif(find_spec("scipy") is None, reason="the extra `cluster` (scipy) is not installed")
def test_the_commands_that_are_printed_lead_from_a_run_to_a_batch_that_learns_more_per_second(tmp_path: Path) -> None:
    script(tmp_path, JOB, "train.py")
    typed(tmp_path, "headway run --nproc-per-node 2 -- train.py")
    named = {
        verb: re.findall(r"headway cluster batch \S+ --out \S+", " ".join(typed(tmp_path, f"headway {verb}").split()))
        for verb in ("plan", "why")
    }
    (measure,) = named["plan"]
    (noisy,) = next_commands(typed(tmp_path, measure))
    (choose,) = next_commands(typed(tmp_path, noisy))
    (apply,) = next_commands(typed(tmp_path, choose))
    screen = typed(tmp_path, apply)
    (compare,) = next_commands(screen)
    compared = json.loads(typed(tmp_path, f"{compare} --json"))
    print(*compared["notes"], sep="\n")
    before, after = compared["useful_examples_per_s"]

    assert named["why"] == [measure]
    assert choose.endswith("--allow lossy")
    assert "promised" in screen  # beside the useful examples per second of both, and no steps per second
    assert after > before > 0
    assert compared["regressions"] == []
    assert any(note.startswith("loss after") for note in compared["notes"])
