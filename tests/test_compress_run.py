"""Compressed gradients from the command line: predicted from a recorded run, applied to an unmodified script."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from headway.comm.compression.torch_measure import measured
from headway.core.errors import InputError
from headway.core.files.planfile import read_plan
from headway.verbs.models.comm import bench
from headway.verbs.runs.plan import plan, whatif
from tests.launching import under_plan
from tests.test_ddp_run import GOLDEN

JOB = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    loss = model(torch.ones(4, 256) * (dist.get_rank() + 1)).square().mean()
    if step == 20 and dist.get_rank() == 1 and "die" in sys.argv:
        # The first bucket's packets travel when a later gradient is ready.
        next(iter(model.parameters())).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def applied(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the job with compressed gradients; returns the exit code, and what headway said."""
    remedy = {"name": "comm.compress", "parameters": {"codec": "topk:0.01", "min_bytes": 1000}, "allow": "lossy"}
    return under_plan(folder, JOB, remedy, *arguments)


@pytest.mark.slow  # starts two ranks that import torch
def test_an_unmodified_script_sends_compressed_gradients(tmp_path: Path) -> None:
    code, said = applied(tmp_path)

    assert code == 0, said
    for rank in range(2):
        (remedy,) = json.loads((tmp_path / "run" / "applied" / f"r{rank}.json").read_text())["remedies"]
        assert (remedy["name"], remedy["applied"], remedy["facts"]["models"]) == ("comm.compress", True, 1)


@pytest.mark.slow  # the same
def test_a_rank_that_is_killed_while_packets_travel_ends_the_job_with_its_class(tmp_path: Path) -> None:
    code, said = applied(tmp_path, "die")

    assert code == 137
    assert "rank 1 failed first (killed by signal 9)" in said


@pytest.mark.slow
def test_the_plan_holds_the_codec_that_the_recorded_window_and_the_measured_codecs_give(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    with pytest.raises(InputError, match=r"was not measured"):
        whatif(run, set_=["compress=half"], json=True)
    assert plan(run, json=True) == 0
    refused = {row["name"]: row["reason"] for row in json.loads(capsys.readouterr().out)["refused"]}
    assert "grant --allow lossy" in refused["comm.compress"]
    assert not (run / "codecs.json").exists()

    assert plan(run, allow="lossy", json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = json.loads((run / "codecs.json").read_text())["rows"]
    assert {row["codec"] for row in rows} >= {"half", "sign"}
    chosen = {remedy.name: remedy for remedy in read_plan(answer["path"]).remedies}
    (row,) = [row for key in ("proposals", "refused") for row in answer[key] if row["name"] == "comm.compress"]
    assert "half " in row["reason"]
    assert ("comm.compress" in chosen) == ("comm.compress" in answer["chosen"])
    assert whatif(run, set_=["compress=half"], json=True) == 0
    assert json.loads(capsys.readouterr().out)["interval"][0] > 0


@pytest.mark.slow
def test_measured_rows_are_positive_and_hold_the_bytes_of_a_packet(tmp_path, capsys):
    rows = measured(["sign"], rounds=2)
    assert all(row["encode_s"] > 0 and row["decode_s"] > 0 for row in rows)
    assert all(row["push_s"] > 0 and row["answer_s"] > 0 and row["pull_s"] > 0 for row in rows)
    assert {row["wire_bytes"] for row in rows if row["numel"] == 4_096} == {4_096 // 8 + 4}

    with contextlib.chdir(tmp_path):  # the default file has no folder in its name
        assert bench(codecs="half", json=True) == 0
    assert (tmp_path / "codecs.json").is_file()
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], {row["codec"] for row in answer["rows"]}) == ("headway.comm-bench/1", {"half"})
    with pytest.raises(InputError, match="write a fraction"):
        bench(codecs="topk:7.5")
