"""A hung job's ranks are named with their place in the script: the loader and its worker, or what follows the loop."""

import json
import re

import pytest

from headway.runtime.script.hang_place import LOCKED, add_places
from headway.verbs.jobs.fault import verdict_of
from tests.launching import run, script

JOB = """
import sys, threading, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
lock = threading.Lock()
lock.acquire()  # as a thread does that is not there behind a fork
class Rows(Dataset):
    def __len__(self):
        return 48 + 16 * (sys.argv[1] == "uneven") * dist.get_rank()
    def __getitem__(self, index):
        if sys.argv[1] in ("reads", "locks") and index == 41 and dist.get_rank() == 1:
            lock.acquire() if sys.argv[1] == "locks" else time.sleep(600)  # hangs
        return torch.ones(4)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Rows(), 4, num_workers=int(sys.argv[2])):  # the loop
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
time.sleep(600)  # behind the loop
"""
HANGS, LOOP, BEHIND = (
    next(number for number, line in enumerate(JOB.splitlines(), 1) if line.endswith(f"# {words}"))
    for words in ("hangs", "the loop", "behind the loop")
)


def hung(tmp_path, *words):
    """Let the job hang on two ranks; returns what the watch says, what it wrote of each rank, and the verdict."""
    options = {"nproc_per_node": 2, "quiet": False, "hang_timeout_s": 3.0, "grace_s": 2.0, "windows": 0.0}
    ended = run(tmp_path / "run", [script(tmp_path, JOB), *words], env={"HEADWAY": ""}, **options)
    rows = json.loads((tmp_path / "run" / "hang" / "0.json").read_text())["ranks"]
    return ended.stderr, rows, verdict_of([tmp_path / "run"])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "why"), [("reads", ""), ("locks", LOCKED)])
def test_a_rank_whose_worker_hangs_is_named_with_the_loader_the_worker_and_the_line(tmp_path, how, why):
    stderr, rows, verdict = hung(tmp_path, how, "2")
    (origin,) = verdict.origins
    place = rf"next\(loader\) at job.py:{LOOP}, for step 11: worker (\d+) is at job.py:{HANGS} in __getitem__"
    worker = re.fullmatch(place + re.escape(why), origin.doing)

    assert worker, origin
    assert (origin.ranks, origin.num_waiting) == ((1,), 1)
    assert f"rank 1 is silent ({origin.doing})" in stderr
    assert int(worker[1]) in [entry["pid"] for entry in rows[1]["workers"]]
    assert len(rows[1]["workers"]) == 2


def test_a_rank_that_reads_its_batches_itself_is_named_with_the_line_that_hangs(tmp_path):
    inner, outer = ("/a/data.py", 7, "__getitem__"), ("/a/train.py", 14, "<module>")
    torchs = ("/lib/site-packages/torch/utils/data/dataloader.py", 700, "__next__")
    stack = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in (inner, torchs, outer))
    rows = [{"rank": 3, "op": None, "step": 10, "pid": 1 << 30, "stack": f"Current thread 0x1 (first):\n{stack}"}]
    add_places(rows, {}, {3: tmp_path})

    assert rows[0]["place"] == "next(loader) at train.py:14, for step 11: it reads at data.py:7 in __getitem__"


@pytest.mark.slow
def test_a_rank_with_fewer_batches_is_said_to_have_left_its_loop_and_after_how_many_steps(tmp_path):
    stderr, _, verdict = hung(tmp_path, "uneven", "0")
    (origin,) = verdict.origins

    assert (origin.ranks, origin.reason) == ((0,), "absent")
    assert origin.doing.startswith(
        f"job.py:{BEHIND}: it has left the loop at job.py:{LOOP} after 12 steps, and rank 1 goes on with step 13"
    )
    assert "Join" in origin.doing
    assert origin.doing in stderr
