"""Ranks that write what a training loop would, into the rings of a run folder, from processes of their own.

Used by the tests and the benchmark of the live page: no torch, no launcher, the real recorder. Every rank waits for
input, computes, waits for the slowest rank and updates; rank `slow` computes longer, so that the others wait for it.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.ring import Recorder

CODE = {name: span.code for name, span in SPANS.items()}


def write_meta(run: Path, ranks: int, **more: object) -> int:
    """Write run.json as a launcher does at its start; returns that moment."""
    start_ns = time.perf_counter_ns()
    facts = {
        "schema": "headway.run-folder/1", "run_id": "made", "start_ns": start_ns, "end_ns": None,
        "realtime_ns": time.time_ns(), "nproc": ranks, "world_size": ranks, "host": socket.gethostname(),
        "script": ["train.py"], "ranks": [], "exit": None, **more,
    }  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    half = run / "run.json.half"
    half.write_text(json.dumps(facts))
    half.replace(run / "run.json")
    return start_ns


def write_step(recorder: Recorder, rank: int, step: int, begin_ns: int, step_ns: int, *, slow: int) -> None:
    """Write the records of one step that begins at `begin_ns`: a tenth input, then compute, waiting and the update."""
    wait = step_ns // 10
    arrival = begin_ns + wait + step_ns * (6 if rank == slow else 4) // 10
    done = begin_ns + step_ns * 9 // 10
    recorder.emit(CODE["input.next"], begin_ns, wait, 0, step, -1, 0)
    if step % 40 == rank:
        recorder.emit(CODE["host.gc"], begin_ns + wait + step_ns // 20, step_ns // 20, 2, 100)
    recorder.emit(CODE["comm.wait"], arrival, done - arrival, 0, step, 4_000_000)
    recorder.emit(CODE["optimizer.step"], done, begin_ns + step_ns - done, 0, 0)


def train(run: Path, rank: int, *, begin_ns: int, step_ns: int, seconds: float, slow: int) -> None:
    """Be one rank: write each step when it is over, in real time, from `begin_ns` on."""
    recorder = Recorder(str(run / "rings"), rank=rank, local_rank=rank)
    recorder.open()
    for step in range(round(seconds * 1e9 / step_ns)):
        at = begin_ns + step * step_ns
        time.sleep(max(at + step_ns - time.perf_counter_ns(), 0) / 1e9)
        write_step(recorder, rank, step, at, step_ns, slow=slow)
    recorder.close()


def main() -> None:
    """Run all ranks until the last step: arguments are the folder, ranks, steps a second, seconds."""
    run, ranks, rate, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    begin_ns = write_meta(run, ranks) + 1_500_000_000
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            train(run, rank, begin_ns=begin_ns, step_ns=round(1e9 / rate), seconds=seconds, slow=ranks - 1)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
