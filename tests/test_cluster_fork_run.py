"""Copies of a real script, on devices that are slow because their steps sleep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.core.files.planfile import PlanFile, Remedy, write_plan

SCRIPT = str(Path(__file__).parent / "made" / "shared_epochs.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def forked(folder, speeds, script, *arguments, options=()):
    """Run a script in copies; return the answer, or the error."""
    command = [sys.executable, "-m", "headway", "cluster", "fork", "--speeds", speeds, "--dir", folder / "fork"]
    done = subprocess.run(
        [*command, "--json", *options, "--", script, *arguments], capture_output=True, text=True, timeout=120,
        check=False, env=ENVIRONMENT, cwd=folder,
    )  # fmt: skip
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def seen(folder, device):
    """[steps][1 + 32] Epoch and examples of each step of a copy."""
    lines = (folder / f"seen-{device}").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@pytest.mark.slow
def test_one_copy_trains_as_the_script_does_by_itself_bit_for_bit(tmp_path):
    plain, copied = tmp_path / "plain", tmp_path / "copied"
    plain.mkdir()
    copied.mkdir()
    subprocess.run([sys.executable, SCRIPT, "2", plain, "1000"], check=True, env=ENVIRONMENT)
    answer = forked(copied, "1000", SCRIPT, "2", copied, "1000")

    assert (answer["rows"][0]["steps"], answer["rows"][0]["copies"]) == (400, 1)
    one, other = (torch.load(folder / "last.pt", weights_only=True) for folder in (plain, copied))
    pairs = zip(one["model"].items(), other["model"].items(), strict=True)
    assert all(name == named and torch.equal(value, values) for (name, value), (named, values) in pairs)
    assert str(one["optimizer"]) == str(other["optimizer"])
    assert seen(plain, 0) == seen(copied, 0)


@pytest.mark.slow
def test_copies_do_each_batch_once_and_of_one_that_is_killed_in_a_slot_the_others_do_what_it_has_not_reported(tmp_path):
    answer = forked(tmp_path, "80,40,20", SCRIPT, "3", tmp_path, "80,40,20", "70", options=["--slot-s", "0.8"])

    row = answer["rows"][0]
    assert (row["steps"], row["lost"], sum(row["steps_on"])) == (600, [1], 600)
    assert answer["bound_s"] < answer["total_s"]
    steps = {device: seen(tmp_path, device) for device in range(3)}
    # Of the copy that died, the steps until its last report count; the others were done again.
    assert 0 < row["steps_on"][1] < len(steps[1]) == 70
    counted = steps[0] + steps[1][: row["steps_on"][1]] + steps[2]
    examples = sorted((epoch, example) for epoch, *batch in counted for example in batch)
    assert examples == [(epoch, example) for epoch in range(3) for example in range(6400)]
    # The schedule has counted all steps, and all copies that are left have one state.
    facts = [json.loads((tmp_path / f"facts-{device}.json").read_text()) for device in (0, 2)]
    assert facts[0]["loss"] == facts[1]["loss"]
    assert [fact["lr"] for fact in facts] == pytest.approx([0, 0], abs=1e-9)


SAVES = """
import os, sys, time, torch
first = os.environ.get("HEADWAY_FORK", "0:").startswith("0:")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch in torch.utils.data.DataLoader(torch.ones(160, 2), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    time.sleep(first)  # the others are there before the copy that writes the file
    torch.save([epoch, model.state_dict()], "best.pt")
    number, state = torch.load("best.pt")
    assert number == epoch and all(torch.equal(state[key], value) for key, value in model.state_dict().items())
"""


@pytest.mark.slow
def test_each_copy_loads_what_it_has_saved_though_one_alone_writes_the_file(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    answer = forked(tmp_path, "2,1,1", "saves.py")

    assert (answer["rows"][0]["steps"], answer["rows"][0]["lost"]) == (40, [])
    assert torch.load(tmp_path / "best.pt", weights_only=True)[0] == 1
    assert not list((tmp_path / "fork").rglob("saved-*"))


SMALL = """
import os, sys, torch
kind, first = sys.argv[1], os.environ["HEADWAY_FORK"].startswith("0")
torch.manual_seed(int(first) if kind == "weights" else 0)
model = torch.nn.Sequential(torch.nn.Linear(2, 1))
if kind == "keys" and first:
    model.add_module("extra", torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(int(first) if kind == "order" else 0)
length = 160 if kind == "length" and first else 320
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(length, 2))
data = Stream() if kind == "stream" else torch.zeros(length, 2)
for _ in range(2 * (kind != "no loader")):
    for step, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=8, shuffle=kind != "stream" or None)):
        model(batch).sum().backward()
        if kind != "no step":
            optimizer.step()
        if kind == "leaves" and step == 3:
            break
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [
    ("weights", "'models.0.0.bias' differs. Seed the script"),
    ("keys", "'models.0.extra.bias' is missing in some"),
    ("order", "unlike orders of examples. Seed the script"),
    ("length", "epochs of 20 and 40 batches"),
    ("stream", "an IterableDataset"),
    ("no step", "no optimizer stepped"),
    ("no loader", "no batch of a torch DataLoader"),
    ("leaves", "left its loader before the end"),
])  # fmt: skip
def test_a_script_that_copies_cannot_share_is_refused_with_the_reason(tmp_path, kind, words):
    (tmp_path / "small.py").write_text(SMALL)

    assert words in forked(tmp_path, "2,1,0", "small.py", kind)


@pytest.mark.slow
def test_a_plan_with_copies_is_refused_where_nobody_deals_batches(tmp_path):
    write_plan(PlanFile((Remedy("cluster.fork", allow="lossy"),)), tmp_path / "plan.json")
    command = [sys.executable, "-m", "headway", "run", "--quiet", "--apply", "plan.json", "--out", "run", "--", SCRIPT]
    subprocess.run([*command, "1", tmp_path, "1000"], check=True, env=ENVIRONMENT, cwd=tmp_path)

    assert len(seen(tmp_path, 0)) == 200
    (noted,) = (tmp_path / "run" / "applied").glob("*")
    assert "headway cluster fork --speeds" in noted.read_text()
