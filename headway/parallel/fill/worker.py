"""The process that runs fill jobs beside a rank: one chunk after the other, inside the budget of an instruction.

Started by `gaps.py`; the standard library only, unless a job's own code imports more. Arguments: the descriptors of the
instructions and of the answers, the id of the rank, and the jobs as JSON. Prints its own id once it runs.

    rank      -- (number, kind of gap, budget_ns) -->      runs chunks while the next one is expected to end in time
              <-- (number, chunks, used_ns, job) --        always answers, also where it ran nothing

What a chunk is expected to take is the longest of its last `WINDOW` times, the time in the file before there is one. A
chunk that takes three times its time so harms one step; from then on fewer fit. Where a job has fitted nowhere for
`PATIENCE` instructions, its next configuration is taken. A chunk is never broken off.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import struct
import sys
import time
from collections import deque
from typing import Any

Row = dict[str, Any]
"""A job or a configuration, as JSON has it."""

INSTRUCTION = struct.Struct("qqq")
"""Number, kind of gap, budget_ns."""

ANSWER = struct.Struct("qqqq")
"""Number, chunks that were run, their time in ns, index of the job in the list (-1: all are done)."""

WINDOW = 8
"""Times of a chunk that are remembered."""

PATIENCE = 6
"""Instructions in which no chunk of a configuration fits, after which the next one is taken."""


class FillRunner:
    """The jobs of one rank, one after the other."""

    def __init__(self, jobs: list[Row]) -> None:
        self.jobs, self.job = jobs, 0
        self.samples = [0] * len(jobs)
        self.configuration = self.chunk = self.stuck = 0
        self.times: dict[tuple[int, int, int], deque[int]] = {}
        self.functions: Row = {}

    def run(self, gap_kind: int, budget_ns: int) -> tuple[int, int]:
        """Run chunks inside a budget; return how many, and their time in ns."""
        start = time.perf_counter_ns()
        chunks = used_ns = 0
        while self.job < len(self.jobs):
            job = self.jobs[self.job]
            configuration = job["configurations"][self.configuration]
            duration_ns, fits = configuration["chunks"][self.chunk]
            key = self.job, self.configuration, self.chunk
            times = self.times.setdefault(key, deque(maxlen=WINDOW))
            if not fits[gap_kind] or time.perf_counter_ns() - start + max(times, default=duration_ns) > budget_ns:
                break
            since = time.perf_counter_ns()
            self._call(job, configuration, duration_ns)
            spent_ns = time.perf_counter_ns() - since
            times.append(spent_ns)
            chunks, used_ns = chunks + 1, used_ns + spent_ns
            self._advance(job, configuration)
        self.stuck = 0 if chunks else self.stuck + 1
        if self.stuck >= PATIENCE and self.job < len(self.jobs):
            count = len(self.jobs[self.job]["configurations"])
            self.configuration, self.chunk, self.stuck = (self.configuration + 1) % count, 0, 0
        return chunks, used_ns

    def _advance(self, job: Row, configuration: Row) -> None:
        self.chunk += 1
        if self.chunk < len(configuration["chunks"]):
            return
        self.chunk = 0
        self.samples[self.job] += configuration["samples"]
        if job["samples"] is not None and self.samples[self.job] >= job["samples"]:
            self.job, self.configuration = self.job + 1, 0

    def _call(self, job: Row, configuration: Row, duration_ns: int) -> None:
        """Run a chunk: the job's function with the configuration's name and the chunk, or a sleep of its time."""
        if not job["run"]:
            time.sleep(duration_ns / 1e9)
            return
        if job["run"] not in self.functions:
            path, _, name = job["run"].rpartition(":")
            self.functions[job["run"]] = runpy.run_path(path)[name]
        self.functions[job["run"]](configuration["name"], self.chunk)


def main(arguments: list[str]) -> None:
    """Leave the rank's family, then serve its instructions until it ends or closes them."""
    instructions, answers, rank = (int(word) for word in arguments[:3])
    runner = FillRunner(json.loads(arguments[3]))
    watched = os.pidfd_open(rank)
    pid = os.fork()
    if pid:
        os.write(1, str(pid).encode())
        os._exit(0)
    os.setsid()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    while watched not in select.select([watched, instructions], [], [])[0]:
        message = os.read(instructions, INSTRUCTION.size)
        if not message:
            return
        number, gap_kind, budget_ns = INSTRUCTION.unpack(message)
        chunks, used_ns = runner.run(gap_kind, budget_ns)
        job = runner.job if runner.job < len(runner.jobs) else -1
        os.write(answers, ANSWER.pack(number, chunks, used_ns, job))


if __name__ == "__main__":
    main(sys.argv[1:])
