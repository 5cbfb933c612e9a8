"""Traces larger than memory: `why`, `report`, `trace info`, `trace export --steps` on folders of one file per rank.

Claim: 64 ranks x 1 million events (--full; 2 ranks without it) of a recorded run, as a run folder and as a plain
folder, and of profiler traces, are analysed in at most 2 GiB of resident memory at the peak. Peer: the same ledger
with all rows in memory (up to 8 ranks), whose whole numbers must be the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _command import ROOT

from headway.trace.events import parquet
from headway.trace.events.trace import COLUMNS, Trace
from headway.trace.events.vocabulary import KIND

sys.path.insert(0, str(ROOT))
from tests.runs_made import MS, RunMaker

EVENTS, MADE_RANKS, MADE_STEPS = 1_000_000, 4, 500
BAR_BYTES = 2 << 30
RANKS, PEER_RANKS = 2, 8
IN_MEMORY = """
import json, sys
from headway.ledger.answers.ledger import Ledger
from headway.trace.events.trace import Trace
print(json.dumps(Ledger.of(Trace.open(sys.argv[1])).to_json()))
"""


def tiled(trace: Trace, period_ns: int, **periods: tuple[np.ndarray, int]) -> Trace:
    """Put a trace end to end until it has `EVENTS` rows; `periods`: column -> (rows, what each copy adds)."""
    copies = -(-EVENTS // len(trace))
    copy = np.repeat(np.arange(copies), len(trace))[:EVENTS]
    events = {column: np.tile(trace.events[column], copies)[:EVENTS] for column in COLUMNS}
    events["start_ns"] = events["start_ns"] + copy * period_ns
    for column, (rows, added) in periods.items():
        moving = np.tile(rows, copies)[:EVENTS]
        events[column] = (events[column] + np.where(moving, copy * added, 0)).astype(COLUMNS[column][0])
    return Trace(events, trace.names, trace.lanes, trace.groups, trace.ranks, trace.meta)


def under(trace: Trace, rank: int) -> Trace:
    """Return the trace of one rank under another number."""
    events = {**trace.events, "rank": np.full(len(trace), rank, np.int32)}
    return Trace(events, trace.names, trace.lanes, trace.groups, {rank: {"host": f"host{rank // 8}"}}, trace.meta)


def write_run(path: Path, ranks: int) -> None:
    """Write a run folder of `ranks` ranks, each with `EVENTS` rows."""
    made = RunMaker(
        ranks=MADE_RANKS, steps=MADE_STEPS, num_workers=2, fetch_ns=8 * MS, prep_ns=2 * MS,
        logging_ns=lambda rank, step: MS * (step % 10 == rank), gc_ns=lambda rank, step: MS * (step % 50 == 0),
    ).make()  # fmt: skip
    steps = made.trace.where(made.trace.events["step"] >= 0)
    low, high = steps.span_ns
    (path / "events").mkdir(parents=True)
    long = []
    for rank in range(MADE_RANKS):
        own = steps.select(ranks=[rank])
        named = own.named
        everything = np.ones(len(own), bool)
        periods = {
            "step": (everything, MADE_STEPS), "seq": (named("comm.wait"), MADE_STEPS),
            "corr": (named("input.iter", "input.next"), 1),
        }  # fmt: skip
        long.append(tiled(own, high - low, **periods))
    for rank in range(ranks):
        parquet.write(under(long[rank % MADE_RANKS], rank), path / "events" / f"a0-r{rank}.parquet")
    end_ns = max(trace.span_ns[1] for trace in long)
    meta = {**made.meta, "end_ns": end_ns, "ranks": [], "world_size": ranks, "nproc": ranks}
    (path / "run.json").write_text(json.dumps(meta))


def write_profiles(path: Path, ranks: int) -> None:
    """Write a plain folder of profiler traces: launches, kernels, and collectives that ranks reach unevenly."""
    launch, kernel, coll = KIND["HOST"], KIND["COMPUTE"], KIND["COLL"]
    kinds = [launch] * 9 + [kernel] * 7 + [coll] * 2
    n, step_ns = len(kinds), 20 * MS
    columns = {
        "kind": kinds, "lane": [0] * 9 + [1] * 7 + [2] * 2, "name": [0] * 9 + [1] * 7 + [2] * 2,
        "start_ns": [i * MS for i in range(9)] + [(i * 2 + 1) * MS for i in range(7)] + [9 * MS, 15 * MS],
        "duration_ns": [MS // 2] * 9 + [MS] * 7 + [3 * MS, 4 * MS], "corr": list(range(9)) * 2,
        "group": [-1] * 16 + [0, 0], "seq": [-1] * 16 + [0, 1], "step": [0] * n, "rank": [0] * n,
    }  # fmt: skip
    one = Trace.from_columns(columns, names=["cudaLaunchKernel", "gemm", "ncclDevKernel_AllReduce"],
                             lanes=["main", "stream 7", "stream 20"], groups={0: {"name": "0", "ranks": []}},
                             meta={"source": "kineto"})  # fmt: skip
    moving = np.array([kind == coll for kind in kinds])
    whole = tiled(one, step_ns, step=(np.ones(n, bool), 1), seq=(moving, 2), corr=(np.ones(n, bool), 9))
    path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for rank in range(ranks):
        late = np.where(whole.events["kind"] == coll, rng.integers(0, MS, EVENTS), 0)
        times = {"start_ns": whole.events["start_ns"] + late, "duration_ns": whole.events["duration_ns"] - late}
        own = under(replace(whole, events={**whole.events, **times}), rank)
        parquet.write(own, path / f"rank{rank}.parquet")


def measured(*command: str) -> tuple[dict[str, Any], int, float]:
    """Run a command; return its JSON object, its peak resident bytes and its CPU seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command} exited with {process.returncode}")
        answer: dict[str, Any] = json.loads(out.read())
    return answer, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def main() -> int:
    """Write the folders, measure every command on them, compare with the peer, and print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="64 ranks")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    ranks = options.ranks or (64 if options.full else RANKS)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, plain, profiles = (Path(scratch) / name for name in ("run", "plain", "profiles"))
        begin = time.process_time()
        write_run(folder, ranks)
        plain.mkdir()
        for file in (folder / "events").iterdir():
            os.link(file, plain / file.name)
        write_profiles(profiles, ranks)
        written_s = time.process_time() - begin
        commands = {
            "why run": ("why", str(folder)), "why plain": ("why", str(plain)), "why profiles": ("why", str(profiles)),
            "info run": ("trace", "info", str(folder)),
            "report run": ("report", str(folder), "-o", f"{scratch}/r.html"),
            "export run": ("trace", "export", str(folder), f"{scratch}/w.pftrace", "--steps", "900:910"),
            "export plain": ("trace", "export", str(plain), f"{scratch}/w.json.gz", "--steps", "900:910"),
        }  # fmt: skip
        answers = {}
        for name, command in commands.items():
            answers[name], peak, cpu_s = measured("-m", "headway.cli", *command, "--json")
            rows[name] = {"peak_gib": round(peak / 2**30, 2), "cpu_s": round(cpu_s, 1)}
        assert answers["info run"]["events"] == ranks * EVENTS, "rows are missing"
        for name in ("why run", "why plain", "why profiles"):
            why = answers[name]
            assert sum(why["ledger_ns"].values()) == why["devices"] * why["wall_ns"], f"{name} does not add up"
        if ranks <= PEER_RANKS:
            for name, path in (("plain", plain), ("profiles", profiles)):
                whole, peak, cpu_s = measured("-c", IN_MEMORY, str(path))
                rows[f"peer {name}"] = {"peak_gib": round(peak / 2**30, 2), "cpu_s": round(cpu_s, 1)}
                for key in ("ledger_ns", "sub_ns", "wall_ns", "steps", "devices"):
                    assert whole[key] == answers[f"why {name}"][key], f"{key} differs from the ledger in memory"
    ours = {name: row for name, row in rows.items() if not name.startswith("peer")}
    peak_gib = max(row["peak_gib"] for row in ours.values())
    print(json.dumps({
        "bench": "larger_than_memory", "ranks": ranks, "events": ranks * EVENTS, "baseline": "all rows in memory",
        "peak_gib": peak_gib, "cpu_s": round(sum(row["cpu_s"] for row in ours.values()), 1),
        "events_per_cpu_s": round(ranks * EVENTS / rows["why plain"]["cpu_s"]), "written_cpu_s": round(written_s, 1),
        "rows": [{"command": name, **row} for name, row in rows.items()], "claim": "<=2 GiB",
        "met": peak_gib * 2**30 <= BAR_BYTES,
    }))  # fmt: skip
    return 0 if peak_gib * 2**30 <= BAR_BYTES else 3


if __name__ == "__main__":
    sys.exit(main())
