"""Repair drill: six ranks whose checkpoint tolerates two losses, saved by six processes through the Checkpointer.

Claim: (a) each of the fifteen pairs of rank directories removed, (b) ten flipped bits anywhere, (c) one directory lost
and one bit flipped in each stripe: every time `headway ckpt repair` exits 0 and every file is, byte for byte, what was
saved. (d) Three directories removed, or two and a flip in a row that needs them: exit 3, status lost, ranks and tensors
named, nothing written. Rank 0's directory counts with what its agent wrote beside it. `--full`: (b), (c) and (d) over
twenty seeds in place of three.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from _command import ROOT, headway

sys.path.insert(0, str(ROOT))

from headway.storage.checks.repair import repair
from headway.storage.manifest import read_record
from headway.storage.redundancy.parity import state
from headway.storage.redundancy.parity_files import ParityFacts
from tests.redundant import content, flip, lose, put_back

RANKS, TOLERATED, ROWS, DEADLINE_S = 6, 2, 30_000, 90.0

JOB = """
import os, torch, torch.distributed as dist, headway
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
rows = int(os.environ["ROWS"])
class State:
    def state_dict(self):
        return {"weight": torch.randn(rows, 333), "bias": torch.randn(rows).bfloat16(), "step": torch.tensor(7.0)}
    def load_state_dict(self, state):
        pass
with headway.Checkpointer(os.environ["CHECKPOINTS"], model=State(), redundancy="+2") as checkpointer:
    checkpointer.save(1, block="durable").result(timeout_s=120)
dist.destroy_process_group()
"""


def saved(root: Path) -> Path:
    """Save a checkpoint from six processes; wait until their agents have made the parity."""
    script = root / "job.py"
    script.write_text(JOB)
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "ROWS": str(ROWS), "CHECKPOINTS": str(root / "checkpoints"), "STORE": f"file://{root}/store",
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, script], cwd=ROOT, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    codes = [rank.wait(DEADLINE_S) for rank in ranks]
    assert not any(codes), f"ranks exited with {codes}"
    path, until = root / "checkpoints" / "step-1", time.monotonic() + DEADLINE_S
    while state(path).status != "redundant":
        assert time.monotonic() < until, f"parity is not complete: {state(path)}"
        time.sleep(0.1)
    return path


def tensors(found: Any) -> set[str]:
    """Return the names of what is missing."""
    return {entry.tensor for entry in found.missing if entry.tensor}


class Drill:
    """One checkpoint that is damaged, repaired, compared and put back, over and over."""

    def __init__(self, path: Path) -> None:
        self.path, self.good = path, content(path)
        self.facts = read_record(path / "rank-0" / "parity.json", ParityFacts)
        self.cases: dict[str, int] = {}
        self.repair_s: list[float] = []

    def repaired(self, case: str) -> None:
        """Repair, compare every file, count the case."""
        begin = time.process_time()
        done = repair(self.path)
        self.repair_s.append(time.process_time() - begin)
        assert (done.status, done.exit_code) == ("repaired", 0), (case, done.status, done.missing[:3])
        assert content(self.path) == self.good, f"{case}: the files differ from what was saved"
        self.cases[case] = self.cases.get(case, 0) + 1

    def lost(self, case: str, ranks: set[int]) -> None:
        """See that nothing is written and what is missing is named, through the command."""
        before = content(self.path)
        done, answer = repair(self.path), headway("ckpt", "repair", self.path, expect=(3,))
        verified = headway("ckpt", "verify", self.path, expect=(3,))
        assert done.exit_code == 3, case
        assert answer["status"] == done.status == verified["status"] == "lost", (case, done.status)
        assert {entry.rank for entry in done.missing} == ranks, case
        assert tensors(done) & {"model.weight", "model.bias"}, case
        assert content(self.path) == before, f"{case}: something was written"
        put_back(self.path, self.good)
        self.cases[case] = self.cases.get(case, 0) + 1

    def flip_row(self, stripe: int, lost: tuple[int, ...], row: int) -> int:
        """Flip a bit of a stripe's row at a rank that is not lost; return the rank."""
        for rank, segment in self.facts.stripes.data(stripe):
            name = f"rank-{rank}/__{rank}_0.distcp"
            offset = segment * self.facts.segment_bytes + 4096 * row + 17
            if rank not in lost and offset < len(self.good[name]):
                flip(self.path, name, offset)
                return rank
        raise AssertionError("no rank is left in this stripe")


def drill(path: Path, seeds: int) -> Drill:
    """Run all cases."""
    run = Drill(path)
    for ranks in combinations(range(RANKS), TOLERATED):
        lose(path, *ranks)
        run.repaired("two directories")
    names, weights = zip(*((name, len(data)) for name, data in run.good.items()), strict=True)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        for name in rng.choice(names, 10, p=np.array(weights) / sum(weights)):
            flip(path, str(name), int(rng.integers(len(run.good[str(name)]))), int(rng.integers(8)))
        run.repaired("ten flips")
        lost = int(rng.integers(RANKS))
        lose(path, lost)
        for stripe in range(RANKS):
            run.flip_row(stripe, (lost,), stripe)
        run.repaired("a directory and a flip per stripe")
        three = tuple(int(rank) for rank in rng.choice(RANKS, 3, replace=False))
        lose(path, *three)
        run.lost("three directories", {*three})
        # Two data members of one stripe, and a flip in its first row.
        stripe = int(rng.integers(RANKS))
        two = tuple(rank for rank, _ in run.facts.stripes.data(stripe)[:2])
        lose(path, *two)
        run.lost("two directories and a flip", {*two, run.flip_row(stripe, two, 0)})
    return run


def main() -> int:
    """Save, drill, print one JSON line."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        path = saved(Path(root))
        num_bytes = sum(file.stat().st_size for file in path.rglob("*.distcp"))
        run = drill(path, 20 if "--full" in sys.argv else 3)
        shutil.rmtree(path)
    print(json.dumps({
        "bench": "repair_drill", "ranks": RANKS, "redundancy": "+2", "image_bytes": num_bytes, "cases": run.cases,
        "repair_cpu_s": [round(min(run.repair_s), 3), round(max(run.repair_s), 3)], "ratio": 1.0,
        "baseline": "the files as saved, byte for byte", "claim": "all repaired or named", "met": True,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
