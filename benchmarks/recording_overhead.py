"""What always-on recording costs the training thread, against TraceML 0.5.0 and an earlier headway on the same loop.

Claim: main-thread CPU added per step of a single-process 64x64 MLP loop with
a DataLoader is at most 20 us, at most 0.3x of what TraceML (`traceml run`, in
the environment of benchmarks/peers/traceml.txt) adds, and, with `--before
DIR` (a checkout of an earlier commit), within 20 % of what that one adds.
Bare, headway, earlier and TraceML runs are interleaved; all end with the same
loss, or the run fails. Rounds go on until the interval of every difference
(two standard errors to each side, over resampled rounds) is at most 5 us
wide, or the time is over. A difference whose interval is wider, or holds 0,
is not resolved: nothing is claimed of it. Deep windows are off here: they
have a budget of their own. `--full` takes up to half an hour.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _command import ROOT
from _noise import cheapest, middle_mean, standard_error

from benchmarks.peers.env import python_of

LEAST_ROUNDS = 4
BUDGET_S, FULL_BUDGET_S = 100.0, 1800.0
WIDTH_US = 5.0
"""An interval at most this wide resolves a difference."""
LIMIT_US = 20.0
LIMIT_RATIO = 0.3
LIMIT_GROWTH = 1.2

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


def free_port() -> int:
    """Return a port of the loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(tool: str, folder: Path, root: Path = ROOT) -> dict[str, object]:
    """Run the job once under `tool` ('bare', 'headway' of the checkout `root`, 'traceml'); returns its answer."""
    script, answer = folder / "job.py", folder / "answer.json"
    script.write_text(JOB)
    answer.unlink(missing_ok=True)
    env = {**os.environ, "TOOL": tool, "ANSWER": str(answer), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    if tool == "headway":
        paths = [str(root / "headway" / "runtime" / "inject"), str(root)]
        env |= {"HEADWAY_RUN": tempfile.mkdtemp(dir=folder), "HEADWAY_WINDOWS": "0", "PYTHONPATH": ":".join(paths)}
    if tool == "traceml":
        traceml = python_of("traceml").parent / "traceml"
        env["PATH"] = f"{traceml.parent}:{env['PATH']}"
        name = Path(tempfile.mkdtemp(dir=folder)).name
        command = [str(traceml), "run", str(script), "--mode", "summary", "--logs-dir", str(folder), "--run-name",
                   f"t{name}", "--aggregator-port", str(free_port())]  # fmt: skip
    result = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if not answer.exists():
        raise SystemExit(f"the job gave no answer under {tool}:\n{result.stdout[-800:]}{result.stderr[-1500:]}")
    return json.loads(answer.read_text())


def difference(rounds: list[dict[str, float]], tool: str) -> dict[str, object]:
    """Return what `tool` adds to the bare loop in us a step, its interval, and whether that is resolved."""

    def mean(some: list[dict[str, float]]) -> float:
        return middle_mean([one[tool] - one["bare"] for one in some])

    error = 2 * standard_error(mean, rounds)
    least, most = mean(rounds) - error, mean(rounds) + error
    return {
        "us": round(mean(rounds), 2), "interval_us": [round(least, 2), round(most, 2)],
        "resolved": most - least <= WIDTH_US and not least <= 0 <= most,
    }  # fmt: skip


def main() -> None:
    """Run the rounds and print one JSON line; exits with 3 where the claim is missed or not resolved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit to compare with")
    parser.add_argument("--full", action="store_true", help="take up to half an hour")
    options = parser.parse_args()
    tools = {"bare": ROOT, "headway": ROOT, "traceml": ROOT}
    if options.before:
        tools["before"] = options.before.resolve()
    began, losses, rounds = time.monotonic(), set(), []
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while len(rounds) < LEAST_ROUNDS or (
            not all(row["resolved"] for row in found.values())
            and time.monotonic() - began < (FULL_BUDGET_S if options.full else BUDGET_S)
        ):
            # Every other round runs backwards: what one tool leaves in the caches is not always the same one's gain.
            order = list(tools) if len(rounds) % 2 == 0 else list(tools)[::-1]
            one = {}
            for tool in order:
                answer = measure("headway" if tool == "before" else tool, Path(folder), tools[tool])
                losses.add(answer["loss"])
                one[tool] = cheapest(answer["costs_us"])
            rounds.append(one)
            found = {tool: difference(rounds, tool) for tool in tools if tool != "bare"}
            print(f"round {len(rounds)}: {found}", file=sys.stderr, flush=True)
    assert len(losses) == 1, f"losses differ: {losses}"
    ours, peer = found["headway"], found["traceml"]
    ratio = ours["us"] / peer["us"]
    growth = ours["us"] / found["before"]["us"] if "before" in found else None
    resolved = all(row["resolved"] for row in found.values())
    within = ours["interval_us"][1] <= LIMIT_US and ratio <= LIMIT_RATIO and (growth or 0) <= LIMIT_GROWTH
    line = {
        "bench": "recording_overhead", "bare_us": round(min(one["bare"] for one in rounds), 1), "added": ours,
        "peer": "traceml-ai 0.5.0", "peer_added": peer, "ratio": round(ratio, 3), "before": found.get("before"),
        "growth": None if growth is None else round(growth, 3), "rounds": len(rounds),
        "claim": f"<={LIMIT_US} us and <={LIMIT_RATIO} of the peer"
        + (f" and <={LIMIT_GROWTH} of the commit before" if growth is not None else ""),
        "met": within if resolved else "not resolved",
    }  # fmt: skip
    print(json.dumps(line))
    sys.exit(0 if resolved and within else 3)


if __name__ == "__main__":
    main()
