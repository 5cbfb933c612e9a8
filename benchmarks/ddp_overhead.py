"""What always-on recording costs the training thread of a rank under DistributedDataParallel.

Claim: main-thread CPU added per step of a two-rank gloo job (64x64 MLP, a DataLoader, DDP's exposed wait recorded) is
at most 30 us, two standard errors included. The named peer is the same job bare. Two equal processes differ by more
than that, so both sides take turns in one: the recording is switched on for a stretch of steps and off for the next,
each with a model, optimizer and loader of its own made anew, and both must end with the same loss. CPU time, not wall:
two ranks on two cores disturb each other. `--full` takes four times as many turns.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from _command import ROOT, on_two_ranks
from _noise import middle_mean, standard_error

PAIRS = 60
LIMIT_US = 30.0

JOB = """
import json, os, statistics, tempfile, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from headway.runtime.in_rank import bootstrap

WARM, CHUNKS, CHUNK = 30, 10, 20

def stretch(data):
    "Train a new model; returns CPU microseconds per step (lowest quartile of chunks), and the last loss."
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    costs, mark = [], 0
    for step, (x, y) in enumerate(DataLoader(data, batch_size=8), start=1):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if step >= WARM and not (step - WARM) % CHUNK:
            now = time.thread_time_ns()
            costs += [(now - mark) / CHUNK / 1000] if mark else []
            mark = now
            if len(costs) == CHUNKS:
                return statistics.quantiles(costs, n=4)[0], loss.item().hex()

def recorded(data):
    os.environ |= {"HEADWAY_RUN": tempfile.mkdtemp(dir=os.environ["FOLDER"]), "HEADWAY_WINDOWS": "0"}
    session = bootstrap.start_here(os.environ)
    try:
        return stretch(data)
    finally:
        session.stop()

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["STORE"])
    torch.manual_seed(100 + dist.get_rank())
    data = TensorDataset(torch.randn(2400, 64), torch.randn(2400, 64))
    pairs = []
    for turn in range(int(os.environ["PAIRS"]) + 4):
        # Which side is first takes turns, too: what drifts cancels.
        sides = (stretch, recorded) if turn % 2 else (recorded, stretch)
        found = {side: side(data) for side in sides}
        if turn >= 4:
            pairs.append([found[stretch], found[recorded]])
    with open(os.environ["ANSWER"], "w") as file:
        json.dump(pairs, file)
    dist.destroy_process_group()

main()
"""


def main() -> None:
    """Take turns and print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = PAIRS * (4 if "--full" in sys.argv else 1)
        answers = on_two_ranks(JOB, Path(folder), timeout_s=400, PAIRS=str(pairs), PYTHONPATH=str(ROOT))
    for rank in answers:
        losses = {loss for pair in rank for _, loss in pair}
        assert len(losses) == 1, f"losses differ: {losses}"
    # Mean of both ranks, turn by turn.
    costs = [
        tuple(statistics.mean(float(rank[turn][side][0]) for rank in answers) for side in (0, 1))
        for turn in range(len(answers[0]))
    ]
    each = [ours - bare for bare, ours in costs]
    added_us, error_us = middle_mean(each), standard_error(middle_mean, each)
    line = {
        "bench": "ddp_overhead", "bare_us": round(statistics.median(bare for bare, _ in costs), 1),
        "pairs": len(each), "added_us": round(added_us, 1), "standard_error_us": round(error_us, 1),
        "added_us_quartiles": [round(value, 1) for value in statistics.quantiles(each, n=4)],
        "baseline": "the same job without headway", "claim": f"<={LIMIT_US} us with two standard errors",
        "met": added_us + 2 * error_us <= LIMIT_US,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
