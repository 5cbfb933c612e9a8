"""What always-on recording costs the training thread of a rank under DistributedDataParallel.

Claim: main-thread CPU added per step of a two-rank gloo job (64x64 MLP, a
DataLoader, DDP's exposed wait recorded) is at most 30 us. The named peer is
the same job bare; runs are interleaved and end with the same loss, or the run
fails. CPU time, not wall: two ranks on two cores disturb each other. Two equal
processes differ by 10 us and more, so pairs of them are averaged and the
standard error is stated; `--full` takes four times as many.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import ROOT
from _noise import cheapest, middle_mean, standard_error

ROUNDS, FULL_ROUNDS = 4, 16
LIMIT_US = 30.0

JOB = """
import json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

WARM, CHUNKS, CHUNK = 100, 30, 30

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["STORE"])
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(16000, 64), torch.randn(16000, 64)), batch_size=8)
    steps, costs, mark = 0, [], 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps >= WARM and steps % CHUNK == 0:
            now = time.thread_time_ns()
            if mark:
                costs.append((now - mark) / CHUNK / 1000)
            mark = now
            if len(costs) == CHUNKS:
                break
    with open(os.environ["ANSWER"], "w") as file:
        json.dump({"costs_us": costs, "loss": loss.item().hex()}, file)
    dist.destroy_process_group()

main()
"""


def measure(recorded: bool, folder: Path) -> list[dict[str, object]]:
    """Run the job once on two ranks, recorded or bare; returns each rank's answer."""
    script = folder / "job.py"
    script.write_text(JOB)
    run = Path(tempfile.mkdtemp(dir=folder))
    ranks = []
    for rank in (0, 1):
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "STORE": f"file://{run}/store?rank={rank}&world_size=2", "ANSWER": str(run / f"answer{rank}.json"),
        }  # fmt: skip
        if recorded:
            paths = [str(ROOT / "headway" / "runtime" / "inject"), str(ROOT)]
            env |= {"HEADWAY_RUN": str(run / "recording"), "HEADWAY_WINDOWS": "0", "PYTHONPATH": ":".join(paths)}
        ranks.append(subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True))
    for number, rank in enumerate(ranks):
        _, error = rank.communicate(timeout=120)
        # gloo at times aborts at the very end of a process, bare or not: what counts is that the job is done.
        if rank.returncode and not (run / f"answer{number}.json").exists():
            raise SystemExit(f"a rank failed with {rank.returncode}:\n{error[-1500:]}")
    return [json.loads((run / f"answer{rank}.json").read_text()) for rank in (0, 1)]


def main() -> None:
    """Run the rounds and print one JSON line."""
    losses, costs = set(), {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(FULL_ROUNDS if "--full" in sys.argv else ROUNDS):
            # Whoever goes first meets a host that the one before has left: they take turns in that, too.
            for recorded in (False, True) if turn % 2 else (True, False):
                answers = measure(recorded, Path(folder))
                losses.add(tuple(answer["loss"] for answer in answers))
                # Mean of both ranks.
                costs[recorded].append(statistics.mean(cheapest(answer["costs_us"]) for answer in answers))
    assert len(losses) == 1, f"losses differ: {losses}"
    each = [ours - bare for bare, ours in zip(costs[False], costs[True], strict=True)]
    added_us, error_us = middle_mean(each), standard_error(middle_mean, each)
    line = {
        "bench": "ddp_overhead", "bare_us": round(statistics.median(costs[False]), 1), "rounds": len(each),
        "added_us": round(added_us, 1), "standard_error_us": round(error_us, 1),
        "added_us_range": [round(min(each), 1), round(max(each), 1)],
        "baseline": "the same job without headway", "claim": f"<={LIMIT_US} us with two standard errors",
        "ok": added_us + 2 * error_us <= LIMIT_US,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
