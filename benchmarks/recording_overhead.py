"""What always-on recording costs the training thread, against TraceML 0.5.0 on the same loop.

Claim: main-thread CPU added per step of a single-process 64x64 MLP loop with
a DataLoader is at most 20 us, and at most 0.3x of what TraceML (`traceml run`,
in the environment of benchmarks/peers/traceml.txt) adds. Bare, headway and
TraceML runs are interleaved; all end with the same loss, or the run fails.
Deep windows are off here: they have a budget of their own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _command import ROOT
from _noise import added, cheapest

from benchmarks.peers.env import python_of

ROUNDS = 3
LIMIT_US = 20.0
LIMIT_RATIO = 0.3

JOB = """
import contextlib, json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

WARM, CHUNKS, CHUNK = 300, 32, 50

def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(32000, 64), torch.randn(32000, 64))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    if os.environ["TOOL"] == "traceml":
        import traceml_ai
        traceml_ai.init()
        step_of = lambda: traceml_ai.trace_step(model)
    else:
        step_of = None
    steps, costs, mark = 0, [], 0
    while len(costs) < CHUNKS:
        for x, y in loader:
            if step_of is None:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
            else:
                with step_of():
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

main()
"""


def measure(tool: str, folder: Path) -> dict[str, object]:
    """Run the job once under `tool` ('bare', 'headway' or 'traceml'); returns its answer."""
    script, answer = folder / "job.py", folder / "answer.json"
    script.write_text(JOB)
    answer.unlink(missing_ok=True)
    env = {**os.environ, "TOOL": tool, "ANSWER": str(answer), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    if tool == "headway":
        paths = [str(ROOT / "headway" / "runtime" / "inject"), str(ROOT)]
        env |= {"HEADWAY_RUN": tempfile.mkdtemp(dir=folder), "HEADWAY_WINDOWS": "0", "PYTHONPATH": ":".join(paths)}
    if tool == "traceml":
        traceml = python_of("traceml").parent / "traceml"
        env["PATH"] = f"{traceml.parent}:{env['PATH']}"
        name = Path(tempfile.mkdtemp(dir=folder)).name
        command = [str(traceml), "run", str(script), "--mode", "summary", "--logs-dir", str(folder), "--run-name",
                   f"t{name}", "--aggregator-port", "29731"]  # fmt: skip
    result = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if not answer.exists():
        raise SystemExit(f"the job gave no answer under {tool}:\n{result.stdout[-800:]}{result.stderr[-1500:]}")
    return json.loads(answer.read_text())


def main() -> None:
    """Run the rounds and print one JSON line."""
    losses, costs = set(), {"bare": [], "headway": [], "traceml": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for tool, found in costs.items():
                answer = measure(tool, Path(folder))
                losses.add(answer["loss"])
                found.append(cheapest(answer["costs_us"]))
    assert len(losses) == 1, f"losses differ: {losses}"
    added_us, (least_us, most_us) = added(costs["bare"], costs["headway"])
    peer_us, _ = added(costs["bare"], costs["traceml"])
    line = {
        "bench": "recording_overhead", "bare_us": round(min(costs["bare"]), 1), "added_us": round(added_us, 1),
        "added_us_range": [round(least_us, 1), round(most_us, 1)], "peer": "traceml-ai 0.5.0",
        "peer_added_us": round(peer_us, 1), "ratio": round(added_us / peer_us, 3),
        "claim": f"<={LIMIT_US} us and <={LIMIT_RATIO}",
        "met": added_us <= LIMIT_US and added_us / peer_us <= LIMIT_RATIO,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
