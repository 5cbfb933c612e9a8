"""The check of exact resume: it finds what breaks it, passes what keeps it, and says what it could not look at."""

import json
import os
import random
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from headway import data
from headway.data.loader.resume_check import ResumeCheck
from tests.datasets import Sized
from tests.paths import ROOT, python_path

SCRIPT = """
    import random, sys, torch
    from torch.utils.data import DataLoader

    class Examples:
        read = 0
        def __len__(self):
            return 30
        def __getitem__(self, index):
            self.read += 1
            return torch.tensor([index, random.random() if "pure" in sys.argv else float(self.read)])

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in DataLoader(Examples(), 6, shuffle=True):
        model(x).mean().backward()
        optimizer.step()
        print("stepped")
"""


class Random(Sized):
    size = 30

    def __getitem__(self, item):
        return torch.tensor([item, random.random()])


class Remembers(Random):
    last = 0

    def __getitem__(self, item):
        before, self.last = self.last, item
        return torch.tensor([item, before])


def found(loader, batches=8):
    return ResumeCheck(batches, lambda _: None).found(loader)


def loaders_of(kind):
    """Return loaders that go on exactly."""
    sampler = DistributedSampler(range(30), num_replicas=2, rank=1)
    return {
        "torch": torch.utils.data.DataLoader(Random(), 6, shuffle=True),
        "in order": torch.utils.data.DataLoader(Random(), 4, num_workers=1),
        "ours": data.DataLoader(Random(), 4, True, seed=8, tail="pad"),
        "distributed": torch.utils.data.DataLoader(Random(), 3, sampler=sampler),
        "weighted": torch.utils.data.DataLoader(
            Random(), 5, sampler=torch.utils.data.WeightedRandomSampler(torch.ones(30), 30)
        ),
        "tensors": torch.utils.data.DataLoader(TensorDataset(torch.arange(9)), 2, drop_last=True),
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "in order", "ours", "distributed", "weighted", "tensors"])
def test_a_loader_whose_examples_depend_on_index_and_randomness_goes_on_exactly(kind):
    facts = found(loaders_of(kind))
    assert len(facts["cases"]) >= 3
    assert all(case["examples"] and case["batches"] is not False for case in facts["cases"])
    assert facts["hint"] is None


def test_a_dataset_that_remembers_is_found_and_the_reason_named():
    facts = found(torch.utils.data.DataLoader(Remembers(), 6, shuffle=True))
    # What they hold is at fault, not their order, which is the same between passes.
    assert {case["case"] for case in facts["cases"] if case["examples"]} <= {"between passes"}
    assert "Remembers changes attributes of itself" in facts["hint"]


class Turning(torch.utils.data.Sampler):
    """Begins elsewhere each time it is read, and keeps where: neither a generator nor an epoch says so."""

    turn = 0

    def __iter__(self):
        self.turn += 1
        return iter([(k + self.turn) % 30 for k in range(30)])

    def __len__(self):
        return 30


@pytest.mark.slow
def test_a_sampler_that_is_the_cause_of_a_difference_is_named():
    hints = [
        found(torch.utils.data.DataLoader(dataset(), 6, sampler=sampler))["hint"]
        for dataset, sampler in ((Random, Turning()), (Remembers, Turning()), (Remembers, None))
    ]

    assert "Its sampler, Turning, gives another order" in hints[0]
    assert "Its sampler, Turning, gives another order" in hints[1]
    assert "Remembers changes attributes of itself" in hints[2]


def test_what_cannot_be_checked_says_why():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    class Broken(Random):
        def __getitem__(self, item):
            raise OSError("disk gone")

    assert "iterable dataset" in found(torch.utils.data.DataLoader(Stream()))["reason_not_applied"]
    assert "OSError: disk gone" in found(torch.utils.data.DataLoader(Broken()))["reason_not_applied"]
    batches = BatchSampler(range(30), 3, drop_last=False)
    assert (
        "batch_size=None" in found(torch.utils.data.DataLoader(Random(), batch_sampler=batches))["reason_not_applied"]
    )


def verify(folder, *arguments, behind=()):
    """Run the verb on the script; returns the process."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY")}
    env["PYTHONPATH"] = python_path(ROOT)
    command = [sys.executable, "-m", "headway.cli", "data", "verify-resume", *arguments, *behind]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_verb_proves_a_script_and_stops_it_at_its_first_step(tmp_path):
    done = verify(tmp_path, "--json", "--out", "run", behind=["--", "train.py", "pure"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["exact"]
    assert answer["compared"] == len(answer["loaders"][0]["cases"]) >= 4
    assert "stepped" not in done.stderr


@pytest.mark.slow
def test_the_verb_exits_with_3_where_resume_is_not_exact(tmp_path):
    done = verify(tmp_path, "--out", "run", behind=["--", "train.py"])
    assert done.returncode == 3
    assert "DIFFERENT" in done.stdout
    assert "NOT proven exact" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "behind", "message"),
    [
        ((), (), "there is no script to verify"),
        (("--batches", "1"), ("--", "train.py"), "--batches is 1"),
        ((), ("--", "trian.py"), "trian.py"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, arguments, behind, message):
    done = verify(tmp_path, *arguments, behind=behind)
    assert done.returncode == 2
    assert message in done.stderr
