"""What the always-on timers and the progress page cost a rank under DistributedDataParallel.

Claim: forward and backward timed at every step, and the progress page, add at
most 1 % to the CPU that the training thread of a 2-rank gloo job spends per
step (a 128-wide MLP of six layers, batches of 64, 2,000 steps). The named
peer is the same recording without timers: inside one job the timed and the
bare `torch.autograd.backward` take turns every ten steps (in the order ABBA),
so both meet the same noise; the page's stores, which cannot be taken out of
the other probes there, are timed by themselves and added. A second job under
HEADWAY_TIMERS=off must end with the same losses, or the run fails. CPU time of
the training thread, not wall: the ranks disturb each other and so do others.
"""

import json
import statistics
import tempfile
from pathlib import Path

from _command import ROOT, on_two_ranks

STEPS = 2000
LIMIT = 0.01

JOB = """
import json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from headway.runtime.in_rank import bootstrap

STEPS, CHUNK, TURN = int(os.environ["STEPS"]), 10, (0, 1, 1, 0)

def page_us():
    "The stores of one step: at the update, around backward, and at the end of DDP's backward."
    cells, clock, best = bootstrap.active().probes.page.cells, time.thread_time_ns, 1e9
    for _ in range(200):
        begin = clock()
        for n in range(100):
            page = cells[0]; page[1] = n; page[0] = n
            page = cells[0]; page[5] = n; page[2] = 8; page[2] = 0
            page = cells[0]; page[3], page[4], page[5] = n, n, n; page[2] = 40
        best = min(best, clock() - begin)
    return best / 100 / 1000

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["STORE"])
    torch.manual_seed(dist.get_rank())
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(64 * 100, 128)
    loader = DataLoader(TensorDataset(data, data), batch_size=64)
    timed = torch.autograd.backward
    kinds = getattr(timed, "__wrapped__", timed), timed
    steps, costs, mark = 0, ([], []), time.thread_time_ns()
    while steps < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % CHUNK == 0:
                now, turn = time.thread_time_ns(), steps // CHUNK
                costs[TURN[(turn - 1) % 4]].append((now - mark) / CHUNK / 1000)
                torch.autograd.backward = kinds[TURN[turn % 4]]
                mark = time.thread_time_ns()
    answer = {"bare_us": costs[0][5:], "timed_us": costs[1][5:], "loss": loss.item().hex(), "page_us": page_us()}
    with open(os.environ["ANSWER"], "w") as file:
        json.dump(answer, file)
    dist.destroy_process_group()

main()
"""


def measure(timers: str, folder: Path) -> list[dict[str, object]]:
    """Run the job once on two ranks, recorded with its timers 'on' or 'off'; returns each rank's answer."""
    paths = [str(ROOT / "headway" / "runtime" / "inject"), str(ROOT)]
    run = tempfile.mkdtemp(dir=folder)
    return on_two_ranks(
        JOB, folder, timeout_s=180, STEPS=str(STEPS), HEADWAY_RUN=f"{run}/recording", HEADWAY_WINDOWS="0",
        HEADWAY_TIMERS=timers, PYTHONPATH=":".join(paths),
    )  # fmt: skip


def main() -> None:
    """Run both jobs and print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        answers, plain = measure("on", Path(folder)), measure("off", Path(folder))
    assert [a["loss"] for a in answers] == [a["loss"] for a in plain], "losses differ"
    # The quiet quarter of the chunks, per rank: what the code costs when it is not disturbed.
    bare_us, timed_us = ([statistics.quantiles(a[key], n=4)[0] for a in answers] for key in ("bare_us", "timed_us"))
    page_us = statistics.mean(a["page_us"] for a in answers)
    added = [timed - bare + page_us for timed, bare in zip(timed_us, bare_us, strict=True)]
    added_us, step_us = statistics.mean(added), statistics.mean(bare_us)
    line = {
        "bench": "timers_cost", "steps": STEPS, "baseline": "the same recording without timers",
        "baseline_us": round(step_us, 1), "added_us": round(added_us, 2), "page_us": round(page_us, 2),
        "added_us_range": [round(min(added), 1), round(max(added), 1)], "added_fraction": round(added_us / step_us, 4),
        "claim": f"<={LIMIT:.0%} of a step", "met": added_us / step_us <= LIMIT,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
