"""Explain a recorded run from Python, and ask what edits would do to its step time."""

import sys

from headway.ledger.answers.ledger import Ledger
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run

run = Run.open(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/runs/before")

ledger = Ledger.of(run)
assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns  # to the nanosecond
for bucket, amount_ns in ledger.ledger_ns.items():
    if ledger.fraction(bucket) > 0.05:
        print(f"{bucket:9} {amount_ns / 1e9:5.1f} device-seconds")

program = Program.from_run(run)
for edits in (["input=instant"], ["workers=2"], ["logging=buffered"], ["workers=2", "logging=buffered"]):
    print(f"{' '.join(edits):28} {program.predict(edits).speedup:.2f}x")
