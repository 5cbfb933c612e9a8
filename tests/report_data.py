"""Believable objects of the `--json` contracts and arrays of a recorded job, for the tests of report/.

The figures belong together: a 2-rank text job of 400 steps and 41.3 s that
waits for a slow store, saves checkpoints and logs; and a 16-rank pipeline
whose first worker is slow.
"""

import base64
from typing import Any

import numpy as np

from headway.report.page.charts import HeatMap
from headway.report.page.html import ReportData
from headway.report.page.timeline import timeline
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, SPANS

WALL_S = 41.302
LEDGER_NS = {
    "useful": 20_961_400_112, "input": 49_877_310_004, "comm": 1_702_004_118, "bubble": 0, "straggler": 1_188_420_001,
    "checkpoint": 3_304_117_903, "startup": 3_961_722_640, "restart": 0, "rework": 0, "host": 1_190_004_512,
    "idle": 270_020_710, "unknown": 149_000_000,
}  # fmt: skip
SUB_SHARES = {
    "useful": {"compute": 0.931, "optimizer": 0.069},
    "input": {"fetch": 0.7799, "prep": 0.1837, "cpu_wait": 0.0183, "transfer": 0.0181},
    "comm": {"exposed": 1.0},
    "straggler": {"input": 0.83, "compute": 0.17},
    "checkpoint": {"save": 0.699, "persist": 0.295, "commit": 0.006},
    "startup": {"import": 0.63, "script": 0.22, "launch": 0.1, "init": 0.05},
    "host": {"logging": 0.898, "gc": 0.102},
    "idle": {"teardown": 0.8, "exit": 0.2},
    "unknown": {"dropped": 1.0},
}
SUB_S = {
    f"{bucket}.{sub}": share * LEDGER_NS[bucket] / 1e9
    for bucket, parts in SUB_SHARES.items()
    for sub, share in parts.items()
}


def demo_why() -> dict[str, Any]:
    """Return a `headway.why/2` object of the text job."""
    return {
        "schema": "headway.why/2", "verdict": {"command": "headway plan runs/text-1"}, "devices": 2, "steps": 400,
        "wall_ns": sum(LEDGER_NS.values()) // 2, "wall_s": WALL_S, "goodput": 0.2538,
        "ledger": {bucket: ns / 1e9 for bucket, ns in LEDGER_NS.items()}, "ledger_ns": dict(LEDGER_NS),
        "sub": dict(SUB_S), "basis": dict.fromkeys(LEDGER_NS, "measured") | {"useful": "remainder"},
        "causes": demo_causes(), "coverage": 0.9982, "fidelity": 1.0131,
    }  # fmt: skip


def demo_causes() -> list[dict[str, Any]]:
    """Return the ranked causes of the text job."""
    rows: list[tuple[Any, ...]] = [
        ("input.fetch", "loader 0 on both ranks, num_workers=0", 38.9,
         "each batch was blocked 48.2 ms on storage (median); a step computes 24.1 ms",
         "load with 4 workers: num_workers=4, prefetch_factor=4", 1.904, (1.752, 2.021)),
        ("input.prep", "loader 0 on both ranks, num_workers=0", 8.8,
         "10.9 ms of CPU per batch inside the dataset, on the training thread; 3 epochs read the same 24.6 MB",
         "keep decoded examples in memory: 24.6 MB of 512 MB allowed", 1.121, (1.094, 1.149)),
        ("checkpoint.stall", "rank 0, every 50 steps", 3.3,
         "8 saves of 41.2 MB took 413 ms each, 30 % of it in fsync",
         "save every 200 steps: 4.1 s of rework at risk per failure", 1.038, (1.031, 1.044)),
        ("host.logging", "rank 0", 1.07,
         "2,800 records through a handler that takes 382 us each", "buffer the handler", 1.013, (1.01, 1.017)),
        ("straggler.rank", "rank 1 on host a", 1.19,
         "rank 1 arrived last in 71 % of 400 steps, 3.1 ms after rank 0; its excess is input.prep",
         "give rank 1 a core of its own", 1.009, (1.001, 1.02)),
    ]  # fmt: skip
    keys = ("cause", "where", "lost_device_s", "evidence", "fix", "predicted_speedup", "interval")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def demo_plan() -> dict[str, Any]:
    """Return a `headway.plan/1` object of the text job."""
    rows: list[tuple[Any, ...]] = [
        ("data.workers", "data", 1.904, (1.752, 2.021), True, "4 processes, 310 MB", "none: same order of examples"),
        ("data.cache", "data", 1.121, (1.094, 1.149), True, "24.6 MB of host memory", "none: purity probed"),
        ("checkpoint.interval", "checkpoint", 1.038, (1.031, 1.044), False, "none", "more rework after a failure"),
        ("host.logging", "host", 1.013, (1.01, 1.017), True, "none", "last lines may be lost on SIGKILL"),
        ("comm.bucket", "comm", 1.002, (0.98, 1.03), True, "none", "none"),
    ]
    keys = ("name", "room", "predicted_speedup", "interval", "applies", "cost", "risk")
    proposals = [dict(zip(keys, row, strict=True)) for row in rows]
    chosen = ["data.workers", "data.cache", "host.logging"]
    return {"schema": "headway.plan/1", "proposals": proposals, "chosen": chosen, "predicted_speedup": 2.218}


def demo_run() -> dict[str, Any]:
    """Return a `headway.run/1` object of the text job, run again with its plan."""
    rows: list[tuple[Any, ...]] = [
        ("data.workers", 1.904, (1.752, 2.021), 1.871, None),
        ("data.cache", 1.121, (1.094, 1.149), 1.102, None),
        ("host.logging", 1.013, (1.01, 1.017), 1.02, None),
        ("comm.bucket", 1.002, (0.98, 1.03), None, "the script passes bucket_cap_mb itself"),
        ("plan", 2.218, (2.05, 2.37), 2.164, None),
    ]
    keys = ("name", "predicted_speedup", "interval", "measured_speedup", "reason_not_applied")
    return {
        "schema": "headway.run/1", "run": "runs/text-2",
        "exit": {"code": 0, "class": "ok", "first_rank": None, "traceback": None}, "goodput": 0.561,
        "steps_per_s": 21.4, "baseline": "runs/text-1", "applied": [dict(zip(keys, row, strict=True)) for row in rows],
    }  # fmt: skip


def pipeline_why() -> dict[str, Any]:
    """Return a `headway.why/2` object of an operation trace: DP 4 x PP 4, worker 0/0 slow."""
    worker = {f"{dp}/{pp}": 1.004 + 0.002 * dp + 0.003 * pp for dp in range(4) for pp in range(4)} | {"0/0": 1.3118}
    slow = {
        "cause": "straggler.worker", "where": "dp 0 / pp 0", "lost_device_s": 612.4,
        "evidence": "removing 1 of 16 workers wins back 97.4 % of what all stragglers cost (M_W); S_worker 1.31",
        "fix": "replace the host of dp 0 / pp 0", "predicted_speedup": 1.304, "interval": (1.291, 1.316),
    }  # fmt: skip
    return {
        "verdict": {"command": "headway report trace-AR.parquet -o report.html"},
        "schema": "headway.why/2", "devices": 16, "steps": 44, "wall_s": 163.2, "wall_ns": 163_200_000_000,
        "goodput": None, "ledger": {}, "ledger_ns": {}, "sub": {}, "basis": {}, "causes": [slow],
        "straggler": {
            "slowdown": 1.312, "waste": 0.2378, "M_W": 0.974, "M_S": 0.031,
            "by": {
                "optype": {"forward-compute": 1.12, "backward-compute": 1.19, "forward-pp-comm": 1.002},
                "dp": {"0": 1.31, "1": 1.004, "2": 1.006, "3": 1.008},
                "pp": {"0": 1.309, "1": 1.01, "2": 1.01, "3": 1.02},
                "worker": worker,
            },
            "step_slowdown": {str(step): 1.30 + 0.001 * step for step in range(44)}, "detail": {},
        },
        "coverage": 1.0, "fidelity": 1.0051,
    }  # fmt: skip


def demo_steps(ranks: int = 2, steps: int = 400, seed: int = 7) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return step times in seconds [ranks, steps]: lognormal noise, a checkpoint every 50 steps, one rank behind."""
    rng = np.random.default_rng(seed)
    shared = 0.0925 * rng.lognormal(0.0, 0.06, steps)
    shared[49::50] += 0.41
    return np.asarray(shared + rng.exponential(0.0011, (ranks, steps)))


def demo_buckets(steps: int = 400, seed: int = 7) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return device-seconds per step and bucket [steps] of two ranks."""
    rng = np.random.default_rng(seed)
    means = {"useful": 0.0524, "input": 0.1247, "comm": 0.0042, "straggler": 0.003}
    series = {name: mean * rng.lognormal(0.0, 0.12, steps) for name, mean in means.items()}
    saves = np.zeros(steps)
    saves[49::50] = 0.82
    return series | {"checkpoint": saves, "host": np.full(steps, 0.003)}


def demo_trace(ranks: int = 2, steps: int = 8, seed: int = 7, ideal: bool = False) -> Trace:
    """Return a window of the text job: input, compute, optimizer, a wait for gradients, one checkpoint, two workers.

    In the ideal one batches are ready, nothing is saved, no rank waits.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, str, str, int, int, int]] = []
    for rank in range(ranks):
        now = 1_000_000_000
        for step in range(steps):
            begin = now
            load = int(rng.lognormal(17.7, 0.15)) if not ideal else 200_000
            rows.append((rank, step, "input.next", "DATA", now, load, 0))
            worker = f"loader/{step % 2}"
            if ideal:
                load = 12_000_000
            rows.append((rank, step, "input.load", worker, now - load // 2, int(load * 1.4), 0))
            rows.append((rank, step, "input.fetch", worker, now - load // 2, load, 1))
            rows.append((rank, step, "input.prep", worker, now + load // 2, int(load * 0.3), 1))
            now = rows[-4][4] + rows[-4][5] + int(rng.lognormal(16.8, 0.05))
            wait = int(rng.lognormal(14.4, 0.6)) if not ideal else 300_000
            rows.append((rank, step, "comm.wait", "COLL", now, wait, 0))
            now += wait
            rows.append((rank, step, "optimizer.step", "OPTIM", now, 1_500_000, 0))
            now += 1_500_000
            if step == steps // 2 and rank == 0 and not ideal:
                rows.append((rank, step, "checkpoint.save", "CKPT", now, 38_000_000, 0))
                rows.append((rank, step, "checkpoint.sync", "CKPT", now + 24_000_000, 13_000_000, 1))
                now += 38_000_000
            rows.append((rank, step, "host.logging", "HOST", now, 700_000, 0))
            now += 700_000
            rows.append((rank, step, "step", "MARK", begin, now - begin, 0))
    return _trace_of(rows)


def _trace_of(rows: list[tuple[int, int, str, str, int, int, int]]) -> Trace:
    names = sorted({row[2] for row in rows})
    lanes = ["main", "loader/0", "loader/1"]
    kinds = [KIND[SPANS[row[2]].kind] for row in rows]
    return Trace.from_columns(
        {
            "rank": [row[0] for row in rows], "step": [row[1] for row in rows],
            "name": [names.index(row[2]) for row in rows], "kind": kinds,
            "lane": [lanes.index(row[3]) if row[3] in lanes else 0 for row in rows],
            "start_ns": [row[4] for row in rows], "duration_ns": [row[5] for row in rows],
            "depth": [row[6] for row in rows],
        },
        names=names,
        lanes=lanes,
    )  # fmt: skip


def demo_report(ranks: int = 2, steps: int = 400) -> ReportData:
    """Return everything a page can show, for the text job on `ranks` ranks and `steps` steps."""
    step_s = demo_steps(ranks, steps)
    trace = demo_trace(min(ranks, 4))
    half = {bucket: seconds / 2 for bucket, seconds in demo_why()["ledger"].items()}
    heat = HeatMap("Rank time over the median rank, by step", step_s / np.median(step_s, axis=0), "rank", "step")
    return ReportData(
        "runs/text-1",
        demo_why(),
        run=demo_run(),
        plan=demo_plan(),
        step_s=step_s,
        bucket_s=demo_buckets(steps),
        rank_ledger=dict.fromkeys(range(ranks), half),
        timeline=timeline(trace),
        ideal=timeline(demo_trace(min(ranks, 4), ideal=True)),
        heat_maps=[heat] if steps else [],
        facts={
            "host": "trainer-a", "device": "cpu", "torch": "2.13.0", "python": "3.11.7", "headway": "0.1.0",
            "script": ["train.py", "--epochs", "3", "--token", "***"], "environment": {"OMP_NUM_THREADS": "1"},
        },
        created="2026-11-20 10:12 UTC",
    )  # fmt: skip


def pipeline_report() -> ReportData:
    """Return the page of an operation trace: no ledger, no steps, a dp x pp heat map."""
    return ReportData("trace-AR.parquet", pipeline_why(), created="2026-11-20")


def decode(coded: dict[str, Any]) -> np.ndarray:
    """Return the values of `encode`, as the page's script does; missing ones are NaN."""
    numbers: list[int] = []
    number, shift = 0, 0
    for byte in base64.b64decode(coded["data"]):
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append((number >> 1) ^ -(number & 1))
            number, shift = 0, 0
    codes = np.cumsum(np.array(numbers, dtype=np.int64))
    return np.where(codes > 0, (codes - 1 + coded["base"]) / coded["per"], np.nan)
