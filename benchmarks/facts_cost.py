"""What reading how a script computes, and counting its operations, costs the training thread.

Claim: behind the first step it is at most 5 us of CPU a step: no function of the code that reads facts or counts
operations is called there, in a job of 200 steps of two micro-batches that torch.compile compiles whole; what is left
is a look-up for each call of the model, timed against the same loop without it, in turns. At no step, the first
included, does that code start a device's driver, ask a tensor for its numbers (`item` and the like) or wait for a
device; the compiled graph has no break; the losses are those of the script alone, or the run fails. What the first
call costs once (facts, fork) is said beside it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from time import thread_time_ns

from _command import ROOT, headway

STEPS, MICRO_BATCHES = 200, 2
LIMIT_US = 5.0
ROUNDS, LOOKUPS = 40, 20_000

JOB = """
import json, os, sys, time
from collections import Counter
import torch

STEPS, MICRO_BATCHES = int(os.environ["STEPS"]), int(os.environ["MICRO_BATCHES"])
OURS = ("compute_facts.py", "rehearsals.py", "torch_calls.py", "torch_flops.py", "torch_rehearsal.py")
ASKS = ("item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "synchronize", "_cuda_init", "_cuda_getDeviceCount")
step, calls, asked, depth, spent, entered = 0, Counter(), Counter(), 0, 0, 0

def watch(frame, event, argument):
    "Count calls of the code that reads facts by step, and what they ask of torch."
    global depth, spent, entered
    ours = os.path.basename(frame.f_code.co_filename) in OURS
    if ours and event == "call":
        calls[step] += 1
        entered, depth = (time.thread_time_ns() if not depth else entered), depth + 1
    elif ours and event == "return":
        depth -= 1
        spent += 0 if depth else time.thread_time_ns() - entered
    elif depth and event == "c_call" and argument.__name__ in ASKS:
        asked[argument.__name__] += 1

torch.manual_seed(0)
torch.set_num_threads(1)
plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
model = torch.compile(plain, fullgraph=True, backend="eager")
optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
losses = []
sys.setprofile(watch if os.environ.get("HEADWAY_RUN") else None)
for step in range(STEPS):
    for _ in range(MICRO_BATCHES):
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
sys.setprofile(None)
breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
with open(os.environ["ANSWER"], "w") as file:
    json.dump({"calls": calls, "asked": asked, "breaks": breaks, "driver": torch.cuda.is_initialized(),
               "once_ns": spent, "losses": [loss.item().hex() for loss in losses]}, file)
"""


def look_up_ns() -> list[float]:
    """Return what the look-up of a call takes, ns of CPU: loops with it and without it in turns, their differences."""
    counted, model, learns, training = {0: True}, 0, True, True
    costs: list[float] = []
    for _ in range(ROUNDS):
        marks = [thread_time_ns()]
        for _ in range(LOOKUPS):
            if learns and model >= 0 and counted.get(model, -1) < training:
                raise AssertionError("it was counted")
        marks.append(thread_time_ns())
        for _ in range(LOOKUPS):
            pass
        marks.append(thread_time_ns())
        with_it, without = (after - before for before, after in pairwise(marks))
        costs.append((with_it - without) / LOOKUPS)
    return costs


def main() -> None:
    """Run the job alone and recorded, and print one JSON line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "job.py"
        script.write_text(JOB)
        os.environ |= {"STEPS": str(STEPS), "MICRO_BATCHES": str(MICRO_BATCHES), "ANSWER": str(folder / "alone.json")}
        alone_env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, str(script)], env=alone_env, check=True, timeout=120)
        os.environ["ANSWER"] = str(folder / "recorded.json")
        headway("run", "--out", folder / "run", "--", script)
        alone, recorded = (json.loads((folder / f"{each}.json").read_text()) for each in ("alone", "recorded"))
        flops = json.loads((folder / "run/flops/r0-m0.json").read_text())["flops"]
    assert alone["losses"] == recorded["losses"], "losses differ"
    assert flops == 2 * 32 * 64 * (2 * 64 + 3 * 8), flops
    first, later = recorded["calls"].get("0", 0), {step: n for step, n in recorded["calls"].items() if step != "0"}
    assert first, "the facts were not read"
    costs_us = sorted(ns * MICRO_BATCHES / 1000 for ns in look_up_ns())
    quiet = not recorded["asked"] and not recorded["breaks"] and not recorded["driver"]
    line = {
        "bench": "facts_cost", "steps": STEPS, "baseline": "the same loop without the look-up",
        "calls_in_first_step": first, "calls_in_later_steps": sum(later.values()),
        "us_per_step": round(statistics.median(costs_us), 3),
        "us_per_step_range": [round(costs_us[0], 3), round(costs_us[-1], 3)],
        "once_ms": round(recorded["once_ns"] / 1e6, 1), "asked_of_tensors": recorded["asked"],
        "graph_breaks": recorded["breaks"], "driver_started": recorded["driver"],
        "claim": f"no call behind the first step, <={LIMIT_US:g} us a step",
        "met": quiet and not later and statistics.median(costs_us) <= LIMIT_US,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
