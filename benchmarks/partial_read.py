"""A part of a large tensor, read verified: what is hashed, and how fast it goes beside reading it unverified.

Claim: 1 MiB out of a tensor of 1 GiB hashes at most 1 MiB and two blocks, and restoring it runs at 0.8x the unverified
speed or better, in CPU time of the one thread that does it. Each round restores another megabyte, at a place that is
not aligned to a block, into the same memory, both ways in turns; the page cache is warm. What a reader without digests
per block would hash stands beside it: all of the record.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time

import torch

from headway.checkpoint import FlatShard, restore_into
from headway.checkpoint.layout.fetch import LocalFiles
from headway.checkpoint.layout.stored import open_stored
from headway.core.units import GIB, MIB
from headway.storage.digests import block_bytes_for
from tests.layouts_made import write

ROUNDS = 101
STEP_ELEMENTS = 9_876_543
"""From one round's place to the next one's: no multiple of a block."""


def main() -> None:
    """Print one JSON line: the ratio of speeds, and the bytes hashed beyond what was asked for."""
    torch.set_num_threads(1)
    elements, part = GIB // 4, MIB // 4
    folder = tempfile.mkdtemp(prefix="headway-partial-")
    try:
        saved = torch.arange(elements, dtype=torch.int32)
        place = write({"w": saved}, folder)
        image = place / "rank-0" / "__0_0.distcp"
        block_bytes = block_bytes_for(image.stat().st_size)
        times: dict[str, list[float]] = {"off": [], "read": []}
        cpu: dict[str, list[float]] = {"off": [], "read": []}
        extra, memory = [], torch.zeros(part, dtype=torch.int32)
        stored = open_stored(LocalFiles(place))
        for turn in range((5 if "--full" in sys.argv else 1) * ROUNDS):
            start = turn * STEP_ELEMENTS % (elements - part)
            for verify in ("off", "read") if turn % 2 else ("read", "off"):
                memory.zero_()
                begun, cpu_begun = time.perf_counter(), time.thread_time()
                report = restore_into(stored, {"w": FlatShard(memory, (elements,), start, start + part)}, verify=verify)
                times[verify].append(time.perf_counter() - begun)
                cpu[verify].append(time.thread_time() - cpu_begun)
                assert torch.equal(memory, saved[start : start + part])
                extra += [report.hashed_bytes - MIB] if verify == "read" else []
        stored.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    by_round = [off / read for off, read in zip(cpu["off"][1:], cpu["read"][1:], strict=True)]
    ratio, deciles = statistics.median(by_round), statistics.quantiles(by_round, n=10)
    wall = [off / read for off, read in zip(times["off"][1:], times["read"][1:], strict=True)]
    result = {
        "bench": "partial_read", "ratio": round(ratio, 3), "ratio_range": [round(deciles[0], 3), round(deciles[-1], 3)],
        "wall_ratio": round(statistics.median(wall), 3),
        "unverified_cpu_s": round(statistics.median(cpu["off"]), 6),
        "verified_cpu_s": round(statistics.median(cpu["read"]), 6),
        "asked_bytes": MIB, "hashed_beyond_bytes": max(extra), "block_bytes": block_bytes, "whole_record_bytes": GIB,
        "baseline": "the same restore with verify='off'",
        "claim": "hashes <= 1 MiB + 2 blocks, >= 0.8x unverified speed",
        "met": ratio >= 0.8 and 0 <= max(extra) <= 2 * block_bytes,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
