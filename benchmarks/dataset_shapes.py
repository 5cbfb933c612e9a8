"""Eleven datasets as people write them get `data.workers`, keep their losses to the digit, and win what was said.

Claim: for every shape of `jobs/dataset_shapes.py` (JPEG files by PIL, MNIST and ImageFolder of torchvision, named
tuples, zip, sqlite, HDF5 and lmdb opened by the first reading, a memory-mapped file, a tokenizer, a tar file)
`data.workers` is planned, applied and never given up, all losses equal the plain run's, and the measured speed-up lies
in the predicted interval for 8 of 10 shapes. Peer: the same script without headway.

Usage: `python benchmarks/dataset_shapes.py [SHAPE ...]`. A shape whose library is missing is listed as such.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _command import ROOT, headway
from jobs.dataset_shapes import SHAPES

SCRIPT = ROOT / "benchmarks" / "jobs" / "dataset_shapes.py"
NEEDS = {"mnist": "torchvision", "imagefolder": "torchvision", "h5py": "h5py", "lmdb": "lmdb"}
NEEDS |= {"tokenizers": "tokenizers"}


def losses(text: str) -> list[str]:
    """Return the lines of a job's output that are losses."""
    return [line for line in text.splitlines() if line[:1].isdigit()]


def row(shape: str, folder: Path) -> dict[str, object]:
    """Run a shape plainly, recorded, and with the plan; return its figures."""
    if find_spec(NEEDS.get(shape, "json")) is None:
        return {"missing": NEEDS[shape]}
    arguments = [str(SCRIPT), shape, str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300)
    if plain.returncode:
        return {"failed": plain.stderr.splitlines()[-1][:200]}
    runs = folder / f"{shape}-runs"
    headway("run", "--out", runs / "before", "--", *arguments)
    plan = headway("plan", runs / "before")
    found: dict[str, object] = {"planned": plan["chosen"]}
    if "data.workers" not in plan["chosen"]:
        return found | {"why": [entry["reason"] for entry in plan["refused"] if entry["name"] == "data.workers"]}
    headway("run", "--out", runs / "after", "--apply", runs / "before", "--", *arguments)
    texts = [(runs / name / "logs" / "r0.out").read_text() for name in ("before", "after")]
    remedies = json.loads((runs / "after" / "applied" / "r0.json").read_text())["remedies"]
    facts = [remedy["facts"] for remedy in remedies if remedy["name"] == "data.workers" and remedy["applied"]]
    lost = [fact for fact in facts if "withdrawn" in fact or "reason_not_applied" in str(fact["loaders"])]
    compared = headway("compare", runs / "before", runs / "after", expect=(0, 3))
    low, high = plan["interval"]
    return found | {
        "equal": losses(texts[0]) == losses(texts[1]) == losses(plain.stdout) != [],
        "in_force": bool(facts and not lost),
        "predicted": round(plan["predicted_speedup"], 2), "interval": [round(low, 2), round(high, 2)],
        "measured": round(compared["speedup"], 2), "inside": low <= compared["speedup"] <= high,
    }  # fmt: skip


def main() -> int:
    """Run the shapes; print one JSON line."""
    shapes = [name for name in sys.argv[1:] if not name.startswith("-")] or list(SHAPES)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = {shape: row(shape, Path(folder)) for shape in shapes}
    ran = {shape: row for shape, row in rows.items() if "missing" not in row}
    good = [shape for shape, row in ran.items() if row.get("equal") and row.get("in_force")]
    inside = [shape for shape, row in ran.items() if row.get("inside")]
    met = len(good) == len(ran) > 0 and len(inside) >= 0.8 * len(ran)
    print(json.dumps({
        "bench": "dataset_shapes", "shapes": len(ran), "applied_and_equal": len(good), "inside_interval": len(inside),
        "rows": rows, "seconds": round(time.monotonic() - began), "baseline": "the script without headway",
        "claim": "all applied and equal, 80 % inside the predicted interval", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
