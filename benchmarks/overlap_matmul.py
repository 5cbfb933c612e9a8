"""Matmuls of two gloo ranks that hide their collective, on a link on which it takes as long as the matmul.

Claim: there the chosen form of an all-gather with its matmul, and of a matmul with its reduce-scatter, takes at most
0.75x plain (torch's collective, then or before the same matmul), and hides at least 55 % of the collective: overlap
efficiency 1 - (T - T_matmul) / (T_plain - T_matmul), which is Flux's measure. All forms take turns, behind a barrier
each; equal results are asserted first. Printed beside: the ideal (the longer of both) and what the papers report.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _link
import torch
import torch.distributed as dist

from headway.comm import ag_matmul, matmul_rs
from headway.comm.overlap.advise import OverlapTable, OverlapTimes, measure
from headway.cost.collectives import OVERLAPS, SYMM_MEM, read_shape

SHAPES = ("768x1024x1024", "rs:768x1024x1024")
RANKS = 2
NUMBER_BYTES = 4
CALIBRATIONS = 3
"""A rate is corrected so often until the collective takes as long as the matmul, within `WITHIN`."""
WITHIN = 0.1

PUBLISHED: dict[str, object] = {
    "Flux, communication hidden": "up to 96 %",
    "Flux, training, 128 GPUs": 1.24,
    "Flux, all-gather + matmul, 8 L20, ms": [16.946, 5.903],
    "Flux, matmul + reduce-scatter, 8 L20, ms": [17.664, 5.730],
    "MegaScale, MFU with tensor-parallel overlap, 256 GPUs, %": [53.3, 55.5],
}


def measured(shape: str, rate_mbit: float | None) -> OverlapTimes:
    """Return the times of a shape behind a link; this file measures in the namespace that it starts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "table.json"
        command = [sys.executable, __file__, "--measure", shape, str(out)]
        line = command if rate_mbit is None else _link.throttled(command, rate_mbit)
        subprocess.run(line, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        table: OverlapTable = measure([read_shape(shape)], out, ranks=RANKS)
    return table.rows[0]


def at_balance(shape: str) -> tuple[OverlapTimes, float]:
    """Return the times on a link on which the collective takes as long as its matmul, and its rate in Mbit/s."""
    read, alone = read_shape(shape), measured(shape, None)
    rate = read.travels * NUMBER_BYTES * 8 / alone.matmul_s / 1e6
    row = measured(shape, rate)
    for _ in range(CALIBRATIONS):
        ratio = row.collective_s / row.matmul_s
        if abs(ratio - 1) <= WITHIN:
            break
        rate *= ratio
        row = measured(shape, rate)
    return row, rate


def equal(store: str, rank: int) -> None:
    """Assert that all forms give what the plain ones do."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    x, w = torch.randn(96, 64), torch.randn(64, 48)
    for call in (ag_matmul, matmul_rs):
        plain = call(x, w, form="plain")
        for form in (name for name in OVERLAPS if name != SYMM_MEM):
            torch.testing.assert_close(call(x, w, form=form), plain, rtol=1e-5, atol=1e-5)
    dist.destroy_process_group()


def verdict(shape: str) -> dict[str, object]:
    """Return the ratios of a shape."""
    row, rate = at_balance(shape)
    plain, chosen = row.forms["plain"], row.forms[row.chosen]
    ratios = sorted(after / before for before, after in zip(plain, chosen, strict=True))
    plain_s, chosen_s = statistics.median(plain), statistics.median(chosen)
    return {
        "shape": shape, "rate_mbit": round(rate), "chosen": row.chosen, "matmul_s": row.matmul_s,
        "collective_s": row.collective_s, "plain_s": plain_s, "chosen_s": chosen_s, "ideal_s": row.ideal_s,
        "ratio": statistics.median(ratios), "ratio_range": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
        "efficiency": 1 - (chosen_s - row.matmul_s) / (plain_s - row.matmul_s),
        "forms_s": {form: statistics.median(seconds) for form, seconds in row.forms.items()},
    }  # fmt: skip


def main() -> None:
    """Measure both shapes and print the line."""
    if sys.argv[1:2] == ["--measure"]:
        measure([read_shape(sys.argv[2])], Path(sys.argv[3]), ranks=RANKS)
        return
    if sys.argv[1:2] == ["--equal"]:
        equal(sys.argv[2], int(sys.argv[3]))
        return
    if not _link.allowed():
        print("this host allows no network namespace with a token bucket: nothing to measure", file=sys.stderr)
        raise SystemExit(0)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--equal", str(Path(folder) / "store")]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
        assert [rank.wait() for rank in ranks] == [0] * RANKS, "the forms give unlike results"
    rows = [verdict(shape) for shape in SHAPES]
    met = all(float(str(row["ratio"])) <= 0.75 and float(str(row["efficiency"])) >= 0.55 for row in rows)
    answer = {
        "bench": "overlap_matmul", "baseline": f"torch {torch.__version__}, gloo: collective, matmul", "rows": rows,
        "claim": "<= 0.75 of plain, >= 55 % hidden", "met": met, "published": PUBLISHED,
    }  # fmt: skip
    print(json.dumps(answer))
    raise SystemExit(0 if met else 3)


if __name__ == "__main__":
    main()
