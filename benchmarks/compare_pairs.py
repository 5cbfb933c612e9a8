"""Two runs of one job: is a difference called that is not there, and is a true one of a tenth found?

Claim: of 20 pairs of equal runs, one of them beside a process that takes a core, 0 are called faster or slower and 0
close the gate; of 20 pairs on a quiet host whose steps truly differ by a tenth, at least 18 are found. The job computes
for 20 ms a step on one core and waits for 5. Peer in the same runs: the ratio of the mean step times with a threshold
of 5 %, as a gate without an interval judges.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from _command import headway
from _other_load import spinning

ROUNDS = 10

JOB = """
import sys, time, torch
work, model = int(sys.argv[1]), torch.nn.Linear(8, 8)
optimizer, square = torch.optim.SGD(model.parameters(), 0.01), torch.ones(96, 96)
for _ in range(200):
    for _ in range(work):
        square = (square @ square).clamp(-1, 1)
    time.sleep(0.005)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

UNIT_MS = 20.0


def units() -> int:
    """Return how many products of the job take `UNIT_MS` here."""
    import time

    import torch

    torch.set_num_threads(1)
    square, began, done = torch.ones(96, 96), time.perf_counter(), 0
    while time.perf_counter() < began + 0.5:
        square = (square @ square).clamp(-1, 1)
        done += 1
    return max(10, round(done * UNIT_MS / 500))


def called(first: Path, second: Path) -> dict[str, Any]:
    """Compare two runs, and judge them as the peer does."""
    found = headway("compare", first, second, expect=(0, 3))
    return {"verdict": found["verdict"], "gate": found["exit_code"] == 3, "peer": abs(found["speedup"] - 1) > 0.05}


def main() -> int:
    """Record the runs in turn, compare every pair both ways, and print one JSON line."""
    work = units()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = folder / "train.py"
        script.write_text(JOB)

        def run(name: str, amount: int) -> Path:
            headway("run", "--quiet", "--windows", "0", "--out", folder / name, "--", script, amount)
            return folder / name

        unlike, changed = [], []
        for number in range(ROUNDS):
            plain = run(f"plain-{number}", work)
            with spinning(1.0 + number % 2):
                beside = run(f"beside-{number}", work)
            more = run(f"more-{number}", round(work * 1.125))  # a tenth of the step, of which a fifth is waiting
            unlike += [called(plain, beside), called(beside, plain)]
            changed += [called(plain, more), called(more, plain)]
    wrong = sum(pair["verdict"] in ("faster", "slower") or pair["gate"] for pair in unlike)
    found = sum(pair["verdict"] == ("slower", "faster")[number % 2] for number, pair in enumerate(changed))
    ok = wrong == 0 and found >= 18
    print(json.dumps({
        "bench": "compare_pairs", "equal_pairs": len(unlike), "called_wrongly": wrong,
        "verdicts": dict(Counter(pair["verdict"] for pair in unlike)),
        "peer_called_wrongly": sum(pair["peer"] for pair in unlike), "changed_pairs": len(changed), "found": found,
        "peer_found": sum(pair["peer"] for pair in changed), "gates_closed_by_a_tenth": sum(p["gate"] for p in changed),
        "peer": "the ratio of mean step times with a threshold of 5 %",
        "claim": "0 of 20 called, >= 18 of 20 found", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
