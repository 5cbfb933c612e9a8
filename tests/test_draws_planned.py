"""A plan knows what the recorded run drew: real runs of a dataset that draws, and of one that does not."""

import json

import pytest

from benchmarks._command import headway as command
from tests.launching import script

JOB = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        time.sleep(0.01)
        crop = torch.rand(1) if "draw" in sys.argv else torch.ones(1)
        return torch.ones(8) * index * crop

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader(Pictures(), batch_size=4, shuffle=True)
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "pure"])
def test_what_a_plan_says_is_what_applying_it_does(tmp_path, drawn):
    job = [script(tmp_path, JOB), *(["draw"] if drawn else [])]
    command("run", "--out", tmp_path / "run", "--windows", "0", "--", *job)
    plain = command("plan", tmp_path / "run", "-o", tmp_path / "plain.json")
    granted = command("plan", tmp_path / "run", "-o", tmp_path / "plan.json", "--allow", "result-equivalent")
    again = command("run", "--out", tmp_path / "again", "--windows", "0", "--apply", tmp_path / "plan.json", "--", *job)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["loaders"]["0"]
    refused = {row["name"]: row["reason"] for row in plain["refused"]}

    assert facts["draws"] == (["torch"] if drawn else [])
    loading = {"data.workers", "data.threads", "data.cache"}
    assert bool(loading & {*plain["chosen"]}) == (not drawn)
    assert loading & {*granted["chosen"]}, [granted["proposals"], granted["refused"]]
    assert [row["reason_not_applied"] for row in again["applied"] if row["name"] in granted["chosen"]] == [None] * len(
        granted["chosen"]
    )
    if drawn:
        assert "loader 0 (Pictures) draws random numbers (torch)" in refused["data.workers"]
        assert "--allow result-equivalent" in refused["data.workers"]
        assert "draws random numbers (torch)" in refused["data.cache"]
