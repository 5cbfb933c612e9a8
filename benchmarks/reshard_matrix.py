"""Every layout that saves against every layout that loads, on worlds of 1, 2 and 4 ranks, stock DCP on either side.

Claim: 100 % come back bit for bit. Nine layouts (replicated, rows, columns, replicated DTensors, a square of both, a
hybrid, twice the same dimension, strided, flat uneven) of 19 tensors: 0-dim, without elements, tied, transposed, of
thirteen types. Saved by ours and by `dcp.save`, loaded by ours alone, by ours through an exchange, and by `dcp.load`.
By default a tenth of all combinations, with `--full` all 3 159.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zlib
from typing import Any

from tests.made.pool import RankPool
from tests.reshard_cases import LAYOUTS, run_matrix


def main() -> None:
    """Print one JSON line; names of what came back wrong go to stderr."""
    is_full, pool = "--full" in sys.argv, RankPool()

    def on_ranks(function: Any, world: int, *args: Any) -> list[Any]:
        return pool.run(function, world, *args, timeout_s=1800)

    def keep(name: str) -> bool:
        return is_full or zlib.crc32(name.encode()) % 10 == 0

    folder = tempfile.mkdtemp(prefix="headway-matrix-")
    try:
        count, wrong = run_matrix(on_ranks, folder, (1, 2, 4), keep)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in wrong:
        print(name, file=sys.stderr)
    result = {
        "bench": "reshard_matrix", "ratio": round(1 - len(wrong) / count, 4),
        "combinations": count, "layouts": len(LAYOUTS), "full": is_full, "baseline": "the whole tensors, byte by byte",
        "claim": "100 % bit-equal", "met": not wrong,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
